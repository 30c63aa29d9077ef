"""What lies in a coordinator's folder: settings, permissions, keys, the process that holds it, certificates, the
clock."""

import os
import socket
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from cryptography import x509

from lorica_coordinator.edges.check.found import PROBE_TIMEOUT_S, Found
from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.opening import bucket_place
from lorica_coordinator.edges.kept.settled import probe
from lorica_coordinator.edges.keys.authorities import FIRST, INDEX
from lorica_coordinator.edges.keys.key_store import KeyStore, key_files
from lorica_coordinator.settings import reachable
from lorica_security.console.preflight import meaning, mebibytes, misconfigured
from lorica_security.daemon.listen_address import address
from lorica_security.daemon.unverified_tls import unverified_tls
from lorica_security.errors import ConfigurationError, LoricaError, StorageError
from lorica_security.host import ballast, key_file
from lorica_security.host.files import make_private_folder
from lorica_security.host.process_lock import holder, stands_by
from lorica_security.pkcs11_keys.token_session import TokenUnusable, WrongPin
from lorica_security.pkcs11_keys.token_uri import BY_LABEL, TokenUri
from lorica_security.pki.parsing import parse_certificate
from lorica_security.pki.peer import check_coordinator
from lorica_security.pki.validity import Window

CLOCK_TOLERANCE_S = 300
_PATIENCE_S, _REQUEST_S = 3.0, 10.0


def folders(found: Found) -> str:
    folder, state = found.ground.folder, found.settings.state_folder
    with meaning(Mistake.STATE_UNUSABLE.value, StorageError):
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            probe = state / ".check"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise misconfigured(Mistake.STATE_UNUSABLE.value, f"{state} cannot be used: {error.strerror}") from error
    outside = (
        () if state.resolve().is_relative_to(folder.root.resolve()) else (state,)
    )  # what is below a private folder is private
    for part in (folder.root, folder.keys, *outside):
        if part.is_dir():
            with meaning(Mistake.FOLDER_OPEN.value, ConfigurationError):
                make_private_folder(part)
    return f"{folder.root} and {state} are this user's alone"


def load_keys(found: Found) -> None:
    """Load the keys; what is wrong with them, if anything, is what `keys_said` finds."""
    try:
        found.loaded_keys = _loaded(found)
    except LoricaError as error:
        found.keys_error = error


def keys_said(found: Found) -> str:
    if found.keys_error is not None:
        raise found.keys_error
    contents = [path.read_bytes() for path in key_files(found.ground.folder.keys)]
    uris = [TokenUri.parse(one.decode().splitlines()[0]) for one in contents if key_file.is_reference(one)]
    by_label = "" if all(uri.serial for uri in uris) else f"; {BY_LABEL}"
    kept = "encrypted" if any(map(key_file.is_encrypted, contents)) else "in clear, readable by their owner alone"
    each = "which has" if len(uris) == 1 else "each of which has"
    also = f"; {len(uris)} in a token, {each} signed a challenge{by_label}"
    return f"authority of {found.keys.federation}, {kept}{also if uris else ''}"


def _loaded(found: Found) -> KeyStore:
    folder = found.ground.folder.keys
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
            content = path.read_bytes()
            if not key_file.is_reference(content) and not key_file.is_encrypted(content):
                raise misconfigured(Mistake.KEY_CLEAR.value, f"{path} is not encrypted")
    with (
        meaning(Mistake.PASSPHRASE.value, key_file.WrongPassphrase),
        meaning(Mistake.KEY_DAMAGED.value, ConfigurationError),
        meaning(Mistake.TOKEN.value, TokenUnusable, WrongPin),
    ):
        keys = found.ground.keys(found.settings)
    if keys.federation != found.settings.federation:
        raise misconfigured(
            Mistake.FEDERATION_RENAMED.value,
            f"federation = {found.settings.federation!r}, the authority is of {keys.federation!r}",
        )
    return keys


KEYS_IN_THE_FOLDER: Final = (
    "[storage] blobs is set, and attempt_keys is not: without this folder a coordinator elsewhere goes on with the "
    "round without the updates that it had, tries a masked round again or leaves it where silos revealed shares, and "
    "does not see that the database was put back; set attempt_keys to a folder that every coordinator sees"
)


def bucket(found: Found) -> str:
    """One small object is put, read, listed and deleted."""
    with meaning(Mistake.BUCKET.value):
        place = bucket_place(found.settings, found.ground.folder.settings)
        probe(Bucket.at(place, patience_s=_PATIENCE_S, request_s=_REQUEST_S))
    return f"{place.name} takes files, gives them back, lists and deletes them"


