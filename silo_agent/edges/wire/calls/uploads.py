"""Updates and masked vectors to the coordinator: offered, sent from the first chunk that it lacks, and receipted."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import IntegrityError, MalformedMessage, StorageError
from lorica_security.host.file_mark import FileMark
from lorica_security.secure_aggregation.messages import MaskedInput
from silo_agent.edges.keys.signed_update import signed_header
from silo_agent.edges.wire.calls.repeated_calls import CALL_TIMEOUT_S, Calls, T
from silo_agent.edges.wire.connection import Wire
from silo_agent.rounds.events import SavedUpdate
from silo_agent.service.ports import Progress
from silo_wire.canonical import digest_to_wire
from silo_wire.codecs.chunk_piece import chunk_piece
from silo_wire.codecs.common_codec import round_call_key
from silo_wire.codecs.masked_orders_codec import masked_header_to_wire
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.codecs.update_receipt import receipt_from_wire as receipt_from_answer
from silo_wire.codecs.updates_codec import update_header_to_wire
from silo_wire.manifest import Manifest
from silo_wire.messages import MaskedHeader, RoundKey
from silo_wire.transport import answer_to
from silo_wire.v1 import federation_pb2

BATCH_BYTES = 2 << 20
"""Chunks come from the disk so many bytes at a time, and no more than twice as many wait in memory."""


class Uploads(Calls):
    """Updates and masked vectors on their way to the coordinator."""

    async def upload(
        self, update: SavedUpdate, file: Path, *, mark: FileMark | None = None, progress: Progress
    ) -> UpdateReceipt:
        def header(first_chunk: int, log: SignedHead) -> federation_pb2.UpdatePiece:
            signed = signed_header(update, self._credentials, first_chunk=first_chunk, log=log)
            return federation_pb2.UpdatePiece(header=update_header_to_wire(signed, self._credentials.silo))

        return await self._until_answered(
            lambda wire: self._upload(wire, update.key, update.manifest, header, file, mark, progress)
        )

    async def upload_masked(
        self,
        key: RoundKey,
        masked: MaskedInput,
        manifest: Manifest,
        file: Path,
        *,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        def header(first_chunk: int, log: SignedHead) -> federation_pb2.UpdatePiece:
            announced = MaskedHeader(key=key, masked=masked, manifest=manifest, first_chunk=first_chunk, log=log)
            return federation_pb2.UpdatePiece(masked=masked_header_to_wire(announced, self._credentials.silo))

        return await self._until_answered(lambda wire: self._upload(wire, key, manifest, header, file, mark, progress))

    async def _upload(
        self,
        wire: Wire,
        key: RoundKey,
        manifest: Manifest,
        header: Callable[[int, SignedHead], federation_pb2.UpdatePiece],
        file: Path,
        mark: FileMark | None,
        progress: Progress,
    ) -> UpdateReceipt:
        """`header` is of the upload that goes on at the given chunk, with the head of this silo's log; none is left of
        one that counts."""
        reply = await wire.stub.UploadOffset(
            federation_pb2.UploadOffsetRequest(
                key=round_call_key(key, self._credentials.silo), update_digest=digest_to_wire(manifest.digest)
            ),
            timeout=CALL_TIMEOUT_S,
        )
        held = manifest.chunks if reply.committed else reply.chunks
        if held > manifest.chunks:
            raise MalformedMessage(f"the coordinator says it holds {held} chunks of an update of {manifest.chunks}")
        who = self._credentials
        log = SignedHead.sign(who.identity_key, writer=who.identity.uri, head=self._log_head())
        pieces = _pieces(header(held, log), manifest, file, mark, held, progress, self._traffic.sent)
        receipt = receipt_from_answer(await answer_to(wire.upload_update(), pieces), key=key, silo=who.silo)
        if (receipt.update, receipt.total_bytes) != (manifest.digest, manifest.total_bytes):
            raise IntegrityError("the coordinator's receipt names another update than the one that was sent")
        if receipt.shown != log.head:
            raise IntegrityError(
                "the coordinator's receipt names another head of this silo's audit log than it was shown"
            )
        receipt.check(who.coordinator_key)
        if held == manifest.chunks:
            progress(1.0)
        return receipt


async def _pieces(
    header: federation_pb2.UpdatePiece,
    manifest: Manifest,
    file: Path,
    mark: FileMark | None,
    first: int,
    progress: Progress,
    sent: Callable[[int], None],
) -> AsyncIterator[federation_pb2.UpdatePiece | bytes]:
    """The header and every chunk from `first` on; the next few are read while these are sent, and `sent` hears of their
    bytes."""
    yield header
    step = max(1, BATCH_BYTES // manifest.chunk_bytes)

    def read_from(index: int) -> "asyncio.Task[list[bytes]]":
        indices = range(index, min(index + step, manifest.chunks))
        return _in_thread(lambda: _read_pieces(file, manifest, mark, indices))

    ahead = read_from(first)
    for begin in range(first, manifest.chunks, step):
        pieces = await ahead
        ahead = read_from(begin + step)
        for index, piece in enumerate(pieces, begin):
            yield piece
            sent(manifest.chunk_size(index))
            progress((index + 1) / manifest.chunks)


def _read_pieces(file: Path, manifest: Manifest, mark: FileMark | None, indices: range) -> list[bytes]:
    """Chunks as they were when their manifest was made: the same bytes or none. Checked unless the file is as
    marked."""
    if not indices:
        return []
    pieces = []
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            known = FileMark.of(descriptor) == mark
            for index in indices:
                data = os.pread(descriptor, manifest.chunk_size(index), index * manifest.chunk_bytes)
                if not known:
                    manifest.check_chunk(index, data)
                pieces.append(chunk_piece(index, data))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise StorageError(f"{file} cannot be read: {error.strerror}") from error
    return pieces


def _in_thread(work: Callable[[], T]) -> "asyncio.Task[T]":
    """`work` in another thread, from now on; nobody has to await it."""
    task = asyncio.create_task(asyncio.to_thread(work))
    task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
    return task
