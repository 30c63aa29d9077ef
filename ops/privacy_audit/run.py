"""`lorica privacy-audit`: claims of epsilon beside what an attack proves, with the noise that keeps them and without.

    trainer      train_privately with every step's model in the attacker's hands: all records in each step, and a sample of them
    transcript   rounds of the SiloTrainer: deltas and noised weights
    weight       noised scaled loss reductions alone

With noise, what is proved must stay below what is claimed. Without, it must be above it, or the audit would show nothing; where
so many canaries cannot prove as much as is claimed, it must come near the most that they can, their ceiling.
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

from ops.privacy_audit.bound import ceiling, lower_bound
from ops.privacy_audit.canaries import Decoder, canary_model, coins, guess
from ops.privacy_audit.trainer import attack_trainer
from ops.privacy_audit.transcript import LEAST_LOSS_NOISE, attack_transcript
from ops.privacy_audit.weight import attack_weight
from security.errors import ConfigurationError, StateError
from silo_agent.training.model import T5
from silo_wire.privacy import PrivacySection, calibrated_noise

Target = Literal["trainer", "transcript", "weight"]

TARGETS: tuple[Target, ...] = ("trainer", "transcript", "weight")
CLAIMS = (1.0, 4.0, 8.0)
CANARIES = 1000
"""Of a training. The ceiling at dp_delta 1e-5 is highest for about as many: with more of them what dp_delta allows grows faster."""
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
    """One claim, one target, with noise or without. `noise_seed` is None where the operating system made the noise."""

    target: Target
    claimed_epsilon: float
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
            if self.audited_epsilon >= self.claimed_epsilon:
                return f"{what}: refuted, at least {self.audited_epsilon:.3f} was released"
            return None
        if self.ceiling > self.claimed_epsilon:
            found = self.audited_epsilon > self.claimed_epsilon
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


def run_audit(chosen: Choice, console: Console) -> list[Finding]:
    """Audit all that was chosen, print and write what was found; raises StateError where that is not as it must be."""
    found: list[Finding] = []
    for finding in _findings(chosen, console):
        found.append(finding)
        if chosen.out is not None:  # after each, so that a run that is cut short leaves what it has
            chosen.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    console.print(_table(found))
    if faults := [finding.fault for finding in found if finding.fault is not None]:
        raise StateError("the audit failed: " + "; ".join(faults))
    return found


def share_guessed(claim: float) -> float:
    """Of the canaries of a training: where a coin is hard to see, only the clearest are guessed.

    Fixed before anything is seen, as the theorem wants it. Less than all lowers the ceiling: at a claim of 4 only all guesses
    reach above it, and at 8 none do, so that what proves most is taken.
    """
    if claim <= 2.0:
        return 0.5
    return 1.0 if claim <= 4.0 else 0.2


def _findings(chosen: Choice, console: Console) -> Iterator[Finding]:
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
        audited_epsilon=lower_bound(guesses, dp_delta=DP_DELTA, confidence=CONFIDENCE),
        ceiling=ceiling(guesses, dp_delta=DP_DELTA, confidence=CONFIDENCE),
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
    # One weight is one Gaussian release, as one step with all records is: `weight` takes its noise from the same search.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the accountant's, on its way through noise that nobody will use
        noise = calibrated_noise(section, rounds=setting.rounds, weighted=setting.target == "transcript")
    return section.model_copy(update={"noise_multiplier": noise})


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
