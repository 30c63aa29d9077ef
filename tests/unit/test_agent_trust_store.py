"""Pins: who may set one, what a second key needs, and what a damaged or foreign file is worth."""

import itertools
import json
import multiprocessing
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from lorica_security.errors import (
    ConfigurationError,
    Conflict,
    IntegrityError,
    PolicyRefusal,
    StateError,
    StorageError,
)
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes
from lorica_security.identity.key_text import key_text
from lorica_security.identity.seal import Seal
from lorica_security.identity.succession import Succession, succession_statement
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.edges.memory.pins_file import MOST_PEERS, MOST_PREDECESSORS, How, PinnedPeer
from silo_agent.edges.memory.trust_store import Taken, TrustStore, silo_identity, trust_store
from tests.support.federation_peer import FEDERATION, SILO, TestNet

BANK, CLINIC = SiloName("bank-b"), SiloName("clinic-c")
OWN = new_identity_key()
OWN_KEY, SEAL = OWN.public_key(), Seal(OWN)
BANK_KEY, NEXT_KEY, CLINIC_KEY = new_identity_key(), new_identity_key(), new_identity_key()
NOW = datetime(2026, 11, 21, 3, 0, tzinfo=UTC)
FILE = "peers.json"


def store_in(folder: Path, *, first_use: bool = False, now: datetime = NOW, own: Identity | None = None) -> TrustStore:
    identity = own or silo_identity(FEDERATION, SILO)
    return TrustStore(folder / FILE, own=identity, own_key=OWN_KEY, seal=SEAL, first_use=first_use, now=lambda: now)


def shown(silo: SiloName, key: Ed25519PrivateKey) -> str:
    return key_text(silo_identity(FEDERATION, silo), key.public_key())


def succession(old: Ed25519PrivateKey, new: Ed25519PrivateKey, silo: SiloName = BANK) -> bytes:
    return succession_statement(old, identity=silo_identity(FEDERATION, silo), new_key=new.public_key())


# --- what people add and remove
# ----------------------------------------------------------------------------------------


def test_nobody_is_trusted_at_first(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    assert store.identities() == {}
    assert list(tmp_path.iterdir()) == []


def test_what_people_add_is_pinned_privately_and_for_every_later_look(tmp_path: Path) -> None:
    assert store_in(tmp_path).add(CLINIC, CLINIC_KEY.public_key()) is Taken.PINNED
    later = store_in(tmp_path, now=NOW + timedelta(hours=1))
    assert later.add(BANK, BANK_KEY.public_key()) is Taken.PINNED
    assert store_in(tmp_path).identities() == {BANK: BANK_KEY.public_key(), CLINIC: CLINIC_KEY.public_key()}
    assert [(peer.silo, peer.how, peer.since) for peer in store_in(tmp_path).peers()] == [
        (BANK, How.ADDED, NOW + timedelta(hours=1)),
        (CLINIC, How.ADDED, NOW),
    ]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600


def test_a_whole_federation_is_pinned_by_one_change_or_not_at_all(tmp_path: Path) -> None:
    keys = {BANK: BANK_KEY.public_key(), CLINIC: CLINIC_KEY.public_key()}
    store_in(tmp_path).add_all(keys)
    assert store_in(tmp_path).identities() == keys
    assert json.JSONDecoder().raw_decode((tmp_path / FILE).read_text())[0]["changes"] == 1
    other = store_in(tmp_path / "other")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigurationError, match="one key stands for one silo"):
        other.add_all({BANK: BANK_KEY.public_key(), CLINIC: BANK_KEY.public_key()})
    assert other.identities() == {}


def test_the_same_key_again_changes_nothing(tmp_path: Path) -> None:
    store_in(tmp_path).add(BANK, BANK_KEY.public_key())
    written = (tmp_path / FILE).read_bytes()
    assert store_in(tmp_path, now=NOW + timedelta(days=1)).add(BANK, BANK_KEY.public_key()) is Taken.KNOWN
    assert (tmp_path / FILE).read_bytes() == written


