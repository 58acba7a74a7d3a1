"""Real servers on free ports, in the test's own event loop; their workers are processes."""

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.env.environment import Environment
from opentinker.env.reference import reference_of
from opentinker.env.remote import RemoteEnvironment, remote_environment
from opentinker.environments.hosting.auth import Token
from opentinker.environments.hosting.serve import EnvironmentServer
from opentinker.environments.hosting.settings import HostSettings

TOKEN = "a-token-of-these-tests"
HERE = Path(__file__).parent


@dataclass
class Hosted:
    """A server that runs, and the class that reaches it."""

    server: EnvironmentServer
    remote: type[RemoteEnvironment]

    @property
    def url(self) -> str:
        return self.server.url


Serve = Callable[..., Awaitable[Hosted]]


@asynccontextmanager
async def hosted(
    environment: type[Environment], port: int = 0, args: Mapping[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Hosted]:
    chosen = HostSettings(**{"workers": 1, "drain_s": 0.0, **settings})
    server = EnvironmentServer(reference_of(environment), chosen, Token(TOKEN), port=port, args=args)
    await server.start()
    pids = server.hub.pool.pids
    try:
        yield Hosted(server, remote_environment(server.url, token=TOKEN))
    finally:
        await server.stop()
    for pid in {*pids, *server.hub.pool.pids}:
        await until(lambda pid=pid: not alive(pid))  # type: ignore[misc]


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
            if os.path.isdir("/proc")
            else _signal(pid)
        )
    except OSError:
        return False


def _signal(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Wait for what should happen soon."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, "it did not happen"
        await asyncio.sleep(0.01)


@contextmanager
def command(
    *options: str, name: str = f"{HERE}/hosted_environments.py:Doer"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """`opentinker env serve`, its address and its token."""
    process = subprocess.Popen(
        [sys.executable, "-m", "opentinker", "env", "serve", name, "--port", "0", "--workers", "2", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        url = re.search(r"http://\S+", first)
        assert url is not None, first + process.stdout.read()
        token = process.stdout.readline().removeprefix("token: ").strip() if "--token-file" not in options else TOKEN
        yield process, url[0], token
    finally:
        process.kill()
        process.wait()
