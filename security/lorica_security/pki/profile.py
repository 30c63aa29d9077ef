"""What a Lorica certificate looks like, for those who issue it and those who check it."""

from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID, ExtensionOID, ObjectIdentifier

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import FederationName, Identity, Role

MAX_URI_CHARACTERS = 160

UNDERSTOOD_EXTENSIONS = frozenset(
    {
        ExtensionOID.BASIC_CONSTRAINTS,
        ExtensionOID.KEY_USAGE,
        ExtensionOID.EXTENDED_KEY_USAGE,
        ExtensionOID.SUBJECT_ALTERNATIVE_NAME,
    }
)
"""Those that may be critical: RFC 5280 4.2 demands that any other critical one is refused."""


def key_purpose(role: Role) -> ObjectIdentifier:
    """The one extended key usage of this role: only the coordinator serves, so no silo can pose as it."""
    return ExtendedKeyUsageOID.SERVER_AUTH if role is Role.COORDINATOR else ExtendedKeyUsageOID.CLIENT_AUTH


def key_usage(*, of_authority: bool) -> x509.KeyUsage:
    """An authority signs certificates and lists of revoked ones, everybody else handshakes; nobody both."""
    return x509.KeyUsage(
        digital_signature=not of_authority,
        key_cert_sign=of_authority,
        crl_sign=of_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def federation_uri(federation: FederationName) -> str:
    """The SAN URI of a federation's CA: a SPIFFE trust domain without a path (SPIFFE X509-SVID, section 2)."""
    return f"spiffe://{federation}"


def alternative_names(extensions: x509.Extensions) -> x509.SubjectAlternativeName:
    """The subject alternative names, empty if there are none."""
    try:
        return extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return x509.SubjectAlternativeName([])


def sole_identity(names: x509.SubjectAlternativeName) -> Identity:
    """The identity of the only URI among `names`; raises MalformedMessage for none, two, or a URI that is not one."""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise MalformedMessage(f"{len(uris)} identity URIs where one is expected: send one spiffe:// URI")
    if len(uris[0]) > MAX_URI_CHARACTERS:
        raise MalformedMessage(f"identity URI of {len(uris[0])} characters: send at most {MAX_URI_CHARACTERS}")
    return Identity.from_uri(uris[0])
