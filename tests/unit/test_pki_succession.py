import pytest

from lorica_security.errors import IntegrityError
from lorica_security.identifiers import Identity, Role
from lorica_security.identity.identity_key import new_identity_key, public_key_bytes, sign
from lorica_security.identity.succession import check_succession, succession_statement
from tests.support.certificates import BANK, HOSPITAL, OTHER_FEDERATION

OLD, NEW, OTHER = new_identity_key(), new_identity_key(), new_identity_key()
STATEMENT = succession_statement(OLD, identity=HOSPITAL, new_key=NEW.public_key())


def check(
    statement: bytes = STATEMENT, *, identity: Identity = HOSPITAL, old: object = None, new: object = None
) -> None:
    old_key, new_key = (key or default for key, default in ((old, OLD.public_key()), (new, NEW.public_key())))
    check_succession(statement, identity=identity, old_key=old_key, new_key=new_key)  # type: ignore[arg-type]


def test_a_successor_is_the_key_that_its_predecessor_signed() -> None:
    check()


def test_attack_successor_signed_by_itself_or_by_a_third_key_is_refused() -> None:
    for signer in (NEW, OTHER):
        with pytest.raises(IntegrityError):
            check(succession_statement(signer, identity=HOSPITAL, new_key=NEW.public_key()))


def test_attack_statement_moved_to_another_successor_is_refused() -> None:
    with pytest.raises(IntegrityError):
        check(new=OTHER.public_key())


def test_attack_statement_played_backwards_is_refused() -> None:
    with pytest.raises(IntegrityError):
        check(old=NEW.public_key(), new=OLD.public_key())


@pytest.mark.parametrize("identity", [BANK, Identity(OTHER_FEDERATION, Role.SILO, HOSPITAL.name)])
def test_attack_statement_moved_to_another_silo_or_federation_is_refused(identity: Identity) -> None:
    with pytest.raises(IntegrityError):
        check(identity=identity)


def test_attack_signature_given_for_another_purpose_is_no_statement() -> None:
    payload = public_key_bytes(OLD.public_key()) + public_key_bytes(NEW.public_key()) + HOSPITAL.uri.encode()
    with pytest.raises(IntegrityError):
        check(sign(OLD, domain=b"enrolment/endorse-request", payload=payload))


@pytest.mark.parametrize("size", [0, 63, 65])
def test_statement_of_another_length_is_refused(size: int) -> None:
    with pytest.raises(IntegrityError):
        check(STATEMENT.ljust(65, b"\0")[:size])
