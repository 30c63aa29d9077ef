"""Bytes of certificates and certificate requests, PEM or DER, into objects: once, at the edge, with a size limit.

`cryptography` parses most fields when they are first read. Here they are all read at once, so that hostile bytes
raise MalformedMessage here and nothing else anywhere later.
"""

from functools import lru_cache
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from lorica_security.errors import MalformedMessage

MAX_CERTIFICATE_BYTES = 16 * 1024
MAX_REQUEST_BYTES = 8 * 1024
MAX_BUNDLE_BYTES = 256 * 1024

_PARSE_ERRORS: Final = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)


def _read_all_fields(certificate: x509.Certificate) -> x509.Certificate:
    for name in certificate.subject, certificate.issuer:
        name.rfc4514_string()
    certificate.public_key()
    _ = certificate.extensions, certificate.not_valid_before_utc, certificate.not_valid_after_utc
    return certificate


def _check_size(what: str, data: bytes, limit: int) -> None:
    if not 0 < len(data) <= limit:
        raise MalformedMessage(f"{what} of {len(data)} bytes: send 1 to {limit} bytes")


def _is_pem(data: bytes) -> bool:
    return data.lstrip().startswith(b"-----BEGIN ")


@lru_cache(maxsize=256)  # a peer shows the same one with each call; whether it holds is asked anew each time
def parse_certificate(data: bytes) -> x509.Certificate:
    """The one certificate in `data`; raises MalformedMessage."""
    _check_size("certificate", data, MAX_CERTIFICATE_BYTES)
    try:
        if not _is_pem(data):
            return _read_all_fields(x509.load_der_x509_certificate(data))
        certificates = [_read_all_fields(each) for each in x509.load_pem_x509_certificates(data)]
    except _PARSE_ERRORS as error:
        raise MalformedMessage(
            f"certificate of {len(data)} bytes does not parse: send one X.509 certificate"
        ) from error
    if len(certificates) != 1:
        raise MalformedMessage(f"{len(certificates)} certificates where one is expected: send the leaf alone")
    return certificates[0]


def parse_certificates(data: bytes) -> tuple[x509.Certificate, ...]:
    """The PEM certificates in `data`, in order; raises MalformedMessage."""
    _check_size("trust bundle", data, MAX_BUNDLE_BYTES)
    try:
        return tuple(map(_read_all_fields, x509.load_pem_x509_certificates(data)))
    except _PARSE_ERRORS as error:
        raise MalformedMessage(
            f"trust bundle of {len(data)} bytes does not parse: send PEM CA certificates, one after another"
        ) from error


def parse_request(data: bytes) -> x509.CertificateSigningRequest:
    """The PKCS#10 request in `data`, its signature still unchecked; raises MalformedMessage."""
    _check_size("certificate request", data, MAX_REQUEST_BYTES)
    try:
        request = x509.load_pem_x509_csr(data) if _is_pem(data) else x509.load_der_x509_csr(data)
        request.public_key()
        _ = request.extensions, request.is_signature_valid, request.signature_hash_algorithm
        return request
    except _PARSE_ERRORS as error:
        raise MalformedMessage(
            f"certificate request of {len(data)} bytes does not parse: send PKCS#10, DER or PEM"
        ) from error
