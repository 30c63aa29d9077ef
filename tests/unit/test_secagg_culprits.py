"""A malicious silo: it is named, left out, and cannot make the coordinator read or lose anything else."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from lorica_security.errors import Conflict, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.coordinator.effects import Offence
from lorica_security.secure_aggregation.keys import share_box
from lorica_security.secure_aggregation.keys.key_agreement import (
    KEM_KEY_BYTES,
    Encapsulation,
    KeyPair,
    box_key,
    box_secret,
)
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, share_commitment
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    Delivery,
    MaskedInput,
    Reveal,
    SharedKeys,
    signed,
)
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from lorica_security.secure_aggregation.silo.phases import unmasking as silo_unmasking
from tests.support.secagg_federation import (
    Federation,
    attempt,
    encapsulate_of,
    entropy,
    identity_key,
    opening,
    public_key,
    silo_names,
)

NAMES = silo_names(6)
ROGUE = NAMES[3]


def played(kind: type, change: Callable[[Any], Any]) -> Federation:
    """A whole attempt of six in which the rogue's message of one kind is another."""
    federation = Federation(6)

    def alter(to: str, message: Any) -> Any:
        return change(message) if not to and isinstance(message, kind) and message.silo == ROGUE else message

    federation.alter = alter
    return federation.run()


def resigned(message: Any, **changes: Any) -> Any:
    return signed(replace(message, **changes), identity_key(ROGUE))


