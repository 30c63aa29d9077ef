"""Release groups: what a partition says, how partitions form a chain, and what a silo signs and shows of incomplete
groups."""

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import IntegrityError, MalformedMessage, PolicyRefusal, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.group_changes import (
    new_small_atoms,
    new_small_groups,
    objection,
    split_pieces,
)
from lorica_security.secure_aggregation.groups.release_groups import (
    LEAST_PROMISE,
    Link,
    Partition,
    Promise,
    SignedLink,
    check_successor,
    first_link,
    missing_signatures,
    out_of_reach,
    refined,
    signature_of,
    signers,
    successor,
)
from lorica_security.secure_aggregation.messages import MaskKeyShare, SurvivorSet
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import party as silo_party
from tests.support.secagg_federation import FEDERATION, Federation, identities, identity_key, silo_names, terms

NAMES = silo_names(12)


def groups(*sizes: int, names: tuple[SiloName, ...] = NAMES) -> Partition:
    """Of the first silos by name, in groups of these sizes."""
    ends = [sum(sizes[: index + 1]) for index in range(len(sizes))]
    return Partition.of(names[end - size : end] for size, end in zip(sizes, ends, strict=True))


def link_of(*sizes: int) -> Link:
    return first_link(FEDERATION, groups(*sizes))


@st.composite
def partitions(draw: st.DrawFn, *, most: int = 9) -> Partition:
    """Of some of the silos, in any groups."""
    members = draw(st.lists(st.sampled_from(NAMES[:most]), min_size=1, unique=True))
    where = draw(st.lists(st.integers(0, 3), min_size=len(members), max_size=len(members)))
    found: dict[int, list[SiloName]] = {}
    for member, group in zip(members, where, strict=True):
        found.setdefault(group, []).append(member)
    return Partition.of(found.values())


# --- partitions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ((), "there is none"),
        (((),), "is empty"),
        (((NAMES[1], NAMES[0]),), "out of order"),
        (((NAMES[1],), (NAMES[0],)), "out of order"),
        (((NAMES[0], NAMES[1]), (NAMES[1], NAMES[2])), "two of them"),
        (((SiloName("Not A Name"),),), "release group"),
    ],
)
def test_what_is_no_partition_is_refused(value: tuple[tuple[SiloName, ...], ...], says: str) -> None:
    with pytest.raises(MalformedMessage, match=says):
        Partition(value)


@given(partitions(), st.sets(st.sampled_from(NAMES[:9])))
def test_a_union_is_of_whole_groups_and_of_nothing_else(partition: Partition, silos: set[SiloName]) -> None:
    unions = {
        frozenset(chain.from_iterable(some))
        for size in range(len(partition.groups) + 1)
        for some in combinations(partition.groups, size)
    }
    assert partition.is_union(silos) == (frozenset(silos) in unions)
    assert frozenset(partition.whole(silos)) == max((it for it in unions if it <= silos), key=len)


@settings(max_examples=150, deadline=None)
@given(partitions(), st.sets(st.sampled_from(NAMES[:9]), min_size=1), st.integers(1, 9), st.integers(1, 5))
def test_the_least_sum_is_the_smallest_that_some_loss_of_silos_leaves(
    partition: Partition, cohort: set[SiloName], threshold: int, least: int
) -> None:
    """Against every set of silos whose vectors could have come."""
    sums = [
        len(whole)
        for size in range(threshold, len(cohort) + 1)
        for came in combinations(sorted(cohort), size)
        if len(whole := partition.whole(came)) >= least
    ]
    found = partition.least_sum(cohort, threshold=threshold, min_survivors=least)
    assert found == min(sums, default=None)


# --- the chain --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(partitions(), min_size=1, max_size=4))
def test_every_union_under_every_link_is_a_union_of_the_newest_atoms(chosen: list[Partition]) -> None:
    """So is every combination of sums: it is constant on them."""
    head = first_link(FEDERATION, chosen[0])
    links = [head]
    for partition in chosen[1:]:
        head = successor(head, partition)
        check_successor(links[-1], head)
        links.append(head)
    atoms = Partition(head.atoms)
    for link in links:
        assert all(atoms.is_union(group) for group in link.partition.groups)
    everybody = frozenset(chain.from_iterable(link.members for link in links))
    assert atoms.members == everybody, "leavers stay"


