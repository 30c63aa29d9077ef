"""The audit's bound beside numbers by hand, mechanisms whose epsilon is known, and the attack on real training with its noise and without."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy import stats
from typer.testing import CliRunner

from ops.cli import app
from ops.privacy_audit import run
from ops.privacy_audit.bound import Guesses, ceiling, lower_bound, p_value
from ops.privacy_audit.canaries import (
    AdamWReader,
    Decoder,
    Weight,
    canary_model,
    coins,
    evidence,
    examples_of,
    guess,
    section_for,
    trained,
)
from ops.privacy_audit.run import Choice, Finding, choice, run_audit
from ops.privacy_audit.trainer import attack_trainer
from ops.privacy_audit.weight import attack_weight
from security.errors import ConfigurationError, StateError
from silo_agent.training.batches import collate
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.private.clipping import MARGIN, clipping
from silo_wire.privacy import PrivacySection, calibrated_noise

CANARIES = 60
KEY = bytes(range(32))
QUIET = Console(quiet=True)


# --- what guesses prove


def test_a_binomial_by_hand() -> None:
    """Two of three right, each with probability e / (1 + e) = q: 3 q^2 (1 - q) + q^3."""
    q = math.e / (1 + math.e)
    found = p_value(Guesses(canaries=3, made=3, correct=2), epsilon=1.0, dp_delta=1e-300)
    assert found == pytest.approx(3 * q**2 * (1 - q) + q**3)


def test_what_dp_delta_adds_by_hand() -> None:
    """One guess, right: P[1 > W >= 0] / 1 = 1 - q, times 2 m dp_delta."""
    q = math.e / (1 + math.e)
    found = p_value(Guesses(canaries=5, made=1, correct=1), epsilon=1.0, dp_delta=0.01)
    assert found == pytest.approx(q + 2 * 5 * 0.01 * (1 - q))
    alone = p_value(Guesses(canaries=5, made=1, correct=1, alone=True), epsilon=1.0, dp_delta=0.01)
    assert alone == pytest.approx((math.e + 0.01) / (1 + math.e))


@given(
    st.integers(1, 400), st.integers(0, 400), st.integers(0, 400), st.floats(0, 8), st.sampled_from([0.0, 1e-5, 1e-2])
)
def test_the_theorem_term_by_term(made: int, wrong: int, silent: int, epsilon: float, dp_delta: float) -> None:
    correct = max(0, made - wrong)
    law = stats.binom(made, 1 / (1 + math.exp(-epsilon)))
    most = max(
        ((law.cdf(correct - 1) - law.cdf(correct - i - 1)) / i for i in range(1, correct + 1)),
        default=0.0,
    )
    expected = min(1.0, law.sf(correct - 1) + 2 * (made + silent) * dp_delta * most)
    guesses = Guesses(canaries=made + silent, made=made, correct=correct)
    assert p_value(guesses, epsilon=epsilon, dp_delta=dp_delta) == pytest.approx(expected, rel=1e-6, abs=1e-10)


def test_all_guesses_right() -> None:
    """q^m = 0.001 without dp_delta; with it the ceiling falls again from some number of canaries on."""
    guesses = Guesses(canaries=1000, made=1000, correct=1000)
    root = 0.001 ** (1 / 1000)
    assert ceiling(guesses, dp_delta=0.0, confidence=0.999) == pytest.approx(math.log(root / (1 - root)), abs=1e-4)

    def at(canaries: int) -> float:
        every = Guesses(canaries=canaries, made=canaries, correct=canaries)
        return ceiling(every, dp_delta=1e-5, confidence=0.999)

    assert at(run.CANARIES) > 4.0
    assert at(run.CANARIES) > max(at(300), at(20_000))
    alone = Guesses(canaries=run.RELEASES, made=run.RELEASES, correct=0, alone=True)
    assert ceiling(alone, dp_delta=1e-5, confidence=0.999) > 8.0


@given(st.integers(1, 300), st.integers(0, 300), st.booleans())
def test_the_bound_is_where_the_p_value_crosses_and_below_the_ceiling(made: int, wrong: int, alone: bool) -> None:
    guesses = Guesses(canaries=made, made=made, correct=max(0, made - wrong), alone=alone)
    bound = lower_bound(guesses, dp_delta=1e-5, confidence=0.99)
    if bound > 0.0:
        assert p_value(guesses, epsilon=bound, dp_delta=1e-5) < 0.01
    assert p_value(guesses, epsilon=bound + 1e-4, dp_delta=1e-5) >= 0.01
    assert bound <= ceiling(guesses, dp_delta=1e-5, confidence=0.99)


def test_nothing_is_proved_by_chance() -> None:
    assert lower_bound(Guesses(canaries=1000, made=1000, correct=510), dp_delta=1e-5, confidence=0.999) == 0.0
    assert lower_bound(Guesses(canaries=10, made=0, correct=0), dp_delta=1e-5, confidence=0.999) == 0.0


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("alone", [False, True])
def test_randomised_response_is_not_refuted_and_nearly_reached(epsilon: float, alone: bool) -> None:
    """Each coin is told truly with probability e^epsilon / (1 + e^epsilon): as private as that, and no more."""
    many = 100_000
    generator = torch.Generator().manual_seed(round(10 * epsilon))
    truth = torch.rand(many, generator=generator) < math.exp(epsilon) / (1 + math.exp(epsilon))
    guesses = Guesses(canaries=many, made=many, correct=int(truth.sum()), alone=alone)
    bound = lower_bound(guesses, dp_delta=1e-12, confidence=0.999)
    assert 0.93 * epsilon < bound < epsilon
    assert p_value(guesses, epsilon=0.9 * epsilon, dp_delta=1e-12) < 0.001  # a claim too small


@pytest.mark.parametrize(("made", "correct"), [(11, 1), (5, 6), (5, -1)])
def test_impossible_guesses_are_refused(made: int, correct: int) -> None:
    with pytest.raises(ConfigurationError, match="right guesses"):
        Guesses(canaries=10, made=made, correct=correct)


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"confidence is 1\.0"):
        lower_bound(Guesses(canaries=1, made=1, correct=1), dp_delta=0.0, confidence=1.0)


# --- the attacker


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.of(canary_model(CANARIES, 1), CANARIES)


def test_canaries_add_to_the_real_clipped_sum_what_the_decoder_thinks(decoder: Decoder) -> None:
    model, included = canary_model(CANARIES, 1), coins(CANARIES, 7)
    parameters = trained(model)
    way = clipping("ghost", model, parameters, max_grad_norm=1e-3)
    examples = examples_of(included)
    way.accumulate(collate(examples, range(len(examples)), pad=0, device=torch.device("cpu")))
    total = torch.cat([one.summed_grad.flatten() for one in parameters]).double().numpy()  # type: ignore[attr-defined]
    found, deviation = decoder.estimates(total / (1e-3 * (1 - MARGIN)))
    assert np.abs(found - included).max() < 1e-3
    assert (deviation < 0.01).all()


def test_noise_is_measured(decoder: Decoder) -> None:
    generator = torch.Generator().manual_seed(3)
    noise = 0.4 * torch.randn(decoder.directions.shape[1], generator=generator, dtype=torch.float64).numpy()
    found, deviation = decoder.estimates(noise)
    assert float(np.sqrt((found / deviation).var())) == pytest.approx(1.0, abs=0.35)
    assert deviation == pytest.approx(0.4 * np.sqrt(decoder.inverse.diagonal()), rel=0.1)


def test_a_weight_is_one_more_equation(decoder: Decoder) -> None:
    """An exact weight that is one canary's alone tells of that one, however much noise is on the gradients."""
    generator = torch.Generator().manual_seed(3)
    noise = 9.0 * torch.randn(decoder.directions.shape[1], generator=generator, dtype=torch.float64).numpy()
    parts = np.zeros(CANARIES)
    parts[4] = 2.0
    found, deviation = decoder.estimates(noise, Weight(parts, total=2.0, deviation=1e-3))
    before, _ = decoder.estimates(noise)
    assert found[4] == pytest.approx(1.0, abs=1e-3)
    assert deviation[4] < 1e-3
    assert abs(before[4] - 1.0) > 0.1


