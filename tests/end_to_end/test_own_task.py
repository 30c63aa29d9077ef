"""Two silos train for a task of their own people: real processes, mutual TLS, the package on their disks alone."""

import json
from collections.abc import Iterator

import pytest

from lorica.demo.plan import set_arguments
from lorica.demo.processes import Processes
from tests.support.federation import Federation
from tests.unit.test_installed_tasks import Package

SILOS = ("clinic", "ward")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def notes(silo: str, split: str) -> Iterator[str]:
    for number in range(24 if split == "train" else 6):
        word = ("fever", "cough", "rash")[number % 3]
        line = {"id": f"{silo}-{split}-{number}", "note": f"seen for {word}", "short": f"{word} was seen"}
        yield f"{json.dumps(line)}\n"


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Its plan has run to its end."""
    root = tmp_path_factory.mktemp("own-task")
    data = {silo: root / "data" / silo for silo in SILOS}
    for silo, folder in data.items():
        folder.mkdir(parents=True)
        for split in ("train", "dev"):
            (folder / f"{split}.jsonl").write_text("".join(notes(silo, split)))
    package = Package(root / "site")
    package.site.mkdir()
    package.write()
    (root / "logs").mkdir()
    with Processes(root / "logs") as processes:
        it = Federation(root, processes, data)
        at_silos = {"PYTHONPATH": str(package.site)}
        it.init("--no-plan")
        (task,) = json.loads(it.agent(SILOS[0], "tasks", "--json", extra=at_silos))
        named = {"kind": task["task"], "version": task["version"], "digest": task["digest"], "score": "coverage"}
        values = {
            **{f"task.{key}": value for key, value in named.items()},
            "schedule.rounds": 2,
            "schedule.min_silos": 2,
            "evaluation.every": 1,
            "training.epochs": 8,
            "training.learning_rate": 5e-3,
            "training.max_output_tokens": 16,
        }
        it.coordinator("plan", "new", "notes", "--size", "micro", *set_arguments(values))
        it.serve("--plan", "notes")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            (root / "agents" / silo / "silo.toml").write_text('[policy]\ntasks = ["ward-notes"]\n')
            it.start_agent(silo, extra=at_silos)
        it.wait(it.all_ready)
        it.coordinator("plan", "start", "notes")
        it.wait(it.finished)
        yield it


def test_people_are_shown_the_score_of_their_task(federation: Federation) -> None:
    shown = federation.coordinator("rounds")
    assert "coverage" in shown
    assert "exact match" not in shown
    records = json.loads(federation.coordinator("rounds", "--json"))
    assert [record["outcome"] for record in records if record["round"]] == ["applied", "applied"]
    status = json.loads(federation.agent(SILOS[0], "status", "--json"))
    assert all(name in json.dumps(status) for name in ("coverage", "length")), "its own people see all of its scores"


def test_a_silo_is_answered_in_text_and_nothing_is_run(federation: Federation) -> None:
    site = {"PYTHONPATH": str(federation.root / "site")}
    folder = federation.data[SILOS[0]]
    asked = federation.agent(SILOS[0], "ask", "sum up: seen for fever", "--data", str(folder), "--json", extra=site)
    answer = json.loads(asked)
    assert set(answer) == {"question", "model", "answer"}
