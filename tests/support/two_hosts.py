"""Two hosts that share a disk and one cable: network namespaces joined by a pair of veth, of one interface name.

The second has a host name and process numbers of its own as well, so that nothing on the first can end its processes.
"""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from tests.support import network_hosts

INTERFACE: Final = "ranks0"
PORT: Final = 29500
"""Of the store that torchrun of the first host has; both hosts have all of theirs to themselves."""


@dataclass(frozen=True)
class Hosts:
    first: str
    second: str
    addresses: tuple[str, str] = ("192.0.2.21", "192.0.2.22")  # TEST-NET-1, RFC 5737: nobody's

    def by_torchrun(self, torchrun: Sequence[str]) -> list[str]:
        """A launch by which each host's torchrun starts one rank; the second's is in no session of the first."""
        words = (
            *(*torchrun, "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=static", "--no-python"),
            *(f"--master-addr={self.addresses[0]}", f"--master-port={PORT}"),
        )
        on_first = f"{' '.join(words)} --node-rank=0"
        on_second = f"{' '.join(words)} --node-rank=1"
        second = "setsid unshare --uts --pid --fork --kill-child --mount-proc"
        script = (
            f'ip netns exec {self.first} {on_first} "$@" & '
            f'ip netns exec {self.second} {second} sh -c \'hostname second; exec {on_second} "$@"\' sh "$@" & wait'
        )
        return ["/bin/sh", "-c", script, "sh"]

    def heard(self, host: str) -> set[str]:
        """ADDRESS:PORT of whatever listens there."""
        told = subprocess.run(
            ["ip", "netns", "exec", host, "ss", "-Hltn"], check=True, capture_output=True, text=True
        ).stdout
        return {line.split()[3] for line in told.splitlines()}


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    hosts = Hosts(network_hosts.new_name(), network_hosts.new_name())
    network_hosts.sweep()
    made = []
    try:
        for host in (hosts.first, hosts.second):
            network_hosts.ip("netns", "add", host)
            made.append(host)
        peer = ("peer", "name", INTERFACE, "netns", hosts.second)
        network_hosts.ip("link", "add", INTERFACE, "netns", hosts.first, "type", "veth", *peer)
        for host, address in zip(made, hosts.addresses, strict=True):
            network_hosts.ip("-n", host, "link", "set", "lo", "up")
            network_hosts.ip("-n", host, "address", "add", f"{address}/24", "dev", INTERFACE)
            network_hosts.ip("-n", host, "link", "set", INTERFACE, "up")
        yield hosts
    finally:
        for host in made:
            network_hosts.ip("netns", "delete", host)
