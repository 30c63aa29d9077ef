"""The release groups that a silo holds: what passes by itself, what waits for its people, and what no coordinator
brings it to."""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from lorica.simulation import disk
from lorica_security.errors import ConfigurationError, LoricaError, PolicyRefusal, StateError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.identity.succession import Succession, succession_statement
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    Promise,
    SignedLink,
    check_successor,
    first_link,
    missing_signatures,
    signature_of,
    successor,
)
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain, Taken
from silo_agent.edges.groups.release_groups import ReleaseGroups, group_chain
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.codecs.groups_codec import GroupsOffer, KnownIdentity
from tests.support.federation_peer import TestNet
from tests.support.secagg_federation import FEDERATION, identities, identity_key, silo_names

NAMES = silo_names(9)
OWN = NAMES[0]
FILE = "release-groups.json"
EVERYBODY = first_link(FEDERATION, Partition.of([NAMES]))
THIRDS = successor(EVERYBODY, Partition.of([NAMES[:3], NAMES[3:6], NAMES[6:]]))
OTHER_THIRDS = successor(EVERYBODY, Partition.of([NAMES[::3], NAMES[1::3], NAMES[2::3]]))


def chain_in(
    folder: Path,
    *,
    own: SiloName = OWN,
    pinned: Iterable[SiloName] = NAMES,
    colluders: int = 0,
    smallest_group: int = 3,
    federation: FederationName = FEDERATION,
    rotated: Iterable[SiloName] = (),
) -> GroupChain:
    """Those `rotated`, this silo among them, have a later key, and the chain knows that they had the other one."""
    new = {name: later_key(name).public_key() for name in rotated}
    keys = {name: key for name, key in (identities(pinned) | new).items() if name != own}
    return GroupChain(
        folder / FILE,
        federation=federation,
        silo=own,
        own_key=new.get(own, identity_key(own).public_key()),
        pinned=lambda: keys,
        earlier=lambda: {name: (identity_key(name).public_key(),) for name in new},
        smallest_group=max(smallest_group, colluders + 2),
        colluders=colluders,
        seal=Seal(later_key(own) if own in new else identity_key(own)),
    )


def later_key(name: SiloName) -> Ed25519PrivateKey:
    return identity_key(f"a later key of {name}")


def signed(link: Link, by: Iterable[SiloName] | None = None) -> SignedLink:
    who = link.members if by is None else by
    return SignedLink(
        link=link, signatures=tuple((name, signature_of(link, identity_key(name))) for name in sorted(who))
    )


def offer(*links: SignedLink, proposed: Link | None = None) -> GroupsOffer:
    return GroupsOffer(links=links, proposed=None if proposed is None else SignedLink(link=proposed), identities=())


def holding(folder: Path, *links: Link, own: SiloName = OWN) -> GroupChain:
    """After its people approved whatever came."""
    chain = chain_in(folder, own=own)
    before: list[SignedLink] = []
    for link in links:
        before.append(signed(link, NAMES))
        if chain.take(offer(*before)).waits is not None:
            chain.approve(link.digest.hex())
            chain.take(offer(*before))
    assert chain.head == links[-1]
    return chain


# --- what passes by itself --------------------------------------------------------------------------------------------


