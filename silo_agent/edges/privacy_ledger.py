"""The silo's privacy ledger as its folder holds it, and the guard before it."""

import time

from security.privacy.ledger_file import PrivacyLedgerFile
from silo_agent.edges.round_journal import RoundJournal
from silo_agent.edges.silo_folder import SiloFolder
from silo_agent.policy import SiloPolicy
from silo_agent.service.privacy import PrivacyGuard


def guard_of(folder: SiloFolder, policy: SiloPolicy, journal: RoundJournal) -> PrivacyGuard:
    """Of the silo in `folder`, with the budget of its policy."""
    return PrivacyGuard(
        ledger=PrivacyLedgerFile(folder.privacy_ledger),
        heads=journal,
        budget=policy.budget,
        clock=time.time,
        where=str(folder.privacy_ledger),
    )