def test_a_pin_is_of_its_own_silo(tmp_path: Path) -> None:
    folder = SiloFolder(tmp_path / "silo")
    credentials = TestNet.create().credentials("127.0.0.1:1")
    folder.make()
    store_credentials(folder, credentials)
    store = trust_store(folder, credentials)
    store.add(BANK, BANK_KEY.public_key())
    assert store.identities() == {BANK: BANK_KEY.public_key()}
    with pytest.raises(ConfigurationError, match="this silo's own"):
        store.add(CLINIC, credentials.identity_key.public_key())


def test_a_removed_peer_is_no_longer_trusted_and_people_may_pin_another_key_for_it(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    store.remove(BANK)
    assert (store.identities(), store.removed()) == ({}, (BANK,))
    assert store.add(BANK, NEXT_KEY.public_key()) is Taken.PINNED
    assert (store.identities(), store.removed()) == ({BANK: NEXT_KEY.public_key()}, ())


def test_only_what_is_pinned_can_be_removed(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no key is pinned for silo bank-b.*trust list"):
        store_in(tmp_path).remove(BANK)


# --- two keys for one silo, one key for two
# ----------------------------------------------------------------------------


def test_attack_another_key_for_a_pinned_silo_is_refused_and_both_are_shown(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    with pytest.raises(Conflict) as refusal:
        store.add(BANK, NEXT_KEY.public_key())
    assert shown(BANK, BANK_KEY) in str(refusal.value)
    assert shown(BANK, NEXT_KEY) in str(refusal.value)
    assert store.identities() == {BANK: BANK_KEY.public_key()}


def test_a_successor_that_the_pinned_key_signed_takes_its_place(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    assert store.add(BANK, NEXT_KEY.public_key(), succession=succession(BANK_KEY, NEXT_KEY)) is Taken.SUCCEEDED
    assert store.peers() == (
        PinnedPeer(
            silo=BANK, key=NEXT_KEY.public_key(), how=How.ADDED, since=NOW, predecessors=(BANK_KEY.public_key(),)
        ),
    )


def test_every_key_that_was_followed_is_kept_with_its_statement_up_to_a_bound(tmp_path: Path) -> None:
    """By people and by a roster, several steps at once; for what was signed at the time of each."""
    store = store_in(tmp_path)
    keys = [new_identity_key() for _ in range(MOST_PREDECESSORS + 3)]
    steps = [
        Succession(predecessor=old.public_key(), successor=new.public_key(), statement=succession(old, new))
        for old, new in itertools.pairwise(keys)
    ]
    store.add(BANK, keys[0].public_key())
    store.add(BANK, keys[1].public_key(), succession=succession(keys[0], keys[1]))
    store.follow(BANK, keys[4].public_key(), steps)
    (peer,) = store.peers()
    assert peer.predecessors == tuple(key.public_key() for key in reversed(keys[:4]))
    assert peer.predecessor == keys[3].public_key()
    lines = read(tmp_path)["peers"][BANK]["predecessors"]
    assert [line["statement"] for line in lines] == [step.statement.hex() for step in reversed(steps[:4])]
    for old, new in itertools.pairwise(keys[4:]):
        store.add(BANK, new.public_key(), succession=succession(old, new))
    (peer,) = store.peers()
    assert peer.predecessors == tuple(key.public_key() for key in reversed(keys[2:-1]))
    assert store.identities() == {BANK: keys[-1].public_key()}, "the others stand for nobody"


def test_the_one_predecessor_that_an_earlier_release_kept_is_still_known(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    store.add(BANK, NEXT_KEY.public_key(), succession=succession(BANK_KEY, NEXT_KEY))
    content = read(tmp_path)
    del content["peers"][BANK]["predecessors"]
    write(tmp_path, content)
    (peer,) = store.peers()
    assert peer.predecessors == (BANK_KEY.public_key(),)
    third = new_identity_key()
    store.add(BANK, third.public_key(), succession=succession(NEXT_KEY, third))
    (peer,) = store.peers()
    assert peer.predecessors == (NEXT_KEY.public_key(), BANK_KEY.public_key())


@pytest.mark.parametrize(
    "statement",
    [
        succession(NEXT_KEY, NEXT_KEY),
        succession(CLINIC_KEY, NEXT_KEY),
        succession(BANK_KEY, CLINIC_KEY),
        succession(BANK_KEY, NEXT_KEY, CLINIC),
        bytes(64),
        b"",
    ],
    ids=["signed-by-itself", "signed-by-another", "for-another-key", "for-another-silo", "zeros", "nothing"],
)
def test_attack_successor_without_its_predecessors_word_is_refused_and_both_are_shown(
    tmp_path: Path, statement: bytes
) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    with pytest.raises(IntegrityError, match="not signed by the pinned key") as refusal:
        store.add(BANK, NEXT_KEY.public_key(), succession=statement)
    assert shown(BANK, BANK_KEY) in str(refusal.value)
    assert shown(BANK, NEXT_KEY) in str(refusal.value)
    assert store.identities() == {BANK: BANK_KEY.public_key()}


def test_attack_old_stolen_key_names_a_second_successor_after_the_first(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    store.add(BANK, NEXT_KEY.public_key(), succession=succession(BANK_KEY, NEXT_KEY))
    thief = new_identity_key()
    with pytest.raises(IntegrityError):
        store.add(BANK, thief.public_key(), succession=succession(BANK_KEY, thief))
    with pytest.raises(Conflict):
        store.add(BANK, BANK_KEY.public_key())


def test_a_statement_where_nothing_is_pinned_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="that another could succeed"):
        store_in(tmp_path).add(BANK, NEXT_KEY.public_key(), succession=succession(BANK_KEY, NEXT_KEY))
    assert store_in(tmp_path).identities() == {}


def test_attack_one_party_takes_two_seats_of_a_cohort_with_one_key(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    store.add(BANK, BANK_KEY.public_key())
    with pytest.raises(ConfigurationError, match="is pinned for silo bank-b"):
        store.add(CLINIC, BANK_KEY.public_key())
    with pytest.raises(PolicyRefusal, match="is pinned for silo bank-b"):
        store.trusted_on_first_use(CLINIC, BANK_KEY.public_key())


@pytest.mark.parametrize("key", [CLINIC_KEY.public_key(), OWN_KEY], ids=["another silo's", "this silo's own"])
def test_attack_a_roster_leads_a_pin_to_a_key_that_stands_for_somebody_else(
    tmp_path: Path, key: Ed25519PublicKey
) -> None:
    """Whoever has the pinned key signs for any key: the file of pins would be refused from then on, and the silo mask
    no more."""
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    store.add(CLINIC, CLINIC_KEY.public_key())
    before = store.identities()
    statement = succession_statement(BANK_KEY, identity=silo_identity(FEDERATION, BANK), new_key=key)
    store.follow(BANK, key, [Succession(predecessor=BANK_KEY.public_key(), successor=key, statement=statement)])
    assert store.identities() == before


def test_attack_this_silos_own_name_or_key_comes_as_a_peers(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    for silo, key, says in ((SILO, BANK_KEY.public_key(), "is this silo itself"), (BANK, OWN_KEY, "this silo's own")):
        with pytest.raises(ConfigurationError, match=says):
            store.add(silo, key)
        with pytest.raises(PolicyRefusal, match=says) as refusal:
            store.trusted_on_first_use(silo, key)
        assert refusal.value.rule == "trusted_peers"
    assert store.identities() == {}


# --- first use
# ---------------------------------------------------------------------------------------------------------


def test_attack_coordinator_makes_up_a_silo_that_nobody_pinned(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    store.add(CLINIC, CLINIC_KEY.public_key())
    with pytest.raises(PolicyRefusal, match=r"no key is pinned for silo bank-b") as refusal:
        store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    assert refusal.value.rule == "trust_on_first_use"
    assert shown(BANK, BANK_KEY) in str(refusal.value)
    assert set(store.identities()) == {CLINIC}


def test_where_the_policy_opted_in_the_first_key_is_pinned_and_said_to_be_so(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    assert [(peer.silo, peer.key, peer.how) for peer in store.peers()] == [(BANK, BANK_KEY.public_key(), How.FIRST_USE)]


@pytest.mark.parametrize("first_use", [True, False])
def test_a_key_that_is_pinned_is_trusted_whatever_the_policy_says_of_new_ones(tmp_path: Path, first_use: bool) -> None:
    store = store_in(tmp_path, first_use=first_use)
    store.add(BANK, BANK_KEY.public_key())
    written = (tmp_path / FILE).read_bytes()
    store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    assert (tmp_path / FILE).read_bytes() == written


@pytest.mark.parametrize("pinned_by", ["people", "first use"])
def test_attack_second_key_of_a_peer_is_refused_on_first_use_too_and_both_are_shown(
    tmp_path: Path, pinned_by: str
) -> None:
    store = store_in(tmp_path, first_use=True)
    if pinned_by == "people":
        store.add(BANK, BANK_KEY.public_key())
    else:
        store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    with pytest.raises(PolicyRefusal) as refusal:
        store.trusted_on_first_use(BANK, NEXT_KEY.public_key())
    assert refusal.value.rule == "trusted_peers"
    assert shown(BANK, BANK_KEY) in str(refusal.value)
    assert shown(BANK, NEXT_KEY) in str(refusal.value)
    assert store.identities() == {BANK: BANK_KEY.public_key()}


def test_attack_peer_whose_pin_people_removed_comes_back_on_first_use(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    store.remove(BANK)
    for key in (BANK_KEY, NEXT_KEY):
        with pytest.raises(PolicyRefusal, match="removed the pin") as refusal:
            store.trusted_on_first_use(BANK, key.public_key())
        assert refusal.value.rule == "trusted_peers"
    assert store.identities() == {}


def test_people_confirm_what_was_taken_on_first_use(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    assert store.add(BANK, BANK_KEY.public_key()) is Taken.CONFIRMED
    assert [peer.how for peer in store.peers()] == [How.ADDED]


def test_a_successor_of_a_key_of_first_use_is_no_more_confirmed_than_it(tmp_path: Path) -> None:
    store = store_in(tmp_path, first_use=True)
    store.trusted_on_first_use(BANK, BANK_KEY.public_key())
    store.add(BANK, NEXT_KEY.public_key(), succession=succession(BANK_KEY, NEXT_KEY))
    assert [(peer.key, peer.how) for peer in store.peers()] == [(NEXT_KEY.public_key(), How.FIRST_USE)]


def test_attack_phantoms_without_number_do_not_fill_the_disk(tmp_path: Path) -> None:
    line = {"how": "first use", "since": NOW.isoformat(), "predecessor": None}
    peers = {
        f"phantom-{number}": {**line, "identity_key": (number + 1000).to_bytes(32, "big").hex()}
        for number in range(MOST_PEERS)
    }
    write(tmp_path, {"version": 1, "federation": FEDERATION, "peers": peers, "removed": {}})
    with pytest.raises(StateError, match=f"{MOST_PEERS} peers are pinned"):
        store_in(tmp_path, first_use=True).trusted_on_first_use(BANK, BANK_KEY.public_key())


# --- the file
# ----------------------------------------------------------------------------------------------------------


def write(folder: Path, content: object) -> None:
    path = folder / FILE
    path.write_bytes(SEAL.sealed(FILE, json.dumps(content).encode()))
    path.chmod(0o600)


def read(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(SEAL.opened(FILE, (folder / FILE).read_bytes()))
    return content


@pytest.fixture
def content(tmp_path: Path) -> dict[str, Any]:
    store = store_in(tmp_path)
    store.add(BANK, BANK_KEY.public_key())
    store.add(CLINIC, CLINIC_KEY.public_key())
    return read(tmp_path)


def without(name: str) -> Callable[[Any], None]:
    return lambda content: content["peers"]["bank-b"].pop(name)


def with_key(key: Ed25519PublicKey | str) -> Callable[[Any], None]:
    text = key if isinstance(key, str) else public_key_bytes(key).hex()
    return lambda content: content["peers"]["bank-b"].update(identity_key=text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.update(version=2),
        lambda content: content.update(federation="other-net"),
        lambda content: content.pop("federation"),
        lambda content: content.update(more=1),
        lambda content: content.update(peers=[]),
        lambda content: content["peers"].update({"../x": content["peers"]["bank-b"]}),
        lambda content: content["peers"].update({SILO: content["peers"].pop("bank-b")}),
        without("identity_key"),
        without("how"),
        without("since"),
        with_key("00"),
        with_key("zz" * 32),
        with_key((1).to_bytes(32, "little").hex()),
        with_key(CLINIC_KEY.public_key()),
        with_key(OWN_KEY),
        lambda content: content["peers"]["bank-b"].update(how="told"),
        lambda content: content["peers"]["bank-b"].update(since="2026-11-21T03:00:00"),
        lambda content: content["peers"]["bank-b"].update(predecessor="00"),
        lambda content: content["peers"]["bank-b"].update(predecessor="00" * 32),
        lambda content: content["peers"]["bank-b"].update(predecessors=[{"key": "00" * 32}]),
        lambda content: content["peers"]["bank-b"].update(predecessors=[{"key": "00"}]),
        lambda content: content["peers"]["bank-b"].update(
            predecessors=[{"key": public_key_bytes(NEXT_KEY.public_key()).hex()}] * (MOST_PREDECESSORS + 1)
        ),
    ],
    ids=[
        "version",
        "other-federation",
        "no-federation",
        "unknown-key",
        "list",
        "bad-name",
        "own-name",
        "no-key",
        "no-how",
        "no-date",
        "short-key",
        "no-digits",
        "small-order",
        "key-of-another",
        "own-key",
        "other-way",
        "no-time-zone",
        "short-predecessor",
        "predecessor-of-small-order",
        "step-of-small-order",
        "short-step",
        "too-many-steps",
    ],
)
def test_a_damaged_file_is_named_and_never_taken_for_empty(
    tmp_path: Path, content: dict[str, Any], damage: Callable[[Any], None]
) -> None:
    damage(content)
    write(tmp_path, content)
    written = (tmp_path / FILE).read_bytes()
    store = store_in(tmp_path, first_use=True)
    for call in (
        store.peers,
        store.identities,
        store.removed,
        lambda: store.add(BANK, BANK_KEY.public_key()),
        lambda: store.remove(BANK),
        lambda: store.trusted_on_first_use(SiloName("bank-d"), NEXT_KEY.public_key()),
    ):
        with pytest.raises(ConfigurationError, match=r"peers\.json is damaged .*restore it from backup"):
            call()
    assert (tmp_path / FILE).read_bytes() == written


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[]", b"null", b"[" * 100_000])
def test_what_is_no_json_is_named(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / FILE).write_bytes(raw)
    (tmp_path / FILE).chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"peers\.json is damaged"):
        store_in(tmp_path).peers()


def test_attack_a_link_that_leads_nowhere_is_not_taken_for_no_pins(tmp_path: Path) -> None:
    """Or a key would be pinned on first use once more."""
    (tmp_path / FILE).unlink(missing_ok=True)
    (tmp_path / FILE).symlink_to(tmp_path / "not-mounted")
    store = store_in(tmp_path, first_use=True)
    for call in (store.peers, lambda: store.trusted_on_first_use(BANK, BANK_KEY.public_key())):
        with pytest.raises(ConfigurationError, match=r"peers\.json is a link to .*not-mounted, which is missing"):
            call()
    assert (tmp_path / FILE).is_symlink()


def test_attack_another_user_may_have_read_or_written_the_pins(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / FILE).chmod(0o622)
    with pytest.raises(ConfigurationError, match=r"peers\.json has mode 0622.*chmod 600"):
        store_in(tmp_path).peers()


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="absent"):
        store_in(tmp_path / "absent").add(BANK, BANK_KEY.public_key())


def test_pins_of_another_federation_are_not_this_ones(tmp_path: Path, content: dict[str, Any]) -> None:
    other = Identity(FederationName("other-net"), Role.SILO, SILO)
    with pytest.raises(ConfigurationError, match=r"of federation 'test-net', this silo is in other-net"):
        store_in(tmp_path, own=other).peers()


def _pin_many(folder: Path, first: int) -> None:
    for number in range(first, first + 10):
        store_in(folder).add(SiloName(f"silo-{number}"), new_identity_key().public_key())


def test_the_agent_and_people_who_pin_at_once_lose_no_pin(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_pin_many, args=(tmp_path, first)) for first in (0, 10, 20)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert set(store_in(tmp_path).identities()) == {f"silo-{number}" for number in range(30)}
