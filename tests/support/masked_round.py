"""Rounds of secure aggregation through real files: deltas on the silos' disks, masked vectors, spools, models.

The protocol's machines are those of secagg_federation, the network is a function call.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lorica_coordinator.edges.models.model_store import ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.aggregator import Aggregator
from lorica_coordinator.rounds.secure_attempt import MaskedSum, MaskedVector, MemberKey, SecureAttempt
from lorica_coordinator.rounds.updates import AggregationResult, CommittedUpdate
from lorica_coordinator.vectors import model_file
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Encoder, FixedPoint, Ranges, Workspace
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream
from lorica_security.secure_aggregation.messages import MaskedInput
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from silo_agent.rounds.update import clip_factor, squared_norm
from silo_agent.training.update.masked_vector import KeptDelta, own_weight, write_masked_vector
from silo_agent.training.update.within_range import WithinRange, peaks
from silo_wire.canonical import Digest, digest_of
from silo_wire.codecs.secure_journals_codec import coordinator_event_to_bytes
from silo_wire.manifest import Layout, Manifest, ParameterDtype, TensorSpec, manifest_of, masked_layout
from silo_wire.messages import MaskedHeader, RoundKey, TrainingSummary, UpdateHeader
from silo_wire.plans.masked_ranges import plan_ranges
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from tests.support.coordinator_edges import Vector, chunk_of, round_key, summary, update_header
from tests.support.secagg_federation import ALONE, FEDERATION, Federation, Silo, encoded, entropy, party, silo_names

LAYOUT = Layout(
    "float32",
    (
        TensorSpec("decoder.block.0.layer.0.SelfAttention.q.weight", (256, 512)),
        TensorSpec("decoder.block.0.layer.0.layer_norm.weight", (512,)),
        TensorSpec("decoder.block.0.layer.2.DenseReluDense.wi.weight", (512, 600)),
        TensorSpec("decoder.embed_tokens.weight", (500, 256)),
        TensorSpec("decoder.final_layer_norm.weight", (7,)),
    ),
)
"""T5's kinds of tensors; more elements than a slab or a piece has."""
SCALES = (1e-3, 1e-6, 1e-4, 1e-5, 1e-2)
PLAN = digest_of(b"a plan with masks")


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a silo has when it has trained."""

    delta: Vector
    summary: TrainingSummary


def t5_deltas(count: int, round_number: int, *, agreement: float = 0.4) -> dict[SiloName, Trained]:
    """Heavy-tailed, tensors four orders of magnitude apart, weights 50 apart, both drifting from round to round."""
    scales = np.repeat(SCALES, [tensor.elements for tensor in LAYOUT.tensors]) * 0.7**round_number
    common = np.random.default_rng(round_number).standard_t(4, LAYOUT.parameters)
    trained = {}
    for index, name in enumerate(silo_names(count)):
        own = np.random.default_rng((index, round_number)).standard_t(4, LAYOUT.parameters)
        delta = (scales * (agreement * common + (1 - agreement) * own)).astype("<f4")
        examples = round(10 * 50 ** (index / max(count - 1, 1)))
        trained[name] = Trained(delta=delta, summary=summary(examples, 2.0 * 0.8**round_number))
    return trained


def constant_deltas(values: Iterable[float], *, examples: int = 10, reduction: float = 1.0) -> dict[SiloName, Trained]:
    """Each silo's delta is one number throughout."""
    return {
        name: Trained(delta=np.full(LAYOUT.parameters, value, dtype="<f4"), summary=summary(examples, reduction))
        for name, value in zip(silo_names(99), values, strict=False)
    }


def kept(path: Path, delta: Vector, chunk_bytes: int = 1 << 20) -> KeptDelta:
    """The delta on disk, as training leaves it."""
    path.write_bytes(delta.tobytes())
    layout = Layout("float32", (TensorSpec("all", (len(delta),)),))
    return KeptDelta(file=path, manifest=manifest_of(layout, [delta.tobytes()], chunk_bytes))


