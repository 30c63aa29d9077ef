"""The federation's authorities on disk: the one that issues, its successor, and those that are still trusted.

    keys/ca.key ca.pem          the first; later ones are ca-2, ca-3 ...
    keys/ca-2.pem               a certificate, and the chain above it where an institution's CA certified it
    keys/ca-2.key               its private key; gone once another one issues
    keys/authorities.json       which of them there are, and in which stage; without it, `ca` issues
    keys/request.key            of a request that an institution's CA has not answered yet
    keys/successor.uri          which key of a token the next authority has, written by the operator of this host

Every step of a succession is one replacement of authorities.json: what it names was written before, what it no longer
needs is deleted after. A crash between leaves files that nothing names, which the next start of the coordinator
deletes.
"""

import json
import os
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.service.issued import AuthorityStanding
from lorica_security.errors import ConfigurationError, LoricaError, MalformedMessage, StateError
from lorica_security.host import files, key_file
from lorica_security.identifiers import FederationName
from lorica_security.pkcs11_keys.reference import in_token, key_text, tls_key_in_token, tls_key_of
from lorica_security.pki.authority import Authority
from lorica_security.pki.authority_succession import AuthoritySuccession, certificate_digest
from lorica_security.pki.external_authority import Certified, authority_request, check_certified
from lorica_security.pki.parsing import parse_certificates
from lorica_security.pki.pins import SpkiPin, spki_pin
from lorica_security.pki.tls_key import new_tls_key
from lorica_security.pki.trust_bundle import MAX_AUTHORITIES, TrustBundle

INDEX = "authorities.json"
REQUEST_KEY = "request.key"
SUCCESSOR_URI = "successor.uri"
FIRST = "ca"


class Stage(Enum):
    ISSUING = "issuing"
    SUCCESSOR = "successor"
    TRUSTED = "trusted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One authority. `succession` is its predecessor's word for it."""

    name: str
    stage: Stage
    certificate: x509.Certificate
    chain: tuple[x509.Certificate, ...] = ()
    succession: AuthoritySuccession | None = None

    @property
    def root(self) -> x509.Certificate:
        """The self-signed certificate that tokens pin."""
        return self.chain[-1] if self.chain else self.certificate


