"""Which keys may stand in a TLS certificate: ECDSA on P-256 or P-384. New ones are P-256.

Not Ed25519: gRPC's own TLS (BoringSSL, grpcio 1.85) does not negotiate it, so such a certificate could never connect.
"""

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from lorica_security.errors import ConfigurationError, MalformedMessage

TlsPrivateKey = ec.EllipticCurvePrivateKey
TlsPublicKey = ec.EllipticCurvePublicKey

_ALLOWED = "use ECDSA on P-256 or P-384"


def new_tls_key() -> ec.EllipticCurvePrivateKey:
    """A fresh P-256 key from the operating system's entropy."""
    return ec.generate_private_key(ec.SECP256R1())


def check_tls_public_key(key: object) -> TlsPublicKey:
    """`key` if a certificate may be issued for it; raises MalformedMessage that says why not."""
    match key:
        case ec.EllipticCurvePublicKey() if isinstance(key.curve, ec.SECP256R1 | ec.SECP384R1):
            return key
        case ec.EllipticCurvePublicKey():
            raise MalformedMessage(f"TLS key on curve {key.curve.name} is not allowed: {_ALLOWED}")
        case rsa.RSAPublicKey():
            raise MalformedMessage(f"TLS key is RSA with {key.key_size} bits, which is not allowed: {_ALLOWED}")
        case _:
            raise MalformedMessage(f"TLS key of type {type(key).__name__} is not allowed: {_ALLOWED}")


def tls_key_to_pem(key: TlsPrivateKey) -> bytes:
    """`key` as unencrypted PKCS#8 PEM: secret bytes, for a file of mode 0600."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def tls_key_from_pem(pem: bytes) -> TlsPrivateKey:
    """The private key in `pem`; raises ConfigurationError, which never shows the bytes."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ConfigurationError(
            "TLS key file holds no unencrypted PEM private key: restore it or make a new key"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"TLS key file holds a {type(key).__name__}, which is not allowed: {_ALLOWED}")
    try:
        check_tls_public_key(key.public_key())
    except MalformedMessage as error:
        raise ConfigurationError(str(error)) from None
    return key
