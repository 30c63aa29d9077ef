"""A new RPC without a row in the authorisation table fails here, before anybody can call it."""

from itertools import product

import pytest

from lorica_coordinator.edges.keys.key_store import OPERATOR_NAME
from lorica_coordinator.edges.server.authorisation import ALLOWED, OF_THE_HOST, authorise
from lorica_security.errors import AuthorisationError
from lorica_security.identifiers import FederationName, Identity, Role
from silo_wire.v1 import enrolment_pb2, federation_pb2, operator_pb2

SERVED = {
    f"/{service.full_name}/{method.name}"
    for module in (federation_pb2, operator_pb2)
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
NORTH = FederationName("north")


def test_every_rpc_behind_mutual_tls_has_a_row_and_every_row_an_rpc() -> None:
    assert set(ALLOWED) == SERVED


def test_enrolment_is_never_served_behind_a_certificate() -> None:
    assert not any(method.startswith(f"/{enrolment_pb2.DESCRIPTOR.package}.Enrolment/") for method in ALLOWED)


@pytest.mark.parametrize(("method", "role"), sorted(product(SERVED, Role), key=str))
def test_every_rpc_and_every_role(method: str, role: Role) -> None:
    identity = Identity(NORTH, role, "" if role is Role.COORDINATOR else "somebody")
    if role in ALLOWED[method]:
        if method in OF_THE_HOST:
            with pytest.raises(AuthorisationError, match="own host"):
                authorise(identity, method)
            identity = Identity(NORTH, role, OPERATOR_NAME)
        authorise(identity, method)
    else:
        with pytest.raises(AuthorisationError, match=role.value):
            authorise(identity, method)


def test_what_the_host_alone_may_do_is_a_call_of_operators() -> None:
    assert OF_THE_HOST
    assert all(ALLOWED[method] == {Role.OPERATOR} for method in OF_THE_HOST)


def test_silos_never_command_and_operators_never_pose_as_silos() -> None:
    for method, roles in ALLOWED.items():
        if ".Operator/" in method:
            assert Role.SILO not in roles
        else:
            assert roles == {Role.SILO}


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(AuthorisationError):
        authorise(Identity(NORTH, Role.OPERATOR, "o"), "/silo_wire.v1.Operator/DropTables")
