"""One silo of a simulated federation: an agent's own parts on a folder of its own, enrolled without a network."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from prometheus_client import CollectorRegistry

from lorica.simulation.direct_coordinator import DirectCoordinator
from lorica.simulation.losses import LOSSES_FILE
from lorica.simulation.workers.worker_messages import WorkerSilo
from lorica_coordinator.service.federation import Federation
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from lorica_security.identity.endorsement import endorse_request
from lorica_security.identity.enrolment_token import decode
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes, public_key_from_bytes
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import TrustBundle
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.console.metrics import SiloMetrics
from silo_agent.edges.console.observer import SiloObserver
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import GroupsWire, ReleaseGroups, group_chain
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials, store_credentials
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.memory.masking_journal import masking_journal
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.edges.wire.backoff import Backoff
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.effects import JournalActivity
from silo_agent.service.agent import AgentService
from silo_agent.service.group_keeper import GroupKeeper
from silo_agent.service.masking import Masking
from silo_agent.service.ports import TrainerPort
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.plans.plan import PlanBundle

_VALID_S = 3600


class Notes:
    """`DisplayPort` of an agent that nobody watches: it keeps why work failed last, for which a silo has no log of its
    own here."""

    failure: str = ""

    def activity(self, activity: JournalActivity) -> None:
        return

    def progress(self, fraction: float) -> None:
        return

    def note(self, event: str, **fields: object) -> None:
        if event == "work-failed":
            self.failure = str(fields["detail"])


async def enrolled(
    service: Federation, federation: FederationName, silo: SiloName, folder: SiloFolder
) -> SiloCredentials:
    """The credentials in `folder`, else new ones, by an invitation of this very moment."""
    if folder.enrolment.exists():
        return load_credentials(folder)
    token, _ = await service.enrolment.invite(silo, _VALID_S)
    tls_key, identity_key = new_tls_key(), new_identity_key()
    identity = Identity(federation, Role.SILO, silo)
    request = certificate_request(tls_key, identity)
    issued = await service.enrolment.enrol(
        silo,
        token_secret=decode(token).secret,
        csr_der=request,
        identity_public_key=public_key_bytes(identity_key.public_key()),
        identity_endorsement=endorse_request(identity_key, request=request, identity=identity),
        trust=service.trust_digest,
    )
    credentials = SiloCredentials(
        federation=federation,
        silo=silo,
        address="localhost:7443",  # which nobody dials
        identity_key=identity_key,
        tls_key=tls_key,
        certificate=parse_certificate(issued.certificate_pem),
        trust=TrustBundle.from_pem(issued.trust_bundle_pem),
        coordinator_key=public_key_from_bytes(issued.coordinator_identity_key),
    )
    store_credentials(folder, credentials)
    return credentials


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSilo(AbstractContextManager["SimulatedSilo"]):
    folder: SiloFolder
    settings: Settings
    policy: SiloPolicy
    credentials: SiloCredentials
    journal: RoundJournal
    notes: Notes = field(default_factory=Notes)

    @classmethod
    def opened(cls, folder: SiloFolder, settings: Settings, credentials: SiloCredentials) -> Self:
        return cls(
            folder=folder,
            settings=settings,
            policy=SiloPolicy(
                rules=settings.policy,
                silo=credentials.silo,
                processes=settings.training.processes,
                rank_interface=settings.training.rank_interface,
                sharded=settings.training.sharded,
            ),
            credentials=credentials,
            journal=RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo, synced=False),
        )

    def __exit__(self, *_: object) -> None:
        self.journal.close()

    @property
    def scratch(self) -> Path:
        """For a database that comes compressed."""
        return self.folder.root / "scratch"

    @property
    def work(self) -> WorkerSilo:
        return WorkerSilo(
            settings=self.settings, policy=self.policy, scratch=self.scratch, losses=self.folder.root / LOSSES_FILE
        )

    def pin(self, others: "list[SiloCredentials]") -> None:
        """Trust the other silos of this simulation, as their people would by telephone."""
        own = self.credentials.silo
        keys = {other.silo: other.identity_key.public_key() for other in others if other.silo != own}
        trust_store(self.folder, self.credentials).add_all(keys)

    def groups(self, coordinator: GroupsWire) -> GroupKeeper:
        return GroupKeeper(
            ReleaseGroups(
                group_chain(self.folder, self.credentials, self.policy),
                trust_store(self.folder, self.credentials),
                self.credentials,
                client=coordinator,
            ),
            backoff=Backoff(),
            told=self.notes.note,
            refused=lambda _rule, _detail: None,
        )

    def allow_groups(self) -> bool:
        """What a plan's `colluders` make its first release groups promise is allowed, as people would who run that
        plan; if it waits."""
        chain = group_chain(self.folder, self.credentials, self.policy)
        standing = chain.standing()
        if standing.proposed is None or standing.objection is None:
            return False
        chain.approve(standing.proposed.link.digest.hex())
        return True

    def agent(self, coordinator: DirectCoordinator, trainer: TrainerPort) -> AgentService:
        display = self.notes
        return AgentService(
            federation=self.credentials.federation,
            coordinator=coordinator,
            journal=self.journal,
            plans=PlanStore(self.folder.plans),
            gate=self.policy,
            trainer=trainer,
            masking=Masking(
                journal=masking_journal(self.folder, self.credentials),
                coordinator=coordinator,
                party=party_of(self.folder, self.credentials, self.policy),
                newer_groups=self.groups(coordinator).sync,
                unmasks=lambda *_told: None,  # nobody's audit log: this is no federation
            ),
            checks=_Unchecked(),
            privacy=guard_of(self.folder, self.credentials, self.policy, self.journal),
            display=display,
            observer=SiloObserver(journal=self.journal, metrics=SiloMetrics(CollectorRegistry()), display=display),
            holds_answers=False,
        )


class _Unchecked:
    """The coordinator is in this very process: nobody could check it."""

    async def require(self, bundle: PlanBundle, model: Digest, /) -> None:
        return


def settings_of(data: Path, *, device: str, threads: int) -> Settings:
    """Those of `data`'s silo: silo.toml beside its data, if there is one, with this machine's device."""
    path = data / "silo.toml"
    settings = Settings.read(path) if path.exists() else Settings()
    return settings.model_copy(
        update={
            "data": settings.data.model_copy(update={"folder": str(data.absolute())}),
            "training": settings.training.model_copy(update={"device": device, "threads": threads}),
        }
    )
