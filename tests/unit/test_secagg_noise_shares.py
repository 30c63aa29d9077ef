"""Noise that silos make before they mask: its size in any cohort, room in 32-bit words, and what a masked vector is
with it."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lorica_security.errors import ConfigurationError, MalformedMessage, PolicyRefusal
from lorica_security.privacy.accounting import gaussian_delta
from lorica_security.secure_aggregation.keys.key_agreement import noise_key
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    SIGNED_MAX,
    Encoder,
    Ranges,
    Workspace,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.masked_vectors.noise_shares import CLIPPED_TO, LEAST_BITS, TAIL, NoiseShares
from lorica_security.secure_aggregation.masked_vectors.scores import NO_SCORES
from lorica_security.secure_aggregation.parameters import NoiseTerms, Parameters, Terms
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.training.update.masked_vector import BLOCK_ELEMENTS, write_masked_vector
from silo_wire.manifest import Layout, TensorSpec
from silo_wire.plans.masked_ranges import plan_ranges, ranges_of
from silo_wire.plans.noised_masks import check_noise_fits
from silo_wire.plans.sections.aggregation import AggregationSection
from tests.support.coordinator_edges import make_plan
from tests.support.masked_round import kept
from tests.support.secagg_federation import ALONE, MODEL, attempt, entropy, silo_names

NORM, CAP, NOISE = 0.5, 20.0, 3.0
SECTION = AggregationSection(max_delta_norm=NORM, max_weight=CAP, secure_aggregation=True)
LAYOUT = Layout("float32", (TensorSpec("a", (7,)), TensorSpec("b", (BLOCK_ELEMENTS, 1)), TensorSpec("c", (5001,))))
RANGES = plan_ranges(SECTION, LAYOUT, noised=True)
ELEMENTS = LAYOUT.parameters
TERMS = Terms(model=MODEL, link=ALONE, ranges=RANGES, colluders=1, noise=NoiseTerms(noise_multiplier=NOISE))
COHORT = 5
PARAMETERS = TERMS.parameters(silo_names(COHORT))
SHARES = NoiseShares(cohort=COHORT, honest=PARAMETERS.honest, noise_multiplier=NOISE, elements=ELEMENTS)


# --- sizes


@settings(max_examples=200, deadline=None)
@given(
    cohort=st.integers(3, 200),
    of_cohort=st.floats(0.01, 1),
    noise=st.floats(0.3, 300),
    elements=st.integers(1, 3_000_000_000),
)
def test_any_cohort_keeps_the_promise_without_overflow_and_next_to_no_noise_too_much(
    cohort: int, of_cohort: float, noise: float, elements: int
) -> None:
    honest = max(1, round(cohort * of_cohort))
    try:
        shares = NoiseShares(cohort=cohort, honest=honest, noise_multiplier=noise, elements=elements)
    except MalformedMessage:
        assert noise * math.sqrt(cohort / honest) > 100  # of which far more than the sum is noise
        return
    assert shares.effective_multiplier >= noise
    assert shares.effective_multiplier == pytest.approx(noise, rel=1e-4)
    assert shares.sigma_bits >= LEAST_BITS
    deviation = 2**shares.sigma_bits
    assert cohort * (shares.levels + 1) + TAIL * deviation * math.sqrt(cohort) <= SIGNED_MAX
    assert noise * shares.sensitivity <= math.sqrt(honest) * deviation


def test_the_promise_is_that_of_the_sum_bound_by_hand() -> None:
    """Kairouz, Liu and Steinke 2021, theorem 1, with the tau that integers of this size leave: none."""
    fewest = PARAMETERS.honest
    assert (PARAMETERS.least_sum, fewest) == (4, 3)
    epsilon = (SHARES.levels + math.sqrt(ELEMENTS)) / (math.sqrt(fewest) * 2**SHARES.sigma_bits)
    assert math.exp(-(math.pi**2) * 4.0**LEAST_BITS) == 0.0
    assert SHARES.effective_multiplier == pytest.approx(1 / epsilon)
    assert 1 / epsilon >= NOISE


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"noise_multiplier": 0.0}, ConfigurationError, "makes no noise"),
        ({"noise_multiplier": float("nan")}, ConfigurationError, "makes no noise"),
        ({"noise_multiplier": 1e7}, MalformedMessage, "does not fit into 32-bit words: take fewer rounds"),
        ({"elements": 10**18}, MalformedMessage, "does not fit"),
        ({"honest": 0}, MalformedMessage, "at least one"),
        ({"honest": 6}, MalformedMessage, "cohort of 5"),
    ],
)
def test_what_cannot_keep_the_promise_is_refused(changes: dict[str, float], error: type[Exception], said: str) -> None:
    good = {"cohort": COHORT, "honest": 3, "noise_multiplier": NOISE, "elements": ELEMENTS}
    with pytest.raises(error, match=said):
        NoiseShares(**{**good, **changes})  # type: ignore[arg-type]


# --- what one silo adds, in whole steps


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    scale=st.floats(1e-12, 1e6),
    weight=st.floats(0, 1e9),
    heavy=st.booleans(),
)
def test_one_silo_moves_the_sum_by_at_most_the_sensitivity(seed: int, scale: float, weight: float, heavy: bool) -> None:
    generator = np.random.default_rng(seed)
    delta = generator.standard_t(1.2, ELEMENTS) if heavy else generator.normal(size=ELEMENTS)
    delta = (delta * scale).astype("<f4")
    norm = float(np.linalg.norm(delta.astype(float)))
    clipped = delta * np.float32(min(1.0, NORM * CLIPPED_TO / norm))
    encoder = Encoder(
        fixed_point=PARAMETERS.fixed_point, weight=weight, rounding=KeyStream(Secret(entropy("rounding", seed)))
    )
    words = np.zeros(ELEMENTS, dtype="<u4")
    encoder.encode(words, clipped, 0, Workspace())
    squares = sum(int(value) ** 2 for value in words.view("<i4"))
    assert math.isqrt(squares) <= SHARES.sensitivity


# --- masked vectors with noise


def work(silo: int, *, masks: MaskSum | None = None, roster: bytes = b"r" * 32) -> MaskVector:
    root = Secret(entropy("root", silo))
    return MaskVector(
        parameters=PARAMETERS,
        rounding=KeyStream(Secret(entropy("rounding", silo))),
        noise=noise_key(root, attempt(), roster),
        masks=masks or MaskSum((), ()),
    )


def vector(tmp_path: Path, task: MaskVector, delta: np.ndarray, **more: object) -> np.ndarray:
    out = tmp_path / "masked"
    write_masked_vector(
        out,
        task,
        kept(tmp_path / "delta", delta),
        weight=CAP / 2,
        clipping_norm=NORM,
        noise=SHARES,
        **more,  # type: ignore[arg-type]
    )
    return np.fromfile(out, dtype="<u4")


ZEROS = np.zeros(ELEMENTS, dtype="<f4")


def test_the_sum_of_the_fewest_has_noise_of_the_promised_deviation_and_wraps_nowhere(tmp_path: Path) -> None:
    total = np.zeros(ELEMENTS + EXTRA_WORDS, dtype="<u4")
    exact = np.zeros(ELEMENTS, dtype=np.int64)
    for silo in range(PARAMETERS.honest):
        words = vector(tmp_path, work(silo), ZEROS)
        total += words
        exact += words[:-EXTRA_WORDS].view("<i4")
    noise = total[:-EXTRA_WORDS].view("<i4").astype(np.int64)
    assert (noise == exact).all()
    promised = NOISE * SHARES.sensitivity
    assert noise.std() == pytest.approx(promised, rel=5 / math.sqrt(2 * ELEMENTS))
    assert abs(noise.mean()) < 5 * promised / math.sqrt(ELEMENTS)
    assert stats.kstest(noise / promised, "norm").pvalue > 1e-6


def test_the_delta_is_in_it(tmp_path: Path) -> None:
    delta = np.full(ELEMENTS, -1.0, dtype="<f4")  # clipped, all coordinates alike
    words = vector(tmp_path, work(0), delta)[:-EXTRA_WORDS].view("<i4").astype(float)
    mean = -SHARES.levels / 2 / math.sqrt(ELEMENTS)
    assert words.mean() == pytest.approx(mean, abs=5 * 2**SHARES.sigma_bits / math.sqrt(ELEMENTS))


@pytest.mark.parametrize("weight", [CAP / 2, CAP, 10 * CAP])
@pytest.mark.parametrize("at", [0, 3, ELEMENTS - 1])
def test_a_clipped_delta_is_within_its_range_and_scaled_no_further(tmp_path: Path, at: int, weight: float) -> None:
    """Also one whose length is all in one number, which noise that is larger would hide."""
    delta = ZEROS.copy()
    delta[at] = 1e6
    written = write_masked_vector(
        tmp_path / "masked", work(0), kept(tmp_path / "delta", delta), weight=weight, clipping_norm=NORM, noise=SHARES
    )
    assert written.saturated == 0
    words = np.fromfile(tmp_path / "masked", dtype="<u4") - vector(tmp_path, work(0), ZEROS)
    assert words[at].view("<i4") == pytest.approx(min(weight / CAP, 1.0) * CLIPPED_TO * SHARES.levels, rel=2e-6, abs=2)
    assert np.count_nonzero(words[:-EXTRA_WORDS]) == 1


def test_the_last_words_say_nothing_of_a_silo(tmp_path: Path) -> None:
    for delta in (ZEROS, np.full(ELEMENTS, 1e6, dtype="<f4")):
        assert vector(tmp_path, work(0), delta)[-EXTRA_WORDS:].tolist() == [SHARES.levels, 0, *NO_SCORES.words]
    five = np.array([5 * SHARES.levels, 0, *NO_SCORES.words], dtype="<u4")
    assert decode_tail(PARAMETERS.fixed_point, five).weight_sum == pytest.approx(5 * CAP)


def test_noise_is_drawn_once_for_an_attempt_and_anew_for_another_roster(tmp_path: Path) -> None:
    once = vector(tmp_path, work(0), ZEROS, threads=1)
    assert (vector(tmp_path, work(0), ZEROS, threads=3) == once).all()
    other = vector(tmp_path, work(0, roster=b"s" * 32), ZEROS)
    assert np.corrcoef(once.view("<i4"), other.view("<i4"))[0, 1] < 0.1


def test_masks_come_on_top_and_the_key_of_the_noise_is_overwritten(tmp_path: Path) -> None:
    def masks() -> MaskSum:
        return MaskSum((KeyStream(Secret(entropy("mask"))),), ())

    bare = vector(tmp_path, work(0), ZEROS)
    task = work(0, masks=masks())
    masked = vector(tmp_path, task, ZEROS)
    assert task.noise.erased
    masks().apply(bare, 0, mask_stream.Workspace())
    assert (masked == bare).all()


# --- the roster


def test_a_roster_that_encodes_otherwise_than_the_plan_is_refused(tmp_path: Path) -> None:
    bundle = make_plan(
        tmp_path,
        overrides={
            "schedule.min_silos": 3,
            "aggregation.secure_aggregation": True,
            "aggregation.max_weight": CAP,
            "aggregation.max_delta_norm": NORM,
            "evaluation.every": 0,
            "evaluation.initial": False,
            "evaluation.last": False,
            "privacy.level": "silo",
            "privacy.max_noise_to_signal": 1e6,
        },
    )
    ranges = ranges_of(bundle)
    noise = bundle.plan.privacy.noise_multiplier
    good = Terms(model=MODEL, link=ALONE, ranges=ranges, noise=NoiseTerms(noise_multiplier=noise)).parameters(
        silo_names(4)
    )
    check_noise_fits(bundle, good)
    narrow = replace(ranges, tensors=tuple(replace(it, bound=it.bound / 1000) for it in ranges.tensors))
    for bad in (
        Terms(model=MODEL, link=ALONE, ranges=ranges).parameters(silo_names(4)),
        Terms(model=MODEL, link=ALONE, ranges=ranges, noise=NoiseTerms(noise_multiplier=noise / 2)).parameters(
            silo_names(4)
        ),
        Terms(model=MODEL, link=ALONE, ranges=narrow, noise=NoiseTerms(noise_multiplier=noise)).parameters(
            silo_names(4)
        ),
        Terms(
            model=MODEL,
            link=ALONE,
            ranges=replace(ranges, weight_cap=CAP / 10),
            noise=NoiseTerms(noise_multiplier=noise),
        ).parameters(silo_names(4)),
        _with_colluders(
            Terms(
                model=MODEL, link=ALONE, ranges=ranges, min_survivors=4, noise=NoiseTerms(noise_multiplier=noise)
            ).parameters(silo_names(7))
        ),
    ):
        with pytest.raises(PolicyRefusal, match="its noise would not cover") as refused:
            check_noise_fits(bundle, bad)
        assert refused.value.rule == "require_privacy"


def _with_colluders(good: Parameters) -> Parameters:
    """More colluders, and the encoding of none: each silo's noise would be made for more honest silos than there
    are."""
    return replace(good, colluders=2)


def test_ranges_hold_any_clipped_delta() -> None:
    assert Ranges.of(sizes=RANGES.sizes, largest_delta=[NORM] * 3, largest_weight=CAP) == RANGES


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("epsilon", [0.25, 1.0, 3.0])
def test_the_coarsest_noise_there_is_costs_what_its_gaussian_costs(noise: float, epsilon: float) -> None:
    """All of one silo's part in one coordinate, which leaves the privacy loss the coarsest steps; sigma of the least
    bits."""
    sigma = 2**LEAST_BITS
    shift = math.floor(sigma / noise)
    values = np.arange(-12 * sigma, 12 * sigma + 1)
    logarithms = -(values.astype(float) ** 2) / (2 * sigma**2)
    probabilities = np.exp(logarithms) / np.exp(logarithms).sum()
    shifted = np.concatenate([np.zeros(shift), probabilities[:-shift]])
    exact = np.maximum(probabilities - math.exp(epsilon) * shifted, 0).sum()
    assert exact == pytest.approx(gaussian_delta(shift / sigma, epsilon), rel=0.01, abs=1e-12)
