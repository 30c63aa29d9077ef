"""The Enrolment service over gRPC: the one that callers without a certificate reach."""

import time
from typing import Any

from lorica_coordinator.service.members.enrolment import Enrolment
from lorica_security.errors import (
    AuthorisationError,
    ConfigurationError,
    Fault,
    LoricaError,
    MalformedMessage,
    Unreachable,
)
from lorica_security.host.attempt_limit import AttemptLimit, source_of
from lorica_security.identifiers import FederationName, silo_name
from silo_wire.codecs.renewal import authority_successions_to_wire, trust_digest_from_wire
from silo_wire.v1 import enrolment_pb2, enrolment_pb2_grpc

MOST_FAILURES = 10
WINDOW_S = 60.0
"""Nobody guesses a secret of 256 bits: the limit spares the log and the CPU. A right token is taken from any source,
since the silo that it is for may share an address with whoever fails."""


class EnrolmentServicer(enrolment_pb2_grpc.EnrolmentServicer):
    """`address` is host:port of the mutually authenticated listener, which new silos are told."""

    def __init__(self, enrolment: Enrolment, federation: FederationName, address: str) -> None:
        self._failures = AttemptLimit(most=MOST_FAILURES, window_s=WINDOW_S)
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
        source = source_of(context.peer())
        wait = self._failures.seconds_to_wait(source, time.monotonic())
        if wait and not self._enrolment.would_take(request.silo, request.token_secret):
            raise Unreachable(
                f"{MOST_FAILURES} enrolments from {source} failed within {WINDOW_S:.0f} s: try again in {wait:.0f} s"
            )
        try:
            return await self._enrol(request)
        except LoricaError as error:
            if error.fault is Fault.PEER:
                self._failures.count(source, time.monotonic())
            raise

    async def _enrol(self, request: enrolment_pb2.EnrolRequest) -> enrolment_pb2.EnrolReply:
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
            trust=trust_digest_from_wire(request.trust_bundle, "request"),
        )
        return enrolment_pb2.EnrolReply(
            certificate_pem=issued.certificate_pem,
            trust_bundle_pem=issued.trust_bundle_pem,
            coordinator_identity_key=issued.coordinator_identity_key,
            address=self._address,
        )