def test_a_link_with_other_atoms_or_another_predecessor_is_refused() -> None:
    first = link_of(3, 4)
    second = successor(first, groups(4, 3))
    for wrong in (
        replace(second, atoms=second.partition.groups),
        replace(second, number=3),
        replace(second, previous=bytes(31) + b"\x01"),
        replace(second, federation="elsewhere"),
    ):
        with pytest.raises(MalformedMessage, match=r"do not follow|name"):
            check_successor(first, wrong)
    with pytest.raises(MalformedMessage, match="do not follow"):
        check_successor(None, second)
    with pytest.raises(MalformedMessage, match="other atoms"):
        replace(first, atoms=second.atoms)


def test_every_part_of_a_link_is_in_its_digest() -> None:
    first = link_of(3, 4)
    others = [
        link_of(4, 3),
        replace(first, federation="elsewhere"),
        successor(first, groups(3, 4, 3)),
        successor(link_of(4, 3), groups(3, 4, 3)),
        replace(first, promise=Promise(colluders=1)),
        replace(first, promise=Promise(smallest_group=4)),
    ]
    assert len({it.digest for it in (first, *others)}) == 7


def test_the_first_link_wants_all_and_another_more_than_half_and_the_colluders() -> None:
    first = link_of(3, 4)
    second = successor(first, groups(3, 4, 3))
    assert missing_signatures(None, first, NAMES[:6]) == ({NAMES[6]}, 1)
    assert missing_signatures(None, first, NAMES[:7])[1] == 0
    assert missing_signatures(first, second, NAMES[7:10])[1] == 4, "newcomers have no say"
    for colluders, needed in ((0, 4), (1, 5), (2, 5), (3, 6)):
        against = first_link(FEDERATION, groups(3, 4), Promise(colluders=colluders, smallest_group=5))
        second = successor(against, groups(3, 4, 3), Promise(colluders=4, smallest_group=6))
        assert missing_signatures(against, second, NAMES[: needed - 1])[1] == 1
        assert missing_signatures(against, second, NAMES[:needed])[1] == 0, "the predecessor's number counts"


def test_no_link_promises_more_than_what_follows_it_can_be_signed_with() -> None:
    """With one silo gone for good, of those who are left."""
    for silos in range(1, 11):
        for colluders in range(silos + 2):
            link = first_link(FEDERATION, groups(silos), Promise(colluders=colluders, smallest_group=13))
            after = successor(link, groups(silos), Promise())
            _, missing = missing_signatures(link, after, NAMES[: silos - 1])
            refused = out_of_reach(link) or ""
            assert bool(refused) == (missing > 0)
            if silos < 3:
                assert f"are of {silos} silos: under masks no sum is of fewer than 3" in refused
            elif refused:
                assert f"hold against {colluders} colluders among {silos} silos" in refused
                assert f"with --colluders {silos - 3} or less, or with {colluders + 3 - silos} more silos" in refused
                assert out_of_reach(replace(link, promise=Promise(colluders=silos - 3, smallest_group=13))) is None
                more = first_link(FEDERATION, Partition.of([silo_names(colluders + 3)]), link.promise)
                assert out_of_reach(more) is None


@pytest.mark.parametrize(
    ("colluders", "smallest_group"), [(-1, 3), (0, 2), (2, 3), (10_001, 10_003), (0, 10_003)], ids=str
)
def test_what_is_no_promise_is_refused(colluders: int, smallest_group: int) -> None:
    with pytest.raises(MalformedMessage, match="allowed are"):
        Promise(colluders=colluders, smallest_group=smallest_group)


def test_a_successor_promises_what_its_predecessor_did_unless_it_says_otherwise() -> None:
    first = first_link(FEDERATION, groups(4, 4), Promise(colluders=2, smallest_group=4))
    assert successor(first, groups(8)).promise == first.promise
    more = successor(first, groups(8), Promise(colluders=3, smallest_group=5))
    check_successor(first, more)
    assert more.promise.lacks(first.promise) == ()
    assert first.promise.lacks(more.promise) == ("colluders 2 instead of 3", "smallest_group 4 instead of 5")


