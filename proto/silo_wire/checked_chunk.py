"""One chunk of a round made again: the survivors' masked words, unmasked, decoded, and the server's step on that
stretch alone.

Float32 vectors and masked vectors have chunks of the same size, so chunk i of all of them is the same stretch of
elements. Whoever checks a chunk needs of it: each survivor's masked words, master model and optimizer state before,
and, where models are handed out in bfloat16, the chunk of the model that has this stretch. Every piece is checked
against a manifest whose digest the evidence names; what comes out must have the digests of the manifests after the
step. No chunk needs another one.

A piece that is not what its manifest says is IntegrityError: whoever sent it sent something else than the evidence
names, which shows nothing. A chunk that comes out otherwise is FalseChunk: evidence, manifests and pieces together are
proof against whoever signed the evidence, for anybody who has the plan and the silos' keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import (
    EXTRA_WORDS,
    FixedPoint,
    averaged,
    decode,
    decode_tail,
)
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Words
from lorica_security.secure_aggregation.messages import Identities
from lorica_security.secure_aggregation.model_evidence.evidence import (
    OpenedSum,
    refused,
)
from lorica_security.secure_aggregation.model_evidence.evidence import opened as open_evidence
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.checkable_round import CheckableRound, FalseChunk, Pieces, Proof
from silo_wire.manifest import Layout, Manifest, masked_layout
from silo_wire.plans.adapters import NOTHING_RESTS, Turns
from silo_wire.plans.plan import PlanBundle
from silo_wire.plans.plan_optimizer import optimizer_of
from silo_wire.plans.sections.server_rates import UNCHANGED, ServerRates
from silo_wire.server_step.apply_mean import apply_mean
from silo_wire.server_step.resting import at_rest
from silo_wire.server_step.rounding import round_to_bfloat16
from silo_wire.server_step.server_optimizer import ServerOptimizer, at_rate, slots

_WORD = 4  # bytes, of a float32 as well
MODEL = "model"
MASTER = "master"
TAIL = "sum of weights"


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """What a plan says of the server's step. `nominal_silos`, under silo-level privacy, divides a sum instead of its
    weights, `turns` say what of the model a round leaves as it is, and `rates` what the
    optimizer's rate is multiplied by in it."""

    optimizer: ServerOptimizer
    layout: Layout
    model_layout: Layout
    nominal_silos: int | None = None
    turns: Turns = NOTHING_RESTS
    rates: ServerRates = UNCHANGED

    @classmethod
    def of(cls, bundle: PlanBundle) -> "StepRule":
        """Of an adapters plan, whose layouts are those of its adapters, as of any other."""
        plan = bundle.plan
        return cls(
            optimizer=optimizer_of(plan.aggregation),
            layout=bundle.layout,
            model_layout=bundle.model_layout,
            nominal_silos=plan.privacy.nominal_silos if plan.privacy.level == "silo" else None,
            turns=bundle.turns,
            rates=plan.server_rates,
        )

    @property
    def fills(self) -> Mapping[str, float]:
        """The optimizer's vectors, and what fills each before the first step."""
        return slots(self.optimizer)

    def weight_sum(self, fixed_point: FixedPoint, tail: tuple[int, ...]) -> float:
        """What the sum is divided by."""
        told = decode_tail(fixed_point, np.array(tail, dtype="<u4")).weight_sum
        if told > 0.0 and self.nominal_silos is not None:
            return fixed_point.ranges.weight_cap * self.nominal_silos
        return told