def test_the_reader_takes_back_what_adamw_does() -> None:
    section = section_for(64)
    generator = torch.Generator().manual_seed(1)
    parameter = torch.nn.Parameter(torch.zeros(50))
    optimizer = local_optimizer(section, [parameter])
    reader = AdamWReader(section.learning_rate)
    for _ in range(4):
        gradient = 1e-13 * torch.randn(50, generator=generator)
        before = parameter.detach().clone()
        parameter.grad = gradient
        optimizer.step()
        read = reader.read((parameter.detach() - before).double().numpy())
        assert np.abs(read - gradient.double().numpy()).max() < 1e-15


def test_evidence_is_the_likelihood_ratio() -> None:
    estimate, deviation = np.array([0.3, 1.4, -0.2]), np.array([0.5, 1.0, 2.0])
    inside = stats.norm.pdf(estimate, 1.0, deviation)
    outside = stats.norm.pdf(estimate, 0.0, deviation)
    assert evidence(estimate, deviation, 1.0) == pytest.approx(np.log(inside / outside))
    sampled = 0.25 * inside + 0.75 * outside
    assert evidence(estimate, deviation, 0.25) == pytest.approx(np.log(sampled / outside))


def test_only_the_clearest_are_guessed() -> None:
    guesses = guess(np.array([0.1, -5.0, 3.0, -0.2]), np.array([False, False, True, True]), made=2)
    assert guesses == Guesses(canaries=4, made=2, correct=2)


# --- real training


