"""A coordinator that cheats in masked rounds, against real agents over gRPC: it learns a sum, or nothing.

Each test is named for the attack that it plays, and differs from the honest round at the top in that. Each attack ends
in a refusal at the silo, which the silo's log, journal and metrics have (`refused`); and whatever was asked, no silo
showed more than one sum of a round allows (`attacked` looks at its end).
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from secrets import token_bytes
from typing import Any

import pytest

from lorica_security.audit.entry import Event
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.reading import read_log
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Delivery,
    MaskedInput,
    MaskKeyShare,
    Reveal,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    signed,
)
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.roster import Roster
from silo_agent.policy.rules import PolicyRules
from silo_wire.messages import DeclineReason, Prepare, Standby, StandbyReason, Train
from silo_wire.v1 import federation_pb2, secure_aggregation_pb2
from tests.support.federation_peer import TestNet, small_bundle, vector_of
from tests.support.hostile_masks import (
    BANK,
    CLINIC,
    ELEMENTS,
    HOSPITAL,
    INSURER,
    SILOS,
    HostileCoordinator,
    attacked,
    masked_bundle,
)
from tests.support.secagg_federation import entropy

NET = TestNet.create()
INTEGRITY, POLICY = DeclineReason.INTEGRITY, DeclineReason.POLICY
REST = (BANK, CLINIC, HOSPITAL)
"""Of whom the sum is where the insurer is declared dropped."""


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@asynccontextmanager
async def masked_round(folder: Path, until: str, **setting: Any) -> AsyncIterator[HostileCoordinator]:
    """Round 1, honest so far: all have trained, and the protocol is in this phase, of which nobody was told yet."""
    async with attacked(folder, NET, **setting) as at:
        await at.train()
        at.open()
        await at.play(until)
        yield at


@asynccontextmanager
async def insurer_denied(folder: Path, until: str) -> AsyncIterator[HostileCoordinator]:
    """The same, but that the insurer's masked vector came and the coordinator says that it did not.

    What every attack here is after: with the shares of the insurer's mask key, which are shown of a dropped silo, and
    those of its self mask, which are shown of a survivor, its vector is its delta.
    """
    async with masked_round(folder, "masked input") as at:
        await at.deny(INSURER)
        await at.play(until)
        yield at


def with_members(roster: Roster, *members: Advertisement) -> Roster:
    """Of these, whose names and number may be others; its parameters are what an honest coordinator would choose."""
    ordered = tuple(sorted(members, key=lambda member: member.silo))
    names = [member.silo for member in ordered]
    link = first_link(roster.attempt.federation, Partition.singletons(names))
    terms = Terms(model=roster.model, ranges=roster.parameters.fixed_point.ranges, link=link)
    return replace(roster, members=ordered, parameters=terms.parameters(names))


def swapped(roster: Roster, member: Advertisement) -> Roster:
    others = tuple(it for it in roster.members if it.silo != member.silo)
    return with_members(roster, *others, member)


def a_public_key() -> bytes:
    """Whose private key the coordinator has."""
    return KeyPair(Secret(token_bytes(32))).public


# --- an honest coordinator, to compare with ---------------------------------------------------------------------------


async def test_honest_round_gives_the_sum_and_nobody_refuses_anything(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "unmasked") as at:
        at.require_sum_of(*SILOS)
        for silo in at.silos.values():
            await silo.notes.outcomes(1)
            assert silo.counted("lorica_silo_rounds_total", work="training", outcome="uploaded") == 1
            log = read_log(silo.folder.audit, keys=[silo.credentials.identity_key.public_key()])
            (left,) = log.of(Event.MASKED_UPDATE_LEAVES)
            (receipt,) = log.of(Event.RECEIPT)
            assert left.text("covered_by") == "masked"
            assert (left.text("update"), left.number("bytes")) == (receipt.text("update"), receipt.number("bytes"))
            assert [entry.text("message") for entry in log.of(Event.KEYS_LEAVE)] == [
                "Advertisement",
                "SharedKeys",
                "Agreement",
                "Reveal",
            ]


async def test_honest_round_in_which_a_silo_falls_silent_gives_the_sum_of_the_rest(tmp_path: Path) -> None:
    async with insurer_denied(tmp_path, "unmasked") as at:
        at.require_sum_of(*REST)
        for name in REST:
            (reveal,) = at.reveals(name)
            assert [type(share) for share in reveal.shares] == [
                SelfMaskShare,
                SelfMaskShare,
                SelfMaskShare,
                MaskKeyShare,
            ]


# --- who takes part ---------------------------------------------------------------------------------------------------


async def test_swaps_the_public_keys_of_a_silo(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "share keys") as at:
        roster = at.requested(Roster, HOSPITAL)
        own_word = new_identity_key()
        attacks = {
            HOSPITAL: replace(roster.member(BANK), mask_key=a_public_key()),
            BANK: signed(replace(roster.member(CLINIC), box_key=a_public_key()), own_word),
            CLINIC: signed(replace(roster.member(CLINIC), mask_key=a_public_key()), own_word),
        }
        for victim, member in attacks.items():
            await at.ask(victim, swapped(roster, member))
            says = f"the Advertisement of silo {member.silo} is not signed by its pinned identity key"
            await at.refused(victim, "IntegrityError", says, declined=INTEGRITY)
        await at.ask(INSURER, with_members(roster, *roster.members[:3]))
        await at.refused(INSURER, "IntegrityError", "swapped or left out", declined=INTEGRITY)
        assert at.peer.masked == {}


async def test_fills_the_cohort_with_phantom_silos_certified_by_its_own_authority(tmp_path: Path) -> None:
    phantoms = (SiloName("phantom-1"), SiloName("phantom-2"))
    async with attacked(tmp_path, NET, phantoms=phantoms) as at:
        await at.train()
        at.open(HOSPITAL, *phantoms, link=at.with_phantoms)
        await at.play("share keys")
        roster = at.requested(Roster, HOSPITAL)
        for phantom in phantoms:
            assert isinstance(await at.answer_to(phantom, roster), SharedKeys)
        await at.ask(HOSPITAL, roster)
        says = "names phantom-1, phantom-2, whose identity keys this silo has not pinned"
        await at.refused(HOSPITAL, "trusted_peers", says, declined=POLICY)

        at.open(BANK, CLINIC, INSURER, phantoms[0], number=2, link=at.with_phantoms)
        await at.play("share keys")
        roster = at.requested(Roster, BANK)
        for silo in (BANK, CLINIC, INSURER):
            await at.ask(silo, roster)
            await at.refused(silo, "trusted_peers", "names phantom-1, whose", declined=POLICY)
        assert at.peer.masked == {}


# --- different things to different silos ------------------------------------------------------------------------------


def forged_delivery(to: SiloName, under: Roster, dealt: Mapping[SiloName, SharedKeys]) -> Delivery:
    """What these silos dealt to `to`, relabelled as dealt to the roster that it knows, a line for each member of
    that."""
    dealings, boxes = [], []
    for silo in under.silos:
        dealing = dealt[silo].dealing
        if dealing.roster != under.digest:
            dealing = replace(dealing, roster=under.digest, lines=dealing.lines[: len(under.members)])
        dealings.append(dealing)
        boxes += [box for box in dealt[silo].boxes if box.holder == to]
    return Delivery(roster=under.digest, holder=to, dealings=tuple(dealings), boxes=tuple(boxes))


async def test_hands_different_rosters_to_different_silos(tmp_path: Path) -> None:
    """All their members are real. Each silo deals to the roster that it was given, and takes no dealing to another."""
    async with masked_round(tmp_path, "share keys") as at:
        roster = at.requested(Roster, HOSPITAL)
        smaller = with_members(roster, *roster.members[:3])
        dealt = {HOSPITAL: await at.answer_to(HOSPITAL, smaller)}
        for silo in (BANK, CLINIC, INSURER):
            dealt[silo] = await at.answer_to(silo, roster)
        await at.ask(HOSPITAL, forged_delivery(HOSPITAL, smaller, dealt))
        says = f"the Dealing of silo {BANK} is not signed"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        await at.ask(BANK, forged_delivery(BANK, roster, dealt))
        await at.refused(BANK, "MalformedMessage", f"silo {HOSPITAL} has 3 lines for 4 members", declined=INTEGRITY)
        await at.ask(CLINIC, smaller)
        await at.refused(CLINIC, "Conflict", "this silo deals to the first", declined=INTEGRITY)
        assert at.peer.masked == {}


async def test_hands_different_models_to_different_silos_and_names_one_to_all(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET) as at:
        at.key = replace(at.key, round=2)  # of the first, all know the model from the plan
        crafted = at.offer(1)
        await at.train(HOSPITAL, model=crafted)
        await at.train(BANK, CLINIC, INSURER)
        at.open()
        await at.play("share keys")
        roster = at.requested(Roster, HOSPITAL)
        await at.ask(HOSPITAL, roster)
        says = f"the roster is for model {at.model.digest[:16]}, this silo trained {crafted.digest[:16]}"
        await at.refused(HOSPITAL, "one_model", says, declined=POLICY)
        await at.ask(BANK, roster, model=crafted.digest)
        await at.refused(BANK, "one_model", "two different models were handed out", declined=INTEGRITY)
        await at.peer.order(Train(key=at.key, model=crafted.digest, seconds_left=60.0), CLINIC)
        await at.refused(CLINIC, "one_model", "two different models were handed out", declined=INTEGRITY)
        assert at.silos[CLINIC].trainer.trained == [at.key], "it trained from the first alone"
        assert at.peer.masked == {}


async def test_hands_different_models_to_different_silos_and_names_its_own_to_each(tmp_path: Path) -> None:
    """What each silo agreed on is bound to the roster that names its model: it takes no dealing to another."""
    async with attacked(tmp_path, NET) as at:
        at.key = replace(at.key, round=2)  # of the first, all know the model from the plan
        crafted = at.offer(1)
        await at.train(HOSPITAL, model=crafted)
        await at.train(BANK, CLINIC, INSURER)
        at.open()
        await at.play("share keys")
        roster = at.requested(Roster, HOSPITAL)
        own = replace(roster, model=bytes.fromhex(crafted.digest))
        dealt = {silo: await at.answer_to(silo, own if silo == HOSPITAL else roster) for silo in SILOS}
        await at.ask(HOSPITAL, forged_delivery(HOSPITAL, own, dealt))
        says = f"the Dealing of silo {BANK} is not signed"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        await at.ask(BANK, forged_delivery(BANK, roster, dealt))
        says = f"the Dealing of silo {HOSPITAL} is not signed"
        await at.refused(BANK, "IntegrityError", says, declined=INTEGRITY)
        assert at.peer.masked == {}


async def test_hands_different_survivor_sets_to_different_silos(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "consistency check") as at:
        everybody = at.requested(SurvivorSet, HOSPITAL)
        without = at.survivors_of(everybody.roster, HOSPITAL, *REST)
        agreed: dict[SiloName, Agreement] = {}
        for silo, survivors in {HOSPITAL: everybody, INSURER: everybody, BANK: without, CLINIC: without}.items():
            agreed[silo] = await at.answer_to(silo, survivors)

        def request(*silos: SiloName) -> UnmaskRequest:
            return UnmaskRequest(roster=everybody.roster, agreements=tuple(agreed[silo] for silo in sorted(silos)))

        await at.ask(HOSPITAL, request(*SILOS))
        says = f"silo {BANK} signed another survivor set than this silo: nothing is revealed"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        await at.ask(INSURER, request(HOSPITAL, INSURER))
        await at.refused(INSURER, "min_threshold", "2 silos signed the survivor set, at least 3 must", declined=POLICY)
        await at.ask(BANK, request(*REST))
        await at.refused(BANK, "IntegrityError", f"silo {HOSPITAL} signed another", declined=INTEGRITY)
        await at.ask(CLINIC, everybody)
        await at.refused(CLINIC, "Conflict", "this silo signs one per attempt", declined=INTEGRITY)
        assert [at.reveals(silo) for silo in SILOS] == [[]] * 4


async def test_hands_a_survivor_set_without_the_silo_or_with_one_that_dealt_nothing(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "consistency check") as at:
        survivors = at.requested(SurvivorSet, INSURER)
        without = at.survivors_of(survivors.roster, INSURER, *REST)
        agreed = await at.answer_to(INSURER, without)  # as a living member of a group that counts as dropped
        assert agreed.survivors == without.digest
        stranger = replace(survivors, silos=(*SILOS, SiloName("stranger")), inputs=(*survivors.inputs, bytes(32)))
        await at.ask(BANK, stranger)
        await at.refused(BANK, "MalformedMessage", "names stranger, who dealt no keys", declined=INTEGRITY)


async def test_alters_a_sealed_share_on_its_way_so_that_the_silo_complains_and_shows_its_key(tmp_path: Path) -> None:
    """A complaint names a dealer, and only what the dealer itself signed is ground for one."""
    async with masked_round(tmp_path, "masked input") as at:
        delivery = at.requested(Delivery, HOSPITAL)
        box = delivery.boxes[0]
        spoilt = replace(box, box=bytes([box.box[0] ^ 1]) + box.box[1:])
        await at.ask(HOSPITAL, replace(delivery, boxes=(spoilt, *delivery.boxes[1:])))
        says = f"the box of silo {BANK} is not the one that it signed: altered on the way"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        at.drop(HOSPITAL)
        await at.play("unmasked")
        at.require_sum_of(BANK, CLINIC, INSURER)


# --- both shares of one silo ------------------------------------------------------------------------------------------


async def test_asks_for_both_shares_of_a_silo_in_one_request(tmp_path: Path) -> None:
    """The request names nobody: it holds signatures, here under two sets, of which the insurer is in one."""
    shares = secure_aggregation_pb2.RevealedShare.DESCRIPTOR.oneofs_by_name["share"].fields
    assert {field.name for field in shares} == {"self_mask", "mask_key"}, "an answer has one of the two"
    async with insurer_denied(tmp_path, "unmasking") as at:
        request = at.requested(UnmaskRequest, HOSPITAL)
        everybody = at.survivors_of(request.roster, HOSPITAL, *SILOS)
        other = await at.answer_to(INSURER, everybody)
        both = replace(request, agreements=(*request.agreements, other))
        await at.ask(HOSPITAL, both)
        says = f"silo {INSURER} signed another survivor set than this silo"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        await at.ask(INSURER, both)
        says = f"silo {BANK} signed another survivor set than this silo"
        await at.refused(INSURER, "IntegrityError", says, declined=INTEGRITY)
        assert [at.reveals(silo) for silo in SILOS] == [[]] * 4


def dealings_of(at: HostileCoordinator, silo: SiloName) -> bytes:
    """The digest of the dealings that it masked for."""
    (masked,) = (it for name, it in at.peer.answers if name == silo and isinstance(it, MaskedInput))
    return masked.dealings


async def test_asks_for_both_shares_of_a_silo_across_two_requests(tmp_path: Path) -> None:
    async with insurer_denied(tmp_path, "unmasking") as at:
        request = at.requested(UnmaskRequest, HOSPITAL)
        await at.play("unmasked")
        at.require_sum_of(*REST)
        everybody = at.survivors_of(request.roster, HOSPITAL, *SILOS)
        other = await at.answer_to(INSURER, everybody)
        for silo in REST:
            await at.silos[silo].notes.outcomes(1)  # its shares are delivered, its secrets erased
            await at.ask(silo, everybody)
            await at.refused(silo, "WrongTime", "SurvivorSet does not fit the state")
            await at.ask(silo, UnmaskRequest(roster=request.roster, agreements=(other,)))
            await at.refused(silo, "WrongTime", "UnmaskRequest does not fit the state Resting")
            await at.ask(silo, request)
            await at.refused(silo, "WrongTime", "UnmaskRequest does not fit the state Resting")
            assert len(at.reveals(silo)) == 1


async def test_asks_for_both_shares_of_a_silo_before_and_after_the_agent_was_restarted(tmp_path: Path) -> None:
    """It is killed when its shares are out and it does not know that they arrived: its secrets are still on its
    disk."""
    async with insurer_denied(tmp_path, "unmasking") as at:
        request = at.requested(UnmaskRequest, HOSPITAL)
        victim = at.silos[HOSPITAL]
        at.peer.unheard = lambda answer: isinstance(answer, Reveal)
        first = await at.answer_to(HOSPITAL, request)
        await victim.restart()
        at.peer.unheard = lambda answer: False
        everybody = at.survivors_of(request.roster, HOSPITAL, *SILOS)
        await at.ask(HOSPITAL, everybody)
        await at.refused(HOSPITAL, "WrongTime", "SurvivorSet does not fit the state Revealed")
        other = await at.answer_to(INSURER, everybody)
        await victim.restart()
        await at.ask(HOSPITAL, replace(request, agreements=(*request.agreements, other)))
        says = f"silo {INSURER} signed another survivor set than this silo"
        await at.refused(HOSPITAL, "IntegrityError", says, declined=INTEGRITY)
        assert at.reveals(HOSPITAL) == [first]
    assert not (victim.folder.masking / "attempt").exists(), "it refused for good: nothing is left to ask for"


async def test_asks_for_the_same_shares_again_after_the_agent_was_restarted(tmp_path: Path) -> None:
    """No attack but what an honest coordinator does that was cut off: it gets the same bytes, and the sum comes out."""
    async with insurer_denied(tmp_path, "unmasking") as at:
        at.peer.unheard = lambda answer: isinstance(answer, Reveal)
        first = await at.answer_to(HOSPITAL, at.request(HOSPITAL))
        await at.silos[HOSPITAL].restart()
        at.peer.unheard = lambda answer: False
        await at.play("unmasked")
        at.require_sum_of(*REST)
        assert at.reveals(HOSPITAL) == [first, first]


# --- what was said before ---------------------------------------------------------------------------------------------


async def test_replays_an_old_roster(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "share keys") as at:
        old = at.requested(Roster, HOSPITAL)
        at.open(number=2)
        await at.play("share keys")
        roster = at.requested(Roster, HOSPITAL)
        for attempt in (old.attempt, roster.attempt):
            await at.ask(HOSPITAL, old, attempt=attempt)
            await at.refused(HOSPITAL, "WrongTime", "a roster of .* came for .*: an old or a foreign one")
        relabelled = tuple(replace(member, attempt=roster.attempt) for member in old.members if member.silo != BANK)
        await at.ask(BANK, with_members(roster, roster.member(BANK), *relabelled))
        await at.refused(
            BANK, "IntegrityError", f"the Advertisement of silo {CLINIC} is not signed", declined=INTEGRITY
        )
        at.drop(BANK)
        await at.play("unmasked")
        at.require_sum_of(CLINIC, HOSPITAL, INSURER)


async def test_replays_an_old_unmask_request(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "unmasking") as at:
        old = at.requested(UnmaskRequest, HOSPITAL)
        await at.play("unmasked")
        at.require_sum_of(*SILOS)
        at.key, at.model = replace(at.key, round=2), at.offer(2)
        await at.train()
        at.open()
        await at.play("unmasking")
        request = at.requested(UnmaskRequest, HOSPITAL)
        await at.ask(HOSPITAL, old)
        await at.refused(HOSPITAL, "WrongTime", "an unmask request of another roster")
        relabelled = tuple(
            replace(now, signature=then.signature) for now, then in zip(request.agreements, old.agreements, strict=True)
        )
        await at.ask(BANK, replace(request, agreements=relabelled))
        await at.refused(BANK, "IntegrityError", "the Agreement of silo .* is not signed", declined=INTEGRITY)
        at.drop(BANK)
        await at.play("unmasked")
        at.require_sum_of(*SILOS)


# --- less than was promised -------------------------------------------------------------------------------------------


async def test_lowers_the_threshold(tmp_path: Path) -> None:
    bundle = masked_bundle(aggregation={"threshold": 4}, schedule={"min_silos": 4})
    rules = {HOSPITAL: PolicyRules(min_threshold=4)}
    async with masked_round(tmp_path, "share keys", bundle=bundle, rules=rules) as at:
        roster = at.requested(Roster, HOSPITAL)
        assert roster.parameters.threshold == 3, "as the coordinator chose by itself"
        for silo in SILOS:
            await at.ask(silo, roster)
            await at.refused(silo, "min_threshold", "is 4 by plan small, the roster offers 3", declined=POLICY)
        assert at.peer.masked == {}


async def test_lowers_the_threshold_below_a_majority(tmp_path: Path) -> None:
    """No roster can say that; the stream that carries it is given up, and the attempt goes on as if nothing was
    said."""

    def to_two(order: federation_pb2.Mask) -> None:
        order.roster.parameters.threshold = 2

    async with masked_round(tmp_path, "share keys") as at:
        await at.ask_unsayable(HOSPITAL, at.request(HOSPITAL), to_two)
        await at.refused(HOSPITAL, "MalformedMessage", "threshold 2 for 4 silos: allowed are 3 to 4")
        at.peer.change_notice = lambda silo, notice: notice
        await at.play("unmasked")
        at.require_sum_of(*SILOS)


async def test_lowers_the_number_of_silos_that_have_to_sign_the_survivor_set(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "unmasking") as at:
        request = at.requested(UnmaskRequest, HOSPITAL)
        for silo, signatures in {HOSPITAL: 0, BANK: 1, CLINIC: 2}.items():
            await at.ask(silo, replace(request, agreements=request.agreements[:signatures]))
            says = f"{signatures} silos signed the survivor set, at least 3 must"
            await at.refused(silo, "min_threshold", says, declined=POLICY)


async def test_lowers_the_minimum_cohort(tmp_path: Path) -> None:
    """All members are real and pinned; the plan promised four of them."""
    bundle = masked_bundle(schedule={"min_silos": 4})
    rules = {HOSPITAL: PolicyRules(min_cohort=4)}
    async with attacked(tmp_path, NET, bundle=bundle, rules=rules) as at:
        await at.train()
        at.open(*REST)
        await at.play("share keys")
        for silo in REST:
            await at.ask(silo, at.request(silo))
            await at.refused(silo, "min_cohort", "is 4 by plan small, the roster offers 3", declined=POLICY)
        assert at.peer.masked == {}


async def test_lowers_what_a_cohort_holds_against_and_the_least_sum(tmp_path: Path) -> None:
    bundle = masked_bundle(aggregation={"colluders": 1, "min_survivors": 4}, schedule={"min_silos": 4})
    rules = {HOSPITAL: PolicyRules(colluders=1), BANK: PolicyRules(min_survivors=4)}
    async with attacked(tmp_path, NET, bundle=bundle, rules=rules) as at:
        await at.train()
        at.open(colluders=1, min_survivors=4)
        await at.play("share keys")
        roster = at.requested(Roster, HOSPITAL)
        for silo, rule, least in ((HOSPITAL, "colluders", 0), (BANK, "min_survivors", 3)):
            lower: dict[str, Any] = {rule: least}
            await at.ask(silo, replace(roster, parameters=replace(roster.parameters, **lower)))
            await at.refused(silo, rule, f"is {least + 1} by plan small, the roster offers {least}", declined=POLICY)
        assert isinstance(await at.answer_to(CLINIC, roster), SharedKeys), "as promised it is taken"


async def test_shrinks_the_cohort_to_two(tmp_path: Path) -> None:
    """In the roster, among the dealers, among the survivors: in a sum of two each would be left with the other's
    delta."""

    def to_two(order: federation_pb2.Mask) -> None:
        parameters, members = order.roster.parameters, order.roster.members
        parameters.cohort = parameters.threshold = parameters.min_survivors = parameters.least_sum = 2
        del members[3], members[0]

    async with masked_round(tmp_path, "share keys") as at:
        await at.ask_unsayable(HOSPITAL, at.request(HOSPITAL), to_two)
        await at.refused(HOSPITAL, "MalformedMessage", "secure aggregation needs at least 3")
        at.peer.change_notice = lambda silo, notice: notice
        await at.play("masked input")
        delivery = at.requested(Delivery, HOSPITAL)
        two = replace(delivery, dealings=delivery.dealings[1:3], boxes=delivery.boxes[1:2])
        assert two.dealers == (CLINIC, HOSPITAL)
        await at.ask(HOSPITAL, two)
        await at.refused(
            HOSPITAL, "min_survivors", "2 silos dealt, for a sum to come out at least 3 must", declined=POLICY
        )
        at.drop(HOSPITAL)
        await at.play("consistency check")
        survivors = at.requested(SurvivorSet, BANK)
        for silo, pair in {BANK: (BANK, CLINIC), CLINIC: (CLINIC, INSURER)}.items():
            await at.ask(silo, at.survivors_of(survivors.roster, BANK, *pair))
            await at.refused(silo, "min_survivors", "has 2 silos, at least 3 are needed", declined=POLICY)


# --- one delta, two sums ----------------------------------------------------------------------------------------------


async def test_reuses_an_attempt(tmp_path: Path) -> None:
    async with masked_round(tmp_path, "masked input") as at:
        # One that is under way, under the same id: it stands, and no second keys are made.
        await at.ask(HOSPITAL, None)
        await at.refused(HOSPITAL, "WrongTime", "OpenAttempt does not fit the state Dealt")
        # The same number with another id, while it is under way and after it was over.
        await at.peer.order(Standby(StandbyReason.NOT_IN_COHORT), CLINIC)
        await at.silos[CLINIC].notes.outcomes(1)
        at.open(id=entropy("another attempt"))
        for silo in (BANK, CLINIC):
            await at.ask(silo, None)
            says = "attempt 1 of round 1 was offered after attempt 1: each number is used once"
            await at.refused(silo, "one_sum_per_round", says, declined=POLICY)
        # The next number is none that was used: there the insurer makes other keys.
        first = next(it for name, it in at.peer.answers if name == INSURER and isinstance(it, Advertisement))
        at.open(number=2)
        second = await at.answer_to(INSURER, None)
        assert {first.mask_key, first.box_key}.isdisjoint({second.mask_key, second.box_key})
        await at.ask(INSURER, None, attempt=replace(at.attempt, number=1))
        await at.refused(
            INSURER, "one_sum_per_round", "attempt 1 of round 1 was offered after attempt 2", declined=POLICY
        )


async def test_reuses_a_round(tmp_path: Path) -> None:
    """Silos train in it again, from the same model: to the same deltas."""
    async with masked_round(tmp_path, "unmasked") as at:
        at.require_sum_of(*SILOS)
        at.key = replace(at.key, round=2)
        await at.train()
        at.open()
        await at.play("unmasked")
        at.key = replace(at.key, round=1, attempt=2)
        await at.train()
        at.open(number=2)
        for silo in SILOS:
            await at.ask(silo, None)
            says = "round 1 was offered after round 2: secure aggregation takes no lower round. Where the coordinator came from a backup"
            await at.refused(silo, "one_sum_per_round", says, declined=POLICY)


async def test_declares_an_uploaded_silo_dropped_and_retries_the_round_with_it(tmp_path: Path) -> None:
    """The sum without the insurer came out; one with it, over the same deltas, would show the insurer's."""
    async with insurer_denied(tmp_path, "unmasked") as at:
        at.require_sum_of(*REST)
        says = "round 1 was unmasked with this silo's help: it joins no further attempt of it"
        at.open(number=2)
        for silo in REST:
            await at.ask(silo, None)
            await at.refused(silo, "one_sum_per_round", says, declined=POLICY)
        # The round begins anew, and silos train again; one of them was restarted in between.
        await at.silos[HOSPITAL].restart()
        at.key = replace(at.key, attempt=2)
        await at.train()
        at.open(number=2)
        for silo in REST:
            await at.ask(silo, None)
            await at.refused(silo, "one_sum_per_round", says, declined=POLICY)
        # The insurer was in no sum, and may take part in one: there is nobody to be in it with.
        at.step(await at.answer_to(INSURER, None))
        at.drop(*REST)
        assert at.state.phase == "abandoned"


