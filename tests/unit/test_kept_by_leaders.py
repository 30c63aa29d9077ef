"""Leaders that follow one another over one bucket, and go on when they were overtaken: what the present one has kept is
there for the next, whatever the others do and wherever the bucket fails.

Searched over: who acts, what it keeps, writes over or retires, when another one takes over, and which call of the
bucket is the last that comes through.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from obstore.store import MemoryStore

from lorica_security.errors import StorageError
from tests.unit.test_kept_files import BLOCK, BUNDLE_PATH, MODEL_PATH, STATE_PATH, VERDICTS_PATH, MemoryBucket, Place

PATHS = st.sampled_from([MODEL_PATH, STATE_PATH, BUNDLE_PATH, VERDICTS_PATH])
CONTENTS = st.builds(lambda letter, size: letter * size, st.sampled_from([b"a", b"b"]), st.integers(0, 3 * BLOCK))


class Failing(MemoryBucket):
    """`left` calls come through, and no more; None: all."""

    left: int | None = None

    def put(self, name: str, content: bytes | memoryview) -> None:
        self._count()
        super().put(name, content)

    def delete(self, names: Iterable[str]) -> None:
        self._count()
        super().delete(names)

    def _count(self) -> None:
        if self.left is not None:
            if self.left == 0:
                raise StorageError("the bucket is away")
            self.left -= 1


class Leaders(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.store = MemoryStore()
        self.places: list[Place] = []
        self.kept: dict[str, bytes] = {}
        """By the present leader itself, in its own term."""
        self.torn: set[str] = set()
        """Of which it is not known what the next one finds: a try of the present one's failed."""
        self.take_over()

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @property
    def present(self) -> Place:
        return self.places[-1]

    @rule()
    def take_over(self) -> None:
        term = len(self.places) + 1
        root = self.folder / f"of-{term}"
        root.mkdir()
        place = Place(root, self.store, term, bucket=Failing("s3://lorica/north/", "north/", self.store))
        before, torn = self.kept, self.torn
        place.settle()
        found = place.files()
        assert {path: found.get(path) for path in before if path not in torn} == {
            path: content for path, content in before.items() if path not in torn
        }
        self.places.append(place)
        self.kept, self.torn = {}, set()

    @rule(path=PATHS, content=CONTENTS, left=st.none() | st.integers(0, 4))
    def keep(self, path: str, content: bytes, left: int | None) -> None:
        if self._came_through(self.present, left, lambda: self.present.keep(path, content)):
            self.kept[path] = content
            self.torn.discard(path)
        else:
            # What it had kept is not written over before the new one's index is there.
            self.torn |= {path} if path not in self.kept else set()

    @rule(path=PATHS, left=st.none() | st.integers(0, 1))
    def retire(self, path: str, left: int | None) -> None:
        self.kept.pop(path, None)
        self.torn.add(path)
        self._came_through(self.present, left, lambda: self.present.kept.forget(self.present.root / path))

    @precondition(lambda self: len(self.places) > 1)
    @rule(data=st.data(), path=PATHS, content=CONTENTS, left=st.none() | st.integers(0, 4), retires=st.booleans())
    def go_on_overtaken(self, data: st.DataObject, path: str, content: bytes, left: int | None, retires: bool) -> None:
        stale = data.draw(st.sampled_from(self.places[:-1]))
        folder = stale.root / path.split("/")[0]
        self._came_through(
            stale, left, (lambda: stale.kept.forget(folder)) if retires else (lambda: stale.keep(path, content))
        )

    @staticmethod
    def _came_through(place: Place, left: int | None, act: Callable[[], None]) -> bool:
        assert isinstance(place.bucket, Failing)
        place.bucket.left = left
        try:
            act()
        except StorageError:
            return False
        finally:
            place.bucket.left = None
        return True

    @invariant()
    def nobody_has_what_is_of_a_later_term(self) -> None:
        names = self.present.objects
        assert all(int(name[1:11]) <= len(self.places) for name in names)


TestLeaders = Leaders.TestCase
TestLeaders.settings = settings(max_examples=40, stateful_step_count=10, deadline=None)
