"""`lorica experiment`: every run of a study, each appended to results.jsonl as it ends; those that are there are not
done again.

A run is a simulated federation (ops/lorica/simulation), or one for each silo (`alone`), or one silo that has all data
(`centralized`): the same rounds, the same number of epochs over the same examples for each. The best model by MicroAvg
on dev is scored on each silo's test split, and the best one by MacroAvg where that is another. Runs need nothing of
each other, so several are done at a time, each in a process of its own.
"""

import gc
import multiprocessing
import shutil
import time
from collections.abc import Collection, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.console import Console

from lorica.experiments.dask_cluster import DaskCluster, lost
from lorica.experiments.data import merged, own_copy, poisoned, require_same, require_test
from lorica.experiments.definition import SETUPS, Run, Study
from lorica.experiments.hostile_scores import hostile_scores
from lorica.experiments.practice.warm_up import start
from lorica.experiments.reports.averages import macro_average, micro_average
from lorica.experiments.reports.report import write_report
from lorica.experiments.results_file import BY_MACRO, append_result, one_shard_at_a_time, results
from lorica.experiments.scoring import pseudo_labels, scores
from lorica.experiments.shard import WHOLE, Shard
from lorica.hostile.backdoor import BACKDOOR
from lorica.simulation.run import logging_to, silos_in, simulate
from lorica.simulation.simulated import Simulated, make_folder, round_facts
from lorica.simulation.workers.children import children, end_with_parent
from lorica.simulation.workers.shares import threads_of_a_worker
from lorica.source_commit import commit
from lorica_coordinator.plans.model_source import ModelSource
from lorica_coordinator.plans.plan_folder import create_plan, require_valid
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import ConfigurationError, Conflict, LoricaError, StateError, StorageError
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName
from silo_agent.training.device import DeviceSettings
from silo_wire.messages import DeclineReason
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection

ALL = SiloName("all")
_FEDERATION = "study"
_QUORUM = "schedule.min_silos"
_OVERRIDES = "training.overrides."
_LABELS = "semi_supervised."
_DRAWN = "schedule.cohort_size"
_FOLLOWS = ("weight", "loss_reduction", "outcome")
_Outcome = dict[str, Any] | StateError | None
"""A run's line of results, or why it has none; None where another shard does it, or did."""


def run_study(
    study: Study,
    out: Path,
    *,
    data: Path,
    console: Console | None = None,
    device: str = "auto",
    threads: int = 0,
    jobs: int = 1,
    shard: Shard = WHOLE,
    cluster: DaskCluster | None = None,
) -> Path:
    """Do what is not done yet of `shard`, `jobs` runs at a time, and write the report of all shards, which is returned.
    `data` is where the study's paths begin. `threads` are a run's own; 0 shares the cores. `console` hears of each run.
    With a `cluster` its workers do the runs, as many at a time as there are of them.

    A run that fails by itself (StateError: its training diverged, say) leaves the others alone, and StateError tells of
    it at the end. Raises what would end all of them, and Conflict while a shard of this number, of any study, works in
    `out`: others work beside it. What was under way goes on the next time.
    """
    if cluster is not None and (jobs > 1 or not threads):
        raise ConfigurationError(
            "--dask: how many runs are done at a time is the cluster's to say, and the cores of its machines are not "
            "known here: leave --jobs out, and give --threads"
        )
    make_folder(out)
    console = console or Console(quiet=True)
    with ProcessLock(out / f"lock{shard.suffix}", "study"):
        found = silos_in(data / study.silos)
        _require_sound(study, found)
        with one_shard_at_a_time(out):
            require_same(found, out)
            training = DeviceSettings(device=device, threads=threads)
            source = start(study.start, data, out, training, console, lower_case=study.lower_case)
        silos = own_copy(found, out / f"data{shard.suffix}", study.at_most, lower_case=study.lower_case)
        settings = DeviceSettings(device=device, threads=threads_of_a_worker(threads, jobs))
        done = {line["run"] for line in results(out)}
        runs = shard.of_all(list(study.runs()))
        if not runs:
            raise ConfigurationError(f"study {study.name} has fewer runs than the {shard.of} shards: use fewer")
        left = [run for run in runs if run.key not in done]
        for key in {run.key for run in runs} & done:
            shutil.rmtree(out / "runs" / key, ignore_errors=True)  # of a kill between the line and this
        console.print(f"{len(runs)} runs, {len(runs) - len(left)} of them done", highlight=False)
        began_with = commit()  # now, not when a run ends: the code on disk may be another by then
        doings = [_Doing(run, silos, source, out, settings, began_with, shard, cluster is not None) for run in left]
        failed: list[str] = []
        with closing(_each(doings, jobs, cluster)) as each:
            for doing, facts in each:
                if facts is None:
                    console.print(f"left to another shard: {_described(doing.run)}", highlight=False, markup=False)
                    continue
                if isinstance(facts, StateError):
                    failed.append(f"{_described(doing.run)}: {facts}")
                    console.print(f"failed: {failed[-1]}", highlight=False, markup=False)
                    continue
                console.print(_line(doing.run, facts), highlight=False, markup=False)
    if failed:
        raise StateError(
            f"{len(failed)} of {len(left)} runs failed; the first: {failed[0]}; the same command tries them again, "
            "and with --report it shows the others"
        )
    with one_shard_at_a_time(out):
        return write_report(study, out)


