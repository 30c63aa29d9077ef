"""Server and client of the floor: `serve` or `exchange`, then FOLDER PORT SILOS PARAMETERS ROUNDS MARKS.

In each round every client takes the model in messages of 1 MiB and sends as many bytes back, which the server adds to
its accumulator; a round ends when all have done so.
"""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from silo_wire.manifest import CHUNK_BYTES
from silo_wire.transport import CHANNEL_OPTIONS, SERVER_OPTIONS, keep_chunks_in_memory

_SERVICE = "Floor"


@dataclass(frozen=True, slots=True)
class Work:
    """What the command line says."""

    folder: Path
    port: int
    silos: int
    parameters: int
    rounds: int
    marks: Path

    @property
    def sizes(self) -> list[int]:
        """Of each message of a model, in bytes."""
        whole, rest = divmod(4 * self.parameters, CHUNK_BYTES)
        return [CHUNK_BYTES] * whole + [rest] * bool(rest)

    def mark(self, *words: object) -> None:
        with self.marks.open("ab", buffering=0) as pipe:
            pipe.write(" ".join(map(str, (os.getpid(), *words))).encode() + b"\n")

    def pem(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()


async def serve(work: Work) -> None:
    model = np.ones(work.parameters, dtype="<f4")
    total = np.zeros_like(model)
    content = model.data.cast("B")
    ended, arrived, done = asyncio.Condition(), 0, 0

    async def fetch(_: bytes, __: Any) -> AsyncIterator[bytes]:
        at = 0
        for size in work.sizes:
            yield bytes(content[at : at + size])
            at += size

    async def send(pieces: AsyncIterator[bytes], _: Any) -> bytes:
        nonlocal arrived, done
        at = 0
        async for piece in pieces:
            into = total[at : at + len(piece) // 4]
            np.add(into, np.frombuffer(piece, dtype="<f4"), out=into)
            at += len(into)
        async with ended:
            arrived, mine = arrived + 1, done
            if arrived == work.silos:
                arrived, done = 0, done + 1
                work.mark("round", done)
                if done == work.rounds:
                    right = bool((total == np.float32(work.rounds * work.silos)).all())
                    work.mark("end", *([] if right else ["the sum is not what was sent"]))
                ended.notify_all()
            await ended.wait_for(lambda: done > mine)
        return b""

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
        "Fetch": grpc.unary_stream_rpc_method_handler(fetch),
        "Send": grpc.stream_unary_rpc_method_handler(send),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
    pair = (work.pem("server.key"), work.pem("server.pem"))
    credentials = grpc.ssl_server_credentials([pair], work.pem("authority.pem"), require_client_auth=True)
    server.add_secure_port(f"127.0.0.1:{work.port}", credentials)
    await server.start()
    work.mark("round", 0)
    await server.wait_for_termination()


async def exchange(work: Work) -> None:
    credentials = grpc.ssl_channel_credentials(
        work.pem("authority.pem"), work.pem("server.key"), work.pem("server.pem")
    )
    async with grpc.aio.secure_channel(f"localhost:{work.port}", credentials, options=CHANNEL_OPTIONS) as channel:
        fetch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{_SERVICE}/Fetch")
        send: grpc.aio.StreamUnaryMultiCallable[bytes, bytes] = channel.stream_unary(f"/{_SERVICE}/Send")
        ones = np.ones(CHUNK_BYTES // 4, dtype="<f4").tobytes()

        async def pieces() -> AsyncIterator[bytes]:
            for size in work.sizes:
                yield ones[:size]

        for _ in range(work.rounds):
            async for _ in fetch(b""):
                pass
            await send(pieces())
        await asyncio.Event().wait()  # the benchmark ends it


def main() -> None:
    role, folder, port, silos, parameters, rounds, marks = sys.argv[1:]
    keep_chunks_in_memory()
    work = Work(Path(folder), int(port), int(silos), int(parameters), int(rounds), Path(marks))
    asyncio.run({"serve": serve, "exchange": exchange}[role](work))


if __name__ == "__main__":
    main()
