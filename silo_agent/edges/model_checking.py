"""One silo's checks of round models, put together: its keys, its pins, what it accepted, where proofs go."""

from collections.abc import Callable
from pathlib import Path

from security.pki.identity_key import public_key_from_bytes
from silo_agent.edges.accepted_models import AcceptedModels, keep_proof
from silo_agent.edges.identity_succession import predecessors
from silo_agent.edges.key_store import SiloCredentials
from silo_agent.edges.silo_folder import SiloFolder
from silo_agent.edges.trust_store import How, trust_store
from silo_agent.policy import SiloPolicy
from silo_agent.service.model_checks import CheckParty, EvidencePort, ModelChecks
from silo_wire.checked_chunk import Proof


def model_checks(
    folder: SiloFolder,
    credentials: SiloCredentials,
    policy: SiloPolicy,
    *,
    coordinator: EvidencePort,
    proves: Callable[[Proof, Path], None],
    checked: Callable[[int], None] = lambda chunks: None,
) -> ModelChecks:
    """As the silo's policy has it. `proves` is told of proofs and their files, `checked` how many chunks were found right."""
    return ModelChecks(
        policy.rules.verify,
        coordinator=coordinator,
        accepted=AcceptedModels(folder.accepted, credentials.federation),
        party=check_party_of(folder, credentials, policy),
        keep=lambda proof: proves(proof, keep_proof(folder.proofs, proof)),
        checked=checked,
    )


def check_party_of(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy) -> Callable[[], CheckParty]:
    """What `ModelChecks` asks for with each model: who signed evidence and verdicts, as of now. Raises as `party_of`."""
    store = trust_store(folder, credentials)

    def party() -> CheckParty:
        peers = store.peers()
        before = [public_key_from_bytes(it.key) for it in reversed(predecessors(folder))]
        own = [credentials.identity_key.public_key(), *before]
        return CheckParty(
            silo=credentials.silo,
            identity_key=credentials.identity_key,
            keys={
                credentials.silo: own,
                **{it.silo: (it.key, *(() if it.predecessor is None else (it.predecessor,))) for it in peers},
            },
            by_hand={it.silo: it.key for it in peers if it.how is How.ADDED},
            demands=policy.demands(),
            coordinator=credentials.coordinator_key,
        )

    return party
