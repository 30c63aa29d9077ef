"""Plans and models from the coordinator.

What it sends is checked here, in this order, before anything is kept: a plan has the digest that was asked for; a
model's manifest has the digest of the order, fits the plan's layout, was made by no later round, and carries the
coordinator's signature; each chunk has its digest.
"""

import asyncio
import functools
from concurrent.futures import ThreadPoolExecutor

from google.protobuf.message import DecodeError

from lorica_security.errors import IntegrityError, MalformedMessage, Unreachable
from lorica_security.identity.identity_key import verify
from silo_agent.edges.disk.model_cache import ModelCache
from silo_agent.edges.wire.calls.repeated_calls import Calls
from silo_agent.edges.wire.connection import Wire
from silo_agent.service.ports import Progress, RoundModel
from silo_wire.canonical import Digest, digest_to_wire
from silo_wire.codecs.chunk_piece import ChunkPiece, reader
from silo_wire.codecs.common_codec import round_call_key
from silo_wire.codecs.updates_codec import model_header_from_wire
from silo_wire.manifest import Layout, Manifest
from silo_wire.messages import ModelHeader, RoundKey
from silo_wire.plans.plan import MAX_BUNDLE_BYTES, PlanBundle
from silo_wire.statements import MODEL_DOMAIN, model_statement
from silo_wire.transport import give_memory_back
from silo_wire.v1 import common_pb2, federation_pb2
from silo_wire.work_behind import WorkBehind

_THREADS = ThreadPoolExecutor(1, thread_name_prefix="chunks")
"""For what arrives: an agent fetches one model at a time."""


