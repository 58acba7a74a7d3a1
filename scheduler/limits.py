"""Limits on failed logins: token buckets, per client address and for all together. Pure: the caller passes the time."""

import ipaddress
from collections import OrderedDict
from dataclasses import dataclass

PER_ADDRESS_BURST, PER_ADDRESS_PER_S = 10.0, 1 / 6
GLOBAL_BURST, GLOBAL_PER_S = 200.0, 5.0
MAX_ADDRESSES = 10_000


@dataclass
class TokenBucket:
    """`burst` at once, then `per_s` of them per second. `at` is when `tokens` was right."""

    burst: float
    per_s: float
    tokens: float
    at: float

    def wait_s(self, now: float) -> float:
        """How long until a token is there; 0 if one is."""
        self._fill(now)
        # A hair of tolerance: after waiting exactly this long, there is one, whatever floats do.
        return 0.0 if self.tokens >= 1.0 - 1e-9 else (1.0 - self.tokens) / self.per_s

    def take(self, now: float) -> None:
        """Take a token, or what is left of one."""
        self._fill(now)
        self.tokens = max(0.0, self.tokens - 1.0)

    def empty(self, now: float) -> None:
        self._fill(now)
        self.tokens = 0.0

    def _fill(self, now: float) -> None:
        # A clock that went back gives nothing and takes nothing.
        self.tokens = min(self.burst, self.tokens + max(0.0, now - self.at) * self.per_s)
        self.at = now


class LoginLimiter:
    """An address that failed too often is not listened to for a while. When failures come from everywhere, one is enough for
    an address to be shut out. A valid key always gets in at an address that did not fail, or where it got in before: the
    others behind one address are not at a guesser's mercy."""

    def __init__(self, now: float) -> None:
        self._all = TokenBucket(GLOBAL_BURST, GLOBAL_PER_S, GLOBAL_BURST, now)
        self._addresses: OrderedDict[str, TokenBucket] = OrderedDict()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def wait_s(self, address: str, fingerprint: str, now: float) -> float:
        """How long this address has to wait before it may try a key; 0 if it may now."""
        network = network_of(address)
        bucket = self._addresses.get(network)
        return 0.0 if bucket is None or (network, fingerprint) in self._known else bucket.wait_s(now)

    def succeeded(self, address: str, fingerprint: str) -> None:
        """Note a valid key."""
        known = (network_of(address), fingerprint)
        self._known[known] = None
        self._known.move_to_end(known)
        if len(self._known) > MAX_ADDRESSES:
            self._known.popitem(last=False)

    def failed(self, address: str, fingerprint: str, now: float) -> bool:
        """Note a wrong key; whether failures are still few enough to be worth a line each in the audit."""
        network = network_of(address)
        self._known.pop((network, fingerprint), None)  # it was valid once
        bucket = self._addresses.pop(network, None) or TokenBucket(PER_ADDRESS_BURST, PER_ADDRESS_PER_S, PER_ADDRESS_BURST, now)
        self._addresses[network] = bucket  # at the end: the first one is the one that failed longest ago
        if len(self._addresses) > MAX_ADDRESSES:
            self._addresses.popitem(last=False)
        bucket.take(now)
        few = self._all.wait_s(now) == 0.0
        self._all.take(now)
        if not few:
            bucket.empty(now)
        return few


def network_of(address: str) -> str:
    """What counts as one client: an IPv4 address, or the /64 that an IPv6 client can choose addresses in."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return address
    if ip.version == 6:
        mapped = ip.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
