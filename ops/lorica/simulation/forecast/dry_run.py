"""`lorica simulate --dry-run`: the look before a federation. No round is run; what one would take is counted, and
measured by doing a little of it.

Each silo is looked at as its agent would look at a plan that is offered: its policy, its data, its database. One that
would refuse is named with its reason, and with what a plan lacks, in `problems`; what can be estimated still is.
"""

import tempfile
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lorica.simulation.forecast.estimate import Estimate, SiloCounts, SiloTimes, estimate
from lorica.simulation.forecast.mask_traffic import mask_traffic
from lorica.simulation.forecast.measure import measured
from lorica.simulation.forecast.traffic import Traffic
from lorica.simulation.model_files import round_file
from lorica.simulation.silo import settings_of
from lorica.simulation.simulated import make_folder
from lorica.simulation.workers.shares import threads_of_a_worker
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.vectors.model_file import BASE_FILE, MODEL_FILE
from lorica_security.errors import LoricaError, StateError
from lorica_security.identifiers import SiloName
from silo_agent.edges.workshop.silo_sources import Reading, SiloSources
from silo_agent.edges.workshop.workshop import enough_memory
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.ports import RoundModel
from silo_agent.training.device import DeviceSettings
from silo_agent.training.loss_log import require_losses
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.canonical import Digest
from silo_wire.manifest import Layout
from silo_wire.plans.plan import PlanBundle


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """`problems` keep the plan from being run among these silos, in a line each; `estimate` is of the silos whose data
    can be read."""

    bundle: PlanBundle
    device: str
    estimate: Estimate
    problems: tuple[str, ...]

    def require_no_problem(self) -> None:
        """Raise StateError with all of them."""
        if self.problems:
            raise StateError("; ".join(self.problems))


def dry_run(
    plan_folder: Path, silos: Mapping[SiloName, Path], out: Path, *, device: str, threads: int, workers: int = 1
) -> DryRun:
    """Of the plan in `plan_folder`; a folder in `out` holds its model meanwhile. Of `workers` one is measured, with the
    threads that it would have.

    Raises what is wrong with the plan or the device, and StateError where no silo's data can be used.
    """
    bundle = compile_plan(plan_folder)
    threads = threads_of_a_worker(threads, min(workers, len(silos)))
    problems = list(_of_the_cohort(bundle, silos))
    counts: list[SiloCounts] = []
    times: dict[SiloName, SiloTimes] = {}
    make_folder(out)
    with tempfile.TemporaryDirectory(dir=out, prefix=".dry-run-") as folder:
        bench = _Bench(bundle, plan_folder, Path(folder), device, threads)
        for silo, data in sorted(silos.items()):
            try:
                settings = settings_of(data, device=device, threads=threads)
                policy = SiloPolicy(
                    rules=settings.policy,
                    silo=silo,
                    processes=settings.training.processes,
                    rank_interface=settings.training.rank_interface,
                    sharded=settings.training.sharded,
                )
                problems += [_refusal(silo, objection) for objection in policy.objections(bundle)]
                with enough_memory():
                    found, took = bench.tried(policy, SiloSources(settings, Path(folder) / "scratch" / silo))
            except LoricaError as error:  # of its silo.toml, data or database, or of a training that comes to nothing
                problems.append(_refusal(silo, error))
            else:
                counts.append(found)
                times[silo] = took
    if not counts:
        raise StateError("; ".join(problems))
    masks: Mapping[SiloName, Traffic] = {}
    if bundle.plan.aggregation.secure_aggregation and len(silos) >= bundle.plan.schedule.min_silos:
        masks = mask_traffic(bundle, list(silos))
    return DryRun(
        bundle=bundle,
        device=bench.device,
        estimate=estimate(bundle, counts, times, masks, workers=workers),
        problems=tuple(problems),
    )


def _of_the_cohort(bundle: PlanBundle, names: Collection[str]) -> Iterator[str]:
    plan, silos = bundle.plan, len(names)
    if silos >= plan.schedule.min_silos:
        if wrong := plan.too_few(names):
            yield wrong
    else:
        yield (
            f"plan {plan.name} has min_silos = {plan.schedule.min_silos} and there are {silos} silos: add some, or "
            "make a plan for fewer"
        )


def _refusal(silo: SiloName, why: LoricaError) -> str:
    return f"silo {silo} does not take part: {why}"


class _Bench:
    """The plan's model in memory and its first round model in `work`, for one silo after the other."""

    def __init__(self, bundle: PlanBundle, plan_folder: Path, work: Path, device: str, threads: int) -> None:
        self._bundle, self._work = bundle, work
        self._settings = DeviceSettings(device=device, threads=threads)
        plan = bundle.plan.model
        base = None
        if bundle.base_layout is not None:
            base = self._stored(plan_folder / BASE_FILE, str(plan.base), bundle.base_layout, bundle.base_layout)
        self._model = PlanModel(bundle, self._settings, base=base)
        self._start = self._stored(plan_folder / MODEL_FILE, plan.initial, bundle.layout, bundle.model_layout)

    @property
    def device(self) -> str:
        return str(self._model.device)

    def tried(self, policy: SiloPolicy, sources: SiloSources) -> tuple[SiloCounts, SiloTimes]:
        """What one silo's data come to; raises what an agent's preparing, training and scoring raise."""
        plan = self._bundle.plan
        data = sources.data_for(Reading.of(plan, policy.silo))
        require_losses(plan, policy.silo, len(data.train))
        trainer = SiloTrainer(self._bundle, data, policy.silo, self._settings, model=self._model)
        splits = trainer.encoded("train"), trainer.encoded("dev")
        executes = plan.evaluation.execution and policy.rules.allow_execution
        if executes:
            sources.check_database()
        counts = SiloCounts(
            silo=policy.silo,
            train=len(data.train),
            dev=len(data.dev),
            inputs_cut=sum(split.inputs_cut for split in splits),
            targets_cut=sum(split.targets_cut for split in splits),
        )
        work = self._work / "update"
        work.mkdir(exist_ok=True)
        times = measured(
            trainer,
            self._model,
            self._start,
            plan=plan,
            silo=policy.silo,
            sources=sources,
            executes=executes,
            work=work,
        )
        return counts, times

    def _stored(self, file: Path, initial: str, layout: Layout, published: Layout) -> RoundModel:
        """The model in `file` of the plan's folder as the coordinator hands it out."""
        models = ModelStore(
            self._work / f"{file.stem}-store",
            layout=layout,
            model_layout=published,
            initial=Digest(initial),
            initial_file=file,
        )
        return round_file(models, models.initial(), self._work / f"{file.stem}.model")