def test_nothing_is_held_at_first(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    assert chain.head is None
    assert chain.standing().proposed is None
    assert list(tmp_path.iterdir()) == []


def test_a_federation_that_never_masked_leaves_no_trace_of_release_groups(tmp_path: Path) -> None:
    """Each agent asks for them; a silo whose folder says that it may have masked does not run without rules."""
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    credentials = TestNet.create().credentials("127.0.0.1:1", OWN)
    before = {path for path in folder.root.rglob("*") if path.is_file()}
    chain = group_chain(folder, credentials, SiloPolicy(rules=PolicyRules(), silo=OWN))
    for _ in range(2):
        assert chain.take(offer()) == Taken()
    assert {path for path in folder.root.rglob("*") if path.is_file()} == before


def test_one_group_of_all_that_people_pinned_is_signed_and_taken_without_a_word(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    assert chain.take(offer(proposed=EVERYBODY)) == Taken(to_sign=(EVERYBODY,))
    assert chain.head is None, "it lacks the others' signatures"
    assert chain.take(offer(signed(EVERYBODY))) == Taken(links=(EVERYBODY,))
    assert chain_in(tmp_path).head == EVERYBODY
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_signature_that_got_lost_is_given_again(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    assert chain.take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)
    assert chain_in(tmp_path).take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)


def test_a_successor_that_needed_no_signature_of_this_silo_is_signed_when_it_is_taken(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    chain.take(offer(proposed=THIRDS))
    chain.approve(THIRDS.digest.hex())
    others = signed(THIRDS, NAMES[1:])
    assert chain.take(offer(signed(EVERYBODY), others)) == Taken(links=(THIRDS,), to_sign=(THIRDS,))


# --- what waits for people --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("held", "proposed", "pinned", "says"),
    [
        ((), first_link(FEDERATION, Partition.of([NAMES[:3]])), NAMES, "somebody else chose"),
        ((), EVERYBODY, NAMES[:-1], "have no key that its people pinned"),
        ((EVERYBODY,), THIRDS, NAMES, "silo-00, silo-01, silo-02 alone"),
        ((EVERYBODY, THIRDS), successor(THIRDS, OTHER_THIRDS.partition), NAMES, "silo-00 alone"),
        ((EVERYBODY,), successor(EVERYBODY, Partition.of([NAMES[:-1]])), NAMES, "subtracted, are of"),
    ],
    ids=["a division of somebody's choice", "somebody made up", "a split", "thirds of other thirds", "one leaves"],
)
def test_what_may_be_learnt_is_said_and_neither_signed_nor_taken_before_people_approve(
    tmp_path: Path, held: tuple[Link, ...], proposed: Link, pinned: tuple[SiloName, ...], says: str
) -> None:
    if held:
        holding(tmp_path, *held)
    chain = chain_in(tmp_path, pinned=pinned)
    head = chain.head
    known = tuple(signed(link, NAMES) for link in held)
    taken = chain.take(offer(*known, proposed=proposed))
    assert taken.to_sign == ()
    assert says in (taken.waits or "")
    if set(pinned) == set(NAMES):
        standing = chain.take(offer(*known, signed(proposed, NAMES)))
        assert (standing.links, standing.to_sign) == ((), ())
        assert says in (standing.waits or "")
    assert chain.head == head
    assert says in (chain.standing().objection or "")
    link, told = chain.approve(proposed.digest.hex())
    assert link == proposed
    assert says in told
    assert chain_in(tmp_path, pinned=pinned).take(offer(*known, proposed=proposed)).to_sign == (proposed,)


def test_only_sets_that_people_approved_may_be_small(tmp_path: Path) -> None:
    chain = holding(tmp_path, first_link(FEDERATION, Partition.of([NAMES[:2], NAMES[2:]])))
    assert chain.approved_groups == {NAMES[:2]}
    assert chain.approved_atoms == {NAMES[:2]}


def test_sets_that_people_approved_stay_approved_where_policy_rises_to_what_the_link_promises(tmp_path: Path) -> None:
    link = first_link(FEDERATION, Partition.of([NAMES[:3], NAMES[3:]]), Promise(smallest_group=4))
    chain = chain_in(tmp_path)
    chain.take(offer(proposed=link))
    assert "fewer than 4 silos" in chain.approve(link.digest.hex())[1]
    chain.take(offer(signed(link)))
    assert chain.approved_groups == {NAMES[:3]}
    assert chain_in(tmp_path, smallest_group=4).standing().unapproved == ()


def test_a_proposal_beyond_what_waits_for_people_keeps_nothing_from_them(tmp_path: Path) -> None:
    """The others are further: what follows the link that they hold is for later."""
    chain = holding(tmp_path, EVERYBODY)
    beyond = successor(THIRDS, EVERYBODY.partition)
    taken = chain.take(offer(signed(EVERYBODY), signed(THIRDS, NAMES[1:]), proposed=beyond))
    assert (taken.links, taken.to_sign) == ((), ())
    assert "silo-00, silo-01, silo-02 alone" in (taken.waits or "")
    proposed = chain.standing().proposed
    assert proposed is not None
    assert proposed.link == THIRDS


@pytest.mark.parametrize(
    "digest",
    ["", EVERYBODY.digest.hex()[:-1], "ff" * 32, THIRDS.digest.hex()],
    ids=["none", "short", "another", "not offered"],
)
def test_people_approve_what_was_proposed_alone(tmp_path: Path, digest: str) -> None:
    chain = chain_in(tmp_path)
    chain.take(offer(proposed=EVERYBODY))
    with pytest.raises(StateError, match="silo-agent groups show"):
        chain.approve(digest)


# --- one successor ----------------------------------------------------------------------------------------------------


def test_a_second_successor_is_refused_until_people_take_their_signature_back(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    known = signed(EVERYBODY)
    for link in (THIRDS, OTHER_THIRDS):
        chain.take(offer(known, proposed=link))
        chain.approve(link.digest.hex())
        if link is THIRDS:
            assert chain.take(offer(known, proposed=link)).to_sign == (THIRDS,)
    digest = THIRDS.digest.hex()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(PolicyRefusal, match="groups withdraw"):
        chain_in(tmp_path).take(offer(known, proposed=OTHER_THIRDS))
    assert (tmp_path / FILE).read_bytes() == before
    assert chain.withdraw(digest) == 2, "nobody proposes it any more, and it still keeps others from being signed"
    with pytest.raises(StateError, match="were not signed to follow"):
        chain.withdraw(digest)
    assert chain.take(offer(known, proposed=OTHER_THIRDS)).to_sign == (OTHER_THIRDS,)


def test_what_was_taken_back_is_signed_again_by_peoples_word_alone(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    chain.take(offer(signed(EVERYBODY), proposed=THIRDS))
    chain.approve(THIRDS.digest.hex())
    assert chain.take(offer(signed(EVERYBODY), proposed=THIRDS)).to_sign == (THIRDS,)
    chain.withdraw(THIRDS.digest.hex())
    again = chain.take(offer(signed(EVERYBODY), proposed=THIRDS))
    assert again.to_sign == ()
    assert again.waits is not None
    standing = chain.take(offer(signed(EVERYBODY), signed(THIRDS, NAMES[1:])))
    assert (standing.links, standing.to_sign) == ((), ())


def test_where_the_others_went_another_way_than_this_silo_signed_it_goes_along_and_signs_nothing(
    tmp_path: Path,
) -> None:
    chain = holding(tmp_path, EVERYBODY)
    for link in (THIRDS, OTHER_THIRDS):
        chain.take(offer(signed(EVERYBODY), signed(link, NAMES[1:])))
        chain.approve(link.digest.hex())
        if link is THIRDS:
            assert chain.take(offer(signed(EVERYBODY), proposed=link)).to_sign == (THIRDS,)
    taken = chain.take(offer(signed(EVERYBODY), signed(OTHER_THIRDS, NAMES[1:])))
    assert taken == Taken(links=(OTHER_THIRDS,))
    assert chain.head == OTHER_THIRDS


def test_groups_that_this_silo_is_in_neither_before_nor_after_are_not_signed(tmp_path: Path) -> None:
    elsewhere = first_link(FEDERATION, Partition.of([NAMES[3:]]))
    assert chain_in(tmp_path).take(offer(proposed=elsewhere)) == Taken()


def test_only_what_was_signed_is_taken_back_and_an_approval_stays_else(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    chain.take(offer(signed(EVERYBODY), proposed=THIRDS))
    chain.approve(THIRDS.digest.hex())
    for digest in (THIRDS.digest.hex(), OTHER_THIRDS.digest.hex()):
        with pytest.raises(StateError, match="were not signed"):
            chain.withdraw(digest)
    assert chain.take(offer(signed(EVERYBODY), proposed=THIRDS)).to_sign == (THIRDS,)


def test_a_signature_under_groups_that_stand_is_not_taken_back(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    assert chain.take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)
    assert chain.take(offer(signed(EVERYBODY))).links == (EVERYBODY,)
    with pytest.raises(StateError, match="stand here already"):
        chain.withdraw(EVERYBODY.digest.hex())


# --- what a coordinator may try ---------------------------------------------------------------------------------------


def forked() -> Link:
    return successor(first_link(FEDERATION, Partition.of([NAMES[:5], NAMES[5:]])), THIRDS.partition)


def with_other_atoms() -> Link:
    coarse = EVERYBODY.atoms
    return Link(federation=FEDERATION, number=2, previous=EVERYBODY.digest, partition=THIRDS.partition, atoms=coarse)


@pytest.mark.parametrize(
    ("links", "says"),
    [
        ((signed(EVERYBODY), signed(THIRDS, NAMES[:4])), "lack 1 signatures"),
        ((signed(EVERYBODY), SignedLink(link=THIRDS)), "lack 5 signatures"),
        ((signed(EVERYBODY), signed(forked(), NAMES)), "do not follow"),
        ((signed(EVERYBODY), signed(with_other_atoms(), NAMES)), "do not follow"),
        ((signed(first_link(FEDERATION, THIRDS.partition), NAMES),), "somebody signed two"),
        ((signed(EVERYBODY), signed(successor(THIRDS, EVERYBODY.partition), NAMES)), "do not follow"),
    ],
    ids=["half sign", "nobody signs", "another chain", "other atoms", "another first link", "a link is left out"],
)
def test_links_that_do_not_follow_or_lack_signatures_are_refused_and_nothing_is_kept(
    tmp_path: Path, links: tuple[SignedLink, ...], says: str
) -> None:
    chain = holding(tmp_path, EVERYBODY)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(PolicyRefusal, match=says) as refused:
        chain.take(offer(*links))
    assert refused.value.rule == "release_groups"
    assert (tmp_path / FILE).read_bytes() == before
    assert chain.head == EVERYBODY


def test_attack_a_proposal_with_other_atoms_is_neither_kept_nor_signed(tmp_path: Path) -> None:
    """With the atoms of before it would tell nobody apart, and pass without a word of people."""
    chain = holding(tmp_path, EVERYBODY)
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(PolicyRefusal, match="do not follow"):
        chain.take(offer(signed(EVERYBODY), proposed=with_other_atoms()))
    assert (tmp_path / FILE).read_bytes() == before
    assert chain.standing().proposed is None


def test_attack_a_newcomer_is_shown_links_that_do_not_follow_each_other(tmp_path: Path) -> None:
    """All of them are from before it came."""
    first = first_link(FEDERATION, Partition.of([NAMES[3:]]))
    second = successor(first_link(FEDERATION, Partition.of([NAMES[3:6], NAMES[6:]])), Partition.of([NAMES[3:]]))
    third = successor(second, Partition.of([NAMES[:3], NAMES[3:]]))
    with pytest.raises(PolicyRefusal, match="do not follow"):
        chain_in(tmp_path).take(offer(*(signed(link, NAMES) for link in (first, second, third))))


def test_signatures_of_who_is_not_pinned_and_of_other_keys_count_for_nothing(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    false = tuple((name, signature_of(EVERYBODY, identity_key("somebody"))) for name in NAMES)
    with pytest.raises(PolicyRefusal, match="lack 9 signatures"):
        chain.take(offer(SignedLink(link=EVERYBODY, signatures=false[1:])))
    with pytest.raises(PolicyRefusal, match="lack 8 signatures of silos whose keys"):  # its own may be an earlier key's
        chain.take(offer(SignedLink(link=EVERYBODY, signatures=false)))
    assert chain.head is None


@pytest.mark.parametrize("own", [OWN, NAMES[3]])
def test_all_count_signatures_with_the_number_that_the_predecessor_says(tmp_path: Path, own: SiloName) -> None:
    """A silo that asked for more than others in its policy was put apart by those who counted with theirs."""
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=2, smallest_group=4))
    link = successor(first, Partition.of([NAMES[:4], NAMES[4:]]))
    chain = holding(tmp_path, first, own=own)  # its own policy says 0
    chain.take(offer(proposed=link))
    chain.approve(link.digest.hex())
    with pytest.raises(PolicyRefusal, match="lack 1 signatures"):
        chain.take(offer(signed(first), signed(link, NAMES[:5])))
    assert chain.take(offer(signed(first), signed(link, NAMES[:6]))).links == (link,)


# --- a silo that lost its folder -------------------------------------------------------------------------------------

LEFT = NAMES[-1]
WITHOUT_LEFT = successor(EVERYBODY, Partition.of([NAMES[:-1]]))


def before_it_was_lost(link: Link, by: Iterable[SiloName] = NAMES) -> SignedLink:
    """Signed by this silo, too, with the key that it had then."""
    earlier = signature_of(link, identity_key("an earlier key"))
    return signed(link, set(by) - {OWN}).signed_by(OWN, earlier)


def test_a_silo_that_lost_its_folder_takes_the_link_whose_digest_its_people_were_told(tmp_path: Path) -> None:
    """It can check neither its own earlier signature nor that of a silo that left."""
    chain = chain_in(tmp_path, pinned=NAMES[:-1])
    shown = offer(before_it_was_lost(EVERYBODY), before_it_was_lost(WITHOUT_LEFT, NAMES[:-1]))
    taken = chain.take(shown)
    assert (taken.links, taken.to_sign, chain.head) == ((), (), None)
    assert f"have the people of {', '.join(NAMES[1:-1])} read out the digest" in (taken.waits or "")
    assert "somebody else chose" in (taken.waits or "")
    link, told = chain.approve(WITHOUT_LEFT.digest.hex())
    assert link == WITHOUT_LEFT
    assert "read out the digest" in told, "the audit log has it"
    assert chain.take(shown) == Taken(links=(WITHOUT_LEFT,), to_sign=(WITHOUT_LEFT,))
    again = chain_in(tmp_path, pinned=NAMES[:-1])
    assert again.head == WITHOUT_LEFT
    both = successor(WITHOUT_LEFT, Partition.of([NAMES[:4], NAMES[4:-1]]))
    assert "silo-00, silo-01, silo-02, silo-03 alone" in (again.take(offer(proposed=both)).waits or "")


def test_a_link_that_was_approved_is_taken_also_where_another_followed_meanwhile(tmp_path: Path) -> None:
    chain = chain_in(tmp_path)
    chain.take(offer(before_it_was_lost(EVERYBODY)))
    chain.approve(EVERYBODY.digest.hex())
    again = successor(EVERYBODY, EVERYBODY.partition)
    taken = chain.take(offer(before_it_was_lost(EVERYBODY), before_it_was_lost(again)))
    assert taken.links == (EVERYBODY, again)


def test_a_silo_that_the_others_left_out_meanwhile_holds_nothing_until_they_take_it_in(tmp_path: Path) -> None:
    without = successor(EVERYBODY, Partition.of([NAMES[1:]]))
    chain = chain_in(tmp_path)
    links = before_it_was_lost(EVERYBODY), signed(without, NAMES[1:])
    assert chain.take(offer(*links)) == Taken()
    within = successor(without, EVERYBODY.partition)
    shown = offer(*links, signed(within, NAMES[1:]))
    assert "read out the digest" in (chain.take(shown).waits or "")
    chain.approve(within.digest.hex())
    assert chain.take(shown) == Taken(links=(within,), to_sign=(within,))


@pytest.mark.parametrize(
    ("links", "pinned", "says"),
    [
        ((before_it_was_lost(EVERYBODY, NAMES[:-1]),), NAMES, "lack 1 signatures of silos whose keys"),
        ((before_it_was_lost(EVERYBODY), before_it_was_lost(THIRDS, NAMES[:5])), NAMES, "lack 1 signatures of silos"),
        ((before_it_was_lost(EVERYBODY), before_it_was_lost(forked(), NAMES)), NAMES, "do not follow"),
        ((before_it_was_lost(WITHOUT_LEFT),), NAMES, "do not follow"),
        ((before_it_was_lost(EVERYBODY),), (), "lack 1 signatures of silos whose keys .* these are none"),
    ],
    ids=["one did not sign", "half signed", "another chain", "the first is left out", "nobody is pinned"],
)
def test_attack_a_silo_that_lost_its_folder_is_shown_links_that_do_not_stand(
    tmp_path: Path, links: tuple[SignedLink, ...], pinned: tuple[SiloName, ...], says: str
) -> None:
    """They do not come before its people, who could approve them."""
    chain = chain_in(tmp_path, pinned=pinned)
    with pytest.raises(PolicyRefusal, match=says):
        chain.take(offer(*links))
    assert chain.standing().proposed is None
    assert list(tmp_path.iterdir()) == []


def test_attack_signatures_that_one_colluder_gave_twice_make_no_link_stand_for_who_lost_its_folder(
    tmp_path: Path,
) -> None:
    """It counts as all others do, with the number that the predecessor says."""
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=2, smallest_group=4))
    link = successor(first, Partition.of([NAMES[:4], NAMES[4:]]))
    chain = chain_in(tmp_path)
    with pytest.raises(PolicyRefusal, match="lack 1 signatures of silos whose keys"):
        chain.take(offer(before_it_was_lost(first), before_it_was_lost(link, NAMES[:6])))
    shown = offer(before_it_was_lost(first), before_it_was_lost(link, NAMES[:7]))
    assert "read out the digest" in (chain.take(shown).waits or "")


def test_attack_newcomers_sign_in_the_place_of_those_before_for_who_lost_its_folder(tmp_path: Path) -> None:
    first = first_link(FEDERATION, Partition.of([NAMES[:5]]))
    link = successor(first, Partition.of([NAMES[:5], NAMES[5:]]))
    chain = chain_in(tmp_path)
    with pytest.raises(PolicyRefusal, match="lack 2 signatures of silos whose keys"):
        chain.take(offer(before_it_was_lost(first, NAMES[:5]), before_it_was_lost(link, NAMES[4:])))


def test_attack_who_lost_its_folder_takes_no_link_that_promises_less_than_its_policy(tmp_path: Path) -> None:
    """Neither before its people approved it nor after, where policy rose since."""
    shown = offer(before_it_was_lost(EVERYBODY))
    chain_in(tmp_path).take(shown)
    chain_in(tmp_path).approve(EVERYBODY.digest.hex())
    (anew := tmp_path / "nobody approved").mkdir()
    for folder in (tmp_path, anew):
        chain = chain_in(folder, colluders=1)
        with pytest.raises(PolicyRefusal, match="colluders 0 instead of 1"):
            chain.take(shown)
        assert chain.head is None


def test_of_two_links_that_people_approved_who_lost_its_folder_takes_the_newer(tmp_path: Path) -> None:
    """The coordinator went back in between, and they approved the older one, too."""
    chain = chain_in(tmp_path, pinned=NAMES[:-1])
    first, both = before_it_was_lost(EVERYBODY), before_it_was_lost(WITHOUT_LEFT, NAMES[:-1])
    for shown, link in ((offer(first, both), WITHOUT_LEFT), (offer(first), EVERYBODY)):
        chain.take(shown)
        chain.approve(link.digest.hex())
    assert chain.take(offer(first, both)) == Taken(links=(WITHOUT_LEFT,), to_sign=(WITHOUT_LEFT,))


def test_attack_a_signature_in_its_name_opens_no_short_way_to_a_silo_that_has_signed(tmp_path: Path) -> None:
    """It knows what it signed, so it did not lose its folder: what lacks signatures it never takes, whatever people
    approved."""
    chain = chain_in(tmp_path, pinned=NAMES[:-1])
    chain.take(offer(proposed=EVERYBODY))
    chain.approve(EVERYBODY.digest.hex())
    assert chain.take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)
    with pytest.raises(PolicyRefusal, match="lack 2 signatures that this silo can check"):
        chain.take(offer(before_it_was_lost(EVERYBODY)))
    assert chain.head is None


