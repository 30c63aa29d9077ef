"""The one-time enrolment token: all that a silo needs to find the coordinator, know it, and be known, in one line of
text.

    token    = "lorica1-" base64url(fields checksum), without padding
    fields   = str federation, str silo name, 32 bytes CA pin, 32 bytes secret, 8 bytes expiry, str host, 2 bytes port
    str      = 1 byte length, then ASCII; numbers are big-endian; expiry is in Unix seconds
    checksum = first 6 bytes of SHA-256(b"lorica/v1/enrolment-token\\0" + fields): against typing errors, not attackers

There is one text for each token: whatever decodes, encodes to the same text again, but for the white space and the
quotation marks that a mail program put into it. No error shows the text, which is a secret. The coordinator keeps
`secret_digest` alone; the secret has 256 bits, so a plain hash cannot be searched.
"""

import base64
import binascii
import hashlib
import hmac
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from ipaddress import IPv6Address

from lorica_security.errors import AuthenticationError, ConfigurationError, MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role, SiloName, federation_name, silo_name
from lorica_security.pki.hosts import parse_host
from lorica_security.pki.pins import DIGEST_BYTES, SpkiPin, parse_pin, pin_digest, pin_from_digest
from lorica_security.pki.validity import as_utc

PREFIX = "lorica1-"
SECRET_BYTES = 32
MAX_TOKEN_CHARACTERS = 1024
MAX_PASTED_CHARACTERS = 16 * MAX_TOKEN_CHARACTERS
"""Of the text that a token is looked for in, with all that was wrapped around it."""

_CHECKSUM_BYTES = 6
_CHECKSUM_DOMAIN = b"lorica/v1/enrolment-token\0"
_SECRET_DOMAIN = b"lorica/v1/enrolment-secret\0"
_ALPHABET = re.compile(r"[A-Za-z0-9_-]*")
_MAX_EXPIRY = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp())
_OF_THE_MAIL = re.compile("=\r?\n|[\\s\"'`<>|\u00ab\u00ad\u00bb\u2018-\u201f\u2039\u203a\u200b-\u200f\u2060\ufeff]")
"""What mail programs and people put around and into a line: white space, quotation marks and signs, characters that
nobody sees."""
_COPY_AGAIN = "copy the whole line that `coordinator invite` printed"


@dataclass(frozen=True, slots=True)
class EnrolmentToken:
    """A checked token. `expires_at` is in Unix seconds; the secret is not shown by `repr`."""

    federation: FederationName
    silo: SiloName
    ca_pin: SpkiPin
    secret: bytes = field(repr=False)
    expires_at: int
    host: str
    port: int

    def __post_init__(self) -> None:
        federation_name(self.federation)
        silo_name(self.silo)
        try:
            parse_pin(self.ca_pin)
        except MalformedMessage as error:
            raise ConfigurationError(str(error)) from error
        if len(self.secret) != SECRET_BYTES:
            raise ConfigurationError(f"enrolment secret of {len(self.secret)} bytes: it must have {SECRET_BYTES}")
        if not 0 < self.expires_at <= _MAX_EXPIRY:
            raise ConfigurationError(f"enrolment token expiry {self.expires_at} is out of range: use Unix seconds")
        if str(parse_host(self.host)) != self.host:
            raise ConfigurationError(f"host {self.host!r} is spelled {str(parse_host(self.host))!r}: use that spelling")
        if not 1 <= self.port <= 65535:
            raise ConfigurationError(f"enrolment port {self.port} is out of range: use 1 to 65535")

    @property
    def identity(self) -> Identity:
        """Whom the token invites."""
        return Identity(self.federation, Role.SILO, self.silo)

    @property
    def address(self) -> str:
        """host:port of the enrolment listener, an IPv6 address in brackets."""
        host = f"[{self.host}]" if isinstance(parse_host(self.host), IPv6Address) else self.host
        return f"{host}:{self.port}"

    def check_unexpired(self, now: datetime) -> None:
        check_unexpired(self.expires_at, silo=self.silo, now=now)


def encode(token: EnrolmentToken) -> str:
    """The line to hand to the silo."""
    fields = b"".join(
        (
            _text(token.federation),
            _text(token.silo),
            pin_digest(token.ca_pin),
            token.secret,
            token.expires_at.to_bytes(8, "big"),
            _text(token.host),
            token.port.to_bytes(2, "big"),
        )
    )
    return PREFIX + _base64url(fields + _checksum(fields))


