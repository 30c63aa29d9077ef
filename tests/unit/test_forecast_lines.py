"""What types on the wire save on a silo's line, and what a 16-bit ring would leave of a light silo: by hand."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lorica.documentation.forecasts.int8_under_masks import (
    lightest_error,
    ring_levels,
    rounding_variance,
    sum_error,
)
from lorica.simulation.forecast.lines import LEAST_SHARE, LINES, line_text, seconds, shorter
from lorica.simulation.forecast.traffic import Traffic
from silo_wire.plans.plan import PlanBundle
from tests.support.tiny_t5 import bundle_of, random_model


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model()


def traffic_of(bundle: PlanBundle) -> Traffic:
    return Traffic(down=bundle.model_layout.total_bytes, up=bundle.update_bytes)


def test_a_line_is_used_by_the_model_and_then_by_the_update() -> None:
    assert seconds(Traffic(down=1_000_000, up=250_000), LINES["10 Mbit/s"]) == 1.0


def test_a_round_is_shorter_by_a_tenth_just_where_it_is_said_to_be(model: Any) -> None:
    bundle = bundle_of(model)
    traffic = traffic_of(bundle)
    of_model, of_update = shorter(bundle, round_s=30.0, traffic=traffic)
    assert (of_model.key, of_model.dtype, of_update.key, of_update.dtype) == ("model", "bfloat16", "update", "int8")
    for one, less in (
        (of_model, Traffic(down=bundle.layout.as_type("bfloat16").total_bytes, up=traffic.up)),
        (of_update, Traffic(down=traffic.down, up=bundle.layout.as_type("int8").total_bytes)),
    ):
        for line, worth in ((0.99 * one.below, True), (1.01 * one.below, False)):
            before, after = 30.0 + seconds(traffic, line), 30.0 + seconds(less, line)
            assert (before - after >= LEAST_SHARE * before) is worth


def test_a_round_that_took_no_time_is_shorter_on_every_line(model: Any) -> None:
    bundle = bundle_of(model)
    traffic = traffic_of(bundle)
    found = shorter(bundle, round_s=0.0, traffic=traffic)
    assert found == tuple(replace(one, below=None) for one in shorter(bundle, round_s=30.0, traffic=traffic))
    assert len(found) == 2


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"wire": {"model": "bfloat16", "update": "int8"}}, []),
        ({"wire": {"update": "bfloat16"}}, [("model", "bfloat16"), ("update", "int8")]),
        ({"aggregation": {"secure_aggregation": True, "max_weight": 9.0}}, [("model", "bfloat16")]),
        ({"privacy": {"level": "record", "noise_multiplier": 1.0}}, [("model", "bfloat16"), ("update", "bfloat16")]),
    ],
)
def test_types_that_do_not_go_with_a_plan_are_not_recommended(
    model: Any, changes: dict[str, Any], found: list[tuple[str, str]]
) -> None:
    """The third one's words of masks have the bytes of float32."""
    off = {"every": 0, "initial": False, "last": False} if "privacy" in changes else {}
    bundle = bundle_of(
        model,
        schedule={"rounds": 3, "min_silos": 3},
        evaluation=off,
        training={"dropout": 0.0, "epochs": 2 - bool(off)},
        **changes,
    )
    assert [(one.key, one.dtype) for one in shorter(bundle, round_s=1.0, traffic=traffic_of(bundle))] == found


@pytest.mark.parametrize(
    ("bits", "text"), [(38_400_000.0, "38 Mbit/s"), (1e10, "10 Gbit/s"), (1234.0, "1.2 kbit/s"), (12.0, "12 bit/s")]
)
def test_speeds_have_two_digits(bits: float, text: str) -> None:
    assert line_text(bits) == text


# ---- rounding under masks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rms", [0.01, 0.5, 1.0, 3.0, 15.0, 25.0])
def test_the_variance_of_rounding_is_that_of_numbers_that_are_rounded(rms: float) -> None:
    values = np.linspace(-8, 8, 400_001)
    density = np.exp(-values * values / 2)
    behind = np.mod(values * rms, 1.0)
    assert rounding_variance(rms) == pytest.approx(float((behind * (1 - behind) * density).sum() / density.sum()), 1e-3)


def test_sums_of_rounded_numbers_fit_the_ring() -> None:
    for bits in (16, 32):
        for silos in (3, 8, 258):
            assert silos * (ring_levels(bits, silos) + 1) <= 2 ** (bits - 1) - 1
            assert silos * (ring_levels(bits, silos) + 2) > 2 ** (bits - 1) - 1


def test_a_light_silo_alone_is_as_wrong_as_its_sum_of_one() -> None:
    assert sum_error(127, 4.0, (1.0,)) == pytest.approx(lightest_error(127, 4.0, ratio=1.0))
    assert lightest_error(127, 4.0, ratio=30) > 0.3
    assert math.isclose(lightest_error(10**9, 4.0), math.sqrt(1 / 6) * 4.0 * 30 / 10**9)
