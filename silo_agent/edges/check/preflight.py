"""`silo-agent check`: what could keep this silo from taking part, found before a round does.

Each check gives an outcome and, where it fails, a remedy; a check whose ground is missing is skipped. What it can find has
names: misconfigurations.py. The clock is compared with what is known without asking anyone: the validity of this silo's, the
CA's and the coordinator's certificates, and the time of the journal's last record, after which it cannot be earlier now.
"""

import asyncio
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lorica_security.console.preflight import Check, Checks, Misconfigured, meaning, mebibytes, misconfigured
from lorica_security.daemon.listen_address import address, require_bindable
from lorica_security.errors import (
    AuthenticationError,
    ConfigurationError,
    DataError,
    IntegrityError,
    LoricaError,
    StateError,
    StorageError,
    Unreachable,
)
from lorica_security.host import key_file
from lorica_security.host.process_lock import holder
from lorica_security.identifiers import coordinator_dns_name
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import check_coordinator
from lorica_security.pki.trust_bundle import TrustBundle
from lorica_security.pki.validity import Window
from silo_agent.edges.accounts.privacy_ledger import guard_of
from silo_agent.edges.accounts.shared_budget import sharing_of
from silo_agent.edges.check.misconfigurations import Mistake
from silo_agent.edges.check.rules_check import (
    check_groups,
    check_memory,
    check_peers,
    check_plan,
    check_record,
    loosenings,
)
from silo_agent.edges.disk.plan_store import PlanStore
from silo_agent.edges.disk.round_journal import RoundJournal
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.keys.key_store import SiloCredentials, check_settled, load_credentials
from silo_agent.edges.memory.silo_record import record_of
from silo_agent.edges.wire.channel import mutual_channel
from silo_agent.edges.wire.key_exchange import HYBRID, key_exchange
from silo_agent.edges.wire.tls_probe import probe
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.privacy import SharedRecords
from silo_agent.settings import Settings
from silo_agent.sql_sandbox import Walls, probe_jail
from silo_agent.training.data.text_to_sql_data import SCHEMA_FILE, UnitOwnsHalf
from silo_wire.canonical import Digest
from silo_wire.codecs.common_codec import call_key
from silo_wire.plans.plan import PlanBundle
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2, federation_pb2_grpc

import grpc.aio  # isort: skip  # after silo_wire, which leaves TLS 1.3 alone

