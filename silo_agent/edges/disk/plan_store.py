"""Plan bundles on disk, by digest: with the round model, all that `ask` and a restarted agent need.

A plan that the policy refused is kept apart, so that people can look at it; the newest alone, or a coordinator that
offers plan after plan would fill the disk.

A file that does not parse may be a plan of another release, whose record people still want: it stays as
`DIGEST.plan.unread`, and the log names it.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lorica_security.errors import IntegrityError, LoricaError, MalformedMessage, StorageError
from lorica_security.host import files
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle


class PlanStore:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self, plan: Digest) -> PlanBundle | None:
        """The bundle, verified against its digest; None where it is missing or damaged, and must be fetched again."""
        return self._loaded(self._path(plan), plan) or self._loaded(self._refused_path(plan), plan)

    def save(self, bundle: PlanBundle) -> None:
        """Keep a plan that the policy allows; none is refused now."""
        files.write_private(self._path(bundle.plan.digest), bundle.encode())
        self._forget_refused()

    def keep_refused(self, bundle: PlanBundle) -> None:
        """Keep the plan that is offered now and that the policy refuses."""
        self._forget_refused(but=bundle.plan.digest)
        files.write_private(self._refused_path(bundle.plan.digest), bundle.encode())

    def refused(self) -> PlanBundle | None:
        """The plan that was offered last, if the policy refused it."""
        for path in self._folder.glob("*.refused"):
            if bundle := self._loaded(path, Digest(path.stem)):
                return bundle
        return None

    def bundles(self) -> Sequence[PlanBundle]:
        """All that are here and whole, the newest last."""
        newest: dict[Digest, float] = {}
        for path in (*self._folder.glob("*.plan"), *self._folder.glob("*.refused")):
            digest = Digest(path.stem)
            try:
                newest[digest] = max(path.stat().st_mtime, newest.get(digest, 0.0))
            except FileNotFoundError:
                continue  # the agent has just replaced it
        return [bundle for digest in sorted(newest, key=lambda it: newest[it]) if (bundle := self.load(digest))]

    def _loaded(self, path: Path, plan: Digest) -> PlanBundle | None:
        try:
            return PlanBundle.decode(path.read_bytes(), plan)
        except FileNotFoundError:
            return None
        except (IntegrityError, MalformedMessage) as error:
            _set_aside(path, error)
            return None
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror}") from error

    def _forget_refused(self, but: Digest | None = None) -> None:
        for path in self._folder.glob("*.refused"):
            if path.stem != but:
                path.unlink(missing_ok=True)

    def _path(self, plan: Digest) -> Path:
        return self._folder / f"{plan}.plan"

    def _refused_path(self, plan: Digest) -> Path:
        return self._folder / f"{plan}.refused"


def _set_aside(path: Path, error: LoricaError) -> None:
    import structlog  # brings asyncio, for which `status`, which reads plans too, is not to wait

    aside = path.with_name(f"{path.name}.unread")
    with suppress(FileNotFoundError):  # another process was first
        path.replace(aside)
        structlog.get_logger(__name__).warning("plan set aside", file=str(aside), detail=str(error))