def summed(
    section: AggregationSection, sizes: Sequence[int], delta: Vector, its: TrainingSummary
) -> tuple[Vector, float]:
    """What a sum has of a delta whose tensors have `sizes`: the delta as it is encoded, clipped and within its ranges,
    and its weight."""
    layout = Layout("float32", tuple(TensorSpec(f"{index:04}", (size,)) for index, size in enumerate(sizes)))
    encoder = Encoder(
        fixed_point=FixedPoint.of(cohort=3, ranges=plan_ranges(section, layout)),
        weight=own_weight(section, its),
        rounding=KeyStream(Secret(entropy("rounding"))),
    )
    encoded_delta, workspace = delta.astype("<f4"), Workspace()
    largest = peaks(encoder.fixed_point.ranges, encoded_delta, 0)
    factor = clip_factor(math.sqrt(squared_norm(encoded_delta)), section.max_delta_norm)
    WithinRange(encoder, largest, factor=factor).scale(encoded_delta, 0, workspace)
    assert encoder.encode(np.zeros(len(delta), dtype="<u4"), encoded_delta, 0, workspace) == 0, "nothing is cut"
    return encoded_delta, encoder.capped_weight


@dataclass
class FileSilo(Silo):
    """A silo whose delta and masked vector are files in `folder`."""

    folder: Path = field(default_factory=Path)
    trained: Trained | None = None
    section: AggregationSection = field(default_factory=AggregationSection)
    manifest: Manifest | None = None

    @property
    def file(self) -> Path:
        return self.folder / f"{self.name}.masked"

    def mask(self, effect: silo_effects.MaskVector) -> bytes:
        assert self.trained is not None
        weight = own_weight(self.section, self.trained.summary)
        # In memory, for comparison; the masks and the rounding are gone once the file is written.
        self.encoded = encoded(effect.fixed_point, effect.rounding, self.trained.delta, weight)
        written = write_masked_vector(
            self.file,
            effect,
            kept(self.folder / f"{self.name}.delta", self.trained.delta),
            weight=weight,
            clipping_norm=self.section.max_delta_norm,
        )
        self.manifest = written.manifest
        return bytes.fromhex(written.manifest.digest)


