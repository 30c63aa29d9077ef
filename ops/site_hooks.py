"""What MkDocs is told beside mkdocs.yml: pages from the root, the reference of the library, links that leave ops/docs,
GitHub's anchors, and no other host.

Pages are written for whoever reads the repository, where a link may lead to a file of the code. On the site there is no
such file: the link becomes its text and the path. Links to README lead to the index.
"""

import ast
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

ROOT = Path(__file__).resolve().parents[1]
DOCS = "ops/docs"
OF_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
MOVED = {"README.md": "index.md", **{name: name for name in OF_THE_ROOT}}

_FENCE = re.compile(r"(^ *```.*?^ *```$)", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CELL_CODE = re.compile(r"`[^`\n]*\\\|[^`\n]*`")
_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_LOADED = re.compile(r"<(?:script|img|iframe)[^>]*\ssrc=[\"']?(?:https?:)?//|<link[^>]*\shref=[\"']?(?:https?:)?//")


def on_config(config: Any) -> Any:
    """GitHub's anchors, and a section of the navigation with each decision by its title."""
    config["mdx_configs"]["toc"]["slugify"] = slugify(case="lower")
    decisions = sorted((ROOT / DOCS / "adr").glob("*.md"))
    config["nav"].append({"Decisions": [{_title(path): f"adr/{path.name}"} for path in decisions]})
    return config


def on_files(files: Files, config: Any) -> Files:
    """The pages of ops/docs, and those that lie at the root."""
    for name in OF_THE_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def _reference() -> str:
    """What `import lorica` offers, a heading for each name: mkdocstrings fills in docstrings, and imports nothing."""
    tree = ast.parse((ROOT / "ops/lorica/__init__.py").read_text(encoding="utf-8"))
    (where,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.AnnAssign) and node.value and ast.unparse(node.target) == "_WHERE"
    )
    parts = ["# `import lorica`", "::: lorica\n    options:\n      members: false"]
    for name, origin in where.items():
        module, _, inside = origin.partition(":")
        parts.append(f"## `lorica.{name}`\n\n::: {module}{'.' + inside if inside else ''}")
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """The page with links that lead somewhere on the site, and nothing that is drawn by a script of another host."""
    source = page.file.src_uri
    folder = posixpath.dirname(source if source in OF_THE_ROOT else f"{DOCS}/{source}")
    parts = _FENCE.split(markdown)
    for index, part in enumerate(parts):
        if part.lstrip(" ").startswith("```"):
            parts[index] = part.replace("```mermaid", "```text", 1)
        else:
            text = _CELL_CODE.sub(lambda match: match[0].replace(r"\|", "|"), part)
            parts[index] = _LINK.sub(lambda match: _link(match[1], match[2], folder, posixpath.dirname(source)), text)
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """Raises PluginError for a page that loads something from another host."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        if found := _LOADED.search(path.read_text(encoding="utf-8")):
            raise PluginError(f"{path} loads something from another host: {found[0]}")


def _link(text: str, target: str, folder: str, here: str) -> str:
    if "://" in target or target.startswith("#"):
        return f"[{text}]({target})"
    path, mark, anchor = target.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    if path.startswith(f"{DOCS}/"):
        path = path.removeprefix(f"{DOCS}/")
    elif path in MOVED:
        path = MOVED[path]
    else:
        return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
    return f"[{text}]({posixpath.relpath(path, here or '.')}{mark}{anchor})"


def _title(path: Path) -> str:
    found = _TITLE.search(path.read_text(encoding="utf-8"))
    return found[1].removeprefix("ADR ") if found else path.stem