LEAST_CERTIFICATE_LIFE_S = 24 * 3600
CLOCK_TOLERANCE_S = 300
CALL_TIMEOUT_S = 15.0
KEYS_OF_CONNECTION = "keys of the connection"
RECORD = "what people decided"
JAIL = "jail of SQL"
BYTES_PER_PARAMETER = 4
COPIES_IN_MEMORY = 6
"""Parameters, gradient, two moments of AdamW, and as much again for activations: a rough bound, said as such."""
FREE_BYTES = 64 << 20
"""On disk, beyond models and updates: the journal, plans, logs of a service manager."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What checks stand on. `settings` is told whether the folder can be opened, to look there for what `start` was given."""

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
    enrolled = await run("files and permissions", lambda: _files(folder))
    settings: Settings | None = None

    def read_settings() -> str:
        nonlocal settings
        with meaning(Mistake.SETTINGS.value, ConfigurationError):
            settings = ground.settings(enrolled)
        return "silo.toml and the command line agree with each other"

    if not await run("settings", read_settings) or settings is None:
        settings = None
    bundle: PlanBundle | None = None
    masked_checks = ("pinned silos", "memory of masked rounds", "release groups")
    rules_checked = (RECORD, "plan and policy", *masked_checks, "privacy budget")
    if enrolled:
        credentials = load_credentials(folder)
        bundle = _last_plan(folder, credentials)
        await run("certificate", lambda: _certificate(credentials, now))
        await run("clock", lambda: _clock(folder, credentials, now))
        if await run("route and TLS interception", lambda: _route(credentials, now)):
            told = await _refusal(credentials)
            if await run("coordinator accepts this silo", lambda: _accepted(credentials, told)):
                await check_key_exchange(checks, credentials)
            else:
                checks.skip(KEYS_OF_CONNECTION, because="no connection")
        else:
            checks.skip("coordinator accepts this silo", KEYS_OF_CONNECTION, because="no route")
        if settings is None:
            checks.skip(*rules_checked, because="silo.toml cannot be used")
        else:
            rules = settings.policy
            policy = SiloPolicy(rules=rules, silo=credentials.silo, record=record_of(folder, credentials))
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
            await run("privacy budget", lambda: _budget(folder, credentials, policy, bundle))
    else:
        names = ("certificate", "clock", "route and TLS interception", "coordinator accepts this silo")
        checks.skip(*names, KEYS_OF_CONNECTION, *rules_checked, because="the silo's files cannot be used")
    if bundle is None:
        checks.skip("memory", because="no plan was offered yet")
    else:
        offered = bundle
        await run("memory", lambda: _memory(offered, ground.free_memory()))
    if settings is None:
        checks.skip(
            "disk",
            "device",
            "metrics port",
            "data",
            "unit of privacy",
            JAIL,
            "database",
            because="silo.toml cannot be used",
        )
        return checks.done
    given = settings
    await run(
        "disk",
        lambda: _disk(folder, given.storage.models_kept, bundle, ground.free_disk(folder.root)),
        unless="" if enrolled else "the silo's files cannot be used",
    )
    await run("device", lambda: _device(given.training.device))
    await run("metrics port", lambda: _metrics_port(folder, given.metrics.listen))
    sources = ground.sources(given)
    data = await run("data", lambda: _data(sources, Path(given.data.folder)))
    unit = bundle.plan.privacy.unit_field if bundle and bundle.plan.privacy.level == "record" else ""
    no_unit = "it is looked for in the data" if not data else "" if unit else "the plan groups no lines"
    await run("unit of privacy", lambda: _unit(sources, unit), unless=no_unit)
    if not data and not given.database.url:
        checks.skip(JAIL, "database", because="it is looked for beside the data")
    else:
        jailed = await asyncio.to_thread(_jail, checks, ground.walls, required=given.sql.require_jail)
        await run("database", lambda: _database(sources), unless="" if jailed else "no SQL runs without the jail")
    return checks.done


def _files(folder: SiloFolder) -> str:
    with meaning(Mistake.NOT_ENROLLED.value, ConfigurationError):
        folder.require_enrolled()
    with meaning(Mistake.FOLDER_OPEN.value, ConfigurationError), meaning(Mistake.FOLDER_UNUSABLE.value, StorageError):
        folder.make()
    secret = (*folder.private_keys, folder.enrolment)
    for path in secret:
        if not path.is_file():
            raise misconfigured(Mistake.FILE_MISSING.value, f"{path} is missing")
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            raise misconfigured(Mistake.FILE_OPEN.value, f"{path} has mode {mode:04o}: others can read it")
    with meaning(Mistake.PASSPHRASE.value):
        passphrase = key_file.passphrase_of(os.environ)
    for path in folder.private_keys:
        if passphrase is not None and not key_file.is_encrypted(path.read_bytes()):
            raise misconfigured(Mistake.KEY_CLEAR.value, f"{path} is not encrypted")
    with (
        meaning(Mistake.PASSPHRASE.value, key_file.WrongPassphrase),
        meaning(Mistake.FILE_DAMAGED.value, ConfigurationError),
    ):
        credentials = load_credentials(folder)
    with meaning(Mistake.ROTATION.value, StateError):
        check_settled(folder)
    protected = "encrypted" if passphrase else "readable by their owner alone"
    return f"{credentials.identity.uri} in {folder.root}, private keys {protected}"


def _certificate(credentials: SiloCredentials, now: datetime) -> str:
    window = Window.of(credentials.certificate)
    if now > window.end:
        raise Misconfigured(
            Mistake.CERTIFICATE_ENDED.value, f"certificate of {credentials.identity.uri} {window.problem_at(now)}"
        )
    left = (window.end - now).total_seconds()
    if left < LEAST_CERTIFICATE_LIFE_S:
        raise misconfigured(
            Mistake.CERTIFICATE_ENDING.value,
            f"certificate of {credentials.identity.uri} ends in {left / 3600:.1f} hours and was not renewed",
        )
    if not credentials.trust.issuers_of(credentials.certificate):
        raise misconfigured(
            Mistake.CERTIFICATE_FOREIGN.value, "the certificate is not issued by a CA of the trust bundle"
        )
    return f"valid until {window.end.isoformat()}, {left / 86400:.1f} days"


