"""The ranks of one plan's training: started, compared with each other, called, watched, and ended.

Whatever keeps a call from its end (a rank or the launcher that dies, a rank that hangs) is GroupLost, and the group is
of no more use: whoever called starts another, which goes on from the checkpoint. What a rank says is wrong with data,
model or disk is raised as it is.
"""

import math
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Final, TypeVar

import psutil

from lorica_security.errors import ConfigurationError, StateError, StorageError
from lorica_security.host.files import make_private_folder
from silo_agent.edges.ranks import frames, slurm_jobs
from silo_agent.edges.ranks.launching import rank_command, rank_environment
from silo_agent.service.ports import Cancelled, Notice, Progress, TrainedUpdate
from silo_agent.settings import TrainingSection

LOOK_S: Final = 0.05
"""Between two looks at what the ranks have written, at least."""
MOST_LOOK_S: Final = 0.25
LATE: Final = 0.02
"""Of the time that a call has taken: so much later may be heard what came of it. Most of what an agent does beside its
ranks is to look."""
WATCH_S: Final = 1.0
"""Between two looks whether they go on."""
ALIVE_S: Final = 2.0
"""Between two signs of the agent."""
SAY_S: Final = 5.0
"""For the other ranks to say what came of a call, once one has said that it failed."""
END_S: Final = 10.0
"""For a launcher of others to end its ranks, before the kernel does."""


Said = TypeVar("Said", frames.Hello, frames.Ready)

START_S: Final = 300.0
"""For ranks to start, read the data and meet, where [training] rank_timeout_s is no longer: imports take seconds."""
HEARD_S: Final = 40.0
"""For ranks of other machines to hear that they are to end; a little more than they go on without an agent."""


_LOOK: Final = os.WEXITED | os.WNOHANG | os.WNOWAIT


class GroupLost(StateError):
    """This group of ranks came to nothing; another one may do what it was called for."""


