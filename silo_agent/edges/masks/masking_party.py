"""Who this silo is in secure aggregation, whom it trusts and whom it is summed with, as its folder says when an order
comes."""

from collections.abc import Callable

from lorica_security.audit.entry import Event
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo.party import Party
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.messages import Mask


def party_of(
    folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy, log: AuditLog | None = None
) -> Callable[[Mask], Party]:
    """What `Masking` asks for with each order. A pin moves where the pinned key named a successor.

    What changes so is entered into `log`. A pin of first use counts where the policy still has that. It raises
    PolicyRefusal for a key that is not the pinned one, ConfigurationError for a damaged file of pins.
    """
    store = trust_store(folder, credentials, first_use=policy.rules.trust_on_first_use)
    chain = group_chain(folder, credentials, policy)

    def party(order: Mask) -> Party:
        if isinstance(order.message, Roster):
            known, successions = store.identities(), dict(order.successions)
            for silo, key in order.identities:
                if silo == credentials.silo or known.get(silo) == key:
                    continue  # the file of pins, a line for each of them, is read for those alone who changed
                store.follow(silo, key, successions.get(silo, ()))
                pinned = store.identities().get(silo)
                if log is not None and pinned is not None and pinned != known.get(silo):
                    log.append(
                        Event.PIN_ADDED, who=log.writer, silo=silo, key=public_key_bytes(key).hex(), how="succeeded"
                    )
        return Party(
            federation=credentials.federation,
            silo=credentials.silo,
            identity_key=credentials.identity_key,
            pinned={peer.silo: peer.key for peer in store.trusted()},
            demands=policy.demands(),
            link=chain.head,
            approved=chain.approved_groups,
            approved_atoms=chain.approved_atoms,
        )

    return party
