"""Hosts of a test's own, joined by cables that can be slow, lossy, or cut.

`Namespaces`: each host is a network namespace. A `Cable` is two TUN devices and a thread of this process that carries
packets between them: what `tc netem` does, also on kernels that have no netem, and with a loss that comes from a seed.
A cut cable swallows packets in both directions: no FIN, no RST, no ICMP, as when a VPN drops. Nothing leaves the
namespaces; all of them go when the network is left.

`Proxies`, where this process may not make namespaces: every host is this one, and a cable is a CONNECT proxy that a cut
makes deaf. It has rates and cuts; delay and loss it has not, since those are a matter of packets.

    with Namespaces() as network:
        silo = network.host(cable := Cable(bit_per_s=10e6))
        silo.run([...]); cable.cut(); cable.heal()
"""

import asyncio
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import secrets
import select
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Self

PREFIX = "lorica-"
RUN_NETNS = Path("/run/netns")
HUB_ADDRESS = "192.0.2.1"  # TEST-NET-1, RFC 5737: nobody's
BACKLOG_S = 0.2
"""A cable with a rate holds back so much, as a router does, and drops what comes on top."""

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str:
    """Why this machine cannot have hosts of its own; "" when it can."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed: apt-get install iproute2"
    if not Path("/dev/net/tun").exists():
        return "/dev/net/tun is missing: modprobe tun"
    try:
        ip("netns", "add", probe := new_name())
        ip("netns", "delete", probe)
    except subprocess.CalledProcessError as error:
        return f"ip netns add fails: {error.stderr.strip()}"
    return ""


def new_name() -> str:
    return f"{PREFIX}{os.getpid()}-{secrets.token_hex(3)}"


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def sweep() -> None:
    """Delete namespaces that a killed test run left behind."""
    for path in RUN_NETNS.glob(f"{PREFIX}*"):
        owner = path.name.removeprefix(PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists():
            ip("netns", "delete", path.name)


@dataclass(slots=True)
class Direction:
    """One way through a cable. `offered` are the bytes that its sender sent, with IP headers, lost ones included."""

    offered: int = 0
    carried: int = 0
    lost: int = 0
    cut_at: int | None = None
    free_at: float = 0.0

    def offer(self, size: int) -> bool:
        """Count `size` bytes more; whether the cable is to be cut now."""
        self.offered += size
        if self.cut_at is None or self.offered < self.cut_at:
            return False
        self.cut_at = None
        return True

    def leaves(self, now: float, size: int, bit_per_s: float) -> float:
        """When the last of `size` bytes has gone in."""
        self.free_at = max(now, self.free_at) + (8 * size / bit_per_s if bit_per_s else 0.0)
        return self.free_at


@dataclass(slots=True, kw_only=True)
class Cable:
    """`delay_s` each way, `loss` a share of the packets, `bit_per_s` each way (0: no limit)."""

    bit_per_s: float = 0.0
    delay_s: float = 0.0
    loss: float = 0.0
    packet_bytes: int = 1500
    up: Direction = field(default_factory=Direction)
    down: Direction = field(default_factory=Direction)
    broken: threading.Event = field(default_factory=threading.Event)
    fds: tuple[int, int] = (-1, -1)

    def cut(self) -> None:
        self.broken.set()

    def heal(self) -> None:
        self.broken.clear()

    def cut_after(self, direction: Direction, more_bytes: int) -> None:
        """Cut this cable by itself once so many more bytes have gone that way."""
        direction.cut_at = direction.offered + more_bytes


@dataclass(frozen=True, slots=True)
class Host:
    """`name` of the namespace, "" for this very host; `environment` is what its processes need to use their cable."""

    name: str
    address: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def _inside(self, command: Sequence[str]) -> list[str]:
        return [*(("ip", "netns", "exec", self.name) if self.name else ()), *command]

    def popen(self, command: Sequence[str], *, env: Mapping[str, str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(
            self._inside(command),
            env={**env, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def run(self, command: Sequence[str], *, env: Mapping[str, str]) -> str:
        done = subprocess.run(
            self._inside(command),
            env={**env, **self.environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread's new sockets belong to the host meanwhile."""
        if not self.name:
            yield
            return
        with Path("/proc/thread-self/ns/net").open() as own, (RUN_NETNS / self.name).open() as other:
            _setns(other.fileno())
            try:
                yield
            finally:
                _setns(own.fileno())


def _setns(fd: int) -> None:
    if _libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


