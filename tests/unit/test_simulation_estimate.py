"""What a dry run counts, by hand and against the parts themselves; the measuring runs in
tests/integration/test_simulation.py."""

from collections import Counter
from typing import Any

import pytest
import torch

from lorica.simulation.forecast.estimate import (
    Estimate,
    SiloCounts,
    SiloTimes,
    estimate,
    evaluations_of,
    optimizer_bytes,
)
from lorica.simulation.forecast.estimate_report import bytes_text, seconds_text
from lorica.simulation.forecast.mask_traffic import mask_traffic
from lorica.simulation.forecast.traffic import Traffic
from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.messages import MaskedInput
from lorica_security.secure_aggregation.roster import Roster
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.model.model import bind, layout_of
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs.masked_orders_codec import mask_answer_to_wire, mask_to_wire
from silo_wire.codecs.secure_codec import masked_input_to_wire
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.messages import Mask, RoundKey
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.sections.training import TrainingSection
from silo_wire.plans.work import optimizer_steps
from tests.support import secagg_federation
from tests.support.tiny_t5 import bundle_of, random_model

BANK, CLINIC = SiloName("bank"), SiloName("clinic")
COUNTS = (
    SiloCounts(silo=BANK, train=100, dev=30, inputs_cut=1, targets_cut=0),
    SiloCounts(silo=CLINIC, train=33, dev=8, inputs_cut=0, targets_cut=2),
)
TIMES = {
    BANK: SiloTimes(step_s=2.0, beside_steps_s=1.0, example_s=0.5, peak_bytes=1000),
    CLINIC: SiloTimes(step_s=4.0, beside_steps_s=3.0, example_s=0.25, peak_bytes=0),
}
MASKED: dict[str, Any] = {"secure_aggregation": True, "max_weight": 100.0}


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model()


def plan_of(model: Any, **sections: Any) -> PlanBundle:
    """8 examples in an effective batch, two epochs; scored at the beginning, after round 2 and at the end, after round
    3."""
    return bundle_of(
        model,
        **{
            "training": {
                "batch_size": 4,
                "gradient_accumulation": 2,
                "epochs": 2,
                "overrides": {"clinic": {"epochs": 1}},
            },
            "evaluation": {"every": 2, "max_examples": 20},
            "schedule": {"rounds": 3, "min_silos": 1, "training_deadline_s": 40.0, "evaluation_deadline_s": 9.0},
            **sections,
        },
    )


def of(bundle: PlanBundle) -> Estimate:
    return estimate(bundle, COUNTS, TIMES, {})


def test_steps_and_seconds_are_those_of_the_plans_schedule(model: Any) -> None:
    it = of(plan_of(model))
    bank, clinic = it.silos
    # 100 examples: 25 batches, 13 effective ones, twice. 33: 9 batches, 5 effective ones, once.
    assert (bank.steps, clinic.steps) == (26, 5)
    assert (bank.scored, clinic.scored) == (20, 8)
    assert (bank.training_s, clinic.training_s) == (53.0, 23.0)
    assert (bank.evaluation_s, clinic.evaluation_s) == (10.0, 2.0)
    assert it.evaluations == 3
    assert it.federation_s == 3 * 53 + 3 * 10
    assert it.simulation_s == 3 * (53 + 23) + 3 * (10 + 2)
    assert it.epsilon is None
    in_parallel = estimate(plan_of(model), COUNTS, TIMES, {}, workers=8)
    assert in_parallel.workers == 2
    assert in_parallel.simulation_s == it.federation_s


def test_who_is_slower_than_a_deadline_is_named(model: Any) -> None:
    training, evaluation = of(plan_of(model)).late
    assert training.startswith("training at silo bank takes about 53 s, [schedule] training_deadline_s is 40:")
    assert evaluation.startswith("evaluation at silo bank takes about 10 s, [schedule] evaluation_deadline_s is 9:")
    schedule = {"rounds": 3, "min_silos": 1, "training_deadline_s": 53.0, "evaluation_deadline_s": 10.0}
    assert of(plan_of(model, schedule=schedule)).late == ()


