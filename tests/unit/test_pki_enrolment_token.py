import base64
import dataclasses
import hashlib
import string
from datetime import UTC, datetime, timedelta, timezone
from ipaddress import IPv4Address, IPv6Address

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import AuthenticationError, ConfigurationError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity import enrolment_token
from lorica_security.identity.enrolment_token import (
    EnrolmentToken,
    check_unexpired,
    decode,
    encode,
    secret_digest,
    verify_secret,
)
from lorica_security.pki.pins import pin_from_digest
from tests.support.certificates import FEDERATION, NOW
from tests.support.tokens import mint

SILO = SiloName("hospital-a")
PIN = pin_from_digest(bytes(range(32)))
SECRET = bytes(range(100, 132))


def token(**changes: object) -> EnrolmentToken:
    plain = mint(federation=FEDERATION, silo=SILO, ca_pin=PIN, host="fl.example.org", port=8444, now=NOW, secret=SECRET)
    return dataclasses.replace(plain, **changes)


TEXT = encode(token())

NAMES = st.from_regex(r"\A[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
HOSTS = st.one_of(
    st.builds(lambda number: str(IPv4Address(number)), st.integers(0, 2**32 - 1)),
    st.builds(lambda number: str(IPv6Address(number)), st.integers(0, 2**128 - 1)),
    st.from_regex(r"\A[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.[a-z]{2,9}){0,3}\Z"),
)
TOKENS = st.builds(
    EnrolmentToken,
    federation=NAMES.map(FederationName),
    silo=NAMES.map(SiloName),
    ca_pin=st.binary(min_size=32, max_size=32).map(pin_from_digest),
    secret=st.binary(min_size=32, max_size=32),
    expires_at=st.integers(1, 253_402_214_400),
    host=HOSTS,
    port=st.integers(1, 65535),
)


@given(TOKENS)
def test_decode_gives_back_what_was_encoded(value: EnrolmentToken):
    text = encode(value)
    assert decode(text) == value
    assert encode(decode(text)) == text
    assert len(text) <= enrolment_token.MAX_TOKEN_CHARACTERS


def test_the_text_is_the_documented_layout():
    fields = (
        b"\x0dnorthern-care\x0ahospital-a"
        + bytes(range(32))
        + SECRET
        + int(datetime(2026, 3, 4, 12, tzinfo=UTC).timestamp()).to_bytes(8, "big")
        + b"\x0efl.example.org\x20\xfc"
    )
    checksum = hashlib.sha256(b"lorica/v1/enrolment-token\0" + fields).digest()[:6]
    body = base64.urlsafe_b64encode(fields + checksum).decode().rstrip("=")
    assert f"lorica1-{body}" == TEXT


def test_white_space_around_a_pasted_token_is_ignored():
    assert decode(f"  {TEXT}\r\n") == token()


@given(data=st.data())
def test_token_with_one_character_changed_is_refused(data: st.DataObject):
    position = data.draw(st.integers(0, len(TEXT) - 1))
    letter = data.draw(st.sampled_from([c for c in string.printable + "é" if c != TEXT[position] and c.strip()]))
    with pytest.raises(ConfigurationError, match="copy the whole line"):
        decode(TEXT[:position] + letter + TEXT[position + 1 :])


def test_token_with_one_character_changed_says_typing_error():
    body = TEXT[-10]
    with pytest.raises(ConfigurationError, match="typing error"):
        decode(TEXT[:-10] + ("A" if body != "A" else "B") + TEXT[-9:])


@given(st.integers(0, len(TEXT) - 1))
def test_token_cut_short_is_refused(length: int):
    with pytest.raises(ConfigurationError, match="copy the whole line"):
        decode(TEXT[:length])


@given(position=st.integers(0, len(TEXT) - 2))
def test_token_with_two_neighbours_swapped_is_refused(position: int):
    swapped = TEXT[:position] + TEXT[position + 1] + TEXT[position] + TEXT[position + 2 :]
    if swapped != TEXT:
        with pytest.raises(ConfigurationError, match="copy the whole line"):
            decode(swapped)


@pytest.mark.parametrize("tail", ["A", "AA", "AAAA", "=", "==", "-", TEXT])
def test_token_with_something_behind_it_is_refused(tail: str):
    with pytest.raises(ConfigurationError, match="copy the whole line"):
        decode(TEXT + tail)


@pytest.mark.parametrize(
    "pasted",
    [
        f"{TEXT[:60]}\n{TEXT[60:]}",
        f"\t{TEXT[:3]} {TEXT[3:60]}\r\n\r\n  {TEXT[60:]}\n",
        f"> {TEXT[:60]}\n>> {TEXT[60:]}\n",
        f"{TEXT[:60]}=\r\n{TEXT[60:]}",
        f'"{TEXT}"',
        f"'{TEXT}'",
        f"`{TEXT}`",
        f"<{TEXT}>",
        f"\u201e{TEXT}\u201c",
        f"\u00ab\u00a0{TEXT}\u00a0\u00bb",
        f"\ufeff{TEXT[:60]}\u200b{TEXT[60:]}",
    ],
)
def test_what_a_mail_program_puts_into_a_token_is_ignored(pasted: str):
    assert decode(pasted) == token()


@pytest.mark.parametrize("text", ["", "lorica1-", "lorica2-" + TEXT[8:], TEXT[8:], TEXT.upper(), "hello"])
def test_text_that_is_no_token_is_refused(text: str):
    with pytest.raises(ConfigurationError, match="copy the whole line"):
        decode(text)


def test_token_of_excessive_length_is_refused_before_it_is_decoded():
    with pytest.raises(ConfigurationError, match="of 100008 characters is too long"):
        decode("lorica1-" + "A" * 100_000)


def with_checksum(fields: bytes) -> str:
    return "lorica1-" + enrolment_token._base64url(fields + enrolment_token._checksum(fields))


def fields_of(text: str) -> bytes:
    body = text.removeprefix("lorica1-")
    return base64.urlsafe_b64decode(body + "=" * (-len(body) % 4))[:-6]


def test_token_with_trailing_bytes_under_a_right_checksum_is_refused():
    with pytest.raises(ConfigurationError, match="1 bytes after its last field"):
        decode(with_checksum(fields_of(TEXT) + b"\0"))


@given(st.integers(0, len(fields_of(TEXT)) - 1))
def test_token_cut_short_under_a_right_checksum_is_refused(length: int):
    with pytest.raises(ConfigurationError):
        decode(with_checksum(fields_of(TEXT)[:length]))


@given(st.binary(max_size=200))
def test_random_fields_under_a_right_checksum_are_refused_or_round_trip(fields: bytes):
    text = with_checksum(fields)
    try:
        value = decode(text)
    except ConfigurationError:
        return
    assert encode(value) == text


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"hospital-a", b"Hospital-a"),
        (b"hospital-a", b"../../etcx"),
        (b"hospital-a", b"hospital-\xe9"),
        (b"fl.example.org", b"fl.example.or/"),
        (b"\x20\xfc", b"\x00\x00"),
    ],
)
def test_token_with_a_forbidden_name_under_a_right_checksum_is_refused(old: bytes, new: bytes):
    fields = fields_of(TEXT)
    assert old in fields
    with pytest.raises(ConfigurationError):
        decode(with_checksum(fields.replace(old, new)))