class CheckedRound:
    """A round whose chunks can be made again; `opened` is what its evidence showed, whose masks the caller erases.

    Raises PolicyRefusal for manifests that are not those of the evidence, or do not fit the plan or each other.
    """

    def __init__(self, rule: StepRule, checkable: CheckableRound, opened: OpenedSum) -> None:
        self._rule, self._evidence, self._opened = rule, checkable.evidence, opened
        self._masked, self._before, self._after = checkable.masked, checkable.before, checkable.after
        try:
            self._check_manifests()
        except MalformedMessage as error:
            raise self._refused(str(error)) from error
        weight_sum = rule.weight_sum(self._fixed_point, self._evidence.tail)
        if not weight_sum > 0.0:
            raise self._refused(f"its sum of weights is {weight_sum}, which makes no step")
        self._mean = averaged(self._fixed_point, weight_sum)

    @property
    def _fixed_point(self) -> FixedPoint:
        return self._opened.unmask.fixed_point

    @property
    def elements(self) -> int:
        return self._rule.layout.parameters

    @property
    def chunk_elements(self) -> int:
        return self._before.master.chunk_bytes // _WORD

    @property
    def chunks(self) -> range:
        """The indices of a masked vector's chunks; the last chunk may hold words of the tail alone."""
        return range(-(-(self.elements + EXTRA_WORDS) // self.chunk_elements))

    @cached_property
    def tail_chunks(self) -> tuple[int, ...]:
        """Where the two last words are: mostly one chunk, sometimes two. A check that leaves one out proves no sum of
        weights."""
        return tuple(sorted({(self.elements + word) // self.chunk_elements for word in range(EXTRA_WORDS)}))

    def model_chunk(self, chunk: int) -> int | None:
        """Which chunk of the model handed out has the stretch of `chunk`; None where it needs none."""
        if not self._rounds or chunk >= self._before.master.chunks:
            return None
        return chunk * self.chunk_elements // self._model_chunk_elements

    def check(self, chunk: int, pieces: Pieces, workspace: mask_stream.Workspace) -> None:
        """Make chunk `chunk` again, in float32 on this CPU.

        Raises FalseChunk where it comes out otherwise than the evidence says; IntegrityError or MalformedMessage for
        pieces that are not what the manifests say. Pieces stay as they are.
        """
        if chunk not in self.chunks:
            raise MalformedMessage(
                f"chunk {chunk} is outside the {len(self.chunks)} chunks of {self._evidence.attempt}"
            )
        words = self._sum(chunk, pieces.masked, workspace)
        first = chunk * self.chunk_elements
        count = min(max(self.elements - first, 0), self.chunk_elements)
        self._check_tail(chunk, words[count:], first + count - self.elements)
        if count:
            self._check_step(chunk, words[:count], first, pieces)

    def _sum(self, chunk: int, masked: Mapping[SiloName, bytes], workspace: mask_stream.Workspace) -> Words:
        """The encoded sum of the survivors' words, unmasked."""
        if set(masked) != set(self._masked):
            raise MalformedMessage(
                f"masked words of {', '.join(sorted(masked))} came, the survivors are {', '.join(sorted(self._masked))}"
            )
        total: Words = np.zeros(self._any_masked.chunk_size(chunk) // _WORD, dtype="<u4")
        for silo, manifest in self._masked.items():
            _check_piece(f"the masked vector of silo {silo}", manifest, chunk, masked[silo])
            total += np.frombuffer(masked[silo], dtype="<u4")
        self._opened.unmask.masks.apply(total, chunk * self.chunk_elements, workspace)
        return total

    def _check_tail(self, chunk: int, words: Words, first: int) -> None:
        told = self._evidence.tail[first : first + len(words)]
        if tuple(int(word) for word in words) != told:
            raise FalseChunk(self._evidence, chunk, TAIL, f"it says {told}, the sum {words.tolist()}")

    def _check_step(self, chunk: int, words: Words, first: int, pieces: Pieces) -> None:
        rule, steps = self._rule, self._evidence.before.steps
        master = self._tensor(MASTER, self._before.master, chunk, pieces.master)
        if set(pieces.slots) != set(self._before.slots):
            raise MalformedMessage(
                f"optimizer state {sorted(pieces.slots)} came for chunk {chunk}, it is {sorted(self._before.slots)}"
            )
        state = {
            name: self._tensor(name, self._before.slots[name], chunk, pieces.slots[name])
            if steps
            else torch.full_like(master, fill)
            for name, fill in rule.fills.items()
        }
        mean = torch.empty_like(master)
        with np.errstate(over="ignore"):  # the step tells what leaves float32
            decode(self._mean, words, first, mean.numpy())
        resting = rule.turns.resting(self._evidence.attempt.round, first, len(words))
        rate = rule.rates.of(self._evidence.attempt.round, len(self._masked))
        optimizer = at_rate(rule.optimizer, rate)
        try:
            with at_rest((master, *state.values()), resting):
                apply_mean(master, mean, optimizer, state, step_number=steps + 1, scratch=torch.empty_like(master))
        except ConfigurationError as error:
            raise FalseChunk(self._evidence, chunk, MASTER, str(error)) from error
        for name, values in {MASTER: master, **state}.items():
            manifest = self._after.master if name == MASTER else self._after.slots[name]
            made = blake3(values.numpy().data.cast("B")).digest()
            if made != manifest.chunk_digests[chunk]:
                told = manifest.chunk_digests[chunk].hex()[:12]
                raise FalseChunk(self._evidence, chunk, name, f"digest {made.hex()[:12]}, the evidence says {told}")
        if self._rounds:
            self._check_rounding(chunk, first, master, pieces.model)

    def _check_rounding(self, chunk: int, first: int, master: torch.Tensor, piece: bytes | None) -> None:
        at = first // self._model_chunk_elements
        if piece is None:
            raise MalformedMessage(f"chunk {at} of the model handed out is missing for chunk {chunk} of its master")
        _check_piece("the model handed out", self._after.model, at, piece)
        inside = (first - at * self._model_chunk_elements) * torch.bfloat16.itemsize
        published = torch.empty(len(master), dtype=torch.bfloat16)
        try:
            round_to_bfloat16(master, published)
        except ConfigurationError as error:
            raise FalseChunk(self._evidence, chunk, MODEL, str(error)) from error
        made = published.view(torch.uint8).numpy().tobytes()
        if made != piece[inside : inside + len(made)]:
            raise FalseChunk(self._evidence, chunk, MODEL, "its numbers are not the master's, rounded")

    def _tensor(self, name: str, manifest: Manifest, chunk: int, piece: bytes) -> torch.Tensor:
        _check_piece(f"the {name} before the step", manifest, chunk, piece)
        return torch.frombuffer(bytearray(piece), dtype=torch.float32)

    @property
    def _rounds(self) -> bool:
        return self._rule.model_layout.dtype != self._rule.layout.dtype

    @property
    def _model_chunk_elements(self) -> int:
        return self._after.model.chunk_bytes // self._rule.model_layout.item_bytes

    @property
    def _any_masked(self) -> Manifest:
        return next(iter(self._masked.values()))

    def _check_manifests(self) -> None:
        evidence, rule = self._evidence, self._rule
        survivors = dict(zip(evidence.survivors.silos, evidence.survivors.inputs, strict=True))
        if {silo: bytes.fromhex(one.digest) for silo, one in self._masked.items()} != survivors:
            raise self._refused("the manifests of masked vectors are not those that its survivors signed")
        if (self._before.state(evidence.before.steps), self._after.state(evidence.after.steps)) != (
            evidence.before,
            evidence.after,
        ):
            raise self._refused("the manifests of model and optimizer state are not those that it names")
        if (words := self._fixed_point.words) != self.elements + EXTRA_WORDS:
            raise self._refused(f"its vectors have {words} words, the plan's model {self.elements} parameters")
        if set(self._after.slots) != set(rule.fills):
            raise self._refused(
                f"its optimizer state is {sorted(self._after.slots)}, the plan's optimizer has {sorted(rule.fills)}"
            )
        for state in (self._before, self._after):
            state.model.check_layout(rule.model_layout)
            for manifest in (state.master, *state.slots.values()):
                manifest.check_layout(rule.layout)
            if not self._rounds and state.model != state.master:
                raise self._refused("the model handed out is not its master, and the plan hands models out in float32")
        for manifest in self._masked.values():
            manifest.check_layout(masked_layout(words))
        sizes = {one.chunk_bytes for one in (*self._masked.values(), *self._float32)}
        if len(sizes) != 1 or (size := sizes.pop()) % _WORD or self._after.model.chunk_bytes != size:
            raise self._refused("its vectors are not in chunks of one size, a multiple of 4 bytes")

    @property
    def _float32(self) -> tuple[Manifest, ...]:
        return tuple(one for state in (self._before, self._after) for one in (state.master, *state.slots.values()))

    def _refused(self, why: str) -> PolicyRefusal:
        return refused(
            self._evidence.attempt, why, "nothing was changed; ask the operator for the evidence of that round"
        )


def _check_piece(what: str, manifest: Manifest, chunk: int, piece: bytes) -> None:
    try:
        manifest.check_chunk(chunk, piece)
    except (IntegrityError, MalformedMessage) as error:
        raise type(error)(f"{what}: {error}") from error


def examined(
    proof: Proof, rule: StepRule, *, identities: Identities, coordinator: Ed25519PublicKey, demands: Demands
) -> FalseChunk:
    """What `proof` proves of `coordinator`.

    Raises IntegrityError where the coordinator did not sign it, or where the chunk is right; PolicyRefusal or
    MalformedMessage for what no evidence is: then it proves nothing.
    """
    evidence = proof.checkable.evidence
    proof.checkable.signed.check(coordinator)
    opened = open_evidence(evidence, identities, demands)
    workspace = mask_stream.Workspace()
    try:
        check = CheckedRound(rule, proof.checkable, opened)
        check.check(proof.chunk, proof.pieces, workspace)
    except FalseChunk as false:
        return false
    finally:
        workspace.erase()
        opened.unmask.masks.erase()
    raise IntegrityError(
        f"chunk {proof.chunk} of {evidence.attempt} is what its sum makes: the proof shows nothing false"
    )