class Namespaces:
    """Hosts around one hub, each with a cable of its own to it."""

    has_packets = True

    def __init__(self, *, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._hosts: list[Host] = []
        self._cables: list[Cable] = []
        self._poll = select.epoll()
        self._ways: dict[int, tuple[Cable, Direction, int]] = {}
        self._flying: list[tuple[float, int, Cable, Direction, int, bytes]] = []
        self._sent = 0
        self._stop = os.eventfd(0)
        self._poll.register(self._stop, select.EPOLLIN)
        self._carrier = threading.Thread(target=self._carry, name="cables", daemon=True)

    def __enter__(self) -> Self:
        sweep()
        self.hub = self._make_host(HUB_ADDRESS)
        self._carrier.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.eventfd_write(self._stop, 1)
        self._carrier.join()
        for cable in self._cables:
            for fd in cable.fds:
                os.close(fd)
        self._poll.close()
        os.close(self._stop)
        for host in self._hosts:
            ip("netns", "delete", host.name)

    def _make_host(self, address: str) -> Host:
        host = Host(new_name(), address)
        ip("netns", "add", host.name)
        self._hosts.append(host)
        ip("-n", host.name, "link", "set", "lo", "up")
        with host.entered(), contextlib.suppress(OSError):  # BBR takes no notice of loss, most hosts do
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text("cubic")
        return host

    def host(self, cable: Cable) -> Host:
        """A new host at the other end of `cable` from the hub; no two ever have the same address."""
        host = self._make_host(f"192.0.2.{len(self._hosts) + 10}")
        near = self._device(host, self.hub, cable.packet_bytes)
        far = self._device(self.hub, host, cable.packet_bytes)
        cable.fds = (near, far)
        self._cables.append(cable)
        for fd, direction, other in ((near, cable.up, far), (far, cable.down, near)):
            self._ways[fd] = (cable, direction, other)
            self._poll.register(fd, select.EPOLLIN)
        return host

    @staticmethod
    def _device(host: Host, peer: Host, packet_bytes: int) -> int:
        """The file of a new TUN device of `host`, with the route to `peer`."""
        fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        name = f"lr{secrets.token_hex(5)}"
        fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        ip("link", "set", name, "netns", host.name)
        ip("-n", host.name, "address", "add", f"{host.address}/32", "peer", f"{peer.address}/32", "dev", name)
        ip("-n", host.name, "link", "set", name, "mtu", str(packet_bytes), "up")
        return fd

    # ---- the thread that carries -----------------------------------------------------------------------------------

    def _carry(self) -> None:
        while True:
            timeout = max(0.0, self._flying[0][0] - time.monotonic()) if self._flying else None
            for fd, _ in self._poll.poll(timeout):
                if fd == self._stop:
                    return
                self._take(fd)
            self._deliver()

    def _take(self, fd: int) -> None:
        cable, direction, other = self._ways[fd]
        for _ in range(64):  # then the other cables have their turn
            try:
                packet = os.read(fd, cable.packet_bytes)
            except BlockingIOError:
                return
            now = time.monotonic()
            if direction.offer(len(packet)):
                cable.cut()
            full = direction.free_at - now > BACKLOG_S
            if cable.broken.is_set() or full or (cable.loss and self._random.random() < cable.loss):
                direction.lost += len(packet)
                continue
            due = direction.leaves(now, len(packet), cable.bit_per_s) + cable.delay_s
            self._sent += 1
            heapq.heappush(self._flying, (due, self._sent, cable, direction, other, packet))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._flying and self._flying[0][0] <= now:
            _, _, cable, direction, fd, packet = heapq.heappop(self._flying)
            with contextlib.suppress(OSError):  # the receiver's queue is full: lost, as on any network
                if not cable.broken.is_set():
                    os.write(fd, packet)
                    direction.carried += len(packet)
                    continue
            direction.lost += len(packet)


class Proxies:
    """Hosts that are all this one; what each sends goes through a CONNECT proxy of its own, which is its cable."""

    has_packets = False
    _LOOK_S = 0.05

    def __init__(self) -> None:
        self.hub = Host("", "127.0.0.1")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cables", daemon=True)
        self._tunnels: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        for tunnel in self._tunnels:
            tunnel.cancel()
        await asyncio.gather(*self._tunnels, return_exceptions=True)

    def host(self, cable: Cable) -> Host:
        assert not cable.delay_s, "a proxy cannot hold packets back"
        assert not cable.loss, "a proxy cannot lose packets"
        port = asyncio.run_coroutine_threadsafe(self._listen(cable), self._loop).result()
        return Host("", "127.0.0.1", {"HTTPS_PROXY": f"http://127.0.0.1:{port}"})

    async def _listen(self, cable: Cable) -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tunnels.add(task)
            try:
                await self._tunnel(cable, reader, writer)
            except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                pass
            finally:
                self._tunnels.discard(task)
                writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _tunnel(self, cable: Cable, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        await self._whole(cable)
        host, _, port = head.split(" ", 2)[1].rpartition(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(cable, cable.up, reader, far_writer))
                group.create_task(self._pump(cable, cable.down, far_reader, writer))
        except* OSError:
            pass
        finally:
            far_writer.close()

    async def _pump(
        self, cable: Cable, direction: Direction, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        while data := await reader.read(1 << 14):
            if direction.offer(len(data)):
                cable.cut()
            await self._whole(cable)
            await asyncio.sleep(direction.leaves(time.monotonic(), len(data), cable.bit_per_s) - time.monotonic())
            writer.write(data)
            await writer.drain()
            direction.carried += len(data)
        await self._whole(cable)
        writer.close()

    async def _whole(self, cable: Cable) -> None:
        """Until the cable is not, or no longer, cut: what it holds meanwhile comes late, where packets would be sent
        again."""
        while cable.broken.is_set():
            await asyncio.sleep(self._LOOK_S)


Network = Namespaces | Proxies
