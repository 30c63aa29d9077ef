"""What the coordinator has released under silo-level privacy, in `state`/privacy, and the secret that its noise is made
from.

    root      32 bytes from the operating system, private, made once: the noise of every release is expanded from it
    ledger    one line a release (security/lorica_security/privacy/ledger.py), of all plans
    closed    plans of which no further sum is released, one digest a line: the ledger came from a backup and may have
              forgotten some

Where the state is in PostgreSQL they are rows there (edges/database/postgresql/release_rows.py), the root sealed.

Noise is bound to the set of updates that it covers. Aggregation that is repeated after a crash gives the same bits, and
is one release; another set of updates, be it of the same attempt, has other noise and is another one. An entry is
durable before anything that it stands for is stored.
"""

import secrets
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from lorica_coordinator.edges.sums.kept_releases import FolderReleases, KeptReleases
from lorica_coordinator.service.unusable import BudgetSpent
from lorica_security.errors import IntegrityError
from lorica_security.identifiers import SiloName
from lorica_security.noise.noise_streams import bound_key
from lorica_security.noise.random_words import KEY_BYTES
from lorica_security.privacy.accounting import GaussianRelease, epsilon_of
from lorica_security.privacy.ledger import Entry, next_entry, releases_of
from silo_wire.canonical import Digest, canonical_json, digest_of
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import Plan
from silo_wire.plans.privacy import PrivacySection


class ReleaseLedger:
    """For one process at a time, which holds the coordinator's lock. Raises StorageError, IntegrityError naming the
    file."""

    def __init__(
        self,
        folder: Path,
        *,
        clock: Callable[[], float] = time.time,
        tell: Callable[[Entry], None] = lambda entry: None,
        is_told: Callable[[Entry], bool] = lambda entry: True,
        kept: KeptReleases | None = None,
    ) -> None:
        """`clock` gives seconds since 1970; `tell` hears of each entry before it is written, and `is_told` says whether
        it did; `kept`: where entries are, else in the folder."""
        self.folder, self._clock, self._tell = folder, clock, tell
        self._is_told = is_told
        self.kept = FolderReleases(folder) if kept is None else kept

    def noise_key(self, statement: bytes) -> bytes:
        """The key of the noise of the release that `statement` (`release_statement`) describes."""
        return bound_key(self._root(), statement)

    def enter(self, key: RoundKey, statement: bytes, section: PrivacySection) -> bool:
        """Enter one release of a plan with this `[privacy]`, unless it was entered before; whether a further one is
        within its epsilon.

        When this returns the model that comes of it may be stored. Raises BudgetSpent where the release would take the
        plan beyond its epsilon: nothing is entered then. Raises IntegrityError for an entry of it that nobody told of.
        """
        if key.plan in self.closed():
            raise BudgetSpent(
                f"plan {key.plan[:16]} is closed: the ledger of its releases came from a backup, which cannot tell "
                "how many were made since; it ends with the model so far, and a plan of another name may begin with "
                "that"
            )
        ((_, release),) = section.releases_of_round(weighted=False)
        subject = digest_of(statement)
        entries = self.kept.entries()
        of_plan = [entry for entry in entries if entry.plan == key.plan]
        made = releases_of(of_plan)
        found = next((entry for entry in of_plan if entry.subject == subject), None)
        if found is not None and not self._is_told(found):
            raise IntegrityError(
                f"the ledger of releases has this sum as entry {found.sequence}, and the audit log does not tell of "
                "it: somebody else put it in, and what the sum costs would be forgotten with it; put back a state of "
                "before, and ask who could write it"
            )
        if found is None:
            made.append(release)
            cost = _cost(made, section)
            if cost > section.target_epsilon:
                raise BudgetSpent(
                    f"another sum would take the plan's releases to epsilon {cost:.3g}, target_epsilon is "
                    f"{section.target_epsilon:g}: {len(of_plan)} were released, and the plan ends with the model so far"
                )
            entry = next_entry(entries, key, "delta", release, at=int(self._clock()), subject=subject)
            self._tell(entry)
            self.kept.append([entry])
        return _cost([*made, release], section) <= section.target_epsilon

    def spent(self, plan: Plan) -> float:
        """Epsilon of what was released of this plan so far."""
        entries = [entry for entry in self.kept.entries() if entry.plan == plan.digest]
        return _cost(releases_of(entries), plan.privacy)

    def closed(self) -> frozenset[Digest]:
        """The plans of which no further sum is released."""
        return self.kept.closed()

    def close(self, plans: Iterable[Digest]) -> None:
        """From now on nothing more is released of `plans`; durable when this returns."""
        self.kept.close(plans)

    def _root(self) -> bytes:
        root = self.kept.root()
        if root is not None:
            return root
        if self.kept.began():
            raise IntegrityError(
                f"{self.folder / 'root'} is missing beside a ledger of releases: noise that was made from it could not "
                "be made again; restore the folder from a backup"
            )
        self.kept.keep_root(secrets.token_bytes(KEY_BYTES))
        return self._root()


def release_statement(key: RoundKey, base_model: Digest, parts: Iterable[tuple[SiloName, Digest, float]]) -> bytes:
    """What noise is bound to: the round, and each update of the sum by silo, manifest digest and factor, in order of
    silo name."""
    listed = [[silo, update, factor.hex()] for silo, update, factor in sorted(parts)]
    return canonical_json(["noised-sum", key.federation, key.plan, key.round, base_model, listed])


def _cost(releases: list[GaussianRelease], section: PrivacySection) -> float:
    return epsilon_of(releases, dp_delta=section.dp_delta, relation=section.neighbouring_relation)
