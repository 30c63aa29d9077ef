"""`lorica verify`: where an exported model comes from, checked offline with the coordinator's identity key."""

from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_security.console.terminal import one_line
from lorica_security.errors import ConfigurationError
from lorica_security.on_disk.provenance import Provenance
from lorica_security.on_disk.reading import key_from_digits
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials


def key_of(digits: str, silo: Path | None) -> Ed25519PublicKey:
    """The coordinator's, as it was given or as the agent's folder `silo` has had it since its enrolment; raises
    ConfigurationError unless there is exactly one of the two."""
    if bool(digits) == (silo is not None):
        raise ConfigurationError(
            "say by which key: --key with the 64 digits that `coordinator audit verify` prints at the coordinator, or "
            "--silo with the folder of an agent of its federation"
        )
    if silo is None:
        return key_from_digits("--key", digits)
    return load_credentials(SiloFolder(silo)).coordinator_key


def told(provenance: Provenance) -> list[str]:
    """What a statement says that was verified, in lines for people."""
    promise, rounds = provenance.promise, provenance.rounds
    covered = "updates came under masks" if promise.secure_aggregation else "updates came in the clear"
    private = (
        "no differential privacy was promised"
        if promise.level == "none" or promise.epsilon is None or promise.delta is None
        else f"{promise.level}-level differential privacy: epsilon {promise.epsilon:g} at delta {promise.delta:g}"
    )
    silos = sorted({made.silos for made in rounds})
    counts = " to ".join(str(count) for count in sorted({*silos[:1], *silos[-1:]})) or "no"
    exported = datetime.fromtimestamp(provenance.exported_unix_s, UTC).isoformat()
    lines = [
        f"signed by the coordinator of federation {provenance.federation} ({provenance.software}), {exported}",
        f"plan {provenance.plan_name} {provenance.plan}, begun from {provenance.begun_from}",
        f"model {provenance.model} of round {provenance.round}; {len(rounds)} rounds made one, of {counts} silos",
        f"{covered}; {private}",
        f"{len(provenance.files)} files are as they were exported",
        f"audit log of the coordinator: entry {provenance.audit_entry}, {provenance.audit_digest}",
    ]
    if provenance.exact_match is not None:
        lines.insert(3, f"exact match {provenance.exact_match:.1%} on the silos' dev splits together (MicroAvg)")
    return [one_line(line) for line in lines]  # a coordinator that signs may be hostile all the same
