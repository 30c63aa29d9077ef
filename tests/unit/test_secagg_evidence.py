"""Evidence of a masked round: what is true is accepted whatever the shape, and no lie of the coordinator's is."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lorica_security.errors import IntegrityError, MalformedMessage, PolicyRefusal
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.events import PhaseClosed
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, averaged, decode
from lorica_security.secure_aggregation.masked_vectors.mask_stream import Workspace
from lorica_security.secure_aggregation.messages import Agreement, MaskedInput, Reveal
from lorica_security.secure_aggregation.model_evidence.evidence import (
    VERIFY,
    Checked,
    Evidence,
    ModelState,
    SignedEvidence,
    opened,
    signed_evidence,
)
from lorica_security.secure_aggregation.silo.party import Demands
from silo_wire.checkable_round import FalseChunk, StateManifests
from silo_wire.checked_chunk import MASTER, MODEL, TAIL, CheckedRound
from silo_wire.manifest import ParameterDtype, manifest_of
from silo_wire.plans.adapters import NOTHING_RESTS, Turns
from silo_wire.server_step.apply_mean import apply_mean
from tests.support.evidence import OPTIMIZERS, Made, Rounds, Vectors, bits_of
from tests.support.secagg_federation import entropy, identities, identity_key, silo_names

A, B, C, D = silo_names(4)


def refusal(evidence: Evidence, match: str, **changes: Any) -> None:
    arguments: dict[str, Any] = {"identities": identities((A, B, C, D)), "demands": Demands(), **changes}
    with pytest.raises(PolicyRefusal, match=match) as caught:
        opened(evidence, arguments["identities"], arguments["demands"])
    assert caught.value.rule in (VERIFY, *(rule for rule in ("min_cohort", "min_survivors") if rule in match))


# --- what is true


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_chunk_of_true_rounds_is_accepted(name: str, published: ParameterDtype) -> None:
    """Three rounds, the second one without a silo whose vector is lost."""
    rounds = Rounds(optimizer=OPTIMIZERS[name], published=published)
    lineage = rounds.lineage()
    for number in (1, 2, 3):
        made = rounds.next(number, drops={B: "masked input"} if number == 2 else None)
        assert set(made.masked) == {A, B, C, D} - ({B} if number == 2 else set())
        made.check_all()
        lineage = lineage.after(made.evidence)
        assert lineage.holds(made.evidence.after.model)
    assert lineage.accepted[-1].state.steps == 3


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple),
    chunk_words=st.integers(1, 7),
    published=st.sampled_from(["float32", "bfloat16"]),
    name=st.sampled_from(sorted(OPTIMIZERS)),
    nominal=st.sampled_from([None, 3]),
)
def test_chunks_of_any_size_are_checked_to_the_last_word(
    sizes: tuple[int, ...], chunk_words: int, published: ParameterDtype, name: str, nominal: int | None
) -> None:
    """The two last words lie in one chunk or in two, alone or behind coordinates; a chunk in bfloat16 has two
    stretches."""
    made = Rounds(
        optimizer=OPTIMIZERS[name],
        sizes=sizes,
        published=published,
        chunk_bytes=4 * chunk_words,
        silos=3,
        nominal_silos=nominal,
    ).next(1)
    made.check_all()
    check = made.check()
    assert {at // chunk_words for at in range(sum(sizes), sum(sizes) + EXTRA_WORDS)} == set(check.tail_chunks)
    assert len(check.chunks) == -(-(sum(sizes) + EXTRA_WORDS) // chunk_words)


def test_halves_that_take_turns_are_checked_and_one_that_moved_out_of_turn_is_found() -> None:
    """Of elements 0 to 20 in chunks of four, 2 to 9 rest in odd rounds and the others in even ones. Whose turn it is
    silos know by the round's number: a coordinator that takes all steps at once is found out."""
    turns = Turns(odd=((2, 10),), even=((0, 2), (10, 21)))
    rounds = Rounds(sizes=(2, 8, 11), silos=3, turns=turns)
    rounds.next(1).check_all()
    before = rounds.vectors
    made = rounds.next(2)
    made.check_all()
    for was, found in ((before.master, made.after.master), (before.slots["momentum"], made.after.slots["momentum"])):
        assert [bool(it) for it in found != was] == [2 <= at < 10 for at in range(21)]
    for claimed, false in (
        (Turns(odd=turns.even, even=turns.odd), {0, 1, 2, 3, 4, 5}),
        (NOTHING_RESTS, {0, 2, 3, 4, 5}),
    ):
        assert false_chunks(replace(made, rule=replace(made.rule, turns=claimed))).keys() == false


