"""`lorica simulate`: a plan, from its first round to its last, among silos that are folders of this machine, in one
process.

The coordinator's service with its round machine, arithmetic, stores and keys, and each silo's agent with its policy,
trainer and ledger, are what a federation runs; between them are calls instead of a network. Nobody is late here,
however long a silo trains: the clock that deadlines are measured by stands still. Everything lies in one folder, and a
run that was cut off goes on there where it was.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import structlog
from prometheus_client import CollectorRegistry

from lorica.event_loop import to_its_end
from lorica.hostile.named import Hostility
from lorica.simulation import disk
from lorica.simulation.direct_coordinator import DirectCoordinator, SharedModels
from lorica.simulation.going_on import GoingOn
from lorica.simulation.hostile_silos import Conspiracy
from lorica.simulation.losses import curve
from lorica.simulation.model_files import KeptModel
from lorica.simulation.own_coordinator import put_on_shelf, require_same, simulated_coordinator
from lorica.simulation.silo import SimulatedSilo, enrolled, settings_of
from lorica.simulation.silo_data import lines
from lorica.simulation.simulated import Simulated, make_folder, write
from lorica.simulation.workers.one_bench import OneBench, TakingTurns
from lorica.simulation.workers.shares import devices_in_turn, shared_out, threads_of_a_worker
from lorica.simulation.workers.worker_pool import Died, WorkerPool, on_their_devices
from lorica_coordinator.composition import service_of
from lorica_coordinator.edges.telemetry.metrics import CoordinatorMetrics
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.service.records import RoundRow
from lorica_security.errors import ConfigurationError, LoricaError, StateError
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName, federation_name, silo_name
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.service.group_keeper import GroupKeeper
from silo_agent.service.ports import TrainerPort
from silo_agent.training.device import DeviceSettings, chosen_device
from silo_wire.plans.plan import Plan

OnRound = Callable[[RoundRow], None]
LOOK_S = 1.0
"""Between two looks for rounds that have ended, which are told to people; the rounds wait for nobody."""


@contextmanager
def logging_to(file: Path) -> Iterator[None]:
    """What coordinator and agents log goes to `file`, in lines of JSON, while inside. Raises StorageError where it
    cannot be written."""
    make_folder(file.parent)
    with file.open("a", encoding="utf-8") as lines:
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.TimeStamper(fmt="iso", utc=True),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(),
            ],
            logger_factory=structlog.PrintLoggerFactory(lines),
        )
        try:
            yield
        finally:
            structlog.reset_defaults()


def silos_in(folder: Path) -> dict[SiloName, Path]:
    """The silos below `folder`: every folder with a train.jsonl, by its name; raises ConfigurationError where there is
    none."""
    found = sorted({path.parent for name in ("train.jsonl", "train.jsonl.gz") for path in folder.glob(f"*/{name}")})
    if not found:
        raise ConfigurationError(f"no folder in {folder} holds a train.jsonl: give the folder of the silos' folders")
    return {silo_name(path.name): path for path in found}


def simulate(
    plan_folder: Path,
    silos: Mapping[SiloName, Path],
    out: Path,
    *,
    device: str = "auto",
    threads: int = 0,
    workers: int = 1,
    devices: Sequence[str] = (),
    hostility: Hostility | None = None,
    every_model: bool = False,
    on_round: OnRound = lambda row: None,
) -> Simulated:
    """Run the plan in `plan_folder` to its end, in `out`, with `threads` of PyTorch in each of `workers` processes;
    with 1 in this one. With `devices`, worker n of them trains on the n-th, and from the first on again after the last.

    `out` gets rounds.jsonl and summary.json, and unless this process has logs of its own (structlog), simulation.log.
    Silos that `hostility` names send what its attack makes. They look at all updates of a round, which nobody keeps, so
    such a simulation does not go on where it was cut off. With `every_model`, `kept` has each model that silos fetched.
    Raises what stopped it: of the plan, the data, a silo's policy, or a worker that died; ConfigurationError for
    hostile silos in an `out` that is there already.
    """
    workers = min(workers, len(silos))
    threads = threads_of_a_worker(threads, workers)
    of_workers = devices_in_turn(devices, device=device, workers=workers)
    bundle = compile_plan(plan_folder)
    plan, conspiracy = bundle.plan, None
    if hostility is not None:
        conspiracy = Conspiracy(hostility, plan, bundle.update_layout, silos)
        if out.exists():
            raise ConfigurationError(
                f"{out} is there already, and a simulation with hostile silos does not go on: delete it"
            )
    make_folder(out)
    coordinator = simulated_coordinator(out / "coordinator", federation_name(plan.federation))
    kept = KeptModel(out / "kept", every=every_model)
    parts = coordinator, plan, plan_folder, silos, out, of_workers, threads, on_round, conspiracy, kept
    logs = nullcontext() if structlog.is_configured() else logging_to(out / "simulation.log")
    with logs, ProcessLock(coordinator.folder.lock, "simulation"), disk.not_waited_for():
        done = to_its_end(_Simulation(*parts).run())
    write(out, done, score=plan.task.score_label)
    return done


@dataclass(slots=True)
class _Simulation:
    coordinator: Coordinator
    plan: Plan
    plan_folder: Path
    data: Mapping[SiloName, Path]
    out: Path
    devices: tuple[str, ...]
    """Of each worker."""
    threads: int
    on_round: OnRound
    conspiracy: Conspiracy | None
    kept: KeptModel
    _heard: set[tuple[int, int]] = field(default_factory=set)

    async def run(self) -> Simulated:
        began, started = time.monotonic(), datetime.now(UTC).timestamp()
        audit = self.coordinator.audit()
        metrics = CoordinatorMetrics(CollectorRegistry())
        async with service_of(self.coordinator, metrics, audit=audit, clock=lambda: started, steady=lambda: 0.0) as (
            service,
            loop,
        ):
            await require_same(service, self.plan, self.data, self.out)
            put_on_shelf(self.coordinator, self.plan, self.plan_folder)
            with ExitStack() as open_here:
                silos = [open_here.enter_context(await self._silo(service, name)) for name in sorted(self.data)]
                if self.plan.aggregation.secure_aggregation:  # a plan in the clear asks for nobody's key
                    for silo in silos:
                        silo.pin([other.credentials for other in silos])
                await self._play(service, loop, silos)
            standing = await service.status()
        assert standing.plan is not None
        assert standing.model is not None
        assert standing.best_model is not None
        store = self.coordinator.open_store()
        try:
            rows = store.rounds(standing.plan, 0)
        finally:
            store.close()
        return Simulated(
            coordinator=self.coordinator,
            plan=standing.plan,
            best=standing.best_model,
            final=standing.model,
            rows=rows,
            seconds=time.monotonic() - began,
            kept=self.kept,
            losses={silo.credentials.silo: curve(silo.work.losses) for silo in silos},
        )

    async def _silo(self, service: Federation, name: SiloName) -> SimulatedSilo:
        folder = SiloFolder(self.out / "silos" / name)
        folder.make()
        credentials = await enrolled(service, self.coordinator.federation, name, folder)
        return SimulatedSilo.opened(
            folder, settings_of(self.data[name], device=self.devices[0], threads=self.threads), credentials
        )

    async def _play(self, service: Federation, loop: "asyncio.Task[None]", silos: Sequence[SimulatedSilo]) -> None:
        """Until every agent knows that the plan has ended, or somebody will not go on."""
        here = asyncio.get_running_loop()
        ended: asyncio.Future[None] = here.create_future()

        def ends(error: LoricaError) -> None:
            if not ended.done():
                ended.set_exception(error)

        def died(error: LoricaError) -> None:
            here.call_soon_threadsafe(ends, error)

        with self._trainers(silos, died) as trainer_of:
            await self._play_with(trainer_of, service, loop, silos, ended)

    @contextmanager
    def _trainers(self, silos: Sequence[SimulatedSilo], died: Died) -> Iterator[Callable[[SiloName], TrainerPort]]:
        """Each silo's, in worker processes or on the one bench of this one."""
        named = {silo.credentials.silo: silo for silo in silos}
        if len(self.devices) > 1:
            # For aggregation, as beside one bench.
            chosen_device(DeviceSettings(device=self.devices[0], threads=self.threads))
            sizes = {name: sum(1 for _ in lines(self.data[name], "train")) for name in named}
            shares = shared_out(sizes, len(self.devices))
            work = on_their_devices({name: silo.work for name, silo in named.items()}, shares, self.devices)
            with WorkerPool(work, shares, died) as pool:
                yield pool.trainer
            return
        bench = OneBench()

        yield lambda name: TakingTurns(bench, bench.workshop(named[name].work))

    async def _play_with(
        self,
        trainer_of: Callable[[SiloName], TrainerPort],
        service: Federation,
        loop: "asyncio.Task[None]",
        silos: Sequence[SimulatedSilo],
        ended: "asyncio.Future[None]",
    ) -> None:
        models = SharedModels(self.out / "models", self.kept)
        finished: set[SiloName] = set()

        def refused(silo: SimulatedSilo, told: str) -> None:
            if not ended.done():
                # The coordinator is told nothing of a silo's files, and under privacy next to nothing: here both are
                # one person's.
                why = told if silo.notes.failure in told else f"{told}: {silo.notes.failure}"
                ended.set_exception(StateError(f"silo {silo.credentials.silo} does not take part: {why}"))

        def is_finished(silo: SiloName) -> None:
            finished.add(silo)
            if len(finished) == len(silos) and not ended.done():
                ended.set_result(None)

        agents, keepers = [], list[GroupKeeper]()
        for silo in silos:
            name = silo.credentials.silo
            direct = DirectCoordinator(
                service,
                silo.credentials,
                models,
                refused=lambda told, silo=silo: refused(silo, told),  # type: ignore[misc]
                finished=lambda name=name: is_finished(name),  # type: ignore[misc]
                conspiracy=self.conspiracy,
            )
            agents.append(silo.agent(direct, trainer_of(name)))
            keepers.append(silo.groups(direct))
        telling = asyncio.create_task(self._tell(service))
        tasks = [asyncio.create_task(agent.run()) for agent in agents]
        try:
            everybody = [silo.credentials.silo for silo in silos]
            masked = self.plan.aggregation.secure_aggregation and len(everybody) >= self.plan.schedule.min_silos
            if masked and service.groups.head is None:
                kinds = self.plan.semi_supervised.who_trains.kinds(everybody)
                await service.groups.propose_first(kinds, colluders=self.plan.aggregation.colluders)
                for silo, keeper in zip(silos, keepers, strict=True):
                    await keeper.sync()
                    if silo.allow_groups():
                        await keeper.sync()
                    # each has signed; who has not heard of the last signature asks before its first roster
            if (await service.status()).phase != "finished":
                await service.start_plan(self.plan.name)
            await asyncio.wait((ended, loop, telling, *tasks), return_when=asyncio.FIRST_COMPLETED)
            for task in (loop, telling, *tasks):
                if task.done():
                    task.result()
            ended.result()
        finally:
            ended.cancel()  # what agents say while they stop ends nothing any more
            for agent in agents:
                agent.stop()
            await asyncio.gather(*tasks, return_exceptions=True)
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)
            self._told(await service.rounds(), to_the_end=True)

    async def _tell(self, service: Federation) -> None:
        """Raises StateError where the rounds will not come to their end by themselves."""
        going_on = GoingOn()
        while True:
            rows = await service.rounds()
            self._told(rows)
            going_on.require(rows, service.fault, now=time.monotonic())
            await asyncio.sleep(LOOK_S)

    def _told(self, rows: Sequence[RoundRow], *, to_the_end: bool = False) -> None:
        """Each attempt once: when it has ended and is scored, or so many came after it that it will not be: scores of a
        masked round's model come with the next round's sum."""
        last = len(rows) - 1
        for number, row in enumerate(rows):
            if (row.round, row.attempt) in self._heard or row.outcome == "running":
                continue
            settled = last - number >= (1 if row.masked is None else 2)
            if row.micro_exact_match is not None or settled or to_the_end:
                self._heard.add((row.round, row.attempt))
                self.kept.told(row)
                self.on_round(row)
