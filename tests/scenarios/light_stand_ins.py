"""A server that has nothing to do, for `many_jobs.py`; it imports next to nothing."""

import os
import time
from typing import Any

from opentinker.process_group import own_process_group


class Worker:
    """Has nothing to do."""

    def __init__(self, *_: Any) -> None:
        own_process_group()

    def start(self, timeout_s: float) -> dict[str, Any]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def stop(self) -> None:
        return


class Front:
    """Says for how long there was nothing to do."""

    def __init__(self, *_: Any) -> None:
        own_process_group()
        self.born = time.monotonic()

    async def start(self) -> dict[str, Any]:
        return {"endpoint": "http://127.0.0.1:1", "pid": os.getpid()}

    async def attach(self, info: dict[str, Any]) -> None:
        return

    async def create_policy(self, policy: str, spec: dict[str, Any], timeout_s: float) -> None:
        self.born = time.monotonic()

    async def health(self) -> dict[str, Any]:
        return {"ok": True, "cause": "", "pid": os.getpid(), "idle_s": time.monotonic() - self.born}

    async def stop(self) -> None:
        return


def any_model(name: str) -> None:
    return
