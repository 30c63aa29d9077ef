"""Sessions with PKCS#11 tokens: one for each token and process, logged in once, with the PIN of a private file.

A PIN that was wrong is never tried again by itself: a token counts tries, and locks after a few, which a service
manager that starts a program again and again would bring about. So nothing is tried either where the token says that
the last try of anybody was wrong (CKF_USER_PIN_COUNT_LOW), or that one is left (CKF_USER_PIN_FINAL_TRY), until a person
has logged in. What fails later (the
token is gone, its session was closed, this process is a fork of the one that logged in) is an error that says so, and
ends what needed the signature.
"""

import os
import secrets
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from blake3 import blake3

from lorica_security.errors import AuthenticationError, ConfigurationError, StateError
from lorica_security.host.files import read_private
from lorica_security.pkcs11_keys.token_uri import TokenUri

EXTRA: Final = "token"
"""Of the wheel: what brings python-pkcs11."""


class TokenUnusable(ConfigurationError):
    """A key in a token, or what leads to it, is not there, is not safe, or is of another kind."""


class WrongPin(AuthenticationError):
    """The token did not take the PIN."""


class TokenLost(StateError):
    """A key in a token cannot be used any more by this process."""


class TokenSession:
    """With one token, whose calls do not overlap: a session has one operation at a time."""

    def __init__(self, uri: TokenUri, session: Any) -> None:
        self._uri, self._session, self._process = uri, session, os.getpid()
        self._turn = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[Any]:
        """The session, of this process alone; raises TokenLost for what the token or its library answers."""
        if os.getpid() != self._process:
            raise TokenLost(
                f"the key in token {self._uri.of_token} was opened by process {self._process}, and this is a fork of "
                "it: a PKCS#11 session is of one process; open the key in this one"
            )
        import pkcs11

        with self._turn:
            try:
                yield self._session
            except pkcs11.PKCS11Error as error:
                raise TokenLost(
                    f"the token {self._uri.of_token} did not answer ({_name(error)}): it was removed, or its session "
                    "was closed; put it back, look at its own log, and start again"
                ) from error


_sessions: dict[tuple[str, str, int], TokenSession] = {}
_wrong: dict[tuple[str, str, int], bytes] = {}
"""Of a token whose PIN was wrong: that PIN's digest, under a key of this process. Whoever asks again (a loop that
renews, say) gets the same answer, and the token is not asked, until the file has another PIN."""
_DIGEST_KEY: Final = secrets.token_bytes(32)
_MOST_LINKS: Final = 40
_opening = threading.Lock()


def session_of(uri: TokenUri) -> TokenSession:
    """The session of this process with that token; logged in by the first key that needs it.

    Raises TokenUnusable for a library or token that is not there, WrongPin.
    """
    with _opening:
        token = _token(uri)
        place = os.path.realpath(uri.module), bytes(token.serial).decode("ascii", "replace"), os.getpid()
        if place not in _sessions:
            _sessions[place] = TokenSession(uri, _logged_in(uri, token, place))
        return _sessions[place]


def _token(uri: TokenUri) -> Any:
    try:
        import pkcs11
    except ImportError as error:
        raise TokenUnusable(
            f"a key in a token needs python-pkcs11, which the extra `{EXTRA}` brings: pip install python-pkcs11"
        ) from error
    file = _safe_library(Path(uri.module))
    try:
        library = pkcs11.lib(str(file))  # what was looked at: a link may lead elsewhere by now
        tokens = library.get_tokens(token_label=uri.token or None, token_serial=uri.serial.encode() or None)
        found = [token for token in tokens if _fits(uri, token)]
    except pkcs11.PKCS11Error as error:
        raise TokenUnusable(f"{uri.module} cannot be used ({_name(error)}): is it a PKCS#11 library?") from error
    if not found:
        raise TokenUnusable(
            f"{uri.module} has no token {uri.of_token}: plug it in, or look at the names that it has (pkcs11-tool "
            "--list-slots, softhsm2-util --show-slots)"
        )
    if len(found) > 1:
        raise TokenUnusable(f"{uri.module} has {len(found)} tokens {uri.of_token}: add serial= to the URI")
    return found[0]


def _fits(uri: TokenUri, token: Any) -> bool:
    told = ((uri.manufacturer, token.manufacturer_id), (uri.model, token.model))
    return all(not wanted or wanted == _text(found) for wanted, found in told)


