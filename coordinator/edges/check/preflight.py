"""`coordinator check`: what could keep this federation from working, found before silos do.

It changes nothing and works beside a running coordinator, which it then asks for its certificate as a silo would. What it can
find has names: misconfigurations.py.
"""

import errno
import ipaddress
import os
import resource
import shutil
import socket
import sqlite3
import ssl
import stat
import tomllib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import psutil
from cryptography import x509

from coordinator.edges.check.misconfigurations import Mistake
from coordinator.edges.database.round_store import SqlRoundStore
from coordinator.edges.database.round_tables import TABLES_VERSION
from coordinator.edges.keys.authorities import FIRST, INDEX
from coordinator.edges.keys.coordinator_folder import CoordinatorFolder
from coordinator.edges.keys.key_store import KeyStore, key_files
from coordinator.edges.server.places import PLACES
from coordinator.plans.forecast import require_worth
from coordinator.plans.plan_folder import PLAN_FILE, compile_plan
from coordinator.plans.plan_shelf import PlanShelf
from coordinator.rounds.states import State
from coordinator.service.records import EnrolledSilo
from coordinator.settings import Settings, reachable
from lorica_security.console.preflight import Check, Checks, Misconfigured, meaning, mebibytes, misconfigured
from lorica_security.daemon.listen_address import address, require_bindable
from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError, StorageError
from lorica_security.host import key_file
from lorica_security.host.files import make_private_folder
from lorica_security.host.process_lock import holder
from lorica_security.identifiers import federation_name
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import check_coordinator
from lorica_security.pki.validity import Window
from silo_wire.canonical import Digest
from silo_wire.plans.plan import Plan, PlanBundle

CLOCK_TOLERANCE_S = 300
PROBE_TIMEOUT_S = 10.0
OWN_MEMORY_BYTES = 400 << 20
"""With PyTorch loaded; the transfers that it works at come on top."""
TRANSFER_BYTES = 10 << 20
LEAST_OPEN_FILES = 2048

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


def _open_files() -> int:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return 1 << 30 if hard == resource.RLIM_INFINITY else hard


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """What checks stand on. `keys` loads the folder's key material for these settings; `plan` names the plan, "": see `_plan_name`."""

    folder: CoordinatorFolder
    keys: Callable[[Settings], KeyStore]
    now: Callable[[], datetime]
    plan: str = ""
    free_memory: Callable[[], int] = lambda: int(psutil.virtual_memory().available)
    free_disk: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    open_files: Callable[[], int] = _open_files


def preflight(ground: Ground) -> Sequence[Check]:
    """Every check in order; none of them raises for what it finds."""
    checks, found = Checks(), _Found(ground)
    if not checks.run("settings", found.read_settings):
        checks.skip(*_AFTER_SETTINGS, because="federation.toml cannot be used")
        return checks.done
    checks.run("folders", found.folders)
    keys = found.keys_problem()
    if keys is None:
        checks.run("process", found.process)
    else:
        checks.skip("process", because="the keys cannot be used")
    checks.run("keys", found.keys_said)
    if keys is None:
        checks.run("certificates", found.certificates)
    else:
        checks.skip("certificates", because="the keys cannot be used")
    usable = found.settings.state_folder.is_dir()
    if usable:
        database = checks.run("state database", found.database)
    else:
        database = False
        checks.skip("state database", because="there is no state folder")
    if keys is None:
        checks.run("clock", found.clock)
    else:
        checks.skip("clock", because="the keys cannot be used")
    checks.run("address", found.addresses)
    checks.run("ports", found.ports)
    if usable:
        plan = checks.run("plan", found.plan)
    else:
        plan = False
        checks.skip("plan", because="there is no state folder")
    if plan and database:
        checks.run("cohort", found.cohort)
    else:
        checks.skip("cohort", because="the state cannot be used" if plan else "there is no plan to hold it to")
    if plan:
        checks.run("disk", found.disk)
    else:
        checks.skip("disk", because="there is no plan to hold it to")
    checks.run("memory", found.memory)
    checks.run("open files", found.files)
    checks.run("device", found.device)
    return checks.done