def test_a_signature_is_of_one_link_and_of_one_silo() -> None:
    first, known = link_of(3), identities(NAMES[:3])
    good = SignedLink(link=first).signed_by(NAMES[0], signature_of(first, identity_key(NAMES[0])))
    assert signers(good, known) == {NAMES[0]}
    assert signers(replace(good, link=link_of(4)), known) == frozenset()
    moved = SignedLink(link=first, signatures=((NAMES[1], good.signatures[0][1]),))
    assert signers(moved, known) == frozenset()
    assert signers(good, {}) == frozenset()


def test_the_counterexample_of_memories_of_single_silos_needs_people() -> None:
    """Seven silos: sums over all, over 2,3,4 under 1567|234 and over 5,6,7 under 1234|567 would isolate the first."""
    one, two, three, four, five, six, seven = NAMES[:7]
    first = first_link(FEDERATION, Partition.of([NAMES[:7]]))
    left = successor(first, Partition.of([[one, five, six, seven], [two, three, four]]))
    right = successor(left, Partition.of([[one, two, three, four], [five, six, seven]]))
    assert new_small_atoms(first, left, smallest_group=3) == ()
    assert new_small_atoms(left, right, smallest_group=3) == ((one,),)
    assert split_pieces(first, left, one) == ((one, five, six, seven), (two, three, four))
    for name in (one, two, five):
        assert objection(first, left, name, pinned=NAMES[:7], asks=Promise()) is not None
        assert objection(left, right, name, pinned=NAMES[:7], asks=Promise()) is not None


# --- who must decide --------------------------------------------------------------------------------------------------

ALL = frozenset(NAMES)


def objects(
    previous: Link | None,
    link: Link,
    *,
    of: SiloName = NAMES[0],
    pinned: Iterable[SiloName] = ALL,
    asks: Promise = LEAST_PROMISE,
) -> str:
    return objection(previous, link, of, pinned=frozenset(pinned), asks=asks) or ""


def test_one_group_of_all_that_are_pinned_passes_by_itself() -> None:
    assert objects(None, link_of(5), pinned=NAMES[1:5]) == ""
    assert "fewer than 3" in objects(None, link_of(2), pinned=NAMES[1:2])


def test_a_first_group_that_leaves_out_who_is_pinned_is_for_people() -> None:
    """A victim and two colluders, picked out of seven that all pinned each other."""
    assert "works together" in objects(None, link_of(3), pinned=NAMES[1:7])
    assert "works together" in objects(None, link_of(3, 4), pinned=NAMES[1:7])


def test_a_group_with_somebody_who_is_not_pinned_is_for_people() -> None:
    assert f"{NAMES[3]} in this silo's release group" in objects(None, link_of(4), pinned=NAMES[1:3])
    grown = successor(link_of(3), groups(3, 3))
    assert objects(link_of(3), grown, pinned=NAMES[1:3]) == "", "who is in another group is no part of this one's"
    merged = successor(link_of(3), groups(6))
    assert "have no key" in objects(link_of(3), merged, pinned=NAMES[1:3])


def test_newcomers_come_in_groups_and_groups_leave_whole() -> None:
    first = link_of(3, 3)
    assert objects(first, successor(first, groups(3, 3, 3))) == ""
    assert "fewer than 3" in objects(first, successor(first, groups(3, 3, 2)))
    assert objects(first, successor(first, groups(3))) == ""
    assert "subtracted" in objects(first, successor(first, Partition.of([NAMES[0:2], NAMES[3:6]])))
    assert "fewer than 3" in objects(first, successor(first, Partition.of([NAMES[0:3], NAMES[3:5]])))
    assert objects(first, successor(first, groups(6))) == "", "merging tells nobody apart"


def test_splitting_a_group_is_for_the_people_of_that_group() -> None:
    first = link_of(6, 3)
    split = successor(first, groups(3, 3, 3))
    assert "of silo-00, silo-01, silo-02 alone" in objects(first, split)
    assert objects(first, split, of=NAMES[7]) == ""