class Authorities:
    """All of them, as of the last `load` or step. One process at a time changes them: the one that holds the folder's
    lock."""

    def __init__(self, folder: Path, members: tuple[Member, ...], since: int, issuing: Authority) -> None:
        """`since`: when the set of them changed last, Unix seconds, rising with each change."""
        self._folder = folder
        self._standing = (members, since)  # replaced whole: other threads read it
        self._digest = (tuple[Member, ...](), b"")  # of which members, and what it is; replaced whole as well
        self._issuing = issuing

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._standing[0]

    @staticmethod
    def create(
        folder: Path, federation: FederationName, now: datetime, key: ec.EllipticCurvePrivateKey | None = None
    ) -> None:
        """Make the first authority, of `key` or a new one; raises ConfigurationError where there is one."""
        require_none(folder)
        authority = Authority.create(federation, now=now, key=key)
        keep_first(folder, key_text(authority.key), authority.certificate_pem())

    @classmethod
    def load(cls, folder: Path) -> "Authorities":
        """Raises ConfigurationError naming the file at fault."""
        members, since = _members(folder)
        issuing = [member for member in members if member.stage is Stage.ISSUING]
        if len(issuing) != 1:
            raise ConfigurationError(f"{folder / INDEX} names {len(issuing)} authorities that issue: restore it")
        return cls(folder, members, since, _authority(folder, issuing[0]))

    @property
    def issuing(self) -> Authority:
        return self._issuing

    @property
    def chain(self) -> tuple[x509.Certificate, ...]:
        """What certified the one that issues, up to a self-signed root; nothing where it is one."""
        return self._member(Stage.ISSUING).chain

    @property
    def members(self) -> tuple[Member, ...]:
        return self._members

    @property
    def trust(self) -> TrustBundle:
        """The authorities of this federation, the one that issues first."""
        return self.trusted[0]

    @property
    def trusted(self) -> tuple[TrustBundle, int]:
        """The same, and since when."""
        members, since = self._standing
        return TrustBundle(tuple(member.certificate for member in members)), since

    @property
    def trust_digest(self) -> bytes:
        """Of `trust`; computed anew only where the authorities changed, since each order of each silo asks for it."""
        members, _ = self._standing
        of, known = self._digest
        if of is not members:
            known = TrustBundle(tuple(member.certificate for member in members)).digest
            self._digest = members, known
        return known

    @property
    def with_chains(self) -> bytes:
        """PEM of the same with what certified them, for whoever pins a root."""
        certificates: list[x509.Certificate] = []
        for member in self._members:
            certificates += [one for one in (member.certificate, *member.chain) if one not in certificates]
        return b"".join(certificate.public_bytes(Encoding.PEM) for certificate in certificates)

    @property
    def successions(self) -> tuple[AuthoritySuccession, ...]:
        return tuple(member.succession for member in self._members if member.succession is not None)

    @property
    def pin(self) -> SpkiPin:
        """What a token made now pins."""
        return spki_pin(self._member(Stage.ISSUING).root)

    def standings(self) -> tuple[AuthorityStanding, ...]:
        return tuple(
            AuthorityStanding(
                name=member.name,
                stage=member.stage.value,
                subject=member.certificate.subject.rfc4514_string(),
                pin=spki_pin(member.root),
                digest=certificate_digest(member.certificate).hex(),
                begins_unix_s=member.certificate.not_valid_before_utc.timestamp(),
                expires_unix_s=member.certificate.not_valid_after_utc.timestamp(),
            )
            for member in self._members
        )

    def tidy(self) -> None:
        """Delete what a crash left between two steps: files that nothing names, keys that issue no more. Holds the
        lock."""
        named = {member.name for member in self._members}
        kept = {member.name for member in self._members if member.stage is not Stage.TRUSTED}
        for path in (*self._folder.glob("ca.*"), *self._folder.glob("ca-*.*")):
            if path.suffix == ".key" and path.stem not in kept:
                files.erase(path)
            elif path.suffix == ".pem" and path.stem not in named:
                path.unlink(missing_ok=True)

    # ---- steps: each is done when the index is replaced

    def rotate(self, now: datetime) -> None:
        """A successor joins what is trusted; raises StateError where there is one."""
        self._require_no_successor()
        authority = Authority.create(self._issuing.federation, now=now, key=self._next_key())
        self._join(key_text(authority.key), Certified(certificate=authority.certificate, chain=()), now)
        (self._folder / SUCCESSOR_URI).unlink(missing_ok=True)

    def request(self) -> bytes:
        """A PEM request for an institution's CA, of a key that is kept until the answer is adopted; the last one
        counts."""
        key = self._next_key()
        key_file.write_key(self._folder / REQUEST_KEY, key_text(key), os.environ)
        return authority_request(key, self._issuing.federation)

    def adopt(self, certificate_pem: bytes, chain_pem: bytes, now: datetime) -> None:
        """What the institution's CA made of the request joins as the successor; raises StateError,
        ConfigurationError."""
        self._require_no_successor()
        path = self._folder / REQUEST_KEY
        if not path.exists() or files.was_erased(path):
            raise StateError("no request is open: make one with `coordinator ca request`, and have it signed")
        pem = key_file.read_key(path, os.environ)
        key = tls_key_of(pem, self._folder.parent)
        self._join(
            pem,
            check_certified(
                certificate_pem, chain_pem, key=key.public_key(), federation=self._issuing.federation, now=now
            ),
            now,
        )
        files.erase(path)
        (self._folder / SUCCESSOR_URI).unlink(missing_ok=True)

    def activate(self) -> None:
        """The successor issues from now on; the key of the one before is deleted. Raises StateError without a
        successor."""
        successor = self._member(Stage.SUCCESSOR)
        before = self._member(Stage.ISSUING)
        authority = _authority(self._folder, successor)
        self._keep(
            replace(successor, stage=Stage.ISSUING),
            replace(before, stage=Stage.TRUSTED),
            *(member for member in self._members if member.stage is Stage.TRUSTED),
        )
        self._issuing = authority
        files.erase(self._folder / f"{before.name}.key")

    def retire(self, name: str, now: datetime) -> None:
        """It is trusted no longer; raises StateError for one that issues, and for none."""
        member = next((one for one in self._members if one.name == name), None)
        if member is None or member.stage is not Stage.TRUSTED:
            raise StateError(
                f"authority {name} is not one that is merely trusted still: `coordinator ca show` names them"
            )
        self._keep(*(one for one in self._members if one is not member), now=now)
        (self._folder / f"{name}.pem").unlink(missing_ok=True)

    # ---- how they are kept

    def _join(self, key_pem: bytes, certified: Certified, now: datetime) -> None:
        before = self._member(Stage.ISSUING)
        if len(self._members) == MAX_AUTHORITIES:
            raise StateError(f"{MAX_AUTHORITIES} authorities are trusted: retire one first")
        numbers = [int(path.stem.removeprefix("ca-")) for path in self._folder.glob("ca-*.pem")]
        name = f"ca-{max(numbers, default=1) + 1}"
        pem = b"".join(one.public_bytes(Encoding.PEM) for one in (certified.certificate, *certified.chain))
        files.replace(self._folder / f"{name}.pem", pem)
        key_file.write_key(self._folder / f"{name}.key", key_pem, os.environ)
        successor = Member(
            name=name,
            stage=Stage.SUCCESSOR,
            certificate=certified.certificate,
            chain=certified.chain,
            succession=AuthoritySuccession.sign(
                self._issuing.key, predecessor=before.certificate, successor=certified.certificate
            ),
        )
        self._keep(before, successor, *(one for one in self._members if one is not before), now=now)

    def _keep(self, *members: Member, now: datetime | None = None) -> None:
        """`now` where the set of them changes."""
        _, since = self._standing
        if now is not None:
            since = max(since + 1, int(now.timestamp()))
        lines = [
            {
                "name": member.name,
                "stage": member.stage.value,
                "predecessor": member.succession.predecessor.hex() if member.succession else "",
                "signature": member.succession.signature.hex() if member.succession else "",
            }
            for member in members
        ]
        content = json.dumps({"version": 1, "since": since, "authorities": lines}, indent=1)
        files.write_private(self._folder / INDEX, content.encode() + b"\n")
        self._standing = (members, since)

    def _member(self, stage: Stage) -> Member:
        for member in self._members:
            if member.stage is stage:
                return member
        raise StateError(
            "no authority waits to succeed: make one with `coordinator ca rotate`, or `coordinator ca request` and "
            "`coordinator ca import`"
        )

    def _next_key(self) -> ec.EllipticCurvePrivateKey:
        """A successor's: the one in a token that a file of this host names, for a URI names code, and no call brings
        one; else a new one. Where the present key lies in a token, nobody should find out later that the next does not.
        """
        path = self._folder / SUCCESSOR_URI
        if not path.exists():
            if in_token(self._issuing.key):
                raise StateError(
                    "the key of this authority lies in a token, and its successor's would lie in a file: make another "
                    f"key in the token, and write its pkcs11: URI into {path} (mode 0600)"
                )
            return new_tls_key()
        key = tls_key_in_token(files.read_private(path).decode("utf-8", "replace").strip(), self._folder.parent)
        if key.public_key() == self._issuing.key.public_key():
            raise StateError(f"{path} names the key of the present authority: make another one in the token")
        return key

    def _require_no_successor(self) -> None:
        for member in self._members:
            if member.stage is Stage.SUCCESSOR:
                raise StateError(
                    f"authority {member.name} waits to succeed already: `coordinator ca activate` lets it, once "
                    "every silo knows it"
                )


