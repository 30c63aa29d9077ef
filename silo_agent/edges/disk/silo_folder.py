"""What lies where in a silo's folder (0700). `enrolment.json` is written last: with it, the silo is enrolled."""

import os
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_data_path

from lorica_security.errors import ConfigurationError
from lorica_security.host.files import make_private_folder

ENVIRONMENT_VARIABLE = "LORICA_SILO_DIR"


@dataclass(frozen=True, slots=True)
class SiloFolder:
    root: Path

    @property
    def enrolment(self) -> Path:
        return self.root / "enrolment.json"

    @property
    def begun(self) -> Path:
        """There while an enrolment that the coordinator has granted is written, before enrolment.json is there."""
        return self.root / ".enrolment"

    @property
    def identity_key(self) -> Path:
        return self.root / "identity.key"

    @property
    def next_identity_key(self) -> Path:
        """A successor that the coordinator may not know yet; there while `silo-agent identity rotate` is not
        finished."""
        return self.root / "identity.next"

    @property
    def predecessors(self) -> Path:
        """The identity keys that this silo had before, and how each named its successor."""
        return self.root / "predecessors.json"

    @property
    def tls(self) -> Path:
        """TLS key, certificate and trust bundle in one file: each renewal replaces them together."""
        return self.root / "tls.pem"

    @property
    def private_keys(self) -> tuple[Path, Path]:
        """The files that hold one."""
        return self.identity_key, self.tls

    @property
    def journal(self) -> Path:
        return self.root / "journal.sqlite"

    @property
    def lock(self) -> Path:
        return self.root / "agent.lock"

    @property
    def settings(self) -> Path:
        return self.root / "silo.toml"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def updates(self) -> Path:
        """What training makes: an update on its way out, and the checkpoint of a training under way."""
        return self.root / "updates"

    @property
    def ranks(self) -> Path:
        """What goes between the agent and the processes that it trains in, while there are any."""
        return self.root / "ranks"

    @property
    def personal(self) -> Path:
        """Models of this silo's own and their scores: none of it leaves."""
        return self.root / "personal"

    @property
    def answers_right(self) -> Path:
        """How many answers of the global model are right here, in parts that do not leave."""
        return self.root / "answers-right.json"

    @property
    def plans(self) -> Path:
        return self.root / "plans"

    @property
    def peers(self) -> Path:
        """The identity keys of other silos that are pinned here."""
        return self.root / "peers.json"

    @property
    def audit(self) -> Path:
        """What this silo did, refused and sent: an audit log."""
        return self.root / "audit"

    @property
    def accepted(self) -> Path:
        """The round models that this silo accepted under masks."""
        return self.root / "accepted.json"

    @property
    def proofs(self) -> Path:
        """That the coordinator handed out false models: nothing in it is ever deleted."""
        return self.root / "proofs"

    @property
    def privacy_ledger(self) -> Path:
        return self.root / "privacy" / "ledger"

    @property
    def privacy_receipt(self) -> Path:
        """What the coordinator signed of the ledger last."""
        return self.root / "privacy" / "receipt.json"

    @property
    def privacy_sharing(self) -> Path:
        """Which registry this silo counted in last (shared_budget.py)."""
        return self.root / "privacy" / "shared-budget"

    @property
    def masking(self) -> Path:
        """What secure aggregation must not forget, or must forget in time."""
        return self.root / "masking"

    @property
    def release_groups(self) -> Path:
        """Which silos this one is summed with under masks: the newest link of their chain, and what it signed."""
        return self.root / "release-groups.json"

    @property
    def lineages(self) -> Path:
        """The plans that this silo has masked under, and their models."""
        return self.root / "lineages.json"

    @property
    def own_entropy(self) -> Path:
        """A secret: what the order of data and dropout come from under masks."""
        return self.root / "training.entropy"

    @property
    def approvals(self) -> Path:
        """The plans that people approved by command."""
        return self.root / "approvals.json"

    @property
    def sealed(self) -> tuple[Path, ...]:
        """The files that hold for nobody but who has the identity key."""
        return (
            self.masking / "memory",
            self.lineages,
            self.release_groups,
            self.accepted,
            self.approvals,
            self.peers,
            self.predecessors,
        )

    def make(self) -> None:
        """Create the folder and its parts; raises ConfigurationError when others can look into one of them."""
        for folder in (self.root, self.models, self.updates, self.plans):
            make_private_folder(folder)

    def require_enrolled(self) -> None:
        """Raises ConfigurationError unless an enrolment was completed here."""
        if not self.enrolment.is_file():
            raise ConfigurationError(
                f"{self.root} holds no enrolled silo: run `silo-agent enroll TOKEN`, or name its folder with --dir"
            )


def silo_folder(given: Path | None) -> SiloFolder:
    """`--dir`, else $LORICA_SILO_DIR, else the user's data folder."""
    if given is not None:
        return SiloFolder(given.absolute())
    if named := os.environ.get(ENVIRONMENT_VARIABLE):
        return SiloFolder(Path(named).absolute())
    return SiloFolder(user_data_path("lorica") / "silo")
