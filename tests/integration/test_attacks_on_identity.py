"""Who may speak to the coordinator at all: every false identity against the real listener for silos and operators."""

import asyncio
import shutil
import sqlite3
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, load_pem_private_key
from structlog.testing import capture_logs

from lorica_coordinator.edges.keys.key_store import register_entry
from lorica_security.errors import AuthenticationError, AuthorisationError, LoricaError, Unreachable
from lorica_security.identifiers import FederationName, Identity, Role, coordinator_dns_name
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import new_tls_key, tls_key_to_pem
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.grpc_client import GrpcCoordinator
from silo_wire.codecs.common_codec import call_key
from silo_wire.transport import error_of
from silo_wire.v1 import operator_pb2
from tests.support.certificates import CLIENT, SERVER, forged, uri
from tests.support.coordinator import (
    BANK,
    FEDERATION,
    HOSPITAL,
    PATIENCE_S,
    FederationTemplate,
    RunningCoordinator,
    Silo,
    refused,
    running,
)
from tests.support.coordinator import federation_template as federation_template
from tests.support.every_call import FEDERATION_CALLS, OPERATOR_CALLS, call, request_for
from tests.support.federation_peer import FederationPeer, TestNet
from tests.support.tls_attempt import CUT_OFF, greeted

OTHER = FederationName("other-net")
HOSPITAL_IDENTITY = Identity(FEDERATION, Role.SILO, HOSPITAL)
OPERATOR_IDENTITY = Identity(FEDERATION, Role.OPERATOR, "operator")
Pair = tuple[bytes, bytes]


@pytest.fixture
async def at(federation_template: FederationTemplate, tmp_path: Path) -> AsyncIterator[RunningCoordinator]:
    async with running(federation_template.copy(tmp_path / "coordinator")) as coordinator:
        yield coordinator


@pytest.fixture
def hospital(federation_template: FederationTemplate) -> Pair:
    credentials = federation_template.silos[HOSPITAL]
    return credentials.tls_key_pem, credentials.certificate_pem


def registered(at: RunningCoordinator, *identities: Identity) -> Pair:
    """As if the coordinator had issued it."""
    pair = forged(at.coordinator.keys.authority, *identities)
    entry = register_entry(x509.load_pem_x509_certificate(pair[1]), datetime.now(UTC))
    at.service.register._known[entry.serial] = entry
    return pair


async def status_call(at: RunningCoordinator, pair: Pair | None) -> operator_pb2.StatusReply:
    """GetStatus, which an operator may call."""
    key_pem, certificate_pem = pair or (None, None)
    async with at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
        reply: operator_pb2.StatusReply = await call(channel, OPERATOR_CALLS[0], operator_pb2.GetStatusRequest())
        return reply


async def never_gets_through(at: RunningCoordinator, pair: Pair | None) -> None:
    """TLS ends the connection: no call reaches the coordinator's code."""
    before = at.saved()
    with capture_logs() as logs, pytest.raises(grpc.aio.AioRpcError) as caught:
        await status_call(at, pair)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert isinstance(error_of(caught.value), Unreachable)
    assert logs == []
    assert at.saved() == before


async def still_serves(at: RunningCoordinator) -> None:
    async with at.operator() as operator:
        assert (await operator.GetStatus(operator_pb2.GetStatusRequest())).federation == FEDERATION


# --- refused by TLS -----------------------------------------------------------------------------------------------


async def test_an_honest_operator_is_let_in(at: RunningCoordinator) -> None:
    pair = registered(at, OPERATOR_IDENTITY)
    assert (await status_call(at, pair)).federation == FEDERATION


async def test_no_client_certificate(at: RunningCoordinator, tmp_path: Path) -> None:
    await never_gets_through(at, None)
    said = await greeted(at.silos_port, version=ssl.TLSVersion.TLSv1_3, folder=tmp_path)
    assert said  # the same handshake with a certificate goes on: test_downgrade_to_tls_1_2
    await still_serves(at)


async def test_certificate_of_another_authority_with_the_same_names(at: RunningCoordinator) -> None:
    impostor = Authority.create(FEDERATION, now=datetime.now(UTC))
    await never_gets_through(at, forged(impostor, OPERATOR_IDENTITY))
    await still_serves(at)


