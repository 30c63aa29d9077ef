"""Client updates on their way in: checked before the first byte, spooled chunk by chunk, counted once committed.

1. The round takes an update of this silo now (key, phase, cohort).
2. It was made from the round's model, and its manifest fits the plan's layout and type of updates.
3. The silo's identity key signed exactly this update and summary for this attempt.
4. It goes on where the spool ends.
5. Each chunk has the digest of the manifest; the whole is finite and durable.
6. It goes into the audit log, with the head of the silo's own.
7. The machine counts it. Only then is the silo told, by a signed receipt.

A masked vector takes the same way. Its announcement is a message of secure aggregation: the protocol's machine judges
it, and drops the silo whose announcement is false.
"""

import asyncio
from functools import partial

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_coordinator.rounds.events import MaskAnswered, UpdateCommitted
from lorica_coordinator.rounds.phases.collecting import check_may_commit
from lorica_coordinator.rounds.phases.masking import check_may_send_masked
from lorica_coordinator.rounds.states import Masking, course_of
from lorica_coordinator.rounds.updates import CommittedUpdate
from lorica_coordinator.service.loop.round_loop import RoundLoop
from lorica_coordinator.service.plan_desk import PlanDesk
from lorica_coordinator.service.ports import RoundStore, Spool, Spools
from lorica_coordinator.service.threads import Threads
from lorica_coordinator.service.transfers.receipts import Receipts, shown_log
from lorica_security.errors import AuthorisationError, Conflict, IntegrityError, MalformedMessage, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.identity import identity_key
from silo_wire.canonical import Digest
from silo_wire.codecs.update_receipt import UpdateReceipt
from silo_wire.manifest import CHUNK_BYTES, Layout, masked_layout
from silo_wire.messages import MaskedHeader, RoundKey, UpdateHeader
from silo_wire.statements import UPDATE_DOMAIN, update_statement
from silo_wire.work_behind import WorkBehind


class Upload:
    """One call that brings an update, or the rest of one. Always `close` it."""

    def __init__(
        self,
        *,
        silo: SiloName,
        header: UpdateHeader | MaskedHeader,
        spool: Spool | None,
        loop: RoundLoop,
        receipts: Receipts,
        threads: Threads,
    ) -> None:
        """`spool` None: this very update has been committed before."""
        self._silo = silo
        self._header = header
        self._spool = spool
        self._loop = loop
        self._receipts = receipts
        self._threads = threads
        self._behind = WorkBehind(threads.transfers)
        self._ending = asyncio.Lock()
        self._replaced = False
        self._over = False
        """Replaced, and nothing of it is waiting to be written."""

    @property
    def held(self) -> int:
        """Chunks held: the index of the next one."""
        return self._header.manifest.chunks if self._spool is None else self._spool.held

    async def write(self, index: int, data: bytes | memoryview) -> None:
        """Take the next chunk, which is checked and written while further ones arrive.

        Raises MalformedMessage, IntegrityError, StorageError, WrongTime or Conflict, perhaps for a chunk before it.
        """
        await self._behind.put(partial(self._write, self._usable(), index, data))

    async def commit(self) -> UpdateReceipt:
        """Count the update and return the receipt; may be repeated. Raises as `write` does, for any chunk."""
        if self._spool is not None:
            async with self._ending:
                await self._behind.done()
                norm = await self._threads.transfer(self._usable().commit)
                await self._receipts.enter(self._silo, self._header)
                await self._loop.post(self._committed(norm))
        return await self._receipts.receipt(self._silo, self._header)

    def _committed(self, norm: float) -> UpdateCommitted | MaskAnswered:
        header, now = self._header, self._loop.now()
        if isinstance(header, MaskedHeader):
            return MaskAnswered(now=now, key=header.key, answer=header.masked)
        update = CommittedUpdate(
            silo=self._silo, digest=header.manifest.digest, summary=header.summary, delta_norm=norm
        )
        return UpdateCommitted(now=now, key=header.key, update=update, signature=header.signature)

    async def close(self) -> None:
        async with self._ending:
            await self._let_go()

    async def replace(self) -> None:
        """The same silo has begun anew: take nothing more from this call, unless it is committing already."""
        async with self._ending:
            self._replaced = True
            await self._let_go()

    async def _let_go(self) -> None:
        if self._spool is not None:
            await self._behind.settle()  # who sent a wrong chunk last does not wait for the answer
            self._over = self._replaced
            await self._threads.transfer(self._spool.close)

    def _write(self, spool: Spool, index: int, data: bytes | memoryview) -> None:
        if not self._over:
            spool.write(index, data)

    def _usable(self) -> Spool:
        if self._spool is None:
            raise Conflict(
                f"update {self._header.manifest.digest} of silo {self._silo} is committed: send no more of it"
            )
        if self._replaced:
            raise Conflict(f"a newer upload of silo {self._silo} has taken this one's place")
        if isinstance(self._header, MaskedHeader):
            check_may_send_masked(self._loop.state, self._header.key, self._silo)
        else:
            check_may_commit(self._loop.state, self._header.key, self._silo)
        return self._spool


