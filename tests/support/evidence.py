"""Masked rounds of a small model in memory, with the evidence that an honest coordinator gives of them, and ways to lie
in it.

Vectors are whole here: the step is made once over all elements, where a check makes it chunk by chunk.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from torch import Tensor

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, averaged, decode
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Workspace
from lorica_security.secure_aggregation.model_evidence.evidence import (
    Evidence,
    Lineage,
    OpenedSum,
    opened,
    signed_evidence,
)
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.checkable_round import CheckableRound, Pieces, StateManifests
from silo_wire.checked_chunk import CheckedRound, StepRule
from silo_wire.manifest import Layout, Manifest, ParameterDtype, TensorSpec, manifest_of, masked_layout
from silo_wire.plans.adapters import NOTHING_RESTS, Turns
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.resting import at_rest
from silo_wire.server_step.rounding import round_to_bfloat16
from silo_wire.server_step.server_optimizer import Adagrad, Adam, ServerOptimizer, Sgd, Yogi, at_rate
from tests.support.secagg_federation import (
    FEDERATION,
    PLAN,
    Federation,
    Silo,
    alone,
    attempt,
    delta_of,
    encoded,
    entropy,
    identity_key,
    opening,
    party,
    ranges,
    silo_names,
    terms,
    weight_of,
)

OPTIMIZERS: dict[str, ServerOptimizer] = {
    "fedavg": Sgd(learning_rate=1.0),
    "momentum": Sgd(learning_rate=0.7, momentum=0.9),
    "adam": Adam(learning_rate=0.05),
    "yogi": Yogi(learning_rate=0.05),
    "adagrad": Adagrad(learning_rate=0.05),
}


def bits_of(values: Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass
class ManifestSilo(Silo):
    """A silo that signs the manifest of its vector, as agents do."""

    sizes: tuple[int, ...] = ()
    chunk_bytes: int = 16
    manifest: Manifest | None = None

    def mask(self, effect: silo_effects.MaskVector) -> bytes:
        delta = delta_of(f"{self.name} {self.state.attempt}", self.sizes)  # type: ignore[union-attr]
        self.encoded = encoded(effect.fixed_point, effect.rounding, delta, weight_of(self.name))
        self.masked = self.encoded.copy()
        effect.masks.apply(self.masked, 0, mask_stream.Workspace())
        effect.erase()
        self.manifest = manifest_of(masked_layout(len(self.masked)), [self.masked.tobytes()], self.chunk_bytes)
        return bytes.fromhex(self.manifest.digest)


class ManifestFederation(Federation):
    def begin(self, *, model: bytes = b"") -> None:
        self.tell_coordinator(
            coordinator_events.OpenAttempt(attempt=self.attempt, terms=self.terms, invited=self.names)
        )
        for name in self.names:
            of = opening(name, self.attempt, model=self.terms.model, sizes=self.terms.ranges.sizes)
            self.tell_silo(name, of)


@dataclass(frozen=True, kw_only=True)
class Vectors:
    """A model in whole: what is handed out, its master, the optimizer's state."""

    model: Tensor
    master: Tensor
    slots: Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A round that is over, and what a coordinator hands out to have it checked."""

    rule: StepRule
    evidence: Evidence
    federation: Federation
    masked: Mapping[SiloName, Manifest]
    before: Vectors
    after: Vectors
    chunk_bytes: int

    def manifests(self, vectors: Vectors) -> StateManifests:
        def of(layout: Layout, values: Tensor) -> Manifest:
            return manifest_of(layout, [bits_of(values)], self.chunk_bytes)

        return StateManifests(
            model=of(self.rule.model_layout, vectors.model),
            master=of(self.rule.layout, vectors.master),
            slots={name: of(self.rule.layout, values) for name, values in vectors.slots.items()},
        )

    def told(self, after: Vectors) -> "Made":
        """The same round by a coordinator that says that it led to `after`."""
        state = self.manifests(after).state(self.evidence.after.steps)
        return replace(self, after=after, evidence=replace(self.evidence, after=state))

    def opened(self) -> OpenedSum:
        return opened(self.evidence, self.federation.identities, Demands())

    def check(self) -> CheckedRound:
        return CheckedRound(self.rule, self.checkable(), self.opened())

    def checkable(self, coordinator: Ed25519PrivateKey | None = None) -> CheckableRound:
        """As `coordinator` signed it."""
        return CheckableRound(
            signed=signed_evidence(self.evidence, coordinator or identity_key("coordinator")),
            masked=self.masked,
            before=self.manifests(self.before),
            after=self.manifests(self.after),
        )

    def pieces(self, check: CheckedRound, chunk: int) -> Pieces:
        def cut(content: bytes, at: int) -> bytes:
            return content[at * self.chunk_bytes : (at + 1) * self.chunk_bytes]

        masked = {}
        for name in self.masked:
            words = self.federation.silos[name].masked
            assert words is not None
            masked[name] = cut(words.tobytes(), chunk)
        at = check.model_chunk(chunk)
        return Pieces(
            masked=masked,
            master=cut(bits_of(self.before.master), chunk),
            slots={name: cut(bits_of(values), chunk) for name, values in self.before.slots.items()},
            model=None if at is None else cut(bits_of(self.after.model), at),
        )

    def check_all(self) -> None:
        """Every chunk; raises what the first false one does."""
        check = self.check()
        for chunk in check.chunks:
            check.check(chunk, self.pieces(check, chunk), Workspace())


@dataclass
class Rounds:
    """Rounds of one plan, one after the other, by an honest coordinator."""

    optimizer: ServerOptimizer = OPTIMIZERS["momentum"]
    sizes: tuple[int, ...] = (3, 7, 1, 10)
    published: ParameterDtype = "float32"
    chunk_bytes: int = 16
    silos: int = 4
    nominal_silos: int | None = None
    kind: type[ManifestSilo] = ManifestSilo
    turns: Turns = NOTHING_RESTS
    rates: ServerRates = UNCHANGED
    steps: int = 0
    vectors: Vectors = field(init=False)

    def __post_init__(self) -> None:
        seed = int.from_bytes(entropy("initial", *self.sizes)[:8], "big")
        drawn = np.random.default_rng(seed).uniform(-1, 1, sum(self.sizes)).astype("<f4")
        master = torch.from_numpy(drawn)
        self.vectors = Vectors(model=self.handed_out(master), master=master, slots={})

    @property
    def rule(self) -> StepRule:
        layout = Layout("float32", tuple(TensorSpec(f"t{at:03}", (size,)) for at, size in enumerate(self.sizes)))
        return StepRule(
            optimizer=self.optimizer,
            layout=layout,
            model_layout=layout.as_type(self.published),
            nominal_silos=self.nominal_silos,
            turns=self.turns,
            rates=self.rates,
        )

    def handed_out(self, master: Tensor) -> Tensor:
        if self.published == "float32":
            return master
        out = torch.empty(len(master), dtype=torch.bfloat16)
        round_to_bfloat16(master, out)
        return out

    def lineage(self) -> Lineage:
        """As the plan has it."""
        return self.lineage_of(Rounds(self.optimizer, self.sizes, self.published, self.chunk_bytes).vectors)

    def lineage_of(self, initial: Vectors) -> Lineage:
        rule = self.rule
        model = manifest_of(rule.model_layout, [bits_of(initial.model)], self.chunk_bytes)
        master = manifest_of(rule.layout, [bits_of(initial.master)], self.chunk_bytes)
        return Lineage.of_plan(
            federation=FEDERATION,
            plan=PLAN,
            master=bytes.fromhex(master.digest),
            model=bytes.fromhex(model.digest),
        )

    def next(
        self,
        number: int,
        *,
        drops: Mapping[SiloName, str] | None = None,
        known: Mapping[SiloName, Ed25519PublicKey] | None = None,
        **terms_: Any,
    ) -> Made:
        """Round `number`: its sum, its step, its evidence. `known`: other keys than silos sign with, by which the
        coordinator knows them."""
        names = silo_names(self.silos)
        link = alone(silo_names(64), colluders=terms_.get("colluders", 0))
        before, rule = self.vectors, self.rule
        model = manifest_of(rule.model_layout, [bits_of(before.model)], self.chunk_bytes)
        federation = ManifestFederation(
            self.silos,
            of=attempt(round=number),
            terms_=replace(terms(ranges=ranges(self.sizes), link=link, **terms_), model=bytes.fromhex(model.digest)),
            silos={
                name: self.kind(party(name, names, link=link), sizes=self.sizes, chunk_bytes=self.chunk_bytes)
                for name in names
            },
        )
        federation.identities.update(known or {})
        federation.run(drops=drops)
        assert isinstance(federation.coordinator, coordinator_states.Unmasked), federation.coordinator
        assert federation.unmask is not None
        total = federation.true_sum()
        tail = tuple(int(word) for word in total[-EXTRA_WORDS:])
        point = federation.unmask.fixed_point
        mean = torch.empty(sum(self.sizes))
        decode(averaged(point, rule.weight_sum(point, tail)), total[:-EXTRA_WORDS], 0, mean.numpy())
        master = before.master.clone()
        slots = {
            name: before.slots[name].clone() if self.steps else torch.full_like(master, fill)
            for name, fill in rule.fills.items()
        }
        optimizer = at_rate(rule.optimizer, rule.rates.of(number, len(federation.unmask.survivors)))
        with at_rest((master, *slots.values()), self.turns.resting(number, 0, len(master))):
            apply_mean(master, mean, optimizer, slots, step_number=self.steps + 1, scratch=torch.empty_like(master))
        after = Vectors(model=self.handed_out(master), master=master, slots=slots)
        masked = {}
        for name in federation.unmask.survivors:
            sender = federation.silos[name]
            assert isinstance(sender, ManifestSilo)
            assert sender.manifest is not None
            masked[name] = sender.manifest
        evidence = Evidence(
            attempt=federation.attempt,
            survivors=federation.coordinator.survivors,
            before=self._state(before, self.steps),
            after=self._state(after, self.steps + 1),
            tail=tail,
            journal=tuple(federation.journal),
        )
        self.vectors, self.steps = after, self.steps + 1
        return Made(
            rule=rule,
            evidence=evidence,
            federation=federation,
            masked=masked,
            before=before,
            after=after,
            chunk_bytes=self.chunk_bytes,
        )

    def _state(self, vectors: Vectors, steps: int) -> Any:
        def digest(layout: Layout, values: Tensor) -> Manifest:
            return manifest_of(layout, [bits_of(values)], self.chunk_bytes)

        rule = self.rule
        return StateManifests(
            model=digest(rule.model_layout, vectors.model),
            master=digest(rule.layout, vectors.master),
            slots={name: digest(rule.layout, values) for name, values in vectors.slots.items()},
        ).state(steps)
