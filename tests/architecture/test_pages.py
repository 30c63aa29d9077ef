"""How pages are written: width, the README's promises, places that exist, metadata, and the site's navigation."""

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import lorica
from tests.support.deployment_tools import tool

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "ops" / "docs"
PAGES = sorted(
    [*ROOT.glob("*.md"), *(ROOT / ".github").rglob("*.md"), *DOCS.rglob("*.md")], key=lambda page: page.parts
)
WIDTH = 120
LARGEST_README = 7 * 1024
PROMISES = 5
HOSTS = {
    "127.0.0.1",
    "HOST",
    "aclanthology.org",
    "download.pytorch.org",
    "github.com",
    "keepachangelog.com",
    "mlflow.example.org",
    "pypi.org",
    "s3.example.org",
    "semver.org",
    "YOUR-WIKI",
}
"""Whom a page may name. None of them has Lorica: there is no published address yet."""
OURS = re.compile(r"(github\.com|gitlab\.com|pypi\.org/project|readthedocs\.io|ghcr\.io|docker\.io)/[\w-]*lorica", re.I)
FROM_AN_INDEX = re.compile(r"pip3? install (?:-\S+ )*['\"]?lorica\b")
FENCE = re.compile(r"^ *```.*?^ *```$", re.DOTALL | re.MULTILINE)
TARGET = re.compile(r"\]\(([^)\s]+)\)")
PATHS = re.compile(r"(?<![\w/.-])((?:coordinator|silo_agent|proto|security|ops|tests)/[\w./-]*\w/?)")


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def tracked() -> Iterator[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    yield from (path for name in listed.split("\0") if name and (path := ROOT / name).is_file())


# --- width


def too_wide(text: str) -> list[str]:
    """Lines of prose above 120 characters: tables, fences, pictures and the targets of links do not count."""
    return [
        line
        for line in FENCE.sub("", text).splitlines()
        if not line.lstrip().startswith(("|", "![", "<")) and len(TARGET.sub("]", line)) > WIDTH
    ]


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_line_of_prose_is_too_wide(page: Path) -> None:
    assert too_wide(page.read_text(encoding="utf-8")) == []


def test_a_line_is_measured_without_what_a_reader_does_not_see() -> None:
    words = "word " * 24
    assert (
        too_wide(
            f"{words}\n```\n{words * 2}\n```\n| {words * 2} |\n[{'x' * 100}](ops/docs/a-long-name.md#and-an-anchor)\n"
        )
        == []
    )
    assert too_wide(f"- {words}and more\n") == [f"- {words}and more"]


# --- the README


def test_the_readme_is_short_and_begins_with_promises_and_their_proofs() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= LARGEST_README
    promises = [line for line in text.splitlines()[:10] if line.startswith("- ")]
    assert len(promises) == PROMISES
    for line in promises:
        (target,) = TARGET.findall(line)
        proof = ROOT / target.partition("#")[0]
        assert proof.is_relative_to(ROOT / "tests"), line
        assert re.search(r"^(async )?def test_", proof.read_text(encoding="utf-8"), re.MULTILINE), line


# --- places


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_no_page_names_a_host_that_is_not_known(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://([\w.-]+\w)", text)) <= HOSTS


def test_nothing_names_a_place_of_ours_that_does_not_exist() -> None:
    found = [
        f"{named(path)}: {match[0]}"
        for path in tracked()
        if path.suffix in {".md", ".py", ".toml", ".yml", ".yaml", ".in", ".j2", ".service", ""}
        for pattern in (OURS, FROM_AN_INDEX)
        for match in pattern.finditer(path.read_text(encoding="utf-8", errors="replace"))
    ]
    assert found == []


def test_such_a_place_would_be_found() -> None:
    assert FROM_AN_INDEX.search("$ pip install 'lor" + "ica[import]'")
    assert FROM_AN_INDEX.search("pip install -U lor" + "ica")
    assert not FROM_AN_INDEX.search("pip install dist/lorica-0.1.0-py3-none-any.whl")
    assert OURS.search("git clone https://github.com/" + "lorica/lorica")


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md" and "0001" not in page.name], ids=named
)
def test_every_path_of_the_repository_on_the_page_exists(page: Path) -> None:
    text = TARGET.sub("", page.read_text(encoding="utf-8"))
    for path in PATHS.findall(text):
        assert (ROOT / path).exists(), path


# --- the site


def test_the_navigation_has_each_page_once() -> None:
    site = yaml.safe_load((ROOT / "ops/mkdocs.yml").read_text(encoding="utf-8"))
    decisions = {f"adr/{page.name}" for page in (DOCS / "adr").glob("*.md")}  # site_hooks.py adds them
    made = {"CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "reference.md"}  # of the root, and of docstrings
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(leaves_of(site["nav"])) == sorted((pages - decisions) | made)


def leaves_of(part: Any) -> Iterator[str]:
    if isinstance(part, str):
        yield part
    else:
        for inner in part.values() if isinstance(part, dict) else part:
            yield from leaves_of(inner)


BROKEN = {
    "[there](nowhere.md)": "nowhere.md",
    "[there](audit.md#not-there)": "not-there",
    '<img src="https://example.org/x.png">': "another host",
}


def built_site(root: Path, *lines: str) -> "subprocess.CompletedProcess[str]":
    """The site of a copy of the pages, with `lines` at the end of one of them."""
    mkdocs = Path(f"{sys.prefix}-site/bin/mkdocs")
    if not mkdocs.exists():
        pytest.skip("mkdocs is not here: make site")
    shutil.copytree(DOCS, root / "ops" / "docs")
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "ops/mkdocs.yml", "ops/site_hooks.py"):
        shutil.copy(ROOT / name, root / name)
    for package in ("ops/lorica", "proto", "security", "coordinator", "silo_agent"):
        (root / package).symlink_to(ROOT / package)
    with (root / "ops" / "docs" / "terminal.md").open("a", encoding="utf-8") as page:
        page.writelines(f"\n{line}\n" for line in lines)
    command = [mkdocs, "build", "--config-file", root / "ops" / "mkdocs.yml"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_site_has_all_pages_and_each_name_of_the_library(tmp_path: Path) -> None:
    done = built_site(tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").is_file()
    reference = (tmp_path / "site" / "reference.html").read_text(encoding="utf-8")
    assert all(f"<code>lorica.{name}</code>" in reference for name in lorica.__all__)
    assert "Run the plan in <code>plan_folder</code> to its end" in reference, "docstrings are there"


@pytest.mark.slow
def test_a_link_that_leads_nowhere_and_a_picture_of_another_host_stop_the_site(tmp_path: Path) -> None:
    done = built_site(tmp_path, *BROKEN)
    assert done.returncode != 0
    assert all(said in done.stdout + done.stderr for said in BROKEN.values())


# --- metadata


def project() -> dict[str, Any]:
    values: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return values


def test_what_is_not_installed_is_asked_for_by_extras_that_the_wheel_has() -> None:
    extras = project()["optional-dependencies"]
    code = [path for path in tracked() if path.suffix == ".py" and not path.is_relative_to(ROOT / "tests")]
    named_here = {
        extra
        for path in code
        for group in re.findall(r"Lorica's wheel with \[([\w,]+)\]", path.read_text(encoding="utf-8"))
        for extra in group.split(",")
    }
    assert named_here
    assert named_here <= set(extras)


def test_the_project_names_no_address_until_there_is_one() -> None:
    assert "urls" not in project()
    assert "Private :: Do Not Upload" in project()["classifiers"]


def test_every_hook_is_local_and_its_program_is_what_make_install_brings() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
    for hook in hooks["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        for program in re.findall(r"\.venv/bin/([\w-]+)", hook["entry"]):
            assert program in {"python", "ruff", "mypy", "lint-imports"}, hook["id"]


def test_the_workflow_runs_what_ci_runs_with_actions_of_one_version() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    used = [step["uses"] for step in job["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w./-]+@v\d+\.\d+\.\d+", one) for one in used)


def test_the_workflow_is_one_that_github_takes() -> None:
    command = [
        tool("check-jsonschema"),
        "--builtin-schema",
        "vendor.github-workflows",
        ROOT / ".github/workflows/ci.yml",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