def test_who_leaves_votes_nobody_apart_by_itself() -> None:
    """Four of seven, who are enough to sign, leave the other three behind; or a whole group leaves, and one of another
    with it."""
    first = link_of(7)
    left = successor(first, Partition.of([NAMES[4:7]]))
    assert "of silo-00, silo-01, silo-02, silo-03 alone" in objects(first, left)
    two = link_of(3, 4)
    assert "of silo-06 alone" in objects(two, successor(two, Partition.of([NAMES[3:6]])))
    assert objects(two, successor(two, Partition.of([NAMES[3:7]]))) == "", "a whole group"
    assert objects(two, successor(two, groups(3)), of=NAMES[9]) == "", "who was never in has no say"


@settings(max_examples=200)
@given(data=st.data())
def test_no_link_passes_by_itself_that_tells_apart_whom_its_signers_were_one_with(data: st.DataObject) -> None:
    """Any two divisions: where no silo of the first objects, the atoms of the first are atoms of the second, or none
    was told apart."""

    def division(names: list[SiloName]) -> Partition:
        places = data.draw(st.lists(st.integers(0, 3), min_size=len(names), max_size=len(names)))
        drawn = [[name for name, at in zip(names, places, strict=True) if at == place] for place in range(3)]
        return Partition.of([group for group in drawn if group] or [names])

    first = first_link(FEDERATION, division(list(NAMES[:7])))
    link = successor(first, division(list(NAMES[: data.draw(st.integers(1, 9))])))
    consenting = [name for name in first.members if not objects(first, link, of=name)]
    if len(consenting) == len(first.members):
        assert set(first.atoms) <= set(link.atoms)
    for name in consenting:
        assert link.atom_of(name) == first.atom_of(name)
        assert not [atom for atom in link.atoms if len(atom) < 3 and atom not in first.atoms]


def test_who_is_left_behind_is_named_to_those_who_would_leave_it() -> None:
    """The victim is said to have left for good; three of four signatures are enough, and its delta is the difference of
    two sums."""
    first = link_of(4)
    told = objects(first, successor(first, groups(3)))
    assert "are of silo-00, silo-01, silo-02 alone, of silo-03 alone (fewer than 3 silos)" in told
    assert "in none of these release groups: silo-03; their own people may not have been asked" in told


def test_everything_that_is_learnt_is_said_at_once_the_own_silo_first() -> None:
    """Each finding once hid those after it: an unpinned silo the split of the own atom, that one the silo that is split
    off elsewhere."""
    first = link_of(8)
    split = Partition.of([[*NAMES[:2], NAMES[10]], NAMES[2:5], NAMES[5:7], [NAMES[7], *NAMES[8:10]]])
    told = objects(first, successor(first, split), of=NAMES[1], pinned=NAMES[:10])
    in_order = (
        f"{NAMES[10]} in this silo's release group have no key",
        f"are of {NAMES[0]}, {NAMES[1]} alone (fewer than 3 silos), of {', '.join(NAMES[2:5])} alone, ",
        f"of {NAMES[5]}, {NAMES[6]} alone (fewer than 3 silos), of {NAMES[7]} alone (fewer than 3 silos), ",
        f"of {NAMES[8]}, {NAMES[9]} alone (fewer than 3 silos), of {NAMES[10]} alone (fewer than 3 silos)",
        f"these release groups of fewer than 3 silos are in: {NAMES[5]}, {NAMES[6]}",
    )
    places = [told.find(each) for each in in_order]
    assert -1 not in places
    assert places == sorted(places)


def test_a_newcomer_is_told_that_it_is_a_small_set_of_its_own() -> None:
    first = link_of(3)
    grown = successor(first, groups(4))
    told = objects(None, grown, of=NAMES[3])
    assert "somebody else chose that this silo is summed with silo-00, silo-01, silo-02" in told
    assert "of silo-03 alone (fewer than 3 silos)" in told
    assert "of silo-03 alone (fewer than 3 silos)" in objects(first, grown), "so are the others"
    back = successor(successor(link_of(8), groups(3)), Partition.of([NAMES[:3], [*NAMES[3:5], NAMES[9]]]))
    told = objects(successor(link_of(8), groups(3)), back, of=NAMES[3])
    assert f"are of {NAMES[3]}, {NAMES[4]} alone (fewer than 3 silos), of {', '.join(NAMES[5:8])} alone" in told


