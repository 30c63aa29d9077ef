"""Every method of a port is decided in the audit proxy before it: entered in the log, or named as handed on."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import pytest

from lorica_coordinator.edges.server.audited import AuditedOperator, AuditedStore
from lorica_coordinator.edges.server.authorisation import ALLOWED
from lorica_coordinator.edges.server.operator_servicer import OperatorServicer
from lorica_coordinator.service.ports import AuditPort, RoundStore
from lorica_security.identifiers import Role
from silo_agent.policy.rules import PolicyRules
from silo_agent.service.audited import AuditedCoordinator, AuditedGate, AuditedObserver, SiloAudit, TroubleObserver
from silo_agent.service.ports import CoordinatorPort, PlanGatePort
from silo_wire.v1 import operator_pb2

OF_ITS_OWN = {"RenewAccess"}
"""Open to whoever only looks, and changes the caller's own access."""
SERVICE = operator_pb2.DESCRIPTOR.services_by_name["Operator"]


def port_of(kind: type) -> Any:
    """Something with the methods of `kind`, each of which is a value of its own."""
    return SimpleNamespace(**{name: create_autospec(getattr(kind, name), name=name) for name in members(kind)})


def members(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def audit() -> Any:
    return create_autospec(SiloAudit, instance=True)


PROXIES: dict[type, Any] = {
    RoundStore: lambda port: AuditedStore(port, create_autospec(AuditPort, instance=True)),
    CoordinatorPort: lambda port: AuditedCoordinator(port, audit()),
    PlanGatePort: lambda port: AuditedGate(port, audit(), PolicyRules()),
    TroubleObserver: lambda port: AuditedObserver(port, audit()),
}


@pytest.mark.parametrize("kind", PROXIES, ids=lambda kind: kind.__name__)
def test_a_proxy_decides_each_method_of_its_port_and_no_other(kind: type) -> None:
    port = port_of(kind)
    proxy = PROXIES[kind](port)
    entered = members(type(proxy))
    handed_on = {name for name in vars(proxy) if not name.startswith("_")}
    assert entered | handed_on == members(kind), "say of each method whether it is entered in the log or handed on"
    assert not entered & handed_on
    assert not hasattr(type(proxy), "__getattr__")
    assert {name for name in handed_on if getattr(proxy, name) is not getattr(port, name)} == set()


def test_a_command_is_entered_unless_a_viewer_may_give_it_who_changes_nothing() -> None:
    port = port_of(OperatorServicer)
    proxy = AuditedOperator(port, create_autospec(AuditPort, instance=True))
    commands = {method.name for method in SERVICE.methods}
    assert {name for name in vars(proxy) if not name.startswith("_")} == commands
    only_look = {
        name for name in commands if Role.VIEWER in ALLOWED[f"/{SERVICE.full_name}/{name}"] and name not in OF_ITS_OWN
    }
    assert {name for name in commands if getattr(proxy, name) is getattr(port, name)} == only_look
