"""Getting a certificate without being invited: every way that is known, against the real enrolment listener."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from structlog.testing import capture_logs

from lorica_coordinator.edges.server import enrolment_servicer
from lorica_coordinator.edges.server.enrolment_servicer import MOST_FAILURES, WINDOW_S
from lorica_security.errors import (
    AuthenticationError,
    AuthorisationError,
    ConfigurationError,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    Unreachable,
)
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity.endorsement import endorse_request
from lorica_security.identity.enrolment_token import PREFIX, EnrolmentToken, decode, encode
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.tls_key import new_tls_key
from silo_agent.edges.wire.enrolment_client import enrol
from silo_wire.codecs.common_codec import call_key
from silo_wire.v1 import enrolment_pb2, enrolment_pb2_grpc, operator_pb2
from tests.support.certificates import SERVER, flip, forge_request, uri
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    RunningCoordinator,
    accepts,
    channel_to,
    initialise,
    refused,
    running,
    until,
)
from tests.support.every_call import FEDERATION_CALLS, OPERATOR_CALLS, call, request_for
from tests.support.tls_attempt import CUT_OFF, greeted

CLINIC = SiloName("clinic-c")
CLINIC_IDENTITY = Identity(FEDERATION, Role.SILO, CLINIC)
BANK_IDENTITY = Identity(FEDERATION, Role.SILO, BANK)
GUESSES = 50


@pytest.fixture
async def at(tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(initialise(tmp_path / "coordinator")) as coordinator:
        yield coordinator


@asynccontextmanager
async def stranger(at: RunningCoordinator) -> AsyncIterator["enrolment_pb2_grpc.EnrolmentAsyncStub"]:
    """Whoever reaches the enrolment listener: the authority's certificate is no secret."""
    address = f"127.0.0.1:{at.enrolment_port}"
    async with channel_to(address, at.coordinator.keys.trust.to_pem()) as channel:
        yield enrolment_pb2_grpc.EnrolmentStub(channel)


@dataclass(frozen=True, slots=True)
class Applicant:
    """What a silo sends with its token; honest unless a test replaces a part."""

    request: enrolment_pb2.EnrolRequest

    @classmethod
    def with_token(
        cls, token: EnrolmentToken, *, csr: bytes | None = None, identity: Identity | None = None
    ) -> "Applicant":
        name = identity or token.identity
        key = new_identity_key()
        request = certificate_request(new_tls_key(), name) if csr is None else csr
        return cls(
            enrolment_pb2.EnrolRequest(
                federation=token.federation,
                silo=name.name,
                token_secret=token.secret,
                csr_der=request,
                identity_public_key=public_key_bytes(key.public_key()),
                identity_endorsement=endorse_request(key, request=request, identity=name),
                agent_version="test",
                trust_bundle=bytes(32),
            )
        )

    def but(self, **fields: Any) -> enrolment_pb2.EnrolRequest:
        changed = enrolment_pb2.EnrolRequest()
        changed.CopyFrom(self.request)
        for name, value in fields.items():
            setattr(changed, name, value)
        return changed


async def attempt(at: RunningCoordinator, request: enrolment_pb2.EnrolRequest) -> enrolment_pb2.EnrolReply:
    async with stranger(at) as stub:
        return await stub.Enrol(request, timeout=20)


async def still_takes(at: RunningCoordinator, token: EnrolmentToken) -> None:
    """The token was not spent: its silo enrols with it, by the real client."""
    credentials = await enrol(token, now=datetime.now(UTC), agent_version="test")
    assert credentials.silo == token.silo
    assert [silo.silo for silo in at.coordinator.open_store().silos()] == [token.silo]


# --- the token -----------------------------------------------------------------------------------------------------


