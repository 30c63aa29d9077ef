"""Which HTTPS CONNECT proxy stands before an address: one rule for gRPC and for the plain TLS probe.

HTTPS_PROXY and NO_PROXY of the environment, upper or lower case; NO_PROXY takes names, suffixes, addresses, networks
(10.0.0.0/8) and `*`. gRPC is told the outcome, so its own reading of the environment never differs.
"""

import base64
import ipaddress
import urllib.request
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from lorica_security.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectProxy:
    """`credentials` (user:password) are not shown."""

    host: str
    port: int
    credentials: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """As gRPC takes it, with the credentials: a secret."""
        at = f"{self.credentials}@" if self.credentials else ""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{at}{host}:{self.port}"

    def request(self, target: str) -> bytes:
        """The CONNECT request for `target` (host:port), RFC 9110 9.3.6."""
        lines = [f"CONNECT {target} HTTP/1.1", f"Host: {target}"]
        if self.credentials:
            token = base64.b64encode(unquote(self.credentials).encode()).decode()
            lines.append(f"Proxy-Authorization: Basic {token}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


def proxy_for(host: str) -> ConnectProxy | None:
    """The proxy to use for `host`, or None; raises ConfigurationError for one that cannot be used."""
    settings = urllib.request.getproxies_environment()
    address = settings.get("https") or settings.get("all")
    if not address or _is_exempt(host, settings.get("no", "")):
        return None
    parts = urlsplit(address if "://" in address else f"http://{address}")
    try:
        port = parts.port or 80
    except ValueError:
        port = 0
    if parts.scheme != "http" or not parts.hostname or not port:
        # Not shown: it may hold a password.
        raise ConfigurationError("HTTPS_PROXY is not http://[USER:PASSWORD@]HOST:PORT: correct it or unset it")
    return ConnectProxy(host=parts.hostname, port=port, credentials=parts.netloc.rpartition("@")[0])


def _is_exempt(host: str, rules: str) -> bool:
    if urllib.request.proxy_bypass(host, {"no": rules}):
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    for rule in rules.split(","):
        try:
            if address in ipaddress.ip_network(rule.strip(), strict=False):
                return True
        except ValueError:
            continue  # a name, already looked at
    return False
