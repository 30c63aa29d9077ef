"""A worker process of a simulation: one model on one bench, for the silos that were given to it, one call at a time.

It ends when the simulation closes their pipe, and with the simulation's process, however that ends. Ctrl-C, which a
terminal sends to both, is the simulation's to hear. What is no error of Lorica's ends it, with its traceback on stderr.
"""

import os
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from lorica.simulation import disk
from lorica.simulation.workers.children import end_with_parent
from lorica.simulation.workers.one_bench import OneBench
from lorica.simulation.workers.worker_messages import Call, Done, Noticed, Progressed, Raised, Stop, Told, WorkerSilo
from lorica_security.errors import LoricaError, StateError
from lorica_security.identifiers import SiloName
from silo_agent.service.ports import WorkCancelled
from silo_wire.plans.plan import PlanBundle


def work(pipe: Connection, silos: Mapping[SiloName, WorkerSilo]) -> NoReturn:
    """Until the other end of `pipe` is closed."""
    end_with_parent()
    simulation = _Simulation(pipe)
    bench = _Bench(simulation, silos)
    with disk.not_waited_for():
        while True:
            try:
                message = simulation.said()
                if isinstance(message, Call):  # else a Stop that came when the call was over
                    simulation.tell(bench.answer(message))
            except _Gone:
                os._exit(0)  # nothing here needs an end of its own, and to take PyTorch apart takes seconds


class _Gone(BaseException):
    """The simulation's end of the pipe is closed. No error of the work that is under way, whose handlers are not to
    take it for one."""


class _Simulation:
    """At the other end of the pipe."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def said(self) -> Call | Stop:
        try:
            message: Call | Stop = self._pipe.recv()
        except (EOFError, ConnectionError):
            raise _Gone from None
        return message

    def has_said(self) -> bool:
        return self._pipe.poll()

    def tell(self, told: Told) -> None:
        try:
            self._pipe.send(told)
        except ConnectionError:
            raise _Gone from None


class _Bench:
    def __init__(self, simulation: _Simulation, silos: Mapping[SiloName, WorkerSilo]) -> None:
        bench = OneBench()
        self._simulation = simulation
        self._bundle: PlanBundle | None = None
        self._workshops = {name: bench.workshop(silo) for name, silo in silos.items()}

    def answer(self, call: Call) -> Told:
        try:
            return Done(self._done(call))
        except (LoricaError, WorkCancelled) as error:
            return Raised.of(error)

    def _done(self, call: Call) -> Any:
        workshop, bundle = self._workshops[call.silo], self._of(call)
        if call.verb == "prepare":
            return workshop.prepare(bundle, call.arguments["base"])
        relayed: dict[str, Any] = {"progress": self._progress, "cancelled": self._cancelled()}
        if call.verb == "evaluate":
            return workshop.evaluate(bundle=bundle, **call.arguments, **relayed)
        return workshop.train(bundle=bundle, **call.arguments, **relayed, notice=self._notice)

    def _of(self, call: Call) -> PlanBundle:
        if call.bundle is not None:
            self._bundle = PlanBundle.decode(call.bundle, call.plan)
        if self._bundle is None or self._bundle.plan.digest != call.plan:
            raise StateError(f"plan {call.plan} is not prepared in this worker: nothing was done under it")
        return self._bundle

    def _progress(self, fraction: float) -> None:
        self._simulation.tell(Progressed(fraction))

    def _notice(self, event: str, detail: str) -> None:
        self._simulation.tell(Noticed(event, detail))

    def _cancelled(self) -> Callable[[], bool]:
        """Whether this call was asked to stop, which is all that can be said within it."""
        stopped = False

        def cancelled() -> bool:
            nonlocal stopped
            if not stopped and self._simulation.has_said():
                stopped = isinstance(self._simulation.said(), Stop)
            return stopped

        return cancelled
