"""Files of a silo's memory that somebody edited, damaged or put back: each is refused, and people's reset believes
nothing unproven."""

import json
import shutil
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import ConfigurationError, PolicyRefusal, StateError
from lorica_security.host.files import write_private
from lorica_security.host.key_file import write_key
from lorica_security.identifiers import SiloName
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key, public_key_bytes
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.identity.succession import Succession
from lorica_security.secure_aggregation.attempt import MAX_NUMBER
from lorica_security.secure_aggregation.groups.release_groups import (
    MAX_LINKS,
    Link,
    Partition,
    SignedLink,
    first_link,
    signature_of,
    successor,
)
from lorica_security.secure_aggregation.silo.memory import MAX_ANNOUNCED, PlanMemory, SiloMemory
from silo_agent.edges.disk.private_record import AS_HELD
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.group_chain import GroupChain
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_credentials
from silo_agent.edges.memory.identity_succession import predecessors, seal_anew, succeed
from silo_agent.edges.memory.lineages import Lineages
from silo_agent.edges.memory.masking_journal import MaskingJournal, masking_journal
from silo_agent.edges.memory.trust_store import TrustStore, trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.canonical import Digest
from silo_wire.codecs.groups_codec import GroupsOffer, signed_groups_to_bytes
from silo_wire.codecs.secure_journals_codec import memory_to_bytes
from tests.support.federation_peer import TestNet, small_bundle
from tests.support.secagg_federation import attempt, identity_key, silo_names
from tests.unit.test_agent_lineages import killed_before

NAMES = silo_names(5)
OWN, OTHERS = NAMES[0], NAMES[1:]
CREDENTIALS = TestNet.create().credentials("127.0.0.1:1", OWN)
SEAL = Seal(CREDENTIALS.identity_key)
BUNDLE = small_bundle(
    aggregation={"secure_aggregation": True, "max_weight": 100.0}, schedule={"rounds": 9, "min_silos": 3}
)
PLAN = bytes.fromhex(BUNDLE.plan.digest)
POLICY = SiloPolicy(rules=PolicyRules(), silo=OWN)
ALL = first_link(CREDENTIALS.federation, Partition.of([NAMES]))
APART = successor(ALL, Partition.of([[OWN], OTHERS]), ALL.promise)
"""Leaves this silo a group of its own."""
FILES = ("masking/memory", "lineages.json", "release-groups.json", "peers.json")


def silo_in(root: Path) -> SiloFolder:
    folder = SiloFolder(root)
    folder.make()
    return folder


def journal(folder: SiloFolder) -> MaskingJournal:
    return masking_journal(folder, CREDENTIALS)


def pins(folder: SiloFolder, *, first_use: bool = False) -> TrustStore:
    return trust_store(folder, CREDENTIALS, first_use=first_use)


def chain(folder: SiloFolder) -> GroupChain:
    return group_chain(folder, CREDENTIALS, POLICY)


def signed(link: Link, *silos: SiloName) -> SignedLink:
    keys = {name: CREDENTIALS.identity_key if name == OWN else identity_key(name) for name in silos or NAMES}
    return SignedLink(
        link=link, signatures=tuple((name, signature_of(link, key)) for name, key in sorted(keys.items()))
    )


def offer(*links: Link, proposed: Link | None = None) -> GroupsOffer:
    return GroupsOffer(
        links=tuple(map(signed, links)), proposed=None if proposed is None else SignedLink(link=proposed), identities=()
    )


def masked(folder: SiloFolder) -> SiloFolder:
    """A silo that pinned the others, holds release groups with them and took part in round 3."""
    for name in OTHERS:
        pins(folder).add(name, identity_key(name).public_key())
    chain(folder).take(offer(ALL))
    journal(folder).saw(BUNDLE, BUNDLE.plan.initial_model)
    memory = journal(folder).memory()
    for change in (SiloMemory.joined, SiloMemory.answered):
        memory = change(memory, attempt(plan=PLAN, round=3))
        journal(folder).remember(memory)
    assert journal(folder).problem() is None
    assert chain(folder).head == ALL
    return folder