def test_attack_a_silo_that_holds_groups_is_not_taken_for_one_that_lost_them(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    with pytest.raises(PolicyRefusal, match="lack 1 signatures that this silo can check"):
        chain.take(offer(before_it_was_lost(EVERYBODY), before_it_was_lost(THIRDS, NAMES[:5])))


def test_a_silo_that_signed_after_it_lost_its_folder_is_told_to_withdraw_that(tmp_path: Path) -> None:
    """As first groups somebody showed it what the others never took."""
    chain = chain_in(tmp_path)
    assert chain.take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)
    other = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    shown = offer(before_it_was_lost(other))
    with pytest.raises(PolicyRefusal, match=rf"ask the people .*`silo-agent groups withdraw {EVERYBODY.digest.hex()}"):
        chain.take(shown)
    chain.withdraw(EVERYBODY.digest.hex())
    assert "read out the digest" in (chain.take(shown).waits or "")
    chain.approve(other.digest.hex())
    assert chain.take(shown) == Taken(links=(other,), to_sign=(other,))


# --- a silo that was away, while others had other keys -------------------------------------------------------------

FOUR = Partition.of([NAMES[:4]])
FIRST = first_link(FEDERATION, FOUR, Promise(colluders=1))
SECOND = successor(FIRST, Partition.of([NAMES[:4], NAMES[4:7]]))
THIRD = successor(SECOND, FOUR)
ROTATES = NAMES[3]


