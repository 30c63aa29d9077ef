"""Target `conformity`: the real trainer, every noised step of it on a tape (tape.py), and the tape beside what the silo's ledger says.

A plan of a small T5 is trained for some rounds, at two silos, once more after a restart; as silos do it, through SiloTrainer, with the
entries that PrivacyGuard writes. Each record has words of its own, so that a sum of clipped gradients can be taken apart into
records, whose gradients the audit reckons itself (oracle.py). Learning rates are so small that gradients at the first model hold for
all steps. Half of what is checked is exact; for the rest see checks.py.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import T5Config, T5ForConditionalGeneration

from ops.privacy_audit.audited_plan import END, SPECIAL, bundle_of, data_of, word
from ops.privacy_audit.checks import (
    FALSE_ALARM,
    Check,
    beyond,
    binomial,
    correlation_limit,
    distance_from_normal,
    distance_limit,
    likely,
    mean_products,
    none,
    rare,
    sizes_spread,
    spread_limits,
    worst,
)
from ops.privacy_audit.oracle import Oracle
from ops.privacy_audit.tape import Tape, Weight, taped
from security.chain import Head
from security.privacy.accounting import UNLIMITED, Budget, GaussianRelease
from security.privacy.ledger import Entry
from security.privacy.ledger_file import PrivacyLedgerFile
from silo_agent.service.privacy import PrivacyGuard
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model import T5, bind, vector_blocks
from silo_agent.training.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.text_to_sql_data import Example
from silo_agent.training.tokenizer import TextTokenizer
from silo_agent.training.views import WORDINGS
from silo_wire.ledger_receipt import LedgerReceipt
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plan import PlanBundle, TrainingSection
from silo_wire.privacy import PrivacySection

RECORDS = 24
UNIT_SIZES = (1, 2, 3, 4)
"""In turn, of the plan whose units have several records."""
VIEWS = 3
"""In the plan whose records have several."""
STEPS = 10
LOSS_DRAWS = 20_000
MULTIPLIERS = (0.7, 2.3)
"""Neither is 1, which a root or a square would leave as it is."""
CLIPPED_TO = 4.0
"""A third of the records have gradients of two to nine times this norm, the shortest are a fifth of it."""
MARGIN = 2.0**-10
"""What the trainer clips below max_grad_norm by, of it (silo_agent/training/private/clipping.py)."""
LOSS_MULTIPLIER = 5.0
EXACT, NOISE = 1e-3, 0.01
"""Relative: how far a record's part may be off, and a step's noise."""
TAIL = 4.0

_EXPECTED, _NOMINAL = 18, 60
"""A rate of 0.3; the true number of records would make it 0.75."""
VOCABULARY = 6144
"""So that a step has 200,000 numbers, whose noise is measured to 0.15 %."""
# Without a rectifier: a unit near zero, which float32 puts on the other side, would move a gradient by 0.2 %.
_SHAPE = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 32,
    "num_layers": 1,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,  # nosec B105  # a number of a vocabulary
}
_SCALES = (0.05, 0.2, 1.0)
"""Of the embeddings of a record's words, in turn: they make the norms of gradients."""
_SILOS = ("silo-a", "silo-b")
_CLOCK = 1_800_000_000.0
_NOTHING = 1e-30
"""In place of 0 where something is divided by what ought not to be 0."""

Floats = NDArray[np.float32]
Floats64 = NDArray[np.float64]
Truths = NDArray[np.bool_]


