"""What silos and strangers read of the coordinator's errors: nothing of its files."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_coordinator.edges.server.told import OWN_FILES, told
from lorica_security import errors
from lorica_security.errors import Fault, LoricaError
from lorica_security.identifiers import FederationName, Identity, Role

FEDERATION = FederationName("test")
SILO = Identity(FEDERATION, Role.SILO, "clinic")
OWN_SIDE = [errors.StorageError, errors.IntegrityError, errors.ConfigurationError, errors.StateError, errors.DataError]
THEIRS = [errors.MalformedMessage, errors.AuthorisationError, errors.WrongTime, errors.Conflict]
PARTS = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=12)


def heard(error: LoricaError, caller: Identity | None) -> str:
    return told(error, str(error), caller)


@given(
    kind=st.sampled_from(OWN_SIDE),
    parts=st.lists(PARTS, min_size=1, max_size=6),
    before=st.sampled_from(["", "the spool ", "'", "(", "file=", "models: ", "spiffe://test/silo/clinic left "]),
)
def test_no_silo_or_stranger_reads_a_path_of_the_coordinator(
    kind: type[LoricaError], parts: list[str], before: str
) -> None:
    error = kind(f"{before}/{'/'.join(parts)} was damaged: restore it from a backup")
    for caller in (SILO, None):
        assert heard(error, caller) == OWN_FILES


@pytest.mark.parametrize("role", [Role.OPERATOR, Role.VIEWER])
def test_whoever_runs_the_coordinator_reads_all_of_it(role: Role) -> None:
    error = errors.StorageError(f"{Path('/srv/state')} cannot be used: No space left on device")
    assert heard(error, Identity(FEDERATION, role, "night")) == str(error)


@pytest.mark.parametrize("kind", THEIRS)
def test_what_a_peer_did_wrong_is_told_with_the_value_it_sent(kind: type[LoricaError]) -> None:
    error = kind("tensor 'a/b' has 3 elements, 4 are planned")
    assert error.fault is Fault.PEER
    assert heard(error, SILO) == str(error)


def test_who_is_meant_is_told() -> None:
    text = f"the key of {SILO.uri} did not sign this request"
    assert heard(errors.IntegrityError(text), SILO) == text
    assert heard(errors.IntegrityError(f"{text}: /srv/state is damaged"), SILO) == OWN_FILES
    assert "renewal/endorse-request" in heard(errors.IntegrityError("signature for renewal/endorse-request"), SILO)


def test_a_state_that_names_no_file_is_told() -> None:
    assert heard(errors.StateError("round 3 is closed"), SILO) == "round 3 is closed"
    assert heard(errors.StorageError("the disk is full"), SILO) == OWN_FILES
    assert not re.search(r"/\w", OWN_FILES)