def test_small_sets_of_the_first_link_are_named_to_all_who_sign_it() -> None:
    told = objects(None, link_of(4, 2, 1))
    assert "of silo-04, silo-05 alone (fewer than 3 silos), of silo-06 alone (fewer than 3 silos)" in told
    assert "groups of fewer than 3 silos are in: silo-04, silo-05; silo-06" in told


def test_a_group_of_one_has_words_of_its_own() -> None:
    told = objects(None, link_of(1, 3))
    assert told.startswith("this silo is a release group of its own: the coordinator chooses which sums it is in")
    assert "two sums, subtracted, are of silo-00 alone" in told
    assert "summed with" not in told


def test_a_small_group_of_old_small_atoms_is_for_people_too() -> None:
    """An atom is told once; a group can be switched on and off. Who allowed the first has not allowed the second."""
    joined = successor(link_of(3), groups(4))
    alone = successor(joined, groups(3, 1))
    assert alone.atoms == joined.atoms
    assert new_small_atoms(joined, alone, smallest_group=3) == ()
    assert new_small_groups(joined, alone, smallest_group=3) == ((NAMES[3],),)
    for name in NAMES[:3]:
        assert "of fewer than 3 silos are in: silo-03" in objects(joined, alone, of=name)
    assert "this silo is a release group of its own" in objects(joined, alone, of=NAMES[3])
    two = successor(joined, groups(5))
    pair = successor(two, groups(3, 2))
    assert pair.atoms == two.atoms
    for name in NAMES[:5]:
        assert "of fewer than 3 silos are in: silo-03, silo-04" in objects(two, pair, of=name)
    assert objects(pair, successor(pair, groups(3, 2, 3))) == "", "it is a group already"


def test_whose_word_is_missing_is_said() -> None:
    first = link_of(7)
    link = successor(first, Partition.of([NAMES[:3], NAMES[3:6]]))

    def told(*signed: SiloName) -> str:
        return objection(first, link, NAMES[0], pinned=ALL, asks=Promise(), signed=signed) or ""

    assert "in none of these release groups: silo-06; their own people" in told(*NAMES[1:4])
    assert "no good signature is here of silo-04, silo-05: their own people may not have been asked" in told(
        *NAMES[1:4]
    )
    assert "may not have been asked" not in told(*NAMES[1:7])


def test_sets_are_judged_by_the_larger_of_policy_and_promise() -> None:
    """Three at a silo, five in the link: what the silo with five was promised is told to all, and told to be small."""
    first = first_link(FEDERATION, groups(6), Promise(smallest_group=5))
    halves = successor(first, groups(3, 3))
    assert "of silo-03, silo-04, silo-05 alone (fewer than 5 silos)" in objects(first, halves)
    grown = successor(first, Partition.of([NAMES[:6], NAMES[6:10]]))
    assert "of silo-06, silo-07, silo-08, silo-09 alone (fewer than 5 silos)" in objects(first, grown)
    assert "fewer than 5" in objects(link_of(3), successor(link_of(3), groups(3, 3), Promise(smallest_group=5)))
    assert "fewer than 5" in objects(first, successor(first, groups(3, 3), Promise()))


def test_a_promise_rises_by_itself_to_what_policy_says_and_goes_beyond_or_falls_with_peoples_word_alone() -> None:
    first = first_link(FEDERATION, groups(6), Promise(colluders=1))
    higher = Promise(colluders=2, smallest_group=5)
    rises = successor(first, groups(6), higher)
    assert objects(first, rises, asks=higher) == ""
    assert objects(first, rises) == (
        "these release groups promise more than this silo's policy asks for, and than those before: colluders 2 "
        "where 1 would do, smallest_group 5 where 3 would do. What follows them, also to take that back, needs the "
        "signatures of 5 of 6 silos"
    )
    assert "smallest_group 5 where 4 would do" in objects(first, rises, asks=Promise(colluders=2, smallest_group=4))
    assert objects(rises, successor(rises, groups(6, 5))) == "", "it is promised already"
    assert "colluders 1 where 0 would do" in objects(None, first, pinned=NAMES[:6]), (
        "before the first link nothing is promised"
    )
    assert objects(None, first, pinned=NAMES[:6], asks=first.promise) == ""
    less = objects(first, successor(first, groups(6), Promise()))
    assert less == "these release groups promise less than those before: colluders 0 instead of 1"