def _require_sound(study: Study, silos: Mapping[SiloName, Path]) -> None:
    """Raises, before hours of work, what a later run would: ConfigurationError for its plan, DataError for a silo that
    cannot be scored."""
    require_test(silos)
    for run in study.runs():
        for key in run.values:
            named = key.removeprefix(_OVERRIDES).split(".")[0]
            if key.startswith(_OVERRIDES) and named not in (*silos, ALL):
                raise ConfigurationError(f"{_OVERRIDES}{named} names no silo: the silos are {', '.join(silos)}")
        count = quorum(run.values, silos) if SETUPS[run.setup].way == "together" else 1
        require_valid(
            name=run.setup,
            federation=_FEDERATION,
            preset=run.study.preset,
            seed=run.seed,
            overrides={**run.values, _QUORUM: count},
        )


def quorum(values: Mapping[str, object], silos: Collection[SiloName]) -> int:
    """How many of `silos` train in a round of a plan with `values`: all, but where those without labels train in no
    round, or in rounds of their own, which the quorum is then of; and no more than are drawn for one."""
    own = {key.removeprefix(_LABELS): value for key, value in values.items() if key.startswith(_LABELS)}
    section = SemiSupervisedSection.model_validate(own)
    unlabelled = sum(map(section.without_labels, silos))
    count = len(silos) if section.order == "together" or not unlabelled else unlabelled
    if section.teacher == "none":
        count = len(silos) - unlabelled
    drawn = values.get(_DRAWN, 0)
    return min(count, drawn) if isinstance(drawn, int) and drawn else count


