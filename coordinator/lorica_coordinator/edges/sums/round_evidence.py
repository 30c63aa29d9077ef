"""Evidence of masked rounds on disk, beside the models of its plan; what a chunk of the newest round is made again
with.

    evidence/<model>.evidence     a CheckableRound (silo_wire/codecs/evidence_codec.py): kept as long as the plan's
                                  models
    evidence/<model>.verdicts     what silos found right of it (silo_wire/codecs/evidence_codec.py): kept as long, for
                                  silos that missed the round
    evidence/<model>.json         from which model it came, in which attempt: while its chunks can be made again

For the last one the masked vectors of that attempt stay in the spools, and the model before stays stored.
"""

from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from lorica_coordinator.edges.models.model_store import EVIDENCE, MASTER, ModelStore
from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.rounds.secure_attempt import MaskedSum
from lorica_coordinator.service.ports import KeptRound
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE, KeptFiles
from lorica_coordinator.vectors.stored_vector import read_record, write_record
from lorica_security.errors import IntegrityError, MalformedMessage, StateError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import FederationName
from lorica_security.secure_aggregation.coordinator.states import Unmasked
from lorica_security.secure_aggregation.model_evidence.evidence import Evidence, SignedEvidence
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from silo_wire.canonical import Digest
from silo_wire.messages import NOTHING_HELD, HeldPieces, RoundKey

if TYPE_CHECKING:
    from silo_wire.checkable_round import CheckableRound, StateManifests

_SUFFIX = ".evidence"
_VERDICTS = ".verdicts"
_RECORD = ".json"


