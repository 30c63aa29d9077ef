"""The coordinator of one simulation: a folder of its own, for one plan among the same silos from beginning to end.

Each part is made whole or not at all, so that a kill leaves what the same command goes on with. A folder that belongs
to somebody else is refused before anything in it is read: another plan's, other silos', and above all that of a
coordinator that serves a federation.
"""

import shutil
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from lorica.simulation.silo_data import changed, remember
from lorica_coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from lorica_coordinator.edges.keys.key_store import KeyStore
from lorica_coordinator.opened import Coordinator
from lorica_coordinator.plans.plan_folder import compile_plan
from lorica_coordinator.service.federation import Federation
from lorica_coordinator.settings import settings_text
from lorica_security.errors import StateError
from lorica_security.host import files
from lorica_security.identifiers import FederationName, SiloName
from silo_wire.plans.plan import Plan


def simulated_coordinator(folder: Path, federation: FederationName) -> Coordinator:
    """The one in `folder`, else a new one; raises StateError where that is another federation's, or no simulation's."""
    root = CoordinatorFolder(folder)
    if root.operator_pair.exists():  # `coordinator init` makes one; here nobody operates anything
        raise StateError(f"{folder} is a coordinator that silos reach over the network: choose another --out")
    if not root.settings.exists():
        with files.new_folder(folder, files.PRIVATE_FOLDER_MODE) as work:
            new = CoordinatorFolder(work)
            KeyStore.create(new.keys, federation, datetime.now(UTC))
            files.replace(new.settings, settings_text(federation, ["localhost"]).encode())
    coordinator = Coordinator.load(root)
    if coordinator.federation != federation:
        raise StateError(
            f"{folder} was begun with a plan of federation {coordinator.federation}, this one is of {federation}: "
            "choose another --out"
        )
    return coordinator


async def require_same(service: Federation, plan: Plan, silos: Mapping[SiloName, Path], out: Path) -> None:
    """Raises StateError where the simulation in `out` was begun with another plan, other silos or, by their folders,
    other data.

    A silo that is not there any more would be waited for without end; one more would be in some of the rounds. Until a
    round has begun, silos may be added and their data corrected.
    """
    standing = await service.status()
    if standing.plan not in (None, plan.digest):
        raise StateError(
            f"{out} was begun with plan {standing.plan_name} ({standing.plan}), this is {plan.name} "
            f"({plan.digest}): choose another --out"
        )
    enrolled = {item.silo for item in standing.silos if item.state != "invited"}
    if gone := enrolled - set(silos):
        raise StateError(
            f"{out} was begun with {', '.join(sorted(gone))} among its silos: put the folder back, or choose "
            "another --out"
        )
    if await service.rounds():
        if more := set(silos) - enrolled:
            raise StateError(f"{out} was begun without {', '.join(sorted(more))}: choose another --out")
        if others := changed(silos, out):
            raise StateError(
                f"{out} was begun with other data of {', '.join(others)}: put the data back, or choose another --out"
            )
    remember(silos, out)


def put_on_shelf(coordinator: Coordinator, plan: Plan, plan_folder: Path) -> None:
    """Copy the plan's folder to the coordinator's own; raises StateError where another of its name is there,
    StorageError."""
    target = coordinator.shelf.folder(plan.name)
    if not target.exists():
        with files.new_folder(target) as work:
            shutil.copytree(plan_folder, work, dirs_exist_ok=True)
    elif compile_plan(target).plan.digest != plan.digest:
        raise StateError(f"{target} holds another plan {plan.name}: choose another --out")
