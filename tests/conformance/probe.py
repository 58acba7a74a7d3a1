"""An environment that does what its task tells it: everything that an author may do, and may get wrong."""

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import opentinker as ot
from opentinker.env.environment import Part

TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
PNG = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)
PICTURE = ot.Image(PNG)
PARTS: list[Part] = [{"type": "text", "text": "look:"}, {"type": "image", "image": PICTURE}, {"type": "text", "text": "so."}]
FIRST: dict[str, Any] = {
    "text": "hello",
    "image": PICTURE,
    "parts": PARTS,
    "messages": [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "1 + 1"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": PARTS},
    ],
    "nothing": "",
    "number": 7,
    "no message": [{"role": "robot", "content": "x"}],
    "no image": [{"type": "image", "image": b"GIF89a"}],
    "object": object(),
}
STEPS: dict[str, Any] = {
    "plain": lambda: ot.StepResult(0.5, False, "go on", {"turns": 1}),
    "done": lambda: ot.StepResult(1, True),
    "last words": lambda: ot.StepResult(1.0, True, "bye"),
    "components": lambda: ot.StepResult({"right": 1.0, "length": -0.25}, False, "go on"),
    "picture": lambda: ot.StepResult(0.0, False, PICTURE),
    "tool messages": lambda: ot.StepResult(0, False, [{"role": "tool", "content": PARTS}, {"role": "tool", "content": "no"}]),
    "nan": lambda: ot.StepResult(float("nan"), True),
    "text reward": lambda: ot.StepResult("1", True),  # type: ignore[arg-type]
    "bad component": lambda: ot.StepResult({"right": float("inf")}, True),
    "bad metric": lambda: ot.StepResult(0.0, True, "", {"exact": "yes"}),  # type: ignore[dict-item]
    "no result": lambda: (1.0, True),
    "empty": lambda: ot.StepResult(),
    "object": lambda: ot.StepResult(0.0, False, object()),  # type: ignore[arg-type]
}


class Probe(ot.Environment):
    """Plain methods. `note` is a file to which `close` adds a line."""

    task_columns = ("reset",)

    def __init__(self, note: str = "", fail: bool = False) -> None:
        self._note = note
        self._heard: list[str] = []
        if fail:
            raise LookupError("no such constructor")

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return {"reset": "text", "number": Random(seed).randint(0, 99)}

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return [{"reset": "text", "number": number} for number in range(100, 107)]

    def reset(self, task: Any) -> Any:
        self._task = task
        if task.get("tools"):
            self.tools = (TOOL,)
        return self._deed(task["reset"], FIRST)

    def step(self, action: ot.Action) -> Any:
        name, _, rest = action.text.partition(" ")
        if name == "echo":
            self._heard.append(rest)
            known = hashlib.sha256(rest.encode()).hexdigest()[:8]
            said = f"{len(rest)} {known} {action.truncated} {action.reasoning} {len(self._heard)} {self._task.get('number')}"
            return ot.StepResult(0.0, False, said)
        found = self._deed(action.text, STEPS)
        return found() if callable(found) else found

    def finalize(self) -> Any:
        match self._task.get("finalize"):
            case "raise":
                raise RuntimeError("no end")
            case "hang":
                time.sleep(60)
            case {**components} if components:
                return components
            case float(number):
                return number
        return None

    def close(self) -> None:
        if self._note:
            with Path(self._note).open("a") as file:
                file.write("closed\n")
        if getattr(self, "_task", {}).get("close") == "raise":
            raise OSError("still open")

    def _deed(self, name: str, known: dict[str, Any]) -> Any:
        if name == "raise":
            raise ValueError("no such word")
        if name == "exit":
            sys.exit(3)
        if name == "stop":
            raise StopIteration("empty")
        if name == "hang":
            time.sleep(60)
        while name == "spin":
            pass
        return known[name]


class AsyncProbe(Probe):
    """The same with async methods."""

    async def reset(self, task: Any) -> Any:
        return super().reset(task)

    async def step(self, action: ot.Action) -> Any:
        if action.text == "hang":
            import asyncio

            await asyncio.sleep(60)
        return super().step(action)

    async def finalize(self) -> Any:
        return super().finalize()


class ProcessProbe(Probe):
    """The same in a process of its own."""

    execution = "process"
