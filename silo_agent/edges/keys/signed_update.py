"""An update's header, signed by the silo's identity key: what the coordinator holds it to."""

from lorica_security.audit.signed_head import SignedHead
from lorica_security.identity.identity_key import sign
from silo_agent.edges.keys.key_store import SiloCredentials
from silo_agent.rounds.events import SavedUpdate
from silo_wire.messages import UpdateHeader
from silo_wire.statements import UPDATE_DOMAIN, update_statement


def signed_header(
    update: SavedUpdate, who: SiloCredentials, *, first_chunk: int, log: SignedHead | None = None
) -> UpdateHeader:
    """Of an upload that goes on at `first_chunk`, with the head of the silo's audit log."""
    statement = update_statement(
        key=update.key, silo=who.silo, model=update.model, update=update.manifest.digest, summary=update.summary
    )
    return UpdateHeader(
        key=update.key,
        model=update.model,
        manifest=update.manifest,
        summary=update.summary,
        signature=sign(who.identity_key, domain=UPDATE_DOMAIN.encode(), payload=statement),
        first_chunk=first_chunk,
        log=log,
    )
