"""Sessions with PKCS#11 tokens: one for each token and process, logged in once, with the PIN of a private file.

A PIN that was wrong is never tried again by itself: a token counts tries, and locks after a few, which a service
manager that starts a program again and again would bring about. So nothing is tried either where the token says that
the last try of anybody was wrong (CKF_USER_PIN_COUNT_LOW), until a person has logged in. What fails later (the
token is gone, its session was closed, this process is a fork of the one that logged in) is an error that says so, and
ends what needed the signature.
"""

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from lorica_security.errors import AuthenticationError, ConfigurationError, StateError
from lorica_security.host.files import read_private
from lorica_security.pkcs11_keys.token_uri import TokenUri

EXTRA: Final = "token"
"""Of the wheel: what brings python-pkcs11."""


class TokenUnusable(ConfigurationError):
    """A key in a token, or what leads to it, is not there, is not safe, or is of another kind."""


class WrongPin(AuthenticationError):
    """The token did not take the PIN."""


class TriedPin(WrongPin):
    """The same, of a PIN that was given to it."""


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
_wrong: dict[tuple[str, str, int], tuple[int, int]] = {}
"""Of a token whose PIN was wrong: the file that had it, by inode and change. Whoever asks again (a loop that renews,
say) gets the same answer, and the token is not asked."""
_opening = threading.Lock()


def session_of(uri: TokenUri) -> TokenSession:
    """The session of this process with that token; logged in by the first key that needs it.

    Raises TokenUnusable for a library or token that is not there, WrongPin.
    """
    with _opening:
        token = _token(uri)
        place = uri.module, bytes(token.serial).decode("ascii", "replace"), os.getpid()
        if place not in _sessions:
            mark = _mark(Path(uri.pin_source))
            if mark is not None and _wrong.get(place) == mark:
                raise _wrong_pin(uri)
            try:
                _sessions[place] = TokenSession(uri, _logged_in(uri, token))
            except TriedPin:
                if mark is not None:
                    _wrong[place] = mark
                raise
        return _sessions[place]


def _mark(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None  # reading it says why
    return status.st_ino, status.st_mtime_ns


def _token(uri: TokenUri) -> Any:
    try:
        import pkcs11
    except ImportError as error:
        raise TokenUnusable(
            f"a key in a token needs python-pkcs11, which the extra `{EXTRA}` brings: pip install python-pkcs11"
        ) from error
    _require_safe_library(Path(uri.module))
    try:
        library = pkcs11.lib(uri.module)
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


def _logged_in(uri: TokenUri, token: Any) -> Any:
    import pkcs11

    pin_file = Path(uri.pin_source)
    flags = token.flags
    if pkcs11.TokenFlag.USER_PIN_LOCKED in flags:
        raise WrongPin(f"the PIN of token {uri.of_token} is locked: its security officer has to set another one")
    if pkcs11.TokenFlag.USER_PIN_COUNT_LOW in flags:  # also of a process before, which a service manager started
        raise WrongPin(
            f"the last PIN that was given to token {uri.of_token} was wrong, and the token counts: nothing is tried by "
            f"itself; correct {pin_file}, log in once by the token's own tool (pkcs11-tool --login --list-objects), "
            "and start again"
        )
    pin = read_private(pin_file, handed=True).strip()
    if not pin:
        raise TokenUnusable(f"{pin_file} is empty: write the PIN of token {uri.of_token} into it")
    try:
        return token.open(user_pin=pin.decode("utf-8"))
    except (pkcs11.PinIncorrect, pkcs11.PinLenRange, pkcs11.PinInvalid):
        pass  # outside the handler, so that no traceback has this frame's PIN
    except pkcs11.PinLocked:
        raise WrongPin(
            f"the PIN of token {uri.of_token} is locked: its security officer has to set another one"
        ) from None
    except UnicodeDecodeError:
        raise TokenUnusable(f"{pin_file} is no text: write the PIN of token {uri.of_token} into it") from None
    except pkcs11.PKCS11Error as error:
        raise TokenUnusable(
            f"the token {uri.of_token} cannot be opened ({_name(error)}): look at its own log"
        ) from None
    finally:
        del pin
    raise _wrong_pin(uri)


def _wrong_pin(uri: TokenUri) -> TriedPin:
    return TriedPin(
        f"{uri.pin_source} has not the PIN of token {uri.of_token}: it was tried once and is not tried again, for "
        "the token counts wrong tries and locks after a few; correct the file before the next start"
    )


def _require_safe_library(path: Path) -> None:
    """Whoever can write the library, or put another one in its place, runs code with this silo's keys."""
    try:
        file = path.resolve(strict=True)
        found = [(file, file.stat()), (file.parent, file.parent.stat())]
    except OSError as error:
        raise TokenUnusable(
            f"the PKCS#11 library {path} is not there ({error.strerror}): install it, or correct module-path"
        ) from error
    if not stat.S_ISREG(found[0][1].st_mode):
        raise TokenUnusable(f"the PKCS#11 library {path} is no file: correct module-path")
    for place, status in found:
        if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
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
