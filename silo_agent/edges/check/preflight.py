"""`silo-agent check`: what could keep this silo from taking part, found before a round does.

Each check gives an outcome and, where it fails, a remedy; a check whose ground is missing is skipped. What it can find
has names: misconfigurations.py. The clock is compared with what is known without asking anyone: the validity of this
silo's, the CA's and the coordinator's certificates, and the time of the journal's last record, after which it cannot be
earlier now.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from lorica_security.console.preflight import Check, Checks, Outcome, meaning
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName
from silo_agent.edges.check.connection_checks import (
    KEYS_OF_CONNECTION,
    check_accepted,
    check_key_exchange,
    check_route,
    refusal_of,
)
from silo_agent.edges.check.data_checks import (
    check_data,
    check_database,
    check_lengths,
    check_losses,
    check_splits,
    check_unit,
    runs_sql,
)
from silo_agent.edges.check.folder_checks import (
    check_budget,
    check_certificate,
    check_clock,
    check_files,
    keys_in_a_token,
    keys_that_may_leave,
    offered_plan,
)
from silo_agent.edges.check.machine_checks import (
    JAIL,
    check_device,
    check_disk,
    check_free_memory,
    check_jail,
    check_metrics_port,
    check_processes,
    check_spool_room,
    disk_need,
)
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.check.rules_check import (
    check_groups,
    check_memory,
    check_peers,
    check_plan,
    check_record,
    loosenings,
)
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, load_credentials
from silo_agent.edges.memory.silo_record import record_of
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import Walls, probe_jail
from silo_wire.plans.plan import Plan, PlanBundle

RECORD = "what people decided"
LOSSES = "losses of a round"
CUT = "what the plan cuts"
LINES_ON_DISK = "disk for lines"


TOKEN = "keys in a token"  # noqa: S105  # nosec B105  # a row's name


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What checks stand on. `settings` is told whether the folder can be opened, to look there for what `start` was
    given."""

    folder: SiloFolder
    settings: Callable[[bool], Settings]
    sources: Callable[[Settings], SiloSources]
    now: Callable[[], datetime]
    free_memory: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
    free_disk: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    walls: Callable[[], Walls] = probe_jail


