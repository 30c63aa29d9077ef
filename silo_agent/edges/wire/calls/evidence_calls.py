"""What round models are checked with, from the coordinator and other silos."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc.aio

from lorica_security.errors import MalformedMessage
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_agent.edges.wire.calls.downloads import read_piece
from silo_agent.edges.wire.calls.repeated_calls import CALL_TIMEOUT_S, Calls, T
from silo_agent.edges.wire.connection import Wire
from silo_wire.canonical import Digest, digest_to_wire
from silo_wire.checkable_round import CheckableRound
from silo_wire.codecs.chunk_piece import ChunkPiece
from silo_wire.codecs.evidence_codec import MAX_CHECKABLE_BYTES, checkable_from_bytes
from silo_wire.codecs.secure_codec import MAX_COHORT, verdict_from_wire, verdict_to_wire
from silo_wire.manifest import CHUNK_BYTES
from silo_wire.messages import HeldPieces
from silo_wire.v1 import common_pb2, federation_pb2

_MOST_PIECES = 1 << 10


class EvidenceCalls(Calls):
    """What round models are checked with: evidence, the chunks of a masked round, the verdicts of others."""

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound:
        """What the coordinator says made `model`; raises what it says, MalformedMessage."""
        request = federation_pb2.EvidenceRequest(key=self._key(plan), model_digest=digest_to_wire(model))

        async def attempt(wire: Wire) -> Sequence[bytes]:
            return await self._fetch_pieces(
                wire.stub.FetchEvidence(request),
                "evidence",
                most_bytes=MAX_CHECKABLE_BYTES,
                most=_MOST_PIECES,
                read=_as_it_came,
            )

        pieces = await self._until_answered(attempt)
        return await asyncio.to_thread(checkable_from_bytes, b"".join(pieces), self._credentials.federation)

    async def fetch_pieces(
        self, plan: Digest, model: Digest, chunk: int, held: HeldPieces, most: int
    ) -> Sequence[bytes]:
        """What chunk `chunk` of the round that made `model` is made again with, without what is `held`: `most` pieces
        at most.

        Raises what the coordinator says, MalformedMessage.
        """
        request = federation_pb2.PiecesRequest(
            key=self._key(plan),
            model_digest=digest_to_wire(model),
            chunk=chunk,
            without_vector=held.vector_of is not None,
            without_master=held.master,
        )

        async def attempt(wire: Wire) -> Sequence[bytes]:
            call = wire.chunk_pieces(request)
            what = f"chunk {chunk} of a round"
            return await self._fetch_pieces(call, what, most_bytes=most * CHUNK_BYTES, most=most, read=_read_chunk)

        return await self._until_answered(attempt)

    async def _fetch_pieces(
        self,
        call: grpc.aio.UnaryStreamCall[Any, T],
        what: str,
        *,
        most_bytes: int,
        most: int,
        read: Callable[[T], common_pb2.Chunk | ChunkPiece],
    ) -> Sequence[bytes]:
        pieces: list[bytes] = []
        held = 0
        try:
            async for message in call:
                piece = read(message)
                if piece.index != len(pieces):
                    raise MalformedMessage(f"{what}: piece {piece.index} came where {len(pieces)} was due")
                held += len(piece.data)
                if held > most_bytes or len(pieces) == most:
                    raise MalformedMessage(f"{what} has more than the {most_bytes} bytes or {most} pieces allowed")
                pieces.append(bytes(piece.data))
                self._traffic.received(len(piece.data))
            return pieces
        finally:
            call.cancel()

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        """As EvidencePort has it. Raises what the coordinator says, MalformedMessage."""
        request = federation_pb2.VerdictRequest(
            key=self._key(plan), model_digest=digest_to_wire(model), verdict=verdict_to_wire(verdict), known=known
        )
        reply = await self._until_taken(lambda wire: wire.stub.ShareVerdict(request, timeout=CALL_TIMEOUT_S))
        return _verdicts(reply), reply.known

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        """As EvidencePort has it. Raises what the coordinator says, MalformedMessage."""
        request = federation_pb2.EvidenceRequest(key=self._key(plan), model_digest=digest_to_wire(model))
        reply = await self._until_answered(lambda wire: wire.stub.FetchVerdicts(request, timeout=CALL_TIMEOUT_S))
        return _verdicts(reply)


def _read_chunk(raw: bytes) -> ChunkPiece:
    piece = read_piece(raw)
    if not isinstance(piece, ChunkPiece):
        raise MalformedMessage("the coordinator sends something else than a chunk in the place of one")
    return piece


def _as_it_came(chunk: common_pb2.Chunk) -> common_pb2.Chunk:
    return chunk


def _verdicts(reply: federation_pb2.VerdictsReply) -> tuple[Verdict, ...]:
    if len(reply.verdicts) > MAX_COHORT:
        raise MalformedMessage(f"{len(reply.verdicts)} verdicts came: at most {MAX_COHORT} are allowed")
    return tuple(map(verdict_from_wire, reply.verdicts))
