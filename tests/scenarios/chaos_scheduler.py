"""A scheduler that can be told to kill itself at its nth write or call; the rest of it is the real one."""

import functools
import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from opentinker.scheduler.actor import SchedulerActor
from opentinker.scheduler.ray_launcher import RayLauncher
from opentinker.scheduler.store import SqlStore

PLAN = "crash.json"
"""In the state folder: {"at": n, "after": whether the call still takes effect}. It is removed by the life that reads it."""
CALLS = (
    "launch",
    "_create",
    "_granted",
    "_start",
    "drive",
    "stop_driver",
    "stop_server",
    "_ask_to_stop",
    "_clear",
    "save",
)


class ChaosScheduler(SchedulerActor):
    def __init__(self, settings: Mapping[str, Any]) -> None:
        path = Path(settings["state_dir"]) / PLAN
        armed = Path(f"{path}.armed")
        if path.exists():
            plan = json.loads(path.read_text())
            path.rename(armed)
            fuse = Fuse(armed, plan["at"], plan["after"])
            SqlStore.save = fuse.around(SqlStore.save)  # type: ignore[method-assign]
            SqlStore.accept = fuse.around(SqlStore.accept)  # type: ignore[method-assign]
            for name in CALLS:
                setattr(RayLauncher, name, fuse.around(getattr(RayLauncher, name)))
        super().__init__(settings)


class Fuse:
    def __init__(self, path: Path, at: int, after: bool) -> None:
        self._path, self._at, self._after, self._calls = path, at, after, 0

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """The call, or this process's end before or after it."""

        def before() -> bool:
            self._calls += 1
            if self._calls == self._at and not self._after:
                self._die()
            return self._calls == self._at

        @functools.wraps(call)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mine = before()
            result = call(*args, **kwargs)
            if mine:
                self._die()
            return result

        @functools.wraps(call)
        async def wrapped_async(*args: Any, **kwargs: Any) -> Any:
            mine = before()
            result = await call(*args, **kwargs)
            if mine:
                self._die()
            return result

        return wrapped_async if inspect.iscoroutinefunction(call) else wrapped

    def _die(self) -> None:
        self._path.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def drive(
    config: dict[str, Any], *, endpoint: str, token: str, policy: str, run_dir: str, code_dir: str | None, resume: bool
) -> dict[str, Any]:
    del config, token, policy, code_dir, resume
    with Path(run_dir, "runs").open("a") as file:
        file.write("run\n")
    time.sleep(1.0)
    return {"endpoint": endpoint}
