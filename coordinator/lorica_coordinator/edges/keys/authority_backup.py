"""The authority that issues, as one encrypted file that other tools can read: PKCS#12 with key, certificate and chain.

AES-256 and a key that PBKDF2 makes of the passphrase in 600,000 rounds. The coordinator's identity key is not in it:
silos pin that as well, so a machine that takes over needs both, or enrols its silos anew.
"""

from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PrivateFormat,
    pkcs12,
)

from lorica_coordinator.edges.keys.authorities import Authorities, keep_first, require_none
from lorica_security.errors import ConfigurationError, StateError, StorageError
from lorica_security.host import files
from lorica_security.identifiers import FederationName
from lorica_security.pkcs11_keys.reference import in_token
from lorica_security.pki.authority import Authority
from lorica_security.pki.tls_key import tls_key_to_pem

KDF_ROUNDS = 600_000
LEAST_PASSPHRASE_CHARACTERS = 12


def export_authority(authorities: Authorities, target: Path, passphrase: str) -> None:
    """Write the authority that issues to a new file; raises ConfigurationError for one that is there or a short
    passphrase."""
    if in_token(authorities.issuing.key):
        raise StateError(
            "the key of this authority lies in a token, which does not give it away: back the token up by its own means"
        )
    if target.exists():
        raise ConfigurationError(f"{target} is there already: choose a new file")
    if len(passphrase) < LEAST_PASSPHRASE_CHARACTERS:
        raise ConfigurationError(
            f"passphrase of {len(passphrase)} characters: take at least {LEAST_PASSPHRASE_CHARACTERS}, better five "
            "random words"
        )
    protection = (
        PrivateFormat.PKCS12.encryption_builder()
        .kdf_rounds(KDF_ROUNDS)
        .key_cert_algorithm(pkcs12.PBES.PBESv2SHA256AndAES256CBC)
        .hmac_hash(hashes.SHA256())
        .build(passphrase.encode())
    )
    issuing = authorities.issuing
    name = f"lorica CA of {issuing.federation}".encode()
    files.write_private(
        target,
        pkcs12.serialize_key_and_certificates(
            name, issuing.key, issuing.certificate, list(authorities.chain), protection
        ),
    )


def import_authority(folder: Path, source: Path, passphrase: str, federation: FederationName) -> None:
    """Make the authority of `source` that of a folder without one; raises ConfigurationError and then writes
    nothing."""
    try:
        content = source.read_bytes()
    except OSError as error:
        raise StorageError(f"{source} cannot be read: {error.strerror}") from error
    try:
        key, certificate, chain = pkcs12.load_key_and_certificates(content, passphrase.encode())
    except ValueError:
        raise ConfigurationError(
            f"{source} is no export of an authority, or the passphrase is another one: try again"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or certificate is None:
        raise ConfigurationError(
            f"{source} holds no ECDSA key with a certificate: give a file of `coordinator ca export`"
        )
    key_pem = tls_key_to_pem(key)
    require_none(folder, key_pem)
    authority = Authority.load(key_pem=key_pem, certificate_pem=certificate.public_bytes(Encoding.PEM))
    if authority.federation != federation:
        raise ConfigurationError(f"{source} is the authority of {authority.federation}, this folder is of {federation}")
    files.make_private_folder(folder)
    keep_first(folder, key_pem, b"".join(one.public_bytes(Encoding.PEM) for one in (certificate, *chain)))
