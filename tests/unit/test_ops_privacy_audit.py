"""The audit's bound beside numbers by hand, mechanisms whose epsilon is known, and the attack on real training with its
noise and without."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from scipy import optimize, stats
from typer.testing import CliRunner

from lorica.cli import app
from lorica.privacy_audit import run
from lorica.privacy_audit.attack.bound import Guesses, ceiling, gaussian_shift, lower_bound, refuted
from lorica.privacy_audit.attack.canaries import (
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
from lorica.privacy_audit.attack.trainer import attack_trainer
from lorica.privacy_audit.attack.weight import attack_weight, models
from lorica.privacy_audit.checks import Check
from lorica.privacy_audit.run import Choice, Finding, choice, run_audit
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.privacy.accounting import GaussianRelease, epsilon_of, gaussian_epsilon
from silo_agent.training.data.batches import collate
from silo_agent.training.local_optimizer import local_optimizer
from silo_agent.training.private.clipping import MARGIN, clipping
from silo_wire.plans.privacy import PrivacySection, calibrated_noise

pytestmark = pytest.mark.slow

CANARIES = 60
KEY = bytes(range(32))
QUIET = Console(quiet=True)


# --- what guesses prove


@given(st.integers(1, 300), st.integers(0, 300), st.floats(0.01, 6))
def test_coins_with_a_release_each_are_those_of_a_binomial(made: int, wrong: int, mu: float) -> None:
    """Who sees a Gaussian of shift mu guesses a fair coin with probability Phi(mu / 2), and no better."""
    guesses = Guesses(canaries=made, made=made, correct=max(0, made - wrong), alone=True)
    probability = stats.binom(made, stats.norm.cdf(mu / 2)).sf(guesses.correct - 1)
    for confidence in (0.9, 0.999):
        if abs(probability - (1 - confidence)) > 1e-9:
            assert refuted(guesses, mu=mu, confidence=confidence) == (probability < 1 - confidence)


@pytest.mark.parametrize(
    ("canaries", "made", "correct", "mu"), [(6, 6, 5, 1.0), (6, 6, 6, 2.0), (8, 5, 4, 0.5), (12, 12, 9, 0.3)]
)
def test_one_release_is_bounded_by_the_largest_tail_that_the_theorem_leaves(
    canaries: int, made: int, correct: int, mu: float
) -> None:
    """A linear program over the probabilities of 0, 1, ... right guesses, under a curve of many straight lines."""
    counts = np.arange(made + 1)
    rows, limits = [], []
    for epsilon in np.linspace(-12.0, 12.0, 601):
        delta = stats.norm.cdf(mu / 2 - epsilon / mu) - np.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
        for least in range(1, made + 1):
            right = np.where(counts >= least, counts, 0) / canaries
            wrong = np.where(counts >= least - 1, made - counts, 0) / canaries
            rows.append(right - np.exp(epsilon) * wrong)
            limits.append(delta)
    best = optimize.linprog(
        -(counts >= correct).astype(float), A_ub=np.array(rows), b_ub=limits, A_eq=np.ones((1, made + 1)), b_eq=[1.0]
    )
    guesses = Guesses(canaries=canaries, made=made, correct=correct)
    assert refuted(guesses, mu=mu, confidence=1 + best.fun - 1e-3)
    assert not refuted(guesses, mu=mu, confidence=1 + best.fun + 1e-3)


def test_more_canaries_prove_more_and_claims_of_4_and_8_can_be_refuted() -> None:
    def at(canaries: int, slack: float = 0.0) -> float:
        every = Guesses(canaries=canaries, made=canaries, correct=canaries)
        return ceiling(every, dp_delta=1e-5, confidence=0.999, slack=slack)

    assert at(60) < 4.0 < at(300) < 8.0 < at(run.CANARIES)
    assert 8.4 < at(run.CANARIES, run.SLACK) <= at(run.CANARIES)
    alone = Guesses(canaries=run.RELEASES, made=run.RELEASES, correct=0, alone=True)
    assert ceiling(alone, dp_delta=1e-5, confidence=0.999) > 8.0


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 300), st.integers(0, 300), st.booleans(), st.sampled_from([0.0, 1e-6]))
def test_the_bound_is_where_refuting_ends_and_below_the_ceiling(
    made: int, wrong: int, alone: bool, slack: float
) -> None:
    guesses = Guesses(canaries=made, made=made, correct=max(0, made - wrong), alone=alone)
    bound = lower_bound(guesses, dp_delta=1e-5, confidence=0.99, slack=slack)
    mu = gaussian_shift(bound, 1e-5)
    if bound > 0.0:
        assert refuted(guesses, mu=mu - 1e-4, confidence=0.99, slack=slack)
        assert bound <= lower_bound(guesses, dp_delta=1e-5, confidence=0.99)
        assert not refuted(guesses, mu=mu + 1e-4, confidence=0.99, slack=slack)
    assert bound <= ceiling(guesses, dp_delta=1e-5, confidence=0.99, slack=slack)


def test_nothing_is_proved_by_chance() -> None:
    assert lower_bound(Guesses(canaries=1000, made=1000, correct=510), dp_delta=1e-5, confidence=0.999) == 0.0
    assert lower_bound(Guesses(canaries=10, made=0, correct=0), dp_delta=1e-5, confidence=0.999) == 0.0


@pytest.mark.parametrize("epsilon", [1.0, 4.0, 8.0])
@pytest.mark.parametrize("alone", [False, True])
def test_a_gaussian_is_not_refuted_and_a_claim_too_small_for_it_is(epsilon: float, alone: bool) -> None:
    """Coins seen through the noise of epsilon; those of one release through as much noise each as all of them have."""
    many, mu = 20_000, gaussian_shift(epsilon, 1e-5)
    generator = np.random.default_rng(round(epsilon))
    truth = generator.random(many) < 0.5
    seen = generator.normal(size=many) + mu * truth - mu / 2
    guesses = guess(seen, truth, made=many if alone else many // 10, alone=alone)
    bound = lower_bound(guesses, dp_delta=1e-5, confidence=0.999)
    assert (0.6 if alone else 0.3) * epsilon < bound < epsilon


@pytest.mark.parametrize(("multiplier", "rate", "steps"), [(2.41, 0.5, 16), (1.43, 0.5, 16)])
def test_the_curve_above_samples_is_above_them(multiplier: float, rate: float, steps: int) -> None:
    """Its epsilon is the larger one at every delta down to SLACK: what has less probability is what the bound gives
    away."""
    releases = [GaussianRelease(multiplier, rate, steps)]
    mu = gaussian_shift(epsilon_of(releases, dp_delta=run.SLACK), run.SLACK)
    for delta in (0.1, 1e-2, 1e-4, 1e-6):
        exact = PLDAccountant()
        exact.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier)), steps)
        assert gaussian_epsilon(mu, delta) > exact.get_epsilon(delta)


@pytest.mark.parametrize(("made", "correct"), [(11, 1), (5, 6), (5, -1)])
def test_impossible_guesses_are_refused(made: int, correct: int) -> None:
    with pytest.raises(ConfigurationError, match="right guesses"):
        Guesses(canaries=10, made=made, correct=correct)


def test_a_confidence_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"confidence is 1\.0"):
        lower_bound(Guesses(canaries=1, made=1, correct=1), dp_delta=1e-5, confidence=1.0)


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
        guesses = guess(found, included, made=CANARIES)
        bounds[noise] = lower_bound(guesses, dp_delta=1e-5, confidence=0.999, slack=0.0 if rate == 1.0 else run.SLACK)
    assert bounds[True] < 1.0 < bounds[False]


def test_a_claim_that_is_too_small_for_its_noise_is_refuted() -> None:
    """Weights with the noise of epsilon 8, of which 1 is claimed."""
    included = coins(3000, 5)
    noise = section(8.0, steps=1).noise_multiplier
    found = attack_weight(included, noise_multiplier=noise, claimed=noise, seed=1, key=KEY)
    bound = lower_bound(guess(found, included, made=3000, alone=True), dp_delta=1e-5, confidence=0.999)
    assert 4.0 < bound < 8.0


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


CHECK = Check(promise="noise scale", about="a plan", measured=1.0, lowest=0.99, highest=1.01, broken="it is not")


@pytest.mark.parametrize("measured", [1.0, 1.5])
def test_the_command_writes_what_conformity_found_and_ends_where_a_promise_is_broken(
    measured: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "World", SimpleNamespace(of=lambda seed: None))
    monkeypatch.setattr(run, "conformity", lambda world, audited, work: [CHECK])
    monkeypatch.setattr(run, "joint_conformity", lambda world, work: [CHECK])
    monkeypatch.setattr(run, "silo_level", lambda work: [replace(CHECK, measured=measured)])
    out = tmp_path / "audit.json"
    done = CliRunner().invoke(app, ["privacy-audit", "--target", "conformity", "--out", str(out)])
    one, joint, other = json.loads(out.read_text())
    whole = {"target": "conformity", "promise": "noise scale", "about": "a plan", "measured": 1.0}
    assert one == {**whole, "lowest": 0.99, "highest": 1.01, "held": True, "fault": None}
    assert joint == one
    assert other["held"] == (measured == 1.0) == (done.exit_code == 0)
    if measured != 1.0:
        assert isinstance(done.exception, StateError)
        assert str(done.exception) == "the audit failed: noise scale, a plan: it is not (1.5, allowed are 0.99 to 1.01)"


def test_the_same_seed_finds_the_same() -> None:
    chosen = Choice(targets=("weight",), claims=(4.0,), releases=500)
    once = run_audit(chosen, QUIET)
    models.cache_clear()
    again = run_audit(chosen, QUIET)
    assert [replace(one, seconds=0.0) for one in once] == [replace(one, seconds=0.0) for one in again]


FOUND = Finding(
    target="trainer",
    claimed_epsilon=1.0,
    curve_epsilon=1.0,
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
    assert (
        replace(FOUND, noise=False, claimed_epsilon=8.0, curve_epsilon=8.3, audited_epsilon=2.9).fault is None
    )  # near the ceiling


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"audited_epsilon": 1.2}, "claimed epsilon 1: refuted, at least 1.200 was released"),
        ({"noise": False, "audited_epsilon": 0.9}, "no teeth"),
        ({"noise": False, "claimed_epsilon": 8.0, "curve_epsilon": 8.3, "audited_epsilon": 2.0}, "no teeth"),
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
    with pytest.raises(
        ConfigurationError, match="target 'models' is unknown: use conformity, trainer, transcript, weight"
    ):
        choice(targets=["models"], claims=None, **rest)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="above 0"):
        choice(targets=None, claims=[4.0, 0.0], **rest)  # type: ignore[arg-type]
