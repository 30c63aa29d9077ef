"""A hostile coordinator against a silo's machine: each attack ends in a refusal, and nothing changes or is revealed."""

from dataclasses import fields, replace
from typing import Any

import pytest

from lorica_security.errors import (
    Conflict,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
    WrongTime,
)
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.keys.key_agreement import encapsulated, halves
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Delivery,
    MaskKeyShare,
    Reveal,
    SelfMaskShare,
    SurvivorSet,
    UnmaskRequest,
    signed,
)
from lorica_security.secure_aggregation.parameters import Parameters
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.memory import SiloMemory
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from tests.support.secagg_federation import (
    PLAN,
    Federation,
    Silo,
    alone,
    attempt,
    identity_key,
    opening,
    party,
    public_key,
    silo_names,
    terms,
)

NAMES = silo_names(5)
VICTIM = NAMES[0]


def refused(each: Silo, event: silo_events.Event, error: type[LoricaError], says: str, *, rule: str = "") -> None:
    """The event is refused, and the silo stands where it stood, with nothing sent or journalled."""
    before, journal, sent = each.state, list(each.journal), list(each.sent)
    with pytest.raises(error, match=says) as raised:
        each.take(event)
    assert each.state == before
    assert (each.journal, each.sent) == (journal, sent)
    if rule:
        assert isinstance(raised.value, PolicyRefusal)
        assert raised.value.rule == rule


def at(phase: str, **more: Any) -> tuple[Federation, Silo, Any]:
    """A federation stopped at a phase, its victim, and the message that is on its way to the victim."""
    federation = Federation(5, **more).run(until=phase)
    message = next((message for to, message in federation.queue if to == VICTIM), None)
    return federation, federation.silos[VICTIM], message


def with_members(roster: Roster, *members: Advertisement, threshold: int | None = None) -> Roster:
    ordered = tuple(sorted(members, key=lambda it: it.silo))
    silos = [it.silo for it in ordered]
    return Roster(
        attempt=roster.attempt,
        model=roster.model,
        link=roster.link,
        parameters=terms(threshold=threshold, link=alone(silos)).parameters(silos),
        members=ordered,
    )


def with_survivors(survivors: SurvivorSet, silos: tuple[SiloName, ...]) -> SurvivorSet:
    """Of these silos, with the vectors that they sent as far as there are any."""
    vectors = dict(zip(survivors.silos, survivors.inputs, strict=True))
    return replace(survivors, silos=silos, inputs=tuple(vectors.get(silo, bytes(32)) for silo in silos))


# --- rosters ----------------------------------------------------------------------------------------------------------


def test_swapping_a_silos_public_key_is_refused() -> None:
    _, victim, roster = at("share keys")
    for field in ("mask_key", "box_key"):
        swapped = replace(roster.members[2], **{field: public_key("another key")})
        members = (*roster.members[:2], swapped, *roster.members[3:])
        refused(victim, replace(roster, members=members), IntegrityError, f"{NAMES[2]} is not signed")


def test_swapping_a_key_with_a_signature_of_the_coordinators_own_making_is_refused() -> None:
    _, victim, roster = at("share keys")
    swapped = signed(replace(roster.members[2], mask_key=public_key("another key")), identity_key("coordinator"))
    members = (*roster.members[:2], swapped, *roster.members[3:])
    refused(victim, replace(roster, members=members), IntegrityError, "not signed by its pinned identity key")


def test_swapping_the_victims_own_key_is_refused() -> None:
    _, victim, roster = at("share keys")
    own = signed(replace(roster.members[0], mask_key=public_key("another key")), identity_key(VICTIM))
    refused(victim, replace(roster, members=(own, *roster.members[1:])), IntegrityError, "does not hold the keys")
    refused(victim, with_members(roster, *roster.members[1:]), IntegrityError, "swapped or left out")


def test_phantom_silos_do_not_fill_a_cohort() -> None:
    _, victim, roster = at("share keys")
    phantoms = [
        signed(
            Advertisement(
                attempt=roster.attempt,
                silo=SiloName(f"phantom-{index}"),
                mask_key=public_key("phantom mask", index),
                box_key=public_key("phantom box", index),
            ),
            identity_key(f"phantom-{index}"),
        )
        for index in range(4)
    ]
    refused(
        victim, with_members(roster, roster.members[0], *phantoms), PolicyRefusal, "phantom-0", rule="trusted_peers"
    )
    one = with_members(roster, *roster.members, phantoms[0])
    refused(victim, one, PolicyRefusal, "not pinned", rule="trusted_peers")


