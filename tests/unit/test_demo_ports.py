"""Ports that are chosen before a process listens there stay free until it does."""

import socket
from itertools import count
from pathlib import Path

import pytest

from lorica.demo import ports
from lorica.demo.ports import END, FIRST, free_ports
from lorica_security.errors import StateError


def test_no_port_is_given_twice() -> None:
    given = [port for _ in range(100) for port in free_ports(3)]
    assert len(set(given)) == len(given)
    assert all(FIRST <= port < END for port in given)


def test_a_port_where_somebody_listens_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    (first,) = free_ports(1)
    with socket.create_server(("127.0.0.1", first)):
        monkeypatch.setattr(ports, "_turns", count(first - FIRST))
        assert first not in free_ports(2)


def test_after_the_last_comes_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda port: True)
    monkeypatch.setattr(ports, "_turns", count(END - FIRST - 1))
    assert free_ports(2) == [END - 1, FIRST]


def test_it_ends_where_none_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_is_free", lambda port: False)
    with pytest.raises(StateError, match="fewer than 2 ports of 12000 to 32767 are free"):
        free_ports(2)


def test_no_outgoing_connection_is_given_one_of_them() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    if lowest < 32768:
        pytest.skip(
            f"this machine gives ports from {lowest} to outgoing connections; Linux as it comes does from 32768"
        )
    assert lowest >= END
