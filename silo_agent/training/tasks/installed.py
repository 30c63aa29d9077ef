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
from typing import Annotated, Final

from blake3 import blake3
from pydantic import AfterValidator, TypeAdapter, ValidationError

from lorica_security.errors import DataError, PolicyRefusal
from silo_agent.training.tasks.text_task import TextTask
from silo_wire.plans.sections.task import ScoreName, TaskSection

GROUP: Final = "lorica.tasks"


def _not_taken(score: str) -> str:
    if score == "questions":  # which stands beside scores in logs
        raise ValueError("is taken")
    return score


_MOST_BYTES: Final = 64 << 20
_SCORE: Final[TypeAdapter[str]] = TypeAdapter(Annotated[ScoreName, AfterValidator(_not_taken)])


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
        for score in task.scores:
            try:
                _SCORE.validate_python(score)
            except ValidationError as error:
                raise DataError(
                    f"task {self.name!r} has a score {score!r}: its package is to name it with a-z, 0-9 and _, 40 at "
                    "most, and not `questions`"
                ) from error
        return task


def installed_tasks() -> Iterator[InstalledTask | DataError]:
    """In the order of their names; in the place of one whose code cannot be read, why."""
    for entry in sorted(entry_points(group=GROUP), key=lambda one: one.name):
        try:
            yield _found(entry)
        except DataError as error:
            yield error


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
    if (found.version, found.digest) != (section.version, section.digest):
        raise PolicyRefusal(
            "tasks",
            f"the plan wants task {section.kind} {section.version} with digest {section.digest[:16]}, and installed is "
            f"{found.version} with {found.digest[:16]}: install that version, or have the operator name this one as "
            "`silo-agent tasks` prints it",
        )
    return found


def _found(entry: EntryPoint) -> InstalledTask:
    try:
        version, digest = "" if entry.dist is None else str(entry.dist.version or ""), _digest(entry)
        TaskSection(kind=entry.name, version=version, digest=digest)
    except ValidationError as error:
        raise DataError(
            f"task {entry.name!r} {version!r} has a name or a version that no plan can have: correct its package"
        ) from error
    except DataError:
        raise
    except Exception as error:  # whatever a name, a path or a loader of others makes of it
        raise DataError(
            f"task {entry.name!r} cannot be looked at ({error!r}): correct or remove its package"
        ) from error
    return InstalledTask(entry.name, version, digest, entry)


def _digest(entry: EntryPoint) -> str:
    """Of the object's name, and of each file's name and content."""
    top = entry.module.partition(".")[0]
    spec = find_spec(top)
    places = [] if spec is None else [Path(place) for place in spec.submodule_search_locations or ()]
    if not places and spec is not None and spec.origin is not None:
        places = [Path(spec.origin)]
    if len(places) != 1 or not places[0].exists():
        raise DataError(f"task {entry.name!r} is of package {top}, which is not a folder of files: install it as one")
    hasher, left, files = blake3(), _MOST_BYTES, 0
    _part(hasher, entry.value.encode())
    for path, name in _files(places[0], top):
        try:
            left -= path.stat().st_size
            if left < 0:
                raise DataError(
                    f"package {top} of task {entry.name!r} has more than {_MOST_BYTES:,} bytes: make it smaller"
                )
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror}): install {top} again") from error
        _part(hasher, name.encode())
        _part(hasher, content)
        files += 1
    if not files:
        raise DataError(f"package {top} of task {entry.name!r} has no file: install it again")
    return hasher.hexdigest()


def _part(hasher: blake3, content: bytes) -> None:
    hasher.update(len(content).to_bytes(8, "big") + content)


def _files(place: Path, top: str) -> Iterator[tuple[Path, str]]:
    """In the order of their names; compiled modules that lie where Python puts them are left out. Raises DataError for
    a link, behind which anything may lie another day."""
    for path in [place] if place.is_file() else sorted(place.rglob("*")):
        name = path.name if path == place else path.relative_to(place).as_posix()
        if path.is_symlink():
            raise DataError(f"{path} of package {top} is a link: install the package as files")
        if path.is_file() and not (path.suffix == ".pyc" and path.parent.name == "__pycache__"):
            yield path, name
