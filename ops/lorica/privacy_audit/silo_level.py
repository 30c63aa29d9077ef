"""Conformity of silo-level noise: at the coordinator, through its Aggregator, and at
silos that mask, through the vectors that leave them.

The coordinator's noise follows from a key, which is taped where it is handed on: with the noise taken away, what is
left is the sum of clipped deltas to the last bits. A silo's noise follows from its root: a vector of zeros is noise
alone, and another vector under the same root, less that, is what a silo adds.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lorica.privacy_audit.checks import (
    Check,
    correlation_limit,
    distance_from_normal,
    distance_limit,
    mean_products,
    none,
    replaced,
    worst,
)
from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.edges.sums.reducers import noised
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.vectors import model_file
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.noise.discrete_gaussian import SIGMA_BITS
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS, NoiseStream
from lorica_security.noise.random_words import KEY_BYTES
from lorica_security.privacy.accounting import GaussianRelease
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.key_agreement import noise_key
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.masked_vectors.noise_shares import NoiseShares
from lorica_security.secure_aggregation.parameters import Parameters, Terms
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.training.update.masked_vector import KeptDelta, write_masked_vector
from silo_wire.canonical import Digest, digest_of
from silo_wire.manifest import Layout, TensorSpec, manifest_of
from silo_wire.messages import RoundKey, TrainingSummary, UpdateHeader
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.noised_masks import noise_shares, noise_terms
from silo_wire.plans.plan import Plan, PlanBundle

MULTIPLIER, NORM, CAP, DIVISOR = 2.3, 0.5, 20.0, 8
"""Of [privacy] and [aggregation]: noise multiplier, max_delta_norm, max_weight, nominal_silos."""
COHORT, COLLUDERS = 5, 1
EXACT, NOISE = 1e-3, 0.01
_LAYOUT = Layout(
    "float32", (TensorSpec("a", (777,)), TensorSpec("b", (3 * BLOCK_ELEMENTS, 1)), TensorSpec("c", (5001,)))
)
"""More than three blocks of noise, whose deviation 200,000 numbers show to 0.16 %."""
_SIZE = _LAYOUT.parameters
_FEDERATION = FederationName("privacy-audit")
_SILOS = tuple(SiloName(f"silo-{number}") for number in range(COHORT))
_UPDATES = ((40 * NORM, 5.0), (NORM / 40, 10.0), (NORM / 2, 3 * CAP))
"""Norm of a delta and weight, of each silo that sends one: above and below what is clipped to, and above the cap."""

Floats = NDArray[np.float32]
Vector = NDArray[np.float64]


def silo_level(work: Path) -> list[Check]:
    """Both; `work` is an empty folder."""
    return [*at_the_coordinator(work / "coordinator"), *at_the_silos(work / "silos")]


def _bundle(*, masked: bool) -> PlanBundle:
    files = {"config.json": b"{}", "layout.json": _LAYOUT.to_json()}
    silent = {"every": 0, "initial": False, "last": False}
    plan = Plan.model_validate(
        {
            "name": "privacy-audit",
            "federation": _FEDERATION,
            "model": {
                "source": "privacy-audit",
                "parameters": _SIZE,
                "layout": _LAYOUT.digest,
                "initial": manifest_of(_LAYOUT, [bytes(4 * _SIZE)]).digest,
                "files": {name: digest_of(content) for name, content in files.items()},
            },
            "schedule": {"rounds": 2, "min_silos": 3},
            "aggregation": {
                "weighting": "lorar",
                "max_delta_norm": NORM,
                "max_weight": CAP,
                "momentum": 0.0,
                "secure_aggregation": masked,
                **({"colluders": COLLUDERS} if masked else {}),
            },
            "privacy": {
                "level": "silo",
                "target_epsilon": 1e3,
                "noise_multiplier": MULTIPLIER,
                "nominal_silos": DIVISOR,
                "max_noise_to_signal": 1e6,
            },
            "evaluation": silent,
        }
    )
    return PlanBundle(plan, files)


def _deltas() -> list[Floats]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for norm, _ in _UPDATES:
        drawn = torch.randn(_SIZE, generator=generator)
        made.append(np.ascontiguousarray((drawn * (norm / drawn.norm())).numpy(), dtype="<f4"))
    return made


# --- noise at the coordinator


class _Coordinator:
    """One coordinator's folder, as it is before the first round of the plan."""

    def __init__(self, state: Path, bundle: PlanBundle) -> None:
        state.mkdir(parents=True)
        initial = state / "initial"
        manifest = model_file.write(initial, _LAYOUT, [bytes(4 * _SIZE)])
        self._models = ModelStore(
            state / "models",
            layout=_LAYOUT,
            model_layout=_LAYOUT,
            initial=manifest.digest,
            initial_file=initial,
        )
        self._spools = Spools(state / "spools")
        self.ledger = ReleaseLedger(state / "privacy")
        self._plan = bundle.plan
        self._aggregator = Aggregator(
            bundle.plan.aggregation,
            models=self._models,
            spools=self._spools,
            update_dtype="float32",
            device=torch.device("cpu"),
            privacy=bundle.plan.privacy,
            releases=self.ledger,
        )

    def release(self, round_number: int, deltas: Sequence[Floats]) -> tuple[Vector, bytes]:
        """The sum that a round's model tells, and the key that its noise was drawn with."""
        key = RoundKey(federation=_FEDERATION, plan=self._plan.digest, round=round_number, attempt=1)
        base = self._models.initial()
        updates = [
            self._sent(key, base, silo, delta, weight)
            for silo, delta, (_, weight) in zip(_SILOS, deltas, _UPDATES, strict=False)
        ]
        keys: list[bytes] = []
        original: type[NoiseStream] = vars(noised)["NoiseStream"]

        def taped(key: bytes) -> NoiseStream:
            keys.append(key)
            return original(key)

        with replaced(noised, "NoiseStream", taped):
            result = self._aggregator.aggregate(key, base, updates)
        vector = self._models.vector(result.model)
        content = b"".join(vector.chunk(index) for index in range(vector.manifest.chunks))
        return np.frombuffer(content, dtype="<f4").astype(np.float64) * DIVISOR, keys[0] if keys else b""

    def _sent(self, key: RoundKey, base: Digest, silo: SiloName, delta: Floats, weight: float) -> CommittedUpdate:
        summary = TrainingSummary(
            examples=1,
            loss_max=weight,
            loss_min=0.0,
            loss_first=weight,
            loss_last=0.0,
            optimizer_steps=1,
            seconds=0.0,
        )
        manifest = manifest_of(_LAYOUT, [delta.tobytes()])
        header = UpdateHeader(key=key, model=base, manifest=manifest, summary=summary, signature=bytes(64))
        spool = self._spools.open(key, silo, header, _LAYOUT)
        for index in range(spool.held, manifest.chunks):
            first = index * manifest.chunk_bytes
            spool.write(index, delta.tobytes()[first : first + manifest.chunk_size(index)])
        return CommittedUpdate(silo=silo, digest=manifest.digest, summary=summary, delta_norm=spool.commit())


