"""One attempt at one round: what every key, signature and digest of the protocol is bound to."""

from dataclasses import dataclass
from functools import cached_property

from lorica_security.errors import ConfigurationError, MalformedMessage
from lorica_security.identifiers import FederationName, federation_name
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest

ATTEMPT_ID_BYTES = 32
MAX_NUMBER = 1 << 62


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """`number` counts the attempts of a round from 1; `id` is 32 random bytes of the coordinator's, never used
    twice."""

    federation: FederationName
    plan: bytes
    round: int
    number: int
    id: bytes

    def __post_init__(self) -> None:
        try:
            federation_name(self.federation)
        except ConfigurationError as error:
            raise MalformedMessage(str(error)) from error
        check_bytes("attempt", DIGEST_BYTES, plan=self.plan)
        check_bytes("attempt", ATTEMPT_ID_BYTES, id=self.id)
        for name, value in (("round", self.round), ("number", self.number)):
            if not 1 <= value < MAX_NUMBER:
                raise MalformedMessage(f"attempt {name} is {value}: allowed are 1 to {MAX_NUMBER - 1}")

    @cached_property
    def digest(self) -> bytes:
        return digest("attempt", self.federation, self.plan, self.round, self.number, self.id)

    def __str__(self) -> str:
        return f"round {self.round} attempt {self.number} ({self.id.hex()[:8]})"
