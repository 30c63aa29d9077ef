"""Times and figures as people read them."""

import math
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

SOON_S: Final = 2 * 86_400.0
"""A certificate that ends within this time should have been renewed: it is marked."""
LARGEST: Final = 1e300
"""Beyond this nothing is drawn: a scale would overflow. A silo may say any number of its loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """An instant for people and for machines; `words` is "" where there is none."""

    words: str
    iso: str
    soon: bool = False


def past(unix_s: float, now: float) -> Moment:
    """An instant that lies behind; 0 for one that never was."""
    if not unix_s:
        return Moment(words="never", iso="")
    ago = max(0.0, now - unix_s)
    return Moment(words="now" if ago < 5 else f"{span(ago)} ago", iso=iso(unix_s))


def until(unix_s: float, now: float) -> Moment:
    """An instant to come; 0 for none."""
    if not unix_s:
        return Moment(words="", iso="")
    left = unix_s - now
    words = f"in {span(left)}" if left > 0 else f"expired {span(-left)} ago"
    return Moment(words=words, iso=iso(unix_s), soon=left < SOON_S)


def iso(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def span(seconds: float) -> str:
    """A duration in the one or two units that matter."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if minutes < 10 else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days = hours // 24
    return f"{days} days" if days < 2 * 365 else f"{days // 365} years"


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def figure(value: float) -> str:
    """Four figures that count, for losses and sums."""
    return f"{value:.4g}"


def drawable(value: float | None) -> float | None:
    """The value where a chart can show it: a number, and none that is beyond LARGEST."""
    return value if value is not None and math.isfinite(value) and abs(value) <= LARGEST else None


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
