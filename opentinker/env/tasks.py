"""Where tasks come from: an endless stream that a seed determines, so that a position in it is all a resumed run needs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import islice
from typing import Any, Literal

import numpy as np

Split = Literal["train", "held_out"]


class TaskSource(ABC):
    """Tasks of one split."""

    size: int | None = None
    """How many different tasks there are, where that is known."""

    @abstractmethod
    def draw(self, seed: int, start: int, count: int) -> list[Any]:
        """Tasks `start` to `start + count` of the endless stream that `seed` determines."""

    @abstractmethod
    def first(self, limit: int) -> list[Any]:
        """The first tasks in their own order, at most `limit`: for evaluation."""


class GeneratedTasks(TaskSource):
    """Tasks made from a seed each; no two places of a stream share one."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self._make = make

    def draw(self, seed: int, start: int, count: int) -> list[Any]:
        return [self._make(_seed_at(seed, place)) for place in range(start, start + count)]

    def first(self, limit: int) -> list[Any]:
        return self.draw(0, 0, limit)


class ListTasks(TaskSource):
    """Given tasks: any iterable, or rows with an index. A stream goes through all of them again and again, each time in a new
    order unless `shuffle` is off."""

    def __init__(self, tasks: Any, *, shuffle: bool = True) -> None:
        self._tasks = tasks
        self._shuffle = shuffle
        self.size = len(self._tasks) if _indexed(self._tasks) else None
        self._orders: dict[tuple[int, int], Any] = {}

    def draw(self, seed: int, start: int, count: int) -> list[Any]:
        """
        Raises:
            ValueError: there are no tasks.
        """
        tasks = self._tasks = self._tasks if _indexed(self._tasks) else list(self._tasks)
        self.size = len(tasks)
        if count and not tasks:
            raise ValueError("there are no tasks to draw from")
        return [self._tasks[self._index(seed, *divmod(place, len(tasks)))] for place in range(start, start + count)]

    def first(self, limit: int) -> list[Any]:
        return list(islice(self._tasks, limit))

    def _index(self, seed: int, epoch: int, place: int) -> int:
        if not self._shuffle:
            return place
        if (seed, epoch) not in self._orders:
            while len(self._orders) > 1:  # a draw spans two epochs at most, unless the source is tiny
                self._orders.pop(next(iter(self._orders)))
            self._orders[seed, epoch] = np.random.default_rng([seed, epoch]).permutation(self.size or 0)
        return int(self._orders[seed, epoch][place])


def task_source(tasks: Any) -> TaskSource:
    """A source of given tasks; a source is one already."""
    return tasks if isinstance(tasks, TaskSource) else ListTasks(tasks)


class TaskCursor:
    """A place in a source's stream; `state_dict` is what a checkpoint keeps of it."""

    def __init__(self, source: TaskSource, seed: int, position: int = 0) -> None:
        self.source, self.seed, self.position = source, seed, position

    def take(self, count: int) -> list[Any]:
        """The next tasks. If the source raises, the cursor stays where it was."""
        tasks = self.source.draw(self.seed, self.position, count)
        self.position += count
        return tasks

    def state_dict(self) -> dict[str, int]:
        return {"seed": self.seed, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.seed, self.position = int(state["seed"]), int(state["position"])


def _indexed(tasks: Any) -> bool:
    """A list, or rows that stay on disk until they are read."""
    return hasattr(tasks, "__getitem__") and hasattr(tasks, "__len__")


def _seed_at(seed: int, place: int) -> int:
    """32 well-mixed bits; numpy's SeedSequence keeps neighbouring places apart."""
    return int(np.random.SeedSequence([seed, place]).generate_state(1)[0])
