"""What a hostile coordinator's sums come to, together: no combination is of fewer honest silos than was promised.

Hostile schedules are played against real silo machines and chains (tests/support/leak_search.py). With a rule switched
off, the search finds the leak that the rule is there for. `make leak-search` plays hundreds.
"""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups import release_groups
from lorica_security.secure_aggregation.groups.release_groups import Group, Link, Partition, successor
from lorica_security.secure_aggregation.silo.phases import unmasking as silo_unmasking
from silo_agent.edges.groups import group_chain
from silo_wire.codecs.groups_codec import GroupsOffer
from tests.support.leak_search import World, least_support, seeded
from tests.support.secagg_federation import silo_names

pytestmark = pytest.mark.slow

SCHEDULES = int(os.environ.get("LORICA_SCHEDULES", "3"))
STEPS, SEARCH = 14, 30
TRIES = 60  # schedules, of which the first few mostly find what a missing rule lets out


@dataclass(frozen=True)
class Shape:
    count: int
    colluders: int
    smallest_group: int
    strict_share: float = 1.0

    @property
    def bound(self) -> int:
        """Of the fewest honest silos that a sum, or a combination of sums, is of; of a mixed world, where a strict one
        is among them."""
        return max(self.smallest_group, self.colluders + 2) - self.colluders

    def world(self, folder: Path, seed: int) -> World:
        return World(folder, self.count, self.colluders, self.smallest_group, seed, self.strict_share)


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """No machine goes down here: what is written need not reach the disk."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


SHAPES = (
    *(Shape(7, 0, 3), Shape(8, 1, 3), Shape(9, 0, 3), Shape(9, 2, 4)),
    *(Shape(10, 0, 5, strict_share=0.4), Shape(9, 2, 4, strict_share=0.4)),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_combination_of_sums_is_of_fewer_honest_silos_than_the_bound(shape: Shape, tmp_path: Path) -> None:
    came_out = 0
    for number in range(SCHEDULES):
        seed = seeded("schedule", shape, number)
        world = shape.world(tmp_path, seed).play(STEPS)
        came_out += world.moves["sums"]
        least = world.least_support
        assert least is None or least >= shape.bound, (seed, [sorted(one) for one in world.sums])
    assert came_out >= SCHEDULES, "nothing came out: nothing was looked at"


def found(folder: Path, shape: Shape, what: str, play: Callable[[World, int], World] = World.play) -> bool:
    """Whether some schedule brings a combination of fewer than the bound."""
    for number in range(TRIES):
        least = play(shape.world(folder, seeded(what, number)), SEARCH).least_support
        if least is not None and least < shape.bound:
            return True
    return False


def any_union(_self: Partition, _silos: Iterable[SiloName]) -> bool:
    return True


def nothing_missing(*_: Any, **__: Any) -> tuple[frozenset[SiloName], int]:
    return frozenset(), 0


def nobody_objects(*_: Any, **__: Any) -> None:
    return None


def every_set(head: Link | None) -> frozenset[Group]:
    return frozenset(() if head is None else (*head.atoms, *head.partition.groups))


def test_the_search_finds_sums_that_differ_by_one_silo_where_groups_may_be_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Partition, "is_union", any_union)
    assert found(tmp_path, SHAPES[0], "broken groups")


def test_the_search_finds_what_partitions_of_the_coordinators_choice_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where neither people nor what a silo knows of its own atom stands in the way."""
    monkeypatch.setattr(group_chain, "objection", nobody_objects)
    monkeypatch.setattr(group_chain.GroupChain, "approved_groups", property(lambda self: every_set(self.head)))
    assert found(tmp_path, SHAPES[0], "no objections")


