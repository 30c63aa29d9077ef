"""The way to the coordinator: who answers, whether it accepts this silo, by what the keys are agreed."""

from datetime import datetime

import grpc.aio

from lorica_security.console.preflight import Checks, Misconfigured, meaning, misconfigured
from lorica_security.errors import AuthenticationError, ConfigurationError, LoricaError, Unreachable
from lorica_security.identifiers import coordinator_dns_name
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import check_coordinator
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.key_exchange import HYBRID, key_exchange
from silo_agent.edges.wire.tls_probe import probe
from silo_wire.canonical import Digest
from silo_wire.codecs.common_codec import call_key
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2, federation_pb2_grpc

CALL_TIMEOUT_S = 15.0
KEYS_OF_CONNECTION = "keys of the connection"


def check_route(credentials: SiloCredentials, now: datetime) -> str:
    with meaning(Mistake.UNREACHABLE.value, Unreachable), meaning(Mistake.PROXY.value, ConfigurationError):
        answer = probe(credentials.address, coordinator_dns_name(credentials.federation))
    try:
        check_coordinator(answer.certificate, trust=credentials.trust, now=now, federation=credentials.federation)
    except AuthenticationError as error:
        raise _stranger(answer.certificate, answer.route, credentials.trust, error) from error
    return f"{credentials.address}{answer.route} shows the coordinator's own certificate"


def _stranger(certificate: bytes, route: str, trust: TrustBundle, error: AuthenticationError) -> Misconfigured:
    try:
        leaf = parse_certificate(certificate)
    except LoricaError as unreadable:
        return misconfigured(
            Mistake.INTERCEPTED.value, f"what answers{route} shows a certificate that does not parse ({unreadable})"
        )
    if trust.issuers_of(leaf):
        return misconfigured(
            Mistake.COORDINATOR_CERTIFICATE.value, f"what answers{route} is of this federation: {error}"
        )
    return misconfigured(
        Mistake.INTERCEPTED.value,
        f"what answers{route} has a certificate issued by {leaf.issuer.rfc4514_string()[:120]!r}, not by this "
        "federation's CA: a TLS-intercepting proxy stands between",
    )


async def refusal_of(credentials: SiloCredentials) -> LoricaError | None:
    """What the coordinator has against this silo; None where it answers it."""
    async with mutual_channel(credentials) as channel:
        stub: federation_pb2_grpc.FederationAsyncStub = federation_pb2_grpc.FederationStub(channel)
        # Asks about an update of a round that never is: an authenticated answer of any kind is what is looked for.
        request = federation_pb2.UploadOffsetRequest(
            key=call_key(
                federation=credentials.federation, silo=credentials.silo, plan=Digest("00" * 32), round_number=0
            ),
            update_digest=bytes(32),
        )
        try:
            await stub.UploadOffset(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = error_of(error)
            refused = isinstance(problem, AuthenticationError | Unreachable)
            return problem if refused or error.code() is grpc.StatusCode.PERMISSION_DENIED else None
    return None


async def check_key_exchange(checks: Checks, credentials: SiloCredentials) -> None:
    """Tells by what the keys of a connection with the coordinator are agreed; something else than a hybrid keeps nobody
    away."""
    try:
        agreed = await key_exchange(credentials)
    except LoricaError as error:
        checks.notice(KEYS_OF_CONNECTION, f"by what they are agreed was not seen: {error}")
        return
    if agreed == HYBRID:
        checks.run(KEYS_OF_CONNECTION, lambda: f"agreed by {agreed}: no quantum computer opens what is recorded today")
    else:
        checks.notice(
            KEYS_OF_CONNECTION,
            f"agreed by {agreed}, not {HYBRID}: a quantum computer may open what is recorded today, up to the masks; "
            "bring grpcio up to date on both sides, and look at what stands between",
        )


def check_accepted(credentials: SiloCredentials, told: LoricaError | None) -> str:
    if isinstance(told, Unreachable):
        raise misconfigured(Mistake.REFUSED.value, f"{credentials.address} breaks the connection off ({told})")
    if told is not None:
        raise misconfigured(Mistake.REFUSED.value, str(told))
    return f"mutual TLS with {credentials.address} as {credentials.silo}"
