"""Nobody gets in: one row for each false identity, each played against the real listeners of a real coordinator.

What became of each is printed as a table at the end of the run. The modules test_attacks_on_identity, _enrolment and
_access play these and their variants at length; here is the list that a security officer reads.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_security.errors import AuthenticationError, LoricaError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.enrolment_token import EnrolmentToken
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import new_tls_key, tls_key_from_pem, tls_key_to_pem
from silo_agent.edges.wire.enrolment_client import enrol
from silo_wire.codecs.common_codec import call_key
from silo_wire.transport import MAX_MESSAGE_BYTES
from silo_wire.v1 import operator_pb2
from tests.support.certificates import forged, uri
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    FederationTemplate,
    RunningCoordinator,
    running,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.every_call import FEDERATION_CALLS, OPERATOR_CALLS, call, request_for
from tests.support.tls_attempt import CUT_OFF, greeted

CLINIC = SiloName("clinic-c")
OPERATOR = Identity(FEDERATION, Role.OPERATOR, "operator")
SILO = Identity(FEDERATION, Role.SILO, HOSPITAL)
STATUS = OPERATOR_CALLS[0]
ATTEND = FEDERATION_CALLS[0]
NO_CONNECTION = "TLS: no connection"
Pair = tuple[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Scene:
    at: RunningCoordinator
    hospital: Pair
    folder: Path

    @property
    def authority(self) -> Authority:
        return self.at.coordinator.keys.authority

    async def asks(self, pair: Pair | None, method: object = STATUS, request: object = None) -> str:
        """What a call with this key and certificate comes to."""
        key_pem, certificate_pem = pair or (None, None)
        wanted = request or operator_pb2.GetStatusRequest()
        async with self.at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
            return await answer(call(channel, method, wanted))  # type: ignore[arg-type]


async def answer(called: Awaitable[object]) -> str:
    try:
        await called
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return NO_CONNECTION
        return error.code().name
    except LoricaError as error:
        return type(error).__name__
    return "let in"


async def wrong_authority(scene: Scene) -> str:
    return await scene.asks(forged(Authority.create(FEDERATION, now=datetime.now(UTC)), OPERATOR))


async def self_signed(scene: Scene) -> str:
    key, now = new_tls_key(), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOSPITAL)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    certificate = (
        builder.serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([uri(OPERATOR.uri)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    return await scene.asks((tls_key_to_pem(key), certificate.public_bytes(Encoding.PEM)))


async def no_certificate(scene: Scene) -> str:
    return await scene.asks(None)


async def expired(scene: Scene) -> str:
    now = datetime.now(UTC)
    return await scene.asks(
        forged(scene.authority, OPERATOR, begin=now - timedelta(days=3), end=now - timedelta(minutes=1))
    )


async def not_yet_valid(scene: Scene) -> str:
    now = datetime.now(UTC)
    return await scene.asks(
        forged(scene.authority, OPERATOR, begin=now + timedelta(hours=1), end=now + timedelta(days=3))
    )


async def wrong_name(scene: Scene) -> str:
    return await scene.asks(forged(scene.authority, Identity(FederationName("other-net"), Role.OPERATOR, "operator")))


async def two_names(scene: Scene) -> str:
    return await scene.asks(forged(scene.authority, SILO, OPERATOR))


async def signed_by_a_silo(scene: Scene) -> str:
    key_pem, certificate_pem = scene.hospital
    own = Authority(
        key=tls_key_from_pem(key_pem),
        certificate=x509.load_pem_x509_certificate(certificate_pem),
        federation=FEDERATION,
    )
    forged_key, forged_certificate = forged(own, OPERATOR)
    return await scene.asks((forged_key, forged_certificate + certificate_pem))


async def stolen_authority_key(scene: Scene) -> str:
    return await scene.asks(forged(scene.authority, OPERATOR))


async def revoked(scene: Scene) -> str:
    await scene.at.service.revoke(Role.SILO, HOSPITAL)
    return await scene.asks(scene.hospital, ATTEND, request_for(ATTEND, call_key(federation=FEDERATION, silo=HOSPITAL)))


async def another_silos_name(scene: Scene) -> str:
    return await scene.asks(scene.hospital, ATTEND, request_for(ATTEND, call_key(federation=FEDERATION, silo=BANK)))


async def role_too_low(scene: Scene) -> str:
    pair = forged(scene.authority, Identity(FEDERATION, Role.VIEWER, "victor"))
    await scene.at.service.register.add(register_entry(x509.load_pem_x509_certificate(pair[1]), datetime.now(UTC)))
    invite = next(method for method in OPERATOR_CALLS if method.name == "Invite")
    return await scene.asks(pair, invite, operator_pb2.InviteRequest(silo=CLINIC))


async def silo_as_operator(scene: Scene) -> str:
    return await scene.asks(scene.hospital)


async def replayed_token(scene: Scene) -> str:
    token = await scene.at.invited(CLINIC)
    await scene.at.invited("dentist-d")  # so that somebody still answers
    await spend(token)
    return await answer(spend(token))


async def stolen_token(scene: Scene) -> str:
    """The thief was first: the owner is refused, asks, and the operator shuts the thief out."""
    token = await scene.at.invited(CLINIC)
    await scene.at.invited("dentist-d")
    thief = await enrol(token, now=datetime.now(UTC), agent_version="test")
    with pytest.raises(AuthenticationError, match="was used at"):
        await spend(token)
    await scene.at.service.revoke(Role.SILO, CLINIC)
    request = request_for(ATTEND, call_key(federation=FEDERATION, silo=CLINIC))
    return await scene.asks((thief.tls_key_pem, thief.certificate_pem), ATTEND, request)


async def token_of_another(scene: Scene) -> str:
    token = await scene.at.invited(CLINIC)
    return await answer(spend(replace(token, silo=SiloName("dentist-d"))))


async def spend(token: EnrolmentToken) -> None:
    await enrol(token, now=datetime.now(UTC), agent_version="test")


async def downgraded(scene: Scene) -> str:
    said = await greeted(
        scene.at.silos_port, version=ssl.TLSVersion.TLSv1_2, key_and_certificate=scene.hospital, folder=scene.folder
    )
    return NO_CONNECTION if said == CUT_OFF else said or "let in"


async def plain_text(scene: Scene) -> str:
    async with grpc.aio.insecure_channel(scene.at.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        return await answer(call(channel, STATUS, operator_pb2.GetStatusRequest()))


async def oversize(scene: Scene) -> str:
    request = request_for(ATTEND, call_key(federation=FEDERATION, silo=HOSPITAL))
    request.agent_version = "x" * (MAX_MESSAGE_BYTES + 1)
    key_pem, certificate_pem = scene.hospital
    options = [
        ("grpc.ssl_target_name_override", f"coordinator.{FEDERATION}.lorica.internal"),
        ("grpc.enable_http_proxy", 0),
        ("grpc.max_send_message_length", -1),  # this client keeps to no limit
    ]
    tls = grpc.ssl_channel_credentials(scene.at.coordinator.keys.trust.to_pem(), key_pem, certificate_pem)
    async with grpc.aio.secure_channel(scene.at.address, tls, options=options) as channel:
        return await answer(call(channel, ATTEND, request))


MATRIX: dict[str, tuple[Callable[[Scene], Awaitable[str]], str]] = {
    "no certificate": (no_certificate, NO_CONNECTION),
    "certificate of another authority, same names": (wrong_authority, NO_CONNECTION),
    "self-signed certificate": (self_signed, NO_CONNECTION),
    "certificate that a silo signed": (signed_by_a_silo, NO_CONNECTION),
    "expired certificate": (expired, NO_CONNECTION),
    "certificate that is not valid yet": (not_yet_valid, NO_CONNECTION),
    "name of another federation": (wrong_name, "UNAUTHENTICATED"),
    "two names in one certificate": (two_names, "UNAUTHENTICATED"),
    "made with the authority's stolen key": (stolen_authority_key, "UNAUTHENTICATED"),
    "revoked certificate": (revoked, "PERMISSION_DENIED"),
    "another silo's name in a message": (another_silos_name, "PERMISSION_DENIED"),
    "role too low: a viewer invites": (role_too_low, "PERMISSION_DENIED"),
    "role too low: a silo gives operator's commands": (silo_as_operator, "PERMISSION_DENIED"),
    "replayed token": (replayed_token, "AuthenticationError"),
    "stolen token, noticed and revoked": (stolen_token, "PERMISSION_DENIED"),
    "token of another silo": (token_of_another, "AuthenticationError"),
    "downgrade to TLS 1.2": (downgraded, NO_CONNECTION),
    "plain text": (plain_text, NO_CONNECTION),
    "message above the limit": (oversize, "RESOURCE_EXHAUSTED"),
}


@pytest.fixture
async def scene(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[Scene]:
    credentials = federation_template.silos[HOSPITAL]
    async with running(federation_template.copy(tmp_path / "coordinator"), offer="default") as at:
        yield Scene(at, (credentials.tls_key_pem, credentials.certificate_pem), tmp_path)


@pytest.mark.parametrize("attack", MATRIX)
async def test_nobody_gets_in(attack: str, scene: Scene, record_property: Callable[[str, object], None]) -> None:
    play, expected = MATRIX[attack]
    found = await play(scene)
    record_property("identity matrix", (attack, found))
    assert found == expected
    assert not scene.at.serving.loop.done()
    async with scene.at.operator() as operator, asyncio.timeout(20):
        assert (await operator.GetStatus(operator_pb2.GetStatusRequest())).federation == FEDERATION
