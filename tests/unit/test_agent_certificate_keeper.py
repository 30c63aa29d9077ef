"""When a silo renews its certificate, how it goes on trying, and when it gives up."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from lorica_security.errors import StorageError, Unreachable
from lorica_security.pki.validity import Window
from silo_agent.service.certificate_keeper import CertificateKeeper

TRUST = b"t" * 32
OTHER = b"o" * 32


@dataclass
class FakeCertificate:
    """Good from 0 to 900, and for as long again after each renewal; `problems` are raised first, in order."""

    due_unix_s: float = 600.0
    expires_unix_s: float = 900.0
    trust_digest: bytes = TRUST
    trust_after: bytes = TRUST
    problems: list[Exception] = field(default_factory=list)
    renewals: int = 0

    async def renew(self) -> None:
        if self.problems:
            raise self.problems.pop(0)
        self.renewals += 1
        self.due_unix_s += 900
        self.expires_unix_s += 900
        self.trust_digest = self.trust_after


@dataclass
class NoWait:
    waits: int = 0
    resets: int = 0

    def wait_s(self) -> float:
        self.waits += 1
        return 0.0

    def reset(self) -> None:
        self.resets += 1


class Kept:
    """A keeper at work on a clock that stands still."""

    def __init__(self, certificate: FakeCertificate, now: float) -> None:
        self.certificate, self.now, self.backoff = certificate, now, NoWait()
        self.told: list[str] = []
        self.details: list[str] = []
        self.expiries: list[float] = []
        self._changed = asyncio.Event()
        self.keeper = CertificateKeeper(
            certificate,
            backoff=self.backoff,
            told=self._tell,
            expires=self.expiries.append,
            clock=lambda: self.now,
        )

    def _tell(self, event: str, **fields: object) -> None:
        self.told.append(event)
        self.details.append(str(fields.get("detail", "")))
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        running = asyncio.create_task(self.keeper.run())
        try:
            async with asyncio.timeout(20):
                while not holds():
                    self._changed.clear()
                    changed = asyncio.create_task(self._changed.wait())
                    await asyncio.wait({running, changed}, return_when=asyncio.FIRST_COMPLETED)
                    changed.cancel()
                    if running.done():
                        running.result()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_it_renews_when_it_is_due_and_tells_the_new_end() -> None:
    kept = Kept(FakeCertificate(), now=600.0)
    await kept.until(lambda: kept.certificate.renewals == 1)
    assert kept.told == ["certificate-renewed"]
    assert kept.expiries == [900.0, 1800.0]
    assert kept.backoff.resets == 1


async def test_it_renews_at_once_when_other_authorities_are_trusted() -> None:
    kept = Kept(FakeCertificate(trust_after=OTHER), now=1.0)
    kept.keeper.heard(TRUST)  # what it holds already: nothing to do
    kept.keeper.heard(OTHER)
    await kept.until(lambda: kept.certificate.renewals == 1)
    assert kept.certificate.trust_digest == OTHER


async def test_what_fails_is_tried_again_while_the_certificate_lasts() -> None:
    problems = [Unreachable("nobody"), StorageError("the disk is full"), Unreachable("nobody")]
    kept = Kept(FakeCertificate(problems=list(problems)), now=890.0)
    await kept.until(lambda: kept.certificate.renewals == 1)
    assert kept.told == ["certificate-not-renewed"] * 3 + ["certificate-renewed"]
    assert kept.backoff.waits == 4


async def test_an_ended_certificate_ends_no_agent_and_each_try_says_the_remedies() -> None:
    """Whether it has ended or the clock is wrong, the agent cannot know: once that is right, it renews."""
    kept = Kept(FakeCertificate(problems=[Unreachable("nobody answers")] * 3), now=901.0)
    await kept.until(lambda: kept.certificate.renewals == 1)
    assert kept.told == ["certificate-not-renewed"] * 3 + ["certificate-renewed"]
    for word in ("set the clock", "coordinator invite", "silo-agent enroll", "nobody answers"):
        assert all(word in detail for detail in kept.details[:3])


async def test_a_clock_that_was_set_too_far_ahead_ends_nothing_where_the_renewal_succeeds() -> None:
    kept = Kept(FakeCertificate(), now=901.0)
    await kept.until(lambda: kept.certificate.renewals == 1)


def test_two_thirds_of_a_life_are_counted_from_its_making_not_from_its_backdating() -> None:
    made = datetime(2026, 3, 1, tzinfo=UTC)
    assert Window.starting(made, timedelta(days=6)).renewal_due == made + timedelta(days=4)
    short = Window.starting(made, timedelta(seconds=30))
    assert short.renewal_due == made + timedelta(seconds=20)