def test_neither_repr_nor_an_error_shows_the_secret():
    assert "secret" not in repr(token())
    assert repr(SECRET)[2:-1] not in str(token())
    for text in (
        TEXT + "A",
        TEXT[:-1],
        TEXT[:60] + "." + TEXT[60:],
        "x" + TEXT,
        TEXT * 20,
        with_checksum(fields_of(TEXT) + b"x"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            decode(text)
        assert TEXT[80:100] not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"federation": "Northern"},
        {"silo": ""},
        {"ca_pin": "AAAA"},
        {"secret": b"short"},
        {"secret": bytes(33)},
        {"expires_at": 0},
        {"expires_at": 2**63},
        {"host": "fl example"},
        {"host": "*.example.org"},
        {"host": "FD00::1"},
        {"port": 0},
        {"port": 65536},
    ],
    ids=str,
)
def test_a_token_with_an_impossible_field_cannot_be_made(change: dict[str, object]):
    with pytest.raises(ConfigurationError):
        token(**change)


def test_expired_token_is_refused_from_its_last_second_on():
    value = mint(federation=FEDERATION, silo=SILO, ca_pin=PIN, host="h", port=1, now=NOW, lifetime=timedelta(hours=1))
    end = NOW + timedelta(hours=1)
    value.check_unexpired(end - timedelta(microseconds=1))
    with pytest.raises(AuthenticationError, match=r"expired at 2026-03-01T13:00:00\+00:00.*invite hospital-a"):
        value.check_unexpired(end)
    with pytest.raises(AuthenticationError):
        check_unexpired(value.expires_at, silo=SILO, now=end + timedelta(days=1))


def test_expiry_does_not_depend_on_the_time_zone_of_the_clock():
    value = token()
    end = datetime.fromtimestamp(value.expires_at, timezone(timedelta(hours=-8)))
    value.check_unexpired(end - timedelta(seconds=1))
    with pytest.raises(AuthenticationError):
        value.check_unexpired(end)


def test_a_clock_without_a_time_zone_is_refused():
    with pytest.raises(ValueError, match="time zone"):
        token().check_unexpired(NOW.replace(tzinfo=None))


@pytest.mark.parametrize(
    ("host", "address"),
    [("fl.example.org", "fl.example.org:8444"), ("10.0.0.5", "10.0.0.5:8444"), ("fd00::5", "[fd00::5]:8444")],
)
def test_the_address_can_be_dialled(host: str, address: str):
    assert token(host=host).address == address


def test_the_token_invites_one_silo():
    assert token().identity == Identity(FEDERATION, Role.SILO, "hospital-a")


def test_the_stored_digest_knows_its_secret_and_no_other():
    digest = secret_digest(SECRET)
    assert digest == hashlib.sha256(b"lorica/v1/enrolment-secret\0" + SECRET).digest()
    verify_secret(SECRET, digest)
    for place in (0, len(digest) - 1):  # each byte counts
        almost = bytes(byte ^ (at == place) for at, byte in enumerate(digest))
        with pytest.raises(AuthenticationError):
            verify_secret(SECRET, almost)
    for wrong in (b"", SECRET[:-1], SECRET + b"\0", bytes(32)):
        with pytest.raises(AuthenticationError, match="does not match the invitation"):
            verify_secret(wrong, digest)
    for at in range(len(digest)):
        with pytest.raises(AuthenticationError, match="does not match the invitation"):
            verify_secret(SECRET, digest[:at] + bytes([digest[at] ^ 1]) + digest[at + 1 :])


def test_the_stored_digest_is_not_itself_a_secret_that_opens_the_door():
    digest = secret_digest(SECRET)
    with pytest.raises(AuthenticationError):
        verify_secret(digest, digest)