class RankGroup:
    """`ended` is called once nothing of it runs any more."""

    def __init__(
        self,
        section: TrainingSection,
        start: frames.Start,
        bundle: bytes,
        own: dict[str, str],
        parent: Path,
        entropy: str,
    ) -> None:
        """Start the ranks in a new folder below `parent`, and wait until they have met. `own` are the versions that
        the agent runs, `entropy` what it commits itself to the silo's own secret by.

        Raises what a rank says is wrong, ConfigurationError for ranks that are not alike, GroupLost.
        """
        self._section, self._calls = section, count(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._hellos: list[frames.Hello] = []
        self.whole = True
        """Whether every rank said what came of the last call: only then is it there for another one."""
        try:
            make_private_folder(parent)
            for left in parent.glob("group-*"):
                _end_left(left, section)
            self._folder = Path(tempfile.mkdtemp(prefix="group-", dir=parent))  # of mode 0700
        except OSError as error:
            raise frames.unwritten(parent, error) from error
        try:
            frames.put(self._folder / frames.PLAN, bundle)
            start.write(self._folder / frames.START)
            threading.Thread(target=self._show_life, daemon=True).start()
            self._launch()
            require_versions(self._awaited("hello", frames.Hello), own)
            require_alike(self._awaited("ready", frames.Ready), start.examples, entropy)
        except OSError as error:
            self.end()
            raise frames.unwritten(self._folder, error) from error
        except BaseException:
            self.end()
            raise

    def train(self, call: frames.Call, *, progress: Progress, notice: Notice, cancelled: Cancelled) -> TrainedUpdate:
        """Raises what a rank raised, WorkCancelled, GroupLost, StorageError."""
        self.whole = False
        number, noticed, told = next(self._calls), count(1), 0.0
        call.write(self._folder / f"call-{number}.json")
        stop, next_notice = self._folder / f"stop-{number}", next(noticed)
        outs: dict[int, frames.Done | frames.Raised] = {}
        watch, news = _Watch(self._folder, self._section), News(self._folder)
        began = time.monotonic()
        while len(outs) < self._section.processes:
            if cancelled() and not stop.exists():
                frames.put(stop, b"")
            if news.may_be_there():
                # What came of it first: whatever else a rank says of this call, it said before.
                self._take(outs, number)
                if (done := frames.number_in(self._folder / f"progress-{number}")) > told:
                    told = done
                    progress(min(done, 1.0))
                while (said := frames.Notice.read(self._folder / f"notice-{number}-{next_notice}.json")) is not None:
                    notice(said.event, said.detail)
                    next_notice = next(noticed)
            failed = [out for out in outs.values() if isinstance(out, frames.Raised)]
            if failed and watch.said_long_ago():
                break
            if len(outs) < self._section.processes:
                self._require_running()
                watch.require_going_on(outs)
                self._over.wait(until_next_look(time.monotonic() - began))
        self.whole = len(outs) == self._section.processes
        self._sweep(number)
        return self._result(outs)

    def end(self) -> None:
        """Ranks and launcher are gone when this returns, those of other machines within seconds."""
        self._over.set()
        with suppress(StorageError):
            frames.put(self._folder / frames.END, b"")
        if self._process is not None:
            self._kill(self._process)
        _farewell(self._folder, self._hellos, self._section)

    def _launch(self) -> None:
        command = rank_command(self._section, self._folder)
        environment = rank_environment()
        if slurm_jobs.by_srun(self._section.launch):
            environment |= slurm_jobs.named_for(self._folder)
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, env=environment, start_new_session=True, cwd=self._folder
            )
        except OSError as error:
            raise ConfigurationError(
                f"[training] launch cannot be run: {command[0]}: {error.strerror}: install it, or leave launch out "
                "where all ranks run on this machine"
            ) from error

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        process.stdin.close()
        if self._section.launch:  # whose ranks may be elsewhere, and are its own to end
            os.kill(process.pid, signal.SIGTERM)
            began, never = time.monotonic(), threading.Event()
            while _ended(process.pid) is None and time.monotonic() - began < END_S:
                never.wait(LOOK_S)
        # Its session is its own, and its number nobody else's before it is waited for.
        _kill_session(process.pid)
        process.wait()

    def _show_life(self) -> None:
        for number in count(1):
            with suppress(StorageError):  # a disk that is full for longer than AGENT_GONE_S ends the ranks
                frames.put(self._folder / frames.ALIVE, str(number).encode())
            if self._over.wait(ALIVE_S):
                return

    def _awaited(self, name: str, kind: type[Said]) -> list[Said]:
        """What each rank says of itself."""
        began, most = time.monotonic(), max(START_S, self._section.rank_timeout_s)
        said: dict[int, Said] = {}
        while len(said) < self._section.processes:
            for rank in range(self._section.processes):
                if rank not in said and (frame := kind.read(self._folder / f"{name}-{rank}.json")) is not None:
                    said[rank] = frame
                    if isinstance(frame, frames.Hello):
                        self._hellos.append(frame)
            outs: dict[int, frames.Done | frames.Raised] = {}
            self._take(outs, 0)
            if outs:
                self._result(outs)
            self._require_running()
            if time.monotonic() - began > most:
                missing = ", ".join(str(rank) for rank in range(self._section.processes) if rank not in said)
                raise GroupLost(
                    f"ranks {missing} of {self._section.processes} did not say {name} within {most:g} s: see their "
                    "lines in this log; ranks of several machines need the silo's folder at one path and a "
                    "rank_interface that they reach each other by"
                )
            self._over.wait(LOOK_S)
        return [said[rank] for rank in sorted(said)]

    def _take(self, outs: dict[int, frames.Done | frames.Raised], number: int) -> None:
        for rank in range(self._section.processes):
            if rank not in outs and (out := frames.Out.read(self._folder / f"out-{number}-{rank}.json")) is not None:
                outs[rank] = out.out

    def _require_running(self) -> None:
        assert self._process is not None
        code = _ended(self._process.pid)
        if code is not None:
            raise GroupLost(f"the ranks of this silo's training ended (exit code {code}): see their lines in this log")

    def _result(self, outs: dict[int, frames.Done | frames.Raised]) -> TrainedUpdate:
        raised = [(rank, out) for rank, out in sorted(outs.items()) if isinstance(out, frames.Raised)]
        own = [out for _, out in raised if not out.parted and not out.another]
        if own:
            raise own[0].exception()
        if raised:
            raise GroupLost(f"rank {raised[0][0]}: {raised[0][1].text}")
        done = outs[0]
        assert isinstance(done, frames.Done)
        return done.update()

    def _sweep(self, number: int) -> None:
        for path in (*self._folder.glob(f"*-{number}"), *self._folder.glob(f"*-{number}*.json")):
            if path.name.startswith(("call-", "stop-", "progress-", "notice-", "out-")):
                path.unlink(missing_ok=True)


def require_versions(hellos: Sequence[frames.Hello], own: Mapping[str, str]) -> None:
    """Raise ConfigurationError, naming the first rank that runs another version of something than the agent."""
    for hello in hellos:
        for what, version in own.items():
            if (theirs := hello.versions.get(what, "none")) != version:
                raise ConfigurationError(
                    f"rank {hello.rank} on {hello.host} runs {what} {theirs}, this agent runs {version}: install the "
                    "same versions for all, the bits of a training depend on them"
                )


def require_alike(readies: Sequence[frames.Ready], examples: str, entropy: str) -> None:
    """Raise ConfigurationError, naming the first rank whose examples or secret are not the agent's, or whose threads
    are not rank 0's. The agent read its data once, and has counted and declared them; a rank reads them when it
    starts."""
    for what, whose, wanted, remedy in (
        (
            "examples",
            "this agent",
            examples,
            "have all ranks read the same data folder; where it was changed since, start the agent again",
        ),
        (
            "entropy",
            "this agent",
            entropy,
            "have all ranks read the training.entropy of this silo's folder, and leave that as it is",
        ),
        ("threads", "rank 0", str(readies[0].threads), "set [training] threads"),
    ):
        for rank, ready in enumerate(readies):
            if (value := str(getattr(ready, what))) != wanted:
                raise ConfigurationError(
                    f"{what} of rank {rank} ({value[:16]}) are not those of {whose} ({wanted[:16]}): {remedy}"
                )