class FileFederation(Federation):
    """One attempt among `trained`, whose deltas were made from `model`."""

    def __init__(
        self,
        folder: Path,
        trained: Mapping[SiloName, Trained],
        *,
        of: Attempt,
        model: Digest,
        ranges: Ranges,
        section: AggregationSection,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        names = silo_names(len(trained))
        super().__init__(
            len(trained),
            of=of,
            terms_=Terms(model=bytes.fromhex(model), ranges=ranges, link=ALONE),
            silos={
                name: FileSilo(party(name, names), folder=folder, trained=trained[name], section=section)
                for name in names
            },
        )

    def begin(self, *, model: bytes = b"") -> None:
        self.tell_coordinator(
            coordinator_events.OpenAttempt(attempt=self.attempt, terms=self.terms, invited=self.names)
        )
        for name in self.names:
            root = Secret(entropy("root", name, self.attempt.id.hex()))
            opening = silo_events.OpenAttempt(
                attempt=self.attempt, model=self.terms.model, tensors=self.terms.ranges.sizes, root=root
            )
            self.tell_silo(name, opening)

    @property
    def unmasking(self) -> Unmask:
        """With masks of their own: an aggregation's caller erases them."""
        _, effects = coordinator_machine.restored(tuple(self.journal), self.identities)
        (unmask,) = (effect for effect in effects if isinstance(effect, Unmask))
        return unmask

    def announced(self, name: SiloName) -> MaskedInput:
        (found,) = {message for message in self.silos[name].sent if isinstance(message, MaskedInput)}
        return found

    def sum_of(self, digests: Mapping[SiloName, Digest]) -> MaskedSum:
        """As the round machine holds it."""
        members = tuple(MemberKey(silo=name, key=public_key_bytes(key).hex()) for name, key in self.identities.items())
        journal = tuple(coordinator_event_to_bytes(event) for event in self.journal)
        attempt = SecureAttempt(federation=FEDERATION, members=members, journal=journal)
        vectors = tuple(MaskedVector(silo=name, digest=digest) for name, digest in digests.items())
        return MaskedSum(vectors=vectors, attempt=attempt)


@dataclass(frozen=True)
class MaskedPlace:
    """A coordinator's models and spools of one plan, below `state`; the model begins as `begin`, which is zeros."""

    state: Path
    models: ModelStore
    spools: Spools
    section: AggregationSection
    rates: ServerRates = UNCHANGED

    @classmethod
    def at(
        cls,
        state: Path,
        changes: Mapping[str, Any] | None = None,
        *,
        published: ParameterDtype = "float32",
        unchecked: Mapping[str, Any] | None = None,
        rates: ServerRates = UNCHANGED,
    ) -> "MaskedPlace":
        """`unchecked` is what no plan may say."""
        section = AggregationSection.model_validate(
            {"secure_aggregation": True, "max_weight": 1000.0, "momentum": 0.0, **(changes or {})}
        )
        section = section.model_copy(update=unchecked)
        state.mkdir(parents=True, exist_ok=True)
        begin = state / "initial.safetensors"
        manifest = model_file.write(begin, LAYOUT, [bytes(LAYOUT.total_bytes)])
        models = ModelStore(
            state / "models",
            layout=LAYOUT,
            model_layout=LAYOUT.as_type(published),
            initial=manifest.digest,
            initial_file=begin,
        )
        return cls(state, models, Spools(state / "spools"), section, rates)

    def reopened(self) -> "MaskedPlace":
        """As another process finds it."""
        dtype = self.models.model_layout.dtype
        return MaskedPlace.at(self.state, self.section.model_dump(), published=dtype, rates=self.rates)

    def key(self, round_number: int = 1) -> RoundKey:
        return replace(round_key(PLAN, round_number), federation=FEDERATION)

    def aggregator(self, slab_bytes: int = 1 << 20) -> Aggregator:
        return Aggregator(
            self.section,
            models=self.models,
            spools=self.spools,
            update_dtype="float32",
            device=torch.device("cpu"),
            slab_bytes=slab_bytes,
            rates=self.rates,
        )

    def masked(
        self,
        round_number: int,
        base: Digest,
        trained: Mapping[SiloName, Trained],
        drops: Mapping[SiloName, str] | None = None,
    ) -> tuple[FileFederation, dict[SiloName, Digest]]:
        """An attempt carried through, its survivors' vectors spooled and committed: their digests."""
        key = self.key(round_number)
        federation = FileFederation(
            self.state / f"silos-{round_number}",
            trained,
            of=Attempt(
                federation=FEDERATION, plan=bytes.fromhex(key.plan), round=key.round, number=1, id=entropy(key.round)
            ),
            model=base,
            ranges=plan_ranges(self.section, LAYOUT),
            section=self.section,
        ).run(drops=drops)
        assert federation.unmask is not None, federation.blames
        return federation, {name: self.upload(key, federation, name) for name in federation.unmask.survivors}

    def upload(self, key: RoundKey, federation: FileFederation, name: SiloName) -> Digest:
        sender = federation.silos[name]
        assert isinstance(sender, FileSilo)
        assert sender.manifest is not None
        header = MaskedHeader(key=key, masked=federation.announced(name), manifest=sender.manifest)
        self.spool(key, name, header, sender.file.read_bytes(), masked_layout(header.masked.words))
        return sender.manifest.digest

    def spool(
        self, key: RoundKey, name: SiloName, header: MaskedHeader | UpdateHeader, content: bytes, layout: Layout
    ) -> float:
        spool = self.spools.open(key, name, header, layout)
        for index in range(spool.held, header.manifest.chunks):
            spool.write(index, chunk_of(header, content, index))
        norm = spool.commit()
        spool.close()
        return norm

    def aggregate(
        self, round_number: int, base: Digest, federation: FileFederation, digests: Mapping[SiloName, Digest]
    ) -> AggregationResult:
        return self.aggregator().aggregate_masked(self.key(round_number), base, federation.sum_of(digests))

    def plain(self, round_number: int, base: Digest, trained: Mapping[SiloName, Trained]) -> Digest:
        """The model that the same updates give without masks."""
        key = self.key(round_number)
        updates = []
        for name, one in trained.items():
            header = update_header(key, base, LAYOUT, one.delta.tobytes(), chunk_bytes=1 << 20, told=one.summary)
            norm = self.spool(key, name, header, one.delta.tobytes(), LAYOUT)
            updates.append(
                CommittedUpdate(silo=name, digest=header.manifest.digest, summary=one.summary, delta_norm=norm)
            )
        return self.aggregator().aggregate(key, base, updates).model


def relative_errors(found: NDArray[Any], expected: NDArray[Any]) -> tuple[float, float]:
    """Relative L2 error of the whole vector, and of the worst tensor."""

    def error(first: int, last: int) -> float:
        wanted = expected[first:last].astype(np.float64)
        return float(np.linalg.norm(found[first:last] - wanted) / np.linalg.norm(wanted))

    return error(0, len(expected)), max(error(at, at + tensor.elements) for tensor, at in LAYOUT.placed())