def test_whoever_is_asked_for_another_reason_hears_that_its_own_set_is_small() -> None:
    first = first_link(FEDERATION, groups(2, 3), Promise(colluders=1))
    less = objects(first, successor(first, groups(2, 3), Promise()))
    assert less.startswith(
        "sums under the groups before and under these, subtracted, are of silo-00, silo-01 alone (fewer"
    )
    assert less.endswith("these release groups promise less than those before: colluders 0 instead of 1")


def test_who_comes_later_is_asked_who_it_is_summed_with() -> None:
    first = link_of(3)
    later = successor(first, groups(3, 3))
    assert "works together" in objects(None, later, of=NAMES[4])
    one_of_all = successor(first, groups(6))
    assert "works together" in objects(None, one_of_all, of=NAMES[4], pinned=NAMES[:6]), "the first ones alone pass so"


def test_who_comes_back_is_asked_who_it_is_summed_with() -> None:
    """What held before it left holds no more: the others may have gone on under groups that it never saw."""
    left = successor(link_of(3, 3), groups(3))
    back = successor(left, groups(3, 3))
    assert back.atoms == left.atoms
    for name in NAMES[3:6]:
        assert "works together among them learns" in objects(left, back, of=name)


def test_who_comes_to_groups_that_others_allowed_is_told_which_of_them_are_small() -> None:
    left = successor(link_of(3, 2, 3), groups(3, 2))
    told = objects(left, successor(left, groups(3, 2, 3)), of=NAMES[5])
    assert "of silo-03, silo-04 alone (fewer than 3 silos)" in told
    assert "release groups of fewer than 3 silos are in: silo-03, silo-04" in told


def test_who_comes_to_a_promise_beyond_its_policy_is_told_though_the_others_gave_it_before() -> None:
    first = first_link(FEDERATION, groups(6), Promise(colluders=1))
    assert "colluders 1 where 0 would do" in objects(first, successor(first, groups(6, 3)), of=NAMES[6])
    assert "would do" not in objects(first, successor(first, groups(6, 3)), of=NAMES[6], asks=first.promise)


def test_a_set_that_was_small_already_needs_no_second_word() -> None:
    first = link_of(3, 2)
    assert new_small_atoms(first, successor(first, groups(3, 2, 3)), smallest_group=3) == ()


def test_the_refinement_has_intersections_newcomers_and_leavers() -> None:
    atoms = refined(groups(3, 4).groups, Partition.of([[*NAMES[0:2], NAMES[3]], NAMES[7:9]]))
    assert atoms == ((NAMES[0], NAMES[1]), (NAMES[2],), (NAMES[3],), NAMES[4:7], NAMES[7:9])


# --- the protocol -----------------------------------------------------------------------------------------------------


def grouped(*sizes: int, **more: object) -> Federation:
    return Federation(sum(sizes), link=link_of(*sizes), **more)  # type: ignore[arg-type]


def test_one_drop_out_takes_its_group_out_and_the_others_sum_comes_out() -> None:
    federation = grouped(4, 4).run(drops={NAMES[1]: "masked input"})
    assert federation.unmask is not None
    assert federation.unmask.survivors == NAMES[4:8]
    assert np.array_equal(federation.sum(), federation.true_sum())
    shown = federation.shares_seen()
    for name in NAMES[:4]:
        assert shown.get((name, "self mask"), set()) == set(), "its vector stays hidden"
    reveal = federation.silos[NAMES[0]].sent[-1]
    assert [type(it) is MaskKeyShare for it in reveal.shares] == [True] * 4 + [False] * 4


def test_living_members_of_an_incomplete_group_count_for_the_threshold() -> None:
    """Eight silos in two groups: with one lost the sum is of four, and the threshold is six."""
    federation = grouped(4, 4).run(until="consistency check", drops={NAMES[1]: "masked input"})
    assert federation.coordinator.roster.parameters.threshold == 6  # type: ignore[union-attr]
    federation.run()
    assert federation.unmask is not None
    assert len({it.silo for it in federation.seen if type(it).__name__ == "Agreement"}) == 7


