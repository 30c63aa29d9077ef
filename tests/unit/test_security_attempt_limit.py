"""Who fails too often waits; who waited may try again; others are not held up."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lorica_security.host import attempt_limit
from lorica_security.host.attempt_limit import AttemptLimit, source_of


def test_a_source_that_fails_too_often_waits_until_its_first_failure_is_old() -> None:
    limit = AttemptLimit(most=3, window_s=60.0)
    for now in (0.0, 10.0, 20.0):
        assert limit.seconds_to_wait("a", now) == 0
        limit.count("a", now)
    assert limit.seconds_to_wait("a", 20.0) == 40.0
    assert limit.seconds_to_wait("b", 20.0) == 0
    assert limit.seconds_to_wait("a", 60.0) == 0
    limit.count("a", 60.0)
    assert limit.seconds_to_wait("a", 60.0) == 10.0


@example([("a", 0.3), ("a", 0.0), ("a", 0.0), ("a", 30.0), ("a", 30.0)])  # 0.3 + 60 is rounded down
@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 30)), max_size=60))
def test_no_window_has_more_failures_of_a_source_that_keeps_to_what_it_is_told(steps: list[tuple[str, float]]) -> None:
    limit, now, failures = AttemptLimit(most=3, window_s=60.0), 0.0, list[tuple[str, float]]()
    for source, pause in steps:
        now += pause
        if limit.seconds_to_wait(source, now) == 0:
            limit.count(source, now)
            failures.append((source, now))
    for source, at in failures:
        assert sum(other == source and at - 60 < when <= at for other, when in failures) <= 3


def test_sources_without_number_take_no_memory_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempt_limit, "MOST_SOURCES", 5)
    limit = AttemptLimit(most=1, window_s=60.0)
    for number in range(100):
        limit.count(str(number), float(number) / 100)
    assert len(limit._counted) == 5
    assert limit.seconds_to_wait("99", 1.0) > 0


@pytest.mark.parametrize(
    ("peer", "source"),
    [
        ("ipv4:10.0.0.5:41000", "10.0.0.5"),
        ("ipv6:[fd00:1:2:3:4:5:6:7]:41000", "fd00:1:2:3::/64"),
        ("ipv6:%5Bfd00:1:2:3:4:5:6:7%5D:41000", "fd00:1:2:3::/64"),
        ("ipv6:%5B::ffff:10.0.0.5%5D:41000", "10.0.0.5"),
        ("ipv6:[fe80::1%eth0]:41000", "fe80::/64"),
        ("unix:/run/lorica", "unix:/run/lorica"),
    ],
)
def test_a_source_is_an_address_or_the_network_that_its_owner_has(peer: str, source: str) -> None:
    assert source_of(peer) == source
