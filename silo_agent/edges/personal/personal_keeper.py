"""The agent has this silo's own models trained when it has nothing else to do, in a process of its own.

So it is at rest: the plan is complete, or, for Ditto, which is kept over the rounds, it has waited for some time. The
process is the command `silo-agent personal train`, of the lowest priority, and the first to go where memory is short.
It is killed the moment that the agent begins to work, and goes on after its last whole epoch when the agent rests
again. It shares neither memory nor random state with what trains a round, and it dials nobody: what leaves this silo
is the same with it and without.
"""

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from lorica_security.errors import LoricaError
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.personal.own_models import OwnModels
from silo_agent.edges.personal.own_scores import completion
from silo_agent.edges.personal.rounds_first import AT_REST
from silo_agent.edges.personal.shown import own_models_lines
from silo_agent.rounds.effects import Activity, JournalActivity
from silo_agent.settings import PersonalSection
from silo_wire.canonical import Digest

QUIET_S: Final = 30.0
"""How long an agent has waited before Ditto begins: a short wait is left to whoever is waited for."""
SCORED: Final = "own-models"
NOT_TRAINED: Final = "own-models-not-trained"
_LOWEST: Final = 19
_FIRST_TO_GO: Final = 1000
_START: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); sys.argv[0] = 'silo-agent'; "
    "from silo_agent.cli import main; main()"
)


def training_command(folder: Path) -> Sequence[str]:
    """`silo-agent personal train`, with the code of this very process."""
    code = json.dumps([place for place in sys.path if place])
    return [sys.executable, "-I", "-c", _START, code, "personal", "train", "--json", "--dir", str(folder)]


class PersonalKeeper:
    def __init__(
        self,
        folder: SiloFolder,
        journal: RoundJournal,
        *,
        settings: PersonalSection,
        told: Callable[[str, str], None],
        quiet_s: float,
    ) -> None:
        """Ditto is trained also while a plan is under way, once the agent has waited for `quiet_s`."""
        self._folder, self._journal = folder, journal
        self._plans, self._own = PlanStore(folder.plans), OwnModels(folder.personal)
        self._settings, self._told, self._quiet_s = settings, told, quiet_s
        self._at = Activity.STOPPED
        self._changed = asyncio.Event()
        self._process: Process | None = None
        self._gave_way = False  # the process, to work
        self._initial: tuple[str, Digest] | None = None  # of a plan

    def activity(self, activity: JournalActivity) -> None:
        """What the agent is at from now on; training gives way to all work."""
        self._at = activity.activity
        if self._at not in AT_REST:
            self._end()
        self._changed.set()

    async def run(self) -> None:
        try:
            while True:
                self._changed.clear()
                try:
                    await self._look()
                except (LoricaError, OSError) as error:
                    self._told(NOT_TRAINED, str(error))
                    await self._changed.wait()
        finally:
            self._end()
            if self._process is not None:
                await self._process.wait()

    async def _look(self) -> None:
        self._keep_initial()
        if self.may_train and await self._is_quiet():
            await self._train()
        else:
            await self._changed.wait()

    # ---- what is under way ----------------------------------------------------------------------------------------

    @property
    def may_train(self) -> bool:
        """Whether the agent rests, and something is to be done for its newest model."""
        between_rounds = self._settings.method == "ditto" and self._at is Activity.WAITING
        if self._at is not Activity.FINISHED and not between_rounds:
            return False
        newest, scores = self._journal.last_model(), self._own.record.read()
        if newest is None:
            return False
        return (scores.plan, scores.complete) != (newest.plan, completion(newest.model, self._settings))

    async def _is_quiet(self) -> bool:
        if self._at is Activity.FINISHED:
            return True
        try:
            async with asyncio.timeout(self._quiet_s):
                await self._changed.wait()
        except TimeoutError:
            return True
        return False

    async def _train(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *training_command(self._folder.root),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._process, self._gave_way = process, False
        _step_back(process.pid)
        if self._at not in AT_REST:
            self._end()
        _, said = await process.communicate()
        self._process = None
        if process.returncode == 0:
            for line in own_models_lines(self._own.record.read()):
                self._told(SCORED, line)
        elif not self._gave_way:
            lines = said.decode(errors="replace").strip().splitlines() or [f"exit code {process.returncode}"]
            self._told(NOT_TRAINED, lines[-1])
            await self._changed.wait()

    def _end(self) -> None:
        if self._process is not None:
            self._gave_way = True
            with suppress(ProcessLookupError):  # it has just ended
                self._process.kill()

    # ---- what the local model begins with -------------------------------------------------------------------------

    def _keep_initial(self) -> None:
        """The cache of round models drops a plan's initial model when a third one comes."""
        plan = self._journal.fact("plan")
        if plan is None:
            return
        if self._initial is None or self._initial[0] != plan:
            bundle = self._plans.load(Digest(plan))
            if bundle is None:
                return
            self._initial = plan, bundle.plan.initial_model
        self._own.keep_initial(self._folder.models, self._initial[1])


def _step_back(pid: int) -> None:
    """Everything else on this machine comes before the process, its memory included."""
    with suppress(OSError):  # it has ended; or a service manager forbids that: it gives way all the same
        os.setpriority(os.PRIO_PROCESS, pid, _LOWEST)
    with suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text(f"{_FIRST_TO_GO}", encoding="ascii")
