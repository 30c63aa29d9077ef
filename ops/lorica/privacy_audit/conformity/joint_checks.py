"""Of target `conformity`: joint noise. What a silo keeps of a step is taken apart into records, and what leaves of it
has noise by its share.

Here a training is one step, and its sum is on disk until it is masked: no tape is needed for it. Noise comes under the
masks, so that it is measured on what leaves, without these.
"""

import copy
import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from lorica.privacy_audit.checks import EXACT, Check, none, spread_limits
from lorica.privacy_audit.conformity.audited_plan import bundle_of
from lorica.privacy_audit.conformity.audited_trainings import (
    CLIPPED_TO,
    EXPECTED,
    NOMINAL,
    TRAINING,
    Training,
    World,
    enter,
    guard_at,
    lines_of,
    units_of,
)
from lorica.privacy_audit.conformity.contribution_checks import Apart, contribution_checks, parts_of
from lorica.privacy_audit.conformity.key_checks import key_checks
from lorica.privacy_audit.conformity.sample_checks import sample_checks
from lorica.privacy_audit.conformity.tape import Step, Vector, taped
from lorica.privacy_audit.silo_level import NOISE, gaussian_rows, words_of
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.noise.random_words import KEY_BYTES
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.parameters import Terms
from silo_agent.training.device import DeviceSettings
from silo_agent.training.model.model import bind, vector_blocks
from silo_agent.training.model.plan_model import PlanModel
from silo_agent.training.private.joint_gradient import write_sum
from silo_agent.training.silo_trainer import SiloTrainer
from silo_agent.training.update.masked_vector import KeptDelta
from silo_wire.manifest import manifest_of
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.noised_masks import GRADIENT_STEPS, noise_shares, noise_terms
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.privacy import PrivacySection

ABOUT = "joint noise"
MULTIPLIER = 2.3
STEPS = 20
"""Each a training of its own, with a sample of its own."""
_RANGE = 8.0
_SILOS = tuple(SiloName(name) for name in ("silo-a", "silo-b", "silo-c"))
_NONE = np.zeros(0, dtype=np.float32)


def joint_conformity(world: World, work: Path, *, steps: int = STEPS) -> Iterator[Check]:
    """Train one joint plan `steps` times, and hold what is kept and what leaves against its promise; `work` is an empty
    folder."""
    bundle = _bundle(world)
    trainings = _trained(world, bundle, work, steps)
    yield from _ledger(bundle, trainings)
    apart = Apart.of(world.oracle)
    parts = [parts_of(apart, training) for training in trainings]
    yield from contribution_checks(ABOUT, trainings, parts)
    yield from sample_checks(ABOUT, trainings, [found.coefficients > 0.5 for found in parts])
    yield from key_checks(ABOUT, trainings)
    yield from _noise(world, bundle, work)


def _bundle(world: World) -> PlanBundle:
    privacy = PrivacySection(
        level="record",
        noise="joint",
        nominal_records=NOMINAL,
        expected_batch_size=EXPECTED,
        steps=1,
        noise_multiplier=MULTIPLIER,
        answer_after_s=1.0,
    )
    aggregation = {
        "weighting": "equal",
        "secure_aggregation": True,
        "max_delta_norm": 0.0,
        "delta_bound": _RANGE,
    }
    return bundle_of(world.model, TRAINING, privacy, STEPS, aggregation=aggregation, silos=len(_SILOS))


def _trained(world: World, bundle: PlanBundle, work: Path, steps: int) -> list[Training]:
    device = DeviceSettings(device="cpu", threads=torch.get_num_threads())
    vector = b"".join(vector_blocks(bind(copy.deepcopy(world.model), bundle.layout)))
    (work / "model").write_bytes(vector)
    model, units = PlanModel(bundle, device), units_of(False)
    data = lines_of(world, dict.fromkeys(range(len(world.records)), ""))
    unit = bundle.plan.aggregation.delta_bound / GRADIENT_STEPS
    made = []
    for number in range(steps):
        guard = guard_at(work / f"ledger-{number}")
        trainer = SiloTrainer(bundle, data, _SILOS[0], device, model=model, own_entropy=bytes(32))
        with taped(loss_draws=0) as tape:
            update = trainer.train(
                round_number=1,
                model_path=work / "model",
                model=manifest_of(bundle.model_layout, [vector]),
                update_path=work / "update",
            )
        kept = np.fromfile(work / "update", dtype="<i4").astype(np.float64)
        tape.steps.append(Step(-kept * unit * EXPECTED, _NONE, _NONE))
        enter(guard, bundle, 1)
        made.append(
            Training(
                name=f"training {number + 1}",
                numbers=GaussianRelease(MULTIPLIER, EXPECTED / NOMINAL, 1, makers=2),
                units=units,
                unit_field="",
                tape=tape,
                entries=guard.entries(),
                summary=update.summary,
                oracle=world.oracle,
            )
        )
    return made