class RoundEvidence:
    """`folder` is that of the plan's models. What brings torch is imported where it is used: commands that only look
    need not wait for it."""

    def __init__(
        self,
        folder: Path,
        *,
        federation: FederationName,
        plan: Digest,
        models: ModelStore,
        spools: Spools,
        kept: KeptFiles = FOLDER_ALONE,
    ) -> None:
        self._folder = folder / EVIDENCE
        self._federation = federation
        self._plan = plan
        self._models = models
        self._spools = spools
        self._kept = kept
        self._parsed = lru_cache(maxsize=1)(self._parse)

    def make(
        self,
        key: RoundKey,
        base_model: Digest,
        masked: MaskedSum,
        model: Digest,
        sign: Callable[[Evidence], SignedEvidence],
    ) -> None:
        """Keep what shows that the sum of `masked` made `model` of `base_model`; the same again changes nothing.

        A step that gave a model that was there before makes no link: whoever checks models has that one. Raises
        StorageError.
        """
        from lorica_coordinator.edges.sums.masked_sum import MaskedVectors
        from silo_wire.checkable_round import CheckableRound
        from silo_wire.codecs.evidence_codec import checkable_to_bytes

        before, steps = self._manifests(base_model)
        after, steps_after = self._manifests(model)
        if steps_after != steps + 1:
            return
        state = masked.attempt.state
        assert isinstance(state, Unmasked), "a model is made once the sum is unmasked"
        vectors = {it.silo: self._spools.committed(key, it.silo, it.digest) for it in masked.vectors}
        unmask = masked.attempt.unmask()
        try:
            summed = MaskedVectors(fixed_point=unmask.fixed_point, masks=unmask.masks, spools=tuple(vectors.items()))
            tail = tuple(int(word) for word in summed.last_words())
        finally:
            unmask.masks.erase()
        evidence = Evidence(
            attempt=state.attempt,
            survivors=state.survivors,
            before=before.state(steps),
            after=after.state(steps_after),
            tail=tail,
            journal=masked.attempt.events,
        )
        checkable = CheckableRound(
            signed=sign(evidence),
            masked={silo: vector.manifest for silo, vector in vectors.items()},
            before=before,
            after=after,
        )
        record = {"base": base_model, "round": key.round, "attempt": key.attempt}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            files.replace(self._path(model), checkable_to_bytes(checkable))
            write_record(self._record(model), record)
            files.sync_folder(self._folder)
        except OSError as error:
            raise StorageError(f"{self._folder} cannot be written: {error.strerror or error}") from error
        self._kept.keep(self._path(model), self._record(model))

    def read(self, model: Digest) -> bytes:
        """The evidence that led to `model`; raises StateError where there is none."""
        try:
            return self._path(model).read_bytes()
        except FileNotFoundError as error:
            raise StateError(f"there is no evidence of model {model}: no masked sum of this plan made it") from error
        except OSError as error:
            raise StorageError(f"{self._path(model)} cannot be read: {error.strerror or error}") from error

    def verdicts(self, model: Digest) -> tuple[Verdict, ...]:
        """Those that were kept on `model`, none where there are none. Raises IntegrityError for a damaged file."""
        from silo_wire.codecs.evidence_codec import verdicts_from_bytes

        path = self._verdicts(model)
        try:
            return verdicts_from_bytes(path.read_bytes())
        except FileNotFoundError:
            return ()
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        except MalformedMessage as error:
            raise IntegrityError(f"{path} was damaged ({error}): restore it from a backup") from error

    def keep_verdict(self, model: Digest, verdict: Verdict) -> tuple[Verdict, ...]:
        """Keep, durably, what a silo found right of `model`, one verdict of each; all that are kept. Whoever brings it
        checked who signed it.

        Another one of the same silo takes its place if it is on all of its chunks: others may have gone on without
        checking these. Raises StateError where there is no evidence of `model`, the verdict is on other evidence, or it
        is of a silo that is not in the sum and those that are would have no room, MalformedMessage for chunks that
        there are not.
        """
        from silo_wire.codecs.evidence_codec import verdicts_to_bytes
        from silo_wire.codecs.secure_codec import MAX_COHORT

        checkable = self._parsed(model)
        if verdict.evidence != checkable.evidence.digest:
            raise StateError(
                f"the verdict of silo {verdict.silo} is on evidence {verdict.evidence.hex()[:12]}, that of model "
                f"{model} is {checkable.evidence.digest.hex()[:12]}"
            )
        chunks = next(iter(checkable.masked.values())).chunks
        if 8 * len(verdict.chunks) >= chunks + 8 or any(number >= chunks for number in verdict.numbers):
            raise MalformedMessage(
                f"the verdict of silo {verdict.silo} is on more than the {chunks} chunks of the round"
            )
        kept = {it.silo: it for it in self.verdicts(model)}
        before = kept.get(verdict.silo)
        if before is None and verdict.silo not in checkable.masked:
            room = MAX_COHORT - len(checkable.masked)
            if sum(silo not in checkable.masked for silo in kept) >= room:
                raise StateError(
                    f"silo {verdict.silo} is not in the sum that made model {model}, and {room} such silos have "
                    "checked it: more are not kept"
                )
        if before is None or (before != verdict and before.numbers <= verdict.numbers):
            kept[verdict.silo] = verdict
            files.replace(self._verdicts(model), verdicts_to_bytes(kept[silo] for silo in sorted(kept)))
        self._kept.keep(self._verdicts(model))
        return tuple(kept[silo] for silo in sorted(kept))

    def pieces(self, model: Digest, chunk: int, held: HeldPieces = NOTHING_HELD) -> tuple[bytes, ...]:
        """What chunk `chunk` of the round that made `model` is made again with (Pieces.in_order), empty where it is
        `held`.

        Raises StateError where its vectors are there no more, MalformedMessage for a chunk that it does not have,
        IntegrityError.
        """
        from silo_wire.checkable_round import Pieces

        kept = next((it for it in self.kept() if it.model == model), None)
        if kept is None:
            raise StateError(
                f"the masked vectors that made model {model} are there no more: only the newest round's are kept"
            )
        checkable = self._parsed(model)
        next(iter(checkable.masked.values())).chunk_size(chunk)
        try:
            masked = {
                silo: b""
                if silo == held.vector_of
                else self._spools.committed(kept.key, silo, manifest.digest).chunk(chunk)
                for silo, manifest in checkable.masked.items()
            }
        except (IntegrityError, StorageError) as error:
            raise StateError(f"the masked vectors that made model {model} cannot be used: {error}") from error
        master, slots, of_model = b"", dict.fromkeys(checkable.before.slots, b""), None
        if chunk < checkable.before.master.chunks:
            state = self._models.state(kept.base)
            if not held.master:
                master = self._models.master(kept.base, state).chunk(chunk)
            slots = {name: state.slots[name].chunk(chunk) for name in slots}
            if self._models.keeps_master:
                # All vectors are in chunks of one size, the model handed out as well.
                of_model = self._models.vector(model).chunk(chunk * self._models.model_layout.item_bytes // 4)
        return Pieces(masked=masked, master=master, slots=slots, model=of_model).in_order

    def kept(self) -> tuple[KeptRound, ...]:
        """The rounds whose chunks can be made again. Raises IntegrityError for a damaged record."""
        found = []
        for path in sorted(self._folder.glob(f"*{_RECORD}")):
            record = read_record(path)
            try:
                key = RoundKey(
                    federation=self._federation,
                    plan=self._plan,
                    round=int(record["round"]),
                    attempt=int(record["attempt"]),
                )
                found.append(KeptRound(model=Digest(path.stem), base=Digest(str(record["base"])), key=key))
            except (KeyError, ValueError) as error:
                raise IntegrityError(f"{path} was damaged: restore it from a backup") from error
        return tuple(found)

    def let_go(self, model: Digest) -> None:
        """The round that made `model` is made again no more; its evidence stays."""
        try:
            self._record(model).unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{self._record(model)} cannot be deleted: {error.strerror or error}") from error
        self._kept.forget(self._record(model))

    def _manifests(self, model: Digest) -> "tuple[StateManifests, int]":
        from silo_wire.checkable_round import StateManifests

        state = self._models.state(model)
        manifests = StateManifests(
            model=self._models.manifest(model),
            master=self._models.master(model, state).manifest,
            slots={name: vector.manifest for name, vector in state.slots.items() if name != MASTER},
        )
        return manifests, state.steps

    def _parse(self, model: Digest) -> "CheckableRound":
        from silo_wire.codecs.evidence_codec import checkable_from_bytes

        return checkable_from_bytes(self.read(model), self._federation)

    def _path(self, model: Digest) -> Path:
        return self._folder / f"{model}{_SUFFIX}"

    def _verdicts(self, model: Digest) -> Path:
        return self._folder / f"{model}{_VERDICTS}"

    def _record(self, model: Digest) -> Path:
        return self._folder / f"{model}{_RECORD}"