async def test_replayed_token(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    await at.invited(BANK)  # keeps the listener open
    first = await enrol(token, now=datetime.now(UTC), agent_version="test")
    async with refused(
        at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, f"the token of silo {CLINIC} was used at 2"
    ):
        await attempt(at, Applicant.with_token(token).request)
    other = Applicant.with_token(token).but(token_secret=flip(token.secret, 0))
    async with refused(  # who does not hold the token is not told
        at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, f"no invitation is open for silo {CLINIC}"
    ):
        await attempt(at, other)
    await at.invited(CLINIC)
    async with refused(
        at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, f"the token of silo {CLINIC} was used at 2"
    ):
        await attempt(at, Applicant.with_token(token).request)
    (enrolled,) = at.coordinator.open_store().silos()
    assert enrolled.certificate_serial == f"{first.certificate.serial_number:x}"


async def test_token_played_by_many_at_once(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    await at.invited(BANK)
    async with stranger(at) as stub:
        calls = [stub.Enrol(Applicant.with_token(token).request, timeout=20) for _ in range(8)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    won = [outcome for outcome in outcomes if isinstance(outcome, enrolment_pb2.EnrolReply)]
    lost = [outcome.code() for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    assert len(won) == 1
    assert lost == [grpc.StatusCode.UNAUTHENTICATED] * 7
    (enrolled,) = at.coordinator.open_store().silos()
    assert enrolled.certificate_serial == f"{parse_certificate(won[0].certificate_pem).serial_number:x}"
    assert at.errors("AuthenticationError") == 7


async def test_expired_token(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC, valid_seconds=60)
    await at.invited(BANK, valid_seconds=3600)
    at.clock.ahead = 60.0
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "expired at"):
        await attempt(at, Applicant.with_token(token).request)


async def test_expired_token_with_a_later_expiry_written_into_it(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC, valid_seconds=60)
    await at.invited(BANK, valid_seconds=3600)
    at.clock.ahead = 60.0
    stretched = decode(encode(replace(token, expires_at=token.expires_at + 3600)))
    stretched.check_unexpired(datetime.fromtimestamp(at.clock(), UTC))  # the token itself would do
    with pytest.raises(AuthenticationError, match="expired at"):
        await enrol(stretched, now=datetime.now(UTC), agent_version="test")
    assert at.saved()[2] == []


async def test_older_token_after_a_new_invitation_of_the_same_silo(at: RunningCoordinator) -> None:
    old = await at.invited(CLINIC)
    new = await at.invited(CLINIC)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "use the newest token"):
        await attempt(at, Applicant.with_token(old).request)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "does not match the invitation"):
        await attempt(at, Applicant.with_token(old).but(token_secret=flip(old.secret, 0)))  # who does not hold it
    await still_takes(at, new)
    await at.invited(BANK)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "was replaced by a newer one"):
        await attempt(at, Applicant.with_token(old).request)


async def test_token_that_was_voided_is_told_from_one_that_was_replaced(at: RunningCoordinator) -> None:
    await at.invited(BANK)
    token = await at.invited(CLINIC)
    await at.service.revoke(Role.SILO, CLINIC)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, f"silo {CLINIC} was voided"):
        await attempt(at, Applicant.with_token(token).request)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "no invitation is open"):
        await attempt(at, Applicant.with_token(token).but(token_secret=flip(token.secret, 0)))


async def test_tampered_secret(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    honest = Applicant.with_token(token)
    for secret in (flip(token.secret, 0), flip(token.secret, 255), token.secret[:-1], token.secret + b"\0", b""):
        async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, "does not match the invitation"):
            await attempt(at, honest.but(token_secret=secret))
    await still_takes(at, token)