class _Found:
    """What earlier checks read, for later ones. Each check returns what it saw."""

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._now = ground.now()
        self._settings: Settings | None = None
        self._keys: KeyStore | None = None
        self._running: int | None = None
        self._shown: bytes | None = None
        self._silos: tuple[EnrolledSilo, ...] = ()
        self._under_way: str = ""
        self._newest = 0.0
        self._bundle: PlanBundle | None = None

    @property
    def settings(self) -> Settings:
        assert self._settings is not None, "checked first"
        return self._settings

    @property
    def keys(self) -> KeyStore:
        assert self._keys is not None, "checked before"
        return self._keys

    # --- what lies in the folder

    def read_settings(self) -> str:
        with meaning(Mistake.SETTINGS.value):
            self._settings = Settings.read(self._ground.folder.settings)
        return f"federation {self.settings.federation}, {self._ground.folder.settings}"

    def folders(self) -> str:
        folder, state = self._ground.folder, self.settings.state_folder
        with meaning(Mistake.STATE_UNUSABLE.value, StorageError):
            try:
                state.mkdir(mode=0o700, parents=True, exist_ok=True)
                probe = state / ".check"
                probe.write_bytes(b"")
                probe.unlink()
            except OSError as error:
                raise misconfigured(
                    Mistake.STATE_UNUSABLE.value, f"{state} cannot be used: {error.strerror}"
                ) from error
        outside = (
            () if state.resolve().is_relative_to(folder.root.resolve()) else (state,)
        )  # what is below a private folder is private
        for part in (folder.root, folder.keys, *outside):
            if part.is_dir():
                with meaning(Mistake.FOLDER_OPEN.value, ConfigurationError):
                    make_private_folder(part)
        return f"{folder.root} and {state} are this user's alone"

    def keys_problem(self) -> LoricaError | None:
        """Loads the keys; what is wrong with them, if anything."""
        try:
            self._load_keys()
        except LoricaError as error:
            self._keys_error: LoricaError | None = error
        else:
            self._keys_error = None
        return self._keys_error

    def keys_said(self) -> str:
        if self._keys_error is not None:
            raise self._keys_error
        protected = key_file.is_encrypted((self._ground.folder.keys / "identity.key").read_bytes())
        return f"authority of {self.keys.federation}, {'encrypted' if protected else 'in clear, readable by their owner alone'}"

    def _load_keys(self) -> None:
        folder = self._ground.folder.keys
        of_the_first = () if (folder / INDEX).is_file() else (f"{FIRST}.pem", f"{FIRST}.key")
        for name in (*of_the_first, "identity.key"):
            if not (folder / name).is_file():
                raise misconfigured(Mistake.KEY_MISSING.value, f"{folder / name} is missing")
        for path in key_files(folder):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                raise misconfigured(Mistake.KEY_OPEN.value, f"{path} has mode {mode:04o}: others can read it")
        with meaning(Mistake.PASSPHRASE.value):
            passphrase = key_file.passphrase_of(os.environ)
        if passphrase is not None:
            for path in key_files(folder):
                if not key_file.is_encrypted(path.read_bytes()):
                    raise misconfigured(Mistake.KEY_CLEAR.value, f"{path} is not encrypted")
        with (
            meaning(Mistake.PASSPHRASE.value, key_file.WrongPassphrase),
            meaning(Mistake.KEY_DAMAGED.value, ConfigurationError),
        ):
            keys = self._ground.keys(self.settings)
        if keys.federation != self.settings.federation:
            raise misconfigured(
                Mistake.FEDERATION_RENAMED.value,
                f"federation = {self.settings.federation!r}, the authority is of {keys.federation!r}",
            )
        self._keys = keys

    def process(self) -> str:
        self._running = holder(self._ground.folder.lock)
        if self._running is None:
            return "no coordinator runs on this folder now"
        at = address(self.settings.listen.silos)
        try:
            self._shown = _certificate_at(reachable(at.host), at.port)
            check_coordinator(self._shown, trust=self.keys.trust, now=self._now, federation=self.keys.federation)
        except (OSError, LoricaError) as error:
            # A certificate that has ended is a matter of the next check.
            if self._shown is None or not self.keys.trust.issuers_of(parse_certificate(self._shown)):
                raise misconfigured(
                    Mistake.FOLDER_HELD.value,
                    f"process {self._running} holds {self._ground.folder.lock}, and {self.settings.listen.silos} does not answer as "
                    f"this federation's coordinator ({error})",
                ) from error
        return f"process {self._running} serves {self.settings.listen.silos}"

    def certificates(self) -> str:
        authority = Window.of(self.keys.authority.certificate)
        if self._now > authority.end:
            raise misconfigured(Mistake.AUTHORITY_ENDED.value, f"the authority ended at {authority.end.isoformat()}")
        lifetime = max(self.settings.certificates.silo_lifetime, self.settings.certificates.own_lifetime)
        if authority.end - self._now < lifetime:
            raise misconfigured(
                Mistake.AUTHORITY_ENDING.value,
                f"the authority ends at {authority.end.isoformat()}, certificates are asked for {lifetime.days} days",
            )
        said = f"the authority is valid until {authority.end.isoformat()}"
        if self._shown is None:
            return f"{said}; the coordinator's own is looked at when it starts"
        leaf = parse_certificate(self._shown)
        own = Window.of(leaf)
        if own.end - self._now < self.settings.certificates.own_lifetime / 10:
            raise misconfigured(
                Mistake.CERTIFICATE_ENDING.value, f"the coordinator's own ends at {own.end.isoformat()}"
            )
        if missing := sorted(set(self.settings.public.hosts) - _names(leaf)):
            raise misconfigured(
                Mistake.NAMES_CHANGED.value, f"the coordinator's own does not name {', '.join(missing)}"
            )
        return f"{said}, the coordinator's own until {own.end.isoformat()}"

    def database(self) -> str:
        path = self.settings.state_folder / "state.sqlite"
        if not path.is_file() or path.stat().st_size == 0:
            raise misconfigured(Mistake.DATABASE_MISSING.value, f"{path} is missing or empty")
        version, verdict = _database_facts(path)
        if version != TABLES_VERSION:
            raise misconfigured(
                Mistake.DATABASE_VERSION.value,
                f"{path} has tables of version {version}, this release has {TABLES_VERSION}",
            )
        if verdict != "ok":
            raise misconfigured(Mistake.DATABASE_DAMAGED.value, f"{path}: {verdict}")
        with (
            meaning(Mistake.DATABASE_DAMAGED.value),
            closing(SqlRoundStore(path, federation_name(self.settings.federation))) as store,
        ):
            recorded = store.silos()
            digest, self._under_way = _under_way(store.load())
            rounds = store.rounds(digest, 1) if digest else ()
        self._silos = tuple(silo for silo in recorded if silo.revoked_unix_s is None)
        instants = [0.0, *(max(silo.enrolled_unix_s, silo.last_seen_unix_s) for silo in recorded)]
        instants += [row.closed_unix_s or row.opened_unix_s for row in rounds]
        self._newest = max(instants)
        return f"{path} is whole; enrolled: {len(self._silos)}"

    def clock(self) -> str:
        begin = Window.of(self.keys.authority.certificate).begin
        if self._now < begin:
            raise misconfigured(
                Mistake.CLOCK_EARLY.value,
                f"the clock says {self._now.isoformat()}, before {begin.isoformat()} when the authority was made",
            )
        if self._now.timestamp() < self._newest - CLOCK_TOLERANCE_S:
            newest = datetime.fromtimestamp(self._newest, UTC)
            raise misconfigured(
                Mistake.CLOCK_BEHIND.value,
                f"the clock says {self._now.isoformat()}, the newest record is of {newest.isoformat()}",
            )
        return f"{self._now.isoformat(timespec='seconds')}, after everything that is recorded here"

    # --- how silos reach it

    def addresses(self) -> str:
        listening = address(self.settings.listen.silos).host
        resolved = {host: _resolved(host) for host in self.settings.public.hosts}
        loopback = [host for host, ips in resolved.items() if all(ip.is_loopback for ip in ips)]
        if _is_loopback(listening):
            if len(loopback) < len(resolved):
                outside = next(host for host in resolved if host not in loopback)
                raise misconfigured(
                    Mistake.LISTEN_LOOPBACK.value,
                    f"[listen] silos = {self.settings.listen.silos!r} is loopback, silos are told to call {outside}",
                )
        elif len(loopback) == len(resolved):
            raise misconfigured(
                Mistake.HOST_LOOPBACK.value,
                f"{', '.join(loopback)} leads to loopback, {self.settings.listen.silos} is listened on",
            )
        return f"silos are told to call {self.settings.public.hosts[0]}:{self.settings.public_silos_port}"

    def ports(self) -> str:
        listen = self.settings.listen
        places = {"silos": listen.silos, "enrolment": listen.enrolment, "metrics": listen.metrics}
        if listen.status:
            places["status"] = listen.status
        numbers = [address(place).port for place in places.values()]
        if alike := {number for number in numbers if number and numbers.count(number) > 1}:
            raise misconfigured(
                Mistake.PORTS_ALIKE.value, f"[listen] has port {', '.join(map(str, alike))} more than once"
            )
        if self._running is not None:
            return f"the running coordinator (process {self._running}) has them"
        for key, place in places.items():
            _require_bindable(key, place)
        return f"{', '.join(places.values())} are free"

    # --- the plan, and what it takes

    def plan(self) -> str:
        shelf = PlanShelf(self.settings.state_folder)
        name = self._ground.plan or self._under_way or _only(shelf.names())
        if name not in shelf.names():
            raise misconfigured(Mistake.PLAN_MISSING.value, f"plan {name!r} is not in {shelf.plans}")
        folder = shelf.folder(name)
        _require_threshold(folder / PLAN_FILE)
        with (
            meaning(Mistake.PLAN_WRONG.value, ConfigurationError, StorageError),
            meaning(Mistake.PLAN_EDITED.value, IntegrityError),
        ):
            try:
                text = (folder / PLAN_FILE).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise misconfigured(
                    Mistake.PLAN_WRONG.value, f"{folder / PLAN_FILE} cannot be read: {error}"
                ) from error
            plan = Plan.from_toml(text, str(folder / PLAN_FILE))
            with meaning(Mistake.NOISE.value, ConfigurationError):
                require_worth(plan, str(folder / PLAN_FILE))
            self._bundle = compile_plan(folder)
        return f"{name} ({self._bundle.plan.digest[:16]}) is whole, {self._bundle.plan.model.parameters:,} parameters"

    def cohort(self) -> str:
        assert self._bundle is not None
        plan, enrolled = self._bundle.plan, len(self._silos)
        if enrolled < plan.schedule.min_silos:
            raise misconfigured(
                Mistake.TOO_FEW.value,
                f"{enrolled} silos are enrolled, plan {plan.name} has min_silos = {plan.schedule.min_silos}",
            )
        if plan.aggregation.secure_aggregation:
            # Here, not above: numpy, which it brings, is for plans with masks alone.
            from silo_wire.codecs.secure_codec import MAX_COHORT

            if enrolled > MAX_COHORT:
                raise misconfigured(
                    Mistake.TOO_MANY.value,
                    f"{enrolled} silos are enrolled, secure aggregation takes {MAX_COHORT} at most",
                )
        return f"{enrolled} silos are enrolled, at least {plan.schedule.min_silos} are needed"

    def disk(self) -> str:
        assert self._bundle is not None
        state, silos = self.settings.state_folder, max(len(self._silos), self._bundle.plan.schedule.min_silos)
        # Here, not above: torch takes seconds to import.
        from coordinator.edges.models.plan_disk import MODELS_KEPT, plan_disk

        needed = plan_disk(self._bundle, silos)
        there = _size_below(state / "spools") + _size_below(state / "models" / self._bundle.plan.digest)
        more, free = max(0, needed - there), self._ground.free_disk(state)
        if free < more:
            raise misconfigured(
                Mistake.DISK.value,
                f"{state} has {mebibytes(free)} free, a cohort of {silos} and {MODELS_KEPT} models take {mebibytes(more)} more",
            )
        return f"{mebibytes(free)} free in {state}, {mebibytes(more)} needed for a cohort of {silos}"

    # --- the machine

    def memory(self) -> str:
        needed, free = needed_memory(), self._ground.free_memory()
        if free < needed and self._running is None:
            raise misconfigured(
                Mistake.MEMORY.value, f"{mebibytes(free)} are free, about {mebibytes(needed)} are needed"
            )
        return f"{mebibytes(free)} free, about {mebibytes(needed)} needed"

    def files(self) -> str:
        allowed = self._ground.open_files()
        if allowed < LEAST_OPEN_FILES:
            raise misconfigured(
                Mistake.OPEN_FILES.value, f"a process may have {allowed} files open, {LEAST_OPEN_FILES} are needed"
            )
        return f"a process may have {allowed} files open"

    def device(self) -> str:
        wanted = self.settings.aggregation.device
        if wanted != "cuda":
            return f"{wanted}: there is always one"
        # Here, not above: torch takes seconds to import.
        from coordinator.edges.sums.aggregator import device_for

        with meaning(Mistake.DEVICE.value, ConfigurationError):
            return str(device_for(wanted))