def test_a_phantom_cannot_borrow_a_pinned_name() -> None:
    _, victim, roster = at("share keys")
    borrowed = signed(
        replace(roster.members[1], mask_key=public_key("x"), box_key=public_key("y")), identity_key("phantom")
    )
    members = (roster.members[0], borrowed, *roster.members[2:])
    refused(victim, replace(roster, members=members), IntegrityError, "not signed by its pinned")


def test_a_roster_for_another_model_is_refused() -> None:
    _, victim, roster = at("share keys")
    refused(victim, replace(roster, model=bytes(32)), PolicyRefusal, "model", rule="one_model")


def test_a_roster_for_other_tensors_is_refused() -> None:
    _, victim, roster = at("share keys")
    ranges = roster.parameters.fixed_point.ranges
    for tensors in (ranges.tensors[:-1], ranges.tensors[::-1]):  # the same coordinates, cut at other places
        other = FixedPoint.of(cohort=5, ranges=replace(ranges, tensors=tensors))
        parameters = replace(roster.parameters, fixed_point=other)
        refused(victim, replace(roster, parameters=parameters), PolicyRefusal, "tensors", rule="allowed_tensors")


def test_an_old_roster_is_refused() -> None:
    old = Federation(5, of=attempt(round=1)).run(until="share keys").queue[0][1]
    _, victim, _ = at("share keys", of=attempt(round=2))
    refused(victim, old, WrongTime, "old or a foreign one")


def test_a_roster_under_old_keys_but_the_present_attempt_is_refused() -> None:
    old = Federation(5, of=attempt(salt="before")).run(until="share keys").queue[0][1]
    _, victim, roster = at("share keys")
    members = (roster.members[0], *(replace(it, attempt=roster.attempt) for it in old.members[1:]))
    refused(victim, replace(roster, members=members), IntegrityError, "not signed")


@pytest.mark.parametrize(
    ("wanted", "rule"),
    [
        (silo_party.Demands(min_cohort=6), "min_cohort"),
        (silo_party.Demands(min_threshold=5), "min_threshold"),
        (silo_party.Demands(min_survivors=4), "min_survivors"),
        (silo_party.Demands(colluders=1), "colluders"),
    ],
)
def test_lowering_what_the_silo_demands_is_refused(wanted: silo_party.Demands, rule: str) -> None:
    federation = Federation(5, demands=wanted).run(until="share keys")
    roster = federation.queue[0][1]
    refused(federation.silos[VICTIM], roster, PolicyRefusal, f"{rule} of this silo", rule=rule)


@pytest.mark.parametrize("threshold", [0, 1, 2])
def test_lowering_the_threshold_below_a_majority_cannot_be_expressed(threshold: int) -> None:
    _, _, roster = at("share keys")
    with pytest.raises(MalformedMessage, match="threshold"):
        replace(roster.parameters, threshold=threshold)


def test_shrinking_the_cohort_to_two_cannot_be_expressed() -> None:
    _, _, roster = at("share keys")
    with pytest.raises(MalformedMessage, match="at least 3"):
        Parameters(
            cohort=2,
            threshold=2,
            colluders=0,
            min_survivors=2,
            least_sum=2,
            fixed_point=FixedPoint.of(cohort=2, ranges=roster.parameters.fixed_point.ranges),
        )


def test_a_policy_that_asks_for_less_than_three_still_gets_three() -> None:
    _, victim, roster = at("share keys", demands=silo_party.Demands(min_cohort=1, min_threshold=1, min_survivors=1))
    assert victim.take(roster)


def test_different_rosters_for_different_silos_open_no_box() -> None:
    """Each silo deals to the roster it was given; what others dealt to another roster is not taken."""
    federation, victim, roster = at("share keys")
    smaller = with_members(roster, *roster.members[:4])
    victim.take(smaller)
    others = [federation.silos[name].take(roster)[0] for name in NAMES[1:]]
    dealings = (victim.sent[-1].dealing, *(it.dealing for it in others))
    boxes = tuple(box for it in others for box in it.boxes if box.holder == VICTIM)
    with pytest.raises(MalformedMessage, match="another roster"):
        Delivery(roster=smaller.digest, holder=VICTIM, dealings=dealings, boxes=boxes)
    forged = tuple(replace(it, roster=smaller.digest) for it in dealings)
    delivery = Delivery(roster=smaller.digest, holder=VICTIM, dealings=forged, boxes=boxes)
    refused(victim, delivery, MalformedMessage, "5 lines for 4 members|no member")


