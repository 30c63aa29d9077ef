"""Keys in a SoftHSM2 token: what they sign, and each way in which one cannot be used, by name and with a remedy."""

import copy
import os
import pickle
import shutil
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import Prehashed

from lorica_coordinator.edges.database.sealing.root_seal import RootSeal
from lorica_security.errors import ConfigurationError, LoricaError
from lorica_security.host.key_file import PASSPHRASE, protect_all, read_key, write_key
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity import derived_key
from lorica_security.identity.identity_key import new_identity_key, sign, verify
from lorica_security.pkcs11_keys import reference, token_session
from lorica_security.pkcs11_keys.reference import (
    identity_in_token,
    identity_key_of,
    key_text,
    tls_key_in_token,
    tls_key_of,
)
from lorica_security.pkcs11_keys.token_session import TokenLost, WrongPin
from lorica_security.pki.authority import Authority
from lorica_security.pki.csr import certificate_request, check_request
from lorica_security.pki.tls_key import new_tls_key
from tests.support.soft_hsm import CAN, LIBRARY, PIN, WHY_NOT, make_keys, pin_file, tokens, uri

pytestmark = pytest.mark.skipif(not CAN, reason=WHY_NOT)
NOW = datetime(2026, 11, 1, tzinfo=UTC)
NORTH = FederationName("north")
SHA256 = ec.ECDSA(hashes.SHA256())
HOME = Path("/nonexistent/silo")
"""Keys here are of no folder, but where a test is of one."""


@pytest.fixture(scope="module", autouse=True)
def made() -> None:
    tokens()


@pytest.fixture
def pin(tmp_path: Path) -> Path:
    return pin_file(tmp_path / "pin")


def test_an_identity_signs_in_its_token(pin: Path) -> None:
    key = identity_in_token(uri("silo", "identity", pin), HOME)
    verify(key.public_key(), domain=b"test", payload=b"words", signature=sign(key, domain=b"test", payload=b"words"))
    assert copy.deepcopy(key) is copy.copy(key) is key


def test_a_root_of_noise_that_was_sealed_with_a_key_in_a_token_opens_with_it_again(pin: Path) -> None:
    sealed = RootSeal(identity_in_token(uri("silo", "identity", pin), HOME), NORTH).seal(bytes(32))
    again = RootSeal(identity_in_token(uri("silo", "identity", pin), HOME), NORTH)
    assert again.open(sealed, "the row") == bytes(32)