def _clock(folder: SiloFolder, credentials: SiloCredentials, now: datetime) -> str:
    for certificate in (credentials.certificate, *credentials.trust.authorities):
        begin = Window.of(certificate).begin
        if now < begin:
            raise misconfigured(
                Mistake.CLOCK_EARLY.value,
                f"the clock says {now.isoformat()}, before {begin.isoformat()} when a certificate here was made",
            )
    with closing(_journal(folder, credentials)) as journal:
        history = journal.history(1)
    if history and now.timestamp() < history[-1].unix_s - CLOCK_TOLERANCE_S:
        last = datetime.fromtimestamp(history[-1].unix_s, UTC)
        raise misconfigured(
            Mistake.CLOCK_BEHIND.value,
            f"the clock says {now.isoformat()}, before the journal's last record at {last.isoformat()}",
        )
    return f"{now.isoformat(timespec='seconds')}, after everything that is recorded here"


def _route(credentials: SiloCredentials, now: datetime) -> str:
    with meaning(Mistake.UNREACHABLE.value, Unreachable), meaning(Mistake.PROXY.value, ConfigurationError):
        answer = probe(credentials.address, coordinator_dns_name(credentials.federation))
    try:
        check_coordinator(answer.certificate, trust=credentials.trust, now=now, federation=credentials.federation)
    except AuthenticationError as error:
        raise _stranger(answer.certificate, answer.route, credentials.trust, error) from error
    return f"{credentials.address}{answer.route} shows the coordinator's own certificate"


def _stranger(certificate: bytes, route: str, trust: TrustBundle, error: AuthenticationError) -> Misconfigured:
    try:
        leaf = parse_certificate(certificate)
    except LoricaError as unreadable:
        return misconfigured(
            Mistake.INTERCEPTED.value, f"what answers{route} shows a certificate that does not parse ({unreadable})"
        )
    if trust.issuers_of(leaf):
        return misconfigured(
            Mistake.COORDINATOR_CERTIFICATE.value, f"what answers{route} is of this federation: {error}"
        )
    return misconfigured(
        Mistake.INTERCEPTED.value,
        f"what answers{route} has a certificate issued by {leaf.issuer.rfc4514_string()[:120]!r}, not by this "
        "federation's CA: a TLS-intercepting proxy stands between",
    )


async def _refusal(credentials: SiloCredentials) -> LoricaError | None:
    """What the coordinator has against this silo; None where it answers it."""
    async with mutual_channel(credentials) as channel:
        stub: federation_pb2_grpc.FederationAsyncStub = federation_pb2_grpc.FederationStub(channel)
        # Asks about an update of a round that never is: an authenticated answer of any kind is what is looked for.
        request = federation_pb2.UploadOffsetRequest(
            key=call_key(
                federation=credentials.federation, silo=credentials.silo, plan=Digest("00" * 32), round_number=0
            ),
            update_digest=bytes(32),
        )
        try:
            await stub.UploadOffset(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = error_of(error)
            refused = isinstance(problem, AuthenticationError | Unreachable)
            return problem if refused or error.code() is grpc.StatusCode.PERMISSION_DENIED else None
    return None


async def check_key_exchange(checks: Checks, credentials: SiloCredentials) -> None:
    """Tells by what the keys of a connection with the coordinator are agreed; something else than a hybrid keeps nobody away."""
    try:
        agreed = await key_exchange(credentials)
    except LoricaError as error:
        checks.notice(KEYS_OF_CONNECTION, f"by what they are agreed was not seen: {error}")
        return
    if agreed == HYBRID:
        checks.run(KEYS_OF_CONNECTION, lambda: f"agreed by {agreed}: no quantum computer opens what is recorded today")
    else:
        checks.notice(
            KEYS_OF_CONNECTION,
            f"agreed by {agreed}, not {HYBRID}: a quantum computer may open what is recorded today, up to the masks; "
            "bring grpcio up to date on both sides, and look at what stands between",
        )


def _accepted(credentials: SiloCredentials, told: LoricaError | None) -> str:
    if isinstance(told, Unreachable):
        raise misconfigured(Mistake.REFUSED.value, f"{credentials.address} breaks the connection off ({told})")
    if told is not None:
        raise misconfigured(Mistake.REFUSED.value, str(told))
    return f"mutual TLS with {credentials.address} as {credentials.silo}"


def _journal(folder: SiloFolder, credentials: SiloCredentials) -> RoundJournal:
    return RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)


