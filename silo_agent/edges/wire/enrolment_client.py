"""Enrolment: a one-time token becomes a certificate, and nothing secret is said before the coordinator is known.

1. See which certificate answers at the token's address, without saying anything.
2. Open a channel that accepts exactly this certificate under the federation's name, and ask it for the trust bundle.
3. Find the CA with the token's pin, and those that it certified or named its successors; the certificate must be issued
   by one of them, to the coordinator of this federation.
4. Only then send the secret, with a request for a key made here; check the certificate that comes back.
"""

import asyncio
from dataclasses import dataclass, field
from datetime import datetime

import grpc.aio
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_security.errors import AuthenticationError, IntegrityError, LoricaError, MalformedMessage, Unreachable
from lorica_security.identifiers import coordinator_dns_name
from lorica_security.identity.endorsement import endorse_request
from lorica_security.identity.enrolment_token import EnrolmentToken
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes, public_key_from_bytes
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import check_coordinator, identify_client
from lorica_security.pki.tls_key import TlsPrivateKey, new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.keys.key_store import SiloCredentials, split_address
from silo_agent.edges.wire.channel import pinned_channel
from silo_agent.edges.wire.tls_probe import Answer, probe
from silo_wire.codecs.renewal import authority_successions_from_wire
from silo_wire.transport import error_of
from silo_wire.v1 import enrolment_pb2, enrolment_pb2_grpc