def decode(text: str) -> EnrolmentToken:
    """The token in `text`, however it was wrapped, indented or quoted; raises ConfigurationError that says what is
    wrong with the copy."""
    if len(text) > MAX_PASTED_CHARACTERS:
        raise ConfigurationError(f"enrolment token of {len(text)} characters is too long: {_COPY_AGAIN}")
    text = _OF_THE_MAIL.sub("", text)
    if len(text) > MAX_TOKEN_CHARACTERS:
        raise ConfigurationError(f"enrolment token of {len(text)} characters is too long: {_COPY_AGAIN}")
    if not text.startswith(PREFIX):
        raise ConfigurationError(f"enrolment token does not begin with {PREFIX!r}: {_COPY_AGAIN}")
    body = text.removeprefix(PREFIX)
    if not _ALPHABET.fullmatch(body):
        raise ConfigurationError(f"enrolment token holds a character that no token has: {_COPY_AGAIN}")
    try:
        data = base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))
    except binascii.Error:
        raise ConfigurationError(f"enrolment token has lost or gained a character: {_COPY_AGAIN}") from None
    fields, checksum = data[:-_CHECKSUM_BYTES], data[-_CHECKSUM_BYTES:]
    if _base64url(data) != body or not hmac.compare_digest(_checksum(fields), checksum):
        raise ConfigurationError(f"enrolment token has a typing error (its checksum does not match): {_COPY_AGAIN}")
    return _parse(fields)


def _parse(fields: bytes) -> EnrolmentToken:
    reader = _Reader(fields)
    token = EnrolmentToken(
        federation=FederationName(reader.text()),
        silo=SiloName(reader.text()),
        ca_pin=pin_from_digest(reader.take(DIGEST_BYTES)),
        secret=reader.take(SECRET_BYTES),
        expires_at=int.from_bytes(reader.take(8), "big"),
        host=reader.text(),
        port=int.from_bytes(reader.take(2), "big"),
    )
    reader.finish()
    return token


class _Reader:
    """Takes bytes from the front; raises ConfigurationError where they run out or are left over."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def take(self, count: int) -> bytes:
        if count > len(self._data):
            raise ConfigurationError(f"enrolment token ends in the middle of a field: {_COPY_AGAIN}")
        head, self._data = self._data[:count], self._data[count:]
        return head

    def text(self) -> str:
        try:
            return self.take(self.take(1)[0]).decode("ascii")
        except UnicodeDecodeError:
            raise ConfigurationError(f"enrolment token holds a name that is not ASCII: {_COPY_AGAIN}") from None

    def finish(self) -> None:
        if self._data:
            raise ConfigurationError(f"enrolment token has {len(self._data)} bytes after its last field: {_COPY_AGAIN}")


def check_unexpired(expires_at: int, *, silo: SiloName, now: datetime) -> None:
    """Raises AuthenticationError from the second `expires_at` (Unix) on; for the token and for the stored
    invitation."""
    if as_utc(now).timestamp() >= expires_at:
        moment = datetime.fromtimestamp(expires_at, UTC).isoformat()
        raise AuthenticationError(
            f"enrolment token for {silo} expired at {moment}: have a new one made with `coordinator invite {silo}`"
        )


def secret_digest(secret: bytes) -> bytes:
    """The 32 bytes that the coordinator stores instead of the secret."""
    return hashlib.sha256(_SECRET_DOMAIN + secret).digest()


def is_secret(secret: bytes, digest: bytes) -> bool:
    """Whether `digest` is `secret_digest(secret)`; compared in constant time."""
    return hmac.compare_digest(secret_digest(secret), digest)


def verify_secret(secret: bytes, digest: bytes) -> None:
    """Raises AuthenticationError unless `digest` is `secret_digest(secret)`; compared in constant time."""
    if not is_secret(secret, digest):
        raise AuthenticationError("enrolment secret does not match the invitation: use the newest token for this silo")


def _text(text: str) -> bytes:
    data = text.encode("ascii")
    return bytes([len(data)]) + data


def _checksum(fields: bytes) -> bytes:
    return hashlib.sha256(_CHECKSUM_DOMAIN + fields).digest()[:_CHECKSUM_BYTES]


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
