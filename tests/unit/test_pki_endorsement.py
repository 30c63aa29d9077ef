import pytest

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.endorsement import check_endorsement, endorse_request
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes, sign
from lorica_security.pki.csr import certificate_request
from lorica_security.pki.tls_key import new_tls_key
from tests.support.certificates import BANK, HOSPITAL, OTHER_FEDERATION

KEY = new_identity_key()
PUBLIC = public_key_bytes(KEY.public_key())
REQUEST = certificate_request(new_tls_key(), HOSPITAL)
SIGNATURE = endorse_request(KEY, request=REQUEST, identity=HOSPITAL)


def test_an_endorsement_gives_the_key_to_pin():
    key = check_endorsement(PUBLIC, request=REQUEST, identity=HOSPITAL, signature=SIGNATURE)
    assert public_key_bytes(key) == PUBLIC


def test_endorsement_moved_to_another_request_is_refused():
    other = certificate_request(new_tls_key(), HOSPITAL)
    with pytest.raises(IntegrityError):
        check_endorsement(PUBLIC, request=other, identity=HOSPITAL, signature=SIGNATURE)


@pytest.mark.parametrize("identity", [BANK, Identity(OTHER_FEDERATION, Role.SILO, "hospital-a")])
def test_endorsement_moved_to_another_silo_or_federation_is_refused(identity: Identity):
    with pytest.raises(IntegrityError):
        check_endorsement(PUBLIC, request=REQUEST, identity=identity, signature=SIGNATURE)


def test_endorsement_under_somebody_elses_identity_key_is_refused():
    other = public_key_bytes(new_identity_key().public_key())
    with pytest.raises(IntegrityError):
        check_endorsement(other, request=REQUEST, identity=HOSPITAL, signature=SIGNATURE)


def test_signature_of_another_domain_is_no_endorsement():
    payload = PUBLIC + b"\0" * 32 + HOSPITAL.uri.encode()
    with pytest.raises(IntegrityError):
        check_endorsement(
            PUBLIC, request=REQUEST, identity=HOSPITAL, signature=sign(KEY, domain=b"update", payload=payload)
        )


def test_an_identity_key_that_is_none_is_malformed():
    with pytest.raises(MalformedMessage):
        check_endorsement(b"short", request=REQUEST, identity=HOSPITAL, signature=SIGNATURE)
