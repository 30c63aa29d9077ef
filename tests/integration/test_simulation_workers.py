"""Workers of a simulation: what they relay, and that none outlives the simulation."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from lorica.simulation.model_files import round_file
from lorica.simulation.run import silos_in, simulate
from lorica.simulation.silo import settings_of
from lorica.simulation.workers.children import children
from lorica.simulation.workers.worker import work
from lorica.simulation.workers.worker_messages import Call, Done, Progressed, WorkerSilo
from lorica.simulation.workers.worker_pool import WorkerPool
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.plans.model_source import SizedModel
from lorica_coordinator.plans.plan_folder import compile_plan, create_plan
from lorica_coordinator.service.records import RoundRow
from lorica_coordinator.vectors.model_file import MODEL_FILE
from lorica_security.errors import LoricaError, StateError
from lorica_security.identifiers import FederationName, SiloName
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import RoundModel, TrainedUpdate, TrainerPort, WorkCancelled
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import PlanBundle
from tests.support.background import in_the_background

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAME = SiloName("clinic")
TRAIN = 48
LONGEST_S = 120


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silos")
    for specification in (CLINIC, INSURER):
        write_silo(folder / specification.name, specification, seed=3)
        keep_first(folder / specification.name / "train.jsonl", TRAIN)
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose rounds are many, so that it is under way whenever something happens to it."""
    plans = tmp_path_factory.mktemp("plans")
    values = {
        "schedule.rounds": 1000,
        "schedule.min_silos": 2,
        "wire.update": "bfloat16",
        "training.batch_size": 4,
        "evaluation.every": 1,
        "evaluation.initial": False,
        "evaluation.max_examples": 4,
        "evaluation.execution": False,
    }
    create_plan(plans, name="long", federation="north", source=SizedModel("micro", None, None), overrides=values)
    return plans / "long"


@pytest.fixture(scope="module")
def bundle(plan: Path) -> PlanBundle:
    return compile_plan(plan)


@pytest.fixture
def start(plan: Path, bundle: PlanBundle, tmp_path: Path) -> RoundModel:
    models = ModelStore(
        tmp_path / "models",
        layout=bundle.layout,
        model_layout=bundle.model_layout,
        initial=Digest(bundle.plan.model.initial),
        initial_file=plan / MODEL_FILE,
    )
    return round_file(models, models.initial(), tmp_path / "model")


class Training:
    """One round's at the silo, through its port."""

    def __init__(self, trainer: TrainerPort, bundle: PlanBundle, start: RoundModel, folder: Path) -> None:
        self._trainer, self._bundle, self._start, self._folder = trainer, bundle, start, folder
        self.fractions: list[float] = []
        self.notices: list[tuple[str, str]] = []

    def done(self, *, until: float = 2.0, included: Digest | None = None) -> TrainedUpdate:
        """Cancelled once `until` of it is done."""
        self.fractions = []
        plan = self._bundle.plan
        return self._trainer.train(
            bundle=self._bundle,
            key=RoundKey(federation=FederationName(plan.federation), plan=plan.digest, round=1, attempt=1),
            model=self._start,
            update_file=self._folder / "update",
            included_update=included,
            told_before=None,
            checkpoint_file=self._folder / "checkpoint",
            progress=self.fractions.append,
            notice=lambda event, detail: self.notices.append((event, detail)),
            cancelled=lambda: bool(self.fractions) and self.fractions[-1] >= until,
        )