# --- a disk that is put back ------------------------------------------------------------------------------------------


async def test_restores_the_disk_of_an_agent_from_a_snapshot_and_asks_for_another_sum(tmp_path: Path) -> None:
    """The agent signs a second set, as it cannot know better; the others do not, and one alone opens nothing.

    Such an agent is one of those that the plan's `colluders` counts.
    """
    snapshot = tmp_path / "snapshot"
    async with insurer_denied(tmp_path / "silos", "consistency check") as at:
        victim = at.silos[HOSPITAL]
        await victim.kill()
        victim.snapshot(snapshot)
        await victim.start()
        everybody = at.survivors_of(at.requested(SurvivorSet, HOSPITAL).roster, HOSPITAL, *SILOS)
        await at.play("unmasking")
        request = at.requested(UnmaskRequest, HOSPITAL)
        await at.play("unmasked")
        at.require_sum_of(*REST)

        signed_by = {INSURER: await at.answer_to(INSURER, everybody)}
        for silo in (BANK, CLINIC):
            await at.silos[silo].notes.outcomes(1)
            await at.ask(silo, everybody)
            await at.refused(silo, "WrongTime", "SurvivorSet does not fit the state")
        for agreements, rule, says, reason in (
            ((), "min_threshold", "2 silos signed the survivor set, at least 3 must", POLICY),
            (request.agreements[:2], "IntegrityError", f"silo {BANK} signed another survivor set", INTEGRITY),
        ):
            await victim.kill()
            victim.restore(snapshot)
            await at.ask(HOSPITAL, everybody)
            await victim.start()
            signed_by[HOSPITAL] = await at.answer_of(HOSPITAL)
            assert isinstance(signed_by[HOSPITAL], Agreement)
            await at.ask(HOSPITAL, replace(request, agreements=(*agreements, *map(signed_by.get, (HOSPITAL, INSURER)))))
            await at.refused(HOSPITAL, rule, says, declined=reason)
        assert len(at.reveals(HOSPITAL)) == 1