class Downloads(Calls):
    """Plans and models, checked before anything is kept."""

    async def fetch_plan(self, plan: Digest) -> PlanBundle:
        try:
            return await self._until_answered(lambda wire: self._fetch_plan(wire, plan))
        finally:
            give_memory_back()

    async def _fetch_plan(self, wire: Wire, plan: Digest) -> PlanBundle:
        raw = bytearray()
        expected = 0
        call = wire.stub.FetchPlan(federation_pb2.FetchPlanRequest(key=self._key(plan)))
        try:
            async for chunk in call:
                if chunk.index != expected:
                    raise MalformedMessage(f"plan bundle chunk {chunk.index} came where {expected} was due")
                if not chunk.data:
                    raise MalformedMessage(f"plan bundle chunk {chunk.index} is empty")
                expected += 1
                raw += chunk.data
                self._traffic.received(len(chunk.data))
                if len(raw) > MAX_BUNDLE_BYTES:
                    raise MalformedMessage(f"plan bundle has more than the {MAX_BUNDLE_BYTES} bytes allowed")
            return PlanBundle.decode(bytes(raw), plan)
        finally:
            call.cancel()
            raw.clear()  # an error would keep it

    async def fetch_model(
        self,
        *,
        plan: Digest,
        layout: Layout,
        key: RoundKey | None,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        wire_key = self._key(plan) if key is None else round_call_key(key, self._credentials.silo)
        return await self._fetch_into(
            self._models, wire_key, plan=plan, layout=layout, model=model, latest_round=latest_round, progress=progress
        )

    async def fetch_base(self, *, plan: Digest, layout: Layout, model: Digest, progress: Progress) -> RoundModel:
        return await self._fetch_into(
            self._models.base(),
            self._key(plan),
            plan=plan,
            layout=layout,
            model=model,
            latest_round=0,
            progress=progress,
        )

    async def _fetch_into(
        self,
        models: ModelCache,
        key: common_pb2.CallKey,
        *,
        plan: Digest,
        layout: Layout,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> RoundModel:
        """The model from `models`, where it is fetched to if it is not there."""
        header = self._kept_header(models, model, plan=plan, layout=layout, latest_round=latest_round)
        if header is not None:
            mark = await asyncio.to_thread(models.whole, model, header.manifest)
            if mark is not None:
                models.touch(model)
                return RoundModel(file=models.file(model), manifest=header.manifest, mark=mark)

        async def attempt(wire: Wire) -> Manifest:
            return await self._fetch_model(
                wire, models, key, plan=plan, layout=layout, model=model, latest_round=latest_round, progress=progress
            )

        models.prune(model, coming=True)
        manifest = await self._until_answered(attempt)
        models.prune(model)
        mark = models.whole(model, manifest)  # known: its chunks were checked as they came
        return RoundModel(file=models.file(model), manifest=manifest, mark=mark)

    async def _fetch_model(
        self,
        wire: Wire,
        models: ModelCache,
        key: common_pb2.CallKey,
        *,
        plan: Digest,
        layout: Layout,
        model: Digest,
        latest_round: int,
        progress: Progress,
    ) -> Manifest:
        known = self._kept_header(models, model, plan=plan, layout=layout, latest_round=latest_round)
        partial = None
        first = 0
        if known is not None:
            partial = await asyncio.to_thread(models.open_partial, model, known)
            first = partial.held
        call = wire.model_pieces(
            federation_pb2.FetchModelRequest(key=key, model_digest=digest_to_wire(model), first_chunk=first)
        )
        behind = WorkBehind(_THREADS)
        announced = False
        try:
            async for raw in call:
                match piece := read_piece(raw):
                    case federation_pb2.ModelPiece() if piece.HasField("header"):
                        if announced:
                            raise MalformedMessage("the coordinator sends a model's header a second time")
                        announced = True
                        header = model_header_from_wire(piece.header)
                        self._check_header(header, plan=plan, layout=layout, model=model, latest_round=latest_round)
                        if partial is None:
                            partial = await asyncio.to_thread(models.open_partial, model, header, anew=True)
                    case ChunkPiece():
                        if partial is None:
                            raise MalformedMessage("the coordinator sends a model's chunk before its header")
                        if partial.is_whole or piece.index != partial.due:
                            raise MalformedMessage(f"model chunk {piece.index} came where {partial.due} was due")
                        partial.arrive(piece.data)
                        self._traffic.received(len(piece.data))
                        await behind.put(functools.partial(partial.append, piece.data))
                        progress(partial.fraction)
                    case _:
                        raise MalformedMessage(
                            "the coordinator sends a piece of a model that is neither header nor chunk"
                        )
                if partial.is_whole:
                    break  # whatever else comes, it is not of this model
            if partial is None or not partial.is_whole:
                raise Unreachable("the coordinator ended the download before the model was whole")
            await behind.done()
            partial.finish(models.file(model))
            return partial.manifest
        finally:
            call.cancel()
            if partial is not None:
                await behind.settle()  # what has arrived is kept, if it is right
                partial.close()

    def _kept_header(
        self, models: ModelCache, model: Digest, *, plan: Digest, layout: Layout, latest_round: int
    ) -> ModelHeader | None:
        """Of a model on this silo's disk; None where it does not hold now, as of a model that came under another plan:
        it is fetched anew."""
        header = models.header(model)
        if header is not None:
            try:
                self._check_header(header, plan=plan, layout=layout, model=model, latest_round=latest_round)
            except (IntegrityError, MalformedMessage):
                return None
        return header

    def _check_header(
        self, header: ModelHeader, *, plan: Digest, layout: Layout, model: Digest, latest_round: int
    ) -> None:
        manifest = header.manifest
        manifest.check_layout(layout)
        if manifest.digest != model:
            raise IntegrityError(f"the coordinator ordered model {model} and hands out {manifest.digest}")
        if header.round > latest_round:
            raise IntegrityError(f"the model is said to be of round {header.round}, which comes after {latest_round}")
        verify(
            self._credentials.coordinator_key,
            domain=MODEL_DOMAIN.encode(),
            payload=model_statement(
                federation=self._credentials.federation, plan=plan, round_number=header.round, model=model
            ),
            signature=header.signature,
        )


_parse_piece = reader(federation_pb2.ModelPiece)


def read_piece(raw: bytes) -> federation_pb2.ModelPiece | ChunkPiece:
    try:
        return _parse_piece(raw)
    except DecodeError as error:
        raise MalformedMessage(f"the coordinator sends a piece of {len(raw)} bytes that does not parse") from error