def test_a_second_roster_is_refused() -> None:
    _, victim, roster = at("share keys")
    victim.take(roster)
    refused(victim, with_members(roster, *roster.members[:4]), Conflict, "second roster")


@pytest.mark.parametrize("field", ["mask_key", "box_key"])
def test_a_key_of_small_order_is_refused(field: str) -> None:
    _, victim, roster = at("share keys")
    kem, _ = halves(getattr(roster.members[3], field))
    weak = signed(replace(roster.members[3], **{field: kem + bytes(32)}), identity_key(NAMES[3]))
    members = (*roster.members[:3], weak, roster.members[4])
    refused(victim, replace(roster, members=members), MalformedMessage, f"{NAMES[3]} advertised")


def test_keys_of_another_attempt_of_the_round_make_no_roster() -> None:
    _, _, roster = at("share keys")
    earlier = replace(roster.attempt, number=roster.attempt.number + 1)
    old = signed(replace(roster.members[3], attempt=earlier), identity_key(NAMES[3]))
    with pytest.raises(MalformedMessage, match="advertised for another attempt"):
        replace(roster, members=(*roster.members[:3], old, roster.members[4]))


def test_what_another_silo_dealt_does_not_stand_for_what_this_one_did() -> None:
    federation, victim, roster = at("share keys")
    other = federation.silos[NAMES[1]]
    state, _ = silo_machine.step(victim.state, roster, victim.party)
    sharing, _ = silo_machine.step(other.state, roster, other.party)
    assert isinstance(sharing, silo_states.Sharing)
    dealt = silo_own_dealing.shared_keys(sharing, other.party, encapsulated)
    with pytest.raises(IntegrityError, match=f"what silo {NAMES[1]} dealt stands for what this silo dealt"):
        silo_machine.step(state, dealt, victim.party)


def test_one_public_key_for_two_members_is_refused() -> None:
    _, _, roster = at("share keys")
    (kem, curve), other = halves(roster.members[3].mask_key), halves(roster.members[1].mask_key)
    for key in (b"".join(other), other[0] + curve, kem + other[1]):  # or one of its two halves
        twin = signed(replace(roster.members[3], mask_key=key), identity_key(NAMES[3]))
        with pytest.raises(MalformedMessage, match="twice"):
            replace(roster, members=(*roster.members[:3], twin, roster.members[4]))


# --- deliveries -------------------------------------------------------------------------------------------------------


def test_an_altered_box_is_the_coordinators_doing_and_shows_no_key() -> None:
    _, victim, delivery = at("masked input")
    box = delivery.boxes[1]
    spoilt = replace(box, box=bytes([box.box[0] ^ 1]) + box.box[1:])
    boxes = (delivery.boxes[0], spoilt, *delivery.boxes[2:])
    refused(victim, replace(delivery, boxes=boxes), IntegrityError, "altered on the way")


def test_an_altered_commitment_is_refused() -> None:
    _, victim, delivery = at("masked input")
    dealing = delivery.dealings[2]
    lines = (replace(dealing.lines[0], mask_key=bytes(32)), *dealing.lines[1:])
    dealings = (*delivery.dealings[:2], replace(dealing, lines=lines), *delivery.dealings[3:])
    refused(victim, replace(delivery, dealings=dealings), IntegrityError, "not signed")


def test_leaving_out_what_the_victim_dealt_is_refused() -> None:
    _, victim, delivery = at("masked input")
    refused(victim, replace(delivery, dealings=delivery.dealings[1:]), IntegrityError, "altered or left out")


def test_too_few_dealers_for_a_sum_are_refused() -> None:
    _, victim, delivery = at("masked input")
    fewer = replace(delivery, dealings=delivery.dealings[:3], boxes=delivery.boxes[:2])
    refused(victim, fewer, PolicyRefusal, "3 silos dealt", rule="min_survivors")


def test_a_dealer_without_a_box_is_refused() -> None:
    _, victim, delivery = at("masked input")
    refused(victim, replace(delivery, boxes=delivery.boxes[1:]), MalformedMessage, "one box of each")


