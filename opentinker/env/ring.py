"""Spreads sessions over several servers by consistent hashing, and avoids those that do not answer."""

import bisect
import hashlib
from collections.abc import Sequence

POINTS = 64
"""Places of a server on the ring."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0


def _place(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big")


class Ring:
    """Servers by their URLs. When one is added or goes, only its share of the sessions moves."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = tuple(dict.fromkeys(urls))
        places = sorted((_place(f"{url}#{i}".encode()), url) for url in self.urls for i in range(POINTS))
        self._places = [place for place, _ in places]
        self._owners = [url for _, url in places]
        self._dead: dict[str, tuple[float, float]] = {}

    def order(self, key: bytes, now: float) -> list[str]:
        """Every server, the key's own first; those that were dead and whose pause is not over yet come last."""
        start = bisect.bisect(self._places, _place(key))
        owners = self._owners[start:] + self._owners[:start]
        ranked = list(dict.fromkeys(owners))
        return sorted(ranked, key=lambda url: self._dead.get(url, (0.0, 0.0))[0] > now)

    def is_dead(self, url: str, now: float) -> bool:
        """Whether the server failed a moment ago."""
        return self._dead.get(url, (0.0, 0.0))[0] > now

    def failed(self, url: str, now: float) -> None:
        """Avoid the server for a while, each time for longer."""
        _, pause_s = self._dead.get(url, (0.0, 0.0))
        pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * pause_s))
        self._dead[url] = (now + pause_s, pause_s)

    def answered(self, url: str) -> None:
        """The server lives."""
        self._dead.pop(url, None)