def spoilt(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def false_share(reveal: Reveal) -> Reveal:
    share = replace(reveal.shares[1], share=spoilt(reveal.shares[1].share))
    return resigned(reveal, shares=(reveal.shares[0], share, *reveal.shares[2:]))


def fewer_shares(reveal: Reveal) -> Reveal:
    return resigned(reveal, shares=reveal.shares[1:])


def unsigned_box(shared: SharedKeys) -> SharedKeys:
    box = replace(shared.boxes[0], box=spoilt(shared.boxes[0].box))
    return replace(shared, boxes=(box, *shared.boxes[1:]))


def fewer_boxes(shared: SharedKeys) -> SharedKeys:
    return replace(shared, boxes=shared.boxes[1:])


def box_for_a_stranger(shared: SharedKeys) -> SharedKeys:
    return replace(shared, boxes=(replace(shared.boxes[0], holder=SiloName("mallory")), *shared.boxes[1:]))


def fewer_lines(shared: SharedKeys) -> SharedKeys:
    return replace(shared, dealing=resigned(shared.dealing, lines=shared.dealing.lines[1:]))


@pytest.mark.parametrize(
    ("kind", "change", "offence"),
    [
        (Advertisement, lambda it: replace(it, signature=spoilt(it.signature)), Offence.BAD_SIGNATURE),
        (Advertisement, lambda it: replace(it, mask_key=public_key("other")), Offence.BAD_SIGNATURE),
        (Advertisement, lambda it: resigned(it, mask_key=it.mask_key[:KEM_KEY_BYTES] + bytes(32)), Offence.BAD_MESSAGE),
        (Advertisement, lambda it: resigned(it, mask_key=it.box_key), Offence.BAD_MESSAGE),
        (SharedKeys, lambda it: replace(it, dealing=replace(it.dealing, signature=bytes(64))), Offence.BAD_SIGNATURE),
        (SharedKeys, unsigned_box, Offence.BAD_MESSAGE),
        (SharedKeys, fewer_boxes, Offence.BAD_MESSAGE),
        (SharedKeys, box_for_a_stranger, Offence.BAD_MESSAGE),
        (SharedKeys, fewer_lines, Offence.BAD_MESSAGE),
        (MaskedInput, lambda it: replace(it, vector=bytes(32)), Offence.BAD_SIGNATURE),
        (MaskedInput, lambda it: resigned(it, words=it.words - 1), Offence.WRONG_LENGTH),
        (MaskedInput, lambda it: resigned(it, words=it.words + 1), Offence.WRONG_LENGTH),
        (MaskedInput, lambda it: resigned(it, dealings=bytes(32)), Offence.BAD_MESSAGE),
        (Agreement, lambda it: replace(it, signature=bytes(64)), Offence.BAD_SIGNATURE),
        (Agreement, lambda it: resigned(it, survivors=bytes(32)), Offence.BAD_MESSAGE),
        (Reveal, lambda it: replace(it, signature=bytes(64)), Offence.BAD_SIGNATURE),
        (Reveal, false_share, Offence.BAD_SHARE),
        (Reveal, fewer_shares, Offence.BAD_MESSAGE),
    ],
    ids=lambda value: getattr(value, "__name__", getattr(value, "value", None)),
)
def test_a_false_message_names_its_sender_and_the_others_sum_comes_out(
    kind: type, change: Callable[[Any], Any], offence: Offence
) -> None:
    federation = played(kind, change)
    assert [(blame.silo, blame.offence) for blame in federation.blames] == [(ROGUE, offence)]
    assert np.array_equal(federation.sum(), federation.true_sum())
    assert federation.unmask is not None
    assert (ROGUE in federation.unmask.survivors) == (kind in (Agreement, Reveal))


def test_whoever_advertises_a_key_of_another_silo_is_named_and_the_others_sum_comes_out() -> None:
    federation, others = Federation(6), list[Advertisement]()

    def alter(to: str, message: Any) -> Any:
        if to or not isinstance(message, Advertisement):
            return message
        if message.silo == ROGUE:
            return resigned(message, mask_key=others[0].mask_key)
        others.append(message)
        return message

    federation.alter = alter
    federation.run()
    assert [(blame.silo, blame.offence) for blame in federation.blames] == [(ROGUE, Offence.BAD_MESSAGE)]
    assert np.array_equal(federation.sum(), federation.true_sum())


@pytest.mark.parametrize("kind", [Advertisement, SharedKeys, MaskedInput, Agreement, Reveal])
def test_a_message_that_was_refused_is_not_in_the_journal_its_senders_drop_is(kind: type) -> None:
    """So the journal leads to the same end whatever keys its reader knows of the sender."""

    def forged(it: Any) -> Any:
        unsigned = it.dealing if isinstance(it, SharedKeys) else it
        other = signed(unsigned, identity_key("another"))
        return replace(it, dealing=other) if isinstance(it, SharedKeys) else other

    federation = played(kind, forged)
    assert not any(isinstance(it, kind) and it.silo == ROGUE for it in federation.journal)
    (dropped,) = (it for it in federation.journal if isinstance(it, coordinator_events.SiloDropped))
    assert dropped.silo == ROGUE
    assert dropped.detail.startswith("bad signature: ")
    state, _ = coordinator_machine.restored(tuple(federation.journal), federation.identities)
    assert state == federation.coordinator


def test_complaints_that_are_refused_do_not_make_the_journal_longer() -> None:
    federation = Federation(6).run(until="masked input")
    while not any(it.silo == ROGUE for it in federation.coordinator.inputs):  # type: ignore[union-attr]
        federation.deliver()
    state, events = federation.coordinator, len(federation.journal)
    for _ in range(3):
        roster = federation.coordinator.roster.digest  # type: ignore[union-attr]
        federation.tell_coordinator(Complaint(roster=roster, silo=ROGUE, dealer=NAMES[0], key=bytes(32)))
    assert [(it.silo, it.offence) for it in federation.blames] == [(ROGUE, Offence.BAD_SIGNATURE)] * 3
    assert (federation.coordinator, len(federation.journal)) == (state, events)
    assert federation.run().unmask is not None


def test_a_complaint_about_who_dealt_its_silo_nothing_names_that_silo_and_ends_nothing() -> None:
    """Itself, or one that dealt to nobody: there is no box to look into."""
    for dealer, drops in ((ROGUE, {}), (NAMES[0], {NAMES[0]: "share keys"})):
        federation = Federation(9).run(until="masked input", drops=drops)
        named = len(federation.blames)
        roster = federation.coordinator.roster.digest  # type: ignore[union-attr]
        complaint = Complaint(roster=roster, silo=ROGUE, dealer=dealer, key=bytes(32))
        federation.tell_coordinator(signed(complaint, identity_key(ROGUE)))
        (blame,) = federation.blames[named:]
        assert (blame.silo, blame.offence) == (ROGUE, Offence.BAD_MESSAGE)
        assert blame.detail == f"silo {ROGUE} complains about {dealer}, who dealt it nothing"
        assert federation.run().unmask is not None


def test_silence_is_named_in_every_phase() -> None:
    federation = Federation(6).run(drops={ROGUE: "masked input"})
    assert federation.blames == [
        coordinator_effects.Blame(silo=ROGUE, offence=Offence.SILENCE, detail="no answer in the phase masked input")
    ]


def test_where_too_few_sign_the_survivor_set_nobody_is_asked_for_shares() -> None:
    federation = Federation(6).run(drops=dict.fromkeys(NAMES[1:4], "consistency check"))
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert federation.coordinator.reason == "3 silos signed the survivor set, at least 5 must"
    assert not any(isinstance(it, Reveal) for it in federation.seen)


# --- false shares -----------------------------------------------------------------------------------------------------


def another_share(shares: share_box.KeyShares) -> None:
    shares.mask_key.buffer[-1] ^= 1


def a_share_beyond_the_field(shares: share_box.KeyShares) -> None:
    shares.mask_key.buffer[:] = b"\xff" * len(shares.mask_key)


def another_pair_secret(shares: share_box.KeyShares) -> None:
    assert shares.pair_secret is not None
    shares.pair_secret.buffer[-1] ^= 1


def dealt_falsely(
    victim: int,
    *,
    commit: bool,
    right_key: bool = True,
    spoil: Callable[[share_box.KeyShares], None] = another_share,
) -> Federation:
    """The rogue seals other shares for one holder; `commit` says whether it commits to those as well."""
    federation = Federation(6)

    def alter(to: str, message: Any) -> Any:
        if to == ROGUE and isinstance(message, Delivery):
            return None  # its machine would see that this is not what it dealt
        if to or not isinstance(message, SharedKeys) or message.silo != ROGUE:
            return message
        holder = NAMES[victim]
        roster = federation.coordinator.roster  # type: ignore[union-attr]
        keys = KeyPair(box_secret(opening(ROGUE, federation.attempt).root, federation.attempt))
        kem = encapsulate_of(ROGUE)(roster.member(holder).box_key)
        key = box_key(keys, roster.box_link(ROGUE, holder), own=ROGUE, kem=kem)
        index = next(index for index, box in enumerate(message.boxes) if box.holder == holder)
        bound_to = {"roster": roster.digest, "dealer": ROGUE, "holder": holder}
        shares = share_box.opened(message.boxes[index].box, key, **bound_to)
        spoil(shares)
        sealing = key if right_key else Secret(bytes(32))
        box = replace(message.boxes[index], box=share_box.sealed(shares, sealing, **bound_to))
        place = roster.place(holder) - 1
        line = replace(message.dealing.lines[place], box=box.digest)
        if commit:
            commitment = share_commitment(
                **bound_to,
                kind=MASK_KEY,
                salt=bytes(shares.mask_key_salt.buffer),
                share=bytes(shares.mask_key.buffer),
            )
            line = replace(line, mask_key=commitment)
        lines = (*message.dealing.lines[:place], line, *message.dealing.lines[place + 1 :])
        dealing = resigned(message.dealing, lines=lines)
        return SharedKeys(dealing=dealing, boxes=(*message.boxes[:index], box, *message.boxes[index + 1 :]))

    federation.alter = alter
    return federation


def test_a_share_that_does_not_fit_its_commitment_convicts_the_dealer_before_anybody_is_unmasked() -> None:
    federation = dealt_falsely(1, commit=False).run()
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert [(it.silo, it.offence) for it in federation.blames] == [(ROGUE, Offence.BAD_SHARE)]
    assert not any(isinstance(it, Reveal) for it in federation.seen)
    assert federation.silos[NAMES[1]].erased, "the accuser is done with this attempt"


@pytest.mark.parametrize(
    ("victim", "commit", "spoil"), [(1, True, a_share_beyond_the_field), (4, False, another_pair_secret)]
)
def test_a_box_of_what_no_mask_comes_of_convicts_its_dealer_though_all_in_it_is_signed(
    victim: int, commit: bool, spoil: Callable[[share_box.KeyShares], None]
) -> None:
    federation = dealt_falsely(victim, commit=commit, spoil=spoil).run()
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert [(it.silo, it.offence) for it in federation.blames] == [(ROGUE, Offence.BAD_SHARE)]
    assert not any(isinstance(it, Reveal) for it in federation.seen)


def test_the_next_attempt_goes_on_without_the_rogue() -> None:
    federation = dealt_falsely(1, commit=False).run()
    federation.end()
    honest = tuple(name for name in NAMES if name != ROGUE)
    second = Federation(6, of=attempt(number=2), silos=federation.silos)
    second.names = honest
    second.run()
    assert second.unmask is not None
    assert second.unmask.survivors == honest
    assert np.array_equal(second.sum(), second.true_sum())


def test_a_box_that_does_not_open_is_a_dispute_between_two() -> None:
    federation = dealt_falsely(1, commit=False, right_key=False).run()
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert [(it.silo, it.offence) for it in federation.blames] == [
        (NAMES[1], Offence.DISPUTED),
        (ROGUE, Offence.DISPUTED),
    ]


def test_shares_of_no_one_secret_convict_the_dealer_when_they_are_put_together() -> None:
    """The rogue commits to its false share, so that nobody can see it but when it drops and its key is needed."""
    federation = dealt_falsely(1, commit=True).run(drops={ROGUE: "masked input"})
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert [(it.silo, it.offence) for it in federation.blames] == [
        (ROGUE, Offence.SILENCE),
        (ROGUE, Offence.BAD_SHARE),
    ]


def test_a_complaint_about_a_sound_box_names_the_accuser() -> None:
    federation = Federation(6).run(until="masked input")
    roster = federation.coordinator.roster  # type: ignore[union-attr]
    keys = KeyPair(box_secret(opening(ROGUE, federation.attempt).root, federation.attempt))
    dealt = next(item for item in federation.coordinator.shared if item.silo == NAMES[0])  # type: ignore[union-attr]
    ciphertext = next(box for box in dealt.boxes if box.holder == ROGUE).ciphertext
    kem = Encapsulation(keys.decapsulated(ciphertext), ciphertext)
    key = box_key(keys, roster.box_link(NAMES[0], ROGUE), own=ROGUE, kem=kem)
    complaint = Complaint(roster=roster.digest, silo=ROGUE, dealer=NAMES[0], key=bytes(key.buffer))
    federation.tell_coordinator(signed(complaint, identity_key(ROGUE)))
    assert [(it.silo, it.offence) for it in federation.blames] == [(ROGUE, Offence.FALSE_COMPLAINT)]


def test_a_complaint_that_is_not_signed_by_its_silo_names_nobody_else() -> None:
    federation = Federation(6).run(until="masked input")
    roster = federation.coordinator.roster  # type: ignore[union-attr]
    federation.tell_coordinator(Complaint(roster=roster.digest, silo=ROGUE, dealer=NAMES[0], key=bytes(32)))
    assert [(it.silo, it.offence) for it in federation.blames] == [(ROGUE, Offence.BAD_SIGNATURE)]
    assert federation.run().unmask is not None


def test_a_second_different_answer_is_a_conflict_and_the_same_one_is_nothing() -> None:
    federation = Federation(6).run(until="masked input")
    while not isinstance(federation.queue[0][1], MaskedInput):
        federation.queue.append(federation.queue.pop(0))
        federation.deliver(next(i for i, (to, _) in enumerate(federation.queue) if to or i == 0))
    message = federation.queue[0][1]
    federation.deliver()
    state = federation.coordinator
    federation.tell_coordinator(message)
    assert federation.coordinator == state
    with pytest.raises(Conflict, match="second, different MaskedInput"):
        federation.tell_coordinator(replace(message, vector=bytes(32)))
    assert federation.coordinator == state


def test_a_late_answer_does_not_come_back_in() -> None:
    federation = Federation(6).run(until="masked input")
    federation.tell_coordinator(coordinator_events.SiloDropped(ROGUE, "upload failed"))
    federation.tell_coordinator(coordinator_events.SiloDropped(ROGUE, "upload failed"))
    assert len(federation.blames) == 1
    (late,) = federation.silos[ROGUE].take(next(message for to, message in federation.queue if to == ROGUE))
    with pytest.raises(WrongTime, match="not waited for"):
        federation.tell_coordinator(late)


def test_a_deadline_of_another_phase_closes_nothing() -> None:
    federation = Federation(6).run(until="masked input")
    with pytest.raises(WrongTime, match="came in the phase masked input"):
        federation.tell_coordinator(coordinator_events.PhaseClosed("share keys"))


@pytest.mark.parametrize("drops", [False, True], ids=["whose seed is needed", "whose mask key is needed"])
def test_sound_shares_of_another_secret_convict_the_dealer(drops: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All boxes and commitments fit each other; what they give back is not what the rogue committed to or
    advertised."""
    deal = silo_own_dealing.dealt_shares

    def deal_another_secret(state: silo_states.Sharing, dealer: SiloName) -> tuple[share_box.KeyShares, ...]:
        if state.opening.root == opening(ROGUE, state.attempt).root:
            state = replace(state, opening=replace(state.opening, root=Secret(entropy("another root"))))
        return deal(state, dealer)

    for module in (silo_own_dealing, silo_unmasking):
        monkeypatch.setattr(module, "dealt_shares", deal_another_secret)
    federation = Federation(6).run(drops={ROGUE: "masked input"} if drops else {})
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert federation.unmask is None
    assert (ROGUE, Offence.BAD_SHARE) in [(it.silo, it.offence) for it in federation.blames]
    assert {it.silo for it in federation.blames} == {ROGUE}