def require_none(folder: Path, key_pem: bytes | None = None) -> None:
    """Raises ConfigurationError where `folder` holds an authority, or the key of another one than `key_pem`, whose
    import was cut off."""
    key = folder / f"{FIRST}.key"
    cut_off = key_pem is not None and key.exists() and key_file.read_key(key, os.environ) == key_pem
    if any((folder / name).exists() for name in (f"{FIRST}.pem", INDEX)) or (key.exists() and not cut_off):
        raise ConfigurationError(f"{folder} already holds an authority: choose another folder, or delete it yourself")


def keep_first(folder: Path, key_pem: bytes, certificates_pem: bytes) -> None:
    """The authority of a folder that has none: it is there with its certificate, which is written last."""
    key_file.write_key(folder / f"{FIRST}.key", key_pem, os.environ)
    files.replace(folder / f"{FIRST}.pem", certificates_pem)


def _authority(folder: Path, member: Member) -> Authority:
    text = key_file.read_key(folder / f"{member.name}.key", os.environ)
    certificate_pem = member.certificate.public_bytes(Encoding.PEM)
    if key_file.is_reference(text):
        return Authority.of(tls_key_of(text, folder.parent), certificate_pem=certificate_pem)
    return Authority.load(key_pem=text, certificate_pem=certificate_pem)


def _members(folder: Path) -> tuple[tuple[Member, ...], int]:
    """Them, and since when they are those."""
    index = folder / INDEX
    if not index.exists():
        first = _member_of(folder, {"name": FIRST, "stage": Stage.ISSUING.value})
        return (first,), int(first.certificate.not_valid_before_utc.timestamp())
    try:
        content = json.loads(files.read_private(index))
        if content["version"] != 1:
            raise ConfigurationError(f"{index} has version {content['version']}: run the release that wrote it")
        return tuple(_member_of(folder, line) for line in content["authorities"]), int(content["since"])
    except LoricaError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(f"{index} does not parse ({error!r}): restore it from backup") from error


def _member_of(folder: Path, line: dict[str, object]) -> Member:
    name = str(line["name"])
    if "/" in name:
        raise ConfigurationError(f"{folder / INDEX} names {name!r}: restore it from backup")
    path = folder / f"{name}.pem"
    try:
        certificate, *chain = parse_certificates(path.read_bytes())
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}; run coordinator init") from error
    except (MalformedMessage, ValueError) as error:
        raise ConfigurationError(f"CA certificate file {path} cannot be used: {error}") from error
    succession = None
    if line.get("signature"):
        succession = AuthoritySuccession(
            predecessor=bytes.fromhex(str(line["predecessor"])),
            successor=certificate_digest(certificate),
            signature=bytes.fromhex(str(line["signature"])),
        )
    return Member(
        name=name,
        stage=Stage(line["stage"]),
        certificate=certificate,
        chain=tuple(chain),
        succession=succession,
    )