def _ledger(bundle: PlanBundle, trainings: Sequence[Training]) -> Iterator[Check]:
    wrong = [
        training.name
        for training in trainings
        if [(entry.mechanism, entry.release) for entry in training.entries] != [("joint_gradients", training.numbers)]
    ]
    yield none("ledger", ABOUT, wrong, "multiplier, rate, steps or makers in the ledger are not those of the plan")
    told = [training.name for training in trainings if training.summary != bundle.plan.privacy.summary(None)]
    yield none("summary", ABOUT, told, "what a silo tells beside its sum is not public numbers alone")


def _noise(world: World, bundle: PlanBundle, work: Path) -> Iterator[Check]:
    terms = Terms(
        model=bytes(32),
        link=first_link(FederationName("audit"), Partition.singletons(_SILOS)),
        ranges=ranges_of(bundle),
        noise=noise_terms(bundle.plan),
    )
    parameters = terms.parameters(_SILOS)
    makers = bundle.plan.noise_makers
    shares = noise_shares(bundle, parameters)

    def leaves(summed: Vector, root: bytes, *, attempt: int = 1) -> Vector:
        parts, at = [], 0
        for spec in bundle.layout.tensors:
            parts.append(torch.from_numpy(summed[at : at + spec.elements]))
            at += spec.elements
        bound = bundle.plan.aggregation.delta_bound
        written = write_sum(work / "sum", bundle.layout, parts, divisor=EXPECTED, bound=bound)
        kept = KeptDelta(file=work / "sum", manifest=written.manifest, unit=bound / GRADIENT_STEPS)
        return words_of(work, kept, parameters, root, weight=1.0, noise=shares, attempt=attempt)

    zeros = np.zeros(bundle.layout.parameters)
    roots = [secrets.token_bytes(KEY_BYTES) for _ in range(makers)]
    made = np.stack([leaves(zeros, root) for root in roots])
    later = leaves(zeros, roots[0], attempt=2)
    record = world.oracle.clipped(CLIPPED_TO)[int(np.argmax(world.oracle.norms))]
    moved = leaves(record, roots[0]) - made[0]  # the same noise on both
    total = made.sum(axis=0)
    least, most = (math.sqrt(square) for square in spread_limits(total.size))
    yield Check(
        promise="noise scale",
        about=f"{ABOUT}, sum of the fewest",
        measured=float(total.std()) / float(np.linalg.norm(moved)),
        lowest=MULTIPLIER * (1 - NOISE) * least,
        highest=MULTIPLIER * (1 + NOISE) * most,
        broken="noise of all silos that the plan counts on, over what one record adds at most, is not the plan's "
        "multiplier",
    )
    yield Check(
        promise="noise scale",
        about=f"{ABOUT}, one share",
        measured=float(made[0].std()) / float(total.std()) * math.sqrt(makers),
        lowest=(1 - NOISE) * least / most,
        highest=(1 + NOISE) * most / least,
        broken="a silo's share is not one over the root of the silos that the plan counts on",
    )
    unlike = moved / (float(np.linalg.norm(moved)) or 1.0) + record / float(np.linalg.norm(record))
    yield Check(
        promise="nothing but records in the sum",
        about=f"{ABOUT}, as it leaves",
        measured=float(np.linalg.norm(unlike)),
        lowest=0.0,
        highest=10 * EXACT,
        broken="a record moves what leaves otherwise than by minus its clipped gradient",
    )
    yield from gaussian_rows(ABOUT, np.stack([*made, later]), None)
