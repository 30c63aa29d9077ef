"""Who a silo is in secure aggregation, whom its people pinned, and what its policy demands of a cohort."""

from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_security.errors import PolicyRefusal
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.groups.release_groups import Group, Link, Promise, least_group
from lorica_security.secure_aggregation.messages import Identities
from lorica_security.secure_aggregation.parameters import LEAST_COHORT, Parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What this silo's own policy asks of a cohort; the coordinator can ask for more, never for less.

    `colluders` is how many members may work against it, whatever the size of the cohort: see `parameters`.
    `smallest_group` is of release groups, and of sets that sums can be subtracted down to.
    """

    min_cohort: int = LEAST_COHORT
    min_threshold: int = LEAST_COHORT
    min_survivors: int = LEAST_COHORT
    colluders: int = 0
    smallest_group: int = LEAST_COHORT

    @property
    def least_group(self) -> int:
        """The fewest silos of a release group; all colluders may sit in one."""
        return max(self.smallest_group, least_group(self.colluders))

    @property
    def promise(self) -> Promise:
        """What release groups have to promise, at least."""
        return Promise(colluders=self.colluders, smallest_group=self.least_group)

    def check(self, parameters: Parameters) -> None:
        """Raises PolicyRefusal, which names the rule."""
        for rule, offered, demanded in (
            ("min_cohort", parameters.cohort, max(self.min_cohort, LEAST_COHORT)),
            ("min_threshold", parameters.threshold, max(self.min_threshold, LEAST_COHORT)),
            ("min_survivors", parameters.min_survivors, max(self.min_survivors, LEAST_COHORT)),
            ("colluders", parameters.colluders, self.colluders),
        ):
            if offered < demanded:
                raise PolicyRefusal(rule, f"{rule} of this silo is {demanded}, the roster offers {offered}")


@dataclass(frozen=True, kw_only=True)
class Party:
    """Who this silo is, and whom its people pinned (itself need not be among them).

    `link` has the newest release groups that this silo holds. `approved` are smaller groups, and `approved_atoms`
    smaller sets that sums can be subtracted down to, that its people allowed.
    """

    federation: FederationName
    silo: SiloName
    identity_key: Ed25519PrivateKey
    pinned: Identities
    demands: Demands = Demands()
    link: Link | None = None
    approved: frozenset[Group] = frozenset()
    approved_atoms: frozenset[Group] = frozenset()

    @property
    def identities(self) -> Identities:
        return {**self.pinned, self.silo: self.identity_key.public_key()}

    @property
    def group_mates(self) -> frozenset[SiloName]:
        """The other silos of its release group."""
        group = None if self.link is None else self.link.partition.group_of(self.silo)
        return frozenset(group or ()) - {self.silo}
