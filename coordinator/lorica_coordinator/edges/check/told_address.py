"""What silos are told to connect to, and why that does not work from another machine, where this one can tell."""

import ipaddress
import socket

from lorica_coordinator.settings import Settings
from lorica_security.daemon.listen_address import address, is_loopback

_OF_ONE_NETWORK = (".local", ".localdomain", ".lan", ".home", ".home.arpa", ".internal")
"""Names that other networks do not know."""


def own_hosts() -> list[str]:
    """This host's name if it resolves, and localhost."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return ["localhost"]
    return [name, "localhost"] if name != "localhost" else ["localhost"]


def loopback_alone(settings: Settings) -> bool:
    """Whether silos of other machines are not meant to come at all."""
    if is_loopback(address(settings.listen.silos).host):
        return True
    return settings.public.this_machine_alone and leads_to_itself(settings.public.hosts[0])


def leads_to_itself(host: str) -> bool:
    """Whether this name or address is each machine's own."""
    found = _addresses(host)
    return bool(found) and all(ip.is_loopback for ip in found)


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """None where it does not resolve."""
    try:
        return {ipaddress.ip_address(str(it[4][0]).partition("%")[0]) for it in socket.getaddrinfo(host, None)}
    except OSError:
        return set()


def unreachable_from_elsewhere(host: str) -> str:
    """Why, in words that follow the host's name; empty where nothing speaks against it."""
    found = _addresses(host)
    if not found:
        return "which does not resolve on this machine"
    if all(ip.is_loopback for ip in found):
        return "which leads each machine to itself"
    if all(ip.is_unspecified for ip in found):
        return "which is no address to connect to"
    own = host in (socket.gethostname(), socket.getfqdn())
    if own and ("." not in host or host.endswith(_OF_ONE_NETWORK)):
        return "which machines elsewhere may not know: it is this machine's own name, and no full name of DNS"
    return ""


def warning(host: str, port: int) -> str:
    """In one sentence what silos are told, why it fails and what mends it; empty where nothing speaks against the
    host."""
    why = unreachable_from_elsewhere(host)
    if not why:
        return ""
    return (
        f"silos are told to connect to {host}, port {port}, {why}. Silos on other machines need another name: put "
        "one by which they reach this host first into `[public] hosts` of federation.toml, start `coordinator serve` "
        "anew and invite again; a new folder takes it by `coordinator init DIR --host NAME`"
    )
