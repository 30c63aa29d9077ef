"""What a key file holds of a key in a token: its URI, and the public key that it had.

    pkcs11:token=silo-a;object=identity?module-path=/usr/lib/softhsm/libsofthsm2.so&pin-source=/etc/lorica/pin
    public 302a300506032b6570032100...

Nothing of it is secret. The public key is that of enrolment, so that another key under the same name is found out. The
first line may be edited, when a library or a PIN file moves. Neither may lie in the folder of the key file, the silo's
or federation's: a made-up backup could bring both the library and its name.
"""

import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from lorica_security.errors import ConfigurationError
from lorica_security.host.key_file import is_reference
from lorica_security.identity.identity_key import identity_key_from_pem, identity_key_to_pem
from lorica_security.pkcs11_keys.token_keys import TokenIdentityKey, TokenKey, TokenTlsKey, token_key
from lorica_security.pkcs11_keys.token_session import TokenUnusable
from lorica_security.pkcs11_keys.token_uri import TokenUri
from lorica_security.pki.tls_key import tls_key_from_pem, tls_key_to_pem

_PUBLIC = "public "


def in_token(key: object) -> bool:
    return isinstance(key, TokenIdentityKey | TokenTlsKey)


def identity_in_token(uri: str, home: Path) -> TokenIdentityKey:
    """The key of an identity that `uri` names, for the silo's or federation's folder `home`; raises ConfigurationError
    for one of another kind, and for a library or a PIN file in `home`; WrongPin."""
    return _identity(_named(uri, home))


def tls_key_in_token(uri: str, home: Path) -> TokenTlsKey:
    """The key of TLS, or of an authority, that `uri` names; as above."""
    return _tls(_named(uri, home))


def key_text(key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey) -> bytes:
    """What stands in the file of `key`: a reference, or the key itself as PEM, which is secret."""
    if isinstance(key, TokenIdentityKey | TokenTlsKey):
        return f"{key.uri.text}\n{_PUBLIC}{_spki(key).hex()}\n".encode()
    return identity_key_to_pem(key) if isinstance(key, Ed25519PrivateKey) else tls_key_to_pem(key)


def identity_key_of(text: bytes, home: Path) -> Ed25519PrivateKey:
    """From what `key_text` made of an identity's key, in a file below `home`; raises ConfigurationError, WrongPin."""
    return _identity(_referred(text, home)) if is_reference(text) else identity_key_from_pem(text)


def tls_key_of(text: bytes, home: Path) -> ec.EllipticCurvePrivateKey:
    """The same of a TLS key, or of an authority's."""
    return _tls(_referred(text, home)) if is_reference(text) else tls_key_from_pem(text)


def _named(text: str, home: Path) -> TokenKey:
    uri, inside = TokenUri.parse(text), home.resolve()
    for name, value in (("module-path", uri.module), ("pin-source", uri.pin_source)):
        if any(Path(place).is_relative_to(inside) for place in (os.path.normpath(value), os.path.realpath(value))):
            raise TokenUnusable(
                f"{name} {value} lies in {home}, whose files a backup or a peer may have brought: keep it elsewhere, "
                "where only root and this account write, and name that"
            )
    return token_key(uri)


def _referred(text: bytes, home: Path) -> TokenKey:
    try:
        uri, public, *more = text.decode("ascii").splitlines()
        known = bytes.fromhex(public.removeprefix(_PUBLIC))
    except ValueError:
        raise ConfigurationError(
            "a key file that begins with pkcs11: has not a line with the URI and one with the public key: restore it "
            "from backup"
        ) from None
    if any(more) or not public.startswith(_PUBLIC):
        raise ConfigurationError("a key file with a pkcs11: URI has lines that are none of it: restore it from backup")
    key = _named(uri, home)
    if _spki(key) != known:
        raise TokenUnusable(
            f"the key {key.uri.of_key} of token {key.uri.of_token} is another one than the file names: certificates "
            "and peers know that one; bring it back, or name the token and id that it has"
        )
    return key


def _identity(key: TokenKey) -> TokenIdentityKey:
    if not isinstance(key, TokenIdentityKey):
        raise TokenUnusable(
            f"the key {key.uri.of_key} of token {key.uri.of_token} is ECDSA on {key.curve.name}: an identity has an "
            "Ed25519 key"
        )
    return key


def _tls(key: TokenKey) -> TokenTlsKey:
    if not isinstance(key, TokenTlsKey):
        raise TokenUnusable(
            f"the key {key.uri.of_key} of token {key.uri.of_token} is Ed25519: TLS and authorities have ECDSA keys on "
            "P-256 or P-384"
        )
    return key


def _spki(key: TokenKey) -> bytes:
    return key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
