"""`lorica privacy-audit`: what private training does beside what it promises,
and claims of epsilon beside what an attack proves.

    conformity   every noised step on a tape, beside ledger and plan (conformity.py); noise of silo level
                 (silo_level.py)
    trainer      train_privately with every step's model in the attacker's hands: all records in each step, and a
                 sample of them
    transcript   rounds of the SiloTrainer: deltas and noised weights
    weight       noised scaled loss reductions alone

The last three attack, with the noise that keeps a claim and without. With noise, what is proved must stay below what is
claimed. Without, it must be above it, or the audit would show nothing; where so many canaries cannot prove as much as
is claimed, it must come near the most that they can, their ceiling.

Guesses are held against a Gaussian's curve (bound.py). Where every record is in each step, that is the
very curve of what was released. That of samples is not a Gaussian's; one lies above it that has its
epsilon at SLACK instead of dp_delta, but for SLACK of probability. Its epsilon at dp_delta is a little
above the claim, `curve_epsilon`, and is what has to be refuted.
"""

import json
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from lorica.privacy_audit.attack.bound import ceiling, gaussian_shift, lower_bound
from lorica.privacy_audit.attack.canaries import Decoder, canary_model, coins, guess
from lorica.privacy_audit.attack.trainer import attack_trainer
from lorica.privacy_audit.attack.transcript import LEAST_LOSS_NOISE, attack_transcript
from lorica.privacy_audit.attack.weight import attack_weight
from lorica.privacy_audit.checks import Check
from lorica.privacy_audit.conformity.audited_trainings import World, plans
from lorica.privacy_audit.conformity.conformity import conformity
from lorica.privacy_audit.conformity.joint_checks import joint_conformity
from lorica.privacy_audit.silo_level import silo_level
from lorica_security.console.terminal import show_table
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.privacy.accounting import GaussianRelease, epsilon_of, gaussian_epsilon
from silo_agent.training.model.model import T5
from silo_wire.plans.privacy import PrivacySection, calibrated_noise

Target = Literal["conformity", "trainer", "transcript", "weight"]

TARGETS: tuple[Target, ...] = ("conformity", "trainer", "transcript", "weight")
CLAIMS = (1.0, 4.0, 8.0)
CANARIES = 2000
"""Of a training. As many prove up to 8.5 when all are guessed right; the ceiling grows as slowly as their logarithm."""
SLACK = 1e-8
RELEASES = 25_000
CONFIDENCE = 0.999
DP_DELTA = 1e-5
NEAR_CEILING = 0.9
_LOSS_NOISE = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """`steps` a round, each with a sample of `rate`."""

    target: Target
    rate: float = 1.0
    steps: int = 1
    rounds: int = 1


