"""What a plan will take of time, wire, memory and disk, from what is counted and what was measured; pure arithmetic.

Seconds are those of the machine that was measured on, of computing alone: no network, no masks, no aggregation. Bytes
on the wire are the content of chunks, as `lorica_sent_bytes_total` and `lorica_received_bytes_total` count it, and
secure aggregation's own messages; what TLS and gRPC add, and orders and reports, is below a hundredth of any model
worth a federation. Every round is taken to succeed at the first attempt, with all silos.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from lorica.simulation.forecast.traffic import Traffic
from lorica.simulation.workers.shares import shared_out
from lorica_coordinator.edges.check.machine_checks import needed_memory
from lorica_coordinator.edges.models.plan_disk import plan_disk
from lorica_security.identifiers import SiloName
from silo_wire.manifest import Layout
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.work import optimizer_steps

FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloCounts:
    """Examples, and how many inputs and targets of both splits the plan's limits cut."""

    silo: SiloName
    train: int
    dev: int
    inputs_cut: int
    targets_cut: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloTimes:
    """Measured at one silo's data: seconds of one optimizer step, of a round's training apart from its steps, of
    scoring one example.

    `peak_bytes` is the most memory that the process had meanwhile, its program included, or of a GPU what PyTorch had
    there; 0: not known.
    """

    step_s: float
    beside_steps_s: float
    example_s: float
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloMemory:
    """Bytes. All but `peak` follow from the plan; what they leave of `peak` is activations, data and the program. 0:
    not known.

    To `optimizer` counts what it keeps, the average of iterates, and a correction of drift.
    """

    parameters: int
    gradients: int
    optimizer: int
    round_model: int
    peak: int

    @property
    def counted(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.round_model


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloEstimate:
    """`steps` and `scored` are of one round, seconds of one training and of one evaluation.

    `traffic` is a round's, of which `masks` is what secure aggregation adds; `whole_traffic` is the plan's, with what
    is fetched once.
    """

    counts: SiloCounts
    steps: int
    scored: int
    training_s: float
    evaluation_s: float
    traffic: Traffic
    masks: Traffic
    whole_traffic: Traffic
    memory: SiloMemory

    @property
    def silo(self) -> SiloName:
        return self.counts.silo


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Of a plan among `silos`. `federation_s`: the slowest silo sets each phase; `simulation_s`: those of each of
    `workers` processes train and score in turn.

    `late` says in a line each which deadline a silo will miss. `epsilon` is None where nothing is promised.
    """

    plan: str
    parameters: int
    rounds: int
    evaluations: int
    silos: tuple[SiloEstimate, ...]
    workers: int
    federation_s: float
    simulation_s: float
    coordinator_traffic: Traffic
    coordinator_memory: int
    coordinator_disk: int
    epsilon: float | None
    late: tuple[str, ...]


def estimate(
    bundle: PlanBundle,
    counts: Sequence[SiloCounts],
    times: Mapping[SiloName, SiloTimes],
    masks: Mapping[SiloName, Traffic],
    *,
    workers: int = 1,
) -> Estimate:
    """Of at least one silo. `masks` is what secure aggregation adds to a round, nothing where a silo is not in it.

    `workers` are the processes of a simulation, among which silos are shared out.
    """
    plan = bundle.plan
    rounds, evaluations = plan.schedule.rounds, evaluations_of(plan)
    silos = tuple(_of_silo(bundle, one, times[one.silo], masks.get(one.silo, Traffic())) for one in counts)
    training = {it.silo: it.training_s for it in silos}
    scoring = {it.silo: it.evaluation_s for it in silos}
    shares = shared_out({it.silo: it.counts.train for it in silos}, workers)

    def in_turn(seconds: Mapping[SiloName, float]) -> float:
        return max(sum(seconds[silo] for silo in share) for share in shares)

    private = plan.privacy.level != "none"
    return Estimate(
        plan=plan.digest,
        parameters=plan.model.parameters,
        rounds=rounds,
        evaluations=evaluations,
        silos=silos,
        workers=len(shares),
        federation_s=rounds * max(training.values()) + evaluations * max(scoring.values()),
        simulation_s=rounds * in_turn(training) + evaluations * in_turn(scoring),
        coordinator_traffic=sum((it.whole_traffic for it in silos), Traffic()),
        coordinator_memory=needed_memory(),
        coordinator_disk=plan_disk(bundle, len(silos)),
        epsilon=plan.privacy.epsilon(rounds=rounds, weighted=plan.weighted) if private else None,
        late=tuple(_late(plan, silos)),
    )


def _of_silo(bundle: PlanBundle, counts: SiloCounts, times: SiloTimes, masks: Traffic) -> SiloEstimate:
    plan = bundle.plan
    steps = steps_of_round(plan, counts)
    scored = min(plan.evaluation.max_examples or counts.dev, counts.dev) if evaluations_of(plan) else 0
    traffic = Traffic(down=bundle.model_layout.total_bytes, up=bundle.update_bytes) + masks
    return SiloEstimate(
        counts=counts,
        steps=steps,
        scored=scored,
        training_s=times.beside_steps_s + steps * times.step_s,
        evaluation_s=scored * times.example_s,
        traffic=traffic,
        masks=masks,
        whole_traffic=traffic * plan.schedule.rounds + once(bundle),
        memory=_memory(bundle, times.peak_bytes),
    )


def steps_of_round(plan: Plan, counts: SiloCounts) -> int:
    """Optimizer steps of one round at one silo; under record-level privacy they are the plan's own number."""
    if plan.privacy.level == "record":
        return plan.privacy.steps
    return optimizer_steps(counts.train, plan.training.for_silo(counts.silo))


def evaluations_of(plan: Plan) -> int:
    """How often silos score a model in the plan's course, the initial one included."""
    timetable = plan.timetable
    return sum(timetable.scores(number) for number in range(timetable.rounds + 1))


def once(bundle: PlanBundle) -> Traffic:
    """What a silo fetches once: the plan, what adapters are for, and at the end the best model.

    The last model is fetched to be scored, or as the best one. Where an older one is better than it and not here any
    more, that is one model more.
    """
    base = bundle.base_layout.total_bytes if bundle.base_layout else 0
    return Traffic(down=len(bundle.encode()) + base + bundle.model_layout.total_bytes)


def _memory(bundle: PlanBundle, peak: int) -> SiloMemory:
    plan = bundle.plan
    # In the type that it travels in: a mapping of its file, on a GPU a copy.
    round_model = bundle.model_layout.total_bytes if plan.training.fedprox_mu else 0
    average = FLOAT_BYTES * bundle.layout.parameters if plan.privacy.average_decay else 0
    correction = FLOAT_BYTES * bundle.layout.parameters if plan.corrects_drift else 0
    return SiloMemory(
        parameters=FLOAT_BYTES * bundle.parameters_in_memory,
        gradients=FLOAT_BYTES * bundle.layout.parameters,
        optimizer=optimizer_bytes(plan.training.optimizer, bundle.layout) + average + correction,
        round_model=round_model,
        peak=peak,
    )


def optimizer_bytes(optimizer: str, layout: Layout) -> int:
    """Of a silo's local optimizer: an Adam has two moments of each parameter; Adafactor has of a matrix its rows and
    columns alone; plain SGD has nothing."""
    if optimizer == "sgd":
        return 0
    if optimizer != "adafactor":
        return 2 * FLOAT_BYTES * layout.parameters
    numbers = 0
    for tensor in layout.tensors:
        *outer, columns = tensor.shape
        numbers += prod(outer) + prod((*outer[:-1], columns)) if outer else tensor.elements
    return FLOAT_BYTES * numbers


def _late(plan: Plan, silos: Sequence[SiloEstimate]) -> Iterator[str]:
    schedule = plan.schedule
    for silo in silos:
        for what, seconds, key, deadline in (
            ("training", silo.training_s, "training_deadline_s", schedule.training_deadline_s),
            ("evaluation", silo.evaluation_s, "evaluation_deadline_s", schedule.evaluation_deadline_s),
        ):
            if seconds > deadline:
                yield (
                    f"{what} at silo {silo.silo} takes about {seconds:,.0f} s, [schedule] {key} is {deadline:g}: "
                    "such a silo is late each time; raise it, or give that silo less to do"
                )