Records = tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class World:
    """The same for all trainings of an audit."""

    model: T5
    records: Records
    """The words of question and answer, by number."""
    oracle: Oracle

    @property
    def loss_bound(self) -> float:
        """Half of the losses are above it."""
        return round(float(np.median(self.oracle.losses)), 3)

    @classmethod
    def of(cls, seed: int, vocabulary: int = VOCABULARY) -> "World":
        records = tuple(
            (
                tuple(record + RECORDS * place for place in range(1 + record % 4)),
                tuple(record + RECORDS * place for place in range(1 + record // 4 % 2)),
            )
            for record in range(RECORDS)
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: T5 = T5ForConditionalGeneration(T5Config.from_dict({**_SHAPE, "vocab_size": vocabulary}))
        scales = torch.full((vocabulary, 1), _SCALES[0])
        for number in range(vocabulary - SPECIAL):
            scales[SPECIAL + number] = _SCALES[number % RECORDS % len(_SCALES)]
        with torch.no_grad():
            model.shared.weight.mul_(scales)
        model.eval()
        return cls(model, records, Oracle.of(model, _ids(records)))

    @property
    def ids(self) -> list[tuple[list[int], list[int]]]:
        """Of question and answer."""
        return _ids(self.records)


def _ids(records: Records) -> list[tuple[list[int], list[int]]]:
    def of(side: Sequence[int]) -> list[int]:
        return [*(SPECIAL + number for number in side), END]

    return [(of(asked), of(answered)) for asked, answered in records]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One training, and what its silo's ledger says of it. `numbers` are the plan's, as the audit made it."""

    name: str
    numbers: GaussianRelease
    units: tuple[tuple[int, ...], ...]
    """The records of each unit."""
    unit_field: str
    tape: Tape
    entries: tuple[Entry, ...]
    summary: TrainingSummary
    oracle: Oracle
    """Of the plan's views."""

    @property
    def gradients(self) -> GaussianRelease:
        """What the ledger says."""
        return next((entry.release for entry in self.entries if entry.mechanism == "gradients"), GaussianRelease(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One plan, and where and when it is trained: silo and round of each training. A pair that comes twice is a restart."""

    multiplier: float
    steps: int = STEPS
    loss_draws: int = LOSS_DRAWS
    grouped: bool = False
    views: int = 1
    trainings: Sequence[tuple[str, int]] = ((_SILOS[0], 1),)

    @property
    def name(self) -> str:
        grouped = ", units of several records" if self.grouped else ""
        views = f", {self.views} views of a record" if self.views > 1 else ""
        return f"multiplier {self.multiplier:g}{grouped}{views}"


def plans(steps: int = STEPS, loss_draws: int = LOSS_DRAWS) -> tuple[Audited, ...]:
    several = ((_SILOS[0], 1), (_SILOS[0], 2), (_SILOS[0], 1), (_SILOS[1], 1))
    first, second = MULTIPLIERS
    return (
        Audited(multiplier=first, steps=steps, loss_draws=loss_draws, trainings=several),
        Audited(multiplier=second, steps=steps, loss_draws=loss_draws),
        Audited(multiplier=1.0, steps=steps, loss_draws=loss_draws, grouped=True),
        Audited(multiplier=1.3, steps=steps, loss_draws=loss_draws, views=VIEWS),
    )


def conformity(world: World, audited: Sequence[Audited], work: Path) -> list[Check]:
    """Train each plan, and hold what happened against what is promised; `work` is an empty folder."""
    checks: list[Check] = []
    made: list[Training] = []
    for number, plan in enumerate(audited):
        folder = work / str(number)
        folder.mkdir()
        of_plan = _trained(world, plan, folder)
        checks += _of_plan(world, plan, of_plan)
        made += of_plan
    return [*checks, *_independence(made), *_keys(made)]


# --- the trainings


def _trained(world: World, audited: Audited, work: Path) -> list[Training]:
    units = _units(audited.grouped)
    privacy = PrivacySection(
        level="record",
        nominal_records=_NOMINAL,
        expected_batch_size=_EXPECTED,
        steps=audited.steps,
        noise_multiplier=audited.multiplier,
        loss_bound=world.loss_bound,
        loss_noise_multiplier=LOSS_MULTIPLIER,
        unit_field="patient" if audited.grouped else "",
        augmentations=audited.views,
    )
    training = TrainingSection(
        optimizer="adamw",
        learning_rate=1e-7,
        batch_size=4,
        max_grad_norm=CLIPPED_TO,
        dropout=0.0,
        schema_in_input=False,
    )
    rounds = max(number for _, number in audited.trainings)
    bundle = bundle_of(world.model, training, privacy, rounds)
    device = DeviceSettings(device="cpu", threads=torch.get_num_threads())
    vector = b"".join(vector_blocks(bind(copy.deepcopy(world.model), bundle.layout)))
    (work / "model").write_bytes(vector)
    model = PlanModel(bundle, device)
    owner = {record: f"unit-{unit}" if audited.grouped else "" for unit, of in enumerate(units) for record in of}
    data = data_of(
        [
            Example(f"train-{number}", _text(asked), _text(answered), _SILOS[0], unit=owner[number])
            for number, (asked, answered) in enumerate(world.records)
        ]
    )
    oracle = _with_views(world, model.tokenizer, audited.views) if audited.views > 1 else world.oracle
    made = []
    for number, (silo, round_number) in enumerate(audited.trainings):
        guard = _guard(work / f"ledger-{number}")
        trainer = SiloTrainer(bundle, data, silo, device, model=model, own_entropy=bytes(32))
        with taped(loss_draws=audited.loss_draws) as tape:
            update = trainer.train(
                round_number=round_number,
                model_path=work / "model",
                model=manifest_of(bundle.model_layout, [vector]),
                update_path=work / "update",
            )
        _enter(guard, bundle, round_number)
        made.append(
            Training(
                name=f"training {number + 1} ({silo}, round {round_number})",
                numbers=GaussianRelease(audited.multiplier, _EXPECTED / _NOMINAL, audited.steps),
                units=units,
                unit_field=privacy.unit_field,
                tape=tape,
                entries=guard.entries(),
                summary=update.summary,
                oracle=oracle,
            )
        )
    return made


def _with_views(world: World, tokenizer: TextTokenizer, views: int) -> Oracle:
    """The words of views are the product's, which are public; whose views they are, and what is made of them, is not taken from there."""
    others = [
        tokenizer.encode([wording.format(question=_text(asked)) for asked, _ in world.records])
        for wording in WORDINGS[: views - 1]
    ]
    return Oracle.of(world.model, world.ids, others)


def _units(grouped: bool) -> tuple[tuple[int, ...], ...]:
    units: list[tuple[int, ...]] = []
    left = list(range(RECORDS))
    while left:
        size = UNIT_SIZES[len(units) % len(UNIT_SIZES)] if grouped else 1
        units.append(tuple(left[:size]))
        left = left[size:]
    return tuple(units)


def _text(words: Sequence[int]) -> str:
    return " ".join(map(word, words))


class _NoHeads:
    """The journal and receipts of a silo that has none yet."""

    def __init__(self) -> None:
        self._head = Head()

    def ledger_head(self) -> Head:
        return self._head

    def record_ledger_head(self, head: Head, /) -> None:
        self._head = head

    def newest(self) -> LedgerReceipt | None:
        return None

    def keep(self, receipt: LedgerReceipt, /) -> None:
        del receipt


def _guard(folder: Path) -> PrivacyGuard:
    none = _NoHeads()
    # So small a delta that nobody reckons what the entries cost: that is not what is audited.
    return PrivacyGuard(
        ledger=PrivacyLedgerFile(folder / "ledger"),
        heads=none,
        receipts=none,
        budget=Budget(epsilon=UNLIMITED, dp_delta=1e-300),
        clock=lambda: _CLOCK,
        where=str(folder),
    )


def _enter(guard: PrivacyGuard, bundle: PlanBundle, round_number: int) -> None:
    """As the agent does before an update may leave."""
    plan = bundle.plan
    key = RoundKey(federation=plan.federation, plan=plan.digest, round=round_number, attempt=1)
    guard.spend(key, plan.releases_of_round, unit=plan.privacy.unit_field)


# --- one plan


def _of_plan(world: World, audited: Audited, trainings: Sequence[Training]) -> Iterator[Check]:
    about = audited.name
    yield from _ledger(about, trainings)
    if any(len(training.tape.steps) == 0 for training in trainings):
        return
    yield from _noise(about, trainings)
    apart = _Apart.of(trainings[0].oracle)
    parts = [_parts(apart, training) for training in trainings]
    yield from _contributions(about, trainings, parts)
    present = [found.coefficients > 0.5 for found in parts]
    yield from _samples(about, trainings, present)
    yield from _weights(world, about, trainings)


def _ledger(about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    numbers, unit_field = trainings[0].numbers, trainings[0].unit_field
    expected = [("gradients", numbers, unit_field), ("loss_reduction", GaussianRelease(LOSS_MULTIPLIER), unit_field)]
    wrong = [
        training.name
        for training in trainings
        if [(entry.mechanism, entry.release, entry.unit) for entry in training.entries] != expected
    ]
    yield none(
        "ledger", about, wrong, "mechanisms, multipliers, rate, steps or unit in the ledger are not those of the plan"
    )
    taken = [training.name for training in trainings if len(training.tape.steps) != training.gradients.steps]
    yield none("number of steps", about, taken, "more or fewer noised steps were made than the ledger says")


def _noise(about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    noise = _normalised(trainings)
    steps, size = noise.shape
    scales = np.sqrt(np.mean(np.square(noise, dtype=np.float64), axis=1)).clip(min=_NOTHING)
    at, off = worst(scales - 1)
    low, high = (math.sqrt(limit) for limit in spread_limits(size, FALSE_ALARM / steps))
    yield Check(
        promise="noise scale",
        about=about,
        measured=1 + off,
        lowest=min(1 - NOISE, low),  # of so many numbers as VOCABULARY makes it is the former
        highest=max(1 + NOISE, high),
        broken=f"noise of step {at + 1} is not as large as the ledger's multiplier times max_grad_norm, as a part of it",
    )
    yield Check(
        promise="noise distribution",
        about=about,
        measured=max(distance_from_normal(row / scale) for row, scale in zip(noise, scales, strict=True)),
        lowest=0.0,
        highest=distance_limit(size, steps) + NOISE / 4,
        broken="noise is not distributed as a Gaussian, by Kolmogorov's distance",
    )
    fewest, most = rare(noise.size * beyond(TAIL))
    yield Check(
        promise="noise distribution",
        about=f"{about}, tails",
        measured=int((np.abs(noise / scales[:, None]) > TAIL).sum()),
        lowest=fewest,
        highest=most,
        broken=f"of {noise.size:,} draws another number than a Gaussian's is beyond {TAIL:g} deviations",
    )
    sizes = trainings[0].tape.sizes
    faults = []
    for tensor, part in enumerate(np.split(noise, np.cumsum(sizes)[:-1], axis=1)):
        low_square, high_square = spread_limits(part.size, FALSE_ALARM / len(sizes))
        square = float(np.mean(np.square(part, dtype=np.float64)))
        silent = float(np.mean(part == 0.0))
        if not (low_square * (1 - NOISE) <= square <= high_square * (1 + NOISE)) or silent > EXACT:
            faults.append(f"tensor {tensor}")
    yield none("noise on every parameter", about, faults, "noise is missing, or of another size, on some parameters")
    yield Check(
        promise="noise independent of itself",
        about=about,
        measured=max(_own_correlation(row) for row in noise),
        lowest=0.0,
        highest=correlation_limit(size, steps * size) + EXACT,
        broken="noise on one parameter of a step is like that on another one",
    )
    yield _between_tensors(about, noise, sizes)


def _normalised(trainings: Sequence[Training]) -> Floats:
    """Noise over the deviation that the ledger promises, shape (steps, parameters)."""
    rows = [
        step.noise / np.float32((training.gradients.noise_multiplier or 1.0) * CLIPPED_TO)
        for training in trainings
        for step in training.tape.steps
    ]
    noise: Floats = np.stack(rows)
    return noise


def _own_correlation(row: Floats) -> float:
    """The largest mean product of a row with itself shifted."""
    power = np.square(np.abs(np.fft.rfft(row.astype(np.float64))))
    products = np.fft.irfft(power, len(row))
    return float(np.abs(products[1:]).max() / max(products[0], _NOTHING))


def _between_tensors(about: str, noise: Floats, sizes: Sequence[int]) -> Check:
    """Tensors whose noise began with the same draws would be alike in their first numbers."""
    parts = np.split(noise, np.cumsum(sizes)[:-1], axis=1)
    pairs = list(combinations(parts, 2))
    excess = 0.0
    for one, other in pairs:
        count = min(one.shape[1], other.shape[1])
        product = float(np.mean(one[:, :count] * other[:, :count], dtype=np.float64))
        excess = max(excess, abs(product) / correlation_limit(count * len(noise), len(pairs)))
    return Check(
        promise="noise independent of itself",
        about=f"{about}, tensors",
        measured=excess,
        lowest=0.0,
        highest=1.0,
        broken="two tensors have like noise, over what chance allows",
    )


@dataclass(frozen=True, slots=True)
class _Parts:
    """Of one training: how often each record is in each step's sum, shape (steps, records), and what is left of it, over max_grad_norm."""

    coefficients: Floats64
    left: float
    divisors: Floats64


@dataclass(frozen=True, slots=True)
class _Apart:
    """Takes sums apart. `clipped` has shape (records, parameters), `inverse` is of the matrix of its inner products."""

    clipped: torch.Tensor
    inverse: torch.Tensor

    @classmethod
    def of(cls, oracle: Oracle) -> "_Apart":
        clipped = torch.from_numpy(oracle.clipped(CLIPPED_TO * (1 - MARGIN)))
        return cls(clipped, torch.linalg.inv(clipped @ clipped.T))

    def parts(self, totals: Floats64) -> tuple[Floats64, float]:
        """Of sums, shape (steps, parameters), how often each record is in each, shape (steps, records), and the longest rest."""
        sums = torch.from_numpy(totals)
        found = sums @ self.clipped.T @ self.inverse
        left = torch.linalg.vector_norm(sums - found @ self.clipped, dim=1)
        return found.numpy(), float(left.max())


def _parts(apart: _Apart, training: Training) -> _Parts:
    coefficients, left = apart.parts(np.stack([step.total for step in training.tape.steps]))
    divisors = []
    for step in training.tape.steps:
        noised = step.total + step.noise
        divisors.append(float(noised @ noised) / (float(noised @ step.used) or _NOTHING))
    return _Parts(coefficients, left / CLIPPED_TO, np.array(divisors))


def _contributions(about: str, trainings: Sequence[Training], parts: Sequence[_Parts]) -> Iterator[Check]:
    drawn = []
    for training, found in zip(trainings, parts, strict=True):
        counts = np.zeros_like(found.coefficients)
        for step, records in enumerate(training.tape.drawn[: len(counts)]):
            np.add.at(counts[step], records, 1.0)
        drawn.append(counts)
    counted, expected = np.concatenate([found.coefficients for found in parts]), np.concatenate(drawn)
    wrong = np.rint(counted) != expected
    yield none(
        "drawn records are in the sum",
        about,
        [f"record {record} of step {step + 1}" for step, record in np.argwhere(wrong | (expected > 1))],
        "records were drawn and not added up, or added up and not drawn, or count twice",
    )
    off = counted - np.clip(np.rint(counted), 0.0, 1.0)
    at, _ = worst(off.ravel())
    record = at % off.shape[1]
    yield Check(
        promise="contribution of a record",
        about=about,
        measured=float(counted.ravel()[at]),
        lowest=-EXACT if counted.ravel()[at] < 0.5 else 1 - EXACT,
        highest=EXACT if counted.ravel()[at] < 0.5 else 1 + EXACT,
        broken=f"record {record} counts in step {at // off.shape[1] + 1} so many times its clipped gradient",
    )
    yield Check(
        promise="nothing but records in the sum",
        about=about,
        measured=max(found.left for found in parts),
        lowest=0.0,
        highest=EXACT,
        broken="of a sum more than this part of max_grad_norm belongs to no record",
    )
    divisors = np.concatenate([found.divisors for found in parts])
    at, off_divisor = worst(divisors - _EXPECTED)
    yield Check(
        promise="public divisor",
        about=about,
        measured=_EXPECTED + off_divisor,
        lowest=_EXPECTED * (1 - EXACT),
        highest=_EXPECTED * (1 + EXACT),
        broken=f"step {at + 1} was divided by another number than the plan's expected_batch_size",
    )


def _samples(about: str, trainings: Sequence[Training], present: Sequence[Truths]) -> Iterator[Check]:
    """`present` says of each training which record is in which step."""
    units = trainings[0].units
    rate = trainings[0].gradients.sampling_rate
    of_units = [np.stack([here[:, list(unit)].sum(axis=1) for unit in units], axis=1) for here in present]
    several = sum(int((here > 1).sum()) for here in of_units)
    yield Check(
        promise="one record of a unit",
        about=about,
        measured=several,
        lowest=0,
        highest=0,
        broken="so often a unit has more than one record in a step",
    )
    sampled = [here > 0 for here in of_units]
    every = np.concatenate(sampled)
    steps, count = every.shape
    low, high = likely(binomial(every.size, rate))
    yield Check(
        promise="sampling rate",
        about=about,
        measured=int(every.sum()),
        lowest=low,
        highest=high,
        broken=f"of {every.size} units and steps so many were sampled: not at the ledger's rate of {rate:g}",
    )
    centre, probabilities = sizes_spread(count, rate, steps)
    low, high = likely(probabilities)
    yield Check(
        promise="Poisson samples",
        about=about,
        measured=float(np.square(every.sum(axis=1) - centre).sum()),
        lowest=low,
        highest=high,
        broken="the sizes of samples vary otherwise than where each unit has a coin of its own",
    )
    low, high = likely(binomial(steps, rate), FALSE_ALARM / count)
    often = every.sum(axis=0)
    at, _ = worst(often - steps * rate)
    yield Check(
        promise="every unit alike",
        about=about,
        measured=int(often[at]),
        lowest=low,
        highest=high,
        broken=f"unit {at} is sampled more or less often than others",
    )
    yield from _fresh(about, sampled, rate)
    if any(len(unit) > 1 for unit in units):
        yield _members(about, units, present)


def _fresh(about: str, sampled: Sequence[Truths], rate: float) -> Iterator[Check]:
    """Two samples agree on a unit as often as two coins of the rate do; pairs do not overlap."""
    agree = rate**2 + (1 - rate) ** 2
    within = [here[: len(here) // 2 * 2 : 2] == here[1::2] for here in sampled if len(here) > 1]
    between = [one == other for one, other in zip(sampled[::2], sampled[1::2], strict=False) if len(one) == len(other)]
    for what, equal in (("steps", within), ("trainings", between)):
        if not equal:
            continue
        trials = sum(one.size for one in equal)
        low, high = likely(binomial(trials, agree))
        yield Check(
            promise="fresh samples",
            about=f"{about}, {what}",
            measured=sum(int(one.sum()) for one in equal),
            lowest=low,
            highest=high,
            broken=f"of {trials} pairs of coins in two {what} so many fell alike",
        )


def _members(about: str, units: Sequence[Sequence[int]], present: Sequence[Truths]) -> Check:
    """Of each draw from a unit of several records, whether it took the first: each with a probability of its own."""
    every = np.concatenate(list(present))
    first, drawn = 0, 0
    probabilities = np.ones(1)
    for unit in units:
        here = every[:, list(unit)]
        if len(unit) == 1:
            continue
        first += int(here[:, 0].sum())
        drawn += int(here.sum())
        for _ in range(int(here.sum())):
            probabilities = np.convolve(probabilities, [1 - 1 / len(unit), 1 / len(unit)])
    low, high = likely(probabilities)
    return Check(
        promise="records of a unit alike",
        about=about,
        measured=first,
        lowest=low,
        highest=high,
        broken=f"of {drawn} draws from units of several records so many took the first one",
    )


def _weights(world: World, about: str, trainings: Sequence[Training]) -> Iterator[Check]:
    taken = [training.name for training in trainings if len(training.tape.weights) != 1]
    yield none("one weight a round", about, taken, "a round released more or fewer noised weights than one")
    weights: list[Weight] = [training.tape.weights[0] for training in trainings if training.tape.weights]
    if not weights:
        return
    bounded = np.minimum(world.oracle.losses, world.loss_bound)
    exact = sum(float(bounded[list(unit)].mean()) for unit in trainings[0].units)
    sums = np.concatenate([weight.sums for weight in weights])
    at, _ = worst(sums - exact)
    yield Check(
        promise="loss bound",
        about=about,
        measured=float(sums[at]),
        lowest=exact * (1 - EXACT),
        highest=exact * (1 + EXACT),
        broken="the sum of losses in a weight is not that of losses cut at the plan's loss_bound",
    )
    told = [
        training.name
        for training, weight in zip(trainings, weights, strict=False)
        if not math.isclose(training.summary.examples * training.summary.loss_max, weight.released, rel_tol=1e-9)
    ]
    yield none("noised weight", about, told, "the weight that leaves is not the one that noise was added to")
    noise = np.concatenate([weight.noise for weight in weights])
    promised = next(
        (entry.release.noise_multiplier for entry in trainings[0].entries if entry.mechanism == "loss_reduction"), 0.0
    )
    low, high = (math.sqrt(limit) for limit in spread_limits(len(noise)))
    yield Check(
        promise="weight's noise",
        about=about,
        measured=float(np.sqrt(np.square(noise).mean())) / ((promised or 1.0) * world.loss_bound),
        lowest=low,
        highest=high,
        broken="noise on a weight is not as large as the ledger's multiplier times loss_bound, as a part of it",
    )
    released = [weight.released for weight in weights if weight.released > 0.0]
    yield none(
        "fresh noise on weights",
        about,
        [str(one) for one in set(released) if released.count(one) > 1],
        "two trainings released the very same weight",
    )


# --- all plans


def _independence(trainings: Sequence[Training]) -> Iterator[Check]:
    """Of noise, over steps, rounds, silos, restarts and plans."""
    rows = [(f"step {step + 1} of {each.name}", each) for each in trainings for step in range(len(each.tape.steps))]
    if len(rows) < 2:
        return
    noise = np.concatenate([_normalised([training]) for training in trainings if training.tape.steps])
    noise /= np.sqrt(np.mean(np.square(noise), axis=1, keepdims=True)).clip(min=_NOTHING)
    at, most = worst(mean_products(noise).ravel())
    one, other = divmod(at, len(rows))
    yield Check(
        promise="independent noise",
        about="steps, rounds, silos and restarts",
        measured=abs(most),
        lowest=0.0,
        highest=correlation_limit(noise.shape[1], len(rows) ** 2) + EXACT,
        broken=f"noise of {rows[one][0]} is correlated with that of {rows[other][0]}",
    )


def _keys(trainings: Sequence[Training]) -> Iterator[Check]:
    without = [training.name for training in trainings if not training.tape.keys or training.tape.foreign]
    yield none(
        "keys from the operating system", "all trainings", without, "randomness came from a key that is not from there"
    )
    keys = [key for training in trainings for key in training.tape.keys]
    twice = ["a key"] * (len(keys) - len(set(keys)))
    yield none("keys are used once", "all trainings", twice, "two trainings drew from one key")