def test_the_search_finds_the_counterexample_of_memories_of_single_silos(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each silo refuses what its own memory shows to be too fine; nothing makes the silos share one memory."""

    class OwnMemory(group_chain.GroupChain):
        def _check_signed(self, content: Any, previous: Any, signed: Any, offer: Any) -> None:
            """Nobody's word is asked for."""

        def _check_follows(self, previous: Any, link: Any) -> None:
            """What others were shown in between is not known."""

        def _objection(self, content: Any, head: Any, signed: Any) -> str | None:
            small = [] if head is None else release_groups.refined(head.atoms, signed.link.partition)
            return "too fine" if any(len(atom) < self._asks.smallest_group for atom in small) else None

    monkeypatch.setattr("tests.support.leak_search.GroupChain", OwnMemory)
    assert found(tmp_path, SHAPES[0], "memories of single silos", World.play_apart)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_partitions_that_are_shown_to_some_alone_bring_nothing_apart(shape: Shape, tmp_path: Path) -> None:
    came_out = 0
    for number in range(SCHEDULES):
        world = shape.world(tmp_path, seeded("apart", shape, number)).play_apart(SEARCH // 2)
        came_out += world.moves["sums"]
        assert (world.least_support or shape.count) >= shape.bound
    assert came_out, "nothing came out: nothing was looked at"


class OwnNumbers(group_chain.GroupChain):
    """Counts and judges with its own policy's numbers, whatever the link says, as each silo did at first."""

    def _check_signed(self, content: Any, previous: Any, signed: Any, offer: Any) -> None:
        if previous is not None:
            previous = replace(previous, promise=self._asks)
        super()._check_signed(content, previous, signed, offer)

    def _refused(self, head: Any, link: Any) -> None:
        """What the link says is nothing to it."""


def forked(folder: Path) -> World:
    """Nine silos of which the first asks for two colluders, and the others for none. The last two show each half of the
    others another division in which they are together; the first silo is in neither, and its people say nothing."""
    world = Shape(9, 2, 4, strict_share=0.0).world(folder, seeded("forked"))
    strict, *others = world.honest
    colluders = world.names[7:]
    halves = others[:3], others[3:]
    apart = [
        successor(world.everybody(), Partition.of([[*half, *colluders], [strict, *rest]]))
        for half, rest in (halves, halves[::-1])
    ]
    for link, told in (
        (world.everybody(), world.names),
        *zip(apart, ((*half, *colluders) for half in halves), strict=True),
    ):
        world.propose(link, told)
        for name in told:
            world.show(name, GroupsOffer(links=(*world.before(link), world.signed(link)), proposed=None, identities=()))
        for _ in range(40):
            if frozenset(told) not in world.sums:
                world.run_attempt(link, told)
    return world


def test_who_asks_for_less_is_led_to_no_division_that_the_others_did_not_sign(tmp_path: Path) -> None:
    world = forked(tmp_path)
    assert [len(one) for one in world.sums] == [9]
    assert {world.chains[name].head for name in world.honest} == {world.everybody()}


def test_the_fork_comes_out_where_each_silo_counts_with_numbers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of nine are a majority for those who count no colluders."""
    monkeypatch.setattr("tests.support.leak_search.GroupChain", OwnNumbers)
    world = forked(tmp_path)
    assert sorted(len(one) for one in world.sums) == [5, 5, 9]
    assert world.least_support == 1


def test_the_search_finds_two_survivor_sets_of_one_attempt_where_few_signatures_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With groups broken as well: under whole groups two sets tell nobody apart."""
    monkeypatch.setattr(Partition, "is_union", any_union)
    monkeypatch.setattr(silo_unmasking, "check_agreements", lambda *_: None)
    assert found(tmp_path, SHAPES[0], "few signatures")


def test_rank_tells_what_can_be_subtracted() -> None:
    a, b, c, d = names = silo_names(4)
    assert least_support([frozenset(names)], names) == 4
    assert least_support([frozenset(names), frozenset((a, b, c))], names) == 1
    assert least_support([frozenset((a, b)), frozenset((c, d))], names) == 2
    assert least_support([frozenset((a, b)), frozenset((b, c)), frozenset((a, c))], names) == 1
    assert least_support([frozenset(names)], (a, b, c)) == 3, "what colluders put in is known"
    assert least_support([], names) is None
    assert least_support([frozenset((a, b)), frozenset((c, d)), frozenset((a, b, c))], names) == 1
    assert least_support([frozenset((a, b)), frozenset((c, d)), frozenset((a, b, c))], names, (a,)) == 2
    assert least_support([frozenset((a, b))], names, (c, d)) is None
