"""Evidence and proofs as bytes: they come back as they went, convict who lied, and nobody else whatever is changed in
them."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import IntegrityError, LoricaError, MalformedMessage, PolicyRefusal
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from lorica_security.secure_aggregation.model_evidence.evidence import opened, signed_evidence
from lorica_security.secure_aggregation.parameters import NoiseTerms
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.checkable_round import FalseChunk, Proof
from silo_wire.checked_chunk import MASTER, examined
from silo_wire.codecs.evidence_codec import evidence_from_wire, evidence_to_wire, proof_from_bytes, proof_to_bytes
from silo_wire.manifest import ParameterDtype
from silo_wire.v1 import secure_aggregation_pb2 as pb
from tests.support.evidence import OPTIMIZERS, Made, Rounds, Vectors
from tests.support.secagg_federation import FEDERATION, identities, identity_key, silo_names

COORDINATOR = identity_key("coordinator")
SILOS = silo_names(3)


def second_round(published: ParameterDtype = "float32") -> Made:
    rounds = Rounds(optimizer=OPTIMIZERS["adam"], published=published, silos=3)
    rounds.next(1)
    return rounds.next(2)


def lying(made: Made) -> Made:
    """It hands out a model of zeros."""
    crafted = torch.zeros_like(made.after.master)
    model = crafted.to(made.after.model.dtype)
    return made.told(Vectors(model=model, master=crafted, slots=made.after.slots))


def proof_of(made: Made, chunk: int) -> Proof:
    check = made.check()
    return Proof(checkable=made.checkable(COORDINATOR), chunk=chunk, pieces=made.pieces(check, chunk))


def convicted(proof: Proof, made: Made, **changes: Any) -> FalseChunk:
    keys: dict[str, Any] = {
        "identities": identities(SILOS),
        "coordinator": COORDINATOR.public_key(),
        "demands": Demands(),
    }
    return examined(proof, made.rule, **{**keys, **changes})


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
def test_evidence_and_proof_come_back_as_they_went_and_convict(published: ParameterDtype) -> None:
    made = lying(second_round(published))
    signed = signed_evidence(made.evidence, COORDINATOR)
    back = evidence_from_wire(pb.Evidence.FromString(evidence_to_wire(signed).SerializeToString()), FEDERATION)
    assert back == signed
    for chunk in (0, 5):
        proof = proof_of(made, chunk)
        data = proof_to_bytes(proof)
        assert proof_from_bytes(data, FEDERATION) == proof
        false = convicted(proof_from_bytes(data, FEDERATION), made)
        assert (false.chunk, false.part) == (chunk, MASTER)


def test_a_chunk_that_is_right_convicts_nobody() -> None:
    made = second_round()
    with pytest.raises(IntegrityError, match="the proof shows nothing false") as caught:
        convicted(proof_of(made, 0), made)
    assert not isinstance(caught.value, FalseChunk)


def test_only_the_coordinator_that_signed_is_convicted() -> None:
    made = lying(second_round())
    proof = proof_of(made, 0)
    with pytest.raises(IntegrityError, match="round-evidence"):
        convicted(proof, made, coordinator=identity_key("another").public_key())
    unsigned = replace(proof.checkable, signed=replace(proof.checkable.signed, signature=bytes(64)))
    with pytest.raises(IntegrityError, match="round-evidence"):
        convicted(replace(proof, checkable=unsigned), made)
    with pytest.raises(PolicyRefusal):
        convicted(proof, made, identities=identities(SILOS[:2]))


HONEST = second_round()
TRUE = proof_to_bytes(proof_of(HONEST, 1))


@settings(max_examples=250, deadline=None)
@given(st.integers(0, len(TRUE) - 1), st.integers(1, 255), st.sampled_from(["change", "cut", "double"]))
def test_no_change_of_a_proof_convicts_an_honest_coordinator(at: int, mask: int, how: str) -> None:
    """A silo that lies about what it was served has no proof: what it changes is not what the coordinator signed."""
    match how:
        case "change":
            data = TRUE[:at] + bytes([TRUE[at] ^ mask]) + TRUE[at + 1 :]
        case "cut":
            data = TRUE[:at]
        case _:
            data = TRUE[:at] + TRUE[at : at + mask] + TRUE[at:]
    with pytest.raises(LoricaError) as caught:
        convicted(proof_from_bytes(data, FEDERATION), HONEST)
    assert not isinstance(caught.value, FalseChunk)


def test_pieces_of_other_chunks_convict_nobody() -> None:
    first, second = proof_of(HONEST, 1), proof_of(HONEST, 2)
    for proof in (
        replace(first, chunk=2),
        replace(first, pieces=second.pieces),
        replace(first, pieces=replace(first.pieces, masked={**first.pieces.masked, SILOS[0]: bytes(16)})),
        replace(first, pieces=replace(first.pieces, master=bytes(16))),
        replace(first, pieces=replace(first.pieces, slots={**first.pieces.slots, "first_moment": bytes(16)})),
    ):
        with pytest.raises(LoricaError) as caught:
            convicted(proof, HONEST)
        assert not isinstance(caught.value, FalseChunk)


# --- what a hostile coordinator says


def wire() -> pb.Evidence:
    return evidence_to_wire(signed_evidence(HONEST.evidence, COORDINATOR))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda it: it.ClearField("signature"), "signature has 0 bytes"),
        (lambda it: it.ClearField("attempt"), "attempt"),
        (lambda it: it.ClearField("before"), "model state model has 0 bytes"),
        (lambda it: it.journal.extend([b""] * (1 << 12)), "at most 4096 are allowed"),
        (lambda it: it.journal.append(b"no event"), "was damaged or cut off"),
        (lambda it: it.after.slots.extend([it.after.slots[0]] * 9), "at most 8 are allowed"),
        (lambda it: setattr(it.after, "steps", 1 << 63), "allowed are 0 to"),
        (lambda it: setattr(it, "plan_digest", b"short"), "plan_digest has 5 bytes"),
    ],
)
def test_evidence_that_cannot_be_is_malformed(change: Any, match: str) -> None:
    message = wire()
    change(message)
    with pytest.raises(MalformedMessage, match=match):
        evidence_from_wire(message, FEDERATION)


ODD_NUMBERS = (0.0, 5e-324, 1e-300, 1.0, 2.5, 1e308, math.inf, math.nan, -1.0)


@settings(max_examples=400, deadline=None)
@given(
    noise=st.one_of(
        st.none(),
        st.builds(
            NoiseTerms,
            noise_multiplier=st.sampled_from(ODD_NUMBERS),
            makers=st.one_of(st.none(), st.integers(0, 1 << 20)),
            reach=st.sampled_from(ODD_NUMBERS),
            grain=st.sampled_from(ODD_NUMBERS),
        ),
    ),
    colluders=st.integers(0, 1 << 20),
    threshold=st.integers(0, 1 << 20),
    min_survivors=st.integers(0, 1 << 20),
    min_cohort=st.integers(0, 1 << 20),
)
def test_terms_that_a_hostile_coordinator_invents_are_refused_by_name(
    noise: NoiseTerms | None, colluders: int, threshold: int, min_survivors: int, min_cohort: int
) -> None:
    """What an attempt is opened with nobody signs; what silos signed is bound to it all the same."""
    evidence = HONEST.evidence
    opening, *rest = evidence.journal
    assert isinstance(opening, OpenAttempt)
    terms = replace(
        opening.terms,
        noise=noise,
        colluders=colluders,
        threshold=threshold or None,
        min_survivors=min_survivors,
        min_cohort=min_cohort,
    )
    lie = replace(evidence, journal=(replace(opening, terms=terms), *rest))
    try:
        found = opened(lie, identities(SILOS), Demands())
    except PolicyRefusal:
        return
    assert found.roster.digest == evidence.survivors.roster