def anew(link: SignedLink, silos: Iterable[SiloName]) -> SignedLink:
    for name in silos:
        link = link.signed_by(name, signature_of(link.link, later_key(name)))
    return link


@pytest.mark.parametrize("gone", [False, True], ids=["signs the newest again", "signs nothing any more"])
def test_a_silo_that_was_away_goes_along_though_a_signer_has_another_key(tmp_path: Path, gone: bool) -> None:
    """What others went on from nobody signs again, and three of four have to have signed it."""
    holding(tmp_path, FIRST)
    chain = chain_in(tmp_path, colluders=1, rotated=[ROTATES])
    newest = signed(THIRD, set(NAMES[1:7]) - {ROTATES})
    links = signed(FIRST), signed(SECOND, NAMES[1:4]), newest if gone else anew(newest, [ROTATES])
    assert chain.take(offer(*links)).links == (SECOND, THIRD)


def test_a_silo_that_was_away_takes_first_groups_that_it_signed_with_an_earlier_key(tmp_path: Path) -> None:
    assert chain_in(tmp_path).take(offer(proposed=EVERYBODY)).to_sign == (EVERYBODY,)
    seal_anew(tmp_path)
    chain = chain_in(tmp_path, rotated=[OWN])
    assert chain.take(offer(signed(EVERYBODY))) == Taken(links=(EVERYBODY,), to_sign=(EVERYBODY,))


