"""How silos reach the coordinator: the addresses that they are told, and the ports that it listens on."""

import errno
import ipaddress
import socket

from lorica_coordinator.edges.check.found import Found
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_security.console.preflight import Misconfigured, misconfigured
from lorica_security.daemon.listen_address import address, require_bindable


def addresses(found: Found) -> str:
    listening = address(found.settings.listen.silos).host
    resolved = {host: _resolved(host) for host in found.settings.public.hosts}
    loopback = [host for host, ips in resolved.items() if all(ip.is_loopback for ip in ips)]
    if _is_loopback(listening):
        if len(loopback) < len(resolved):
            outside = next(host for host in resolved if host not in loopback)
            raise misconfigured(
                Mistake.LISTEN_LOOPBACK.value,
                f"[listen] silos = {found.settings.listen.silos!r} is loopback, silos are told to call {outside}",
            )
    elif len(loopback) == len(resolved) and not found.settings.public.this_machine_alone:
        raise misconfigured(
            Mistake.HOST_LOOPBACK.value,
            f"{', '.join(loopback)} leads to loopback, {found.settings.listen.silos} is listened on",
        )
    return f"silos are told to call {found.settings.public.hosts[0]}:{found.settings.public_silos_port}"


def ports(found: Found) -> str:
    listen = found.settings.listen
    places = {"silos": listen.silos, "enrolment": listen.enrolment, "metrics": listen.metrics}
    if listen.status:
        places["status"] = listen.status
    numbers = [address(place).port for place in places.values()]
    if alike := {number for number in numbers if number and numbers.count(number) > 1}:
        raise misconfigured(Mistake.PORTS_ALIKE.value, f"[listen] has port {', '.join(map(str, alike))} more than once")
    if found.running is not None:
        return f"the running coordinator (process {found.running}) has them"
    for key, place in places.items():
        _require_bindable(key, place)
    return f"{', '.join(places.values())} are free"


def _resolved(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise misconfigured(
            Mistake.HOST_UNRESOLVED.value, f"[public] hosts: {host} does not resolve ({error})"
        ) from error
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _is_loopback(host: str) -> bool:
    try:
        return all(ip.is_loopback for ip in _resolved(host))
    except Misconfigured:
        return False  # the ports' check names it


def _require_bindable(key: str, place: str) -> None:
    try:
        require_bindable(address(place))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            mistake = Mistake.PORT_TAKEN
        else:
            mistake = Mistake.PORT_PRIVILEGED if error.errno == errno.EACCES else Mistake.ADDRESS_ELSEWHERE
        raise misconfigured(mistake.value, f"[listen] {key} = {place!r} cannot be had: {error.strerror}") from error
