"""Private keys on disk with and without a passphrase."""

import os
from contextlib import nullcontext
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from lorica_security.errors import ConfigurationError
from lorica_security.host import key_file
from lorica_security.host.files import write_private
from lorica_security.host.key_file import (
    NEW_PASSPHRASE,
    PASSPHRASE,
    WrongPassphrase,
    passphrase_of,
    protect,
    protect_all,
    read_key,
    read_key_of_either,
    write_key,
)
from lorica_security.identity.identity_key import identity_key_to_pem, new_identity_key
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem

ONE, TWO = "the first passphrase, long enough", "the second passphrase, long enough"
GIVEN = {PASSPHRASE: ONE}
PEM = tls_key_to_pem(new_tls_key())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tls.key"


@pytest.mark.parametrize("pem", [PEM, identity_key_to_pem(new_identity_key())], ids=["tls", "identity"])
def test_a_key_is_encrypted_on_disk_and_the_same_again_with_its_passphrase(path: Path, pem: bytes) -> None:
    write_key(path, pem, GIVEN)
    there = path.read_bytes()
    assert b"ENCRYPTED" in there
    assert pem.splitlines()[1] not in there
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_key(path, GIVEN) == pem
    assert load_pem_private_key(there, ONE.encode())  # plain PKCS#8, that openssl opens, too


def test_without_a_passphrase_it_is_written_in_clear(path: Path) -> None:
    write_key(path, PEM, {})
    assert path.read_bytes() == PEM == read_key(path, {})


def test_a_passphrase_comes_from_a_file_without_its_last_newline(path: Path, tmp_path: Path) -> None:
    write_key(path, PEM, GIVEN)
    write_private(tmp_path / "passphrase", f"{ONE}\n".encode())
    assert read_key(path, {f"{PASSPHRASE}_FILE": str(tmp_path / "passphrase")}) == PEM
    (tmp_path / "passphrase").chmod(0o644)
    with pytest.raises(ConfigurationError, match="mode 0644"):
        read_key(path, {f"{PASSPHRASE}_FILE": str(tmp_path / "passphrase")})


@pytest.mark.skipif(os.geteuid() != 0, reason="makes files of root: needs root")
@pytest.mark.parametrize(
    ("owner", "mode", "taken"),
    [(0, 0o440, True), (0, 0o400, True), (0, 0o444, False), (0, 0o460, False), (10001, 0o440, False)],
)
def test_a_passphrase_that_root_hands_to_another_account_may_be_readable_by_the_group_that_root_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, taken: bool
) -> None:
    given = tmp_path / "passphrase"
    given.write_text(ONE)
    given.chmod(mode)
    os.chown(given, owner, 10001)
    environment = {f"{PASSPHRASE}_FILE": str(given)}
    with pytest.raises(ConfigurationError) if mode != 0o400 else nullcontext():
        passphrase_of(environment)  # root itself has no need of a group
    monkeypatch.setattr(os, "geteuid", lambda: 10001)
    with nullcontext() if taken else pytest.raises(ConfigurationError, match="others can read this secret"):
        assert passphrase_of(environment) is not None


@pytest.mark.parametrize(
    ("environment", "said"),
    [({}, r"set \$LORICA_KEY_PASSPHRASE or"), ({PASSPHRASE: TWO}, r"the passphrase of \$LORICA_KEY_PASSPHRASE")],
    ids=["none", "another"],
)
def test_a_wrong_passphrase_is_one_line_that_names_file_and_variable_and_shows_neither(
    path: Path, environment: dict[str, str], said: str
) -> None:
    write_key(path, PEM, GIVEN)
    with pytest.raises(WrongPassphrase, match=said) as caught:
        read_key(path, environment)
    text = str(caught.value)
    assert str(path) in text
    assert "\n" not in text
    assert ONE not in text
    assert TWO not in text
    assert caught.value.__cause__ is None, "the library's own error would quote the file"


def test_a_clear_key_beside_a_passphrase_is_refused(path: Path) -> None:
    write_key(path, PEM, {})
    with pytest.raises(ConfigurationError, match="is not encrypted"):
        read_key(path, GIVEN)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({PASSPHRASE: "short"}, "gives 5 characters"),
        ({PASSPHRASE: ONE, f"{PASSPHRASE}_FILE": "/x"}, "both set"),
        ({f"{PASSPHRASE}_FILE": "/nowhere/at/all"}, "is missing"),
    ],
)
def test_a_passphrase_that_protects_nothing_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        passphrase_of(environment)


def test_a_passphrase_is_shown_by_no_repr() -> None:
    assert ONE not in repr(passphrase_of(GIVEN))


