"""A task of one's own: found by its entry point, run where policy and digest allow it, and never on the coordinator's
word."""

import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lorica.simulation.run import silos_in, simulate
from lorica_security.errors import ConfigurationError, DataError, LoricaError, PolicyRefusal
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.policy.plan_limits import task_refusals
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.settings import Settings
from silo_agent.training.data.schema import Schema
from silo_agent.training.tasks.installed import InstalledTask, installed_tasks
from silo_agent.training.tasks.named import task_named, task_of
from silo_agent.training.tasks.text_task import TextTask
from silo_wire.plans.sections.task import TaskSection
from tests.support.coordinator_edges import make_plan

SOURCE = """
from lorica import TextTask

def coverage(answer, target):
    found, wanted = set(answer.split()), set(target.split())
    return len(found & wanted) / len(wanted)

def length(answer, target):
    return min(len(answer), len(target)) / max(len(answer), len(target), 1)

TASK = TextTask(
    name="ward-notes",
    scores={"coverage": coverage, "length": length},
    input=lambda line: "sum up: " + line["note"],
    target=lambda line: line["short"],
    keys=frozenset({"note"}),
    label="short",
)
"""


@dataclass(frozen=True)
class Package:
    """`ward_notes`, as pip leaves it."""

    site: Path

    def write(self, source: str = SOURCE, *, name: str = "ward-notes", module: str = "ward_notes") -> None:
        folder = self.site / module
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text(source.replace("ward-notes", name))
        (folder / "data.json").write_text("{}")
        about = self.site / f"{module}-1.2.0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.2.0\n")
        (about / "entry_points.txt").write_text(f"[lorica.tasks]\n{name} = {module}:TASK\n")

    def enter(self, value: str) -> None:
        """Another object under the same name."""
        (self.site / "ward_notes-1.2.0.dist-info" / "entry_points.txt").write_text(
            f"[lorica.tasks]\nward-notes = {value}\n"
        )

    @property
    def section(self) -> TaskSection:
        (found,) = installed_tasks()
        assert isinstance(found, InstalledTask), found
        return TaskSection(kind=found.name, version=found.version, digest=found.digest, score="coverage")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Package]:
    made = Package(tmp_path / "site")
    made.site.mkdir()
    made.write()
    monkeypatch.syspath_prepend(str(made.site))
    yield made
    sys.modules.pop("ward_notes", None)


def test_it_is_found_and_its_code_not_run_for_that(package: Package) -> None:
    (found,) = installed_tasks()
    assert isinstance(found, InstalledTask)
    assert (found.name, found.version, len(found.digest)) == ("ward-notes", "1.2.0", 64)
    assert "ward_notes" not in sys.modules
    task = task_named("ward-notes")
    assert task.metrics == ("coverage", "length")
    assert task_of(package.section.model_copy(update={"score": "length"})).metrics == ("length", "coverage")


@pytest.mark.parametrize("change", ["code", "data", "new file", "name of a file"])
def test_other_code_is_another_digest_and_is_not_run(package: Package, change: str) -> None:
    planned = package.section
    folder = package.site / "ward_notes"
    if change == "code":
        (folder / "__init__.py").write_text(SOURCE + "\nraise SystemExit('it ran')\n")
    elif change == "data":
        (folder / "data.json").write_text("[]")
    elif change == "new file":
        (folder / "more.py").write_text("")
    else:
        (folder / "data.json").rename(folder / "date.json")
    with pytest.raises(PolicyRefusal, match=r"ward-notes 1\.2\.0 with digest .* and installed is 1.2.0 with"):
        task_of(planned)
    assert "ward_notes" not in sys.modules


@pytest.mark.parametrize("entry", ["ward_notes:OTHER", "ward_notes.other:TASK"])
def test_another_object_of_the_same_code_is_another_digest(package: Package, entry: str) -> None:
    before = package.section.digest
    package.write(SOURCE + "\nOTHER = TASK\n")
    (package.site / "ward_notes" / "other.py").write_text("from ward_notes import TASK\n")
    whole = package.section.digest
    package.enter(entry)
    assert len({before, whole, package.section.digest}) == 3


def test_what_moves_from_a_file_to_the_next_is_another_digest(package: Package) -> None:
    """Names and contents are told apart by their lengths."""
    folder, seen = package.site / "ward_notes", set()
    for first, second in (("ab", "c"), ("a", "bc"), ("abc", "")):
        (folder / "x.txt").write_text(first)
        (folder / "y.txt").write_text(second)
        seen.add(package.section.digest)
    (folder / "x.txt").unlink()
    (folder / "xa.txt").write_text("")
    seen.add(package.section.digest)
    assert len(seen) == 4