# --- false models


def flipped(values: Tensor, element: int, bit: int) -> Tensor:
    """With one bit of one number changed."""
    kind = torch.int32 if values.dtype == torch.float32 else torch.int16
    changed = values.clone()
    changed.view(kind)[element] ^= -(1 << bit) if bit == values.itemsize * 8 - 1 else 1 << bit
    return changed


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    published=st.sampled_from(["float32", "bfloat16"]),
    name=st.sampled_from(sorted(OPTIMIZERS)),
)
def test_one_bit_of_what_came_out_is_found_in_its_chunk_and_no_other(
    data: st.DataObject, published: ParameterDtype, name: str
) -> None:
    rounds = Rounds(optimizer=OPTIMIZERS[name], published=published, silos=3)
    rounds.next(1)
    made = rounds.next(2)
    parts = [MASTER, *made.after.slots, *([MODEL] if published == "bfloat16" else [])]
    part = data.draw(st.sampled_from(parts))
    values = {MASTER: made.after.master, MODEL: made.after.model, **made.after.slots}[part]
    element = data.draw(st.integers(0, len(values) - 1))
    changed = flipped(values, element, data.draw(st.integers(0, values.itemsize * 8 - 1)))
    if part == MASTER:
        after = replace(made.after, master=changed, **({"model": changed} if published == "float32" else {}))
    elif part == MODEL:
        after = replace(made.after, model=changed)
    else:
        after = replace(made.after, slots={**made.after.slots, part: changed})
    assert false_chunks(made.told(after)) == {element // 4: part}


def test_the_last_number_of_a_large_chunk_counts_as_the_first_does() -> None:
    made = Rounds(sizes=(200,), published="bfloat16", chunk_bytes=4 * 200, silos=3).next(1)
    for element in (0, 199):
        model = flipped(made.after.model, element, 0)
        assert false_chunks(made.told(replace(made.after, model=model))) == {0: MODEL}


def false_chunks(made: Made) -> dict[int, str]:
    """Which chunks are false, and what of them is."""
    check = made.check()
    found = {}
    for chunk in check.chunks:
        try:
            check.check(chunk, made.pieces(check, chunk), Workspace())
        except FalseChunk as false:
            found[false.chunk] = false.part
    return found


@pytest.mark.parametrize("word", range(EXTRA_WORDS))
def test_another_word_of_the_tail_is_found(word: int) -> None:
    made = Rounds().next(1)
    tail = tuple(told + (at == word) for at, told in enumerate(made.evidence.tail))
    lie = replace(made, evidence=replace(made.evidence, tail=tail))
    found = false_chunks(lie)
    check = lie.check()
    holds = (check.elements + word) // check.chunk_elements
    assert holds in check.tail_chunks
    assert found[holds] == TAIL
    if word:
        assert found == {holds: TAIL}


def stepped(made: Made, *, state: dict[str, Tensor], number: int, rate: float = 1.0) -> Made:
    """By a coordinator that does another step than the evidence says: from another state, number or learning rate."""
    rule = made.rule
    told, honest = made.evidence.tail, made.before.master
    point = made.opened().unmask.fixed_point
    mean = torch.empty_like(honest)
    decode(averaged(point, rule.weight_sum(point, told)), made.federation.true_sum()[:-EXTRA_WORDS], 0, mean.numpy())
    master, slots = honest.clone(), {name: values.clone() for name, values in state.items()}
    optimizer = replace(rule.optimizer, learning_rate=rule.optimizer.learning_rate * rate)
    apply_mean(master, mean, optimizer, slots, step_number=number, scratch=torch.empty_like(master))
    return made.told(Vectors(model=master, master=master, slots=slots))


@pytest.mark.parametrize("name", ["momentum", "adam", "yogi", "adagrad"])
def test_a_step_from_another_optimizer_state_is_found(name: str) -> None:
    rounds = Rounds(optimizer=OPTIMIZERS[name])
    rounds.next(1)
    made = rounds.next(2)
    assert not false_chunks(stepped(made, state=dict(made.before.slots), number=2))
    forgotten = {name: torch.full_like(made.before.master, fill) for name, fill in made.rule.fills.items()}
    assert len(false_chunks(stepped(made, state=forgotten, number=2))) == 6


def test_a_step_of_another_number_is_found() -> None:
    rounds = Rounds(optimizer=OPTIMIZERS["adam"])
    rounds.next(1)
    made = rounds.next(2)
    assert set(false_chunks(stepped(made, state=dict(made.before.slots), number=3)).values()) == {MASTER}


def test_a_step_with_another_learning_rate_is_found() -> None:
    """`server_learning_rate` almost zero would hand out almost the same model twice."""
    rounds = Rounds(optimizer=OPTIMIZERS["momentum"])
    rounds.next(1)
    made = rounds.next(2)
    assert len(false_chunks(stepped(made, state=dict(made.before.slots), number=2, rate=1e-6))) == 6


def test_another_model_altogether_is_false_everywhere() -> None:
    made = Rounds().next(1)
    crafted = torch.zeros_like(made.after.master)
    lie = made.told(Vectors(model=crafted, master=crafted, slots=made.after.slots))
    assert false_chunks(lie) == dict.fromkeys(range(6), MASTER)


def test_a_vector_that_a_survivor_did_not_sign_makes_no_check() -> None:
    made, other = Rounds().next(1), Rounds().next(2)
    with pytest.raises(PolicyRefusal, match="not those that its survivors signed"):
        replace(made, masked={**made.masked, B: other.masked[B]}).check()
    with pytest.raises(PolicyRefusal, match="not those that its survivors signed"):
        replace(made, masked={name: one for name, one in made.masked.items() if name != B}).check()


# --- pieces


def test_pieces_of_another_chunk_silo_or_state_are_not_taken_and_are_no_proof() -> None:
    rounds = Rounds()
    rounds.next(1)
    made = rounds.next(2)
    check = made.check()
    own, other = made.pieces(check, 1), made.pieces(check, 2)
    short = own.masked[A][:-4]
    for changed, error, match in (
        (replace(own, masked={**own.masked, A: other.masked[A]}), IntegrityError, "masked vector of silo silo-00"),
        (replace(own, masked={**own.masked, A: own.masked[B]}), IntegrityError, "masked vector of silo silo-00"),
        (replace(own, masked={**own.masked, A: short}), MalformedMessage, "masked vector of silo silo-00"),
        (replace(own, masked={A: own.masked[A]}), MalformedMessage, "the survivors are"),
        (replace(own, master=other.master), IntegrityError, "the master before the step"),
        (replace(own, slots={"momentum": other.slots["momentum"]}), IntegrityError, "the momentum before the step"),
        (replace(own, slots={}), MalformedMessage, "optimizer state"),
        (other, IntegrityError, "masked vector of silo silo-00"),
    ):
        with pytest.raises(error, match=match) as caught:
            check.check(1, changed, Workspace())
        assert not isinstance(caught.value, FalseChunk)
    check.check(1, own, Workspace())
    with pytest.raises(MalformedMessage, match="chunk 7 is outside the 7 chunks"):
        check.check(7, own, Workspace())


def test_the_chunk_handed_out_is_needed_where_models_are_rounded() -> None:
    made = Rounds(published="bfloat16").next(1)
    check = made.check()
    own, other = made.pieces(check, 0), made.pieces(check, 2)
    with pytest.raises(MalformedMessage, match="chunk 0 of the model handed out is missing"):
        check.check(0, replace(own, model=None), Workspace())
    with pytest.raises(IntegrityError, match="the model handed out"):
        check.check(0, replace(own, model=other.model), Workspace())


# --- the attempt's journal


def without(evidence: Evidence, index: int) -> Evidence:
    return replace(evidence, journal=evidence.journal[:index] + evidence.journal[index + 1 :])


def test_no_event_of_the_journal_can_be_left_out_or_come_twice() -> None:
    evidence = Rounds().next(1).evidence
    opened(evidence, identities((A, B, C, D)), Demands()).unmask.masks.erase()
    for index in range(len(evidence.journal)):
        refusal(without(evidence, index), "evidence of round 1")
    refusal(replace(evidence, journal=(*evidence.journal, evidence.journal[-1])), "Reveal comes after the sum")
    refusal(replace(evidence, journal=(*evidence.journal, PhaseClosed("unmasking"))), "PhaseClosed comes after the sum")
    refusal(replace(evidence, journal=()), "ends in the phase idle without a sum")


def forged(evidence: Evidence, *indexes: int) -> Evidence:
    """With other signatures under these events of the journal."""
    journal: list[Any] = list(evidence.journal)
    for index in indexes:
        it = journal[index]
        dealing = getattr(it, "dealing", None)
        changed = {"dealing": replace(dealing, signature=bytes(64))} if dealing else {"signature": bytes(64)}
        journal[index] = replace(it, **changed)
    return replace(evidence, journal=tuple(journal))


def test_no_signature_of_the_journal_can_be_forged() -> None:
    """Of four who agreed on the survivors three are enough: without one of them the sum is the same, without two there
    is none."""
    evidence = Rounds().next(1).evidence
    agreed = [index for index, event in enumerate(evidence.journal) if isinstance(event, Agreement)]
    for index in range(1, len(evidence.journal)):
        if index not in agreed:
            refusal(forged(evidence, index), "not signed by its pinned identity key")
    sum_ = opened(forged(evidence, agreed[3]), identities((A, B, C, D)), Demands())
    assert sum_.unmask.survivors == (A, B, C, D)
    refusal(forged(evidence, *agreed[2:]), "2 silos signed the survivor set|without a sum|abandoned")


@pytest.mark.parametrize("kind", [MaskedInput, Agreement, Reveal])
def test_what_a_silo_signed_for_another_round_is_no_evidence_of_this_one(kind: type) -> None:
    rounds = Rounds()
    evidence, other = rounds.next(1).evidence, rounds.next(2).evidence
    journal = [event if not isinstance(event, kind) else found(other, kind, event.silo) for event in evidence.journal]
    refusal(replace(evidence, journal=tuple(journal)), "evidence of round 1")


def found(evidence: Evidence, kind: type, silo: SiloName) -> Any:
    return next(event for event in evidence.journal if isinstance(event, kind) and event.silo == silo)  # type: ignore[attr-defined]


def test_a_journal_of_another_round_or_of_other_survivors_or_vectors_is_refused() -> None:
    rounds = Rounds()
    first, second = rounds.next(1).evidence, rounds.next(2).evidence
    refusal(replace(second, journal=first.journal), "journal is of round 1 attempt 1")
    fewer = replace(first.survivors, silos=(A, B, C), inputs=first.survivors.inputs[:3])
    refusal(replace(first, survivors=fewer), "with other survivors than it says")
    crafted = replace(first.survivors, inputs=(entropy("crafted"), *first.survivors.inputs[1:]))
    refusal(replace(first, survivors=crafted), "with other survivors than it says")


def test_a_sum_over_deltas_of_another_model_is_refused() -> None:
    evidence = Rounds().next(1).evidence
    lie = replace(evidence, before=replace(evidence.before, model=entropy("crafted")))
    refusal(lie, "its silos trained from another model")


def test_silos_that_are_not_pinned_or_too_few_give_no_evidence() -> None:
    evidence = Rounds().next(1).evidence
    refusal(evidence, "silo silo-03 has no identity key here: pin its key first", identities=identities((A, B, C)))
    strangers = {**identities((A, B, C)), D: identity_key("phantom").public_key()}
    refusal(evidence, "not signed by its pinned identity key", identities=strangers)
    refusal(evidence, "min_cohort of this silo is 5", demands=Demands(min_cohort=5))
    refusal(evidence, "min_survivors of this silo is 4", demands=Demands(min_survivors=4))


def test_masks_are_erased_where_evidence_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    evidence, erased = Rounds().next(1).evidence, []
    original = mask_stream.MaskSum.erase
    monkeypatch.setattr(mask_stream.MaskSum, "erase", lambda it: (erased.append(it), original(it)))
    refusal(replace(evidence, before=replace(evidence.before, model=entropy("crafted"))), "another model")
    assert len(erased) == 1


# --- the lineage


def test_rounds_that_a_silo_missed_join_one_after_the_other_and_none_can_be_left_out() -> None:
    rounds = Rounds()
    lineage = rounds.lineage()
    first, second, third = (rounds.next(number).evidence for number in (1, 2, 3))
    with pytest.raises(PolicyRefusal, match="no accepted evidence led to") as caught:
        lineage.after(second)
    assert caught.value.rule == VERIFY
    lineage = lineage.after(first)
    with pytest.raises(PolicyRefusal, match="begins at step 2 with a model or optimizer state"):
        lineage.after(third)
    lineage = lineage.after(second).after(third)
    assert [one.round for one in lineage.accepted] == [0, 1, 2, 3]
    assert lineage.after(second) == lineage


def test_a_model_whose_chunks_were_not_checked_is_no_model_to_train_from_until_they_are() -> None:
    rounds = Rounds()
    first, second = (rounds.next(number).evidence for number in (1, 2))
    lineage = rounds.lineage().after(first, Checked.REPLAYED)
    assert not lineage.holds(first.after.model)
    assert lineage.begins(second)
    assert lineage.after(second).holds(second.after.model)
    checked = lineage.after(first)
    assert checked.holds(first.after.model)
    assert checked.after(first, Checked.REPLAYED) == checked, "what was checked stays so"
    spot = lineage.after(first, Checked.SPOT)
    assert (spot.holds(first.after.model), spot.holds(first.after.model, Checked.JOINT)) == (True, False)
    assert (spot.begins(second), spot.begins(second, Checked.JOINT)) == (True, False)
    assert checked.begins(second, Checked.JOINT)
    with pytest.raises(PolicyRefusal, match="no accepted evidence led to"):
        spot.require_next(second, Checked.JOINT)


def test_a_round_without_a_step_is_no_link_and_the_next_begins_where_the_last_ended() -> None:
    rounds = Rounds()
    lineage = rounds.lineage().after(rounds.next(1).evidence)
    made = rounds.next(5)  # rounds 2 to 4 were abandoned, stopped, or weighed nothing
    assert not lineage.goes_back(made.evidence)
    assert lineage.after(made.evidence).accepted[-1].round == 5


def test_after_a_restore_the_lineage_goes_on_from_an_older_state() -> None:
    rounds = Rounds()
    first = rounds.next(1)
    kept, steps = rounds.vectors, rounds.steps
    lineage = rounds.lineage_of(first.before).after(first.evidence).after(rounds.next(2).evidence)
    rounds.vectors, rounds.steps = kept, steps
    made = rounds.next(3)
    assert lineage.goes_back(made.evidence)
    after = lineage.after(made.evidence)
    assert [one.state.steps for one in after.accepted] == [0, 1, 2, 2]


def test_a_second_sum_of_a_round_is_refused() -> None:
    rounds = Rounds()
    first = rounds.next(1)
    lineage = rounds.lineage_of(first.before).after(first.evidence)
    again = Rounds(silos=3)
    again.vectors = first.before
    with pytest.raises(PolicyRefusal, match="another sum of round 1 was accepted before"):
        lineage.after(again.next(1).evidence)


@pytest.mark.parametrize("field", ["momentum", "steps", "master"])
def test_another_optimizer_state_step_or_master_before_is_refused(field: str) -> None:
    """The model that silos trained from is right; what the step begins from besides is not."""
    rounds = Rounds()
    lineage = rounds.lineage().after(rounds.next(1).evidence)
    evidence = rounds.next(2).evidence
    before, after = evidence.before, evidence.after
    match field:
        case "momentum":
            lie = replace(evidence, before=replace(before, slots=(("momentum", entropy("other")),)))
        case "steps":
            lie = replace(evidence, before=replace(before, steps=7), after=replace(after, steps=8))
        case _:
            lie = replace(evidence, before=replace(before, master=entropy("other")))
    with pytest.raises(PolicyRefusal, match="no accepted evidence led to"):
        lineage.after(lie)
    assert lineage.after(evidence).holds(after.model)


def test_evidence_of_another_plan_or_an_earlier_round_is_refused() -> None:
    rounds = Rounds()
    first, second = rounds.next(3).evidence, rounds.next(2).evidence
    with pytest.raises(PolicyRefusal, match="begins where round 3 ended, which is no round before it"):
        Rounds().lineage().after(first).after(second)
    with pytest.raises(PolicyRefusal, match="it is of plan 111111111111 of test, not of this one"):
        replace(Rounds().lineage(), plan=entropy("other")).after(first)


# --- values


Break = Callable[[Evidence], Any]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda it: replace(it, after=replace(it.after, steps=2)), "leads from 0 to 2 steps"),
        (lambda it: replace(it, tail=(-1, *it.tail[1:])), "no 32-bit words"),
        (lambda it: replace(it, tail=(*it.tail[:-1], 1 << 32)), "no 32-bit words"),
        (lambda it: replace(it, tail=it.tail[:-1]), "6 words: expected 7"),
        (lambda it: replace(it.before, steps=-1), "after -1 steps"),
        (lambda it: replace(it.before, master=b"short"), "model state master has 5 bytes"),
        (lambda it: replace(it.before, slots=(("momentum", bytes(32)),)), "slots before the first step"),
        (lambda it: replace(it.after, slots=(("b", bytes(32)), ("a", bytes(32)))), "sorted by name, none twice"),
        (lambda it: replace(it.after, slots=(("a", bytes(32)), ("a", bytes(32)))), "sorted by name, none twice"),
        (lambda it: replace(it.after, slots=(("../up", bytes(32)),)), "no name of an optimizer's state"),
        (lambda it: replace(it.after, slots=(("momentum", b""),)), "slot momentum: vector has 0 bytes"),
        (
            lambda it: replace(
                it,
                before=ModelState(steps=1, model=bytes(32), master=bytes(32)),
                after=replace(it.after, steps=2),
            ),
            "has the optimizer state",
        ),
    ],
)
def test_what_no_evidence_can_say_is_malformed(change: Break, match: str) -> None:
    evidence = Rounds(silos=3).next(1).evidence
    with pytest.raises(MalformedMessage, match=match):
        change(evidence)


