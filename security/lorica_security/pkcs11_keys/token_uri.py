"""`pkcs11:` URIs (RFC 7512): which key of which token, by which library, and where its PIN is.

    pkcs11:token=silo-a;object=identity?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-source=/etc/lorica/pin

A library is code that this process runs, so it is named by an absolute path, and by the operator alone: no message of a
peer is ever parsed here. A PIN in the URI is refused: whoever lists processes reads command lines, and files with URIs
are copied about.
"""

import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Final
from urllib.parse import unquote_to_bytes

from lorica_security.errors import ConfigurationError

SCHEME: Final = "pkcs11:"
MOST_CHARACTERS: Final = 2048
EXAMPLE: Final = "pkcs11:token=NAME;object=LABEL?module-path=/PATH/OF/LIBRARY.so&pin-source=/PATH/OF/PIN"
BY_LABEL: Final = (
    "a token is named by its label alone, and any other of that label would get the PIN: add serial= to the URI"
)
"""What checks say of a URI without a serial number."""

_ALLOWED = re.compile(r"pkcs11:[A-Za-z0-9\-._~:\[\]@!$'()*+,=&/;?|%]*")
_TOKEN = ("token", "serial", "manufacturer", "model")
_KEY = ("object", "id", "type")
_QUERY = ("module-path", "pin-source")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUri:
    """`text` is shown in no error: somebody may have put a PIN where none belongs. `token` and `serial` name the token,
    `object` (its label) and `id` the key; what is empty says nothing."""

    text: str
    module: str
    pin_source: str
    token: str = ""
    serial: str = ""
    manufacturer: str = ""
    model: str = ""
    object: str = ""
    id: bytes = b""

    @classmethod
    def parse(cls, text: str) -> "TokenUri":
        """Raises ConfigurationError, which shows nothing of `text`."""
        if "pin-value" in text.lower():
            raise ConfigurationError(
                "a pkcs11: URI with pin-value has the PIN in it: write the PIN into a file of mode 0600, name that "
                "as pin-source, and change the PIN if others may have seen it"
            )
        if len(text) > MOST_CHARACTERS or not _ALLOWED.fullmatch(text):
            raise ConfigurationError(f"that is no pkcs11: URI: give {EXAMPLE}")
        path, _, query = text.removeprefix(SCHEME).partition("?")
        if "?" in query:
            raise ConfigurationError(f"the pkcs11: URI has two question marks: give {EXAMPLE}")
        found = _attributes(path, ";", (*_TOKEN, *_KEY)) | _attributes(query, "&", _QUERY)
        if found.pop("type", b"private") != b"private":
            raise ConfigurationError("the pkcs11: URI names no private key: leave type out, or give type=private")
        if not (found.get("token") or found.get("serial")):
            raise ConfigurationError("the pkcs11: URI names no token: give token=NAME or serial=NUMBER")
        if not (found.get("object") or found.get("id")):
            raise ConfigurationError("the pkcs11: URI names no key: give object=LABEL or id=%01")
        key = found.pop("id", b"")
        try:
            words = {name: value.decode("utf-8") for name, value in found.items()}
        except UnicodeDecodeError:
            raise ConfigurationError("the pkcs11: URI has text that is no UTF-8: only id may be bytes") from None
        module = words.pop("module-path", "")
        pin_source = words.pop("pin-source", "").removeprefix("file://").removeprefix("file:")
        for name, value in (("module-path", module), ("pin-source", pin_source)):
            if not PurePosixPath(value).is_absolute():
                raise ConfigurationError(f"the pkcs11: URI has no {name} that is an absolute path: give {EXAMPLE}")
        return cls(text=text, module=module, pin_source=pin_source, id=key, **words)

    @property
    def of_token(self) -> str:
        """The token, for error lines."""
        return repr(self.token) if self.token else f"with serial number {self.serial}"

    @property
    def of_key(self) -> str:
        """The key, for error lines."""
        label = repr(self.object) if self.object else ""
        return " and ".join(filter(None, (label, f"id {self.id.hex()}" if self.id else "")))


def _attributes(part: str, separator: str, known: tuple[str, ...]) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for attribute in part.split(separator) if part else ():
        name, equals, value = attribute.partition("=")
        if not equals or name not in known:
            raise ConfigurationError(f"the pkcs11: URI has a part that is none of {', '.join(known)}: leave it out")
        if name in found:
            raise ConfigurationError(f"the pkcs11: URI has {name} twice: leave one out")
        if re.search(r"%(?![0-9A-Fa-f]{2})", value):
            raise ConfigurationError(
                "the pkcs11: URI has a percent sign without two hexadecimal digits: write it as %25"
            )
        found[name] = unquote_to_bytes(value)
        if b"\0" in found[name] and name != "id":
            raise ConfigurationError(f"the pkcs11: URI has a zero byte in {name}: leave it out")
    return found