def test_another_version_of_the_same_code_is_not_as_planned(package: Package) -> None:
    planned = package.section.model_copy(update={"version": "9.9.9"})
    with pytest.raises(PolicyRefusal, match=r"ward-notes 9\.9\.9 with digest .* and installed is 1\.2\.0 with"):
        task_of(planned)


@pytest.mark.parametrize("layout", ["link to a folder", "link to a file", "module in a cache", "below a cache"])
def test_code_is_covered_wherever_it_lies_or_refused(package: Package, tmp_path: Path, layout: str) -> None:
    folder, elsewhere = package.site / "ward_notes", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "more.py").write_text("A = 1\n")
    before = package.section.digest
    if layout == "link to a folder":
        (folder / "sub").symlink_to(elsewhere)
    elif layout == "link to a file":
        (folder / "more.py").symlink_to(elsewhere / "more.py")
    elif layout == "module in a cache":
        (folder / "__pycache__").mkdir()
        (folder / "__pycache__" / "more.py").write_text("A = 1\n")
        assert package.section.digest != before
        return
    else:
        (folder / "__pycache__" / "deep").mkdir(parents=True)
        (folder / "__pycache__" / "deep" / "more.pyc").write_text("A = 1\n")
        assert package.section.digest != before
        return
    (error,) = installed_tasks()
    assert isinstance(error, DataError)
    assert "is a link: install the package as files" in str(error)


def test_a_site_below_a_folder_of_any_name_is_covered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(tmp_path / "__pycache__" / "site")
    package.site.mkdir(parents=True)
    package.write()
    monkeypatch.syspath_prepend(str(package.site))
    before = package.section.digest
    package.write(SOURCE + "\n")
    assert package.section.digest != before


@pytest.mark.parametrize("entry", ["sys:TASK", "none_such:TASK", "", ":TASK", "__main__:TASK"])
def test_what_is_no_package_of_files_is_named_beside_the_others(package: Package, entry: str) -> None:
    package.enter(entry)
    other = Package(package.site.parent / "second")
    other.site.mkdir()
    other.write(name="other-notes", module="other_notes")
    sys.path.insert(0, str(other.site))
    try:
        found = list(installed_tasks())
    finally:
        sys.path.remove(str(other.site))
        sys.modules.pop("other_notes", None)
    assert [isinstance(one, DataError) for one in found] == [False, True], "other-notes comes first, and is there"
    assert "'ward-notes'" in str(found[1])


def test_a_package_in_an_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = Package(tmp_path / "site")
    package.site.mkdir()
    package.write()
    shutil.make_archive(str(tmp_path / "packed"), "zip", package.site)
    monkeypatch.syspath_prepend(str(tmp_path / "packed.zip"))
    (error,) = installed_tasks()
    assert isinstance(error, DataError)
    assert "is not a folder of files" in str(error)


def test_a_large_package_is_refused_before_it_is_read(package: Package) -> None:
    with (package.site / "ward_notes" / "weights.bin").open("wb") as file:
        file.truncate(65 << 20)
    (error,) = installed_tasks()
    assert isinstance(error, DataError)
    assert "has more than 67,108,864 bytes" in str(error)


def test_two_packages_of_one_name_are_refused(package: Package, tmp_path: Path) -> None:
    other = Package(tmp_path / "second")
    other.site.mkdir()
    other.write(module="other_notes")
    sys.path.append(str(other.site))
    try:
        with pytest.raises(DataError, match="is installed 2 times: remove all but one"):
            task_named("ward-notes")
    finally:
        sys.path.remove(str(other.site))


@pytest.mark.parametrize("score", ["F1@5", "questions", "", "x" * 41])
def test_scores_have_names_that_can_be_kept_and_shown(package: Package, score: str) -> None:
    package.write(SOURCE.replace('"coverage": coverage', f'"coverage": coverage, "{score}": coverage'))
    with pytest.raises(DataError, match="has a score"):
        task_named("ward-notes")