async def test_tampered_token_text(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    text = encode(token)
    changed = text[: len(PREFIX) + 5] + ("A" if text[len(PREFIX) + 5] != "A" else "B") + text[len(PREFIX) + 6 :]
    with pytest.raises(ConfigurationError, match="typing error"):
        decode(changed)
    await still_takes(at, token)


async def test_token_with_another_silo_written_into_it(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    await at.invited(BANK)
    with pytest.raises(AuthenticationError, match="does not match the invitation"):
        await enrol(replace(token, silo=BANK), now=datetime.now(UTC), agent_version="test")
    assert at.saved()[2] == []
    await still_takes(at, token)


async def test_token_of_a_silo_that_was_never_invited(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    with pytest.raises(AuthenticationError, match="no invitation is open for silo dentist-d"):
        await enrol(replace(token, silo=SiloName("dentist-d")), now=datetime.now(UTC), agent_version="test")
    await still_takes(at, token)


async def test_brute_force_is_made_to_wait_and_does_not_spend_the_token(
    at: RunningCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After some guesses none from there is looked at any more until a minute has passed; the silo behind the same
    address gets in."""
    ahead = 0.0
    monkeypatch.setattr(enrolment_servicer, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + ahead))
    token = await at.invited(CLINIC)
    honest = Applicant.with_token(token)
    async with stranger(at) as stub:
        for bit in range(GUESSES):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Enrol(honest.but(token_secret=flip(token.secret, bit)), timeout=20)
            looked_at = bit < MOST_FAILURES
            code = grpc.StatusCode.UNAUTHENTICATED if looked_at else grpc.StatusCode.UNAVAILABLE
            assert caught.value.code() is code
    assert at.errors("AuthenticationError") == MOST_FAILURES
    assert at.service.enrolment.invited() == (CLINIC,)
    await still_takes(at, token)
    later = await at.invited(CLINIC)
    async with stranger(at) as stub:
        for ahead in (0.0, WINDOW_S + 1):  # the clock reads it
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Enrol(Applicant.with_token(later).but(token_secret=token.secret), timeout=20)
            code = grpc.StatusCode.UNAUTHENTICATED if ahead else grpc.StatusCode.UNAVAILABLE
            assert caught.value.code() is code


async def test_no_log_line_shows_a_secret(at: RunningCoordinator) -> None:
    with capture_logs() as logs:
        token = await at.invited(CLINIC)
        with pytest.raises(grpc.aio.AioRpcError):
            await attempt(at, Applicant.with_token(token).but(token_secret=flip(token.secret, 0)))
        await still_takes(at, token)
    said = json.dumps(logs, default=str)
    assert "silo enrolled" in said
    for shown in (token.secret.hex(), str(token.secret), encode(token), flip(token.secret, 0).hex()):
        assert shown not in said


# --- the request ---------------------------------------------------------------------------------------------------


def rsa_request() -> bytes:
    return forge_request([uri(CLINIC_IDENTITY.uri)], key=rsa.generate_private_key(public_exponent=65537, key_size=2048))


def damaged_request() -> bytes:
    request = certificate_request(new_tls_key(), CLINIC_IDENTITY)
    return flip(request, 8 * len(request) - 1)  # the last byte belongs to the signature


@pytest.mark.parametrize(
    ("csr", "kind", "match"),
    [
        (
            lambda: certificate_request(new_tls_key(), BANK_IDENTITY),
            AuthorisationError,
            f"request is for {BANK_IDENTITY.uri}",
        ),
        (
            lambda: certificate_request(new_tls_key(), Identity(FEDERATION, Role.OPERATOR, CLINIC)),
            AuthorisationError,
            f"/operator/{CLINIC}",
        ),
        (
            lambda: certificate_request(new_tls_key(), Identity(FEDERATION, Role.COORDINATOR)),
            AuthorisationError,
            "/coordinator",
        ),
        (
            lambda: forge_request(
                [uri(CLINIC_IDENTITY.uri), x509.DNSName(f"coordinator.{FEDERATION}.lorica.internal")]
            ),
            MalformedMessage,
            "asks for 2 names",
        ),
        (
            lambda: forge_request([uri(CLINIC_IDENTITY.uri), uri(BANK_IDENTITY.uri)]),
            MalformedMessage,
            "2 identity URIs",
        ),
        (lambda: forge_request([]), MalformedMessage, "0 identity URIs"),
        (
            lambda: forge_request([uri(CLINIC_IDENTITY.uri)], extra=[x509.BasicConstraints(ca=True, path_length=None)]),
            MalformedMessage,
            "asks to become a CA (CA:TRUE)",
        ),
        (
            lambda: forge_request([uri(CLINIC_IDENTITY.uri)], extra=[x509.ExtendedKeyUsage([SERVER[0]])]),
            MalformedMessage,
            "asks for extension",
        ),
        (rsa_request, MalformedMessage, "RSA"),
        (
            lambda: forge_request([uri(CLINIC_IDENTITY.uri)], key=ec.generate_private_key(ec.SECP224R1())),
            MalformedMessage,
            "secp224r1",
        ),
        (damaged_request, MalformedMessage, "not signed by the key it holds"),
        (lambda: b"\x30" * 100, MalformedMessage, "certificate request"),
        (lambda: b"\0" * 10_000, MalformedMessage, "certificate request"),
        (lambda: b"", MalformedMessage, "certificate request"),
    ],
    ids=[
        "another-silo",
        "an-operator",
        "the-coordinator",
        "an-extra-dns-name",
        "two-silos",
        "nobody",
        "a-ca",
        "server-usage",
        "an-rsa-key",
        "a-weak-curve",
        "a-signature-of-another-key",
        "garbage",
        "too-much",
        "nothing",
    ],
)
async def test_request_for_more_than_the_token_gives(
    at: RunningCoordinator, csr: Callable[[], bytes], kind: type[LoricaError], match: str
) -> None:
    token = await at.invited(CLINIC)
    code = {
        AuthorisationError: grpc.StatusCode.PERMISSION_DENIED,
        MalformedMessage: grpc.StatusCode.INVALID_ARGUMENT,
    }[kind]
    async with refused(at, kind, code, match):
        await attempt(at, Applicant.with_token(token, csr=csr()).request)
    await still_takes(at, token)


async def test_request_that_another_identity_key_endorsed(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    honest = Applicant.with_token(token)
    other = public_key_bytes(new_identity_key().public_key())
    async with refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "signature"):
        await attempt(at, honest.but(identity_public_key=other))
    await still_takes(at, token)


async def test_endorsement_of_another_request(at: RunningCoordinator) -> None:
    """Somebody between silo and coordinator puts a TLS key of their own in place of the silo's."""
    token = await at.invited(CLINIC)
    honest = Applicant.with_token(token)
    swapped = certificate_request(new_tls_key(), CLINIC_IDENTITY)
    async with refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "signature"):
        await attempt(at, honest.but(csr_der=swapped))
    await still_takes(at, token)


async def test_endorsement_for_another_name(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    key = new_identity_key()
    honest = Applicant.with_token(token)
    for_bank = endorse_request(key, request=honest.request.csr_der, identity=BANK_IDENTITY)
    async with refused(at, IntegrityError, grpc.StatusCode.DATA_LOSS, "signature"):
        await attempt(
            at,
            honest.but(identity_public_key=public_key_bytes(key.public_key()), identity_endorsement=for_bank),
        )
    await still_takes(at, token)


@pytest.mark.parametrize("size", [0, 31, 33, 1 << 20], ids=lambda size: f"{size}-bytes")
async def test_identity_key_that_is_none(at: RunningCoordinator, size: int) -> None:
    token = await at.invited(CLINIC)
    async with refused(at, MalformedMessage, grpc.StatusCode.INVALID_ARGUMENT, f"{size} bytes"):
        await attempt(at, Applicant.with_token(token).but(identity_public_key=bytes(size)))
    await still_takes(at, token)


async def test_token_of_this_federation_for_another(at: RunningCoordinator) -> None:
    token = await at.invited(CLINIC)
    async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "names federation 'other-net'"):
        await attempt(at, Applicant.with_token(token).but(federation="other-net"))
    await still_takes(at, token)


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "", "UPPER", "a" * 64, "a" * (1 << 20), "line\nbreak"],
    ids=["a-path", "nothing", "upper-case", "too-long", "a-mebibyte", "two-lines"],
)
async def test_name_that_no_silo_can_have(at: RunningCoordinator, name: str) -> None:
    """Nobody is known yet on this listener, so whatever they say must not fill the log either."""
    token = await at.invited(CLINIC)
    async with refused(at, MalformedMessage, grpc.StatusCode.INVALID_ARGUMENT, "silo name") as refusal:
        await attempt(at, Applicant.with_token(token).but(silo=name))
    assert len(json.dumps(refusal.logs, default=str)) < 2000
    await still_takes(at, token)


# --- the listener --------------------------------------------------------------------------------------------------


async def test_listener_is_closed_while_nobody_is_invited(at: RunningCoordinator) -> None:
    assert not accepts(at.enrolment_port)
    token = await at.invited(CLINIC)
    assert accepts(at.enrolment_port)
    await enrol(token, now=datetime.now(UTC), agent_version="test")
    await until(lambda: not accepts(at.enrolment_port))
    with pytest.raises(Unreachable, match=f"this token was used, .* whether silo {CLINIC} is enrolled"):
        await enrol(token, now=datetime.now(UTC), agent_version="test")


async def test_listener_stays_for_those_still_invited_and_closes_after_the_last(at: RunningCoordinator) -> None:
    first, second = await at.invited(CLINIC), await at.invited(BANK)
    await enrol(first, now=datetime.now(UTC), agent_version="test")
    await enrol(second, now=datetime.now(UTC), agent_version="test")
    await until(lambda: not accepts(at.enrolment_port))


async def test_an_invitation_is_told_once_its_token_is_heard_though_the_listener_was_just_closing(
    at: RunningCoordinator,
) -> None:
    async with at.operator() as operator:
        for silo in (CLINIC, BANK, CLINIC):
            reply = await operator.Invite(operator_pb2.InviteRequest(silo=silo))
            assert at.service.enrolment.listening.is_set()
            await enrol(decode(reply.token), now=datetime.now(UTC), agent_version="test")


async def test_listener_closes_when_the_last_invitation_expires(at: RunningCoordinator) -> None:
    await at.invited(CLINIC, valid_seconds=1)
    await until(lambda: not accepts(at.enrolment_port))


async def test_stopping_in_the_moment_in_which_an_invitation_changes(at: RunningCoordinator) -> None:
    await at.invited(CLINIC)
    await at.service.enrolment.invite(CLINIC, 3600)  # wakes the listener's task, which has not run yet
    at.serving.door.cancel()
    async with asyncio.timeout(20):
        await asyncio.gather(at.serving.door, return_exceptions=True)
    assert at.serving.door.cancelled()


async def test_silo_and_operator_calls_on_the_enrolment_listener(at: RunningCoordinator) -> None:
    await at.invited(CLINIC)
    pair = at.coordinator.keys.operator_pair(datetime.now(UTC))
    roots = at.coordinator.keys.trust.to_pem()
    address = f"127.0.0.1:{at.enrolment_port}"
    async with channel_to(address, roots, key_pem=pair.key_pem, certificate_pem=pair.certificate_pem) as channel:
        for method in (*FEDERATION_CALLS, *OPERATOR_CALLS):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, method, request_for(method, call_key(federation=FEDERATION, silo=CLINIC)))
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_downgrade_to_tls_1_2_on_the_enrolment_listener(at: RunningCoordinator, tmp_path: Path) -> None:
    await at.invited(CLINIC)
    assert await greeted(at.enrolment_port, version=ssl.TLSVersion.TLSv1_3, folder=tmp_path) == ""
    said = await greeted(at.enrolment_port, version=ssl.TLSVersion.TLSv1_2, folder=tmp_path)
    assert said == CUT_OFF  # before the server's first word
