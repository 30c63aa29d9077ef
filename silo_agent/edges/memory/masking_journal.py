"""What survives the agent's process of secure aggregation, in a private folder.

    memory      what this silo has taken part in, over all attempts: kept
    attempt     the events of the attempt under way, the first of them with its root secret: overwritten, then deleted
                at its end
    vector      the masked vector that was made in it, and vector.manifest
    spare       the file of an earlier attempt's vector, of which nothing remains to be kept from anyone: it is written
                over

The memory has this silo's seal, and so has `lineages.json`. An event is its length and its bytes, which hold a digest
of their own. Everything is durable when a call returns.
"""

import os
from collections.abc import Callable
from pathlib import Path

from google.protobuf.message import DecodeError

from lorica_security.errors import ConfigurationError, IntegrityError, MalformedMessage, PolicyRefusal, StorageError
from lorica_security.host.files import (
    append_private,
    is_there,
    make_private_folder,
    read_private,
    sync_folder,
    write_at,
    write_private,
)
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.seal import Seal, unsealed
from lorica_security.secure_aggregation.silo.events import Event
from lorica_security.secure_aggregation.silo.memory import Forgotten, SiloMemory
from silo_agent.edges.disk.private_record import AS_HELD, RESET, alone
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory import pins_file
from silo_agent.edges.memory.group_file import GroupsNote, changes_of
from silo_agent.edges.memory.groups_left import left_of, take_over
from silo_agent.edges.memory.lineages import Behind, Lineages, lost, plausible
from silo_wire.canonical import Digest
from silo_wire.codecs.common_codec import manifest_from_wire, manifest_to_wire
from silo_wire.codecs.secure_journals_codec import (
    event_from_bytes,
    event_to_bytes,
    known_lineages,
    memory_from_bytes,
    memory_to_bytes,
)
from silo_wire.manifest import Manifest
from silo_wire.plans.plan import PlanBundle
from silo_wire.v1 import common_pb2

_LENGTH_BYTES = 4
_SHOWN = 20
"""Of plans that people are told of in one line."""


def vector_files(folder: Path) -> tuple[Path, Path]:
    """Where the masked vector of the attempt is, and where that of an earlier one may be."""
    return folder / "vector", folder / "spare"


