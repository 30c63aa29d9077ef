"""`coordinator check`: what could keep this federation from working, found before silos do.

It changes nothing and works beside a running coordinator, which it then asks for its certificate as a silo would. What
it can find has names: misconfigurations.py.
"""

from collections.abc import Callable, Sequence
from functools import partial

from lorica_coordinator.edges.check import address_checks, folder_checks, machine_checks, plan_checks
from lorica_coordinator.edges.check.found import Found, Ground
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.settings import Settings
from lorica_security.console.preflight import Check, Checks, meaning

_AFTER_SETTINGS = (
    "folders",
    "process",
    "keys",
    "certificates",
    "clock",
    "address",
    "ports",
    "state database",
    "plan",
    "cohort",
    "disk",
    "memory",
    "open files",
    "device",
)


def preflight(ground: Ground) -> Sequence[Check]:
    """Every check in order; none of them raises for what it finds."""
    checks = Checks()
    settings: list[Settings] = []

    def read_settings() -> str:
        with meaning(Mistake.SETTINGS.value):
            settings.append(Settings.read(ground.folder.settings))
        return f"federation {settings[0].federation}, {ground.folder.settings}"

    if not checks.run("settings", read_settings):
        checks.skip(*_AFTER_SETTINGS, because="federation.toml cannot be used")
        return checks.done
    found = Found(ground=ground, settings=settings[0], now=ground.now())

    def run(name: str, look: Callable[[Found], str], *, unless: str = "") -> bool:
        return checks.run(name, partial(look, found), unless=unless)

    run("folders", folder_checks.folders)
    folder_checks.load_keys(found)
    no_keys = "the keys cannot be used" if found.keys_error else ""
    run("process", folder_checks.process, unless=no_keys)
    run("keys", folder_checks.keys_said)
    run("certificates", folder_checks.certificates, unless=no_keys)
    no_state = "" if found.settings.state_folder.is_dir() else "there is no state folder"
    database = run("state database", plan_checks.database, unless=no_state)
    storage = found.settings.storage
    if storage.database and storage.blobs and not storage.attempt_keys:
        checks.notice("attempt keys", folder_checks.KEYS_IN_THE_FOLDER)
    if storage.blobs:
        run("bucket", folder_checks.bucket)
    if storage.attempt_keys:
        run("attempt keys", folder_checks.attempt_keys)
    run("clock", folder_checks.clock, unless=no_keys)
    run("address", address_checks.addresses)
    run("ports", address_checks.ports)
    no_plan = "" if run("plan", plan_checks.plan, unless=no_state) else "there is no plan to hold it to"
    if not no_plan and found.bundle is None:
        no_plan = "the plan's files are not here"
    run("cohort", plan_checks.cohort, unless=no_plan or ("" if database else "the state cannot be used"))
    run("disk", plan_checks.disk, unless=no_plan)
    run("memory", machine_checks.memory)
    run("open files", machine_checks.files)
    run("device", machine_checks.device)
    return checks.done