@pytest.mark.parametrize("sizes", [(3,), (5,)])
def test_in_one_group_any_drop_out_abandons_the_attempt(sizes: tuple[int, ...]) -> None:
    federation = grouped(*sizes).run(drops={NAMES[1]: "masked input"})
    assert federation.coordinator.phase == "abandoned"
    assert "in whole release groups" in federation.coordinator.reason or "must" in federation.coordinator.reason  # type: ignore[union-attr]
    assert federation.shares_seen() == {}


def survivor_set(like: SurvivorSet, vectors: dict[SiloName, bytes], silos: Iterable[SiloName]) -> SurvivorSet:
    chosen = tuple(sorted(silos))
    return replace(like, silos=chosen, inputs=tuple(vectors[silo] for silo in chosen))


@pytest.mark.parametrize("size", range(3, 8))
def test_no_silo_signs_a_set_that_breaks_a_group(size: int) -> None:
    """Every set of survivors, to a silo of each group."""
    federation = grouped(3, 4).run(until="consistency check")
    like = next(message for to, message in federation.queue if to)
    vectors = dict(zip(like.silos, like.inputs, strict=True))
    for name in (NAMES[0], NAMES[3]):
        each = federation.silos[name]
        for chosen in combinations(NAMES[:7], size):
            asked = survivor_set(like, vectors, chosen)
            if set(chosen) in ({*NAMES[:3]}, {*NAMES[3:7]}, {*NAMES[:7]}):
                silo_machine.step(each.state, asked, each.party)
                continue
            with pytest.raises(PolicyRefusal, match="only whole groups are summed") as refused:
                silo_machine.step(each.state, asked, each.party)
            assert refused.value.rule == "release_groups"


def test_a_set_with_another_vector_of_this_silo_is_not_signed() -> None:
    federation = grouped(3).run(until="consistency check")
    to, like = next((to, message) for to, message in federation.queue if to)
    each = federation.silos[SiloName(to)]
    own = like.inputs[0]
    for vector in (bytes(32), own[:-1] + bytes([own[-1] ^ 1])):
        other = replace(like, inputs=(vector, *like.inputs[1:]))
        with pytest.raises(IntegrityError, match="another vector for this silo"):
            silo_machine.step(each.state, other, each.party)


def test_no_groups_or_other_ones_or_smaller_ones_share_no_keys() -> None:
    federation = grouped(3, 3).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    cases = (
        ({"link": None}, "holds no release groups"),
        ({"link": link_of(6)}, "is for release groups"),
        ({"link": link_of(3, 4)}, "is for release groups"),
        ({"demands": silo_party.Demands(smallest_group=4)}, "smallest_group of this silo is 4"),
    )
    for change, says in cases:
        with pytest.raises(PolicyRefusal, match=says) as refused:
            silo_machine.step(each.state, roster, replace(each.party, **change))
        assert refused.value.rule == "release_groups"
    silo_machine.step(each.state, roster, replace(each.party, demands=silo_party.Demands(smallest_group=3)))


def test_no_keys_are_shared_where_the_group_of_others_is_small_and_people_did_not_allow_it() -> None:
    federation = grouped(3, 2).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    with pytest.raises(PolicyRefusal, match="release group silo-03, silo-04 has 2 silos"):
        silo_machine.step(each.state, roster, replace(each.party, approved=frozenset()))
    silo_machine.step(each.state, roster, replace(each.party, approved=frozenset({NAMES[3:5]})))


def test_no_keys_are_shared_with_one_who_is_in_no_release_group() -> None:
    federation = Federation(4, link=link_of(3)).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    with pytest.raises(PolicyRefusal, match="silo-03, who are in no release group") as refused:
        silo_machine.step(each.state, roster, each.party)
    assert refused.value.rule == "release_groups"


def test_a_whole_group_that_dealt_is_not_enough_where_fewer_than_the_threshold_did() -> None:
    federation = grouped(3, 4).run(until="masked input")
    delivery = next(message for to, message in federation.queue if to == NAMES[3])
    each = federation.silos[NAMES[3]]
    fewer = replace(
        delivery,
        dealings=tuple(it for it in delivery.dealings if it.silo in NAMES[3:7]),
        boxes=tuple(it for it in delivery.boxes if it.dealer in NAMES[3:7]),
    )
    with pytest.raises(PolicyRefusal, match="4 silos dealt, for a sum to come out at least 5 must") as refused:
        silo_machine.step(each.state, fewer, each.party)
    assert refused.value.rule == "min_survivors"


