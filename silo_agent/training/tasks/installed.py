"""Tasks that a silo's people installed: entry points of group `lorica.tasks`, each in a package of its own.

No code comes from a coordinator. A plan names a task, the version of its package and the digest of its code; a silo
runs it where [policy] tasks of its own names the task, and where what is installed has that digest. The digest is of
every file in the folder of the task's top-level package, so that nothing else of the environment is covered: above all
not what that package itself imports from others.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from blake3 import blake3

from lorica_security.errors import DataError, PolicyRefusal
from silo_agent.training.tasks.text_task import TextTask
from silo_wire.plans.sections.task import TaskSection

GROUP: Final = "lorica.tasks"
_MOST_BYTES: Final = 64 << 20
_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class InstalledTask:
    """What is there under a name; its code was not run for this."""

    name: str
    version: str
    digest: str
    entry: EntryPoint

    def task(self) -> TextTask:
        """Run the package's code; raises DataError where what it names is no task of that name."""
        try:
            task = self.entry.load()
        except Exception as error:  # of code that is not ours
            raise DataError(
                f"task {self.name!r} cannot be loaded ({error!r}): correct or remove its package"
            ) from error
        if not isinstance(task, TextTask) or task.name != self.name or not task.scores:
            raise DataError(
                f"entry point {self.entry.value} is no lorica.TextTask of name {self.name!r} with a score: correct its "
                "package"
            )
        return task


def installed_tasks() -> Iterator[InstalledTask]:
    """In the order of their names; raises DataError for one whose code cannot be read."""
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        yield _found(entry)


def installed_task(name: str) -> InstalledTask:
    """Raises DataError where none of this name is installed, or two are."""
    found = list(entry_points(group=GROUP, name=name))
    if len(found) != 1:
        raise DataError(
            f"task {name!r} is installed {len(found)} times: "
            + ("remove all but one of its packages" if found else "install its package, or approve no such plan")
        )
    return _found(found[0])


def require_as_planned(section: TaskSection) -> InstalledTask:
    """The task of a plan, whose code was not run for this; raises PolicyRefusal where other code is installed,
    DataError where none is."""
    found = installed_task(section.kind)
    if found.digest != section.digest:
        raise PolicyRefusal(
            "tasks",
            f"the plan wants task {section.kind} {section.version} with digest {section.digest[:16]}, and installed is "
            f"{found.version} with {found.digest[:16]}: install that version, or have the operator name this one as "
            "`silo-agent tasks` prints it",
        )
    return found


def _found(entry: EntryPoint) -> InstalledTask:
    version = "" if entry.dist is None else entry.dist.version
    return InstalledTask(entry.name, version, _digest(entry), entry)


def _digest(entry: EntryPoint) -> str:
    top = entry.module.partition(".")[0]
    spec = find_spec(top)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    if not places and spec is not None and spec.origin is not None:
        places = [Path(spec.origin)]
    if len(places) != 1:
        raise DataError(f"task {entry.name!r} is of package {top}, which is not in one place: install it again")
    hasher, left = blake3(), _MOST_BYTES
    for path, name in _files(places[0]):
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): install {top} again") from error
        left -= len(content)
        if left < 0:
            raise DataError(
                f"package {top} of task {entry.name!r} has more than {_MOST_BYTES:,} bytes: make it smaller"
            )
        for part in (name.encode(), content):
            hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.hexdigest()


def _files(place: Path) -> Iterator[tuple[Path, str]]:
    """In the order of their names, links followed, compiled modules left out."""
    if place.is_file():
        yield place, place.name
        return
    for path in sorted(place.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield path, path.relative_to(place).as_posix()