def test_the_digest_stands_for_every_statement() -> None:
    rounds = Rounds(silos=3)
    evidence = rounds.next(1).evidence
    other = rounds.next(2).evidence
    said = {
        evidence.digest,
        replace(evidence, attempt=other.attempt).digest,
        replace(evidence, survivors=other.survivors).digest,
        replace(evidence, tail=(*evidence.tail[:-1], evidence.tail[-1] + 1)).digest,
        replace(evidence, before=replace(evidence.before, master=bytes(32))).digest,
        replace(evidence, after=replace(evidence.after, slots=(("momentum", bytes(32)),))).digest,
        replace(evidence, after=replace(evidence.after, model=bytes(32))).digest,
    }
    assert len(said) == 7


def test_evidence_is_the_coordinators_by_its_signature() -> None:
    evidence = Rounds(silos=3).next(1).evidence
    key = identity_key("coordinator")
    signed = signed_evidence(evidence, key)
    signed.check(key.public_key())
    with pytest.raises(IntegrityError, match="round-evidence"):
        signed.check(identity_key("another").public_key())
    changed = SignedEvidence(evidence=replace(evidence, tail=(0,) * EXTRA_WORDS), signature=signed.signature)
    with pytest.raises(IntegrityError, match="round-evidence"):
        changed.check(key.public_key())


