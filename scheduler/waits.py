"""How many requests may wait at once: who waits for a change holds a place that somebody's heartbeat might need."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from opentinker.errors import RateLimitedError

RETRY_AFTER_S = 2.0


class Waits:
    """Places for requests that wait, some for each key, some for all together. Used on one event loop."""

    def __init__(self, what: str, each: int, total: int) -> None:
        """`what` is how the places are called in the answer of who gets none: "waiting requests of yours"."""
        self._what = what
        self._each = each
        self._total = total
        self._held: Counter[str] = Counter()

    @contextmanager
    def held(self, key: str) -> Iterator[None]:
        """Hold a place within.

        Raises:
            RateLimitedError: the key, or all together, hold all that there are.
        """
        if self._held[key] >= self._each or self._held.total() >= self._total:
            mine = f"{self._held[key]} {self._what} are in progress" if self._held[key] else "the scheduler is busy"
            raise RateLimitedError(mine, hint="try again when some of them are answered", retry_after_s=RETRY_AFTER_S)
        self._held[key] += 1
        try:
            yield
        finally:
            self._held[key] -= 1
            if not self._held[key]:
                del self._held[key]