def rewritten(path: Path, edit: Callable[[Any], None], *, seal: Seal | None = None) -> None:
    content = json.loads(unsealed(path.read_bytes()))
    edit(content)
    raw = json.dumps(content).encode()
    write_private(path, raw if seal is None else seal.sealed(path.name, raw))


# --- pins
# --------------------------------------------------------------------------------------------------------------


def test_pins_are_sealed_and_counted_and_a_kill_before_they_are_costs_nothing(tmp_path: Path) -> None:
    folder = silo_in(tmp_path)

    for name in OTHERS[:2]:
        with killed_before(Lineages, "hold_pins", nth=2):
            pins(folder).add(name, identity_key(name).public_key())
        assert name in pins(folder).identities()
        assert journal(folder).problem() is None
        pins(folder).add(name, identity_key(name).public_key())  # makes up for it
    SEAL.opened("peers.json", folder.peers.read_bytes())
    before = folder.lineages.read_bytes()
    pins(folder).add(OTHERS[0], identity_key(OTHERS[0]).public_key())
    assert folder.lineages.read_bytes() == before, "nothing new is nothing written"


@pytest.mark.parametrize("how", ["put back", "deleted"])
def test_attack_an_older_peers_json_brings_no_removed_pin_back(tmp_path: Path, how: str) -> None:
    folder = masked(silo_in(tmp_path / "silo"))
    shutil.copy2(folder.peers, tmp_path / "older")
    pins(folder).remove(OTHERS[0])
    if how == "put back":
        shutil.copy2(tmp_path / "older", folder.peers)
    else:
        folder.peers.unlink()
    for call in (
        pins(folder).identities,
        pins(folder).removed,
        lambda: pins(folder).add(OTHERS[1], identity_key(OTHERS[1]).public_key()),
        lambda: pins(folder, first_use=True).trusted_on_first_use(OTHERS[0], identity_key(OTHERS[0]).public_key()),
        journal(folder).check,
    ):
        with pytest.raises(PolicyRefusal, match=r"peers\.json is missing or comes from a backup") as refusal:
            call()
        assert refusal.value.rule == "masking_memory"
    (doubt,) = (it for it in journal(folder).doubts() if "peers.json" in it)
    assert "compare each key of `silo-agent trust list`" in doubt
    journal(folder).reset()
    assert journal(folder).problem() is None
    stranger = SiloName("silo-99")
    for _ in range(2):  # whose pins were removed is not known any more, and a reset again does not tell
        with pytest.raises(PolicyRefusal, match="taken over with"):
            pins(folder, first_use=True).trusted_on_first_use(stranger, identity_key(stranger).public_key())
        journal(folder).reset()
    pins(folder).add(stranger, identity_key(stranger).public_key())
    assert journal(folder).problem() is None


