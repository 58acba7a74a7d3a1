"""Serves an ASGI app from the running event loop. The port is bound before anyone is told of it."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from opentinker.errors import DeadlineError, UnavailableError

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
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        bound = socket.socket(family, socket.SOCK_STREAM)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((self._host, self._port))
        except OSError as error:
            bound.close()
            raise UnavailableError(f"cannot listen on {self._host}:{self._port}: {error.strerror}") from error
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        try:
            async with asyncio.timeout(START_S):
                while not self._server.started:
                    if self._serving.done():
                        raise UnavailableError("the HTTP server ended while it started; its log says why")
                    await asyncio.sleep(0.005)
        except TimeoutError:
            raise DeadlineError(f"the HTTP server did not start within {START_S:.0f} s") from None
        name = f"[{self._host}]" if family == socket.AF_INET6 else self._host
        return f"http://{name}:{bound.getsockname()[1]}"

    @property
    def alive(self) -> bool:
        return self._serving is not None and not self._serving.done()

    async def stop(self) -> None:
        """Close the port and all connections; idempotent."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait([self._serving], timeout=STOP_S)
            self._serving.cancel()