# --- manifests


def test_manifests_that_do_not_fit_evidence_or_plan_make_no_check() -> None:
    rounds = Rounds()
    rounds.next(1)
    made = rounds.next(2)
    right = made.checkable()
    wider = replace(made, chunk_bytes=32)
    for changes, match in (
        ({"before": right.after}, "not those that it names"),
        ({"after": right.before}, "not those that it names"),
        ({"after": wider.manifests(made.after)}, "not those that it names"),
    ):
        with pytest.raises(PolicyRefusal, match=match):
            CheckedRound(made.rule, replace(right, **changes), made.opened())
    told = wider.told(made.after)
    with pytest.raises(PolicyRefusal, match="not in chunks of one size"):
        CheckedRound(made.rule, replace(told.checkable(), before=right.before, masked=right.masked), told.opened())
    for rule, match in (
        (replace(made.rule, optimizer=OPTIMIZERS["adam"]), "the plan's optimizer has"),
        (replace(made.rule, optimizer=OPTIMIZERS["fedavg"]), "the plan's optimizer has"),
        (Rounds(sizes=(3, 7, 1, 11)).rule, "the plan's model 22 parameters"),
        (Rounds(sizes=(3, 7, 1, 9)).rule, "the plan's model 20 parameters"),
        (Rounds(sizes=(7, 3, 1, 10)).rule, "another layout"),
        (Rounds(published="bfloat16").rule, "another layout"),
    ):
        with pytest.raises(PolicyRefusal, match=match):
            CheckedRound(rule, right, made.opened())


