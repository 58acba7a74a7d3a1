"""Commands that watch go on while the cluster restarts."""

import random
import time
from collections.abc import Callable
from typing import TypeVar

from opentinker.cli.common import err
from opentinker.errors import DeadlineError, UnavailableError

RECONNECT_S = 120.0
PAUSE_S = 1.0
T = TypeVar("T")


class Patience:
    """Asks again while the cluster is away, for a bounded time; but the first question has to be answered at once."""

    def __init__(self, limit_s: float = RECONNECT_S) -> None:
        self._limit_s = limit_s
        self._connected = False

    def ask(self, question: Callable[[], T], *, within_s: float | None = None) -> T:
        """The answer.

        Raises:
            UnavailableError, DeadlineError: none at first, or none for so long.
        """
        patience_s = self._limit_s if within_s is None else min(self._limit_s, within_s)
        lost_at: float | None = None
        while True:
            try:
                answer = question()
            except (UnavailableError, DeadlineError) as error:
                now = time.monotonic()
                if not self._connected:
                    raise
                if lost_at is None:
                    lost_at = now
                    err.print(f"the cluster is away ({error.detail}); trying again for {patience_s:.0f} s", soft_wrap=True)
                if now - lost_at >= patience_s:
                    raise
                time.sleep(min(PAUSE_S * random.uniform(0.5, 1.0), patience_s))
            else:
                if lost_at is not None:
                    err.print("the cluster is back")
                self._connected = True
                return answer
