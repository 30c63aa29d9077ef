"""The Enrolment service over gRPC: the one that callers without a certificate reach."""

from typing import Any

from coordinator.service.enrolment import Enrolment
from security.errors import AuthorisationError, ConfigurationError, MalformedMessage
from security.identifiers import FederationName, silo_name
from silo_wire.renewal import authority_successions_to_wire
from silo_wire.v1 import enrolment_pb2, enrolment_pb2_grpc


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServicer):
    """`address` is host:port of the mutually authenticated listener, which new silos are told."""

    def __init__(self, enrolment: Enrolment, federation: FederationName, address: str) -> None:
        self._enrolment = enrolment
        self._federation = federation
        self._address = address

    async def GetTrustBundle(
        self, request: enrolment_pb2.GetTrustBundleRequest, context: Any
    ) -> enrolment_pb2.GetTrustBundleReply:
        keys = self._enrolment.keys
        return enrolment_pb2.GetTrustBundleReply(
            trust_bundle_pem=keys.trust_with_chains_pem,
            successions=authority_successions_to_wire(keys.authority_successions),
        )

    async def Enrol(self, request: enrolment_pb2.EnrolRequest, context: Any) -> enrolment_pb2.EnrolReply:
        if request.federation != self._federation:
            raise AuthorisationError(
                f"the request names federation {request.federation[:80]!r}, this is {self._federation}"
            )
        try:
            silo = silo_name(request.silo)
        except ConfigurationError as error:  # it is a peer's word here, not the operator's
            raise MalformedMessage(str(error)) from error
        issued = await self._enrolment.enrol(
            silo,
            token_secret=request.token_secret,
            csr_der=request.csr_der,
            identity_public_key=request.identity_public_key,
            identity_endorsement=request.identity_endorsement,
        )
        return enrolment_pb2.EnrolReply(
            certificate_pem=issued.certificate_pem,
            trust_bundle_pem=issued.trust_bundle_pem,
            coordinator_identity_key=issued.coordinator_identity_key,
            address=self._address,
        )