def at_the_coordinator(work: Path) -> Iterator[Check]:
    about = "noise at the coordinator"
    bundle = _bundle(masked=False)
    deltas = _deltas()
    one, other = (_Coordinator(work / name, bundle) for name in ("one", "other"))
    released = [one.release(1, deltas), one.release(2, deltas), one.release(1, deltas[:2]), other.release(1, deltas)]
    again, _ = one.release(1, deltas)
    entries = one.ledger.kept.entries()
    told = [] if [entry.release for entry in entries] == [GaussianRelease(MULTIPLIER)] * 3 else ["the ledger"]
    yield none("ledger", about, told, "it has not one entry with the plan's multiplier for each release")
    yield none(
        "a release made again",
        about,
        [] if np.array_equal(again, released[0][0]) else ["round 1"],
        "the same set of updates was released with other noise",
    )
    shares = np.array([min(weight, CAP) / CAP * min(1.0, NORM / norm) for norm, weight in _UPDATES])
    noise = []
    for total, drawn in zip((total for total, _ in released), (3, 3, 2, 3), strict=True):
        noise.append(total - shares[:drawn] @ np.stack(deltas[:drawn]).astype(np.float64))
    said = entries[0].release.noise_multiplier if entries else MULTIPLIER
    yield from gaussian_rows(about, np.stack(noise), (said or 1.0) * NORM)
    keys = [key for _, key in released]
    yield none(
        "keys are used once",
        about,
        ["two releases"] * (len(keys) - len(set(keys))),
        "noise of two releases came from one key",
    )
    step = MULTIPLIER * NORM / (1 << SIGMA_BITS)
    exact = released[0][0] - _noise_of(NoiseStream(keys[0] or bytes(32))) * step
    directions = np.stack(deltas).astype(np.float64)
    found = np.linalg.solve(directions @ directions.T, directions @ exact)
    at, off = worst(found / shares - 1)
    yield Check(
        promise="contribution of a silo",
        about=about,
        measured=1 + off,
        lowest=1 - EXACT,
        highest=1 + EXACT,
        broken=f"silo {at} counts in the sum so many times its clipped and weighed delta",
    )


def _noise_of(stream: NoiseStream) -> Vector:
    blocks = [
        stream.block(index, min(BLOCK_ELEMENTS, _SIZE - first))
        for index, first in enumerate(range(0, _SIZE, BLOCK_ELEMENTS))
    ]
    return np.concatenate(blocks).astype(np.float64)


# --- noise at the silos