class MaskingJournal:
    """Raises StorageError when a file cannot be read or written, IntegrityError when one does not parse."""

    def __init__(self, folder: Path, federation: FederationName, seal: Seal, silo: SiloName | None = None) -> None:
        """`folder` lies in the silo's own, where `lineages.json` notes each change of the memory, of
        `release-groups.json` and `peers.json`."""
        make_private_folder(folder)
        self._seal = seal
        self._root = folder.parent
        self._lineages = Lineages(self._root / "lineages.json", seal)
        self._groups = self._root / "release-groups.json"
        self._pins = self._root / "peers.json"
        self._silo = silo
        self._memory = folder / "memory"
        self._attempt = folder / "attempt"
        self._manifest = folder / "vector.manifest"
        self._federation = federation
        self.vector_file, self._spare = vector_files(folder)

    def memory(self) -> SiloMemory:
        """Raises PolicyRefusal, under the rule `masking_memory`, where it was lost, damaged or went back."""
        with alone(self._root):
            memory, known = self._read()
            self._check(memory, known)
        return memory or SiloMemory()

    def remember(self, memory: SiloMemory) -> None:
        """The next change of the memory. Raises as `memory` does, and PolicyRefusal for what does not follow what is
        there."""
        with alone(self._root):
            before, known = self._whole()
            if memory == before:
                return
            if memory.sequence != before.sequence + 1:
                raise lost(
                    f"masking/memory was changed by somebody else: it is of change {before.sequence}, what this "
                    f"process was to remember of change {memory.sequence}"
                )
            self._write(memory, known)
            self._lineages.mark(memory)

    def saw(self, bundle: PlanBundle, model: Digest, number: int | None = None) -> None:
        """Raises as `memory` does, and as `Lineages.saw`."""
        self._note(lambda: self._lineages.saw(bundle, model, number))

    def forgot(self, forgotten: Forgotten) -> None:
        """Raises as `memory` does."""
        self._note(lambda: self._lineages.note(forgotten))

    def check_groups(self, changes: int) -> None:
        """Raise PolicyRefusal, under the same rule, unless a release-groups.json of so many changes is the newest that
        there was."""
        try:
            self._lineages.check_groups(changes)
        except ConfigurationError as error:
            raise lost(str(error)) from error

    def note_groups(self, note: GroupsNote) -> None:
        """Raises as `memory` does."""
        self._note(lambda: self._lineages.hold(note))

    def note_pins(self, changes: int) -> None:
        """Raises as `memory` does."""
        self._note(lambda: self._lineages.hold_pins(changes))

    def check(self) -> None:
        """Raise as `memory` does, also where release-groups.json or peers.json was lost, damaged or went back."""
        with alone(self._root):
            self.memory()
            try:
                self._lineages.check_groups(changes_of(self._groups, self._seal))
                self._lineages.check_pins(pins_file.changes_of(self._pins, self._seal))
            except ConfigurationError as error:
                raise lost(str(error)) from error

    def problem(self) -> PolicyRefusal | None:
        """Why this silo takes no masked round."""
        try:
            self.check()
        except PolicyRefusal as refusal:
            return refusal
        return None

    def reset(self, *, groups_as_held: bool = False) -> SiloMemory:
        """Take what is left of memory, lineages, release groups and pins for all there was, by word of people.

        What any knows of is answered. Of a file that nothing proves to be this silo's newest, what people approved is
        dropped. `groups_as_held`: people say that the release groups that are left are the newest, whatever number is
        noted.
        """
        with alone(self._root):
            left, known = self._left()
            groups = take_over(
                self._groups,
                self._federation,
                self._seal,
                self._lineages.groups(),
                proven=self._groups_proven(known),
                as_held=groups_as_held,
            )
            pins = pins_file.take_over(
                self._pins,
                self._federation,
                self._silo,
                self._seal,
                self._lineages.pins(),
                proven=self._pins_proven(known),
            )
            memory, known = self._lineages.reset(left, known, groups, pins)
            self.erase()  # an attempt under way was begun under the memory that is gone
            self._write(memory, known)
        return memory

    def doubts(self) -> tuple[str, ...]:
        """What people have to know before they take over what is left: what nothing proves, and what comes of it."""
        with alone(self._root):
            _, known = self._left()
            groups = left_of(self._groups, self._federation, self._seal)
            noted = max(self._lineages.groups().number, groups.lost)
            found = []
            if is_there(self._lineages.path) and not self._lineages.is_proven(known):
                rounds = ", ".join(f"{at} of plan {plan}" for plan, at in self._lineages.said()[:_SHOWN]) or "none"
                found.append(
                    f"nothing proves what lineages.json says, which counts from then on: last rounds {rounds}, "
                    f"release groups {noted}"
                )
            if noted > max(groups.held, 1):  # 1: any will do
                found.append(
                    f"release groups {groups.held or 'none'} are here and number {noted} is noted: until groups "
                    f"{noted} are offered this silo masks nothing; where people know that there never were such, "
                    f"`{RESET}` takes {AS_HELD}"
                )
            if not groups.ours:
                found.append(
                    "nothing proves what release-groups.json says, which is dropped: links are taken again when "
                    "they are offered, with the signatures that they need; approve again what `silo-agent groups "
                    "show` asks for"
                )
            elif groups.approvals and not self._groups_proven(known):
                found.append(
                    "nothing proves what release-groups.json says of people's approvals, which are dropped: approve "
                    "again what `silo-agent groups show` asks for"
                )
            if not self._pins_proven(known):
                found.append(
                    "nothing proves what peers.json says, which counts from then on, and no key is taken on first "
                    "use any more: compare each key of `silo-agent trust list` with that silo's people before the "
                    "agent is started"
                )
        return tuple(found)

    def groups_short(self) -> bool:
        """Whether older release groups are here than those whose number is noted, so that none is masked under."""
        left = left_of(self._groups, self._federation, self._seal)
        return max(left.held, 1) < max(self._lineages.groups().number, left.lost)

    def _groups_proven(self, known: int) -> bool:
        """Whether this silo wrote release-groups.json, and nothing newer. `known` is what masking/memory knows of
        lineages.json."""
        return self._lineages.is_proven(known) and self._holds(
            lambda: self._lineages.check_groups(changes_of(self._groups, self._seal))
        )

    def _pins_proven(self, known: int) -> bool:
        """As `_groups_proven`, of peers.json; also where none was ever written."""
        if not is_there(self._pins) and not self._lineages.pins():
            return True
        return self._lineages.is_proven(known) and self._holds(
            lambda: self._lineages.check_pins(pins_file.changes_of(self._pins, self._seal))
        )

    def _holds(self, check: Callable[[], None]) -> bool:
        try:
            check()
        except (ConfigurationError, PolicyRefusal):
            return False
        return True

    def _read(self) -> tuple[SiloMemory | None, int]:
        """The memory, and how many changes of lineages.json it knows of."""
        if not is_there(self._memory):
            return None, 0
        try:
            content = self._seal.opened(self._memory.name, read_private(self._memory))
            return memory_from_bytes(content), known_lineages(content)
        except (IntegrityError, MalformedMessage, ConfigurationError) as error:
            raise lost(f"masking/memory cannot be believed ({error})") from error

    def _left(self) -> tuple[SiloMemory, int]:
        """Whoever wrote it; an empty one where there is none that parses."""
        if not is_there(self._memory):
            return SiloMemory(), 0
        content = unsealed(read_private(self._memory))
        try:
            memory, known = memory_from_bytes(content), known_lineages(content)
        except MalformedMessage:
            return SiloMemory(), 0
        return (memory, known) if plausible(memory, known) else (SiloMemory(), 0)

    def _check(self, memory: SiloMemory | None, known: int) -> Behind:
        try:
            return self._lineages.check(memory, known)
        except ConfigurationError as error:
            raise lost(str(error)) from error

    def _whole(self) -> tuple[SiloMemory, int]:
        """As `_read`; where a kill left a note of the two behind, it is made up for."""
        memory, known = self._read()
        behind = self._check(memory, known)
        if memory is not None and behind.lineages:
            self._lineages.mark(memory)
        memory = memory or SiloMemory()
        if behind.memory:
            known += 1
            self._write(memory, known)
        return memory, known

    def _note(self, change: Callable[[], bool]) -> None:
        """`change` is of lineages.json, and tells whether it was one."""
        with alone(self._root):
            memory, known = self._whole()
            if change():
                self._write(memory, known + 1)

    def _write(self, memory: SiloMemory, known: int) -> None:
        content = memory_to_bytes(memory, lineages=known)
        write_private(self._memory, self._seal.sealed(self._memory.name, content))

    def events(self) -> tuple[Event, ...]:
        """Of the attempt under way; an event that a crash tore was followed by nothing, and is cut off.

        None of a journal that a crash left overwritten and not deleted: its attempt is over, and `erase` finishes it.
        """
        if not is_there(self._attempt):
            return ()
        data = memoryview(read_private(self._attempt))
        if not any(data[:_LENGTH_BYTES]):
            return ()
        found, at = [], 0
        while len(data) - at >= _LENGTH_BYTES:
            end = at + _LENGTH_BYTES + int.from_bytes(data[at : at + _LENGTH_BYTES], "little")
            if end > len(data):
                break
            try:
                found.append(event_from_bytes(bytes(data[at + _LENGTH_BYTES : end]), self._federation))
            except MalformedMessage as error:
                if end == len(data):
                    break
                raise IntegrityError(f"{self._attempt} was damaged ({error}): the attempt is forfeited") from error
            at = end
        if at < len(data):
            self._cut(at)
        return tuple(found)

    def append(self, event: Event) -> None:
        body = event_to_bytes(event)
        append_private(self._attempt, len(body).to_bytes(_LENGTH_BYTES, "little") + body)

    def new_vector_file(self) -> Path:
        """Where the vector of the attempt is to be written, over what is there: room that a file has already costs next
        to nothing."""
        if self._spare.exists() and not self.vector_file.exists():
            self._spare.replace(self.vector_file)
        return self.vector_file

    def keep_manifest(self, manifest: Manifest) -> None:
        """Of the masked vector."""
        write_private(self._manifest, manifest_to_wire(manifest).SerializeToString(deterministic=True))

    def manifest(self) -> Manifest:
        try:
            return manifest_from_wire(common_pb2.Manifest.FromString(read_private(self._manifest)))
        except (MalformedMessage, DecodeError) as error:
            raise IntegrityError(f"{self._manifest} does not parse ({error}): the attempt is forfeited") from error

    def erase(self) -> None:
        """Overwrite and delete all of the attempt but the spare; the memory stays.

        A disk that keeps old blocks keeps them all the same.
        """
        try:
            if is_there(self._attempt):
                descriptor = os.open(self._attempt, os.O_WRONLY | os.O_CLOEXEC)
                try:
                    write_at(descriptor, bytes(os.fstat(descriptor).st_size), 0)
                    os.fsync(descriptor)
                finally:
                    os.close(descriptor)
                self._attempt.unlink()
                sync_folder(self._attempt.parent)
            self._manifest.unlink(missing_ok=True)
            if self.vector_file.exists():
                self.vector_file.replace(self._spare)
        except OSError as error:
            raise StorageError(f"{self._attempt} cannot be erased: {error.strerror or error}") from error

    def _cut(self, size: int) -> None:
        try:
            os.truncate(self._attempt, size)
        except OSError as error:
            raise StorageError(f"{self._attempt} cannot be written: {error.strerror or error}") from error


def masking_journal(folder: SiloFolder, credentials: SiloCredentials) -> MaskingJournal:
    return MaskingJournal(folder.masking, credentials.federation, Seal(credentials.identity_key), credentials.silo)
