"""When a certificate holds: the window it is given, and whether `now` lies in it (both ends included, RFC 5280
4.1.2.5)."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509

from lorica_security.errors import ConfigurationError

BACKDATING_MINUTES = 5
"""How far a silo's clock may run behind the coordinator's without refusing a certificate made a moment ago."""
MAX_LIFETIME_DAYS = 36_525


def as_utc(now: datetime) -> datetime:
    """`now` in UTC; raises ValueError for a datetime without a time zone, whose meaning nobody knows."""
    if now.utcoffset() is None:
        raise ValueError(f"now={now.isoformat()} has no time zone: pass an aware datetime")
    return now.astimezone(UTC)


@dataclass(frozen=True, slots=True)
class Window:
    """First and last second of validity, UTC."""

    begin: datetime
    end: datetime

    @classmethod
    def of(cls, certificate: x509.Certificate) -> "Window":
        return cls(begin=certificate.not_valid_before_utc, end=certificate.not_valid_after_utc)

    @classmethod
    def starting(cls, now: datetime, lifetime: timedelta) -> "Window":
        """From `BACKDATING_MINUTES` before `now` to `lifetime` after it, in whole seconds as X.509 has them."""
        if not timedelta(seconds=1) <= lifetime <= timedelta(days=MAX_LIFETIME_DAYS):
            raise ConfigurationError(
                f"certificate lifetime {lifetime} is not allowed: use 1 second to {MAX_LIFETIME_DAYS} days"
            )
        start = as_utc(now).replace(microsecond=0)
        end = (start + lifetime).replace(microsecond=0)
        return cls(begin=start - timedelta(minutes=BACKDATING_MINUTES), end=end)

    def within(self, outer: "Window") -> "Window":
        """The part of this window that lies in `outer`."""
        return Window(begin=max(self.begin, outer.begin), end=min(self.end, outer.end))

    @property
    def renewal_due(self) -> datetime:
        """Two thirds of the way from its making to its end: a third is left for whatever keeps a renewal from
        succeeding."""
        made = min(self.begin + timedelta(minutes=BACKDATING_MINUTES), self.end)
        return made + (self.end - made) * 2 / 3

    def problem_at(self, now: datetime) -> str | None:
        """None while valid; else what to say after the certificate's name."""
        moment = as_utc(now)
        if moment < self.begin:
            return (
                f"is not valid before {self.begin.isoformat()} and the clock says {moment.isoformat()}: check the clock"
            )
        if moment > self.end:
            return (
                f"expired at {self.end.isoformat()} and the clock says {moment.isoformat()}: renew it or enrol "
                "again, or set the clock"
            )
        return None