def checked_with(made: Made, after: StateManifests) -> CheckedRound:
    """Of a coordinator that says so of the state after the step."""
    lie = replace(made, evidence=replace(made.evidence, after=after.state(made.evidence.after.steps)))
    return CheckedRound(made.rule, replace(lie.checkable(), after=after), lie.opened())


def test_another_layout_or_other_chunks_of_one_vector_alone_make_no_check() -> None:
    made, rounded = Rounds().next(1), Rounds(published="bfloat16").next(1)
    right = made.checkable().after
    momentum = [bits_of(made.after.slots["momentum"])]
    other_layout = manifest_of(Rounds(sizes=(7, 3, 1, 10)).rule.layout, momentum, made.chunk_bytes)
    wider = manifest_of(made.rule.layout, momentum, 2 * made.chunk_bytes)
    model = manifest_of(rounded.rule.model_layout, [bits_of(rounded.after.model)], 2 * made.chunk_bytes)
    for of, after, match in (
        (made, replace(right, slots={"momentum": other_layout}), "another layout"),
        (made, replace(right, slots={"momentum": wider}), "not in chunks of one size"),
        (rounded, replace(rounded.checkable().after, model=model), "not in chunks of one size"),
    ):
        with pytest.raises(PolicyRefusal, match=match):
            checked_with(of, after)


def test_a_model_in_float32_is_its_own_master() -> None:
    made = Rounds().next(1)
    with pytest.raises(PolicyRefusal, match="not its master"):
        made.told(replace(made.after, model=made.before.model)).check()


def test_a_sum_that_weighs_nothing_makes_no_step() -> None:
    made = Rounds().next(1)
    for word in (0, 1 << 31):
        with pytest.raises(PolicyRefusal, match=r"sum of weights is 0\.0, which makes no step"):
            replace(made, evidence=replace(made.evidence, tail=(word, *made.evidence.tail[1:]))).check()


def test_under_silo_level_privacy_a_constant_of_the_plan_divides_the_sum() -> None:
    made = Rounds(nominal_silos=7).next(1)
    point = made.opened().unmask.fixed_point
    assert made.rule.weight_sum(point, made.evidence.tail) == 7 * point.ranges.weight_cap
    assert replace(made.rule, nominal_silos=None).weight_sum(point, made.evidence.tail) != 7 * point.ranges.weight_cap
    assert made.rule.weight_sum(point, (0,) * EXTRA_WORDS) == 0.0
