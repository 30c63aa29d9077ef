"""The audit logs of a whole federation on disk, each held against what the others hold of it."""

from collections.abc import Iterable

from lorica_coordinator.edges.check.audit_check import check_silos, silo_heads
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.opened import Coordinator
from lorica_security.audit.entry import Event
from lorica_security.audit.verification import Known
from lorica_security.on_disk.reading import Reading, read_log
from silo_agent.edges.accounts.audit_check import check_receipts, receipts_in
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import load_credentials
from silo_wire.codecs.update_receipt import coordinator_uri


def check_audit_logs(coordinator: CoordinatorFolder, silos: Iterable[SiloFolder]) -> list[Reading]:
    """The coordinator's reading, then those of the silos. Raises IntegrityError for a log that is not what anybody
    knows of it."""
    loaded = Coordinator.load(coordinator)
    audit = loaded.audit()
    of_all = read_log(audit.place, writer=coordinator_uri(loaded.federation), keys=[audit.public_key])
    check_silos(of_all)
    readings = [of_all]
    for folder in silos:
        who = load_credentials(folder)
        own = read_log(folder.audit, writer=who.identity.uri, keys=[who.identity_key.public_key()])
        check_receipts(own, who.coordinator_key)
        shown = silo_heads(of_all)[who.identity.uri]
        assert own.walk.check_known([Known(head=one.head, by="the coordinator") for one in shown], "") == len(shown)
        held = [Known(head=receipt.head.head, by=who.silo) for _, receipt in receipts_in(own, who.coordinator_key)]
        assert of_all.walk.check_known(held, "") == len(held)
        left = {entry.text("update") for entry in own.of(Event.UPDATE_LEAVES, Event.MASKED_UPDATE_LEAVES)}
        came = [entry for entry in of_all.of(Event.UPDATE_RECEIVED) if entry.text("silo") == who.silo]
        assert {entry.text("update") for entry in came} <= left
        readings.append(own)
    return readings
