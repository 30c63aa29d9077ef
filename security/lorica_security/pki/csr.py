"""Certificate requests (PKCS#10): the silo makes one, the coordinator checks that it asks for exactly one known name.

The request proves possession of the TLS key and carries the name; everything else in the certificate is the
authority's choice, so a request that asks for more is refused rather than trimmed.
"""

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from lorica_security.errors import AuthorisationError, MalformedMessage
from lorica_security.identifiers import Identity
from lorica_security.pki.parsing import parse_request
from lorica_security.pki.profile import alternative_names, sole_identity
from lorica_security.pki.tls_key import TlsPrivateKey, TlsPublicKey, check_tls_public_key


def certificate_request(key: TlsPrivateKey, identity: Identity) -> bytes:
    """A DER request for `identity`, signed by `key`."""
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, identity.name or identity.role.value)]))
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False)
    )
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def check_request(request_bytes: bytes, expected: Identity) -> TlsPublicKey:
    """The public key of a request (DER or PEM, at most 8 KiB) that asks for `expected` and nothing more.

    Raises MalformedMessage, or AuthorisationError when the request is sound and names somebody else.
    """
    request = parse_request(request_bytes)
    public_key = check_tls_public_key(request.public_key())
    digest = request.signature_hash_algorithm
    if digest is not None and not isinstance(digest, hashes.SHA256 | hashes.SHA384 | hashes.SHA512):
        raise MalformedMessage(f"certificate request is signed with {digest.name}: use SHA-256, SHA-384 or SHA-512")
    if not request.is_signature_valid:
        raise MalformedMessage("certificate request is not signed by the key it holds: make a new one")
    for extension in request.extensions:
        if isinstance(extension.value, x509.BasicConstraints) and extension.value.ca:
            raise MalformedMessage("certificate request asks to become a CA (CA:TRUE), which no silo may: remove it")
        if not isinstance(extension.value, x509.SubjectAlternativeName):
            raise MalformedMessage(
                f"certificate request asks for extension {extension.oid.dotted_string}: "
                "ask for a subject alternative name alone"
            )
    names = alternative_names(request.extensions)
    identity = sole_identity(names)
    if len(names) != 1:
        raise MalformedMessage(
            f"certificate request asks for {len(names)} names: ask for the one identity URI, without DNS names or "
            "addresses"
        )
    if identity != expected:
        raise AuthorisationError(
            f"certificate request is for {identity.uri} and the invitation is for {expected.uri}: "
            "use the token that was made for this silo"
        )
    return public_key