def at_the_silos(work: Path) -> Iterator[Check]:
    about = "noise at the silos"
    work.mkdir(parents=True)
    bundle = _bundle(masked=True)
    plan = bundle.plan
    terms = Terms(
        model=bytes(32),
        link=first_link(_FEDERATION, Partition.singletons(_SILOS)),
        ranges=ranges_of(bundle),
        colluders=COLLUDERS,
        noise=noise_terms(plan),
    )
    parameters = terms.parameters(_SILOS)
    roots = [secrets.token_bytes(KEY_BYTES) for _ in range(_honest())]
    zeros = np.zeros(_SIZE, dtype="<f4")
    shares = [_words(work, bundle, parameters, root, zeros) for root in roots]
    later = _words(work, bundle, parameters, roots[0], zeros, attempt=2)
    other_roster = _words(work, bundle, parameters, roots[0], zeros, roster=b"\x02" * 32)
    (delta, *_) = _deltas()
    moved = _words(work, bundle, parameters, roots[0], delta) - shares[0]  # the same noise on both
    length = float(np.linalg.norm(moved))
    total = np.sum(shares, axis=0)
    yield Check(
        promise="noise scale",
        about=f"{about}, sum of the fewest",
        measured=float(total.std()) / length,
        lowest=MULTIPLIER * (1 - NOISE),
        highest=MULTIPLIER * (1 + NOISE),
        broken="noise of all silos that nobody else knows, over what one silo adds at most, is not the plan's "
        "multiplier",
    )
    yield Check(
        promise="noise scale",
        about=f"{about}, one share",
        measured=float(shares[0].std()) / float(total.std()) * math.sqrt(_honest()),
        lowest=1 - NOISE,
        highest=1 + NOISE,
        broken="a silo's share is not one over the root of those that make noise which nobody else knows",
    )
    yield from gaussian_rows(about, np.stack([*shares, later, other_roster]), None)
    told = [(mechanism, release) for mechanism, release in plan.releases_of_round]
    yield none(
        "ledger",
        about,
        [] if told == [("delta", GaussianRelease(MULTIPLIER / 2))] else ["a masked upload"],
        "a silo's ledger does not count it as half of the plan's multiplier",
    )


def _honest() -> int:
    """Of a sum of more than two thirds of the cohort, those that do not collude."""
    return 2 * COHORT // 3 + 1 - COLLUDERS


def _words(
    work: Path,
    bundle: PlanBundle,
    parameters: Parameters,
    root: bytes,
    delta: Floats,
    *,
    attempt: int = 1,
    roster: bytes = b"\x01" * 32,
) -> Vector:
    (work / "delta").write_bytes(delta.tobytes())
    return words_of(
        work,
        KeptDelta(file=work / "delta", manifest=manifest_of(_LAYOUT, [delta.tobytes()])),
        parameters,
        root,
        weight=2 * CAP,
        clipping_norm=bundle.plan.aggregation.max_delta_norm,
        noise=noise_shares(bundle, parameters),
        attempt=attempt,
        roster=roster,
    )


def words_of(
    work: Path,
    kept: KeptDelta,
    parameters: Parameters,
    root: bytes,
    *,
    weight: float,
    noise: NoiseShares | None,
    clipping_norm: float = 0.0,
    attempt: int = 1,
    roster: bytes = b"\x01" * 32,
) -> Vector:
    """What a silo encodes and adds noise to, without masks, in whole steps."""
    of = Attempt(
        federation=_FEDERATION,
        plan=bytes(32),
        round=1,
        number=attempt,
        id=bytes([attempt]) * ATTEMPT_ID_BYTES,
    )
    write_masked_vector(
        work / "masked",
        MaskVector(
            parameters=parameters,
            rounding=KeyStream(Secret(b"\x03" * KEY_BYTES)),
            noise=noise_key(Secret(root), of, roster),
            masks=MaskSum((), ()),
        ),
        kept,
        weight=weight,
        clipping_norm=clipping_norm,
        noise=noise,
        threads=1,
    )
    words = np.fromfile(work / "masked", dtype="<u4")[:-EXTRA_WORDS]
    return words.view("<i4").astype(np.float64)


# --- of either


def gaussian_rows(about: str, noise: Vector, deviation: float | None) -> Iterator[Check]:
    """Rows of noise: each of this deviation, or of one of its own, Gaussian, and none like another."""
    rows, size = noise.shape
    scales = np.sqrt(np.square(noise).mean(axis=1))
    if deviation is not None:
        at, off = worst(scales / deviation - 1)
        yield Check(
            promise="noise scale",
            about=about,
            measured=1 + off,
            lowest=1 - NOISE,
            highest=1 + NOISE,
            broken=f"noise of release {at + 1} is not as large as the ledger's multiplier times max_delta_norm, as "
            "a part of it",
        )
    normalised = noise / scales.clip(min=1e-30)[:, None]
    yield Check(
        promise="noise distribution",
        about=about,
        measured=max(distance_from_normal(row.astype(np.float32)) for row in normalised),
        lowest=0.0,
        highest=distance_limit(size, rows) + NOISE / 4,
        broken="noise is not distributed as a Gaussian, by Kolmogorov's distance",
    )
    yield Check(
        promise="independent noise",
        about=about,
        measured=float(np.abs(mean_products(normalised)).max()),
        lowest=0.0,
        highest=correlation_limit(size, rows**2) + EXACT,
        broken="noise of two releases or silos is correlated",
    )
