"""Silos trained in parallel: worker processes, each with a share of the silos and one model for them (`lorica simulate
--workers`).

What leaves a silo is still made by its own agent here; a worker does what TrainerPort says and nothing else. Masks are
applied here as well, so that no key of secure aggregation passes a pipe. Whoever sends through these pipes is this
program itself, on this machine.
"""

import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lorica.simulation.workers.children import children
from lorica.simulation.workers.worker import work
from lorica.simulation.workers.worker_messages import Call, Done, Noticed, Progressed, Raised, Stop, WorkerSilo
from lorica_security.errors import LoricaError, StateError
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.service.ports import (
    Cancelled,
    DataSummary,
    MaskedFile,
    Notice,
    Progress,
    RoundModel,
    TrainedUpdate,
    WorkCancelled,
)
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import PlanBundle

ASK_S = 0.2
"""Between two questions whether a call is cancelled, while its worker says nothing."""
END_S = 30.0
"""For a worker that has nothing to do any more to end by itself."""

Died = Callable[[LoricaError], None]


def on_their_devices(
    silos: Mapping[SiloName, WorkerSilo], shares: Sequence[Sequence[SiloName]], devices: Sequence[str]
) -> dict[SiloName, WorkerSilo]:
    """Each silo on the device of the worker whose share it is in. There is a device for each worker."""
    return {name: silos[name].on(device) for share, device in zip(shares, devices, strict=True) for name in share}


class WorkerPool:
    """The workers of one simulation, while inside."""

    def __init__(self, silos: Mapping[SiloName, WorkerSilo], shares: Sequence[Sequence[SiloName]], died: Died) -> None:
        """`shares` has the silos of each worker; `died` hears of a worker that ended with work to do, in whatever
        thread found out."""
        self._silos = silos
        self._workers = [
            _Worker(number, {name: silos[name] for name in share}, died) for number, share in enumerate(shares, 1)
        ]

    def trainer(self, silo: SiloName) -> "InWorker":
        worker = next(worker for worker in self._workers if silo in worker.silos)
        return InWorker(worker, silo, self._silos[silo])

    def __enter__(self) -> Self:
        for worker in self._workers:
            worker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for worker in self._workers:
            worker.close()
        for worker in self._workers:
            worker.join()


class InWorker:
    """`TrainerPort` of one silo, whose worker does one silo's work at a time."""

    def __init__(self, worker: "_Worker", silo: SiloName, of: WorkerSilo) -> None:
        self._worker, self._silo = worker, silo
        self._here = Workshop(settings=of.settings, policy=of.policy, sources=SiloSources(of.settings, of.scratch))

    def prepare(self, bundle: PlanBundle, base: RoundModel | None) -> DataSummary:
        call = Call(
            silo=self._silo, verb="prepare", plan=bundle.plan.digest, bundle=bundle.encode(), arguments={"base": base}
        )
        summary = self._worker.done(call)
        assert isinstance(summary, DataSummary)
        return summary

    def train(
        self, *, bundle: PlanBundle, progress: Progress, notice: Notice, cancelled: Cancelled, **work: Any
    ) -> TrainedUpdate:
        call = Call(silo=self._silo, verb="train", plan=bundle.plan.digest, bundle=None, arguments=work)
        update = self._worker.done(call, progress=progress, notice=notice, cancelled=cancelled)
        assert isinstance(update, TrainedUpdate)
        return update

    def no_training(self, *, update_file: Path) -> TrainedUpdate:
        return self._here.no_training(update_file=update_file)

    def mask(self, **work: Any) -> MaskedFile:
        with self._worker.turn:
            return self._here.mask(**work)

    def evaluate(self, *, bundle: PlanBundle, progress: Progress, cancelled: Cancelled, **work: Any) -> Evaluation:
        call = Call(silo=self._silo, verb="evaluate", plan=bundle.plan.digest, bundle=None, arguments=work)
        evaluation = self._worker.done(call, progress=progress, cancelled=cancelled)
        assert isinstance(evaluation, Evaluation)
        return evaluation


class _Worker:
    def __init__(self, number: int, silos: Mapping[SiloName, WorkerSilo], died: Died) -> None:
        context = children()
        self.silos = tuple(silos)
        self.turn = threading.Lock()
        self._died = died
        self._number = number
        self._pipe, self._its_end = context.Pipe()
        self._process = context.Process(target=work, args=(self._its_end, silos), name=f"worker-{number}", daemon=True)

    def start(self) -> None:
        self._process.start()
        self._its_end.close()  # its own alone keeps the pipe open now: when it dies, reading here says so

    def done(
        self,
        call: Call,
        *,
        progress: Progress = lambda fraction: None,
        notice: Notice = lambda event, detail: None,
        cancelled: Cancelled = lambda: False,
    ) -> Any:
        """What comes of `call`, or what it raised, which for a worker that died is a StateError."""
        with self.turn:
            if cancelled():
                raise WorkCancelled
            try:
                return self._answer(call, progress, notice, cancelled)
            except (EOFError, ConnectionError) as error:
                death = self._death()
                self._died(death)
                raise death from error

    def _answer(self, call: Call, progress: Progress, notice: Notice, cancelled: Cancelled) -> Any:
        self._pipe.send(call)
        stopped = False
        while True:
            if not stopped and cancelled():
                self._pipe.send(Stop())
                stopped = True
            if not self._pipe.poll(ASK_S):
                continue
            match self._pipe.recv():
                case Progressed(fraction):
                    progress(fraction)
                case Noticed(event, detail):
                    notice(event, detail)
                case Done(result):
                    return result
                case Raised() as raised:
                    raise raised.error()

    def close(self) -> None:
        self._pipe.close()

    def join(self) -> None:
        if self._process.pid is None:
            return
        self._process.join(END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _death(self) -> StateError:
        self._process.join(END_S)
        code = self._process.exitcode
        how = (
            f"was ended by {signal.Signals(-code).name}"
            if code is not None and code < 0
            else f"ended with exit code {code}"
        )
        return StateError(
            f"worker {self._number} (process {self._process.pid}), which trains {' and '.join(self.silos)}, {how}: "
            "look at the system's log for a lack of memory, or above for an error; the same command goes on where it "
            "was, perhaps with fewer --workers"
        )