def _each(doings: "Sequence[_Doing]", jobs: int, cluster: DaskCluster | None) -> "Generator[tuple[_Doing, _Outcome]]":
    """As they end."""
    if not doings:
        return
    if jobs == 1 and cluster is None:
        yield from ((doing, _done(doing)) for doing in doings)
        return
    with _workers(jobs) if cluster is None else cluster.workers(doings[0].out) as workers:
        waiting: dict[Future[_Outcome], _Doing] = {workers.submit(_done, doing): doing for doing in doings}
        for future in as_completed(waiting):
            try:
                facts = future.result()
            except BrokenProcessPool as error:
                raise StateError(
                    "a process of this study was killed: run the same command again, with fewer --jobs if memory "
                    "ran out"
                ) from error
            except Exception as error:
                if cluster is not None and (told := lost(error)) is not None:
                    raise told from error
                raise
            yield waiting[future], facts


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with this one, however it ends; an exception inside does not wait for what they are at.

    The executor's own thread is waited for in each case: Python, as it exits, writes to a pipe that this thread closes
    as it ends.
    """
    workers = ProcessPoolExecutor(jobs, children(), initializer=end_with_parent)
    try:
        yield workers
    except BaseException:
        for child in multiprocessing.active_children():
            child.terminate()
        raise
    finally:
        workers.shutdown(cancel_futures=True)


def _done(doing: "_Doing") -> _Outcome:
    """Shards of one folder may overlap, where the study was divided anew while some were at work: a run is one's,
    until its line is written and its folder deleted: who takes it next finds the line."""
    locks = doing.out / "locks"
    locks.mkdir(exist_ok=True)
    with ExitStack() as here:
        try:
            here.enter_context(ProcessLock(locks / doing.run.key, "study", patient=doing.patient))
        except Conflict:
            return None
        if doing.run.key in {line["run"] for line in results(doing.out)}:
            return None
        outcome = _of_nobody_else(doing)
        if isinstance(outcome, dict):
            append_result(doing.out, outcome, doing.shard)
            shutil.rmtree(doing.work, ignore_errors=True)  # what is left of it, the next command deletes
        return outcome


def _of_nobody_else(doing: "_Doing") -> _Outcome:
    begun_before = doing.work.exists()
    with logging_to(doing.work / "run.log"):
        try:
            return doing.facts()
        except (StorageError, Conflict):
            raise
        except LoricaError as error:
            if begun_before:  # by another version, perhaps
                return StateError(f"{error}; it was begun earlier: to begin it anew, delete {doing.work}")
            if isinstance(error, StateError):
                return error
            raise


@dataclass(frozen=True, slots=True)
class _Doing:
    run: Run
    silos: Mapping[SiloName, Path]
    source: ModelSource
    out: Path
    settings: DeviceSettings
    commit: str
    shard: Shard
    patient: bool
    """Whether it waits for who is at this run: at a cluster that is a run of this command, begun earlier."""

    @property
    def work(self) -> Path:
        return self.out / "runs" / self.run.key

    def facts(self) -> dict[str, Any]:
        if self.run.study.hostile is not None:
            return self._facts_beside_hostile_silos()
        began = time.monotonic()
        commits = self._commits()
        match SETUPS[self.run.setup].way:
            case "together":
                parts = [(self.silos, self._simulated("plan", self.silos))]
            case "alone":
                parts = [({silo: path}, self._simulated(silo, {silo: path})) for silo, path in self.silos.items()]
            case "centralized":
                folder = merged(self.silos, self.work / "merged" / ALL)
                parts = [(self.silos, self._simulated("plan", {ALL: folder}))]
        test: dict[str, dict[str, Any]] = {}
        by_macro: dict[str, dict[str, Any]] = {}
        dev: dict[str, dict[str, Any]] = {}
        for silos, simulated in parts:
            scored = scores(simulated, silos, self.settings, work=self.work, only=self.run.study.scored)
            test |= scored.by_micro
            by_macro |= scored.by_macro
            dev |= scored.dev
        facts = {
            "run": self.run.key,
            "study": self.run.study.name,
            "setup": self.run.setup,
            "seed": self.run.seed,
            "point": dict(self.run.point),
            "commit": " then ".join(commits),
            "torch": torch.__version__,
            "threads": self.settings.threads,
            "plans": [simulated.plan for _, simulated in parts],
            "test": test,
            "macro_exact_match": macro_average(test.values(), "exact_match"),
            "micro_exact_match": micro_average(test.values(), "exact_match"),
            "rounds": [[_of_round(row, self.run.study.scored) for row in simulated.rows] for _, simulated in parts],
            "losses": [_told_of(simulated.losses, self.run.study.scored) for _, simulated in parts],
        }
        facts |= {BY_MACRO: by_macro} if by_macro != test else {}
        facts |= {"dev": dev} if dev else {}
        facts |= {"pseudo_labels": taught} if (taught := self._pseudo_labels(parts)) else {}
        return {**facts, "seconds": time.monotonic() - began}

    def _pseudo_labels(self, parts: Sequence[tuple[Mapping[SiloName, Path], Simulated]]) -> list[dict[str, Any]]:
        most = self.run.study.pseudo_labels
        if not most:
            return []
        ((silos, simulated),) = parts  # a study that asks for it has no others
        pupils = self.run.study.pupils(silos)
        return pseudo_labels(simulated, silos, self.settings, work=self.work, pupils=pupils, most=most)

    def _facts_beside_hostile_silos(self) -> dict[str, Any]:
        """What the last model came to at honest silos. A federation that hostile silos brought to an end has no model,
        and a line that says so: nothing else of its plan ends it."""
        began, hostility = time.monotonic(), self.run.hostility
        for folder in ("poisoned", "of-plan"):  # of a run that was cut off, which does not go on
            shutil.rmtree(self.work / folder, ignore_errors=True)
        (self.work / "commits").unlink(missing_ok=True)
        commits, silos = self._commits(), dict(self.silos)
        if hostility is not None and hostility.attack.data is not None:
            for silo in hostility.silos:
                silos[silo] = poisoned(silos[silo], self.work / "poisoned" / silo, hostility.attack)
        hostile = () if hostility is None else hostility.silos
        facts: dict[str, Any] = {
            "run": self.run.key,
            "seed": self.run.seed,
            **self.run.point,
            "hostile": list(hostile),
            "commit": " then ".join(commits),
        }
        try:
            simulated = self._simulated("plan", silos)
        except StateError as error:
            if hostility is None or DeclineReason.TRAINING_FAILED.value not in str(error):
                raise
            return {**facts, "ended": str(error), "seconds": round(time.monotonic() - began, 1)}
        honest = {silo: path for silo, path in self.silos.items() if silo not in hostile}
        backdoor = hostility is None or hostility.attack is BACKDOOR
        found = hostile_scores(simulated, honest, self.settings, work=self.work, backdoor=backdoor)
        return {**facts, "test": found, "seconds": round(time.monotonic() - began, 1)}

    def _commits(self) -> list[str]:
        """Of the code that this run was begun with, and those that it went on with."""
        file = self.work / "commits"
        known = file.read_text(encoding="utf-8").split() if file.exists() else []
        if self.commit and self.commit not in known:
            known.append(self.commit)
            file.write_text("\n".join(known), encoding="utf-8")
        return known

    def _simulated(self, name: str, silos: Mapping[SiloName, Path]) -> Simulated:
        plans = self.work / "plans"
        if not (plans / name).exists():
            create_plan(
                plans,
                name=name,
                federation=_FEDERATION,
                source=self.source,
                preset=self.run.study.preset,
                seed=self.run.seed,
                overrides={**self.run.values, _QUORUM: quorum(self.run.values, silos)},
            )
        simulated = simulate(
            plans / name,
            silos,
            self.work / f"of-{name}",
            device=self.settings.device,
            threads=self.settings.threads,
            every_model=self.run.study.pseudo_labels > 0,
            hostility=self.run.hostility,
        )
        gc.collect()  # its agents hold each other, and its model: each simulation of a process would leave one behind
        return simulated


_Told = TypeVar("_Told")


def _told_of(by_silo: Mapping[SiloName, _Told], only: Collection[str]) -> dict[SiloName, _Told]:
    """A line need not be long because silos are many that nobody looks at by themselves."""
    return {silo: told for silo, told in by_silo.items() if not only or silo in only}


def _of_round(row: RoundRow, only: Collection[str]) -> dict[str, Any]:
    """Without what follows from the rest."""
    facts = round_facts(row)
    told = {
        silo: {key: value for key, value in of_silo.items() if key not in _FOLLOWS and value is not None}
        for silo, of_silo in _told_of(facts["silos"], only).items()
    }
    return {**facts, "silos": told}


def _line(run: Run, facts: Mapping[str, Any]) -> str:
    if "ended" in facts:
        return f"{_described(run)}: {facts['ended']}; {facts['seconds']:.0f} s"
    if run.study.hostile is not None:
        match = macro_average(facts["test"].values(), "exact_match")
        return f"{_described(run)}: exact match of honest silos {match:.1%}; {facts['seconds']:.0f} s"
    silos = ", ".join(f"{silo} {score['exact_match']:.1%}" for silo, score in facts["test"].items())
    return (
        f"{_described(run)}: exact match on test: MacroAvg {facts['macro_exact_match']:.1%}, "
        f"MicroAvg {facts['micro_exact_match']:.1%}; {silos}; {facts['seconds']:.0f} s"
    )


def _described(run: Run) -> str:
    return f"{SETUPS[run.setup].label}, seed {run.seed}{run.at}"
