"""Errors survive the wire: one table, every class has a row, derived classes go by their base."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc._cython import cygrpc

from lorica_security import errors
from lorica_security.errors import EXIT_CODES, DataError, LoricaError, PolicyRefusal, exit_code, kind_of
from silo_wire.transport import CHANNEL_OPTIONS, SERVER_OPTIONS, answer_to, error_of, status_of


def make(kind: type[LoricaError]) -> LoricaError:
    return PolicyRefusal("rule", "no") if kind is PolicyRefusal else kind("no")


def over_the_wire(error: LoricaError) -> LoricaError:
    code, details, trailing = status_of(error)
    return error_of(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailing), details))


@pytest.mark.parametrize("kind", [kind for kind in EXIT_CODES if kind is not PolicyRefusal])
def test_every_error_arrives_as_what_it_was(kind: type[LoricaError]) -> None:
    told = over_the_wire(make(kind))
    assert type(told) is kind
    assert str(told) == "no"


def test_every_deliberate_error_has_an_exit_code_of_its_own() -> None:
    own = {item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, LoricaError)}
    assert own - {LoricaError} == set(EXIT_CODES)
    assert len(set(EXIT_CODES.values())) == len(EXIT_CODES)
    assert not {0, 1, 2} & set(EXIT_CODES.values())


def test_a_derived_error_goes_by_its_base() -> None:
    class Finer(DataError):
        pass

    assert kind_of(Finer("no")) is DataError
    assert exit_code(Finer("no")) == EXIT_CODES[DataError]
    assert type(over_the_wire(Finer("no"))) is DataError


def test_a_peer_cannot_make_us_raise_a_class_of_its_choice() -> None:
    forged = grpc.aio.AioRpcError(
        grpc.StatusCode.UNKNOWN, grpc.aio.Metadata(), grpc.aio.Metadata(("lorica-error", "SystemExit")), "boo"
    )
    assert type(error_of(forged)) is errors.Unreachable


@pytest.mark.parametrize("name", sorted({name for name, _ in (*SERVER_OPTIONS, *CHANNEL_OPTIONS)}))
def test_every_option_is_one_that_grpc_knows(name: str) -> None:
    """gRPC ignores an unknown option in silence: a misspelt ping interval once cut every idle stream after 100 s."""
    core = Path(cygrpc.__file__).read_bytes()
    assert name.encode() + b"\0" in core


async def test_nothing_follows_the_first_piece_before_the_peer_takes_more() -> None:
    """Who waits for a place among the coordinator's transfers fills none of its memory."""
    taken = asyncio.Event()

    async def take(pieces: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        assert await anext(pieces) == b"first"
        taken.set()
        await context.send_initial_metadata(())
        return b"".join([piece async for piece in pieces])

    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        assert taken.is_set()
        yield b"second"
        yield b"third"

    async with upload_to(take) as upload:
        assert await answer_to(upload(), pieces()) == b"secondthird"


@pytest.mark.parametrize("takes_more", [True, False], ids=["in mid-stream", "at once"])
async def test_a_refusal_is_told_as_it_was_said(takes_more: bool) -> None:
    """gRPC's aio now and then puts an INTERNAL of its own in the place of a refusal that met a write under way."""

    async def refuse(pieces: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]") -> bytes:
        await anext(pieces)
        if takes_more:
            await context.send_initial_metadata(())
        code, details, trailing = status_of(errors.WrongTime("not now"))
        await context.abort(code, details, trailing)

    async def pieces(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield bytes(1000)

    async with upload_to(refuse) as upload:
        told = []
        for count in [*range(1, 8)] * 150:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await answer_to(upload(), pieces(count))
            told.append(error_of(caught.value))
    assert {(type(error), str(error)) for error in told} == {(errors.WrongTime, "not now")}


@asynccontextmanager
async def upload_to(handler: Any) -> AsyncIterator[Any]:
    """Calls of a stream of pieces, answered by `handler`."""
    server = grpc.aio.server()
    handlers = {"Upload": grpc.stream_unary_rpc_method_handler(handler)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Answering", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel.stream_unary("/Answering/Upload")
    finally:
        await server.stop(None)