def test_bytes_on_the_wire_are_those_of_the_plans_types(model: Any) -> None:
    bundle = plan_of(model, wire={"model": "bfloat16", "update": "float32"})
    parameters = bundle.layout.parameters
    it = of(bundle)
    for silo in it.silos:
        assert silo.traffic == Traffic(down=2 * parameters, up=4 * parameters)
        # One model for each of three rounds, the last one at the end, and the plan itself.
        assert silo.whole_traffic == Traffic(down=4 * 2 * parameters + len(bundle.encode()), up=3 * 4 * parameters)
    assert it.coordinator_traffic == it.silos[0].whole_traffic * 2


def test_masks_are_counted_into_each_round(model: Any) -> None:
    bundle = plan_of(model, aggregation=MASKED, schedule={"rounds": 3, "min_silos": 3})
    masks = {BANK: Traffic(down=70, up=50)}
    bank, clinic = estimate(bundle, COUNTS, TIMES, masks).silos
    words = bundle.layout.parameters + EXTRA_WORDS
    assert bank.traffic == Traffic(down=bundle.layout.total_bytes + 70, up=4 * words + 50)
    assert clinic.traffic == Traffic(down=bundle.layout.total_bytes, up=4 * words)
    assert bank.whole_traffic.up == 3 * (4 * words + 50)


def test_a_private_plan_has_its_own_steps_and_the_ledgers_epsilon(model: Any) -> None:
    training = {"epochs": 1, "dropout": 0.0}
    privacy = {"level": "record", "steps": 7, "noise_multiplier": 3.0}
    never = {"every": 0, "initial": False, "last": False}
    bundle = plan_of(model, training=training, privacy=privacy, evaluation=never)
    it = of(bundle)
    assert [silo.steps for silo in it.silos] == [7, 7]
    assert it.evaluations == 0
    assert [silo.scored for silo in it.silos] == [0, 0]
    assert it.federation_s == 3 * max(1 + 7 * 2, 3 + 7 * 4)
    assert it.epsilon == bundle.plan.privacy.epsilon(rounds=3, weighted=True) > 0


@pytest.mark.parametrize(
    ("section", "times"),
    [
        ({"every": 0, "initial": True, "last": False}, 1),
        ({"every": 1, "initial": False, "last": True}, 3),
        ({"every": 2, "initial": False, "last": False}, 1),
        ({"every": 2, "initial": True, "last": True}, 3),
    ],
)
def test_evaluations_are_counted_as_the_rounds_order_them(model: Any, section: dict[str, Any], times: int) -> None:
    assert evaluations_of(plan_of(model, evaluation=section).plan) == times


