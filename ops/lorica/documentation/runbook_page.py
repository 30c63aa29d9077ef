"""The runbook as the coordinator serves it beside its status page: one file of HTML, made of ops/docs/runbook.md.

Hospitals have no internet. The page has no script and loads nothing but the status page's own style sheet. Links within
the runbook lead there; a link to another page becomes its text and where that page lies in the repository, since none
but this one is served. Raises ValueError for Markdown that the runbook did not have when this was written, rather than
show it wrongly.
"""

import html
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lorica.documentation.markdown import DOCS

SOURCE: Final = DOCS / "runbook.md"
TARGET: Final = DOCS.parents[1] / "coordinator/lorica_coordinator/edges/status_page/static/runbook.html"

_CODE: Final = re.compile(r"(`[^`]+`)")
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_STRONG: Final = re.compile(r"\*\*([^*]+)\*\*")
_HEADING: Final = re.compile(r"(#{1,3}) (.+)")
_STRANGE: Final = re.compile(r"^(```|!\[|<|> )|^ {4}")
_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Runbook</title>
<link rel="icon" href="/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="/page.css">
</head>
<body class="runbook">
<header><p><a href="/">Back to the status page</a></p></header>
<main>
"""


def runbook_html() -> str:
    return _HEAD + "\n".join(_blocks(SOURCE.read_text(encoding="utf-8"))) + "\n</main>\n</body>\n</html>\n"


def write_runbook(target: Path = TARGET) -> bool:
    """Bring the file up to date; whether it changed."""
    made = runbook_html()
    if target.is_file() and target.read_text(encoding="utf-8") == made:
        return False
    target.write_text(made, encoding="utf-8")
    return True


def anchor_of(heading: str) -> str:
    """As GitHub and the site have it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _blocks(text: str) -> Iterator[str]:
    for block in re.split(r"\n{2,}", text.strip()):
        lines = block.split("\n")
        if strange := next((line for line in lines if _STRANGE.match(line)), None):
            raise ValueError(f"{SOURCE}: {strange!r} is Markdown that the served runbook cannot show: write it plainly")
        if heading := _HEADING.fullmatch(block):
            level = len(heading[1])
            yield f'<h{level} id="{anchor_of(heading[2])}">{_inline(heading[2])}</h{level}>'
        elif lines[0].startswith("|"):
            yield _table(lines)
        elif re.match(r"(\d+\.|[-*]) ", lines[0]):
            yield _list(lines)
        else:
            yield f"<p>{_inline(' '.join(lines))}</p>"


def _table(lines: list[str]) -> str:
    head, _, *rows = ([cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines)
    parts = []
    if any(head):
        parts.append(
            "<thead><tr>" + "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in head) + "</tr></thead>"
        )
    body = (
        f'<tr><th scope="row">{_inline(first)}</th>' + "".join(f"<td>{_inline(cell)}</td>" for cell in rest) + "</tr>"
        for first, *rest in rows
    )
    return "<table>\n" + "\n".join([*parts, "<tbody>", *body, "</tbody>"]) + "\n</table>"


def _list(lines: list[str]) -> str:
    items: list[str] = []
    for line in lines:
        if begins := re.match(r"(\d+\.|[-*]) (.*)", line):
            items.append(begins[2])
        else:
            items[-1] += f" {line.strip()}"
    kind = "ol" if lines[0][0].isdigit() else "ul"
    return f"<{kind}>\n" + "\n".join(f"<li>{_inline(item)}</li>" for item in items) + f"\n</{kind}>"


def _inline(text: str) -> str:
    parts = _CODE.split(text)
    return "".join(
        f"<code>{html.escape(part[1:-1])}</code>" if _CODE.fullmatch(part) else _words(part) for part in parts
    )


def _words(text: str) -> str:
    return _STRONG.sub(r"<strong>\1</strong>", _LINK.sub(_link, html.escape(text, quote=False)))


def _link(match: re.Match[str]) -> str:
    words, where = match[1], match[2]
    if where.startswith("#"):
        return f'<a href="{html.escape(where)}">{words}</a>'
    path = posixpath.normpath(posixpath.join("ops/docs", where.partition("#")[0]))
    return f"{words} ({html.escape(path)})"
