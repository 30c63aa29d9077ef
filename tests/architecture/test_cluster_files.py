"""The two files of ops/docs/simulation.md for a cluster: a Slurm array and a Kubernetes Indexed Job. Kubernetes'
schemas take the Job, and what a shell makes of either command line are all shards of the study, each once."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from lorica.cli import app
from lorica.experiments.shard import Shard
from tests.architecture.test_helm_chart import DOCKERFILE, KUBERNETES, taken

PAGE = (Path(__file__).resolve().parents[2] / "ops" / "docs" / "simulation.md").read_text(encoding="utf-8")


def block(language: str, of: str) -> str:
    """The one in `language` that has `of` in it."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if of in text]
    return found


SLURM = block("sh", "#SBATCH")
TEXT = block("yaml", "kind: Job")
JOB: dict[str, Any] = yaml.safe_load(TEXT)
POD = JOB["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def words(script: str, environment: Mapping[str, str]) -> list[str]:
    """What a shell would start in place of itself."""
    assert script.count("exec lorica ") == 1
    shown = script.replace("exec lorica ", "exec printf '%s\\n' lorica ")
    done = subprocess.run(
        ["/bin/sh", "-eu", "-c", shown], env=dict(environment), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def shard_of(command: list[str]) -> Shard:
    assert command[:2] == ["lorica", "experiment"]
    parser = typer.main.get_command(app).commands["experiment"]  # type: ignore[attr-defined]
    return Shard.from_text(parser.make_context("experiment", command[2:]).params["shard"])


def test_a_slurm_array_has_every_shard_once() -> None:
    first, last = map(int, re.findall(r"^#SBATCH --array=(\d+)-(\d+)$", SLURM, re.MULTILINE)[0])
    assert SLURM.startswith("#!/bin/sh\n#SBATCH "), "what follows a command is no directive"
    found = [shard_of(words(SLURM, {"SLURM_ARRAY_TASK_ID": str(index)})) for index in range(first, last + 1)]
    assert found == [Shard(number, last) for number in range(1, last + 1)]


def test_an_indexed_job_has_every_shard_once() -> None:
    count = JOB["spec"]["completions"]
    assert JOB["spec"]["completionMode"] == "Indexed"
    assert CONTAINER["command"] == ["sh", "-c"]
    (script,) = CONTAINER["args"]
    found = [shard_of(words(script, {"JOB_COMPLETION_INDEX": str(index)})) for index in range(count)]
    assert found == [Shard(number, count) for number in range(1, count + 1)]
    of = POD["securityContext"]
    assert f"USER {of['runAsUser']}:{of['runAsGroup']}\n" in DOCKERFILE
    assert re.search(r"^FROM common AS lab$", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("kubernetes", KUBERNETES)
def test_kubernetes_takes_the_job(kubernetes: str, tmp_path: Path) -> None:
    done = taken(kubernetes, TEXT, tmp_path / "job.yaml")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    wrong = taken(kubernetes, TEXT.replace("completionMode", "completionmode"), tmp_path / "wrong.yaml")
    assert wrong.returncode != 0
