"""A plan under kills whose state is in PostgreSQL, with a second coordinator that stands by on the same folder.

Whoever leads dies at the next point of the list, and the other one takes over; the dead one is started again and stands
by. A life is over at its point whichever process has it, so the kills of the coordinator come in the order of the list.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from lorica.demo.processes import Processes
from lorica.soak.comparison import Result
from lorica.soak.federation import COORDINATOR, MortalFederation, Shape
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.rounds.states import Finished
from tests.support.kill_run import Death, Executioner, Kill, KillRun, sizes
from tests.support.postgresql import SUPERUSER, PostgresqlServer
from tests.support.repeatable_draws import Draws

STANDBY: Final = "standby"
PAIR: Final = (COORDINATOR, STANDBY)


class StandbyFederation(MortalFederation):
    """`leader`: of the two who said last that it leads."""

    def __init__(self, root: Path, shape: Shape, processes: Processes) -> None:
        super().__init__(root, shape, processes)
        self.names = (*PAIR, *shape.silos)
        self.leader = ""
        self.took_over: list[str] = []

    def keep_state_in(self, server: PostgresqlServer, database: str) -> None:
        """Before anything runs."""
        server.execute(f"CREATE DATABASE {database}")
        url = f"postgresql+psycopg://{SUPERUSER}@/{database}?host={server.folder}"
        text = self.folder.settings.read_text()
        assert 'database = ""' in text
        self.folder.settings.write_text(text.replace('database = ""', f'database = "{url}"'))

    def command(self, process: str) -> tuple[str, list[str]]:
        return super().command(COORDINATOR if process == STANDBY else process)

    def stands_by(self) -> bool:
        return any(record.get("event") == "stands by" for record in self._new_records(STANDBY))

    def _new_records(self, process: str) -> Iterator[Mapping[str, Any]]:
        for one in PAIR if process == COORDINATOR else (process,):
            for record in super()._new_records(one):
                if record.get("event") == "leads" and one in PAIR:
                    if self.leader not in ("", one):
                        self.took_over.append(one)
                    self.leader = one
                yield record

    def result(self) -> Result:
        store = Coordinator.load(self.folder).open_store()
        try:
            state = store.load()
            assert isinstance(state, Finished), state.phase
            plan = state.course.terms.plan
            return Result(plan=plan, model=state.course.model, rounds=store.rounds(plan, 0))
        finally:
            store.close()


class StandbyExecutioner(Executioner):
    """Of a StandbyFederation. Of a coordinator's death nothing is read but its note: the other one is at work."""

    def __init__(
        self,
        federation: StandbyFederation,
        kills: Sequence[Kill],
        at_death: Callable[[Death], None] = lambda death: None,
        draws: Draws | None = None,
    ) -> None:
        super().__init__(federation, kills, at_death, draws)
        self._pair = federation
        (federation.root / STANDBY).mkdir()
        self._ahead[STANDBY] = self._ahead[COORDINATOR]  # the same list: whoever starts takes the next

    def begin(self) -> None:
        super().begin()
        self.start(STANDBY)
        self.until(self._pair.stands_by)

    def finish(self) -> KillRun:
        federation = self._pair
        self.until(federation.is_over)
        for name in sorted(federation.names, key=lambda name: name == federation.leader):  # or it would take over
            federation.processes.kill(name) if name in PAIR and name != federation.leader else (
                federation.processes.stop(name)
            )
        return KillRun(federation=federation, result=federation.result(), deaths=tuple(self.deaths))

    def _note(self, process: str) -> Path:
        # Known by the name of its note, and what either of the two draws is the coordinator's.
        return self._pair.root / STANDBY / f"{COORDINATOR}.killed" if process == STANDBY else super()._note(process)

    def _program(self, process: str) -> str:
        return "coordinator" if process in PAIR else "silo-agent"

    def _post_mortem(self, kill: Kill, round_number: int | None) -> Death:
        if kill.process != COORDINATOR:
            return super()._post_mortem(kill, round_number)
        return Death(kill=kill, round=round_number, files=sizes(self._pair.state))