def test_a_delivery_for_another_silo_is_refused_and_changes_nothing() -> None:
    federation, victim, _ = at("masked input")
    foreign = next(message for to, message in federation.queue if to == NAMES[1])
    refused(victim, foreign, WrongTime, f"for silo {NAMES[1]}")


def test_a_second_delivery_is_refused() -> None:
    federation, victim, delivery = at("masked input")
    state, effects = silo_machine.step(victim.state, delivery, victim.party)
    assert isinstance(effects[-1], silo_effects.MaskVector)
    fewer = replace(delivery, dealings=delivery.dealings[:4], boxes=delivery.boxes[:3])
    masked, _ = silo_machine.step(state, silo_events.VectorMasked(bytes(32)), victim.party)
    for after in (state, masked):
        with pytest.raises(Conflict, match="second delivery"):
            silo_machine.step(after, fewer, victim.party)
    assert federation.unmask is None


def test_different_dealings_for_different_silos_cancel_no_masks_and_get_no_second_signature() -> None:
    federation = Federation(5)

    def alter(to: str, message: Any) -> Any:
        if isinstance(message, Delivery) and to == VICTIM:
            return replace(message, dealings=message.dealings[:4], boxes=message.boxes[:3])
        return message

    federation.alter = alter
    federation.run(until="consistency check")
    survivors = next(message for to, message in federation.queue if to == NAMES[1])
    refused(federation.silos[VICTIM], with_survivors(survivors, NAMES), WrongTime, "other dealings")


# --- survivors and unmasking ------------------------------------------------------------------------------------------


def test_different_survivor_sets_get_one_signature_per_silo() -> None:
    _, victim, survivors = at("consistency check")
    victim.take(survivors)
    other = with_survivors(survivors, survivors.silos[:4])
    refused(victim, other, Conflict, "signs one per attempt")


def test_a_survivor_set_that_others_did_not_sign_reveals_nothing() -> None:
    federation, victim, survivors = at("consistency check")
    victim.take(with_survivors(survivors, survivors.silos[:4]))
    for name in NAMES[1:]:
        federation.silos[name].take(survivors)
    agreements = tuple(federation.silos[name].sent[-1] for name in NAMES)
    request = UnmaskRequest(roster=survivors.roster, agreements=agreements)
    refused(victim, request, IntegrityError, "another survivor set")
    refused(victim, replace(request, agreements=agreements[:1]), PolicyRefusal, "at least 4", rule="min_threshold")


def test_a_survivor_set_without_this_silos_group_is_signed() -> None:
    """It counts as dropped: its self mask is never shown (test_secagg_groups)."""
    _, victim, survivors = at("consistency check")
    without = with_survivors(survivors, survivors.silos[1:])
    (agreement,) = victim.take(without)
    assert agreement.survivors == without.digest


def test_a_sum_of_too_few_is_not_signed() -> None:
    _, victim, survivors = at("consistency check")
    refused(victim, with_survivors(survivors, survivors.silos[:3]), PolicyRefusal, "3 silos", rule="min_survivors")


def test_a_survivor_who_dealt_no_keys_is_refused() -> None:
    _, victim, survivors = at("consistency check")
    stranger = with_survivors(survivors, (*survivors.silos, SiloName("stranger")))
    refused(victim, stranger, MalformedMessage, "dealt no keys")


@pytest.mark.parametrize("held", [0, 1, 3])
def test_too_few_signatures_reveal_nothing(held: int) -> None:
    _, victim, request = at("unmasking")
    fewer = replace(request, agreements=request.agreements[:held])
    refused(victim, fewer, PolicyRefusal, "at least 4", rule="min_threshold")


def test_what_policy_asks_for_since_the_roster_holds_for_what_is_signed_and_revealed() -> None:
    """An agent that goes on after a restart has the policy of today."""
    _, victim, survivors = at("consistency check")
    victim.party = replace(victim.party, demands=silo_party.Demands(min_survivors=6))
    refused(victim, survivors, PolicyRefusal, "at least 6 are needed", rule="min_survivors")
    _, victim, request = at("unmasking")
    victim.party = replace(victim.party, demands=silo_party.Demands(min_threshold=6))
    refused(victim, request, PolicyRefusal, "at least 6 must", rule="min_threshold")


