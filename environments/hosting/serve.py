"""Runs an environment server until it is told to end."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import uvicorn

from opentinker.environments.hosting.api import Api
from opentinker.environments.hosting.auth import Token
from opentinker.environments.hosting.coordination import Coordination
from opentinker.environments.hosting.hub import Hub
from opentinker.environments.hosting.settings import HostSettings
from opentinker.environments.hosting.stream import Stream
from opentinker.errors import UnavailableError
from opentinker.ports import bind

KEEP_ALIVE_S = 75
STOP_S = 5.0
logger = logging.getLogger(__name__)


class _Uvicorn(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class EnvironmentServer:
    """One hosted class on one port. Port 0 takes a free one. `args` are constructor arguments: those that the class keeps for
    its host (`host_args`), and defaults for others."""

    def __init__(
        self,
        reference: dict[str, Any],
        settings: HostSettings,
        token: Token,
        host: str = "127.0.0.1",
        port: int = 0,
        args: Mapping[str, Any] | None = None,
    ) -> None:
        self.hub = Hub({**reference, "args": dict(args or {})}, settings)
        self.url = ""
        self._token = token
        self._host = host
        self._port = port
        self._server: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._coordination: Coordination | None = None

    async def start(self) -> None:
        """Bind the port, start the workers, answer.

        Raises:
            UnavailableError: the port cannot be bound.
            EnvironmentLoadError: the class cannot be loaded.
        """
        bound, self.url = bind(self._host, self._port)
        try:
            await self.hub.start()
        except BaseException:
            bound.close()
            await self.hub.stop()
            raise

        def stream(config: Any, server_state: Any, app_state: Any, _loop: Any = None) -> asyncio.Protocol:
            return Stream(self.hub, self._token, server_state.connections)

        api = Api(self.hub, self._token)
        self._coordination = api.coordination
        api.coordination.begin(self._local_url(), self._token.value)
        config = uvicorn.Config(
            cast(Any, api),
            ws=cast(Any, stream),
            log_level="warning",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            lifespan="on",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = _Uvicorn(config)
        self._serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        while not self._server.started:
            if self._serving.done():
                await self.hub.stop()
                raise UnavailableError("the HTTP server ended while it started; its log says why")
            await asyncio.sleep(0.005)

    async def stop(self, drain_s: float = 0.0) -> None:
        """Let open sessions go on for up to `drain_s`, then end all processes and close the port. Runs that are coordinated
        here end at once, and their drivers are told."""
        if self._coordination is not None:
            await self._coordination.coordinator.stop()
        await self.hub.stop(drain_s)
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait([self._serving], timeout=STOP_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)

    def _local_url(self) -> str:
        """The address by which the server reaches itself."""
        anywhere = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "[::1]"}
        return f"http://{anywhere[self._host]}:{self.url.rpartition(':')[2]}" if self._host in anywhere else self.url


def run(server: EnvironmentServer, on_ready: Callable[[EnvironmentServer], None], on_drain: Callable[[int], None]) -> None:
    """Serve until SIGTERM or SIGINT; then drain. A second signal ends the draining.

    Raises:
        UnavailableError: the port cannot be bound.
        EnvironmentLoadError: the class cannot be loaded.
    """

    async def main() -> None:
        loop = asyncio.get_running_loop()
        told, hurried = asyncio.Event(), asyncio.Event()

        def signalled() -> None:
            (hurried if told.is_set() else told).set()

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
                loop.add_signal_handler(number, signalled)
        starting = asyncio.ensure_future(server.start())
        ending = asyncio.ensure_future(told.wait())
        try:
            await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
            if told.is_set():
                starting.cancel()
                await asyncio.gather(starting, return_exceptions=True)
                return
            await starting
            on_ready(server)
            await ending
            on_drain(server.hub.sessions)
            draining = asyncio.ensure_future(server.stop(server.hub.settings.drain_s))
            hurry = asyncio.ensure_future(hurried.wait())
            await asyncio.wait([draining, hurry], return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            if not draining.done():
                draining.cancel()
                await asyncio.gather(draining, return_exceptions=True)
        finally:
            ending.cancel()
            await server.stop()

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(main())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it is installed: about a third more steps per second."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