def test_a_worker_relays_progress_notices_and_cancellation(
    silos: Path, bundle: PlanBundle, start: RoundModel, tmp_path: Path
) -> None:
    settings = settings_of(silos / NAME, device="cpu", threads=1)
    silo = WorkerSilo(
        settings=settings,
        policy=SiloPolicy(rules=settings.policy, silo=NAME),
        scratch=tmp_path,
        losses=tmp_path / "losses.jsonl",
    )
    deaths: list[LoricaError] = []
    with WorkerPool({NAME: silo}, [[NAME]], deaths.append) as pool:
        trainer = pool.trainer(NAME)
        unprepared = Training(trainer, bundle, start, tmp_path)
        with pytest.raises(StateError, match="is not prepared in this worker"):
            unprepared.done()
        assert trainer.prepare(bundle, None).train_examples == TRAIN
        training = Training(trainer, bundle, start, tmp_path)
        with pytest.raises(WorkCancelled):
            training.done(until=0.1)
        assert 0 < training.fractions[-1] < 1, "it stopped on the way"
        unknown = Digest("ab" * 32)
        first = training.done(included=unknown)
        assert training.fractions[-1] == 1
        assert [event for event, _ in training.notices] == ["residual-lost"]
        (tmp_path / "checkpoint").unlink(missing_ok=True)
        assert training.done(included=unknown).manifest == first.manifest, "the same work gives the same bytes"
        assert deaths == []
        (child,) = multiprocessing.active_children()
    assert not child.is_alive()
    assert child.exitcode == 0, "it ended by itself"


def test_a_worker_whose_simulation_is_gone_in_the_middle_of_a_call_ends_silently(
    silos: Path, bundle: PlanBundle, start: RoundModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = settings_of(silos / NAME, device="cpu", threads=1)
    silo = WorkerSilo(
        settings=settings,
        policy=SiloPolicy(rules=settings.policy, silo=NAME),
        scratch=tmp_path,
        losses=tmp_path / "losses.jsonl",
    )
    context = children()
    pipe, its_end = context.Pipe()
    worker = context.Process(target=work, args=(its_end, {NAME: silo}))
    worker.start()
    its_end.close()
    plan = bundle.plan
    pipe.send(Call(silo=NAME, verb="prepare", plan=plan.digest, bundle=bundle.encode(), arguments={"base": None}))
    assert isinstance(pipe.recv(), Done)
    training = {
        "key": RoundKey(federation=FederationName(plan.federation), plan=plan.digest, round=1, attempt=1),
        "model": start,
        "update_file": tmp_path / "update",
        "included_update": None,
        "told_before": None,
        "checkpoint_file": tmp_path / "checkpoint",
    }
    pipe.send(Call(silo=NAME, verb="train", plan=plan.digest, bundle=None, arguments=training))
    assert isinstance(pipe.recv(), Progressed), "it is at work"
    pipe.close()
    worker.join(LONGEST_S)
    assert worker.exitcode == 0
    assert capfd.readouterr().err == ""


def test_a_worker_that_is_killed_ends_the_simulation_which_names_it(plan: Path, silos: Path, tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_one(row: RoundRow) -> None:
        if not killed:
            workers = [child.pid or 0 for child in multiprocessing.active_children()]
            assert len(workers) == 2, "no more than there are silos"
            killed.append(workers[0])
            os.kill(workers[0], signal.SIGKILL)

    with pytest.raises(StateError) as caught:
        simulate(plan, silos_in(silos), tmp_path / "out", device="cpu", threads=1, workers=5, on_round=kill_one)
    assert f"(process {killed[0]}), which trains " in str(caught.value)
    assert "was ended by SIGKILL" in str(caught.value)
    assert multiprocessing.active_children() == []


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)


def press_ctrl_c(process: int) -> None:
    """A terminal tells all of the group."""
    os.killpg(process, signal.SIGINT)


@pytest.mark.parametrize("end", [kill, press_ctrl_c])
def test_no_worker_outlives_the_simulation(plan: Path, silos: Path, tmp_path: Path, end: Callable[[int], None]) -> None:
    command = [
        *(
            sys.executable,
            "-m",
            "lorica.cli",
            "simulate",
            str(plan),
            "--silos",
            str(silos),
            "--out",
            str(tmp_path / "out"),
        ),
        *("--device", "cpu", "--threads", "1", "--workers", "2"),
    ]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        in_the_background(*command), stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as simulation:
        assert simulation.stdout is not None
        assert simulation.stdout.readline().startswith("round 1 applied")
        started = psutil.Process(simulation.pid).children(recursive=True)
        assert len([child for child in started if "forkserver" in " ".join(child.cmdline())]) == 1 + 2
        end(simulation.pid)
        _, alive = psutil.wait_procs(started, timeout=LONGEST_S)
        assert alive == []
        _, told = simulation.communicate()
    assert simulation.returncode != 0
    assert told.strip() == "", "nobody complains of an end that was asked for"