def test_the_signature_of_one_who_dealt_no_keys_counts_for_nothing() -> None:
    federation = Federation(6).run(until="unmasking", drops={NAMES[4]: "share keys"})
    request = next(message for to, message in federation.queue if to == VICTIM)
    late = signed(replace(request.agreements[0], silo=NAMES[4]), identity_key(NAMES[4]))
    agreements = tuple(sorted((*request.agreements[1:], late), key=lambda it: it.silo))
    says = f"a signature of silo {NAMES[4]}, who dealt no keys"
    refused(federation.silos[VICTIM], replace(request, agreements=agreements), MalformedMessage, says)


def test_one_signature_many_times_is_one() -> None:
    _, _, request = at("unmasking")
    with pytest.raises(MalformedMessage, match="twice"):
        replace(request, agreements=(request.agreements[0],) * 4)


def test_a_forged_signature_reveals_nothing() -> None:
    _, victim, request = at("unmasking")
    forged = signed(request.agreements[3], identity_key("coordinator"))
    agreements = (*request.agreements[:3], forged)
    refused(victim, replace(request, agreements=agreements), IntegrityError, "not signed by its pinned")


def test_a_signature_moved_to_another_set_reveals_nothing() -> None:
    _, victim, request = at("unmasking")
    moved = replace(request.agreements[3], survivors=bytes(32))
    refused(victim, replace(request, agreements=(*request.agreements[:3], moved)), IntegrityError, "another survivor")


def test_an_old_unmask_request_is_refused() -> None:
    _, _, old = at("unmasking", of=attempt(round=1))
    _, victim, _ = at("unmasking", of=attempt(round=2))
    refused(victim, old, WrongTime, "another roster")
    bent = UnmaskRequest(
        roster=victim.state.roster.digest,  # type: ignore[union-attr]
        agreements=tuple(
            Agreement(
                roster=victim.state.roster.digest,  # type: ignore[union-attr]
                silo=it.silo,
                survivors=victim.state.survivors.digest,  # type: ignore[union-attr]
                signature=it.signature,
            )
            for it in old.agreements
        ),
    )
    refused(victim, bent, IntegrityError, "not signed")


def test_both_shares_of_one_silo_cannot_be_said_in_one_reply() -> None:
    one = {"dealer": NAMES[1], "share": bytes(66), "salt": bytes(32)}
    with pytest.raises(MalformedMessage, match="twice"):
        Reveal(roster=bytes(32), silo=VICTIM, shares=(SelfMaskShare(**one), MaskKeyShare(**one)))


def test_both_shares_of_one_silo_are_not_given_across_two_requests() -> None:
    """Whatever is asked after the reply, in this attempt, the silo stays with the set that it signed."""
    federation = Federation(5).run(drops={NAMES[4]: "masked input"})
    victim = federation.silos[VICTIM]
    reveal = victim.sent[-1]
    assert [type(it).__name__ for it in reveal.shares] == ["SelfMaskShare"] * 4 + ["MaskKeyShare"]
    assert isinstance(victim.state, silo_states.Revealed)
    survivors = victim.state.survivors
    refused(victim, with_survivors(survivors, NAMES), WrongTime, "Revealed")
    request = next(it for it in victim.journal if isinstance(it, UnmaskRequest))
    assert victim.take(request) == [reveal]
    fewer = replace(request, agreements=request.agreements[:3])
    refused(victim, fewer, PolicyRefusal, "at least 4", rule="min_threshold")


def test_both_shares_are_not_given_after_a_restart_either() -> None:
    federation = Federation(5).run(drops={NAMES[4]: "masked input"})
    victim = federation.silos[VICTIM]
    reveal = victim.sent[-1]
    assert victim.restart() == [reveal]
    assert isinstance(victim.state, silo_states.Revealed)
    refused(victim, with_survivors(victim.state.survivors, NAMES), WrongTime, "Revealed")


# --- attempts and rounds ----------------------------------------------------------------------------------------------


def rested(federation: Federation) -> Silo:
    federation.end()
    victim = federation.silos[VICTIM]
    assert isinstance(victim.state, silo_states.Resting)
    return victim


def test_declaring_an_uploaded_silo_dropped_and_trying_the_round_again_is_refused() -> None:
    """Two sums over the same deltas, which differ by one silo, would be that silo's delta."""
    federation = Federation(5).run(drops={NAMES[4]: "masked input"})
    victim = rested(federation)
    again = attempt(number=2)
    refused(victim, opening(VICTIM, again), PolicyRefusal, "no further attempt", rule="one_sum_per_round")
    victim.restart()
    refused(victim, opening(VICTIM, again), PolicyRefusal, "no further attempt", rule="one_sum_per_round")


