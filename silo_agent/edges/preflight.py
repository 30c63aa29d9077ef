"""`silo-agent check`: what could keep this silo from taking part, found before a round does.

Each check gives an outcome and, where it fails, a remedy; a check whose ground is missing is skipped. The clock is
compared with what is known without asking anyone: the validity of this silo's, the CA's and the coordinator's
certificates, and the time of the journal's last record, after which it cannot be earlier now.
"""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

import psutil

from security.errors import AuthenticationError, ConfigurationError, LoricaError, Unreachable
from security.identifiers import coordinator_dns_name
from security.pki.parsing import parse_certificate
from security.pki.peer import check_coordinator
from security.pki.trust_bundle import TrustBundle
from security.pki.validity import Window
from silo_agent.edges.channel import mutual_channel
from silo_agent.edges.key_store import SiloCredentials, load_credentials
from silo_agent.edges.plan_approvals import PlanApprovals
from silo_agent.edges.plan_store import PlanStore
from silo_agent.edges.round_journal import RoundJournal
from silo_agent.edges.silo_folder import SiloFolder
from silo_agent.edges.tls_probe import probe
from silo_agent.edges.trust_store import How, trust_store
from silo_agent.policy import PolicyRules, SiloPolicy, update_bytes
from silo_agent.service.ports import DataSummary
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.codec import call_key
from silo_wire.plan import PlanBundle
from silo_wire.transport import error_of
from silo_wire.v1 import federation_pb2, federation_pb2_grpc

import grpc.aio  # isort: skip  # after silo_wire, which leaves TLS 1.3 alone

LEAST_CERTIFICATE_LIFE_S = 24 * 3600
CLOCK_TOLERANCE_S = 300
CALL_TIMEOUT_S = 15.0
BYTES_PER_PARAMETER = 4
COPIES_IN_MEMORY = 6
"""Parameters, gradient, two moments of AdamW, and as much again for activations: a rough bound, said as such."""
FREE_BYTES = 64 << 20
"""On disk, beyond models and updates: the journal, plans, logs of a service manager."""


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    outcome: Outcome
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What checks stand on. `data` and `database` read the silo's own."""

    folder: SiloFolder
    settings: Settings
    now: Callable[[], datetime]
    data: Callable[[], DataSummary]
    database: Callable[[], str]


async def preflight(ground: Ground) -> Sequence[Check]:
    """Every check in order; none of them raises for what it finds."""
    checks: list[Check] = []

    async def run(name: str, look: Callable[[], str]) -> bool:
        try:
            checks.append(Check(name=name, outcome=Outcome.PASSED, detail=await asyncio.to_thread(look)))
        except LoricaError as error:
            checks.append(Check(name=name, outcome=Outcome.FAILED, detail=str(error)))
            return False
        return True

    def skip(*names: str, because: str) -> None:
        checks.extend(Check(name=name, outcome=Outcome.SKIPPED, detail=because) for name in names)

    now = ground.now()
    if await run("files and permissions", lambda: _files(ground.folder)):
        credentials = load_credentials(ground.folder)
        await run("certificate", lambda: _certificate(credentials, now))
        await run("clock", lambda: _clock(ground.folder, credentials, now))
        if await run("route and TLS interception", lambda: _route(credentials, now)):
            checks.append(await _reachability(credentials))
        else:
            skip("coordinator accepts this silo", because="no route")
        bundle = _last_plan(ground.folder, credentials)
        approvals = PlanApprovals(ground.folder.approvals)
        policy = SiloPolicy(rules=ground.settings.policy, silo=credentials.silo, approvals=approvals.digests)
        if bundle is None:
            skip("plan and policy", because="no plan was offered yet")
        else:
            await run("plan and policy", lambda: _plan(bundle, policy))
        if policy.rules.require_secure_aggregation or (bundle and bundle.plan.aggregation.secure_aggregation):
            await run("pinned silos", lambda: _peers(ground.folder, credentials, policy.rules, bundle))
        else:
            skip("pinned silos", because="neither policy nor plan asks for masks")
        if bundle is None:
            skip("memory", because="no plan was offered yet")
        else:
            await run("memory", lambda: _memory(bundle))
        await run("disk", lambda: _disk(ground.folder, ground.settings.storage.models_kept, bundle))
    else:
        skip("certificate", "clock", "route and TLS interception", because="the silo's files cannot be used")
        skip("coordinator accepts this silo", "plan and policy", "pinned silos", "memory", "disk", because="no silo")
    if await run("data", lambda: _data(ground.data)) or ground.settings.database.url:
        await run("database", lambda: ground.database() or "none: execution accuracy is not measured here")
    else:
        skip("database", because="it is looked for beside the data")
    return checks