def test_without_labels_nothing_sees_them(package: Package, tmp_path: Path) -> None:
    package.write(SOURCE.replace('"sum up: " + line["note"]', '"sum up: " + line["note"] + str(line.get("short"))'))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text(json.dumps({"id": "1", "note": "a", "short": "secret"}) + "\n")
    (one,) = task_named("ward-notes").data(tmp_path / "data", labelled=False).train
    assert one.question == "sum up: aNone"


def test_an_answer_is_cut_before_any_score_sees_it(package: Package) -> None:
    package.write(SOURCE.replace("return len(found & wanted) / len(wanted)", "return len(answer) / 8192"))
    assert task_named("ward-notes").right("x" * 100_000, "y", Schema("text", "", ()))[0] == 1.0


def test_compiled_modules_are_no_part_of_it(package: Package) -> None:
    planned = package.section
    (package.site / "ward_notes" / "__pycache__").mkdir()
    (package.site / "ward_notes" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert package.section == planned


def test_what_is_not_installed_is_named(package: Package) -> None:
    with pytest.raises(DataError, match="'other' is installed 0 times: install its package"):
        task_of(package.section.model_copy(update={"kind": "other"}))
    with pytest.raises(DataError, match=r"has no score 'rouge_l': .* coverage, length"):
        task_of(package.section.model_copy(update={"score": "rouge_l"}))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("TASK = 5", "is no lorica.TextTask of name 'ward-notes'"),
        (SOURCE.replace('name="ward-notes"', 'name="sql"'), "is no lorica.TextTask of name 'ward-notes'"),
        (SOURCE + "\n1 / 0\n", "cannot be loaded .ZeroDivisionError"),
        (SOURCE.replace("TASK =", "OTHER ="), "cannot be loaded .AttributeError"),
    ],
)
def test_an_entry_point_that_is_no_task_is_named(package: Package, source: str, said: str) -> None:
    package.write(source)
    with pytest.raises(DataError, match=said):
        task_named("ward-notes")


@pytest.mark.parametrize("score", ["2.0", "-0.1", "float('nan')", "None", "1 / 0", "answer"])
def test_a_score_that_is_none_is_refused_and_says_nothing_of_the_answer(package: Package, score: str) -> None:
    package.write(SOURCE.replace("return len(found & wanted) / len(wanted)", f"return {score}"))
    task = task_named("ward-notes")
    with pytest.raises(DataError, match="score 'coverage' of task 'ward-notes'") as error:
        task.right("secret words", "secret target", None)  # type: ignore[arg-type]
    assert "secret" not in str(error.value)


