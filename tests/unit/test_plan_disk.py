"""The room that a plan takes at the coordinator, by hand; that a simulation's files fit into it:
tests/integration/test_simulation.py."""

from lorica_coordinator.edges.models.plan_disk import plan_disk
from tests.support.federation_peer import small_bundle

ONE = 4000
"""Bytes of the model in float32."""


def test_there_is_an_update_of_each_silo_and_four_models() -> None:
    assert plan_disk(small_bundle(aggregation={"momentum": 0.0}), 5) == 5 * ONE + 4 * ONE


def test_each_model_has_its_server_optimizers_state() -> None:
    assert plan_disk(small_bundle(), 5) == 5 * ONE + 4 * 2 * ONE
    assert plan_disk(small_bundle(aggregation={"server_optimizer": "yogi"}), 5) == 5 * ONE + 4 * 3 * ONE


def test_models_that_travel_in_bfloat16_have_a_master_in_float32() -> None:
    half = small_bundle(aggregation={"server_optimizer": "adam"}, wire={"model": "bfloat16", "update": "bfloat16"})
    assert plan_disk(half, 5) == 5 * ONE // 2 + 4 * (ONE // 2 + ONE + 2 * ONE)


def test_masked_updates_are_words_and_those_of_the_newest_round_stay_with_the_model_before() -> None:
    masked = small_bundle(
        aggregation={"momentum": 0.0, "secure_aggregation": True, "max_weight": 100.0, "max_delta_norm": 1.0},
        schedule={"rounds": 3, "min_silos": 3},
    )
    assert plan_disk(masked, 5) == 2 * 5 * masked.update_bytes + 5 * ONE > 15 * ONE
