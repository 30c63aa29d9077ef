"""What keeps an enrolled silo's certificate, trust bundle and identity key fresh, between bytes and values.

`..._from_wire` raises MalformedMessage, as in `codec`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_bytes, verify
from lorica_security.identity.succession import MOST_SUCCESSIONS, Succession
from lorica_security.pki.authority_succession import MOST_SUCCESSIONS as MOST_AUTHORITY_SUCCESSIONS
from lorica_security.pki.authority_succession import AuthoritySuccession, certificate_digest
from lorica_security.pki.parsing import MAX_BUNDLE_BYTES, MAX_CERTIFICATE_BYTES, parse_certificate
from lorica_security.pki.trust_bundle import TrustBundle
from silo_wire.codecs.common_codec import call_key
from silo_wire.statements import TRUST_DOMAIN, trust_statement
from silo_wire.v1 import enrolment_pb2, federation_pb2, operator_pb2

TRUST_DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewalAnswer:
    """A renewed certificate, still unchecked, and a trust bundle with the signature that makes it believed."""

    certificate_pem: bytes
    trust: TrustBundle
    since: int
    signature: bytes

    def check_trust(self, coordinator: Ed25519PublicKey, *, federation: FederationName, held_since: int) -> TrustBundle:
        """The trust bundle; raises IntegrityError unless the pinned key of the coordinator signed it, for this
        federation, with the certificate beside it, and no other bundle is known to have come after it: `held_since` is
        of the one that is held.

        MalformedMessage for one with an authority of another federation.
        """
        statement = trust_statement(
            federation=federation,
            trust=self.trust.digest,
            since=self.since,
            certificate=certificate_digest(parse_certificate(self.certificate_pem)),
        )
        verify(coordinator, domain=TRUST_DOMAIN.encode(), payload=statement, signature=self.signature)
        if self.since < held_since:
            raise IntegrityError(
                f"the coordinator sends a trust bundle of Unix time {self.since}, and the one that is held is of "
                f"{held_since}: it was put back from a backup, or somebody holds back what changed; ask its operator"
            )
        if self.trust.of_federation(federation) != self.trust:
            raise MalformedMessage(f"the trust bundle holds an authority that is not of federation {federation}")
        return self.trust


def renewal_request(
    *, federation: FederationName, silo: SiloName, csr_der: bytes, endorsement: bytes
) -> federation_pb2.RenewalRequest:
    key = call_key(federation=federation, silo=silo)
    return federation_pb2.RenewalRequest(key=key, csr_der=csr_der, identity_endorsement=endorsement)


def renewal_from_wire(message: federation_pb2.RenewalReply | operator_pb2.RenewAccessReply) -> RenewalAnswer:
    for what, data, limit in (
        ("certificate", message.certificate_pem, MAX_CERTIFICATE_BYTES),
        ("trust bundle", message.trust_bundle_pem, MAX_BUNDLE_BYTES),
    ):
        if not 0 < len(data) <= limit:
            raise MalformedMessage(f"renewed {what} of {len(data)} bytes: allowed are 1 to {limit}")
    return RenewalAnswer(
        certificate_pem=message.certificate_pem,
        trust=TrustBundle.from_pem(message.trust_bundle_pem),
        since=message.trusted_since,
        signature=message.signature,
    )


def trust_digest_from_wire(digest: bytes, where: str) -> bytes:
    """Of a trust bundle: the one that stands at the coordinator, or that a silo holds."""
    if len(digest) != TRUST_DIGEST_BYTES:
        raise MalformedMessage(
            f"{where} has a trust bundle digest of {len(digest)} bytes, it must have {TRUST_DIGEST_BYTES}"
        )
    return digest


def succession_to_wire(succession: Succession) -> federation_pb2.Succession:
    return federation_pb2.Succession(
        predecessor=public_key_bytes(succession.predecessor),
        successor=public_key_bytes(succession.successor),
        statement=succession.statement,
    )


def succession_from_wire(message: federation_pb2.Succession) -> Succession:
    """Its signature is still unchecked."""
    return Succession.of_bytes(
        predecessor=message.predecessor, successor=message.successor, statement=message.statement
    )


def successions_from_wire(messages: Iterable[federation_pb2.Succession]) -> tuple[Succession, ...]:
    found = tuple(map(succession_from_wire, messages))
    if len(found) > MOST_SUCCESSIONS:
        raise MalformedMessage(f"{len(found)} successions of one silo: at most {MOST_SUCCESSIONS} are told")
    return found


def succession_request(
    *, federation: FederationName, silo: SiloName, succession: Succession, possession: bytes
) -> federation_pb2.SuccessionRequest:
    return federation_pb2.SuccessionRequest(
        key=call_key(federation=federation, silo=silo),
        succession=succession_to_wire(succession),
        possession=possession,
    )


def authority_successions_to_wire(
    successions: Iterable[AuthoritySuccession],
) -> list[enrolment_pb2.AuthoritySuccession]:
    return [
        enrolment_pb2.AuthoritySuccession(predecessor=one.predecessor, successor=one.successor, signature=one.signature)
        for one in successions
    ]


def authority_successions_from_wire(
    messages: Iterable[enrolment_pb2.AuthoritySuccession],
) -> tuple[AuthoritySuccession, ...]:
    found = tuple(
        AuthoritySuccession(predecessor=one.predecessor, successor=one.successor, signature=one.signature)
        for one in messages
    )
    if len(found) > MOST_AUTHORITY_SUCCESSIONS:
        raise MalformedMessage(
            f"{len(found)} successions of authorities: at most {MOST_AUTHORITY_SUCCESSIONS} are told"
        )
    return found