def section(claim: float, *, rate: float = 1.0, steps: int = 2) -> PrivacySection:
    wanted = PrivacySection(
        level="record",
        target_epsilon=claim,
        nominal_records=CANARIES,
        expected_batch_size=round(rate * CANARIES),
        steps=steps,
    )
    return wanted.model_copy(update={"noise_multiplier": calibrated_noise(wanted, rounds=1, weighted=False)})


@pytest.mark.parametrize(("rate", "steps"), [(1.0, 2), (0.5, 16)])
def test_training_without_noise_is_refuted_by_few_canaries_and_with_noise_it_is_not(
    decoder: Decoder, rate: float, steps: int
) -> None:
    privacy, included = section(1.0, rate=rate, steps=steps), coins(CANARIES, 5)
    bounds = {}
    for noise in (True, False):
        found = attack_trainer(canary_model(CANARIES, 1), decoder, included, privacy, noise=noise, key=KEY)
        bounds[noise] = lower_bound(guess(found, included, made=CANARIES), dp_delta=1e-5, confidence=0.999)
    assert bounds[True] < 1.0 < bounds[False]


def test_a_claim_that_is_too_small_for_its_noise_is_refuted() -> None:
    """Weights with the noise of epsilon 8, of which 1 is claimed."""
    included = coins(3000, 5)
    noise = section(8.0, steps=1).noise_multiplier
    found = attack_weight(included, noise_multiplier=noise, claimed=noise, seed=1, key=KEY)
    bound = lower_bound(guess(found, included, made=3000, alone=True), dp_delta=1e-5, confidence=0.999)
    assert 1.0 < bound < 8.0


# --- the command


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    out = tmp_path / "audit.json"
    arguments = ["--target", "transcript", "--target", "weight", "--claim", "1"]
    size = ["--canaries", str(CANARIES), "--releases", "500"]
    done = CliRunner().invoke(app, ["privacy-audit", *arguments, *size, "--out", str(out)])
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text())
    assert [(one["target"], one["noise"]) for one in found] == [
        *[("transcript", True), ("transcript", False)],
        *[("weight", True), ("weight", False)],
    ]
    for one in found:
        assert (one["claimed_epsilon"], one["confidence"], one["dp_delta"]) == (1.0, 0.999, 1e-5)
        assert (one["audited_epsilon"] < 1.0) == one["noise"]
        assert one["audited_epsilon"] <= one["ceiling"]
        assert one["canaries"] == (CANARIES if one["target"] == "transcript" else 500)
        assert one["abstentions"] == (CANARIES // 2 if one["target"] == "transcript" else 0)
        assert one["correct"] <= one["canaries"] - one["abstentions"]
        assert (one["noise_seed"] is None) == (one["target"] == "transcript")


def test_the_same_seed_finds_the_same() -> None:
    chosen = Choice(targets=("weight",), claims=(4.0,), releases=500)
    once, again = (run_audit(chosen, QUIET) for _ in range(2))
    assert [replace(one, seconds=0.0) for one in once] == [replace(one, seconds=0.0) for one in again]


FOUND = Finding(
    target="trainer",
    claimed_epsilon=1.0,
    audited_epsilon=0.5,
    ceiling=3.0,
    noise=True,
    noise_multiplier=4.0,
    sampling_rate=1.0,
    steps=3,
    dp_delta=1e-5,
    canaries=100,
    correct=60,
    abstentions=0,
    confidence=0.999,
    model_seed=1,
    coin_seed=2,
    noise_seed=3,
    seconds=1.0,
)


def test_what_is_as_it_must_be() -> None:
    assert FOUND.fault is None
    assert replace(FOUND, noise=False, audited_epsilon=1.1).fault is None
    assert replace(FOUND, noise=False, claimed_epsilon=8.0, audited_epsilon=2.9).fault is None  # near the ceiling


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"audited_epsilon": 1.2}, "claimed epsilon 1: refuted, at least 1.200 was released"),
        ({"noise": False, "audited_epsilon": 0.9}, "no teeth"),
        ({"noise": False, "claimed_epsilon": 8.0, "audited_epsilon": 2.0}, "no teeth"),
    ],
)
def test_what_is_not_as_it_must_be_ends_the_command(
    changed: dict[str, object], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = replace(FOUND, **changed)  # type: ignore[arg-type]
    monkeypatch.setattr(run, "_findings", lambda chosen, console: iter([FOUND, bad]))
    with pytest.raises(StateError, match=told):
        run_audit(Choice(), QUIET)


def test_an_unknown_target_or_claim_is_refused() -> None:
    rest = {"canaries": 10, "releases": 10, "seed": 1, "out": None}
    with pytest.raises(ConfigurationError, match="target 'models' is unknown: use trainer, transcript, weight"):
        choice(targets=["models"], claims=None, **rest)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="above 0"):
        choice(targets=None, claims=[4.0, 0.0], **rest)  # type: ignore[arg-type]
