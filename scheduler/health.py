"""Whether the scheduler answers: what containers and load balancers probe, without a key."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from opentinker.errors import OpenTinkerError, UnavailableError

logger = logging.getLogger(__name__)
ANSWER_S = 2.0
FRESH_S = 1.0
"""How long an answer holds: whoever asks more often than that asks the API alone."""


class Health:
    """Asks the scheduler at most once a second, however many ask."""

    def __init__(self, ping: Callable[[], Awaitable[None]]) -> None:
        self._ping = ping
        self._asking = asyncio.Lock()
        self._until = float("-inf")
        self._well = False

    async def check(self) -> None:
        """Raises: UnavailableError, without details, when the scheduler does not answer."""
        async with self._asking:
            if time.monotonic() >= self._until:
                self._well = await self._answers()
                self._until = time.monotonic() + FRESH_S
        if not self._well:
            raise UnavailableError("the scheduler does not answer", hint="it may be restarting; try again in a few seconds")

    async def _answers(self) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._ping()
        except (TimeoutError, OpenTinkerError) as error:
            logger.warning("event=unhealthy error=%s", type(error).__name__)
            return False
        return True
