"""Work that is ended with what it is done on: nobody answers there any more, and each call would wait for its own deadline."""

import asyncio
import threading
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from opentinker.errors import ServerLostError

T = TypeVar("T")

OWN_WORDS_S = 2.0
"""How long work has to find out by itself: what it was told by the server that died says more."""


class Ending:
    """The end of something, told once, from any thread."""

    def __init__(self, own_words_s: float = OWN_WORDS_S) -> None:
        self._own_words_s = own_words_s
        self._lock = threading.Lock()
        self._why: str | None = None
        self._waiting: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    def tell(self, why: str) -> None:
        """It has ended. The first word counts."""
        with self._lock:
            if self._why is not None:
                return
            self._why = why
            for event, loop in self._waiting.items():
                with suppress(RuntimeError):  # that loop is closed
                    loop.call_soon_threadsafe(event.set)

    async def during(self, work: Coroutine[Any, Any, T]) -> T:
        """The work's result. When the end is told meanwhile, and the work does not end by itself soon, it is cancelled.

        Raises:
            ServerLostError: it was cancelled; the detail is what was told.
            BaseException: what the work raises.
        """
        told = asyncio.Event()
        with self._lock:
            self._waiting[told] = asyncio.get_running_loop()
            if self._why is not None:
                told.set()
        running, end = asyncio.ensure_future(work), asyncio.ensure_future(told.wait())
        try:
            await asyncio.wait([running, end], return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                await asyncio.wait([running], timeout=self._own_words_s)
            if not running.done():
                assert self._why is not None
                running.cancel(self._why)
                await asyncio.wait([running])
            if running.cancelled() and self._why is not None:
                raise ServerLostError(self._why)
            return running.result()
        finally:
            with self._lock:
                del self._waiting[told]
            end.cancel()
            if not running.done():  # this one is cancelled: so is the work, and its clean-up is waited for
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
