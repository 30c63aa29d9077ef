"""How often one source may fail, or ask for what costs much, before it has to wait: a window of time, and a bounded
number of sources."""

from collections import OrderedDict, deque
from ipaddress import IPv6Address, ip_address, ip_network

MOST_SOURCES = 10_000
_OWN_NETWORK_BITS = 64
"""Of IPv6: whoever has one address there has all of them."""


class AttemptLimit:
    """`most` attempts of a source that count in `window_s` seconds. Times are those of one monotonic clock."""

    def __init__(self, *, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._counted: OrderedDict[str, deque[float]] = OrderedDict()

    def seconds_to_wait(self, source: str, now: float) -> float:
        """0 when `source` may try."""
        times = self._counted.get(source)
        if times is None:
            return 0.0
        window_began = now - self._window_s
        while times and times[0] <= window_began:
            times.popleft()
        if not times:
            del self._counted[source]
            return 0.0
        # In this order: what is later than the window's beginning by however little gives a wait, never one rounded to
        # 0.
        return times[0] - window_began if len(times) >= self._most else 0.0

    def count(self, source: str, now: float) -> None:
        """Remember one; the source whose last is longest ago is forgotten for it where there are too many."""
        times = self._counted.setdefault(source, deque(maxlen=self._most))
        times.append(now)
        self._counted.move_to_end(source)
        if len(self._counted) > MOST_SOURCES:
            self._counted.popitem(last=False)


def source_of(peer: str) -> str:
    """Whom a peer as gRPC names it ("ipv4:10.0.0.5:41000", "ipv6:[fd00::5]:41000") stands for: an address, or an IPv6
    network."""
    _, _, place = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    host = place.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return peer
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return str(address.ipv4_mapped)
        return str(ip_network((address, _OWN_NETWORK_BITS), strict=False))
    return str(address)
