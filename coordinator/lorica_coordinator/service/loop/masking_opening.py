"""How an attempt of secure aggregation begins: what the plan asks of it, and who is invited by which key."""

import secrets

from lorica_coordinator.rounds.effects import OpenMasking
from lorica_coordinator.rounds.events import MaskingOpened
from lorica_coordinator.service.plan_desk import PlanDesk
from lorica_coordinator.service.ports import RoundStore, Steady
from lorica_coordinator.service.release_groups import ReleaseGroups
from lorica_coordinator.service.threads import Threads
from lorica_security.identifiers import FederationName
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from lorica_security.secure_aggregation.coordinator.events import OpenAttempt
from lorica_security.secure_aggregation.parameters import Terms
from silo_wire.plans.masked_ranges import CLOSING_RANGES, ranges_of
from silo_wire.plans.noised_masks import noise_terms


async def masking_opened(
    command: OpenMasking,
    *,
    desk: PlanDesk,
    groups: ReleaseGroups,
    store: RoundStore,
    threads: Threads,
    steady: Steady,
) -> MaskingOpened:
    """The event that opens an attempt: its terms, and the identities of those who are invited. Raises LoricaError."""
    key = command.key
    opened = await desk.opened(key.plan)
    plan = opened.bundle.plan
    section = plan.aggregation
    enrolled = await threads.store(store.silos)
    allowed = [item.silo for item in enrolled if item.revoked_unix_s is None]
    await groups.propose_first(plan.semi_supervised.who_trains.kinds(allowed), colluders=section.colluders)
    attempt = Attempt(
        federation=FederationName(key.federation),
        plan=bytes.fromhex(key.plan),
        round=key.round,
        number=key.attempt,
        id=secrets.token_bytes(ATTEMPT_ID_BYTES),
    )
    terms = Terms(
        model=bytes.fromhex(command.model),
        ranges=CLOSING_RANGES if command.closing else ranges_of(opened.bundle),
        link=groups.require_head(colluders=section.colluders),
        min_cohort=plan.smallest_cohort,
        min_survivors=section.min_survivors,
        colluders=section.colluders,
        threshold=section.threshold or None,
        noise=noise_terms(plan),
    )
    return MaskingOpened(
        now=steady(),
        key=key,
        opening=OpenAttempt(attempt=attempt, terms=terms, invited=command.silos),
        identities=tuple(
            (item.silo, public_key_from_bytes(item.identity_public_key))
            for item in enrolled
            if item.silo in command.silos
        ),
        successions={
            item.silo: await threads.store(store.successions, item.silo)
            for item in enrolled
            if item.silo in command.silos
        },
    )