def needed_memory() -> int:
    """About how many bytes a coordinator has here, whatever model and silos."""
    return OWN_MEMORY_BYTES + PLACES * TRANSFER_BYTES


def _names(certificate: x509.Certificate) -> set[str]:
    """The hosts that it is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    }


def _certificate_at(host: str, port: int) -> bytes:
    """The leaf (DER) of whoever answers there over TLS 1.3; raises OSError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    with socket.create_connection((host, port), PROBE_TIMEOUT_S) as raw, context.wrap_socket(raw) as connection:
        certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        raise OSError(f"{host}:{port} showed no certificate")
    return certificate


def _database_facts(path: Path) -> tuple[int, str]:
    """The version of its tables, and "ok" or what SQLite finds inconsistent; read alone."""
    try:
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True, timeout=PROBE_TIMEOUT_S)) as database:
            (version,) = database.execute("SELECT version FROM schema").fetchone()
            (verdict,) = database.execute("PRAGMA quick_check(1)").fetchone()
    except (sqlite3.Error, TypeError) as error:
        raise misconfigured(Mistake.DATABASE_DAMAGED.value, f"{path} cannot be read ({error})") from error
    return int(version), " ".join(str(verdict).split())


def _under_way(state: State) -> tuple[Digest | None, str]:
    """Digest and name of the plan under way."""
    course = getattr(state, "course", None)
    return (None, "") if course is None else (course.terms.plan, course.terms.name)


