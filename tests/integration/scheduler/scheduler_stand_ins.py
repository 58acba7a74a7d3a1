"""Real processes that do trivial things in the place of a server and a driver: the scheduler cannot tell the difference.

What a server does is told by its base model's name, what a driver does by its environment's.
"""

import asyncio
import hashlib
import importlib
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from opentinker.errors import EngineError, EnvironmentLoadError, ServerLostError, UnknownModelError
from opentinker.logfile import write_to
from opentinker.server.listener import Listener

MODELS = ("fine", "slow", "hangs", "broken", "crashes", "bears-a-child", "deaf")


class NotPicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


class WorkerProcess:
    def __init__(
        self, config: dict[str, Any], lora: dict[str, Any] | None, checkpoint_root: str, job_id: str, log_path: str
    ) -> None:
        write_to(Path(log_path), job=job_id, process="worker")
        self.model = config["base_model"]

    def start(self, timeout_s: float) -> dict[str, Any]:
        print("the worker is at work")
        match self.model:
            case "slow":
                time.sleep(1.0)
            case "hangs":
                time.sleep(1000.0)
            case "broken":
                raise EngineError("the model does not fit", hint="use a smaller one")
            case "crashes":
                os.kill(os.getpid(), signal.SIGKILL)
            case "bears-a-child":
                subprocess.Popen(["sleep", "1000"])
        return {"threads": os.environ["OMP_NUM_THREADS"]}

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def stop(self) -> None:
        if self.model == "deaf":
            time.sleep(1000.0)


async def answer(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An ASGI app that says which process it is."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": str(os.getpid()).encode()})


class FrontProcess:
    def __init__(
        self, worker_handle: Any, tokens: dict[str, str], host: str, job_id: str, log_path: str, taken: tuple[str, ...] = ()
    ) -> None:
        write_to(Path(log_path), job=job_id, process="front")
        self.tokens = tokens
        self.listener = Listener(answer, host)
        self.calls: list[str] = []
        self.born = time.monotonic()

    async def start(self) -> dict[str, Any]:
        return {"endpoint": await self.listener.start(), "pid": os.getpid()}

    async def attach(self, info: dict[str, Any]) -> None:
        assert info["threads"]
        self.calls = ["attach"]

    async def create_policy(self, policy: str, spec: dict[str, Any], timeout_s: float) -> None:
        logging.getLogger("front").info("a policy is created within %g s", timeout_s)
        assert self.calls == ["attach"]
        assert policy in self.tokens
        self.calls.append("create")
        self.born = time.monotonic()

    async def health(self) -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"ok": True, "cause": "", "pid": os.getpid(), "idle_s": time.monotonic() - self.born}

    async def save(self, policy: str, name: str, timeout_s: float) -> None:
        assert policy in self.tokens
        logging.getLogger("front").info("checkpoint %s", name)

    async def stop(self) -> None:
        return


def check_model(name: str) -> None:
    if name not in MODELS:
        raise UnknownModelError(f"unknown base model '{name}'")


def drive(
    config: dict[str, Any], *, endpoint: str, token: str, policy: str, run_dir: str, code_dir: str | None, resume: bool
) -> dict[str, Any]:
    print("the driver is at work" + (" again" if resume else ""))
    logging.getLogger("drive").info("a log line")
    Path(run_dir, "metrics.jsonl").write_text('{"step": 1, "reward": NaN}\n{"step": 2}\n')
    match config["environment"]["name"].partition(":")[2] or config["environment"]["name"]:
        case "raises":
            raise EnvironmentLoadError("no such environment", hint="look\nagain")
        case "raises-oddly":
            raise NotPicklableError("two", "arguments")
        case "exits":
            raise SystemExit(3)
        case "waits":
            time.sleep(1000.0)
        case "waits-a-while":
            with Path(run_dir, "runs").open("a") as file:
                file.write("run\n")
            time.sleep(4.0)
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "waits-unless-resumed" if not resume:
            time.sleep(1000.0)
        case "dies-once" if not resume:
            os.kill(os.getpid(), signal.SIGKILL)
        case "loses-its-server":
            os.kill(_read_pid(Path(run_dir, "worker_pid")), signal.SIGKILL)
            raise ServerLostError("the connection was refused")
        case "shows-its-environment":
            child = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
            born_with = Path("/proc/self/environ").read_text().split("\0")
            Path(run_dir, "environment").write_text("\n".join([*born_with, "", *map("=".join, os.environ.items()), "", child]))
        case "imports":
            modules = [importlib.import_module(name) for name in ("opentinker", *config["environment"]["args"]["modules"])]
            Path(run_dir, "imported").write_text("\n".join([sys.executable, *(str(module.__file__) for module in modules)]))
        case "uses-a-secret":
            value = os.environ["THE_SECRET"]
            Path(run_dir, "digest").write_text(hashlib.sha256(value.encode()).hexdigest())
            print(f"printed: {value}!")
            logging.getLogger("drive").warning("logged: %s", value)
            subprocess.run(["sh", "-c", "echo by a child: $THE_SECRET"], check=True)
            os.write(2, b"raw: " + value.encode() + b"\n")
            raise EnvironmentLoadError(f"the service refused {value}")
        case "reads-its-code":
            assert code_dir is not None
            print(Path(code_dir, "pkg/mine.py").read_text())
    return {"endpoint": endpoint}


def _read_pid(path: Path) -> int:
    """Wait for the test to write it."""
    deadline = time.monotonic() + 60.0
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())
