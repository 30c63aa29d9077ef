"""Which host a request may name. A web page of somebody else's that was pointed at a port of this machine (DNS
rebinding) names its own."""

import re
from collections.abc import Collection
from ipaddress import ip_address
from typing import Final

from lorica_security.errors import AuthorisationError

LOOPBACK_NAMES: Final = ("localhost", "127.0.0.1", "::1")
_HOST: Final = re.compile(r"(?:\[(?P<ipv6>[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*)\]|(?P<name>[^\[\]:@/\s]+))(?::[0-9]{1,5})?")


class AnotherHost(AuthorisationError):
    """The request names a host that nothing is served for here."""


def require_host(sent: str, names: Collection[str], *, any_address: bool = False) -> None:
    """Raise AnotherHost unless the Host header is one of `names`, which are in lower case, or with `any_address` an
    address.

    The port may be another: a tunnel's.
    """
    match = _HOST.fullmatch(sent)
    host = "" if match is None else (match["ipv6"] or match["name"]).lower()
    if host not in names and not (any_address and _is_address(host)):
        used = ", ".join(sorted(names)) + (", or an address of this machine" if any_address else "")
        raise AnotherHost(f"nothing is served here for host {sent[:100]!r}: use {used}")


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True