def _files(folder: SiloFolder) -> str:
    credentials = load_credentials(folder)
    folder.make()
    return f"{credentials.identity.uri} in {folder.root}, private keys readable by their owner alone"


def _certificate(credentials: SiloCredentials, now: datetime) -> str:
    window = Window.of(credentials.certificate)
    if problem := window.problem_at(now):
        raise AuthenticationError(f"certificate of {credentials.identity.uri} {problem}")
    left = (window.end - now).total_seconds()
    if left < LEAST_CERTIFICATE_LIFE_S:
        raise AuthenticationError(
            f"certificate of {credentials.identity.uri} ends in {left / 3600:.1f} hours and was not renewed: start the agent, "
            "which renews it, and look for certificate-not-renewed in its log"
        )
    if not credentials.trust.issuers_of(credentials.certificate):
        raise AuthenticationError("the certificate is not issued by a CA of the trust bundle: enrol again")
    return f"valid until {window.end.isoformat()}, {left / 86400:.1f} days"


def _clock(folder: SiloFolder, credentials: SiloCredentials, now: datetime) -> str:
    for certificate in (credentials.certificate, *credentials.trust.authorities):
        begin = Window.of(certificate).begin
        if now < begin:
            raise ConfigurationError(
                f"the clock says {now.isoformat()}, before {begin.isoformat()} when a certificate here was made: set it"
            )
    journal = _journal(folder, credentials)
    try:
        history = journal.history(1)
    finally:
        journal.close()
    if history and now.timestamp() < history[-1].unix_s - CLOCK_TOLERANCE_S:
        last = datetime.fromtimestamp(history[-1].unix_s, UTC)
        raise ConfigurationError(
            f"the clock says {now.isoformat()}, before the journal's last record at {last.isoformat()}: set it"
        )
    return f"{now.isoformat(timespec='seconds')}, after everything that is recorded here"


def _route(credentials: SiloCredentials, now: datetime) -> str:
    answer = probe(credentials.address, coordinator_dns_name(credentials.federation))
    try:
        check_coordinator(answer.certificate, trust=credentials.trust, now=now, federation=credentials.federation)
    except AuthenticationError as error:
        raise AuthenticationError(_stranger(answer.certificate, answer.route, credentials.trust, error)) from error
    return f"{credentials.address}{answer.route} shows the coordinator's own certificate"


def _stranger(certificate: bytes, route: str, trust: TrustBundle, error: AuthenticationError) -> str:
    try:
        leaf = parse_certificate(certificate)
    except LoricaError as unreadable:
        return f"what answers{route} shows a certificate that does not parse: {unreadable}"
    if trust.issuers_of(leaf):
        return str(error)
    return (
        f"what answers{route} has a certificate issued by {leaf.issuer.rfc4514_string()[:120]!r}, not by this "
        "federation's CA: a TLS-intercepting proxy stands between; have the coordinator's address exempted from inspection"
    )


async def _reachability(credentials: SiloCredentials) -> Check:
    name = "coordinator accepts this silo"
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
            if isinstance(problem, Unreachable):
                detail = f"{credentials.address} breaks the connection off ({problem}): ask the operator for its log"
                return Check(name=name, outcome=Outcome.FAILED, detail=detail)
            if isinstance(problem, AuthenticationError) or error.code() is grpc.StatusCode.PERMISSION_DENIED:
                return Check(name=name, outcome=Outcome.FAILED, detail=str(problem))
    return Check(
        name=name, outcome=Outcome.PASSED, detail=f"mutual TLS with {credentials.address} as {credentials.silo}"
    )


