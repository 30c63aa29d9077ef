"""The trainings that target `conformity` looks at: a plan of a small T5, trained at
two silos for some rounds, once more after a restart.

As silos train, through SiloTrainer, with the entries that PrivacyGuard writes. Each record has words of its own, so
that a sum of clipped gradients can be taken apart into records, whose gradients the audit reckons itself (oracle.py).
Learning rates are so small that gradients at the first model hold for all steps.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import T5Config, T5ForConditionalGeneration

from lorica.privacy_audit.conformity.audited_plan import END, SPECIAL, bundle_of, data_of, word
from lorica.privacy_audit.conformity.oracle import Oracle
from lorica.privacy_audit.conformity.tape import Tape, taped
from lorica_security.audit.chain import Head
from lorica_security.on_disk.ledger_file import PrivacyLedgerFile
from lorica_security.privacy.accounting import UNLIMITED, Budget, GaussianRelease
from lorica_security.privacy.ledger import Entry
from silo_agent.service.privacy import PrivacyGuard
from silo_agent.training.data.text_to_sql_data import Example, SiloData
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.data.views import WORDINGS
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import T5, bind, vector_blocks
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.silo_trainer import SiloTrainer
from silo_wire.codecs.ledger_receipt import LedgerReceipt
from silo_wire.manifest import manifest_of
from silo_wire.messages import RoundKey, TrainingSummary
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.training import TrainingSection

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
LOSS_MULTIPLIER = 5.0
EXPECTED, NOMINAL = 18, 60
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
TRAINING = TrainingSection(
    optimizer="adamw",
    learning_rate=1e-7,
    batch_size=4,
    max_grad_norm=CLIPPED_TO,
    dropout=0.0,
    schema_in_input=False,
)
_SCALES = (0.05, 0.2, 1.0)
"""Of the embeddings of a record's words, in turn: they make the norms of gradients."""
_SILOS = ("silo-a", "silo-b")
_CLOCK = 1_800_000_000.0


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
        of_gradients = ("gradients", "joint_gradients")
        return next((entry.release for entry in self.entries if entry.mechanism in of_gradients), GaussianRelease(0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """One plan, and where and when it is trained: silo and round of each
    training. A pair that comes twice is a restart.
    """

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


def trained(world: World, audited: Audited, work: Path) -> list[Training]:
    units = units_of(audited.grouped)
    privacy = PrivacySection(
        level="record",
        nominal_records=NOMINAL,
        expected_batch_size=EXPECTED,
        steps=audited.steps,
        noise_multiplier=audited.multiplier,
        loss_bound=world.loss_bound,
        loss_noise_multiplier=LOSS_MULTIPLIER,
        unit_field="patient" if audited.grouped else "",
        augmentations=audited.views,
    )
    rounds = max(number for _, number in audited.trainings)
    bundle = bundle_of(world.model, TRAINING, privacy, rounds)
    device = DeviceSettings(device="cpu", threads=torch.get_num_threads())
    vector = b"".join(vector_blocks(bind(copy.deepcopy(world.model), bundle.layout)))
    (work / "model").write_bytes(vector)
    model = PlanModel(bundle, device)
    owner = {record: f"unit-{unit}" if audited.grouped else "" for unit, of in enumerate(units) for record in of}
    data = lines_of(world, owner)
    oracle = _with_views(world, model.tokenizer, audited.views) if audited.views > 1 else world.oracle
    made = []
    for number, (silo, round_number) in enumerate(audited.trainings):
        guard = guard_at(work / f"ledger-{number}")
        trainer = SiloTrainer(bundle, data, silo, device, model=model, own_entropy=bytes(32))
        with taped(loss_draws=audited.loss_draws) as tape:
            update = trainer.train(
                round_number=round_number,
                model_path=work / "model",
                model=manifest_of(bundle.model_layout, [vector]),
                update_path=work / "update",
            )
        enter(guard, bundle, round_number)
        made.append(
            Training(
                name=f"training {number + 1} ({silo}, round {round_number})",
                numbers=GaussianRelease(audited.multiplier, EXPECTED / NOMINAL, audited.steps),
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
    """The words of views are the product's, which are public; whose views they are,
    and what is made of them, is not taken from there.
    """
    others = [
        tokenizer.encode([wording.format(question=_text(asked)) for asked, _ in world.records])
        for wording in WORDINGS[: views - 1]
    ]
    return Oracle.of(world.model, world.ids, others)


def lines_of(world: World, owner: Mapping[int, str]) -> SiloData:
    """The records as a silo has them; `owner` is whose each one is."""
    return data_of(
        [
            Example(f"train-{number}", _text(asked), _text(answered), _SILOS[0], unit=owner[number])
            for number, (asked, answered) in enumerate(world.records)
        ]
    )


def units_of(grouped: bool) -> tuple[tuple[int, ...], ...]:
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


def guard_at(folder: Path) -> PrivacyGuard:
    none = _NoHeads()
    # So small a delta that nobody reckons what the entries cost: that is not what is audited.
    return PrivacyGuard(
        ledger=PrivacyLedgerFile(folder / "ledger"),
        heads=none,
        receipts=none,
        budget=Budget(epsilon=UNLIMITED, dp_delta=1e-300, alone=UNLIMITED),
        clock=lambda: _CLOCK,
        where=str(folder),
    )


def enter(guard: PrivacyGuard, bundle: PlanBundle, round_number: int) -> None:
    """As the agent does before an update may leave."""
    plan = bundle.plan
    key = RoundKey(federation=plan.federation, plan=plan.digest, round=round_number, attempt=1)
    guard.spend(key, plan.releases_of_round, unit=plan.privacy.unit_field)