async def preflight(ground: Ground) -> Sequence[Check]:
    """Every check in order; none of them raises for what it finds."""
    checks = Checks()

    async def run(name: str, look: Callable[[], str], *, unless: str = "") -> bool:
        return await asyncio.to_thread(checks.run, name, look, unless=unless)

    now, folder = ground.now(), ground.folder
    enrolled = await run("files and permissions", lambda: check_files(folder))
    settings: Settings | None = None

    def read_settings() -> str:
        nonlocal settings
        with meaning(Mistake.SETTINGS.value, ConfigurationError):
            settings = ground.settings(enrolled)
        return "silo.toml and the command line agree with each other"

    if not await run("settings", read_settings) or settings is None:
        settings = None
    bundle: PlanBundle | None = None
    logging: tuple[Plan, SiloName] | None = None
    credentials: SiloCredentials | None = None
    masked_checks = ("pinned silos", "memory of masked rounds", "release groups")
    rules_checked = (RECORD, "plan and policy", *masked_checks, "privacy budget")
    if enrolled:
        credentials = load_credentials(folder)
        bundle = offered_plan(folder, credentials)
        if bundle is not None and bundle.plan.logs_losses:
            logging = bundle.plan, credentials.silo
        if held := keys_in_a_token(credentials):
            await run(TOKEN, lambda: held)
            if leaving := keys_that_may_leave(credentials):
                checks.notice(
                    TOKEN, f"{leaving}: extractable, so whoever has the PIN takes a copy; make one that is not"
                )
        await run("certificate", lambda: check_certificate(credentials, now))
        await run("clock", lambda: check_clock(folder, credentials, now))
        if await run("route and TLS interception", lambda: check_route(credentials, now)):
            told = await refusal_of(credentials)
            if await run("coordinator accepts this silo", lambda: check_accepted(credentials, told)):
                await check_key_exchange(checks, credentials)
            else:
                checks.skip(KEYS_OF_CONNECTION, because="no connection")
        else:
            checks.skip("coordinator accepts this silo", KEYS_OF_CONNECTION, because="no route")
        if settings is None:
            checks.skip(*rules_checked, because="silo.toml cannot be used")
        else:
            rules = settings.policy
            policy = SiloPolicy(
                rules=rules,
                silo=credentials.silo,
                record=record_of(folder, credentials),
                processes=settings.training.processes,
                rank_interface=settings.training.rank_interface,
                sharded=settings.training.sharded,
            )
            await run(RECORD, lambda: check_record(policy))
            if bundle is None:
                checks.skip("plan and policy", because="no plan was offered yet")
            else:
                plan = bundle
                await run("plan and policy", lambda: check_plan(plan, policy))
            if rules.require_secure_aggregation or (bundle and bundle.plan.aggregation.secure_aggregation):
                await run("pinned silos", lambda: check_peers(folder, credentials, rules, bundle))
                await run("memory of masked rounds", lambda: check_memory(folder, credentials))
                await run("release groups", lambda: check_groups(folder, credentials, policy))
            else:
                checks.skip(*masked_checks, because="neither policy nor plan asks for masks")
            for key, cost in await asyncio.to_thread(loosenings, folder, credentials, policy):
                checks.notice("masks loosened", f"{key}: {cost}")
            await run("privacy budget", lambda: check_budget(folder, credentials, policy, bundle))
    else:
        names = ("certificate", "clock", "route and TLS interception", "coordinator accepts this silo")
        checks.skip(*names, KEYS_OF_CONNECTION, *rules_checked, because="the silo's files cannot be used")
    silo = None if credentials is None else credentials.silo
    if bundle is None:
        checks.skip("memory", because="no plan was offered yet")
    else:
        offered = bundle
        await run("memory", lambda: check_free_memory(offered, ground.free_memory(), silo=silo or ""))
    if settings is None:
        checks.skip(
            "disk",
            LINES_ON_DISK,
            "device",
            "processes",
            "metrics port",
            "data",
            CUT,
            LOSSES,
            "unit of privacy",
            JAIL,
            "database",
            because="silo.toml cannot be used",
        )
        return checks.done
    given = settings
    not_enrolled = "" if enrolled else "the silo's files cannot be used"
    need = disk_need(folder, given.storage.models_kept, bundle, own_models=given.personal.method != "none")
    await run("disk", lambda: check_disk(folder, need, ground.free_disk(folder.root)), unless=not_enrolled)
    await run(
        LINES_ON_DISK,
        lambda: check_spool_room(folder, Path(given.data.folder), bundle, need, ground.free_disk(folder.root)),
        unless=not_enrolled or ("" if given.data.folder else "no data folder is given"),
    )
    no_room = checks.done[-1].outcome is Outcome.FAILED
    await run("device", lambda: check_device(given.training.device))
    await run("processes", lambda: check_processes(given.training))
    await run("metrics port", lambda: check_metrics_port(folder, given.metrics.listen))
    sources = ground.sources(given)
    read_for = None if bundle is None else bundle.plan
    data = await run(
        "data",
        lambda: check_data(sources, Path(given.data.folder), read_for, silo),
        unless="the disk has no room for its lines" if no_room else "",
    )
    if data:
        await asyncio.to_thread(check_splits, checks, sources)
    without_plan = "they are counted in the data" if not data else "no plan was offered yet" if bundle is None else ""
    if data and bundle is not None and silo is not None:
        await asyncio.to_thread(check_lengths, checks, CUT, sources, bundle, silo)
    else:
        checks.skip(CUT, because=without_plan)
    if not data or logging is None:
        checks.skip(LOSSES, because=without_plan or "the plan weighs by no logged losses")
    else:
        counted = logging
        await run(LOSSES, lambda: check_losses(sources, *counted))
    unit = bundle.plan.privacy.unit_field if bundle and bundle.plan.privacy.level == "record" else ""
    no_unit = "it is looked for in the data" if not data else "" if unit else without_plan or "the plan groups no lines"
    await run("unit of privacy", lambda: check_unit(sources, unit), unless=no_unit)
    if not data and not given.database.url:
        checks.skip(JAIL, "database", because="it is looked for beside the data")
    elif data and not given.database.url and not await asyncio.to_thread(runs_sql, sources):
        checks.skip(JAIL, "database", because="the task is no SQL: its answers run nowhere")
    else:
        jailed = await asyncio.to_thread(check_jail, checks, ground.walls, required=given.sql.require_jail)
        await run("database", lambda: check_database(sources), unless="" if jailed else "no SQL runs without the jail")
    return checks.done