def _last_plan(folder: SiloFolder, credentials: SiloCredentials) -> PlanBundle | None:
    """The plan that is offered now: one that is refused, else the one that was prepared last."""
    plans = PlanStore(folder.plans)
    if refused := plans.refused():
        return refused
    with closing(_journal(folder, credentials)) as journal:
        plan = journal.fact("plan")
    return None if plan is None else plans.load(Digest(plan))


def _budget(folder: SiloFolder, credentials: SiloCredentials, policy: SiloPolicy, bundle: PlanBundle | None) -> str:
    rules = policy.rules
    if rules.require_privacy != "none" and "max_epsilon" not in rules.model_fields_set:
        raise misconfigured(
            Mistake.BUDGET_UNSET.value,
            f"[policy] require_privacy = {rules.require_privacy!r} without max_epsilon, for which {rules.max_epsilon:g} is taken",
        )
    with (
        closing(_journal(folder, credentials)) as journal,
        meaning(Mistake.LEDGER.value, IntegrityError, StorageError),
        meaning(Mistake.BUDGET_SHARED.value, SharedRecords),
    ):
        sharing = sharing_of(folder, rules.shared_budget)
        guard = guard_of(folder, credentials, policy, journal, sharing=sharing)
        counted = guard.counted()
        rounds = bundle.plan.schedule.rounds if bundle else 0
        releases = [
            (what, replace(release, steps=release.steps * rounds))
            for what, release in (bundle.plan.releases_of_round if bundle else ())
        ]
        spent = counted.epsilon()
        after = counted.epsilon(releases, bundle.plan.privacy.unit_field if bundle else "")
    if bundle is not None and releases and after > rules.max_epsilon:
        raise misconfigured(
            Mistake.BUDGET_SMALL.value,
            f"the {rounds} rounds of plan {bundle.plan.name} would take this silo from epsilon {spent:.3g} to {after:.3g}, "
            f"[policy] max_epsilon is {rules.max_epsilon:g}",
        )
    if bundle is not None and releases and counted.joint(releases):  # also of earlier plans
        alone = counted.epsilon_alone(releases, bundle.plan.privacy.unit_field)
        if alone > rules.max_epsilon_alone:
            raise misconfigured(
                Mistake.BUDGET_SMALL.value,
                f"if all others whose noise counts worked against this silo, the {rounds} rounds of plan {bundle.plan.name} would take it "
                f"to epsilon {alone:.3g}, [policy] max_epsilon_alone is {rules.max_epsilon_alone:g}",
            )
    if bundle is None or not releases:
        further = "no plan was offered yet" if bundle is None else f"plan {bundle.plan.name} spends none"
        told = f"epsilon {spent:.3g} of {rules.max_epsilon:g} is spent; {further}"
    else:
        told = f"epsilon {spent:.3g} of {rules.max_epsilon:g} is spent, {after:.3g} after plan {bundle.plan.name}"
        if counted.joint(releases):
            told += f" ({alone:.3g} of {rules.max_epsilon_alone:g} towards all others whose noise counts, together)"
    if sharing.shown:
        return f"{told}; together with other folders that count in {sharing.shown}"
    if rules.require_privacy == "none" and not releases:
        return told
    return f"{told}; counted in this folder alone: nobody notices other folders with the same records ([policy] shared_budget)"


def _memory(bundle: PlanBundle, free: int) -> str:
    needed = BYTES_PER_PARAMETER * (bundle.layout.parameters * COPIES_IN_MEMORY)
    if bundle.base_layout is not None:
        needed += bundle.base_layout.total_bytes  # frozen: one copy, no gradient
    if free < needed:
        raise misconfigured(
            Mistake.MEMORY.value, f"about {mebibytes(needed)} of memory are needed, {mebibytes(free)} are free"
        )
    return f"{mebibytes(free)} free, about {mebibytes(needed)} needed"


