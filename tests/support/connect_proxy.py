"""A small HTTPS CONNECT proxy on loopback: it tunnels, and it can lead somewhere else than it was asked to."""

import asyncio
import contextlib
from types import TracebackType
from typing import Self


class ConnectProxy:
    """`async with ConnectProxy() as proxy`; `targets` and `heads` hold what was asked for.

    `lead_to` (host, port) makes it a proxy that intercepts: every tunnel ends there instead. `refusal` is a status line
    to answer with instead of a tunnel.
    """

    def __init__(self, *, lead_to: tuple[str, int] | None = None, refusal: str = "") -> None:
        self.targets: list[str] = []
        self.heads: list[str] = []
        self._lead_to = lead_to
        self._refusal = refusal
        self._server: asyncio.Server | None = None
        self._pumps: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        for pump in tuple(self._pumps):
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        try:
            await self._tunnel(reader, writer)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._pumps.discard(task)
            writer.close()

    async def _tunnel(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        method, target, _ = head.split(" ", 2)
        assert method == "CONNECT"
        self.targets.append(target)
        if self._refusal:
            writer.write(f"HTTP/1.1 {self._refusal}\r\n\r\n".encode())
            await writer.drain()
            return
        host, _, port = target.rpartition(":")
        there = self._lead_to or (host, int(port))
        far_reader, far_writer = await asyncio.open_connection(*there)
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        pumps = [asyncio.ensure_future(_pump(reader, far_writer)), asyncio.ensure_future(_pump(far_reader, writer))]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
