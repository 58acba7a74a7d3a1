"""Environments that do what the action says, for the tests of workers and servers."""

import asyncio
import ctypes
import os
import re
import signal
import struct
import time
import zlib
from collections.abc import Sequence
from typing import Any

from opentinker.env.environment import Action, Environment, StepResult
from opentinker.images import Image

TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {"type": "object"}}}


def png(grey: int) -> bytes:
    """A picture of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))

    head = struct.pack("!IIBBBBB", 1, 1, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes([0, grey]))) + chunk(b"IEND", b"")


def act(text: str, turn: int) -> Any:
    """What a step answers."""
    word, _, rest = text.partition(" ")
    match word:
        case "raise":
            raise ValueError(rest or "no such word")
        case "exit":
            raise SystemExit(3)
        case "die":
            os._exit(int(rest or 3))
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            time.sleep(float(rest))
        case "spin":
            while True:
                pass
        case "hold":  # the interpreter, which nothing but a signal that kills ends
            ctypes.PyDLL(None).sleep(int(rest or 30))
        case "regex":
            re.match(r"(a+)+$", "a" * 40 + "b")
        case "nan":
            return StepResult(float("nan"), observation="x")
        case "text-reward":
            return StepResult("1", observation="x")  # type: ignore[arg-type]
        case "object":
            return StepResult(0.0, observation=[{"role": "user", "content": "x", "extra": object()}])  # type: ignore[list-item, typeddict-unknown-key]
        case "nothing":
            return None
        case "number":
            return StepResult(0.0, observation=7)  # type: ignore[arg-type]
        case "image":
            parts: Any = [{"type": "text", "text": "look"}, {"type": "image", "image": Image(png(int(rest or 7)))}]
            return StepResult({"seen": 0.25, "said": 0.5}, observation=parts)
        case "pid":
            return StepResult(0.0, observation=str(os.getpid()))
        case "done":
            return StepResult(1.0, done=True, observation="bye", metrics={"exact": 1.0})
    return StepResult(0.5, observation=f"{turn}: {text}", metrics={"turn": float(turn)})


class Doer(Environment):
    """Does what the action says."""

    tools = (TOOL,)
    task_columns = ("name",)
    closed_to: str = ""

    def __init__(self, opening: str = "hello", log: str = "") -> None:
        self._opening = opening
        self._log = log
        self._turn = -1

    @classmethod
    def make_task(cls, seed: int) -> Any:
        return {"name": f"task {seed}", "big": 2**70}

    @classmethod
    def held_out_tasks(cls) -> Sequence[Any]:
        return [{"name": f"held out {i}"} for i in range(5)]

    def reset(self, task: Any) -> Any:
        if isinstance(task, str):
            return act(task, -1).observation
        return [{"role": "system", "content": "You play."}, {"role": "user", "content": f"{self._opening}, {task}"}]

    def step(self, action: Action) -> Any:
        self._turn += 1
        if self._log:
            with open(self._log, "a") as file:
                file.write(f"{self._turn} {action.text}\n")
        return act(action.text, self._turn)

    def finalize(self) -> Any:
        return {"last": 0.125}

    def close(self) -> None:
        if self._log:
            with open(self._log, "a") as file:
                file.write("closed\n")


class AsyncDoer(Doer):
    """The same with async methods; `wait N` waits."""

    async def reset(self, task: Any) -> Any:
        await asyncio.sleep(0)
        return Doer.reset(self, task)

    async def step(self, action: Action) -> Any:
        word, _, rest = action.text.partition(" ")
        await asyncio.sleep(float(rest) if word == "wait" else 0)
        return Doer.step(self, action)


class ProcessDoer(Doer):
    """The same in a process of its own."""

    execution = "process"