def _logged_in(uri: TokenUri, token: Any, place: tuple[str, str, int]) -> Any:
    pin_file = Path(uri.pin_source)
    pin = _text_or_none(read_private(pin_file, handed=True).strip())
    try:
        if pin is None:
            raise TokenUnusable(f"{pin_file} is no text: write the PIN of token {uri.of_token} into it")
        if not pin:
            raise TokenUnusable(f"{pin_file} is empty: write the PIN of token {uri.of_token} into it")
        digest = blake3(pin.encode(), key=_DIGEST_KEY).digest()
        if _wrong.get(place) != digest:
            _require_tries(uri, token)
            if (session := _opened(uri, token, pin)) is not None:
                return session
            _wrong[place] = digest
    finally:
        del pin  # so that no traceback has it
    raise _wrong_pin(uri)


def _require_tries(uri: TokenUri, token: Any) -> None:
    """Raises WrongPin where a wrong PIN now could lock the token, or one before was wrong."""
    import pkcs11

    flags = token.flags
    if pkcs11.TokenFlag.USER_PIN_LOCKED in flags:
        raise WrongPin(f"the PIN of token {uri.of_token} is locked: its security officer has to set another one")
    warned = pkcs11.TokenFlag.USER_PIN_COUNT_LOW | pkcs11.TokenFlag.USER_PIN_FINAL_TRY
    if warned & flags:  # also of a process before, which a service manager started
        raise WrongPin(
            f"the last PIN that was given to token {uri.of_token} was wrong, and the token counts: nothing is tried by "
            f"itself; correct {uri.pin_source}, log in once by the token's own tool (pkcs11-tool --login "
            "--list-objects), and start again"
        )


def _opened(uri: TokenUri, token: Any, pin: str) -> Any | None:
    """A session; None for a PIN that the token did not take."""
    import pkcs11

    try:
        return token.open(user_pin=pin)
    except (pkcs11.PinIncorrect, pkcs11.PinLenRange, pkcs11.PinInvalid):
        return None
    except pkcs11.PinLocked:
        raise WrongPin(
            f"the PIN of token {uri.of_token} is locked: its security officer has to set another one"
        ) from None
    except pkcs11.PKCS11Error as error:
        raise TokenUnusable(
            f"the token {uri.of_token} cannot be opened ({_name(error)}): look at its own log"
        ) from None
    finally:
        del pin


def _text_or_none(pin: bytes) -> str | None:
    """None for what is no UTF-8: the error that says so holds the bytes, and goes no further than this."""
    try:
        return pin.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _wrong_pin(uri: TokenUri) -> WrongPin:
    return WrongPin(
        f"{uri.pin_source} has not the PIN of token {uri.of_token}: it was tried once and is not tried again, for "
        "the token counts wrong tries and locks after a few; correct the file before the next start"
    )


def _safe_library(path: Path) -> Path:
    """The file that `path` leads to. Whoever can write it, put another one in its place, or turn a folder or link on
    the way to it elsewhere, runs code with this silo's keys: raises TokenUnusable where others can, or none is there.
    """
    try:
        file = _followed(path)
        status, around = file.stat(), file.parent.stat()
    except OSError as error:
        raise TokenUnusable(
            f"the PKCS#11 library {path} is not there ({error.strerror}): install it, or correct module-path"
        ) from error
    if not stat.S_ISREG(status.st_mode):
        raise TokenUnusable(f"the PKCS#11 library {path} is no file: correct module-path")
    _require_own(file.parent, around, sticky=False)
    return file


def _followed(path: Path) -> Path:
    """`path` without links; each folder, link and file on the way is root's or this account's, and no folder can be
    changed by others, but that in one with the sticky bit (/tmp) they can only add to it."""
    place, left, links = Path("/"), list(path.parts[1:]), 0
    _require_own(place, place.lstat())
    while left:
        part = left.pop(0)
        if part == "..":
            place = place.parent
            continue
        status = (place / part).lstat()
        _require_own(place / part, status)
        if not stat.S_ISLNK(status.st_mode):
            place /= part
            continue
        links += 1
        if links > _MOST_LINKS:
            raise TokenUnusable(f"the PKCS#11 library {path} is behind more than {_MOST_LINKS} links: name the file")
        target = (place / part).readlink()
        left = [*target.parts[target.is_absolute() :], *left]
        place = Path("/") if target.is_absolute() else place
    return place


def _require_own(place: Path, status: os.stat_result, *, sticky: bool = True) -> None:
    is_sticky = sticky and stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    is_open = status.st_mode & 0o022 and not stat.S_ISLNK(status.st_mode) and not is_sticky
    if status.st_uid not in (0, os.geteuid()) or is_open:
        raise TokenUnusable(
            f"others than root and this account can write {place} (mode {stat.S_IMODE(status.st_mode):04o}, owner "
            f"{status.st_uid}): a library is code that runs beside the keys; chown and chmod it"
        )


def _text(value: object) -> str:
    return (value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)).rstrip(" \0")


def _name(error: Exception) -> str:
    """Of its kind, and what it says: python-pkcs11 says which call failed, never with what."""
    said = str(error)
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
