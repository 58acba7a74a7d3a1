"""A taskset made with verifiers 0.4, as an installed package has it."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Data(vf.TaskData):  # type: ignore[misc]
    answer: str


class Sum(vf.Task[Data]):  # type: ignore[misc]
    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def exact(self, task: Any, trace: Any) -> float:
        return float((trace.branches[-1].messages[-1].content or "").strip() == task.answer)

    @vf.reward(weight=0.5)  # type: ignore[untyped-decorator]
    async def short(self, trace: Any) -> float:
        return float(len(trace.branches[-1].messages[-1].content or "") < 10)

    @vf.metric  # type: ignore[untyped-decorator]
    async def turns(self, trace: Any) -> float:
        return float(trace.num_turns)


class Config(vf.TasksetConfig):  # type: ignore[misc]
    rows: int = 5
    split: str = "train"


class Sums(vf.Taskset[Sum, Config]):  # type: ignore[misc]
    def load(self) -> Iterator[Sum]:
        for a in range(self.config.rows):
            number = a + (100 if self.config.split == "test" else 0)
            data = Data(prompt=f"{number} + {number}?", system_prompt="Add.", answer=str(2 * number))
            yield Sum(data, self.config.task)


__all__ = ["Sums"]
