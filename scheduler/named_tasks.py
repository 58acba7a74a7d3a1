"""Background tasks by name, of which each runs once at a time."""

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class NamedTasks:
    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __contains__(self, name: str) -> bool:
        """Whether it is under way."""
        return name in self._tasks

    def spawn(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` unless it runs already; an error is logged, and the plan leads to it again."""
        if name not in self._tasks:
            task = self._tasks[name] = asyncio.create_task(work(), name=name)
            task.add_done_callback(self._done)

    async def cancel(self, names: Collection[str]) -> None:
        """End those of these that run."""
        await self._cancel([self._tasks[name] for name in names if name in self._tasks])

    async def close(self) -> None:
        """End them all."""
        await self._cancel(list(self._tasks.values()))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.pop(task.get_name(), None)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("event=task_failed task=%s", task.get_name(), exc_info=error)

    async def _cancel(self, tasks: list[asyncio.Task[None]]) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