def _disk(folder: SiloFolder, models_kept: int, bundle: PlanBundle | None, free: int) -> str:
    """Files are written over where they can be, so what is there already needs no more room."""
    needed = FREE_BYTES
    if bundle is not None:
        models = bundle.model_layout.total_bytes * max(2, models_kept)  # a download takes the place of the oldest
        masks = bundle.plan.aggregation.secure_aggregation
        updates = bundle.update_bytes + (bundle.layout.total_bytes if masks else 0)  # the delta itself stays here
        residuals = bundle.layout.total_bytes * 2 if bundle.update_layout.dtype == "bfloat16" else 0
        base = bundle.base_layout.total_bytes if bundle.base_layout else 0
        there = sum(path.stat().st_size for part in (folder.models, folder.updates) for path in part.rglob("*"))
        needed += max(0, models + updates + residuals + base - there)
    if free < needed:
        raise misconfigured(
            Mistake.DISK.value, f"{folder.root} has {mebibytes(free)} free, about {mebibytes(needed)} are needed"
        )
    return f"{mebibytes(free)} free in {folder.root}, about {mebibytes(needed)} needed"


def _device(wanted: str) -> str:
    if not wanted.startswith("cuda"):
        return f"{wanted}: there is always one"
    # Here, not above: torch takes seconds to import.
    from silo_agent.training.device import DeviceSettings, chosen_device

    with meaning(Mistake.DEVICE.value, ConfigurationError):
        return str(chosen_device(DeviceSettings(device=wanted)))


def _metrics_port(folder: SiloFolder, listen: str) -> str:
    if not listen:
        return "none: nothing listens here"
    if (agent := holder(folder.lock)) is not None:
        return f"the running agent (process {agent}) has {listen}"
    try:
        require_bindable(address(listen))
    except OSError as error:
        raise misconfigured(
            Mistake.METRICS_PORT.value, f"[metrics] listen = {listen!r} cannot be had: {error.strerror}"
        ) from error
    return f"{listen} is free"


def _data(sources: SiloSources, folder: Path) -> str:
    try:
        data = sources.summary()
    except DataError as error:
        text = str(error)
        schema = text.startswith(str(folder / SCHEMA_FILE))
        bad = " bad lines of " in text
        mistake = Mistake.SCHEMA if schema else Mistake.DATA_BAD if bad else Mistake.DATA_MISSING
        raise Misconfigured(mistake.value, text) from error
    first = f"; {data.bad_lines} bad lines left out, the first: {data.problems[0]}" if data.bad_lines else ""
    return f"{data.train_examples} train, {data.dev_examples} dev, {data.test_examples} test examples{first}"


def _unit(sources: SiloSources, unit: str) -> str:
    try:
        data = sources.data_for(unit, True)
    except UnitOwnsHalf as error:
        raise Misconfigured(Mistake.UNIT_HALF.value, str(error)) from error
    except DataError as error:
        raise misconfigured(Mistake.UNIT_FIELD.value, f"the plan groups lines by {unit!r}: {error}") from error
    return f"{len(data.train)} lines of {len({example.unit for example in data.train})} by {unit!r}"


def _jail(checks: Checks, walls_of: Callable[[], Walls], *, required: bool) -> bool:
    """Whether SQL may run: a missing wall keeps it away where the jail is `required`, and is a notice where it is not."""
    tried: list[Walls] = []

    def look() -> str:
        tried.append(walls := walls_of())
        if walls.missing and required:
            raise misconfigured(Mistake.JAIL.value, f"this machine has {walls.missing}")
        return f"{walls.standing}, each tried in a process of its own"

    runs = checks.run(JAIL, look)
    if runs and (missing := tried[0].missing):
        checks.notice(
            "jail incomplete", f"{missing}: what breaks out of SQLite or libpq there can do what this account can"
        )
    return runs


def _database(sources: SiloSources) -> str:
    try:
        return sources.check_database() or "none: execution accuracy is not measured here"
    except DataError as error:
        # The sandbox's process tells in words what it found.
        mistake = Mistake.DATABASE_WRITES if " refused: its role " in str(error) else Mistake.DATABASE
        raise Misconfigured(mistake.value, str(error)) from error
