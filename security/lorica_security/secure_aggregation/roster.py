"""The roster: who takes part in an attempt, with which keys, for which model, under which parameters and release
groups.

Its digest is bound to every key, box and signature that follows. Silos that were given different rosters, hence also
different models or ranges, agree on no mask: their sum is noise.
"""

from dataclasses import dataclass
from functools import cached_property

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.key_agreement import Link, halves
from lorica_security.secure_aggregation.messages import Advertisement, check_names
from lorica_security.secure_aggregation.parameters import Parameters
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes, digest


@dataclass(frozen=True, kw_only=True)
class Roster:
    """`members` by name; `model` is the digest of the round model, `link` that of the newest release groups.

    Raises MalformedMessage; checks no signature.
    """

    attempt: Attempt
    model: bytes
    link: bytes
    parameters: Parameters
    members: tuple[Advertisement, ...]

    def __post_init__(self) -> None:
        check_bytes("roster", DIGEST_BYTES, model=self.model, link=self.link)
        check_names("roster", *self.silos)
        if len(self.members) != self.parameters.cohort:
            raise MalformedMessage(
                f"roster has {len(self.members)} members, its parameters are for {self.parameters.cohort}"
            )
        if any(member.attempt != self.attempt for member in self.members):
            raise MalformedMessage(f"roster of {self.attempt} has keys that were advertised for another attempt")
        keys = [half for member in self.members for key in (member.mask_key, member.box_key) for half in halves(key)]
        if len(set(keys)) != len(keys):
            raise MalformedMessage("roster has one public key twice: each silo makes two fresh ones")

    @cached_property
    def silos(self) -> tuple[SiloName, ...]:
        return tuple(member.silo for member in self.members)

    def __contains__(self, silo: object) -> bool:
        return silo in self.silos

    def member(self, silo: SiloName) -> Advertisement:
        return self.members[self.silos.index(silo)]

    def place(self, silo: SiloName) -> int:
        """Where the share polynomials are evaluated for this silo: 1 for the first by name."""
        return self.silos.index(silo) + 1

    def box_link(self, dealer: SiloName, holder: SiloName) -> Link:
        return self._link((dealer, holder), (self.member(dealer).box_key, self.member(holder).box_key))

    def pair_link(self, one: SiloName, other: SiloName) -> Link:
        first, second = sorted((one, other))
        return self._link((first, second), (self.member(first).mask_key, self.member(second).mask_key))

    def _link(self, silos: tuple[SiloName, SiloName], keys: tuple[bytes, bytes]) -> Link:
        return Link(roster=self.digest, silos=silos, keys=keys)

    @cached_property
    def digest(self) -> bytes:
        members = tuple((it.silo, it.mask_key, it.box_key, it.seen, it.signature) for it in self.members)
        return digest("roster", self.attempt.digest, self.model, self.link, self.parameters.parts, members)
