"""Secrets that evidence of a masked round may hold: the shares that its silos revealed."""

from collections.abc import Mapping
from pathlib import Path

from lorica_security.identifiers import FederationName
from lorica_security.secure_aggregation.messages import Reveal
from silo_wire.codecs.evidence_codec import checkable_from_bytes
from silo_wire.codecs.secure_journals_codec import coordinator_event_to_bytes


def but_revealed(folder: Path, found: Mapping[str, set[bytes]], federation: str) -> Mapping[str, set[bytes]]:
    """`found`, by file below `folder`, without what is in evidence because it was revealed in the round that the
    evidence is of."""
    left: dict[str, set[bytes]] = {}
    for name, secrets in found.items():
        path = folder / name
        revealed = b""
        if path.suffix == ".evidence":
            evidence = checkable_from_bytes(path.read_bytes(), FederationName(federation)).evidence
            shown = (coordinator_event_to_bytes(event) for event in evidence.journal if isinstance(event, Reveal))
            revealed = b"".join(shown)
        if hidden := {secret for secret in secrets if secret not in revealed}:
            left[name] = hidden
    return left