def test_a_line_that_its_code_stumbles_over_is_a_bad_line(package: Package, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    good = {"id": "a", "note": "fever in leeds", "short": "fever"}
    for split in ("train", "dev"):
        bad = [{"id": f"{split}-b", "note": 5, "short": "x"}, {"id": f"{split}-c", "short": "x"}]
        lines = [{**good, "id": split}, *bad]
        (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(DataError, match="makes no input: TypeError"):
        task_named("ward-notes").data(folder)


# --- policy and plan


def test_a_silo_runs_only_what_its_policy_names(package: Package, tmp_path: Path) -> None:
    (refusal,) = task_refusals(PolicyRules(), package.section)
    assert "which Lorica does not bring, and [policy] tasks of this silo is []" in str(refusal)
    assert list(task_refusals(PolicyRules(tasks=["ward-notes"]), package.section)) == []
    assert list(task_refusals(PolicyRules(), TaskSection())) == []
    bundle = make_plan(tmp_path, overrides=overrides(package))
    rules = [refusal.rule for refusal in SiloPolicy(PolicyRules(), SiloName("ward")).objections(bundle)]
    assert rules == ["tasks"]


def test_whoever_reads_the_data_runs_no_code_that_the_policy_does_not_name(package: Package, tmp_path: Path) -> None:
    """`silo-agent check` reads them as an offered plan has it, whatever else it finds wrong with that plan."""
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "dev"):
        (folder / f"{split}.jsonl").write_text(json.dumps({"id": split, "note": "a", "short": "b"}) + "\n")
    bundle = make_plan(tmp_path, overrides=overrides(package))
    for tasks in ([], ["ward-notes"]):
        settings = Settings.model_validate({"data": {"folder": str(folder)}, "policy": {"tasks": tasks}})
        sources = SiloSources(settings, tmp_path / "scratch")
        reading = Reading.of(bundle.plan, SiloName("ward"))
        if tasks:
            assert sources.data_for(reading).train[0].query == "b"
            continue
        with pytest.raises(PolicyRefusal, match=r"\[policy\] tasks of this silo is \[\]"):
            sources.data_for(reading)
        with pytest.raises(DataError):
            sources.data()
        assert "ward_notes" not in sys.modules


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ({"kind": "ward-notes"}, "add the version and the digest"),
        ({"kind": "ward-notes", "version": "1"}, "add the version and the digest"),
        ({"kind": "sql", "version": "1"}, "are of tasks that Lorica does not bring"),
        ({"kind": "text-to-text", "digest": "a" * 64}, "are of tasks that Lorica does not bring"),
        ({"kind": "text-to-text", "score": "coverage"}, "is unknown: use exact_match"),
        ({"kind": "../x", "version": "1", "digest": "a" * 64}, "kind"),
    ],
)
def test_a_plan_names_it_whole(tmp_path: Path, task: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make_plan(tmp_path, overrides={f"task.{key}": value for key, value in task.items()})


def overrides(package: Package) -> dict[str, Any]:
    return {
        **{f"task.{key}": value for key, value in package.section.model_dump().items()},
        "schedule.rounds": 1,
        "schedule.min_silos": 2,
        "evaluation.every": 1,
        "training.max_output_tokens": 8,
        "aggregation.weighting": "equal",
    }


def test_nobody_trains_for_it_where_no_policy_names_it_and_its_code_is_not_run(
    package: Package, tmp_path: Path
) -> None:
    """Where one does: tests/end_to_end/test_own_task.py."""
    for name in ("clinic", "ward"):
        folder = tmp_path / "silos" / name
        folder.mkdir(parents=True)
        for split in ("train", "dev"):
            lines = [{"id": f"{split}{n}", "note": f"note {n}", "short": f"n {n}"} for n in range(4)]
            (folder / f"{split}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    make_plan(tmp_path, overrides=overrides(package))
    with pytest.raises(LoricaError, match=r"\[policy\] tasks of this silo"):
        simulate(tmp_path / "plans" / "first", silos_in(tmp_path / "silos"), tmp_path / "out", device="cpu", threads=1)
    assert "ward_notes" not in sys.modules


def test_the_pages_example_is_a_task(package: Package) -> None:
    page = (Path(__file__).resolve().parents[2] / "ops" / "docs" / "tasks.md").read_text()
    code, _ = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (about,) = re.findall(r"```ini\n(.*?)```", page, re.DOTALL)
    assert tomllib.loads(about)["project"]["entry-points"]["lorica.tasks"] == {"ward-notes": "ward_notes:TASK"}
    package.write(code)
    task = task_of(package.section)
    assert task.right("fever and cough", "fever seen", Schema("text", "", ())) == (0.5,)


def test_the_command_prints_what_a_plan_needs(package: Package, tmp_path: Path) -> None:
    from silo_agent.cli import app

    runner = CliRunner()
    told = runner.invoke(app, ["tasks", "--dir", str(tmp_path / "silo"), "--json"])
    assert json.loads(told.stdout) == [
        {"task": "ward-notes", "version": "1.2.0", "digest": package.section.digest, "allowed": False}
    ]
    settings = tmp_path / "silo" / "silo.toml"
    shown = " ".join(runner.invoke(app, ["tasks", "--dir", str(tmp_path / "silo")]).stdout.split())
    told, _, line = shown.partition("silo.toml: ")
    assert "to train for ward-notes, put this line under [policy] of" in told
    settings.parent.mkdir(mode=0o700, exist_ok=True)
    settings.write_text(f"[policy]\n{line}\n")
    assert "to train for" not in runner.invoke(app, ["tasks", "--dir", str(tmp_path / "silo")]).stdout
    told = runner.invoke(app, ["tasks", "--dir", str(tmp_path / "silo"), "--json"])
    assert [task["allowed"] for task in json.loads(told.stdout)] == [True]


def test_the_pages_example_of_a_loss_over_a_part_counts_the_answer() -> None:
    page = (Path(__file__).parents[2] / "ops/docs/tasks.md").read_text()
    _, code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    named: dict[str, Any] = {"TextTask": TextTask}
    exec(code.replace("    ...,\n", '    name="ward-notes", scores={"any": lambda answer, target: 1.0},\n'), named)
    line = {"reasons": "two => and two", "answer": "four"}
    target = named["TASK"].target(line)
    ((begin, end),) = named["TASK"].counted(line, target)
    assert target[begin:end] == "four"