def attempt_keys(found: Found) -> str:
    """Whether the ballast that is kept there has room."""
    folder = Path(found.settings.storage.attempt_keys)
    if not folder.is_dir():
        raise misconfigured(Mistake.KEYS_DISK.value, f"{folder} is not there")
    free, needed = found.ground.free_disk(folder), 2 * ballast.BYTES
    if free < needed:
        raise misconfigured(
            Mistake.KEYS_DISK.value, f"{folder} has {mebibytes(free)} free, {mebibytes(needed)} are needed"
        )
    return f"{mebibytes(free)} free in {folder}, {mebibytes(needed)} needed"


def process(found: Found) -> str:
    found.running = holder(found.ground.folder.lock)
    if found.running is None:
        return "no coordinator runs on this folder now"
    if stands_by(found.ground.folder.lock):
        return f"process {found.running} stands by: another coordinator leads"
    at = address(found.settings.listen.silos)
    try:
        found.shown = _certificate_at(reachable(at.host), at.port)
        check_coordinator(found.shown, trust=found.keys.trust, now=found.now, federation=found.keys.federation)
    except (OSError, LoricaError) as error:
        # A certificate that has ended is a matter of the next check.
        if found.shown is None or not found.keys.trust.issuers_of(parse_certificate(found.shown)):
            raise misconfigured(
                Mistake.FOLDER_HELD.value,
                f"process {found.running} holds {found.ground.folder.lock}, and {found.settings.listen.silos} does "
                f"not answer as this federation's coordinator ({error})",
            ) from error
    return f"process {found.running} serves {found.settings.listen.silos}"


def certificates(found: Found) -> str:
    authority = Window.of(found.keys.authority.certificate)
    if found.now > authority.end:
        raise misconfigured(Mistake.AUTHORITY_ENDED.value, f"the authority ended at {authority.end.isoformat()}")
    lifetime = max(found.settings.certificates.silo_lifetime, found.settings.certificates.own_lifetime)
    if authority.end - found.now < lifetime:
        raise misconfigured(
            Mistake.AUTHORITY_ENDING.value,
            f"the authority ends at {authority.end.isoformat()}, certificates are asked for {lifetime.days} days",
        )
    said = f"the authority is valid until {authority.end.isoformat()}"
    if found.shown is None:
        return f"{said}; the coordinator's own is looked at when it starts"
    leaf = parse_certificate(found.shown)
    own = Window.of(leaf)
    if own.end - found.now < found.settings.certificates.own_lifetime / 10:
        raise misconfigured(Mistake.CERTIFICATE_ENDING.value, f"the coordinator's own ends at {own.end.isoformat()}")
    if missing := sorted(set(found.settings.public.hosts) - _names(leaf)):
        raise misconfigured(Mistake.NAMES_CHANGED.value, f"the coordinator's own does not name {', '.join(missing)}")
    return f"{said}, the coordinator's own until {own.end.isoformat()}"


def clock(found: Found) -> str:
    begin = Window.of(found.keys.authority.certificate).begin
    if found.now < begin:
        raise misconfigured(
            Mistake.CLOCK_EARLY.value,
            f"the clock says {found.now.isoformat()}, before {begin.isoformat()} when the authority was made",
        )
    if found.now.timestamp() < found.newest - CLOCK_TOLERANCE_S:
        newest = datetime.fromtimestamp(found.newest, UTC)
        raise misconfigured(
            Mistake.CLOCK_BEHIND.value,
            f"the clock says {found.now.isoformat()}, the newest record is of {newest.isoformat()}",
        )
    return f"{found.now.isoformat(timespec='seconds')}, after everything that is recorded here"


def _names(certificate: x509.Certificate) -> set[str]:
    """The hosts that it is for."""
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return {
        *names.get_values_for_type(x509.DNSName),
        *(str(address) for address in names.get_values_for_type(x509.IPAddress)),
    }


def _certificate_at(host: str, port: int) -> bytes:
    """The leaf (DER) of whoever answers there over TLS 1.3; raises OSError."""
    with (
        socket.create_connection((host, port), PROBE_TIMEOUT_S) as raw,
        unverified_tls().wrap_socket(raw) as connection,
    ):
        certificate = connection.getpeercert(binary_form=True)
    if certificate is None:
        raise OSError(f"{host}:{port} showed no certificate")
    return certificate