class Uploads:
    def __init__(
        self,
        *,
        loop: RoundLoop,
        desk: PlanDesk,
        spools: Spools,
        store: RoundStore,
        receipts: Receipts,
        threads: Threads,
    ) -> None:
        self._loop = loop
        self._receipts = receipts
        self._desk = desk
        self._spools = spools
        self._store = store
        self._threads = threads
        self._live: dict[SiloName, Upload] = {}
        self._beginning = asyncio.Lock()

    async def begin(self, silo: SiloName, header: UpdateHeader | MaskedHeader) -> Upload:
        """Check an update before its bytes; the steps stand at the head of this module."""
        if await self._is_committed(silo, header.key, header.manifest.digest):
            await self._check_log(silo, header)
            return self._at(self._upload(silo, header, None), header)
        if isinstance(header, MaskedHeader):
            layout = await self._check_masked(silo, header)
        else:
            layout = await self._check_plain(silo, header)
        await self._check_log(silo, header)
        async with self._beginning:
            if (older := self._live.get(silo)) is not None:
                await older.replace()
            # Opening the spool of one update deletes any other: look again, now that no older call can commit.
            await self._is_committed(silo, header.key, header.manifest.digest)
            spool = await self._threads.transfer(self._spools.open, header.key, silo, header, layout)
            upload = self._upload(silo, header, spool)
            self._live[silo] = upload
        try:
            return self._at(upload, header)
        except WrongTime:
            await upload.close()
            raise

    async def _check_plain(self, silo: SiloName, header: UpdateHeader) -> Layout:
        check_may_commit(self._loop.state, header.key, silo)
        course = course_of(self._loop.state)
        assert course is not None
        if header.model != course.model:
            raise WrongTime(f"silo {silo} made its update from model {header.model}, the round's is {course.model}")
        layout = (await self._desk.opened(header.key.plan)).bundle.update_layout
        header.manifest.check_layout(layout)
        await self._check_signature(silo, header)
        return layout

    async def _check_masked(self, silo: SiloName, header: MaskedHeader) -> Layout:
        """A false announcement is told to the protocol, which drops the silo for it: its vector is not even looked
        at."""
        secure = check_may_send_masked(self._loop.state, header.key, silo)
        if not secure.would_take(header.masked):
            await self._loop.post(MaskAnswered(now=self._loop.now(), key=header.key, answer=header.masked))
            raise IntegrityError(f"silo {silo} announced a masked vector falsely: it is out of this attempt")
        if header.manifest.digest != header.masked.vector.hex():
            raise MalformedMessage(f"the manifest of silo {silo} is not the one that its announcement is signed for")
        layout = masked_layout(secure.words)
        header.manifest.check_layout(layout)
        if header.manifest.chunk_bytes != CHUNK_BYTES:  # who checks the model takes the same chunk of every vector
            raise MalformedMessage(
                f"masked vector of silo {silo} is in chunks of {header.manifest.chunk_bytes} bytes: use {CHUNK_BYTES}"
            )
        return layout

    async def offset(self, silo: SiloName, key: RoundKey, update: Digest) -> tuple[int, bool]:
        """Chunks held of this update, and whether it has been committed (then the chunks are 0).

        Who asks is about to go on with it: an older call brings nothing more, so that the answer stays true.
        """
        if (older := self._live.get(silo)) is not None:
            await older.replace()
        if await self._is_committed(silo, key, update):
            return 0, True
        state = self._loop.state
        if isinstance(state, Masking):
            layout = masked_layout(check_may_send_masked(state, key, silo).words)
        else:
            check_may_commit(state, key, silo)
            layout = (await self._desk.opened(key.plan)).bundle.update_layout
        return await self._threads.transfer(self._spools.held, key, silo, update, layout), False

    async def _is_committed(self, silo: SiloName, key: RoundKey, update: Digest) -> bool:
        """Whether this update has been counted; raises Conflict when another one has."""
        counted = await self._threads.store(self._store.committed_update, key, silo)
        if counted is not None and counted != update:
            raise Conflict(f"silo {silo} has committed update {counted} for round {key.round} and sends {update}")
        return counted is not None

    def _upload(self, silo: SiloName, header: UpdateHeader | MaskedHeader, spool: Spool | None) -> Upload:
        return Upload(
            silo=silo,
            header=header,
            spool=spool,
            loop=self._loop,
            receipts=self._receipts,
            threads=self._threads,
        )

    @staticmethod
    def _at(upload: Upload, header: UpdateHeader | MaskedHeader) -> Upload:
        if header.first_chunk != upload.held:
            raise WrongTime(
                f"the upload goes on at chunk {upload.held}, not at {header.first_chunk}: ask for the offset first"
            )
        return upload

    async def _check_log(self, silo: SiloName, header: UpdateHeader | MaskedHeader) -> None:
        """The head of the silo's audit log is evidence: it has to be signed."""
        shown_log(header).check(await self._identity_key(silo))

    async def _identity_key(self, silo: SiloName) -> Ed25519PublicKey:
        enrolled = await self._threads.store(self._store.silo, silo)
        if enrolled is None:
            raise AuthorisationError(f"silo {silo} is not enrolled in this federation: enrol it with a new invitation")
        return identity_key.public_key_from_bytes(enrolled.identity_public_key)

    async def _check_signature(self, silo: SiloName, header: UpdateHeader) -> None:
        statement = update_statement(
            key=header.key, silo=silo, model=header.model, update=header.manifest.digest, summary=header.summary
        )
        identity_key.verify(
            await self._identity_key(silo),
            domain=UPDATE_DOMAIN.encode(),
            payload=statement,
            signature=header.signature,
        )
