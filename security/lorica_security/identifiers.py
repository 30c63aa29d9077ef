"""Names and SPIFFE identities: who somebody is, as a checked value instead of a string.

Identity URIs (DESIGN section 6): spiffe://<federation>/silo/<name>, /operator/<name>, /viewer/<name>, /coordinator.
"""

import re
from dataclasses import dataclass
from enum import Enum
from typing import NewType

from lorica_security.errors import ConfigurationError, MalformedMessage

FederationName = NewType("FederationName", str)
SiloName = NewType("SiloName", str)

_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_URI = re.compile(r"spiffe://([^/]+)/(?:(silo|operator|viewer)/([^/]+)|(coordinator))")

NAME_RULE = "1 to 63 of a-z, 0-9 and '-', not beginning or ending with '-'"


def federation_name(text: str) -> FederationName:
    """`text` as a federation name; raises ConfigurationError otherwise."""
    if not _NAME.fullmatch(text):
        raise ConfigurationError(f"federation name {text!r} is not allowed: use {NAME_RULE}")
    return FederationName(text)


def silo_name(text: str) -> SiloName:
    """`text` as a silo name (a DNS label, so that it can stand in certificates, paths and metric labels)."""
    if not _NAME.fullmatch(text):
        raise ConfigurationError(f"silo name {text!r} is not allowed: use {NAME_RULE}")
    return SiloName(text)


class Role(Enum):
    SILO = "silo"
    OPERATOR = "operator"
    VIEWER = "viewer"
    COORDINATOR = "coordinator"


@dataclass(frozen=True, slots=True)
class Identity:
    """A role within one federation; `name` is empty for the coordinator alone."""

    federation: FederationName
    role: Role
    name: str = ""

    def __post_init__(self) -> None:
        federation_name(self.federation)
        if (self.role is Role.COORDINATOR) != (self.name == ""):
            raise ConfigurationError(
                f"identity with role {self.role.value} and name {self.name!r}: only others than the coordinator are "
                "named"
            )
        if self.name and not _NAME.fullmatch(self.name):
            raise ConfigurationError(f"{self.role.value} name {self.name!r} is not allowed: use {NAME_RULE}")

    @property
    def uri(self) -> str:
        tail = self.role.value if self.role is Role.COORDINATOR else f"{self.role.value}/{self.name}"
        return f"spiffe://{self.federation}/{tail}"

    @classmethod
    def from_uri(cls, uri: str) -> "Identity":
        """Parse a SAN URI; raises MalformedMessage for anything that is not exactly one of the four forms."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise MalformedMessage(f"identity URI {uri!r} is not of the form spiffe://FEDERATION/ROLE/NAME")
        federation, role, name, coordinator = match.groups()
        try:
            return cls(FederationName(federation), Role(role or coordinator), name or "")
        except ConfigurationError as error:
            raise MalformedMessage(str(error)) from error


def coordinator_dns_name(federation: FederationName) -> str:
    """The DNS name that only the coordinator's certificate carries; agents demand it whatever address they dial."""
    return f"coordinator.{federation}.lorica.internal"