async def test_self_signed_certificate(at: RunningCoordinator) -> None:
    key = new_tls_key()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, HOSPITAL)])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([uri(OPERATOR_IDENTITY.uri)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    await never_gets_through(at, (tls_key_to_pem(key), certificate.public_bytes(Encoding.PEM)))


async def test_expired_certificate(at: RunningCoordinator) -> None:
    now = datetime.now(UTC)
    begin, end = now - timedelta(days=3), now - timedelta(minutes=1)
    await never_gets_through(at, forged(at.coordinator.keys.authority, OPERATOR_IDENTITY, begin=begin, end=end))


async def test_certificate_that_is_not_valid_yet(at: RunningCoordinator) -> None:
    now = datetime.now(UTC)
    begin, end = now + timedelta(hours=1), now + timedelta(days=3)
    await never_gets_through(at, forged(at.coordinator.keys.authority, OPERATOR_IDENTITY, begin=begin, end=end))


async def test_silo_certificate_used_as_an_authority(at: RunningCoordinator, hospital: Pair) -> None:
    """hospital-a signs an operator's certificate with its own TLS key and sends its own as the intermediate."""
    key_pem, certificate_pem = hospital
    certificate = x509.load_pem_x509_certificate(certificate_pem)
    own = load_pem_private_key(key_pem, password=None)
    assert isinstance(own, ec.EllipticCurvePrivateKey)
    authority = Authority(key=own, certificate=certificate, federation=FEDERATION)
    forged_key, forged_certificate = forged(authority, OPERATOR_IDENTITY)
    await never_gets_through(at, (forged_key, forged_certificate + certificate_pem))


async def test_coordinator_certificate_used_as_a_client(at: RunningCoordinator) -> None:
    pair = at.coordinator.keys.server_pair(datetime.now(UTC))
    await never_gets_through(at, (pair.key_pem, pair.certificate_pem))


async def test_plain_text(at: RunningCoordinator) -> None:
    async with grpc.aio.insecure_channel(at.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, OPERATOR_CALLS[0], operator_pb2.GetStatusRequest())
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await still_serves(at)


async def test_downgrade_to_tls_1_2(at: RunningCoordinator, hospital: Pair, tmp_path: Path) -> None:
    said = {}
    for version in (ssl.TLSVersion.TLSv1_3, ssl.TLSVersion.TLSv1_2):
        said[version] = await greeted(at.silos_port, version=version, key_and_certificate=hospital, folder=tmp_path)
    assert said[ssl.TLSVersion.TLSv1_3] == "", (
        said
    )  # the same client, certificate and port: the version alone is refused
    assert said[ssl.TLSVersion.TLSv1_2] == CUT_OFF, said  # before the server's first word


def openssl_takes(port: int, version: str, pair: Pair, folder: Path) -> bool:
    """Whether `openssl s_client` completes a handshake of this version."""
    file = folder / "pair.pem"
    file.write_bytes(b"".join(pair))
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", version, "-cert", file, "-cipher", "ALL:@SECLEVEL=0"],
        input=b"Q\n",
        capture_output=True,
        timeout=PATIENCE_S,
    )
    return b"Cipher is (NONE)" not in done.stdout and b"Server certificate" in done.stdout


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed: apt-get install openssl")
@pytest.mark.parametrize("listener", ["silos", "enrolment"])
async def test_downgrade_to_tls_1_2_with_openssl(
    at: RunningCoordinator, hospital: Pair, tmp_path: Path, listener: str
) -> None:
    await at.invited("clinic-c")
    port = at.silos_port if listener == "silos" else at.enrolment_port
    assert await asyncio.to_thread(openssl_takes, port, "-tls1_3", hospital, tmp_path)
    assert not await asyncio.to_thread(openssl_takes, port, "-tls1_2", hospital, tmp_path)


# --- refused by name: our authority signed it, and it is still not who may call --------------------------------------


@pytest.mark.parametrize(
    ("pair_of", "match"),
    [
        (lambda ca: forged(ca, Identity(OTHER, Role.SILO, HOSPITAL)), "another federation"),
        (lambda ca: forged(ca, HOSPITAL_IDENTITY, OPERATOR_IDENTITY), "URI"),
        (lambda ca: forged(ca, HOSPITAL_IDENTITY, Identity(OTHER, Role.SILO, HOSPITAL)), "URI"),
        (lambda ca: forged(ca), "names nobody"),
        (lambda ca: forged(ca, Identity(FEDERATION, Role.COORDINATOR)), "extended key usage"),
        (lambda ca: forged(ca, OPERATOR_IDENTITY, purposes=CLIENT + SERVER), "extended key usage"),
        (lambda ca: forged(ca, OPERATOR_IDENTITY, ca=True), "CA certificate"),
    ],
    ids=[
        "other-federation",
        "two-identities",
        "two-federations",
        "no-name",
        "coordinator-as-client",
        "client-and-server-usage",
        "leaf-that-says-it-is-an-authority",
    ],
)
async def test_wrong_names_in_a_certificate_of_our_own_authority(
    at: RunningCoordinator, pair_of: Callable[[Authority], Pair], match: str
) -> None:
    pair = pair_of(at.coordinator.keys.authority)
    async with refused(at, AuthenticationError, grpc.StatusCode.UNAUTHENTICATED, match):
        await status_call(at, pair)
    await still_serves(at)


async def test_operator_calls_what_only_silos_may(at: RunningCoordinator) -> None:
    key_pem, certificate_pem = registered(at, OPERATOR_IDENTITY)
    async with at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
        for method in FEDERATION_CALLS:
            request = request_for(method, call_key(federation=FEDERATION, silo=HOSPITAL))
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "role operator"):
                await call(channel, method, request)