def test_memory_is_what_training_keeps_of_each_parameter(model: Any) -> None:
    bundle = plan_of(model, training={"fedprox_mu": 0.1}, wire={"model": "bfloat16"})
    bank, clinic = of(bundle).silos
    one = bundle.layout.total_bytes
    memory = bank.memory
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.round_model) == (one, one, 2 * one, one // 2)
    assert memory.counted == 4.5 * one
    assert (memory.peak, clinic.memory.peak) == (1000, 0)
    assert of(plan_of(model)).silos[0].memory.round_model == 0


def test_memory_counts_the_average_of_iterates(model: Any) -> None:
    def optimizer(decay: float) -> int:
        privacy = {"level": "record", "noise_multiplier": 1.0, "average_decay": decay}
        scores = {"every": 0, "initial": False, "last": False}
        bundle = plan_of(model, privacy=privacy, training={"dropout": 0.0}, evaluation=scores)
        return of(bundle).silos[0].memory.optimizer

    assert 2 * (optimizer(0.9) - optimizer(0.0)) == optimizer(0.0)  # beside the two moments of AdamW


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_the_optimizers_bytes_are_those_of_its_state(model: Any, optimizer: Any) -> None:
    parameters = bind(model, layout_of(model)).tensors
    it = local_optimizer(TrainingSection(optimizer=optimizer), parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    it.step()
    state = [value for of_one in it.state.values() for value in of_one.values() if isinstance(value, torch.Tensor)]
    held = sum(value.nbytes for value in state if value.dim())  # a counter of steps is no vector
    assert optimizer_bytes(optimizer, layout_of(model)) == held
    assert optimizer_bytes("adam_corrected", layout_of(model)) == optimizer_bytes("adamw", layout_of(model))


def test_optimizer_steps_count_what_is_left_at_an_epochs_end() -> None:
    section = TrainingSection(batch_size=4, gradient_accumulation=2, epochs=3)
    assert [optimizer_steps(count, section) for count in (1, 8, 9, 16)] == [3, 3, 6, 6]


def small_bundle() -> PlanBundle:
    """A plan of secure aggregation in the federation, and for the tensors, of tests/support/secagg_federation.py."""
    tensors = tuple(TensorSpec(f"tensor-{index}", (size,)) for index, size in enumerate(secagg_federation.SIZES))
    files = {"config.json": b"{}", "layout.json": Layout("float32", tensors).to_json()}
    model = {
        "source": "size:test",
        "parameters": sum(secagg_federation.SIZES),
        "layout": digest_of(files["layout.json"]),
        "initial": "0" * 64,
        "files": {name: digest_of(content) for name, content in files.items()},
    }
    values = {"name": "small", "federation": secagg_federation.FEDERATION, "model": model, "aggregation": MASKED}
    return PlanBundle(Plan.model_validate({**values, "schedule": {"rounds": 1, "min_silos": 3}}), files)


def test_messages_of_masks_are_as_long_as_those_of_a_real_attempt() -> None:
    bundle = small_bundle()
    plan = bundle.plan
    attempt = secagg_federation.attempt(plan=bytes.fromhex(plan.digest))
    key = RoundKey(federation=attempt.federation, plan=plan.digest, round=1, attempt=1)
    ranges = ranges_of(bundle)
    federation = secagg_federation.Federation(5, of=attempt, terms_=secagg_federation.terms(ranges=ranges))
    identities = tuple(federation.identities.items())
    down, up = Counter[SiloName](), Counter[SiloName]()

    def order(silo: SiloName, message: Any) -> int:
        beside = identities if isinstance(message, Roster) else ()
        model = Digest(secagg_federation.MODEL.hex())
        it = Mask(key=key, model=model, seconds_left=600.0, attempt=attempt, message=message, identities=beside)
        return mask_to_wire(it, silo).ByteSize()

    def seen(to: str, message: Any) -> Any:
        if to:
            down[SiloName(to)] += order(SiloName(to), message)
        elif isinstance(message, MaskedInput):
            up[message.silo] += masked_input_to_wire(message).ByteSize()
        else:
            up[message.silo] += mask_answer_to_wire(key, message.silo, message).ByteSize()
        return message

    federation.alter = seen
    federation.run()
    assert federation.unmask is not None, "the attempt came to a sum"
    for to, message in federation.queue:  # what was on its way still, of more silos than it takes
        seen(to, message)
    for silo in federation.names:
        down[silo] += order(silo, None)  # to advertise keys, which the machines take from their opening
    assert mask_traffic(bundle, federation.names) == {
        silo: Traffic(down=down[silo], up=up[silo]) for silo in federation.names
    }


def test_a_cohort_that_masks_do_not_hold_for_is_refused(model: Any) -> None:
    bundle = plan_of(model, aggregation=MASKED, schedule={"rounds": 3, "min_silos": 4})
    with pytest.raises(MalformedMessage, match="3 silos advertised keys: the terms ask for at least 4"):
        mask_traffic(bundle, secagg_federation.silo_names(3))


def test_sizes_and_times_are_told_in_units_of_their_size() -> None:
    assert [bytes_text(size) for size in (0, 1023, 1536, 5 << 20, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [seconds_text(seconds) for seconds in (0.123, 45, 600, 9000, 400_000)] == [
        "0.12 s",
        "45 s",
        "10 min",
        "2.5 h",
        "4.6 days",
    ]


def test_adafactor_keeps_rows_and_columns_of_a_matrix_and_the_whole_of_a_vector() -> None:
    layout = Layout("float32", (TensorSpec("a", (3, 5)), TensorSpec("b", (7,))))
    assert optimizer_bytes("adafactor", layout) == 4 * (3 + 5 + 7)