def seal_anew(folder: Path) -> None:
    """As a succession of this silo's key leaves its file."""
    raw = unsealed((folder / FILE).read_bytes())
    (folder / FILE).write_bytes(Seal(later_key(OWN)).sealed(FILE, raw))


def test_a_silo_that_comes_in_late_goes_along_though_it_never_knew_the_keys_of_then(tmp_path: Path) -> None:
    """Who signed what followed holds what it followed."""
    chain = chain_in(tmp_path, own=NAMES[4], pinned=set(NAMES) - {ROTATES})
    links = signed(FIRST), signed(SECOND, NAMES[1:4]), signed(THIRD, NAMES[:7])
    with pytest.raises(PolicyRefusal, match=f"lack 1 signatures that this silo can check, of {NAMES[0]}, {ROTATES}"):
        chain.take(offer(*links[:2]))
    assert "somebody else chose" in (chain.take(offer(*links)).waits or "")
    chain.approve(SECOND.digest.hex())
    assert chain.take(offer(*links)).links == (SECOND, THIRD)


FORK = successor(FIRST, Partition.of([NAMES[:4], NAMES[5:8]]))


@pytest.mark.parametrize(
    "after",
    [
        (),
        (signed(successor(FORK, FOUR), NAMES[1:2]),),
        (signed(successor(FORK, FOUR), NAMES[2:4]),),
        (anew(signed(THIRD, NAMES[1:2]), NAMES[2:4]),),
    ],
    ids=["nobody", "one that colludes", "by keys that were given up", "what is of another chain"],
)
def test_attack_keys_that_were_given_up_sign_a_link_that_nobody_holds(
    tmp_path: Path, after: tuple[SignedLink, ...]
) -> None:
    holding(tmp_path, FIRST)
    chain = chain_in(tmp_path, colluders=1, rotated=NAMES[2:4])
    with pytest.raises(PolicyRefusal, match=r"lack [12] signatures that this silo can check"):
        chain.take(offer(signed(FIRST), signed(FORK, NAMES[1:4]), *after))
    assert chain.head == FIRST


