"""A taskset made with verifiers 0.4 whose tasks have a tool; run as a program it serves the tool."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Data(vf.TaskData):  # type: ignore[misc]
    answer: str


class Doubler(vf.Toolset[vf.ToolsetConfig]):  # type: ignore[misc]
    @vf.tool  # type: ignore[untyped-decorator]
    async def double(self, x: int) -> str:
        """Twice a number."""
        return str(2 * x)


class Twice(vf.Task[Data]):  # type: ignore[misc]
    @classmethod
    def toolsets(cls, config: Any) -> list[Any]:
        return [Doubler(vf.ToolsetConfig())]

    @vf.reward  # type: ignore[untyped-decorator]
    async def exact(self, task: Any, trace: Any) -> float:
        return float((trace.branches[-1].messages[-1].content or "").strip() == task.answer)


class Twices(vf.Taskset[Twice, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Twice]:
        for number in range(3):
            yield Twice(Data(prompt=f"Twice {number}?", answer=str(2 * number)), self.config.task)


__all__ = ["Twices"]

if __name__ == "__main__":
    Doubler.run()