def _journal(folder: SiloFolder, credentials: SiloCredentials) -> RoundJournal:
    return RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)


def _last_plan(folder: SiloFolder, credentials: SiloCredentials) -> PlanBundle | None:
    """The plan that is offered now: one that is refused, else the one that was prepared last."""
    plans = PlanStore(folder.plans)
    if refused := plans.refused():
        return refused
    journal = _journal(folder, credentials)
    try:
        plan = journal.fact("plan")
    finally:
        journal.close()
    return None if plan is None else plans.load(Digest(plan))


def _plan(bundle: PlanBundle, policy: SiloPolicy) -> str:
    policy.check_plan(bundle)
    return f"{bundle.plan.name} ({bundle.plan.digest[:16]}), {bundle.plan.model.parameters:,} parameters, is allowed"


def _peers(folder: SiloFolder, credentials: SiloCredentials, rules: PolicyRules, bundle: PlanBundle | None) -> str:
    """A round with masks needs a cohort, and everybody in it has to be known here."""
    peers = trust_store(folder, credentials).peers()
    needed = max(rules.min_cohort, bundle.plan.schedule.min_silos if bundle else 0) - 1
    unconfirmed = sum(peer.how is How.FIRST_USE for peer in peers)
    found = f"{len(peers)} silos are pinned" + (f", {unconfirmed} of them on first use" if unconfirmed else "")
    if rules.trust_on_first_use:
        return f"{found}; others are on first use, which does not stop a coordinator that makes up silos"
    if len(peers) < needed:
        raise ConfigurationError(
            f"{found}, the smallest cohort that policy and plan allow takes {needed} beside this one: compare the keys that "
            "`silo-agent trust own` prints at theirs by telephone, then `silo-agent trust add NAME KEY`"
        )
    return f"{found}, at least {needed} are needed"


def _memory(bundle: PlanBundle) -> str:
    needed = BYTES_PER_PARAMETER * (bundle.layout.parameters * COPIES_IN_MEMORY)
    if bundle.base_layout is not None:
        needed += bundle.base_layout.total_bytes  # frozen: one copy, no gradient
    free = psutil.virtual_memory().available
    if free < needed:
        raise ConfigurationError(
            f"about {_mib(needed)} of memory are needed, {_mib(free)} are free: close other programs or add memory"
        )
    return f"{_mib(free)} free, about {_mib(needed)} needed"


def _disk(folder: SiloFolder, models_kept: int, bundle: PlanBundle | None) -> str:
    """Files are written over where they can be, so what is there already needs no more room."""
    needed = FREE_BYTES
    if bundle is not None:
        models = bundle.model_layout.total_bytes * max(2, models_kept)  # a download takes the place of the oldest
        masks = bundle.plan.aggregation.secure_aggregation
        updates = update_bytes(bundle) + (bundle.layout.total_bytes if masks else 0)  # the delta itself stays here
        residuals = bundle.layout.total_bytes * 2 if bundle.update_layout.dtype == "bfloat16" else 0
        base = bundle.base_layout.total_bytes if bundle.base_layout else 0
        there = sum(path.stat().st_size for part in (folder.models, folder.updates) for path in part.rglob("*"))
        needed += max(0, models + updates + residuals + base - there)
    free = shutil.disk_usage(folder.root).free
    if free < needed:
        raise ConfigurationError(
            f"{folder.root} has {_mib(free)} free, about {_mib(needed)} are needed: free some space"
        )
    return f"{_mib(free)} free in {folder.root}, about {_mib(needed)} needed"


def _data(read: Callable[[], DataSummary]) -> str:
    data = read()
    bad = f"; {data.bad_lines} bad lines left out, the first: {data.problems[0]}" if data.bad_lines else ""
    return f"{data.train_examples} train, {data.dev_examples} dev, {data.test_examples} test examples{bad}"


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"