def test_an_attempt_that_was_abandoned_before_unmasking_may_be_tried_again_with_fresh_keys() -> None:
    federation = Federation(5).run(drops=dict.fromkeys(NAMES[2:], "masked input"))
    victim = rested(federation)
    first = victim.sent[0]
    (second,) = victim.take(opening(VICTIM, attempt(number=2)))
    assert {first.mask_key, first.box_key}.isdisjoint({second.mask_key, second.box_key})


def test_reusing_an_attempt_number_or_a_round_is_refused() -> None:
    federation = Federation(5, of=attempt(round=3, number=2)).run(drops=dict.fromkeys(NAMES[2:], "masked input"))
    victim = rested(federation)
    rule = "one_sum_per_round"
    for number in (1, 2):
        refused(victim, opening(VICTIM, attempt(round=3, number=number)), PolicyRefusal, "used once", rule=rule)
    refused(victim, opening(VICTIM, attempt(round=2, number=9)), PolicyRefusal, "no lower round", rule=rule)
    assert victim.take(opening(VICTIM, attempt(round=4)))


def test_another_plan_has_a_memory_of_its_own() -> None:
    memory = SiloMemory().joined(attempt(round=5)).answered(attempt(round=5))
    other = attempt(round=1, plan=bytes(32))
    memory.check_may_join(other)
    both = memory.joined(other)
    assert both.of(PLAN) == memory.of(PLAN)
    with pytest.raises(PolicyRefusal, match="no lower round"):
        both.check_may_join(attempt(round=4))


def test_every_part_of_an_attempt_is_in_its_digest() -> None:
    """What a silo signed for one attempt counts in no other, were the coordinator to draw one id twice."""
    one = attempt()
    changes = {"federation": "elsewhere", "plan": bytes(32), "round": 2, "number": 2, "id": bytes(32)}
    assert changes.keys() == {field.name for field in fields(one)}
    digests = {one.digest, *(replace(one, **{name: value}).digest for name, value in changes.items())}
    assert len(digests) == 6


def test_an_attempt_of_another_federation_is_refused() -> None:
    each = Silo(party(VICTIM, NAMES))
    foreign = replace(attempt(), federation="elsewhere")
    refused(each, opening(VICTIM, foreign), PolicyRefusal, "elsewhere", rule="federation")


def test_an_attempt_that_is_opened_again_keeps_the_keys_that_it_began_with() -> None:
    """Whatever root comes with the repetition: two of one attempt would be two sets of masks."""
    each = Silo(party(VICTIM, NAMES))
    first = each.take(opening("one root", attempt()))
    assert each.take(opening("another root", attempt())) == first
    assert len(first) == 1


def test_opening_another_attempt_during_one_is_refused() -> None:
    each = Silo(party(VICTIM, NAMES))
    each.take(opening(VICTIM, attempt()))
    refused(each, opening(VICTIM, attempt(number=2)), Conflict, "end that one first")
    refused(each, opening(VICTIM, attempt(), model=bytes(32)), Conflict, "end that one first")


def test_the_end_of_another_attempt_ends_nothing() -> None:
    _, victim, _ = at("masked input")
    refused(victim, silo_events.AttemptEnded(attempt(number=9)), WrongTime, "during round 1 attempt 1")


def test_a_restored_disk_is_one_colluder_and_the_others_stand_by_their_set() -> None:
    """The victim's snapshot from before it signed lets it sign a second set; nobody else does, so no share is shown."""
    federation, victim, survivors = at("consistency check")
    memory, journal = victim.memory, tuple(victim.journal)
    federation.run()
    (snapshot := Silo(victim.party, memory=memory, journal=list(journal))).restart()
    other: SurvivorSet = with_survivors(survivors, survivors.silos[:4])
    (second,) = snapshot.take(other)
    agreements = tuple(federation.silos[name].sent[-2] for name in NAMES[1:4])
    assert all(isinstance(it, Agreement) for it in agreements)
    request = UnmaskRequest(roster=survivors.roster, agreements=(second, *agreements))
    refused(snapshot, request, IntegrityError, "another survivor set")
    alone = replace(request, agreements=(second,))
    refused(snapshot, alone, PolicyRefusal, "at least 4", rule="min_threshold")
