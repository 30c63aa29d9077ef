"""What private rounds cost: countersigned, looked at and spent before anything leaves."""

from silo_agent.service.ports import CoordinatorPort, ObserverPort
from silo_agent.service.privacy import PrivacyGuard
from silo_agent.service.work.worker_thread import WorkerThread
from silo_wire.messages import RoundKey
from silo_wire.plans.plan import PlanBundle


class PaidReleases:
    """Of one silo; `privacy` keeps its ledger, the coordinator countersigns how far that is."""

    def __init__(
        self, privacy: PrivacyGuard, coordinator: CoordinatorPort, observer: ObserverPort, thread: WorkerThread
    ) -> None:
        self._privacy, self._coordinator = privacy, coordinator
        self._observer, self._thread = observer, thread

    async def afford(self, bundle: PlanBundle) -> None:
        """Raise IntegrityError for a ledger that went back, BudgetSpent where a round of this plan would cost too
        much."""
        releases, unit = bundle.plan.releases_of_round, bundle.plan.privacy.unit_field
        await self.countersign()
        await self._thread.run(lambda _cancelled: self._privacy.check(releases, unit=unit))
        await self.tell_spent()

    async def admit(self, bundle: PlanBundle) -> None:
        """As PrivacyGuard.admit has it, for a plan's releases."""
        releases, unit = bundle.plan.releases_of_round, bundle.plan.privacy.unit_field
        await self._thread.run(lambda _cancelled: self._privacy.admit(releases, unit=unit))

    async def spend(self, key: RoundKey, bundle: PlanBundle) -> float:
        """Enter what this attempt releases; what this silo has spent by then."""
        releases, unit = bundle.plan.releases_of_round, bundle.plan.privacy.unit_field
        await self._thread.run(lambda _cancelled: self._privacy.spend(key, releases, unit=unit))
        return await self.tell_spent()

    async def countersign(self) -> None:
        """Raises IntegrityError for a ledger that went back."""
        await self._privacy.countersign(self._coordinator)

    async def tell_spent(self) -> float:
        spent, alone = await self._thread.run(lambda _cancelled: self._spent())
        self._observer.epsilon(spent=spent, allowed=self._privacy.budget.epsilon)
        self._observer.epsilon_alone(spent=alone, allowed=self._privacy.budget.alone)
        return spent

    def _spent(self) -> tuple[float, float]:
        counted = self._privacy.counted()
        return counted.epsilon(), counted.epsilon_alone() if counted.joint() else 0.0
