"""An operator's call to a coordinator that is not there."""

import logging
import socket
from types import SimpleNamespace
from typing import Any

import pytest

from lorica_coordinator.edges.operator_host import operator_client
from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
from lorica_security.errors import Unreachable
from lorica_security.identifiers import FederationName


def test_calls_that_nobody_answers_leave_nothing_to_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is told as it is; what one waited for does not end in the event loop of another, which would print that."""
    monkeypatch.setattr(operator_client, "CONNECT_TIMEOUT_S", 0.4)
    nobody: Any = SimpleNamespace(key_pem=None, certificate_pem=None, to_pem=lambda: None)
    with socket.socket() as bound, caplog.at_level(logging.ERROR, logger="asyncio"):
        bound.bind(("127.0.0.1", 0))  # and does not listen
        access = OperatorAccess(
            address=f"127.0.0.1:{bound.getsockname()[1]}",
            federation=FederationName("north"),
            pair=nobody,
            trust=nobody,
        )
        for _ in range(4):
            with pytest.raises(Unreachable, match="does not answer: see its log"):
                access.call(lambda stub: pytest.fail("nobody is there"))
    assert not caplog.records
