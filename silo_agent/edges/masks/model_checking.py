"""One silo's checks of round models, put together: its keys, its pins, what it accepted, where proofs go."""

from collections.abc import Callable, Collection
from pathlib import Path

from lorica_security.errors import ConfigurationError, StateError
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.edges.masks.own_copies import OwnFiles
from silo_agent.edges.memory.accepted_models import AcceptedModels, keep_proof
from silo_agent.edges.memory.identity_succession import predecessors
from silo_agent.edges.memory.pins_file import How, PinnedPeer
from silo_agent.edges.memory.trust_store import TrustStore, trust_store
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.model_checks import CheckParty, EvidencePort, ModelChecks
from silo_wire.canonical import Digest
from silo_wire.checkable_round import FalseChunk, Proof
from silo_wire.codecs.evidence_codec import MAX_PROOF_BYTES, proof_from_bytes


def model_checks(
    folder: SiloFolder,
    credentials: SiloCredentials,
    policy: SiloPolicy,
    *,
    coordinator: EvidencePort,
    proves: Callable[[Proof, Path], None],
    goes_back: Callable[[Digest, Digest, int, int], None],
    checked: Callable[[int], None] = lambda chunks: None,
) -> ModelChecks:
    """As the silo's policy has it. `proves` is told of proofs and their files, `checked` how many chunks were found
    right; `goes_back` as `ModelChecks` has it.
    """
    return ModelChecks(
        policy.rules.verify,
        coordinator=coordinator,
        accepted=AcceptedModels(folder.accepted, credentials.federation, Seal(credentials.identity_key)),
        own=OwnFiles(folder),
        party=check_party_of(folder, credentials, policy),
        keep=lambda proof: proves(proof, keep_proof(folder.proofs, proof)),
        checked=checked,
        goes_back=goes_back,
    )


def check_party_of(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy) -> Callable[[], CheckParty]:
    """What `ModelChecks` asks for with each model: who signed evidence and verdicts, as of now. Raises as `party_of`.

    A pin of first use counts where the policy still has that, as it does in masks and release groups.
    """
    store = trust_store(folder, credentials, first_use=policy.rules.trust_on_first_use)
    return lambda: _party(folder, credentials, store, store.trusted(), policy.demands())


def examine(folder: SiloFolder, credentials: SiloCredentials, file: Path) -> FalseChunk:
    """What the proof in `file`, this silo's or another one's, proves of the coordinator, by the keys that are pinned
    here.

    Raises StateError where this silo has no such plan, ConfigurationError for a file that cannot be read, and as
    `examined` does.
    """
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_PROOF_BYTES + 1)
    except OSError as error:
        raise ConfigurationError(f"{file} cannot be read: {error.strerror or error}") from error
    from silo_wire.checked_chunk import StepRule, examined  # here, not above: it brings torch

    proof = proof_from_bytes(content, credentials.federation)
    evidence = proof.checkable.evidence
    plan = Digest(evidence.attempt.plan.hex())
    bundle = PlanStore(folder.plans).load(plan)
    if bundle is None:
        raise StateError(f"this silo has no plan {plan}: a proof is examined where its plan is")
    store = trust_store(folder, credentials)
    party = _party(folder, credentials, store, store.peers(), Demands())  # whoever found it may ask for less
    return examined(
        proof,
        StepRule.of(bundle),
        identities=party.identities_in(evidence),
        coordinator=party.coordinator,
        demands=party.demands,
    )


def _party(
    folder: SiloFolder, credentials: SiloCredentials, store: TrustStore, peers: Collection[PinnedPeer], demands: Demands
) -> CheckParty:
    before = [public_key_from_bytes(it.key) for it in reversed(predecessors(folder, credentials))]
    own = {credentials.silo: (credentials.identity_key.public_key(), *before)}
    return CheckParty(
        silo=credentials.silo,
        identity_key=credentials.identity_key,
        keys={**own, **{it.silo: (it.key, *it.predecessors) for it in peers}},
        by_hand=[it.silo for it in peers if it.how is How.ADDED],
        demands=demands,
        coordinator=credentials.coordinator_key,
        removed=store.removed_keys(),
    )