def test_a_key_that_signs_anew_each_time_seals_no_root_of_noise(pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a token may that puts randomness into each signature: what it sealed would be lost."""
    monkeypatch.setattr(derived_key, "sign", lambda key, *, domain, payload: os.urandom(64))
    with pytest.raises(ConfigurationError, match=r"signs the same bytes in another way each time.*RFC 8032"):
        RootSeal(identity_in_token(uri("silo", "identity", pin), HOME), NORTH).seal(bytes(32))


@pytest.mark.parametrize("name", ["tls", "tls-384"])
@pytest.mark.parametrize("hashing", [hashes.SHA256(), hashes.SHA384(), hashes.SHA512()])
def test_a_tls_key_signs_in_its_token_by_any_hash(name: str, hashing: hashes.HashAlgorithm, pin: Path) -> None:
    key = tls_key_in_token(uri("silo", name, pin), HOME)
    key.public_key().verify(key.sign(b"words", ec.ECDSA(hashing)), b"words", ec.ECDSA(hashing))
    digest = hashes.Hash(hashing)
    digest.update(b"words")
    made = ec.ECDSA(Prehashed(hashing))
    key.public_key().verify(key.sign(digest.finalize(), made), b"words", ec.ECDSA(hashing))


def test_an_authority_in_a_token_issues_what_others_verify(pin: Path, tmp_path: Path) -> None:
    authority = Authority.create(NORTH, now=NOW, key=tls_key_in_token(uri("silo", "tls", pin), HOME))
    requested = check_request(certificate_request(tls_key_in_token(uri("silo", "tls-384", pin), HOME), SILO), SILO)
    leaf = authority.issue(requested, SILO, now=NOW)
    leaf.verify_directly_issued_by(authority.certificate)
    write_key(tmp_path / "ca.key", key_text(authority.key), {})
    again = Authority.of(
        tls_key_of(read_key(tmp_path / "ca.key", {}), HOME), certificate_pem=authority.certificate_pem()
    )
    again.issue(new_tls_key().public_key(), SILO, now=NOW).verify_directly_issued_by(authority.certificate)
    with pytest.raises(ConfigurationError, match="CA key and CA certificate do not belong together"):
        Authority.of(tls_key_in_token(uri("silo", "tls-384", pin), HOME), certificate_pem=authority.certificate_pem())


SILO = Identity(NORTH, Role.SILO, SiloName("clinic"))


def test_a_key_file_names_the_key_and_has_none_of_it(pin: Path, tmp_path: Path) -> None:
    """It is read with a passphrase and without, and `keys protect` leaves it."""
    key, path, plain = identity_in_token(uri("silo", "identity", pin), HOME), tmp_path / "one.key", tmp_path / "two.key"
    write_key(path, key_text(key), {})
    write_key(plain, key_text(new_identity_key()), {})
    assert path.read_text().startswith(f"pkcs11:token=silo;object=identity?module-path={LIBRARY}&pin-source={pin}\n")
    assert b"PRIVATE" not in path.read_bytes()
    given = {PASSPHRASE: "battery staple of twenty", "LORICA_NEW_KEY_PASSPHRASE": "battery staple of twenty"}
    for environment in ({}, given):
        assert identity_key_of(read_key(path, environment), HOME).public_key() == key.public_key()
    assert protect_all(
        [path, plain], {"LORICA_NEW_KEY_PASSPHRASE": "battery staple of twenty"}, clear=False
    ).startswith("1 of 1 keys were changed")
    assert path.read_bytes() == key_text(key)


@pytest.mark.parametrize(
    "ask",
    [
        lambda key: key.private_bytes(None, None, None),
        lambda key: key.private_bytes_raw() if hasattr(key, "private_bytes_raw") else key.private_numbers(),
        lambda key: pickle.dumps(key),
        lambda key: key.exchange(None, None) if hasattr(key, "exchange") else key.private_bytes_raw(),
    ],
)
def test_a_token_does_not_give_its_key_away(ask: Callable[[Any], object], pin: Path) -> None:
    for key in (identity_in_token(uri("silo", "identity", pin), HOME), tls_key_in_token(uri("silo", "tls", pin), HOME)):
        with pytest.raises(ConfigurationError, match="does not give it away"):
            ask(key)


@pytest.mark.parametrize(
    ("token", "label", "said"),
    [
        ("none", "identity", "has no token 'none': plug it in"),
        ("silo", "none", "token 'silo' has no private key 'none': make the pair there"),
        ("odd", "twice", "token 'odd' has 2 private keys 'twice': give the URI an id="),
        ("odd", "halves", "has no public key 'halves': make the pair there, both halves"),
        ("odd", "swapped", "private key 'swapped' of token 'odd' does not belong to the public key of that name"),
        ("odd", "large", "is of kind a curve with parameters [0-9a-f]+: use Ed25519 for an identity"),
        ("odd", "rsa", "is of kind RSA: use Ed25519 for an identity, ECDSA on P-256"),
        ("silo", "tls", "is ECDSA on secp256r1: an identity has an Ed25519 key"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(token: str, label: str, said: str, pin: Path) -> None:
    with pytest.raises(ConfigurationError, match=said):
        identity_in_token(uri(token, label, pin), HOME)


def test_an_identity_key_is_no_tls_key(pin: Path) -> None:
    with pytest.raises(ConfigurationError, match="is Ed25519: TLS and authorities have ECDSA keys"):
        tls_key_in_token(uri("silo", "identity", pin), HOME)


def test_one_of_two_keys_is_named_by_its_id(pin: Path) -> None:
    first, second = (identity_in_token(uri("odd", "twice", pin, f"id=%0{n}"), HOME).public_key() for n in (6, 7))
    assert first != second


def test_another_key_under_the_name_is_found_out(pin: Path) -> None:
    first, second = (key_text(identity_in_token(uri("odd", "twice", pin, f"id=%0{n}"), HOME)) for n in (6, 7))
    with pytest.raises(ConfigurationError, match="is another one than the file names"):
        identity_key_of(first.splitlines()[0] + b"\n" + second.splitlines()[1] + b"\n", HOME)


@pytest.mark.parametrize(
    "text", [b"pkcs11:", b"pkcs11:a\n", b"pkcs11:a\npublic zz\n", b"pkcs11:a\nab\n", b"pkcs11:\xff\nb\n"]
)
def test_a_damaged_reference_is_refused(text: bytes) -> None:
    with pytest.raises(ConfigurationError, match="restore it from backup"):
        identity_key_of(text, HOME)


def shown(error: BaseException | None) -> str:
    """All that a log could have: the errors, with what each frame of ours held."""
    texts, chain = [], error
    while chain is not None:
        frames = traceback.TracebackException.from_exception(chain, capture_locals=True).stack
        texts += [str(chain), *(str(frame.locals) for frame in frames if frame.filename != __file__)]
        chain = chain.__cause__ or chain.__context__
    return "\n".join(texts)


class Counted:
    """A real token, whose openings are counted."""

    def __init__(self, token: Any) -> None:
        self._token, self.opened = token, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._token, name)

    def open(self, **words: Any) -> Any:
        self.opened += 1
        return self._token.open(**words)


def test_a_wrong_pin_is_tried_once_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, real, counted = "7351-battery-horse", token_session._token, []

    def token(of: Any) -> Counted:
        counted.append(Counted(real(of)))
        return counted[-1]

    monkeypatch.setattr(token_session, "_token", token)
    path = pin_file(tmp_path / "pin", wrong)
    told = []
    for attempt in range(3):
        os.utime(path, (attempt, attempt))  # another file by its mark, with the same PIN
        with pytest.raises(WrongPin, match="has not the PIN of token 'wrong': it was tried once and is not") as caught:
            identity_in_token(uri("wrong", "identity", path), HOME)
        told.append(shown(caught.value))
    assert sum(one.opened for one in counted) == 1
    path.unlink()
    with pytest.raises(WrongPin, match=r"the last PIN that was given to token 'wrong' was wrong.*log in once"):
        identity_in_token(uri("wrong", "identity", pin_file(path)), HOME)
    assert sum(one.opened for one in counted) == 1
    make_keys(("wrong", "identity", "01", "ed25519"))  # which logs in
    identity_in_token(uri("wrong", "identity", path), HOME)
    assert "pin_file" in told[0], "it is of the frame that had the PIN"
    assert wrong not in "".join(told)


@pytest.mark.parametrize("flag", ["USER_PIN_COUNT_LOW", "USER_PIN_FINAL_TRY", "USER_PIN_LOCKED"])
def test_a_token_that_counts_is_not_asked(flag: str, pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from pkcs11 import TokenFlag

    token = Counted(token_session._token(token_session.TokenUri.parse(uri("unopened", "identity", pin))))
    token.flags = token.flags | TokenFlag[flag]
    monkeypatch.setattr(token_session, "_token", lambda of: token)
    with pytest.raises(WrongPin, match=r"token 'unopened' (was wrong, and the token counts|is locked)") as caught:
        identity_in_token(uri("unopened", "identity", pin), HOME)
    assert token.opened == 0
    assert PIN not in shown(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_pin_that_others_can_read_is_refused_before_it_is_tried(mode: int, tmp_path: Path) -> None:
    path = pin_file(tmp_path / "pin")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"has mode {mode:04o}: others can read this secret") as caught:
        identity_in_token(uri("unopened", "identity", path), HOME)
    assert PIN not in shown(caught.value)


@pytest.mark.parametrize(
    ("content", "said"), [("", "is empty: write the PIN"), ("\udcff", "is no text: write the PIN")]
)
def test_a_file_without_a_pin_is_named(content: str, said: str, tmp_path: Path) -> None:
    path = pin_file(tmp_path / "pin")
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigurationError, match=said) as caught:
        identity_in_token(uri("unopened", "identity", path), HOME)
    assert caught.value.__context__ is None, "an error of decoding has the bytes"
    path.unlink()
    with pytest.raises(ConfigurationError, match="is missing"):
        identity_in_token(uri("unopened", "identity", path), HOME)


def of_library(path: Path, pin: Path) -> str:
    return uri("silo", "identity", pin).replace(str(LIBRARY), str(path))


def test_a_library_that_others_can_write_or_that_is_none_is_refused(tmp_path: Path, pin: Path) -> None:
    place = tmp_path / "lib"
    place.mkdir(mode=0o755)
    copied = Path(shutil.copy(LIBRARY, place / "copied.so"))
    text = place / "text.so"
    text.write_text("no library")
    text.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"missing\.so is not there .*correct module-path"):
        identity_in_token(of_library(place / "missing.so", pin), HOME)
    with pytest.raises(ConfigurationError, match="is no file: correct module-path"):
        identity_in_token(of_library(place, pin), HOME)
    with pytest.raises(ConfigurationError, match=r"cannot be used .*is it a PKCS#11 library"):
        identity_in_token(of_library(text, pin), HOME)
    copied.chmod(0o664)
    with pytest.raises(ConfigurationError, match=r"others than root and this account can write .*copied\.so"):
        identity_in_token(of_library(copied, pin), HOME)
    copied.chmod(0o644)
    place.chmod(0o777)
    with pytest.raises(ConfigurationError, match=r"can write \S+/lib \(mode 0777"):
        identity_in_token(of_library(copied, pin), HOME)


@pytest.mark.parametrize("way", ["{home}/state/evil.so", "{home}/../silo/state/evil.so", "{root}/link.so", "{root}/to"])
def test_nothing_that_lies_beside_the_key_file_is_loaded_or_given_as_pin(way: str, tmp_path: Path, pin: Path) -> None:
    """As a made-up backup would bring them: 0600 in 0700, this account's own."""
    home = tmp_path / "silo"
    inside = home / "state" / "evil.so"
    inside.parent.mkdir(parents=True, mode=0o700)
    inside.touch(mode=0o600)
    inside.write_bytes(LIBRARY.read_bytes())
    (tmp_path / "link.so").symlink_to(inside)
    (home / "out").symlink_to(LIBRARY)
    (tmp_path / "to").symlink_to("silo/state/../state/evil.so")
    named = Path(way.format(home=home, root=tmp_path))
    of_pin = uri("silo", "identity", pin).replace(str(pin), str(named))
    for text in (of_library(named, pin), of_library(home / "out", pin), of_pin):
        reference_of_it = f"{text}\npublic 00\n".encode()
        with pytest.raises(ConfigurationError, match=r"(module-path|pin-source) \S+ lies in \S+/silo, whose files"):
            identity_in_token(text, home)
        with pytest.raises(ConfigurationError, match=r"(module-path|pin-source) \S+ lies in \S+/silo, whose files"):
            tls_key_of(reference_of_it, home)


def test_a_library_is_refused_where_others_can_turn_a_link_or_a_folder_on_its_way(tmp_path: Path, pin: Path) -> None:
    place, open_to_all = tmp_path / "open" / "own", tmp_path / "open"
    place.mkdir(parents=True, mode=0o755)
    copied = Path(shutil.copy(LIBRARY, place / "copied.so"))
    copied.chmod(0o644)
    (open_to_all / "link.so").symlink_to(LIBRARY)
    (tmp_path / "first.so").symlink_to("open/link.so")
    (tmp_path / "round.so").symlink_to("round.so")
    open_to_all.chmod(0o777)
    for named in (copied, open_to_all / "link.so", tmp_path / "first.so", open_to_all / "own" / ".." / "link.so"):
        with pytest.raises(ConfigurationError, match=r"can write \S+/open \(mode 0777"):
            identity_in_token(of_library(named, pin), HOME)
    with pytest.raises(ConfigurationError, match="behind more than 40 links"):
        identity_in_token(of_library(tmp_path / "round.so", pin), HOME)
    open_to_all.chmod(0o1777)
    with pytest.raises(ConfigurationError, match=r"/open \(mode 1777"):
        identity_in_token(of_library(Path(shutil.copy(copied, open_to_all / "beside.so")), pin), HOME)


def test_what_was_looked_at_is_loaded(tmp_path: Path, pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that is turned between the look and the load leads nowhere else."""
    import pkcs11

    (tmp_path / "link.so").symlink_to(LIBRARY)
    real, loaded = pkcs11.lib, []

    def lib(path: str) -> Any:
        loaded.append(path)
        return real(path)

    monkeypatch.setattr(pkcs11, "lib", lib)
    identity_in_token(of_library(tmp_path / "link.so", pin), HOME)
    assert loaded == [str(LIBRARY.resolve())]


def test_without_the_extra_the_remedy_is_named(pin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pkcs11", None)
    with pytest.raises(ConfigurationError, match="the extra `token` brings: pip install python-pkcs11"):
        identity_in_token(uri("silo", "identity", pin), HOME)


def test_a_token_that_is_gone_in_the_middle_ends_what_needs_it(pin: Path) -> None:
    key = identity_in_token(uri("going", "identity", pin), HOME)
    key.sign(b"before")
    make_keys(("going", "identity", "01", "gone"))
    with pytest.raises(TokenLost, match=r"the token 'going' did not answer .*put it back.*start again"):
        key.sign(b"after")
    with pytest.raises(ConfigurationError, match="token 'going' has no private key 'identity'"):
        identity_in_token(uri("going", "identity", pin), HOME)


def test_a_session_that_was_closed_ends_what_needs_it(pin: Path) -> None:
    key = tls_key_in_token(uri("closing", "tls", pin), HOME)
    key._session._session.close()
    with pytest.raises(TokenLost, match=r"the token 'closing' did not answer .*its session was closed"):
        key.sign(b"after", SHA256)


def test_a_fork_does_not_use_its_parents_session(pin: Path) -> None:
    key = identity_in_token(uri("silo", "identity", pin), HOME)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            key.sign(b"words")
        except LoricaError as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as told:
        assert told.read().startswith(f"TokenLost: the key in token 'silo' was opened by process {os.getpid()}, and")
    key.sign(b"words")


def test_files_of_the_token_are_where_the_tests_say(pin: Path) -> None:
    """Else all of the above would be of a token of this machine's."""
    assert str(tokens()) in os.environ["SOFTHSM2_CONF"]
    assert reference.in_token(identity_in_token(uri("silo", "identity", pin), HOME))