def test_no_keys_are_shared_where_the_groups_promise_less_than_policy_or_roster() -> None:
    federation = grouped(4, 4).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    asked = {"colluders": 1, "smallest_group": 4}
    for demands, says in (
        (silo_party.Demands(smallest_group=4), "smallest_group 3 instead of 4"),
        (silo_party.Demands(), "the roster is to hold against 1 colluders, release groups 1 hold against 0"),
        (silo_party.Demands(**asked), "colluders 0 instead of 1, smallest_group 3 instead of 4"),
    ):
        parameters = replace(roster.parameters, colluders=1)
        with pytest.raises(PolicyRefusal, match=says) as refused:
            silo_machine.step(each.state, replace(roster, parameters=parameters), replace(each.party, demands=demands))
        assert refused.value.rule == "release_groups"
        assert "--colluders" in str(refused.value), "the remedy"
    link = first_link(FEDERATION, groups(4, 4), Promise(**asked))
    promised = Federation(8, link=link, terms_=terms(link=link, colluders=1)).run()
    assert promised.unmask is not None


def test_an_atom_that_people_allowed_is_no_group_that_they_allowed() -> None:
    alone = link_of(1, 3)
    federation = Federation(4, link=alone).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    own = frozenset({NAMES[:1]})
    with pytest.raises(PolicyRefusal, match="has 1 silos"):
        silo_machine.step(each.state, roster, replace(each.party, approved=frozenset(), approved_atoms=own))
    silo_machine.step(each.state, roster, replace(each.party, approved=own, approved_atoms=frozenset()))
    joined = successor(link_of(3), groups(4))
    federation = Federation(4, link=joined).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[3])
    each = federation.silos[NAMES[3]]
    silo_machine.step(
        each.state, roster, replace(each.party, approved=frozenset(), approved_atoms=frozenset({NAMES[3:4]}))
    )
    with pytest.raises(PolicyRefusal, match="release group silo-03 has 1 silos"):
        silo_machine.step(each.state, roster, replace(each.party, approved=frozenset(), approved_atoms=frozenset()))


def test_colluders_raise_the_least_size_of_a_group() -> None:
    assert silo_party.Demands(colluders=2).least_group == 4
    assert silo_party.Demands(colluders=2, smallest_group=6).least_group == 6


def test_a_roster_that_promises_a_sum_of_fewer_is_refused() -> None:
    federation = grouped(3, 3).run(until="share keys")
    roster = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    other = replace(roster.parameters, least_sum=roster.parameters.least_sum + 1)
    with pytest.raises(PolicyRefusal, match="least sum"):
        silo_machine.step(each.state, replace(roster, parameters=other), each.party)


def test_groups_that_change_in_the_middle_end_the_attempt() -> None:
    federation = grouped(3, 3).run(until="consistency check")
    like = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    newer = replace(each.party, link=successor(link_of(3, 3), groups(6)))
    with pytest.raises(PolicyRefusal, match="is for release groups"):
        silo_machine.step(each.state, like, newer)


def test_groups_that_change_before_shares_are_shown_keep_them_here() -> None:
    federation = grouped(3, 3).run(until="unmasking")
    request = next(message for to, message in federation.queue if to == NAMES[0])
    each = federation.silos[NAMES[0]]
    newer = replace(each.party, link=successor(link_of(3, 3), groups(6)))
    with pytest.raises(PolicyRefusal, match="is for release groups"):
        silo_machine.step(each.state, request, newer)
    silo_machine.step(each.state, request, each.party)


def test_a_survivor_set_of_other_dealings_is_refused_first() -> None:
    federation = grouped(3).run(until="consistency check")
    to, like = next((to, message) for to, message in federation.queue if to)
    each = federation.silos[SiloName(to)]
    with pytest.raises(WrongTime):
        silo_machine.step(each.state, replace(like, dealings=bytes(32)), each.party)
