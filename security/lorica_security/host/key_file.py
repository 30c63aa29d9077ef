"""Private keys on disk: PKCS#8 PEM of mode 0600, encrypted with a passphrase where the environment gives one.

Certificates may follow the key in its file, so that no crash parts them; they stay in clear.

    LORICA_KEY_PASSPHRASE           the passphrase
    LORICA_KEY_PASSPHRASE_FILE      a file that holds it, mode 0600 or less: a credential of systemd, a mounted secret;
                                    where root hands it to another account, 0440 or less
    LORICA_NEW_KEY_PASSPHRASE[_FILE]  the one that `protect` brings key files to

Never the command line, which every user of a machine can read. What a passphrase is worth: a copy of the folder (a
backup, a disk) opens nothing without it. Whoever can read the process's memory or environment has the keys.

PKCS#8 of OpenSSL stretches a passphrase little (PBKDF2, 2,048 rounds), so it has to be long and random: shorter ones
are refused. A clear key where a passphrase is given is refused, too: people who gave one count on it.

In place of a key a file may name one that lies in a token (lorica_security.pkcs11_keys): that is no secret, and stays
in clear.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from lorica_security.errors import AuthenticationError, ConfigurationError, Conflict
from lorica_security.host.files import erase, mark, read_private, replace_secret, take_place, was_erased, write_private
from lorica_security.host.process_lock import ProcessLock

PASSPHRASE = "LORICA_KEY_PASSPHRASE"  # noqa: S105  # nosec B105  # a variable's name
NEW_PASSPHRASE = "LORICA_NEW_KEY_PASSPHRASE"  # noqa: S105  # nosec B105
LEAST_CHARACTERS = 20
_STAGED = ".protected"
"""Ends the names of key files under their new passphrase, before they take the place of the others."""
_DECIDED = ".keys-protected"
"""There from when all files are staged until each is in its place."""

_CERTIFICATE = b"-----BEGIN CERTIFICATE-----"
_ENCRYPTED = b"-----BEGIN ENCRYPTED PRIVATE KEY-----"
_REFERENCE = b"pkcs11:"


@dataclass(frozen=True, slots=True)
class Passphrase:
    """`variable` says where it came from, for error lines; the bytes are shown nowhere."""

    secret: bytes = field(repr=False)
    variable: str


class WrongPassphrase(AuthenticationError):
    """The passphrase that is given does not open the key, or there is none."""


def passphrase_of(environment: Mapping[str, str], variable: str = PASSPHRASE) -> Passphrase | None:
    """What the environment gives; None where it gives none. Raises ConfigurationError naming the variable."""
    inline, file = environment.get(variable, ""), environment.get(f"{variable}_FILE", "")
    if inline and file:
        raise ConfigurationError(f"${variable} and ${variable}_FILE are both set: unset one of them")
    if not inline and not file:
        return None
    secret = read_private(Path(file), handed=True).strip() if file else inline.encode()
    if len(secret) < LEAST_CHARACTERS:
        raise ConfigurationError(
            f"${variable}{'_FILE' if file else ''} gives {len(secret)} characters, a passphrase has at least "
            f"{LEAST_CHARACTERS}: make one with `openssl rand -base64 24`"
        )
    return Passphrase(secret, f"{variable}_FILE" if file else variable)


def read_key(path: Path, environment: Mapping[str, str]) -> bytes:
    """The private key in `path` as PEM in clear, or what names it in a token, and the certificates that follow it:
    secret bytes.

    Raises WrongPassphrase, ConfigurationError naming the file, also for one that others can read, StorageError.
    """
    pem = read_private(path)
    if is_reference(pem):
        return pem
    passphrase = passphrase_of(environment)
    if is_encrypted(pem):
        return _in_clear(_opened(path, pem, passphrase)) + _parts(pem)[1]
    if passphrase is not None:
        raise ConfigurationError(
            f"{path} is not encrypted, though ${passphrase.variable} gives a passphrase: encrypt the keys with the "
            f"command `keys protect` (${NEW_PASSPHRASE}), or unset ${passphrase.variable}"
        )
    return pem


def read_key_of_either(path: Path, environment: Mapping[str, str]) -> bytes:
    """As `read_key`, by the present passphrase or the new one: a `protect` that was cut off leaves keys of both."""
    pem, new = read_private(path), passphrase_of(environment, NEW_PASSPHRASE)
    if is_reference(pem):
        return pem
    by = new if _has(path, pem, new) else passphrase_of(environment)
    return _in_clear(_opened(path, pem, by)) + _parts(pem)[1]


def write_key(path: Path, pem: bytes, environment: Mapping[str, str]) -> None:
    """Write a private key, given as PEM in clear, encrypted if the environment gives a passphrase; the one before is
    overwritten."""
    if is_reference(pem):
        replace_secret(path, pem)
        return
    key, certificates = _parts(pem)
    replace_secret(path, _sealed(load_pem_private_key(key, password=None), passphrase_of(environment)) + certificates)


def is_reference(pem: bytes) -> bool:
    """Whether it names a key in a token."""
    return pem.startswith(_REFERENCE)


def is_encrypted(pem: bytes) -> bool:
    return pem.lstrip().startswith(_ENCRYPTED)


def protect(paths: Sequence[Path], environment: Mapping[str, str], *, tell: Callable[[], None] = lambda: None) -> int:
    """Bring every key file from the present passphrase (or none) to the new one (or none); how many had to be changed.

    Every file is opened before the first is written, and what it held is overwritten. All files are of one folder. A
    kill leaves all of them as they were, or `settle` brings all to the new one, which needs no passphrase. `tell` is
    called before anything is changed.
    """
    present, new = passphrase_of(environment), passphrase_of(environment, NEW_PASSPHRASE)
    changed: list[tuple[Path, PrivateKeyTypes, bytes]] = []
    for path in paths:
        pem = read_private(path)
        if not is_reference(pem) and not _has(path, pem, new):
            changed.append((path, _opened(path, pem, present), _parts(pem)[1]))
    if changed:
        tell()
    for path, key, certificates in changed:
        write_private(path.with_name(path.name + _STAGED), _sealed(key, new) + certificates)
    if changed:
        folder = paths[0].parent
        mark(folder / _DECIDED)
        _finish(folder)
    return len(changed)


def settle(folder: Path, lock: Path, purpose: str) -> None:
    """Finish or undo a `protect` of the keys in `folder` that was cut off; one that is under way, with `lock`, is left
    alone."""
    if (folder / _DECIDED).exists() or any(folder.glob(f"*{_STAGED}")):
        with suppress(Conflict), ProcessLock(lock, purpose):
            _finish(folder)


def _finish(folder: Path) -> None:
    """What is staged takes its place once that is decided, else it is erased."""
    decided = folder / _DECIDED
    for staged in sorted(folder.glob(f"*{_STAGED}")):
        if decided.exists():
            take_place(staged, staged.with_name(staged.name.removesuffix(_STAGED)))
        else:
            erase(staged)
    decided.unlink(missing_ok=True)


def protect_all(
    paths: Iterable[Path], environment: Mapping[str, str], *, clear: bool, tell: Callable[[], None] = lambda: None
) -> str:
    """The command `keys protect`: what it says when it has done it. Raises ConfigurationError unless it is told one
    thing to do.

    `tell` as for `protect`.
    """
    new = passphrase_of(environment, NEW_PASSPHRASE)
    if clear and new is not None:
        raise ConfigurationError(f"--clear and ${new.variable} say different things: leave one of them out")
    if not clear and new is None:
        raise ConfigurationError(
            f"${NEW_PASSPHRASE} and ${NEW_PASSPHRASE}_FILE are not set: give the passphrase there, or --clear for none"
        )
    found = sorted(path for path in paths if not was_erased(path) and not is_reference(read_private(path)))
    changed = protect(found, environment, tell=tell)
    state = (
        "in clear"
        if new is None
        else f"encrypted: from now on ${PASSPHRASE} or ${PASSPHRASE}_FILE has to give this passphrase"
    )
    return f"{changed} of {len(found)} keys were changed, all are {state}"


def _has(path: Path, pem: bytes, passphrase: Passphrase | None) -> bool:
    """Whether the file is already as this passphrase would leave it."""
    if is_encrypted(pem) != (passphrase is not None):
        return False
    try:
        _opened(path, pem, passphrase)
    except WrongPassphrase:
        return False
    return True


def _opened(path: Path, pem: bytes, passphrase: Passphrase | None) -> PrivateKeyTypes:
    encrypted = is_encrypted(pem)
    if encrypted and passphrase is None:
        raise WrongPassphrase(
            f"{path} is encrypted and no passphrase is given: set ${PASSPHRASE} or ${PASSPHRASE}_FILE"
        )
    try:
        return load_pem_private_key(_parts(pem)[0], passphrase.secret if encrypted and passphrase else None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        if encrypted and passphrase is not None:
            raise WrongPassphrase(
                f"{path} does not open with the passphrase of ${passphrase.variable}: it is another one's, or the "
                "file is damaged"
            ) from None
        raise ConfigurationError(f"{path} holds no PEM private key: restore it from backup") from None


def _parts(pem: bytes) -> tuple[bytes, bytes]:
    """The key, and the certificates behind it."""
    begin = pem.find(_CERTIFICATE)
    return (pem, b"") if begin < 0 else (pem[:begin], pem[begin:])


def _in_clear(key: PrivateKeyTypes) -> bytes:
    return _sealed(key, None)


def _sealed(key: PrivateKeyTypes, passphrase: Passphrase | None) -> bytes:
    return key.private_bytes(
        Encoding.PEM,
        PrivateFormat.PKCS8,
        NoEncryption() if passphrase is None else BestAvailableEncryption(passphrase.secret),
    )