@pytest.mark.parametrize("people", [False, True], ids=["by a statement", "by people, after its folder was lost"])
async def test_an_agent_that_was_away_takes_what_a_signer_with_another_key_signed(tmp_path: Path, people: bool) -> None:
    """Two changes, then a signer of the first of them has another key."""
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    own = TestNet.create().credentials("127.0.0.1:1", OWN)
    store = trust_store(folder, own, first_use=False)
    for name in NAMES[1:]:
        store.add(name, identity_key(name).public_key())
    keys = {name: identity_key(name) for name in NAMES} | {OWN: own.identity_key}

    def by(link: Link, silos: Iterable[SiloName]) -> SignedLink:
        return SignedLink(link=link, signatures=tuple((it, signature_of(link, keys[it])) for it in sorted(silos)))

    first = first_link(own.federation, FOUR, Promise(colluders=1))
    second = successor(first, SECOND.partition)
    third = successor(second, THIRD.partition)
    chain = group_chain(folder, own, SiloPolicy(rules=PolicyRules(colluders=1), silo=OWN))
    chain.take(offer(by(first, NAMES[:4])))
    chain.approve(first.digest.hex())
    chain.take(offer(by(first, NAMES[:4])))
    links = [by(first, NAMES[:4]), by(second, NAMES[1:4])]
    old, new = keys[ROTATES], later_key(ROTATES)
    keys[ROTATES] = new
    statement = succession_statement(
        old, identity=Identity(own.federation, Role.SILO, ROTATES), new_key=new.public_key()
    )
    step = Succession(predecessor=old.public_key(), successor=new.public_key(), statement=statement)
    shown = GroupsOffer(
        links=(*links, by(third, NAMES[1:7])),
        proposed=None,
        identities=(KnownIdentity(silo=ROTATES, key=new.public_key(), successions=() if people else (step,)),),
    )
    if people:
        store.remove(ROTATES)
        store.add(ROTATES, new.public_key())

    class Client:
        async def fetch_groups(self, after: int, *, held: Sequence[SignedLink] = ()) -> GroupsOffer:
            return shown

        async def sign_groups(self, link: bytes, signature: bytes) -> None:
            assert link == third.digest

    await ReleaseGroups(chain, store, own, client=Client()).sync()
    assert chain.head == third


def test_attack_signatures_of_silos_that_have_no_say_leave_the_room_to_earlier_links(tmp_path: Path) -> None:
    chain = holding(tmp_path, EVERYBODY)
    strangers = tuple((SiloName(f"stranger-{number:04}-{'x' * 40}"), bytes(64)) for number in range(2_500))
    again = successor(EVERYBODY, EVERYBODY.partition)
    third = successor(again, EVERYBODY.partition)
    links = signed(EVERYBODY), signed(again), signed(third)
    padded = SignedLink(link=again, signatures=tuple(sorted((*links[1].signatures, *strangers))))
    chain.take(offer(links[0], padded, links[2]))
    assert chain.kept() == links


# --- what a link promises ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"colluders": 1}, "colluders 0 instead of 1"),
        ({"smallest_group": 5}, "smallest_group 3 instead of 5"),
        ({"colluders": 2}, "colluders 0 instead of 2, smallest_group 3 instead of 4"),
    ],
    ids=str,
)
def test_a_link_that_promises_less_than_policy_is_refused_and_waits_for_nobody(
    tmp_path: Path, policy: dict[str, int], says: str
) -> None:
    chain = chain_in(tmp_path, **policy)
    taken = chain.take(offer(proposed=EVERYBODY))
    assert (taken.to_sign, taken.waits) == ((), None)
    assert says in (taken.refused or "")
    assert "coordinator groups propose" in (taken.refused or "")
    assert chain.standing().proposed is None, "nobody is asked to allow it"
    with pytest.raises(PolicyRefusal, match=says) as refused:
        chain.take(offer(signed(EVERYBODY)))
    assert refused.value.rule == "release_groups"
    assert chain.head is None


def test_who_leaves_has_no_part_in_a_link_that_promises_less_than_its_policy(tmp_path: Path) -> None:
    first = first_link(FEDERATION, Partition.of([NAMES[:3], NAMES[3:]]), Promise(colluders=1))
    chain = chain_in(tmp_path, colluders=1)
    chain.take(offer(proposed=first))
    chain.approve(first.digest.hex())
    assert chain.take(offer(signed(first))).links == (first,)
    less = successor(first, Partition.of([NAMES[3:]]), Promise())
    taken = chain.take(offer(signed(first), proposed=less))
    assert (taken.to_sign, taken.waits) == ((), None)
    assert "colluders 0 instead of 1" in (taken.refused or "")
    with pytest.raises(PolicyRefusal, match="colluders 0 instead of 1"):
        chain.take(offer(signed(first), signed(less, NAMES)))


def test_a_proposal_that_promises_too_little_keeps_no_link_before_it_away(tmp_path: Path) -> None:
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    less = successor(first, first.partition, Promise())
    taken = chain_in(tmp_path, colluders=1).take(offer(signed(first), proposed=less))
    assert (taken.links, taken.to_sign) == ((first,), ())
    assert "colluders 0 instead of 1" in (taken.refused or "")


def test_attack_a_promise_that_only_nearly_everybody_can_take_back_passes_nobodys_people_by(tmp_path: Path) -> None:
    """Whoever proposed it could have made the next change hang on a single silo."""
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    chain = holding(tmp_path, first)
    more = successor(first, first.partition, Promise(colluders=6, smallest_group=8))
    waits = chain.take(offer(signed(first), proposed=more)).waits or ""
    assert "colluders 6 where 1 would do" in waits
    assert chain.take(offer(signed(first), signed(more))) == Taken(waits=waits), "also where all others signed"
    assert chain_in(tmp_path, colluders=6).take(offer(signed(first), proposed=more)).to_sign == (more,), (
        "policy says it"
    )
    chain = holding(tmp_path, first)
    chain.take(offer(signed(first), proposed=more))
    chain.approve(more.digest.hex())
    assert chain.take(offer(signed(first), proposed=more)).to_sign == (more,)


@pytest.mark.parametrize(("silos", "colluders"), [(9, 7), (9, 9), (3, 1), (2, 0)])
def test_attack_a_promise_that_nothing_could_follow_is_not_for_people_to_allow(
    tmp_path: Path, silos: int, colluders: int
) -> None:
    promise = Promise(colluders=colluders, smallest_group=max(3, colluders + 2))
    first = first_link(FEDERATION, Partition.of([NAMES[:silos]]))
    chain = chain_in(tmp_path, pinned=NAMES[:silos])
    bad = first_link(FEDERATION, first.partition, promise)
    for previous, link in ((None, bad), (first, successor(first, first.partition, promise))):
        if previous is not None and silos < 3:
            continue
        shown = () if previous is None else (signed(previous),)
        if previous is not None:
            chain.take(offer(*shown))
        taken = chain.take(offer(*shown, proposed=link))
        assert (taken.links, taken.to_sign, taken.waits) == ((), (), None)
        assert "Propose groups of at least 3" in (taken.refused or "") or "or with" in (taken.refused or "")
        with pytest.raises(StateError, match="are proposed"):
            chain.approve(link.digest.hex())
        with pytest.raises(PolicyRefusal, match=r"one silo that is gone|one that is gone") as refused:
            chain.take(offer(*shown, signed(link)))
        assert refused.value.rule == "release_groups"
        assert chain.head == previous