async def test_silo_calls_what_only_the_operator_may(at: RunningCoordinator, hospital: Pair) -> None:
    key_pem, certificate_pem = hospital
    async with at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
        for method in OPERATOR_CALLS:
            request = request_for(method, call_key(federation=FEDERATION, silo=HOSPITAL))
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "role silo"):
                await call(channel, method, request)


async def test_viewer_calls_what_changes_something(at: RunningCoordinator) -> None:
    pair = registered(at, Identity(FEDERATION, Role.VIEWER, "victor"))
    assert (await status_call(at, pair)).federation == FEDERATION
    async with at.channel(key_pem=pair[0], certificate_pem=pair[1]) as channel:
        for method in OPERATOR_CALLS:
            if method.name in ("GetStatus", "ListRounds", "GetGroups", "ListAuthorities", "RenewAccess"):
                continue
            request = request_for(method, call_key(federation=FEDERATION, silo=HOSPITAL))
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, "role viewer"):
                await call(channel, method, request)


# --- refused by message: the certificate is honest, the words are not -------------------------------------------------


async def test_message_that_names_another_silo(at: RunningCoordinator, hospital: Pair) -> None:
    key_pem, certificate_pem = hospital
    async with at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
        for method in FEDERATION_CALLS:
            request = request_for(method, call_key(federation=FEDERATION, silo=BANK))
            match = f"certificate is of silo {HOSPITAL} and the call names {BANK!r}"
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, match):
                await call(channel, method, request)


async def test_message_of_another_federation(at: RunningCoordinator, hospital: Pair) -> None:
    key_pem, certificate_pem = hospital
    async with at.channel(key_pem=key_pem, certificate_pem=certificate_pem) as channel:
        for method in FEDERATION_CALLS:
            request = request_for(method, call_key(federation=OTHER, silo=HOSPITAL))
            match = f"names federation {OTHER!r}"
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, match):
                await call(channel, method, request)


async def test_silo_that_is_not_enrolled_here_with_a_certificate_of_our_authority(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    """As after the operator took hospital-a out of the records, or restored a backup from before it was enrolled."""
    folder = federation_template.copy(tmp_path / "coordinator")
    with sqlite3.connect(folder.root / "state" / "state.sqlite") as database:
        assert database.execute("DELETE FROM silos WHERE silo = ?", (HOSPITAL,)).rowcount == 1
    async with (
        running(folder, offer="default") as at,
        Silo(at, federation_template.silos[HOSPITAL]) as removed,
        Silo(at, federation_template.silos[BANK]) as bank,
    ):
        plan = at.coordinator.shelf.compile("default").plan.digest
        for method in FEDERATION_CALLS:
            request = request_for(method, removed.key(plan, 1, 1))
            match = f"silo {HOSPITAL} is not enrolled"
            async with refused(at, AuthorisationError, grpc.StatusCode.PERMISSION_DENIED, match):
                await call(removed.channel, method, request)
        await bank.join(plan)


# --- the other way round: who answers is not the coordinator ----------------------------------------------------------


@pytest.mark.parametrize("purposes", [CLIENT, SERVER], ids=["as-issued", "with-server-usage"])
async def test_impostor_answers_an_agent_with_a_silo_certificate(
    federation_template: FederationTemplate,
    tmp_path: Path,
    at: RunningCoordinator,
    purposes: tuple[x509.ObjectIdentifier],
) -> None:
    authority = at.coordinator.keys.authority
    pair = forged(authority, Identity(FEDERATION, Role.SILO, BANK), purposes=purposes)
    async with FederationPeer(TestNet(authority, at.coordinator.keys.identity, pair)) as impostor:
        problem = await first_problem(federation_template, tmp_path, impostor.address)
        assert impostor.instances == []
    assert isinstance(problem, Unreachable)


async def test_impostor_answers_with_the_coordinators_name_from_another_authority(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    net = TestNet.create(FEDERATION)
    assert coordinator_dns_name(FEDERATION).encode() in x509.load_pem_x509_certificate(net.server_pair[1]).public_bytes(
        Encoding.DER
    )
    async with FederationPeer(net) as impostor:
        problem = await first_problem(federation_template, tmp_path, impostor.address)
        assert impostor.instances == []
    assert isinstance(problem, Unreachable)


async def first_problem(federation_template: FederationTemplate, folder: Path, address: str) -> LoricaError:
    """What the real agent's client makes of the server at `address`: it never says a word to it."""
    problems: list[LoricaError] = []

    class Enough(Exception):
        pass

    def unreachable(problem: LoricaError, seconds: float) -> None:
        problems.append(problem)
        raise Enough

    credentials = replace(federation_template.silos[HOSPITAL], address=address)
    async with mutual_channel(credentials) as channel:
        client = GrpcCoordinator(
            channel=channel,
            credentials=credentials,
            models=ModelCache(folder / "models", kept=1),
            agent_version="test",
            unreachable=unreachable,
            new_backoff=Backoff,
        )
        with pytest.raises(Enough):
            await anext(client.orders())
    return problems[0]