TIMEOUT_S = 30.0
TRIES = 3
"""Of the first call: a connection that is lost at once is no impostor, nor a coordinator that renews its certificate
just then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiloKeys:
    """Those of a silo that is to be: new ones, but for what lies in a token."""

    identity: Ed25519PrivateKey = field(default_factory=new_identity_key, repr=False)
    tls: TlsPrivateKey = field(default_factory=new_tls_key, repr=False)


async def enrol(
    token: EnrolmentToken, *, now: datetime, agent_version: str, keys: SiloKeys | None = None
) -> SiloCredentials:
    """Everything that the silo keeps; raises a LoricaError, and then nothing was stored and, before step 4, nothing
    said."""
    keys = keys or SiloKeys()
    token.check_unexpired(now)
    for tries_left in reversed(range(TRIES)):
        answer = await _answer(token)
        leaf = _leaf(answer, token)
        async with pinned_channel(token.address, token.federation, leaf.public_bytes(Encoding.PEM)) as channel:
            stub: enrolment_pb2_grpc.EnrolmentAsyncStub = enrolment_pb2_grpc.EnrolmentStub(channel)
            try:
                bundle = await stub.GetTrustBundle(enrolment_pb2.GetTrustBundleRequest(), timeout=TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if tries_left and error.code() is grpc.StatusCode.UNAVAILABLE:
                    # gRPC's word for a name that is not in the certificate, and for a connection that was lost
                    continue
                # Whoever answers without being the coordinator fails here: the name is not in its certificate, or it
                # does not know the call.
                raise _stranger(answer, token, leaf, error_of(error)) from error
            trust = _verified(answer, token, leaf, bundle, now)
            try:
                return await _spend(token, stub, trust, keys, now=now, agent_version=agent_version)
            except grpc.aio.AioRpcError as error:
                raise error_of(error) from error
    raise AssertionError("the last try returns or raises")


async def _answer(token: EnrolmentToken) -> Answer:
    """Raises Unreachable: also where all is well with the network, for nobody listens there while no invitation is
    open."""
    try:
        return await asyncio.to_thread(probe, token.address, coordinator_dns_name(token.federation))
    except Unreachable as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            silos = await asyncio.to_thread(_silos_port_answers, token)
            if silos:
                raise Unreachable(
                    f"nobody takes tokens at {token.address} now, though the coordinator of {token.federation} "
                    f"runs: it answers at {silos}. So this token was used, replaced or voided before; ask the "
                    f"operator whether silo {token.silo} is enrolled, and for another token with coordinator invite "
                    f"{token.silo} if it is not"
                ) from error
            raise Unreachable(
                f"nobody takes tokens at {token.address} now, though the host is there: the coordinator does not "
                f"run, or this token was used, replaced or voided before; ask the operator whether silo {token.silo} "
                f"is enrolled, and for another token with coordinator invite {token.silo} if it is not"
            ) from error
        raise Unreachable(
            f"{error}; or no invitation is open for silo {token.silo}, since this token was spent or replaced: ask "
            f"the operator for another one with coordinator invite {token.silo}"
        ) from error


def _silos_port_answers(token: EnrolmentToken) -> str:
    """Where a coordinator of the token's federation listens for silos, seen by the certificate that it shows to
    everybody; "" if nowhere.

    The port is the one before that for enrolment, as the coordinator has it by default: the token does not name it.
    Nothing is said there, and nothing but the words of an error follows from it, for the token pins an authority whose
    certificate is not shown.
    """
    address = f"{token.address.rpartition(':')[0]}:{token.port - 1}"
    name = coordinator_dns_name(token.federation)
    try:
        shown = parse_certificate(probe(address, name).certificate)
        names = shown.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (LoricaError, x509.ExtensionNotFound):
        return ""
    return address if name in names.get_values_for_type(x509.DNSName) else ""


def _leaf(answer: Answer, token: EnrolmentToken) -> x509.Certificate:
    try:
        return parse_certificate(answer.certificate)
    except MalformedMessage as error:
        raise AuthenticationError(f"{token.address}{answer.route} shows a certificate that is none: {error}") from error


def _verified(
    answer: Answer,
    token: EnrolmentToken,
    leaf: x509.Certificate,
    bundle: enrolment_pb2.GetTrustBundleReply,
    now: datetime,
) -> TrustBundle:
    try:
        successions = authority_successions_from_wire(bundle.successions)
        trust = TrustBundle.from_pem(bundle.trust_bundle_pem).pinned(token.ca_pin, successions)
        trust = trust.of_federation(token.federation)
        check_coordinator(leaf.public_bytes(Encoding.DER), trust=trust, now=now, federation=token.federation)
    except (AuthenticationError, MalformedMessage) as error:
        raise _stranger(answer, token, leaf, error) from error
    return trust


def _stranger(
    answer: Answer, token: EnrolmentToken, leaf: x509.Certificate, reason: LoricaError
) -> AuthenticationError:
    issuer = leaf.issuer.rfc4514_string()[:120]
    return AuthenticationError(
        f"{token.address}{answer.route} answers with a certificate issued by {issuer!r}, not with the coordinator's of "
        f"{token.federation}: a TLS-intercepting proxy or an impostor stands between, so the token was not sent "
        f"({reason}); have this address exempted from TLS inspection, or check it with the operator"
    )


async def _spend(
    token: EnrolmentToken,
    stub: "enrolment_pb2_grpc.EnrolmentAsyncStub",
    trust: TrustBundle,
    keys: SiloKeys,
    *,
    now: datetime,
    agent_version: str,
) -> SiloCredentials:
    tls_key, identity_key = keys.tls, keys.identity
    request = certificate_request(tls_key, token.identity)
    reply = await stub.Enrol(
        enrolment_pb2.EnrolRequest(
            federation=token.federation,
            silo=token.silo,
            token_secret=token.secret,
            csr_der=request,
            identity_public_key=public_key_bytes(identity_key.public_key()),
            identity_endorsement=endorse_request(identity_key, request=request, identity=token.identity),
            agent_version=agent_version,
            trust_bundle=trust.digest,
        ),
        timeout=TIMEOUT_S,
    )
    certificate = parse_certificate(reply.certificate_pem)
    identity = identify_client(reply.certificate_pem, trust=trust, now=now, federation=token.federation)
    if identity != token.identity:
        raise AuthenticationError(f"the coordinator issued a certificate for {identity.uri}, not {token.identity.uri}")
    if certificate.public_key() != tls_key.public_key():
        raise IntegrityError("the coordinator issued a certificate for another key than this silo's: refuse it")
    split_address(reply.address)
    return SiloCredentials(
        federation=token.federation,
        silo=token.silo,
        address=reply.address,
        identity_key=identity_key,
        tls_key=tls_key,
        certificate=certificate,
        trust=trust,
        coordinator_key=public_key_from_bytes(reply.coordinator_identity_key),
    )