SETTINGS = (
    Setting(target="trainer", steps=3),
    Setting(target="trainer", rate=0.5, steps=16),
    Setting(target="transcript", rounds=3),
    Setting(target="weight"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to audit. `canaries` are those of a training, `releases` the coins of the target `weight`."""

    targets: Sequence[Target] = TARGETS
    claims: Sequence[float] = CLAIMS
    canaries: int = CANARIES
    releases: int = RELEASES
    seed: int = 1
    out: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One claim, one target, with noise or without. What is audited has to stay
    below `curve_epsilon`, the claim or a little more.

    `noise_seed` is None where the operating system made the noise.
    """

    target: Target
    claimed_epsilon: float
    curve_epsilon: float
    audited_epsilon: float
    ceiling: float
    noise: bool
    noise_multiplier: float
    sampling_rate: float
    steps: int
    dp_delta: float
    canaries: int
    correct: int
    abstentions: int
    confidence: float
    model_seed: int
    coin_seed: int
    noise_seed: int | None
    seconds: float

    @property
    def fault(self) -> str | None:
        """Why this is not as it must be."""
        what = f"{self.target}, sampling rate {self.sampling_rate:g}, claimed epsilon {self.claimed_epsilon:g}"
        if self.noise:
            if self.audited_epsilon >= self.curve_epsilon:
                return f"{what}: refuted, at least {self.audited_epsilon:.3f} was released"
            return None
        if self.ceiling > self.curve_epsilon:
            found = self.audited_epsilon > self.curve_epsilon
        else:
            found = self.audited_epsilon >= NEAR_CEILING * self.ceiling
        return (
            None if found else f"{what}: without noise {self.audited_epsilon:.3f} was found, so the audit has no teeth"
        )


def choice(
    *,
    targets: Sequence[str] | None,
    claims: Sequence[float] | None,
    canaries: int,
    releases: int,
    seed: int,
    out: Path | None,
) -> Choice:
    """With what is left out filled in; raises ConfigurationError for what cannot be audited."""
    known = tuple(target for target in TARGETS if target in (targets or TARGETS))
    if unknown := set(targets or ()) - set(TARGETS):
        raise ConfigurationError(f"target {min(unknown)!r} is unknown: use {', '.join(TARGETS)}")
    if any(not claim > 0.0 for claim in claims or ()):
        raise ConfigurationError(f"a claim is {min(claims or ())}: an epsilon that is claimed is above 0")
    return Choice(
        targets=known, claims=tuple(claims or CLAIMS), canaries=canaries, releases=releases, seed=seed, out=out
    )


def run_audit(chosen: Choice, console: Console) -> list[Finding | Check]:
    """Audit all that was chosen, print and write what was found; raises StateError where that is not as it must be."""
    found: list[Finding | Check] = []
    for finding in _findings(chosen, console):
        found.append(finding)
        if chosen.out is not None:  # after each, so that a run that is cut short leaves what it has
            chosen.out.write_text(json.dumps([_told(one) for one in found], indent=1) + "\n")
    if checks := [one for one in found if isinstance(one, Check)]:
        show_table(console, _table_of_checks(checks))
    if findings := [one for one in found if isinstance(one, Finding)]:
        show_table(console, _table(findings))
    if faults := [finding.fault for finding in found if finding.fault is not None]:
        raise StateError("the audit failed: " + "; ".join(faults))
    return found


def share_guessed(claim: float) -> float:
    """Of the canaries of a training: where a coin is hard to see, only the clearest are guessed.

    Fixed before anything is seen, as the theorem wants it. Less than all lowers the
    ceiling: above a claim of 8 only all guesses reach.
    """
    return 0.5 if claim <= 4.0 else 1.0


def _findings(chosen: Choice, console: Console) -> Iterator[Finding | Check]:
    if "conformity" in chosen.targets:
        with console.status("conformity"), tempfile.TemporaryDirectory(prefix="lorica-audit-") as work:
            for part in ("records", "joint", "silos"):
                (Path(work) / part).mkdir()
            world = World.of(chosen.seed)
            yield from conformity(world, plans(), Path(work) / "records")
            yield from joint_conformity(world, Path(work) / "joint")
            yield from silo_level(Path(work) / "silos")
    attacked: _Attacked | None = None
    for setting in SETTINGS:
        if setting.target not in chosen.targets:
            continue
        if setting.target != "weight" and attacked is None:
            with console.status(f"gradients of {chosen.canaries} canaries"):
                attacked = _Attacked.of(chosen)
        for claim in chosen.claims:
            for noise in (True, False):
                with console.status(f"{setting.target}: claim {claim:g}, {'with' if noise else 'without'} noise"):
                    yield _finding(chosen, setting, claim, noise, attacked)


@dataclass(frozen=True, slots=True)
class _Attacked:
    model: T5
    decoder: Decoder

    @classmethod
    def of(cls, chosen: Choice) -> "_Attacked":
        model = canary_model(chosen.canaries, chosen.seed)
        return cls(model, Decoder.of(model, chosen.canaries))


def _finding(chosen: Choice, setting: Setting, claim: float, noise: bool, attacked: _Attacked | None) -> Finding:
    started = time.monotonic()
    privacy = _section(chosen, setting, claim)
    slack = SLACK if setting.rate < 1.0 else 0.0
    coin_seed, noise_seed = (_seed(chosen, purpose, setting, claim, noise) for purpose in ("coins", "noise"))
    key = sha256(b"%d" % noise_seed).digest()
    if setting.target == "weight":
        included = coins(chosen.releases, coin_seed)
        drawn_with = privacy.noise_multiplier if noise else LEAST_LOSS_NOISE
        found = attack_weight(
            included, noise_multiplier=drawn_with, claimed=privacy.noise_multiplier, seed=chosen.seed, key=key
        )
        guesses = guess(found, included, made=len(included), alone=True)
    else:
        assert attacked is not None
        included = coins(chosen.canaries, coin_seed)
        if setting.target == "trainer":
            found = attack_trainer(attacked.model, attacked.decoder, included, privacy, noise=noise, key=key)
        else:
            with tempfile.TemporaryDirectory(prefix="lorica-audit-") as work:
                found = attack_transcript(
                    attacked.model,
                    attacked.decoder,
                    included,
                    privacy,
                    rounds=setting.rounds,
                    noise=noise,
                    work=Path(work),
                )
        guesses = guess(found, included, made=max(1, round(share_guessed(claim) * chosen.canaries)))
    return Finding(
        target=setting.target,
        claimed_epsilon=claim,
        curve_epsilon=_above(privacy, setting) if slack else claim,
        audited_epsilon=lower_bound(guesses, dp_delta=DP_DELTA, confidence=CONFIDENCE, slack=slack),
        ceiling=ceiling(guesses, dp_delta=DP_DELTA, confidence=CONFIDENCE, slack=slack),
        noise=noise,
        noise_multiplier=privacy.noise_multiplier,
        sampling_rate=setting.rate,
        steps=setting.steps * setting.rounds,
        dp_delta=DP_DELTA,
        canaries=guesses.canaries,
        correct=guesses.correct,
        abstentions=guesses.canaries - guesses.made,
        confidence=CONFIDENCE,
        model_seed=chosen.seed,
        coin_seed=coin_seed,
        noise_seed=None if setting.target == "transcript" else noise_seed,
        seconds=round(time.monotonic() - started, 1),
    )


def _section(chosen: Choice, setting: Setting, claim: float) -> PrivacySection:
    """`[privacy]` that promises `claim` for the whole of it, with as little noise as that takes."""
    section = PrivacySection(
        level="record",
        target_epsilon=claim,
        dp_delta=DP_DELTA,
        nominal_records=chosen.canaries,
        expected_batch_size=round(setting.rate * chosen.canaries),
        steps=setting.steps,
        loss_noise_multiplier=_LOSS_NOISE,
    )
    # One weight is one Gaussian release, as one step with all records is:
    # `weight` takes its noise from the same search.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the accountant's, on its way through noise that nobody will use
        noise = calibrated_noise(section, rounds=setting.rounds, weighted=setting.target == "transcript")
    return section.model_copy(update={"noise_multiplier": noise})


def _above(privacy: PrivacySection, setting: Setting) -> float:
    """Of the Gaussian curve that has the epsilon of sampled steps at SLACK, the epsilon at dp_delta."""
    release = GaussianRelease(privacy.noise_multiplier, setting.rate, setting.steps * setting.rounds)
    return gaussian_epsilon(gaussian_shift(epsilon_of([release], dp_delta=SLACK), SLACK), DP_DELTA)


def _told(one: Finding | Check) -> dict[str, object]:
    """As it is written to JSON."""
    if isinstance(one, Finding):
        return asdict(one)
    told = asdict(one)
    del told["broken"]
    return {**told, "held": one.held, "fault": one.fault}


def _table_of_checks(checks: Sequence[Check]) -> Table:
    """A line for each promise; all numbers are in the JSON."""
    table = Table(title="what private training does beside what it promises", title_style="dim")
    table.add_column("promise")
    table.add_column("checks", justify="right")
    table.add_column("as it must be", justify="right")
    for promise in dict.fromkeys(check.promise for check in checks):
        held = [check.held for check in checks if check.promise == promise]
        table.add_row(promise, str(len(held)), "yes" if all(held) else "NO")
    return table


def _seed(chosen: Choice, purpose: str, setting: Setting, claim: float, noise: bool) -> int:
    """31 bits that differ from one use to the next."""
    source = f"{chosen.seed} {purpose} {setting} {claim} {noise}"
    return int.from_bytes(sha256(source.encode()).digest()[:4], "little") >> 1


def _table(found: Sequence[Finding]) -> Table:
    table = Table(
        title=f"lower bounds on epsilon at dp_delta {DP_DELTA:g}, confidence {CONFIDENCE:.1%}", title_style="dim"
    )
    for column in (
        "target",
        "sampling rate",
        "claimed",
        "noise",
        "audited",
        "ceiling",
        "right guesses",
        "as it must be",
    ):
        table.add_column(column, justify="left" if column == "target" else "right")
    for one in found:
        table.add_row(
            one.target,
            f"{one.sampling_rate:g}",
            f"{one.claimed_epsilon:g}",
            "on" if one.noise else "off",
            f"{one.audited_epsilon:.3f}",
            f"{one.ceiling:.3f}",
            f"{one.correct} of {one.canaries - one.abstentions}",
            "yes" if one.fault is None else "NO",
        )
    return table