def test_a_proposal_that_policy_outgrew_is_neither_approved_nor_signed(tmp_path: Path) -> None:
    """It lies in the file from before, and the coordinator still offers it."""
    chain_in(tmp_path).take(offer(proposed=EVERYBODY))
    chain = chain_in(tmp_path, colluders=1)
    with pytest.raises(PolicyRefusal, match="colluders 0 instead of 1"):
        chain.approve(EVERYBODY.digest.hex())
    taken = chain.take(offer(proposed=EVERYBODY))
    assert taken.to_sign == ()
    assert "colluders 0 instead of 1" in (taken.refused or "")


def test_what_was_promised_to_others_falls_with_peoples_word_alone(tmp_path: Path) -> None:
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    chain = holding(tmp_path, first)
    less = successor(first, first.partition, Promise())
    assert "promise less than those before: colluders 0 instead of 1" in (chain.take(offer(proposed=less)).waits or "")
    chain.approve(less.digest.hex())
    assert chain.take(offer(proposed=less)).to_sign == (less,)


# --- whether the chain can go on --------------------------------------------------------------------------------------

COME_LATER = silo_names(9)[7:]


class People:
    """Of silos that pinned each other. A coordinator that is anybody's offers links; signatures are collected, and what
    stands is shown."""

    def __init__(self, folder: Path, policies: Mapping[SiloName, Promise]) -> None:
        self._folder = folder
        self.policies = dict(policies)
        self.stands: list[SignedLink] = []
        self.signed: dict[SiloName, list[Link]] = {name: [] for name in policies}
        for name in policies:
            (folder / name).mkdir()

    def chain(self, name: SiloName) -> GroupChain:
        asks = self.policies[name]
        return chain_in(self._folder / name, own=name, colluders=asks.colluders, smallest_group=asks.smallest_group)

    def next_link(self, partition: Partition, promise: Promise) -> Link:
        if not self.stands:
            return first_link(FEDERATION, partition, promise)
        return successor(self.stands[-1].link, partition, promise)

    def propose(self, link: Link, to: Iterable[SiloName], willing: Collection[SiloName]) -> bool:
        """Whether it stands now."""
        known = SignedLink(link=link)
        for name in to:
            if link in self._settled(name, known, name in willing):
                known = known.signed_by(name, signature_of(link, identity_key(name)))
        before = self.stands[-1].link if self.stands else None
        if missing_signatures(before, link, [name for name, _ in known.signatures])[1]:
            return False
        self.stands.append(known)
        for name in to:
            self._settled(name, None, name in willing)
        return True

    def _settled(self, name: SiloName, proposed: SignedLink | None, willing: bool) -> tuple[Link, ...]:
        """What the silo signs of this, once its people did all that they are told to do, where they are willing."""
        chain = self.chain(name)
        for _ in range(9):
            try:
                taken = chain.take(GroupsOffer(links=tuple(self.stands), proposed=proposed, identities=()))
            except PolicyRefusal as refused:
                if not willing or proposed is None or "groups withdraw" not in str(refused):
                    return ()
                before = proposed.link.previous
                chain.withdraw(next(it.digest.hex() for it in reversed(self.signed[name]) if it.previous == before))
                continue
            self.signed[name] += taken.to_sign
            waits = chain.standing().proposed
            if taken.waits is None or not willing or waits is None:
                return taken.to_sign
            chain.approve(waits.link.digest.hex())
        raise AssertionError("its people are asked without end")


@dataclass(frozen=True)
class Step:
    """A link that somebody proposes, and how many silos' people allow it."""

    partition: Partition
    promise: Promise
    willing: int


@st.composite
def steps(draw: st.DrawFn, names: Sequence[SiloName]) -> Step:
    members = draw(st.permutations(names))[: draw(st.integers(1, len(names)))]
    cut = draw(st.integers(1, len(members)))
    some = Partition.of(part for part in (members[:cut], members[cut:]) if part)
    colluders = draw(st.integers(0, len(names) + 1))
    return Step(
        partition=draw(st.sampled_from((some, Partition.of([names])))),
        promise=Promise(colluders=colluders, smallest_group=colluders + draw(st.integers(3, 5))),
        willing=draw(st.sampled_from((0, 2, len(names), len(names)))),
    )


HISTORIES = st.integers(3, 6).flatmap(
    lambda count: st.tuples(
        st.lists(st.integers(0, 2), min_size=count, max_size=count), st.lists(steps(NAMES[:count]), max_size=4)
    )
)


