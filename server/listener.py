"""Serves an ASGI app from the running event loop. The port is bound before anyone is told of it."""

import asyncio
import contextlib
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from opentinker.errors import DeadlineError, UnavailableError
from opentinker.ports import bind

START_S = 30.0
STOP_S = 5.0
KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that a client never sends into a closing one."""


class _Server(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Listener:
    """One app on one port of `host`; port 0 takes a free one."""

    def __init__(self, app: ASGIApp, host: str, port: int = 0) -> None:
        self._host = host
        self._port = port
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Start to answer; the endpoint, `http://host:port`.

        Raises:
            UnavailableError: the port cannot be bound.
            DeadlineError: the app does not start.
        """
        bound, endpoint = bind(self._host, self._port)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        try:
            async with asyncio.timeout(START_S):
                while not self._server.started:
                    if self._serving.done():
                        raise UnavailableError("the HTTP server ended while it started; its log says why")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise DeadlineError(f"the HTTP server did not start within {START_S:.0f} s") from None
        return endpoint

    @property
    def alive(self) -> bool:
        return self._serving is not None and not self._serving.done()

    async def stop(self) -> None:
        """Close the port and all connections; idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)
            self._serving.cancel()