async def test_restores_the_disk_of_an_agent_from_before_the_round_and_retries_it(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    async with attacked(tmp_path / "silos", NET) as at:
        await at.train()
        victim = at.silos[HOSPITAL]
        await victim.kill()
        victim.snapshot(snapshot)
        await victim.start()
        at.open()
        await at.play("masked input")
        await at.deny(INSURER)
        await at.play("unmasked")
        at.require_sum_of(*REST)

        await victim.kill()
        victim.restore(snapshot)
        await victim.start()
        at.open(number=2)
        for silo in (HOSPITAL, INSURER):
            at.step(await at.answer_to(silo, None))
        for silo in (BANK, CLINIC):
            await at.ask(silo, None)
            await at.refused(silo, "one_sum_per_round", "joins no further attempt", declined=POLICY)
        at.drop(BANK, CLINIC)
        assert at.state.phase == "abandoned", "two are no cohort"


# --- no masks at all --------------------------------------------------------------------------------------------------

PLAIN = small_bundle(elements=ELEMENTS)
MASKS_ONLY = PolicyRules(require_secure_aggregation=True, approved_plans="any")


async def test_asks_for_a_plain_upload_where_the_policy_demands_masks(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET, silos=REST, rules={HOSPITAL: MASKS_ONLY}) as at:
        honest = at.key
        victim = at.silos[HOSPITAL]
        model = at.peer.offer(PLAIN, vector_of(PLAIN.layout, 1))
        at.key = replace(honest, plan=PLAIN.plan.digest)
        await at.peer.order(Prepare(PLAIN.plan.digest), HOSPITAL)
        says = "would have the coordinator see this silo's update"
        await at.refused(HOSPITAL, "require_secure_aggregation", says)
        await at.peer.until(lambda: [ready for _, ready, _ in at.peer.readiness] == [False])
        await at.peer.order(Train(key=at.key, model=model.digest, seconds_left=60.0), HOSPITAL)
        await at.declined(HOSPITAL, POLICY, says)
        assert victim.trainer.trained == []

        # Under a plan with masks no order asks for an upload: to train again is answered with the word that it has
        # trained.
        at.key = honest
        await at.train()
        await at.peer.order(Train(key=at.key, model=at.model.digest, seconds_left=60.0), HOSPITAL)
        await at.peer.until(lambda: at.peer.trained.count((HOSPITAL, at.key, at.model.digest)) == 2)
        at.open()
        await at.play("unmasked")
        at.require_sum_of(*REST)
        assert at.peer.updates == {}


async def test_asks_for_the_plain_upload_of_an_update_from_before_the_policy_demanded_masks(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET, silos=(HOSPITAL, BANK, CLINIC)) as at:
        victim = at.silos[HOSPITAL]
        model = at.peer.offer(PLAIN, vector_of(PLAIN.layout, 1))
        at.key = replace(at.key, plan=PLAIN.plan.digest)
        at.peer.deaf = True
        await at.peer.order(Train(key=at.key, model=model.digest, seconds_left=60.0), HOSPITAL)
        await victim.notes.until(lambda: bool(victim.notes.of("unreachable")))
        await victim.kill()
        at.peer.deaf = False
        assert victim.trainer.trained == [at.key]
        victim.rules = MASKS_ONLY
        await victim.start()
        await at.refused(HOSPITAL, "require_secure_aggregation", "would have the coordinator see", declined=POLICY)
        assert at.peer.updates == {}