@settings(
    max_examples=40,
    deadline=None,
    phases=(Phase.explicit, Phase.generate),  # an example is short as it is
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(HISTORIES, st.integers(0, 11))
def test_whatever_honest_silos_accepted_willing_people_can_go_on_without_one_silo(
    tmp_path_factory: pytest.TempPathFactory, history: tuple[list[int], list[Step]], gone: int
) -> None:
    """In half of the histories none is gone."""
    colluders, proposed = history
    names = NAMES[: len(colluders)]
    policies = {name: Promise(colluders=own, smallest_group=4) for name, own in zip(names, colluders, strict=True)}
    with disk.not_waited_for():
        people = People(tmp_path_factory.mktemp("people"), {**policies, **dict.fromkeys(COME_LATER, Promise())})
        for step in proposed:
            people.propose(people.next_link(step.partition, step.promise), names, names[: step.willing])
        alive = sorted(people.stands[-1].link.members if people.stands else names)
        if gone < 6:
            del alive[gone % len(alive)]
        everybody = sorted({*alive, *COME_LATER[: max(0, 3 - len(alive))]})
        people.policies = dict.fromkeys(
            people.policies, Promise()
        )  # whoever asks for more than there can be asks for less
        link = people.next_link(Partition.of([everybody]), Promise())
        assert people.propose(link, everybody, everybody), "it has its signatures"
        assert {people.chain(name).head for name in everybody} == {link}


# --- what people allowed ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own", [NAMES[0], NAMES[3]])
def test_a_newcomer_who_is_allowed_as_a_small_atom_is_not_allowed_as_a_group(tmp_path: Path, own: SiloName) -> None:
    """It could be switched on and off: once its people had said that it joins, nobody was asked about that."""
    three, x = NAMES[:3], NAMES[3]
    first = first_link(FEDERATION, Partition.of([three]))
    joined = successor(first, Partition.of([[*three, x]]))
    chain = chain_in(tmp_path, own=own, pinned=NAMES[:4])
    for links in ((first,), (first, joined)):
        if chain.take(offer(*(signed(link, NAMES[:4]) for link in links))).waits is not None:
            chain.approve(links[-1].digest.hex())
            chain.take(offer(*(signed(link, NAMES[:4]) for link in links)))
    assert chain.head == joined
    assert (chain.approved_atoms, chain.approved_groups) == ({(x,)}, frozenset())
    alone = successor(joined, Partition.of([three, [x]]))
    taken = chain.take(offer(proposed=alone))
    assert taken.to_sign == ()
    assert taken.waits is not None
    chain.approve(alone.digest.hex())
    assert chain.approved_groups == {(x,)}


def test_people_and_the_audit_log_are_told_who_has_not_signed(tmp_path: Path) -> None:
    """Of an unpinned silo, and of who signed with another key, nothing is good."""
    link = successor(EVERYBODY, Partition.of([NAMES[:4], NAMES[4:8]]))
    holding(tmp_path, EVERYBODY)
    chain = chain_in(tmp_path, pinned=NAMES[:-2])
    false = SignedLink(
        link=link,
        signatures=(*signed(link, NAMES[1:4]).signatures, (NAMES[5], bytes(64)), *signed(link, NAMES[7:8]).signatures),
    )
    waits = chain.take(GroupsOffer(links=(), proposed=false, identities=())).waits or ""
    standing = chain.standing()
    assert standing.proposed is not None
    assert standing.proposed.good == NAMES[1:4]
    assert standing.proposed.unchecked == (NAMES[7],)
    assert standing.proposed.false == (NAMES[5],)
    told = standing.objection or ""
    assert told.startswith(waits)
    assert f"in none of these release groups: {NAMES[8]}; their own people may not have been asked" in told
    assert f"no good signature is here of {', '.join(NAMES[4:8])}: their own people may not have been asked" in told
    assert chain.approve(link.digest.hex()) == (link, told)


def test_a_newcomer_takes_the_chain_from_where_it_comes_in(tmp_path: Path) -> None:
    first = first_link(FEDERATION, Partition.of([NAMES[3:]]))
    second = successor(first, Partition.of([NAMES[:3], NAMES[3:]]))
    chain = chain_in(tmp_path)
    links = signed(first), signed(second, NAMES[3:])
    assert chain.take(offer(*links)).waits is not None, "its people are asked who it is summed with"
    chain.approve(second.digest.hex())
    assert chain.take(offer(*links)) == Taken(links=(second,), to_sign=(second,))


def test_a_file_that_is_damaged_or_another_federations_is_never_taken_for_none(tmp_path: Path) -> None:
    holding(tmp_path, EVERYBODY)
    with pytest.raises(ConfigurationError, match="federation"):
        _ = chain_in(tmp_path, federation=FederationName("another")).head
    content = json.loads(unsealed((tmp_path / FILE).read_bytes()))
    content["held"] = content["held"][:-8]
    raw = json.dumps(content).encode()
    for damaged in (Seal(identity_key(OWN)).sealed(FILE, raw), raw):
        (tmp_path / FILE).write_bytes(damaged)
        with pytest.raises(ConfigurationError, match="restore it"):
            chain_in(tmp_path).take(offer(signed(EVERYBODY)))


SOME_LINKS = (
    EVERYBODY,
    THIRDS,
    OTHER_THIRDS,
    successor(THIRDS, EVERYBODY.partition),
    successor(THIRDS, OTHER_THIRDS.partition),
    successor(OTHER_THIRDS, EVERYBODY.partition),
    forked(),
    with_other_atoms(),
    first_link(FEDERATION, THIRDS.partition),
)


@st.composite
def offers(draw: st.DrawFn) -> GroupsOffer:
    links = draw(st.lists(st.sampled_from(SOME_LINKS), max_size=3, unique=True))
    ordered = sorted(links, key=lambda link: link.number)
    who = st.sets(st.sampled_from(NAMES), min_size=3)
    shown = tuple(signed(link, draw(st.one_of(st.just(NAMES), who))) for link in ordered)
    return GroupsOffer(
        links=shown,
        proposed=draw(st.none() | st.sampled_from(SOME_LINKS).map(lambda link: SignedLink(link=link))),
        identities=(),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(offers(), st.booleans()), max_size=6))
def test_whatever_is_offered_one_chain_is_held_and_one_successor_signed(
    tmp_path_factory: pytest.TempPathFactory, shown: list[tuple[GroupsOffer, bool]]
) -> None:
    """People approve everything here, and never withdraw."""
    chain = chain_in(tmp_path_factory.mktemp("chain"))
    held: Link | None = None
    successors: dict[bytes, Link] = {}
    for one, approves in shown:
        if approves and (proposed := chain.standing().proposed) is not None:
            chain.approve(proposed.link.digest.hex())
        try:
            taken = chain.take(one)
        except LoricaError:
            assert chain.head == held, "a refusal changes nothing"
            continue
        for link in taken.links:
            check_successor(held, link)
            held = link
        assert chain.head == held
        for link in taken.to_sign:
            assert successors.setdefault(link.previous, link) == link
