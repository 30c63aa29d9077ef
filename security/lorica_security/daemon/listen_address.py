"""Where a process listens, as settings files say it."""

import re
import socket
from ipaddress import ip_address
from typing import Annotated, NamedTuple

from pydantic import AfterValidator

_ADDRESS = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^:\[\]\s]+):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """Host without brackets, and port; port 0 lets the system choose one."""

    host: str
    port: int

    def __str__(self) -> str:
        """As gRPC and people write it: an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """ADDRESS:PORT; raises ValueError for anything else."""
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65_535:
        raise ValueError("use ADDRESS:PORT, such as 0.0.0.0:7443 or [::]:7443")
    return Address(match["host"].strip("[]"), int(match["port"]))


def _checked(text: str) -> str:
    address(text)
    return text


AddressText = Annotated[str, AfterValidator(_checked)]
"""ADDRESS:PORT in a settings file."""
AddressOrNone = Annotated[str, AfterValidator(lambda text: text and _checked(text))]
"""The same, or an empty text where nothing is to listen."""


def require_bindable(at: Address) -> None:
    """Raise OSError where nothing could listen now. It never listens, so nobody connects meanwhile."""
    with socket.socket(socket.AF_INET6 if ":" in at.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(at)


def is_loopback(host: str) -> bool:
    """Whether nothing but this host is reached at `host`, or reaches what listens there: an address, or of names
    `localhost` alone, since others resolve as somebody else says."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