def until_next_look(taken_s: float) -> float:
    """Seconds, in a call that has taken `taken_s`."""
    return min(max(LOOK_S, LATE * taken_s), MOST_LOOK_S)


class News:
    """Whether a folder may have frames that were not there at the last look.

    Each of them is renamed into it, by which its time of change is another one. That may be coarse, so that what comes
    just after a look does not show: once more after each change, then, and once a second whatever it says. To look for
    each frame by name 20 times a second took an agent 7 ms a second.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = folder, clock
        self._changed, self._again, self._looked = -1, False, -math.inf

    def may_be_there(self) -> bool:
        try:
            changed = os.stat(self._folder).st_mtime_ns
        except OSError:  # whoever looks says what is wrong
            return True
        now, other = self._clock(), changed != self._changed
        if not (other or self._again or now - self._looked > WATCH_S):
            return False
        self._changed, self._again, self._looked = changed, other, now
        return True


class _Watch:
    """Whether ranks go on with a call."""

    def __init__(self, folder: Path, section: TrainingSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._section, self._clock = folder, section, clock
        self._signs = dict.fromkeys(range(section.processes), -1.0)
        self._since = dict.fromkeys(range(section.processes), clock())
        self._failed: float | None = None
        self._looked = clock()

    def said_long_ago(self) -> bool:
        """Asked once a rank has failed: whether the others had time to say so too."""
        self._failed = self._failed or self._clock()
        return self._clock() - self._failed > SAY_S

    def require_going_on(self, over: dict[int, frames.Done | frames.Raised]) -> None:
        now = self._clock()
        if now - self._looked < WATCH_S:
            return
        self._looked = now
        for rank, sign in self._signs.items():
            if (met := frames.number_in(self._folder / f"met-{rank}")) != sign or rank in over:
                self._signs[rank], self._since[rank] = met, now
        # Ranks wait for each other, so that all stand still where one hangs: a little more than the meeting has.
        still = min(self._since.values())
        if now - still > self._section.rank_timeout_s + SAY_S:
            ranks = ", ".join(str(rank) for rank, since in self._since.items() if since == still)
            raise GroupLost(
                f"ranks {ranks} made no step within [training] rank_timeout_s = {self._section.rank_timeout_s:g}: they "
                "were ended; raise it where one step takes that long"
            )


def _end_left(folder: Path, section: TrainingSection) -> None:
    """What an agent that was killed left in `folder`: no rank of it writes anything once this returns."""
    hellos = []
    for path in folder.glob("hello-*.json"):
        with suppress(StateError):
            if (hello := frames.Hello.read(path)) is not None:
                hellos.append(hello)
    with suppress(StorageError):
        frames.put(folder / frames.END, b"")
    _farewell(folder, hellos, section)


def _farewell(folder: Path, hellos: Sequence[frames.Hello], section: TrainingSection) -> None:
    """Ranks of this machine are killed, others waited for until they heard that they are to end."""
    if slurm_jobs.by_srun(section.launch):
        slurm_jobs.cancel_of(folder)
    here = socket.gethostname()
    elsewhere = [hello.rank for hello in hellos if hello.host != here]
    for hello in hellos:
        if hello.host == here:
            _kill_if_same(hello)
    began, never = time.monotonic(), threading.Event()
    while any(not (folder / f"gone-{rank}").exists() for rank in elsewhere):
        if time.monotonic() - began > HEARD_S:  # by then they miss the signs of their agent
            break
        never.wait(LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)


def _ended(child: int) -> int | None:
    """The exit code, below 0 for a signal; None while it runs. Its number stays taken, unlike after Popen.poll."""
    try:
        told = os.waitid(os.P_PID, child, _LOOK)
    except ChildProcessError:  # waited for by somebody else, as where SIGCHLD is ignored
        return 0
    if told is None:
        return None
    return told.si_status if told.si_code == os.CLD_EXITED else -told.si_status


def _kill_session(leader: int) -> None:
    """Every process of the session that `leader` began, a child that nobody waited for: its number is its own."""
    with suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, leader, _LOOK)
        os.killpg(leader, signal.SIGKILL)


def _kill_if_same(hello: frames.Hello) -> None:
    """A number may be another process's by now: one that was born at another time is left alone."""
    with suppress(psutil.Error):
        process = psutil.Process(hello.pid)
        if hello.born and frames.born(hello.pid) == hello.born:
            process.kill()
            process.wait(END_S)