def _resolved(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise misconfigured(
            Mistake.HOST_UNRESOLVED.value, f"[public] hosts: {host} does not resolve ({error})"
        ) from error
    return [ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


def _is_loopback(host: str) -> bool:
    try:
        return all(ip.is_loopback for ip in _resolved(host))
    except Misconfigured:
        return False  # the ports' check names it


def _require_bindable(key: str, place: str) -> None:
    try:
        require_bindable(address(place))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            mistake = Mistake.PORT_TAKEN
        else:
            mistake = Mistake.PORT_PRIVILEGED if error.errno == errno.EACCES else Mistake.ADDRESS_ELSEWHERE
        raise misconfigured(mistake.value, f"[listen] {key} = {place!r} cannot be had: {error.strerror}") from error


def _only(names: Sequence[str]) -> str:
    """The plan that is meant where none is named and none is under way: `default`, as `coordinator serve` has it, or the only one."""
    return "default" if "default" in names or len(names) != 1 else names[0]


def _require_threshold(plan_file: Path) -> None:
    """Before the plan is read as a whole, which refuses such a threshold among everything else."""
    try:
        values = tomllib.loads(plan_file.read_text(encoding="utf-8"))
        masked, threshold = values["aggregation"]["secure_aggregation"], values["aggregation"]["threshold"]
        silos = values["schedule"]["min_silos"]
        wrong = bool(masked) and threshold != 0 and not 3 <= threshold <= silos
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, KeyError, TypeError):
        return  # what else is wrong with it, the plan's own reader says
    if wrong:
        raise misconfigured(
            Mistake.THRESHOLD.value, f"{plan_file}: [aggregation] threshold = {threshold} with min_silos = {silos}"
        )


def _size_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder.is_dir() else 0