def test_attack_a_stranger_written_into_peers_json_is_no_pin(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    key = public_key_bytes(identity_key("phantom").public_key()).hex()
    rewritten(
        folder.peers,
        lambda content: content["peers"].update(phantom={**content["peers"][OTHERS[0]], "identity_key": key}),
    )
    with pytest.raises(ConfigurationError, match=r"peers\.json is damaged \(peers\.json has no seal"):
        pins(folder).identities()
    assert "peers.json has no seal" in str(journal(folder).problem())
    journal(folder).reset()
    assert SiloName("phantom") in pins(folder).identities(), "people were told to look for it"
    pins(folder).remove(SiloName("phantom"))
    assert set(pins(folder).identities()) == set(OTHERS)


def test_pins_that_nothing_speaks_against_are_as_they_were_after_a_reset_for_another_file(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    (folder.masking / "memory").unlink()
    assert journal(folder).doubts() == ()
    journal(folder).reset()
    assert set(pins(folder).identities()) == set(OTHERS)
    stranger = SiloName("silo-99")
    pins(folder, first_use=True).trusted_on_first_use(stranger, identity_key(stranger).public_key())


# --- the keys before
# ---------------------------------------------------------------------------------------------------


async def rotated(tmp_path: Path) -> tuple[SiloFolder, SiloCredentials]:
    folder = SiloFolder(tmp_path / "silo")
    store_credentials(folder, CREDENTIALS)
    folder.make()

    async def send(_succession: Succession, _possession: bytes) -> None:
        return None

    after = CREDENTIALS
    for _ in range(2):
        after = await succeed(folder, after, send, lambda *_: None)
    return folder, after


async def test_attack_a_key_written_into_predecessors_json_is_nobodys(tmp_path: Path) -> None:
    folder, present = await rotated(tmp_path)
    first, second = predecessors(folder, present)
    assert first.key == public_key_bytes(CREDENTIALS.identity_key.public_key())
    thief = public_key_bytes(identity_key("thief").public_key()).hex()
    whole = folder.predecessors.read_bytes()
    seal = Seal(present.identity_key)
    for edit, by, says in (
        (lambda content: content["keys"][0].update(key=thief), None, "no seal"),
        (lambda content: content["keys"][0].update(key=thief), SEAL, "another identity key"),
        (lambda content: content["keys"][0].update(key=thief), seal, "signature"),
        (lambda content: content["keys"][1].update(statement="00" * 64), seal, "signature"),
        (lambda content: content["keys"].pop(), seal, "another successor"),
        (
            lambda content: content["keys"].pop(0) and content["keys"].append(content["keys"][0]),
            seal,
            "another successor",
        ),
    ):
        write_private(folder.predecessors, whole)
        rewritten(folder.predecessors, edit, seal=by)
        with pytest.raises(ConfigurationError, match=f"predecessors.json is damaged .*{says}.*move it away"):
            predecessors(folder, present)
    folder.predecessors.unlink()
    assert predecessors(folder, present) == ()
    assert second.successor == public_key_bytes(present.identity_key.public_key())


async def test_a_rotation_that_was_killed_after_sealing_is_what_is_told_of(tmp_path: Path) -> None:
    folder, present = await rotated(tmp_path)
    new = new_identity_key()

    write_key(folder.next_identity_key, identity_key_to_pem(new), {})
    seal_anew(folder, Seal(present.identity_key), Seal(new))
    with pytest.raises(StateError, match="rotation of the identity key was begun and not finished"):
        predecessors(folder, load_credentials(folder))


# --- what people said
# --------------------------------------------------------------------------------------------------


def forged(folder: SiloFolder, **more: Any) -> None:
    said = {
        "proposed": "",
        "approved": {APART.digest.hex(): "2026-11-24T00:00:00Z"},
        "approved_groups": [[OWN]],
        "approved_atoms": [[OWN]],
        **more,
    }
    rewritten(folder.release_groups, lambda content: content.update(said))


def test_attack_a_reset_seals_no_approval_that_nobody_gave(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    assert chain(folder).take(offer(proposed=APART)).waits is not None
    forged(folder)
    assert "no seal" in str(journal(folder).problem())
    assert any("release-groups.json says, which is dropped" in doubt for doubt in journal(folder).doubts())
    journal(folder).reset()
    assert journal(folder).problem() is None
    assert chain(folder).approved_groups == chain(folder).approved_atoms == frozenset()
    assert chain(folder).head is None
    taken = chain(folder).take(offer(ALL, proposed=APART))
    assert taken.to_sign == ()
    assert taken.waits is not None
    assert "of its own" in taken.waits
    assert chain(folder).take(GroupsOffer(links=(signed(APART, *OTHERS),), proposed=None, identities=())).links == ()
    assert chain(folder).head == ALL


@pytest.mark.parametrize("how", ["no seal", "put back", "beside another list", "beside an older list"])
def test_what_was_approved_of_held_groups_is_approved_anew_after_a_reset(tmp_path: Path, how: str) -> None:
    """Also an older copy's: an approval in it may have been taken back since."""
    folder = masked(silo_in(tmp_path))
    chain(folder).take(offer(proposed=APART))
    chain(folder).approve(APART.digest.hex())
    chain(folder).take(offer(APART))
    assert (chain(folder).head, chain(folder).standing().unapproved) == (APART, ())
    if how == "put back":
        older = folder.release_groups.read_bytes()
        chain(folder).take(offer(proposed=successor(APART, Partition.of([NAMES]), APART.promise)))
        folder.release_groups.write_bytes(older)
    elif how == "no seal":
        rewritten(folder.release_groups, lambda content: None)
    elif how == "beside an older list":
        older = folder.lineages.read_bytes()
        journal(folder).saw(BUNDLE, Digest("ab" * 32))
        folder.lineages.write_bytes(older)
    else:
        rewritten(folder.lineages, lambda content: None)
    doubts = journal(folder).doubts()
    journal(folder).reset()
    if how == "no seal":
        assert chain(folder).head is None
        assert chain(folder).take(offer(ALL, APART)).waits is not None
        assert chain(folder).approve(APART.digest.hex())[0] == APART
        chain(folder).take(offer(ALL, APART))
        assert (chain(folder).head, chain(folder).standing().unapproved) == (APART, ())
        return
    assert chain(folder).head == APART
    assert any("approvals, which are dropped" in doubt for doubt in doubts) or how != "put back"
    assert chain(folder).standing().unapproved == ((OWN,),)
    link, told = chain(folder).approve(APART.digest.hex())
    assert link == APART
    assert "of its own" in told
    assert chain(folder).standing().unapproved == ()
    assert chain(folder).approved_groups == {(OWN,)}


def test_a_signature_is_taken_back_also_where_what_was_signed_is_not_here_any_more(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    one, two = (
        successor(ALL, Partition.of([NAMES, [SiloName(f"{letter}-{at}") for at in range(3)]]), ALL.promise)
        for letter in "xy"
    )
    assert chain(folder).take(offer(proposed=one)).to_sign == (one,)
    rewritten(folder.release_groups, lambda content: None)
    journal(folder).reset()
    with pytest.raises(PolicyRefusal, match="has signed"):
        chain(folder).take(offer(ALL, proposed=two))
    with pytest.raises(StateError, match="not signed to follow"):
        chain(folder).withdraw(two.digest.hex())
    assert chain(folder).withdraw(one.digest.hex()) is None
    assert chain(folder).take(offer(ALL, proposed=two)).to_sign == (two,)


def test_attack_a_link_that_somebody_wrote_is_not_held_after_a_reset(tmp_path: Path) -> None:
    """Its signatures are looked at when it is offered, and never again."""
    folder, elsewhere = masked(silo_in(tmp_path / "silo")), silo_in(tmp_path / "elsewhere")
    forged = first_link(CREDENTIALS.federation, Partition.of([NAMES[:4]]))
    content = json.loads(unsealed(folder.release_groups.read_bytes()))
    content["held"] = b64encode(signed_groups_to_bytes(SignedLink(link=forged))).decode()
    write_private(folder.release_groups, json.dumps(content).encode())
    journal(folder).reset()
    assert chain(folder).head is None
    assert not chain(folder).is_new
    chain(folder).take(offer(ALL))
    assert chain(folder).head == ALL
    assert chain(elsewhere).is_new


def test_attack_a_proposal_that_somebody_wrote_is_not_shown_to_people_after_a_reset(tmp_path: Path) -> None:
    """They could approve it, and with it sets that no coordinator ever offered."""
    folder = masked(silo_in(tmp_path))
    proposed = b64encode(signed_groups_to_bytes(SignedLink(link=APART))).decode()
    rewritten(folder.release_groups, lambda content: content.update(proposed=proposed))
    journal(folder).reset()
    assert chain(folder).standing().proposed is None
    with pytest.raises(StateError, match="are proposed or held"):
        chain(folder).approve(APART.digest.hex())


@pytest.mark.parametrize("taken_over", ["nothing", "the copy"])
def test_attack_release_groups_of_before_a_reset_are_put_back_after_it(tmp_path: Path, taken_over: str) -> None:
    """Whatever was left then: what is written anew is counted on from every change that is known of."""
    folder = masked(silo_in(tmp_path))
    chain(folder).take(offer(proposed=APART))
    older = folder.release_groups.read_bytes()
    chain(folder).approve(APART.digest.hex())
    if taken_over == "nothing":
        folder.release_groups.unlink()
    else:
        folder.release_groups.write_bytes(older)
    journal(folder).reset()
    for copy in (older, older):
        folder.release_groups.write_bytes(copy)
        with pytest.raises(PolicyRefusal, match=r"release-groups\.json is missing or comes from a backup"):
            _ = chain(folder).head
        journal(folder).reset()


def test_attack_links_that_were_lost_are_known_of_after_each_further_loss(tmp_path: Path) -> None:
    """None before them is held, whichever of the two files is lost next: each has the number."""
    later = successor(ALL, Partition.of([NAMES, [SiloName(f"x-{at}") for at in range(3)]]), ALL.promise)
    for lost in ("release-groups.json", "lineages.json"):
        folder = masked(silo_in(tmp_path / lost))
        chain(folder).take(offer(later))
        assert chain(folder).head == later
        folder.release_groups.unlink()
        journal(folder).reset()
        chain(folder).take(offer(ALL))
        (folder.root / lost).unlink()
        journal(folder).reset()
        chain(folder).take(offer(ALL))
        assert chain(folder).head is None
        chain(folder).take(offer(ALL, later))
        assert chain(folder).head == later


# --- numbers that nothing proves
# ---------------------------------------------------------------------------------------


def test_a_damaged_number_of_release_groups_is_told_to_people_who_can_set_it_right(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    rewritten(folder.lineages, lambda content: content["groups"].update(number=9))
    told = "; ".join(journal(folder).doubts())
    assert "last rounds 3 of plan" in told
    assert "release groups 1 are here and number 9 is noted" in told
    assert AS_HELD in told
    for _ in range(2):  # sealed as truth, and a reset again does not mend it
        journal(folder).reset()
        assert journal(folder).problem() is None
        assert chain(folder).head is None
        assert journal(folder).groups_short()
    journal(folder).reset(groups_as_held=True)
    assert journal(folder).problem() is None
    assert chain(folder).head == ALL
    assert not chain(folder).is_new
    assert not journal(folder).groups_short()
    journal(folder).reset()
    assert chain(folder).head == ALL


def test_first_use_stays_over_where_people_say_that_no_release_groups_were_lost(tmp_path: Path) -> None:
    folder = masked(silo_in(tmp_path))
    folder.release_groups.unlink()
    journal(folder).reset(groups_as_held=True)
    assert not chain(folder).is_new
    chain(folder).take(offer(ALL))
    assert chain(folder).head == ALL


HUGE = [MAX_LINKS - 1, 1 << 40, (1 << 62) - 1, 1 << 64, -1]


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("lineages.json", ("sequence",)),
        ("lineages.json", ("changes",)),
        ("lineages.json", ("pins",)),
        ("lineages.json", ("groups", "changes")),
        ("lineages.json", ("groups", "number")),
        ("lineages.json", ("plans", BUNDLE.plan.digest, "round")),
        ("release-groups.json", ("changes",)),
        ("release-groups.json", ("lost",)),
        ("peers.json", ("changes",)),
    ],
    ids=lambda value: "-".join(value)[-16:] if isinstance(value, tuple) else value,
)
def test_attack_no_number_in_a_file_keeps_people_from_going_on(
    tmp_path: Path, file: str, where: tuple[str, ...], number: int
) -> None:
    folder = masked(silo_in(tmp_path))

    def edit(content: Any) -> None:
        for part in where[:-1]:
            content = content[part]
        content[where[-1]] = number

    rewritten(folder.root / file, edit)
    goes_on(folder)


@pytest.mark.parametrize(
    ("memory", "known"),
    [
        (SiloMemory(sequence=MAX_NUMBER - 2), 1),
        (SiloMemory(sequence=2), MAX_NUMBER - 2),
        (SiloMemory(sequence=2, plans=(PlanMemory(plan=PLAN, round=MAX_NUMBER - 1, number=1, answered=True),)), 1),
    ],
    ids=["sequence", "known", "round"],
)
def test_attack_no_number_in_the_memory_keeps_people_from_going_on(
    tmp_path: Path, memory: SiloMemory, known: int
) -> None:
    folder = masked(silo_in(tmp_path))
    write_private(folder.masking / "memory", memory_to_bytes(memory, lineages=known))
    goes_on(folder)


def test_attack_no_list_of_what_others_saw_keeps_people_from_going_on(tmp_path: Path) -> None:
    """A memory has room for so many advertisements: of more it would forget some, and be refused again."""
    folder = masked(silo_in(tmp_path))
    told = {f"{number:064x}": "silo bank-b" for number in range(MAX_ANNOUNCED + 1)}
    rewritten(folder.lineages, lambda content: content.update(forgotten=told))
    goes_on(folder)


def goes_on(folder: SiloFolder) -> None:
    """What is not whole is refused by name and with its remedy, which works: also a second time, for rounds that come
    later."""
    if (problem := journal(folder).problem()) is None:
        return
    assert problem.rule == "masking_memory"
    assert "silo-agent trust reset-memory" in str(problem)
    for _ in range(2):
        journal(folder).doubts()
        memory = journal(folder).reset()
        assert journal(folder).problem() is None
        assert journal(folder).memory() == memory
    chain(folder).standing()
    journal(folder).reset(groups_as_held=True)
    for peer in pins(folder).peers():
        pins(folder).remove(peer.silo)  # people compare each
    for name in OTHERS:
        pins(folder).add(name, identity_key(name).public_key())
    chain(folder).take(offer(ALL))
    assert chain(folder).head == ALL
    memory = journal(folder).memory()
    last = memory.of(PLAN)
    later = attempt(plan=PLAN, round=1 if last is None else last.round + 1)
    journal(folder).saw(BUNDLE, BUNDLE.plan.initial_model)
    journal(folder).remember(memory.joined(later))
    assert journal(folder).problem() is None


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> SiloFolder:
    return masked(silo_in(tmp_path_factory.mktemp("whole") / "silo"))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), file=st.sampled_from(FILES))
def test_attack_whatever_becomes_of_a_file_people_can_go_on(
    whole: SiloFolder, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, file: str
) -> None:
    """Flipped bits, a file that was cut off, another silo's, one of another name: under its old seal or under none."""
    folder = SiloFolder(tmp_path_factory.mktemp("damaged") / "silo")
    shutil.copytree(whole.root, folder.root)
    path = folder.root / file
    raw = path.read_bytes()
    match data.draw(st.sampled_from(["bits", "cut", "another silo's", "another file", "unsealed bits"])):
        case "bits":
            damaged = flipped(raw, data)
        case "unsealed bits":
            damaged = flipped(unsealed(raw), data)
        case "cut":
            damaged = raw[: data.draw(st.integers(0, len(raw)))]
        case "another silo's":
            damaged = Seal(identity_key("silo-01")).sealed(path.name, unsealed(raw))
        case _:
            damaged = (folder.root / data.draw(st.sampled_from(FILES))).read_bytes()
    write_private(path, damaged)
    goes_on(folder)


def flipped(raw: bytes, data: st.DataObject) -> bytes:
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 8 * len(raw) - 1))
        damaged[at // 8] ^= 1 << at % 8
    return bytes(damaged)


@pytest.mark.parametrize("part", ["held", "proposed"])
def test_release_groups_that_are_no_base64_are_damaged(tmp_path: Path, part: str) -> None:
    folder = masked(silo_in(tmp_path))
    rewritten(folder.release_groups, lambda content: content.update({part: "{" * 44}), seal=SEAL)
    with pytest.raises(ConfigurationError, match=r"release-groups\.json is damaged .*reset-memory"):
        _ = chain(folder).head
