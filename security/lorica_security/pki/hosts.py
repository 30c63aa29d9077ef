"""Host names and IP addresses that may stand in a certificate or an enrolment token."""

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from lorica_security.errors import ConfigurationError

MAX_HOST_CHARACTERS = 253
_DNS_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(?:\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_ALL_NUMERIC = re.compile(r"[0-9.]+")


def parse_host(text: str) -> str | IPv4Address | IPv6Address:
    """`text` as an IP address or else a lower-case DNS name without a wildcard; raises ConfigurationError otherwise."""
    if "%" not in text:  # a scoped IPv6 address means something on one machine only
        try:
            return ip_address(text)
        except ValueError:
            pass
    # "10.0.0.300" is a mistyped address, not a name.
    if len(text) > MAX_HOST_CHARACTERS or not _DNS_NAME.fullmatch(text) or _ALL_NUMERIC.fullmatch(text):
        shown = text[:MAX_HOST_CHARACTERS]
        raise ConfigurationError(f"host {shown!r} is neither a lower-case DNS name nor an IP address: correct it")
    return text