def test_a_file_that_holds_no_key_says_so(path: Path) -> None:
    write_private(path, PEM.replace(b"PRIVATE KEY", b"ENCRYPTED PRIVATE KEY"))
    with pytest.raises(WrongPassphrase, match="or the file is damaged"):
        read_key(path, GIVEN)


@pytest.fixture
def keys(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "a.key", tmp_path / "b.key"]
    for path in paths:
        write_key(path, PEM, {})
    return paths


def test_a_passphrase_is_added_changed_and_removed(keys: list[Path]) -> None:
    assert protect(keys, {NEW_PASSPHRASE: ONE}) == 2
    assert [read_key(path, GIVEN) for path in keys] == [PEM, PEM]
    assert protect(keys, {PASSPHRASE: ONE, NEW_PASSPHRASE: TWO}) == 2
    assert [read_key(path, {PASSPHRASE: TWO}) for path in keys] == [PEM, PEM]
    assert protect(keys, {PASSPHRASE: TWO}) == 2
    assert [path.read_bytes() for path in keys] == [PEM, PEM]


def test_a_clear_key_is_overwritten_when_it_is_encrypted(keys: list[Path]) -> None:
    """Its blocks would stay on the disk, for whoever buys it."""
    for path in keys:
        os.link(path, path.with_suffix(".link"))
    protect(keys, {NEW_PASSPHRASE: ONE})
    assert [path.with_suffix(".link").read_bytes() for path in keys] == [bytes(len(PEM))] * 2
    write_key(keys[0], PEM, {})
    assert keys[0].read_bytes() == PEM


def test_a_key_whose_deletion_was_cut_off_is_no_key(keys: list[Path]) -> None:
    keys[0].write_bytes(bytes(len(PEM)))
    assert protect_all(keys, {NEW_PASSPHRASE: ONE}, clear=False).startswith("1 of 1 keys were changed")


def test_what_a_crash_left_half_done_is_finished_by_the_same_call(keys: list[Path]) -> None:
    protect(keys, {NEW_PASSPHRASE: ONE})
    change = {PASSPHRASE: ONE, NEW_PASSPHRASE: TWO}
    assert protect(keys[:1], change) == 1
    assert protect(keys, change) == 1
    assert [read_key(path, {PASSPHRASE: TWO}) for path in keys] == [PEM, PEM]
    assert protect(keys, change) == 0


def test_a_key_of_a_change_that_was_cut_off_is_read_by_either_passphrase(keys: list[Path]) -> None:
    """Whoever signs for the second try may have been changed in the first."""
    change = {PASSPHRASE: ONE, NEW_PASSPHRASE: TWO}
    protect(keys, {NEW_PASSPHRASE: ONE})
    protect(keys[:1], change)
    assert [read_key_of_either(path, change) for path in keys] == [PEM, PEM]
    assert read_key_of_either(keys[0], {PASSPHRASE: TWO}) == PEM
    with pytest.raises(WrongPassphrase):
        read_key_of_either(keys[0], GIVEN)


def test_a_change_of_keys_is_told_before_it_and_not_where_there_is_none(keys: list[Path]) -> None:
    told: list[bytes] = []

    def tell() -> None:
        told.append(keys[0].read_bytes())

    protect_all(keys, {NEW_PASSPHRASE: ONE}, clear=False, tell=tell)
    protect_all(keys, {PASSPHRASE: ONE, NEW_PASSPHRASE: ONE}, clear=False, tell=tell)
    assert told == [PEM]


def test_a_wrong_passphrase_changes_no_file_at_all(keys: list[Path]) -> None:
    protect(keys[1:], {NEW_PASSPHRASE: ONE})
    before = [path.read_bytes() for path in keys]
    with pytest.raises(WrongPassphrase):
        protect(keys, {NEW_PASSPHRASE: TWO})
    assert [path.read_bytes() for path in keys] == before


def test_the_command_wants_one_thing_or_the_other(keys: list[Path]) -> None:
    with pytest.raises(ConfigurationError, match="or --clear for none"):
        protect_all(keys, {}, clear=False)
    with pytest.raises(ConfigurationError, match="say different things"):
        protect_all(keys, {NEW_PASSPHRASE: ONE}, clear=True)
    assert protect_all(keys, {NEW_PASSPHRASE: ONE}, clear=False).startswith(
        "2 of 2 keys were changed, all are encrypted"
    )
    assert protect_all(keys, GIVEN, clear=True) == "2 of 2 keys were changed, all are in clear"
    assert [key_file.is_encrypted(path.read_bytes()) for path in keys] == [False, False]
