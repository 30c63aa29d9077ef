"""The coordinator's side of release groups: what is proposed, whose signatures it keeps, and what of that a restart
brings back."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Iterable
from pathlib import Path

import pytest

from lorica_coordinator.edges.database.round_store import SqlRoundStore
from lorica_coordinator.edges.upkeep.newest_in_log import newest_groups, newest_told
from lorica_coordinator.service.records import EnrolledSilo, Invitation
from lorica_coordinator.service.release_groups import EarlierGroups, ReleaseGroups
from lorica_coordinator.service.threads import Threads
from lorica_security.audit.entry import Event
from lorica_security.errors import AuthorisationError, Conflict, IntegrityError, MalformedMessage, StateError, WrongTime
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.succession import Succession, succession_statement
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.secure_aggregation.groups.release_groups import (
    Link,
    Partition,
    Promise,
    SignedLink,
    first_link,
    signature_of,
    successor,
)
from silo_wire.canonical import digest_of
from tests.support.rounds import T0
from tests.support.secagg_federation import FEDERATION, identity_key, silo_names

NAMES = silo_names(6)
EVERYBODY = first_link(FEDERATION, Partition.of([NAMES]))
HALVES = (NAMES[:3], NAMES[3:])


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "state.sqlite"
    store = SqlRoundStore(path, FEDERATION)
    for name in NAMES:
        secret = digest_of(f"secret of {name}".encode())
        store.invite(Invitation(silo=name, secret_digest=bytes.fromhex(secret), expires_unix_s=T0 + 100, pin="a pin"))
        silo = EnrolledSilo(
            silo=name,
            identity_public_key=public_key_bytes(identity_key(name).public_key()),
            certificate_serial=name,
            certificate_digest=digest_of(name.encode()),
            certificate_expires_unix_s=T0 + 86_400,
            enrolled_unix_s=T0,
            last_seen_unix_s=0.0,
        )
        store.enrol(silo, secret_digest=bytes.fromhex(secret))
    store.close()
    return path


@pytest.fixture
async def store(enrolled: Path, tmp_path: Path) -> AsyncIterator[SqlRoundStore]:
    shutil.copy(enrolled, tmp_path / "state.sqlite")
    opened = SqlRoundStore(tmp_path / "state.sqlite", FEDERATION)
    yield opened
    opened.close()


async def groups_of(store: SqlRoundStore) -> ReleaseGroups:
    """As a coordinator that has just begun has them."""
    groups = ReleaseGroups(federation=FEDERATION, store=store, threads=Threads())
    await groups.load()
    return groups


async def sign(groups: ReleaseGroups, link: Link, silos: Iterable[SiloName]) -> None:
    for name in silos:
        await groups.sign(name, link.digest, signature_of(link, identity_key(name)))


async def standing(store: SqlRoundStore) -> ReleaseGroups:
    groups = await groups_of(store)
    await groups.propose_first([NAMES], colluders=0)
    await sign(groups, EVERYBODY, NAMES)
    assert groups.head == EVERYBODY
    return groups


async def test_the_first_groups_stand_with_the_last_signature_and_after_a_restart(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    with pytest.raises(StateError, match="coordinator groups propose"):
        groups.require_head()
    await groups.propose_first([NAMES], colluders=0)
    await sign(groups, EVERYBODY, NAMES[:-1])
    for each in (groups, await groups_of(store)):
        assert each.head is None
        assert each.waits_for() == (frozenset(NAMES[-1:]), 1)
        with pytest.raises(StateError, match=NAMES[-1]):
            each.require_head()
    groups = await groups_of(store)
    await sign(groups, EVERYBODY, NAMES[-1:])
    for each in (groups, await groups_of(store)):
        assert each.require_head() == EVERYBODY
        assert each.proposed is None
        assert [silo for silo, _ in each.after(1)[0].signatures] == list(NAMES)


async def test_no_signature_is_lost_where_silos_sign_at_the_same_time(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    await groups.propose_first([NAMES], colluders=0)
    await asyncio.gather(*(sign(groups, EVERYBODY, [name]) for name in NAMES))
    assert groups.head == EVERYBODY


async def test_a_successor_stands_with_more_than_half_and_later_signatures_are_kept_too(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    await groups.propose([NAMES], colluders=1)
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=1))
    await sign(groups, first, NAMES)
    proposed = (await groups.propose(HALVES, colluders=0)).link
    assert proposed == successor(first, Partition.of(HALVES), Promise())
    await sign(groups, proposed, NAMES[:3])
    assert groups.head == first, "three of six, and one that may sign twice"
    await sign(groups, proposed, NAMES[3:4])
    assert groups.head == proposed
    await sign(groups, proposed, NAMES[4:])
    again = await groups_of(store)
    assert [one.link for one in again.after(0)] == [first, proposed]
    assert len(again.after(2)[0].signatures) == 6


async def test_release_groups_promise_what_the_plan_and_the_operator_say_and_what_stands_else(
    store: SqlRoundStore,
) -> None:
    groups = await groups_of(store)
    await groups.propose_first([NAMES], colluders=2)
    first = first_link(FEDERATION, Partition.of([NAMES]), Promise(colluders=2, smallest_group=4))
    await sign(groups, first, NAMES)
    assert groups.require_head(colluders=2) == first
    with pytest.raises(
        StateError, match=r"to hold against 3 colluders, release groups 1 hold against 2.*--colluders 3"
    ):
        groups.require_head(colluders=3)
    with pytest.raises(Conflict, match="these groups already"):
        await groups.propose([NAMES])
    divided: tuple[tuple[SiloName, ...], ...]
    for divided, asked, promise in (
        ((NAMES[:5],), {}, first.promise),
        ((NAMES,), {"colluders": 3}, Promise(colluders=3, smallest_group=5)),
        ((NAMES[:5],), {"smallest_group": 5}, Promise(colluders=2, smallest_group=5)),
        (HALVES, {"colluders": 0, "smallest_group": 3}, Promise()),
    ):
        assert (await groups.propose(divided, **asked)).link == successor(first, Partition.of(divided), promise)
    more = (await groups.propose([NAMES], colluders=3)).link
    assert (more.partition, more.promise.colluders) == (first.partition, 3)
    with pytest.raises(MalformedMessage, match="allowed are 4 to"):
        await groups.propose(HALVES, smallest_group=3)


async def test_a_promise_that_nothing_could_follow_is_proposed_to_nobody(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    with pytest.raises(
        StateError, match=r"against 4 colluders among 6 silos.*with --colluders 3 or less, or with 1 more"
    ):
        await groups.propose_first([NAMES], colluders=4)
    assert groups.proposed is None
    groups = await standing(store)
    for asked, says in (
        ({"colluders": 6}, "against 6 colluders among 6 silos.*or with 3 more silos: nothing was proposed"),
        ({"colluders": 4}, "--colluders 3 or less"),
        ({"colluders": 4, "smallest_group": 9}, "--colluders 3 or less"),
    ):
        with pytest.raises(StateError, match=says):
            await groups.propose([NAMES], **asked)
    with pytest.raises(StateError, match=r"are of 2 silos.*Propose groups of at least 3"):
        await groups.propose([NAMES[:2]])
    assert groups.proposed is None


async def test_a_group_of_fewer_silos_than_stands_promised_needs_a_smaller_promise(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    link = (await groups.propose([NAMES], smallest_group=5)).link
    await sign(groups, link, NAMES)
    with pytest.raises(
        StateError, match=r"has 4 silos, .* promised is 5: .* --smallest-group 4 that it is to be so small$"
    ):
        await groups.propose([NAMES[:4]])
    assert (await groups.propose([NAMES[:4]], smallest_group=4)).link.promise == Promise(smallest_group=4)


async def test_groups_of_one_are_proposed_where_that_is_said_and_promise_what_they_would_else(
    store: SqlRoundStore,
) -> None:
    groups = await groups_of(store)
    alone = [[name] for name in NAMES]
    with pytest.raises(StateError, match="--smallest-group 1 "):
        await groups.propose(alone, smallest_group=2)
    assert (await groups.propose(alone, smallest_group=1)).link.promise == Promise()
    assert (await groups.propose(alone, colluders=2, smallest_group=1)).link.promise == Promise(
        colluders=2, smallest_group=4
    )


async def test_another_proposal_takes_the_place_of_one_that_does_not_stand(store: SqlRoundStore) -> None:
    groups = await standing(store)
    first = (await groups.propose(HALVES)).link
    await sign(groups, first, NAMES[:2])
    second = (await groups.propose([NAMES[::2], NAMES[1::2]])).link
    again = await groups_of(store)
    for each in (groups, again):
        assert each.proposed is not None
        assert each.proposed.link == second
        assert each.proposed.signatures == ()
        with pytest.raises(WrongTime, match="fetch them again"):
            await sign(each, first, NAMES[2:3])


async def test_the_same_proposal_again_keeps_its_signatures(store: SqlRoundStore) -> None:
    groups = await standing(store)
    link = (await groups.propose(HALVES)).link
    await sign(groups, link, NAMES[:2])
    assert len((await groups.propose(HALVES)).signatures) == 2


async def test_what_is_told_to_silos_changes_with_every_signature(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    told: list[bytes] = []
    groups.on_change.append(lambda: told.append(groups.digest))
    before = groups.digest
    await groups.propose_first([NAMES], colluders=0)
    await sign(groups, EVERYBODY, NAMES)
    assert len({before, *told}) == len(NAMES) + 2
    await sign(groups, EVERYBODY, NAMES[:1])
    assert len(told) == len(NAMES) + 1, "the same signature is no news"


@pytest.mark.parametrize(
    ("divided", "error", "says"),
    [
        ([NAMES[:3], (*NAMES[3:], SiloName("nobody"))], StateError, "nobody, who are not enrolled"),
        ([NAMES[:3], NAMES[2:]], MalformedMessage, "in two of them"),
        ([NAMES, ()], MalformedMessage, "empty"),
        ([], MalformedMessage, "there is none"),
        ([NAMES], Conflict, "these groups already"),
        (
            [NAMES[:4], NAMES[4:]],
            StateError,
            "release group silo-04,silo-05 has 2 silos, .* promised is 3: put .* larger group, .* --smallest-group 2 ",
        ),
    ],
    ids=["a stranger", "twice", "an empty one", "none", "the same", "one of two"],
)
async def test_groups_that_are_none_are_not_proposed(
    store: SqlRoundStore, divided: list[tuple[SiloName, ...]], error: type[Exception], says: str
) -> None:
    groups = await standing(store)
    before = groups.digest
    with pytest.raises(error, match=says):
        await groups.propose(divided)
    assert groups.digest == before
    assert (await groups_of(store)).digest == before


async def test_a_false_signature_and_one_of_a_stranger_are_refused(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    link = (await groups.propose([NAMES[:3]])).link
    good = signature_of(link, identity_key(NAMES[0]))
    with pytest.raises(IntegrityError, match=f"silo {NAMES[1]} did not sign"):
        await groups.sign(NAMES[1], link.digest, good)
    with pytest.raises(AuthorisationError, match="in none of"):
        await groups.sign(NAMES[4], link.digest, signature_of(link, identity_key(NAMES[4])))
    with pytest.raises(WrongTime):
        await groups.sign(NAMES[0], EVERYBODY.digest, good)
    assert groups.waits_for()[1] == 3


# --- a coordinator that came from a backup ----------------------------------------------------------------------------


def signed_by(link: Link, silos: Iterable[SiloName]) -> SignedLink:
    return SignedLink(
        link=link, signatures=tuple((name, signature_of(link, identity_key(name))) for name in sorted(silos))
    )


FIRST_HALVES = successor(EVERYBODY, Partition.of(HALVES))
TOGETHER = successor(FIRST_HALVES, EVERYBODY.partition)
GIVEN = signed_by(EVERYBODY, NAMES), signed_by(FIRST_HALVES, NAMES[:4]), signed_by(TOGETHER, NAMES[2:])


async def test_links_that_a_backup_does_not_have_are_taken_back_from_a_silo(store: SqlRoundStore) -> None:
    groups = await standing(store)
    await groups.propose([NAMES[::2], NAMES[1::2]])  # what followed in the backup, and never stood
    told: list[SignedLink] = []
    groups.on_standing.append(told.append)
    news = groups.digest
    await groups.take_back(NAMES[0], GIVEN)
    assert tuple(told) == GIVEN[1:]
    assert groups.digest != news
    for each in (groups, await groups_of(store)):
        assert each.require_head() == TOGETHER
        assert each.proposed is None
        assert each.after(2) == GIVEN[1:]
    await groups.take_back(NAMES[1], GIVEN)
    assert tuple(told) == GIVEN[1:], "the second silo brings nothing new"
    await sign(groups, TOGETHER, NAMES[:1])
    assert len(groups.after(3)[0].signatures) == 5


@pytest.mark.parametrize("named", [EVERYBODY, TOGETHER], ids=["the first", "the newest"])
async def test_a_whole_chain_is_taken_back_where_none_stands_and_the_operator_names_one_of_it(
    store: SqlRoundStore, named: Link
) -> None:
    groups = await groups_of(store)
    news: list[bytes] = []
    groups.on_change.append(lambda: news.append(groups.digest))
    before = groups.digest
    await groups.take_back(NAMES[0], GIVEN)
    assert (groups.head, news) == (None, [])
    await groups.begin_with(named.digest)
    assert news[0] != before, "silos give theirs again"
    await groups.take_back(NAMES[1], GIVEN[:1] if named == TOGETHER else ())
    assert groups.head is None, "that silo holds an older one, or none"
    await groups.take_back(NAMES[0], GIVEN)
    assert (await groups_of(store)).after(0) == GIVEN
    with pytest.raises(StateError, match=r"release groups 3 stand .* nothing in their place"):
        await groups.begin_with(EVERYBODY.digest)


ALONE = first_link(FEDERATION, Partition.of([NAMES[:1]]), Promise(colluders=10_000, smallest_group=10_002))
THREE = first_link(FEDERATION, Partition.of([NAMES[:3]]))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ([signed_by(ALONE, NAMES[:1])], None),
        ([signed_by(THREE, NAMES[:3])], None),
        ([signed_by(THREE, NAMES[:3]), *GIVEN[1:]], TOGETHER),
        ([signed_by(THREE, NAMES[:3]), GIVEN[0]], EVERYBODY),
        ([signed_by(ALONE, NAMES[:1])], ALONE),
        ([signed_by(EVERYBODY, NAMES[:-1])], EVERYBODY),
        (GIVEN[1:], TOGETHER),
    ],
    ids=[
        "of itself alone",
        "of silos that work together",
        "before those that the operator named",
        "with those that the operator named",
        "what nothing could follow",
        "one did not sign",
        "the first is left out",
    ],
)
async def test_attack_silos_begin_the_chain_with_first_groups_of_their_own(
    store: SqlRoundStore, given: list[SignedLink], named: Link | None
) -> None:
    """Nothing stands yet; what the others signed is not dropped for it, also after a restart."""
    groups = await groups_of(store)
    await groups.propose_first([NAMES], colluders=0)
    await sign(groups, EVERYBODY, NAMES[:-1])
    if named is not None:
        await groups.begin_with(named.digest)
    await groups.take_back(NAMES[0], given)
    for each in (groups, await groups_of(store)):
        assert each.head is None
        assert each.waits_for() == (frozenset(NAMES[-1:]), 1)
    await sign(groups, EVERYBODY, NAMES[-1:])
    assert groups.head == EVERYBODY


async def test_attack_a_link_that_nothing_could_follow_is_not_taken_back(store: SqlRoundStore) -> None:
    groups = await standing(store)
    much = successor(EVERYBODY, EVERYBODY.partition, Promise(colluders=4, smallest_group=6))
    await groups.take_back(NAMES[0], [signed_by(much, NAMES)])
    assert groups.head == EVERYBODY


async def test_signatures_of_who_has_no_say_are_not_taken_back(store: SqlRoundStore) -> None:
    groups = await groups_of(store)
    link = (await groups.propose([NAMES[:4]])).link
    await sign(groups, link, NAMES[:4])
    again = successor(link, link.partition)
    await groups.take_back(NAMES[0], [signed_by(again, NAMES)])
    assert groups.after(2) == (signed_by(again, NAMES[:4]),)


@pytest.mark.parametrize(
    "given",
    [
        (signed_by(FIRST_HALVES, NAMES[:3]),),
        (SignedLink(link=FIRST_HALVES, signatures=tuple((name, bytes(64)) for name in NAMES)),),
        (signed_by(TOGETHER, NAMES),),
        (signed_by(successor(first_link(FEDERATION, FIRST_HALVES.partition), EVERYBODY.partition), NAMES),),
        (signed_by(first_link(FEDERATION, FIRST_HALVES.partition), NAMES),),
    ],
    ids=["too few", "false", "one is left out", "another chain", "another first one"],
)
async def test_attack_a_silo_gives_links_that_do_not_stand(store: SqlRoundStore, given: tuple[SignedLink, ...]) -> None:
    groups = await standing(store)
    before = groups.digest
    await groups.take_back(NAMES[0], given)
    assert (groups.head, groups.digest) == (EVERYBODY, before)


async def test_a_signature_of_the_key_before_counts_where_links_are_taken_back(store: SqlRoundStore) -> None:
    """The other silos hold those that were given when the link stood."""
    groups = await standing(store)
    old, new = identity_key(NAMES[0]), identity_key("a later key")
    identity = Identity(FEDERATION, Role.SILO, NAMES[0])
    store.succeed(
        NAMES[0],
        Succession(
            predecessor=old.public_key(),
            successor=new.public_key(),
            statement=succession_statement(old, identity=identity, new_key=new.public_key()),
        ),
        at=T0,
    )
    await groups.take_back(NAMES[1], GIVEN)
    assert groups.head == TOGETHER


async def test_what_silos_hold_and_cannot_give_back_is_told_with_the_remedy_until_it_stands(
    store: SqlRoundStore,
) -> None:
    groups = await standing(store)
    assert groups.behind(NAMES) is None
    await groups.take_back(NAMES[5], (signed_by(FIRST_HALVES, NAMES[:3]),))
    says = groups.behind(NAMES)
    assert says is not None
    assert says.startswith("silo silo-05 holds release groups 2, here release groups 1 stand, and they are not taken")
    assert "no good signature is with them of silo-03, silo-04, silo-05" in says
    command = (
        "`coordinator groups propose silo-00,silo-01,silo-02 silo-03,silo-04,silo-05 --colluders 0 --smallest-group 3`"
    )
    assert says.endswith(command)
    link = (await groups.propose(HALVES, colluders=0, smallest_group=3)).link
    assert link == FIRST_HALVES, "what the command proposes is what they hold"
    await sign(groups, link, NAMES[:4])
    assert groups.behind(NAMES) is None
    await groups.take_back(NAMES[5], (signed_by(successor(EVERYBODY, EVERYBODY.partition), NAMES),))
    assert groups.behind(NAMES) is None, "as old as what stands"


async def test_groups_that_the_log_tells_of_are_waited_for_and_no_first_ones_take_their_place(
    store: SqlRoundStore, tmp_path: Path
) -> None:
    log = AuditLog(
        tmp_path / "audit", writer=Identity(FEDERATION, Role.COORDINATOR).uri, key=identity_key("log"), clock=lambda: T0
    )
    assert newest_groups(newest_told(log.place)) is None
    for link in (EVERYBODY, FIRST_HALVES):
        said = "; ".join(", ".join(group) for group in link.partition.groups)
        log.append(Event.GROUPS_STAND, number=link.number, digest=link.digest.hex(), groups=said)
    log.append(Event.SEALED)
    groups = await groups_of(store)
    groups.stood = newest_groups(newest_told(log.place))
    assert groups.stood == EarlierGroups(number=2, digest=FIRST_HALVES.digest.hex(), groups=HALVES)
    await groups.propose_first([NAMES], colluders=0)
    assert groups.proposed is None
    with pytest.raises(StateError, match="are to come back from the silos first"):
        groups.require_head()
    says = groups.behind(NAMES[:4])
    assert says is not None
    assert "stood before this coordinator was restored, here none stand" in says
    assert "waiting for silo-04, silo-05; where nobody has them any more, restore a newer backup" in says
    await groups.take_back(NAMES[0], GIVEN[:1])
    assert groups.head is None, "it does not lead to what the log tells of"
    await groups.begin_with(EVERYBODY.digest)
    await groups.take_back(NAMES[0], GIVEN[:1])
    says = groups.behind(NAMES)
    assert says is not None
    assert "here release groups 1 stand" in says
    assert says.endswith(
        "those that are connected have none of them; where nobody has them any more, "
        "`coordinator groups propose silo-00,silo-01,silo-02 silo-03,silo-04,silo-05`"
    )
    await groups.take_back(NAMES[4], GIVEN[1:])
    assert groups.behind(()) is None


async def test_a_chain_that_leads_to_what_the_own_log_tells_of_needs_no_word_of_the_operator(
    store: SqlRoundStore,
) -> None:
    groups = await groups_of(store)
    groups.stood = EarlierGroups(number=2, digest=FIRST_HALVES.digest.hex(), groups=HALVES)
    await groups.take_back(NAMES[0], GIVEN)
    assert groups.head == TOGETHER
