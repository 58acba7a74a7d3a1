"""Plays episodes of adapted environments as a run does: through a session, with deadlines and checks."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from opentinker.env.environment import Action, StepResult
from opentinker.env.execution import EnvironmentSession
from opentinker.env.load import load_environment
from opentinker.env.threads import UserThreads


@dataclass
class Played:
    task: Any
    first: list[str] = field(default_factory=list)
    """Contents of the first messages."""
    tools: Any = ()
    steps: list[StepResult] = field(default_factory=list)
    final: StepResult | None = None

    @property
    def last(self) -> StepResult:
        return self.steps[-1]

    def said(self, step: int) -> str:
        """What the environment answered at a step."""
        return "\n".join(str(message["content"]) for message in self.steps[step].observation)  # type: ignore[index, union-attr]


Play = Callable[..., Awaitable[Played]]


@pytest.fixture
def play() -> Play:
    """(name, actions, args=, task=, seed=, finish=) -> what happened, until the actions are used up or the episode is over."""

    async def run(
        name: str,
        actions: Any,
        args: Mapping[str, Any] | None = None,
        task: Any = None,
        seed: int = 0,
        finish: bool = False,
    ) -> Played:
        made, args = load_environment(name), dict(args or {})
        played = Played(task if task is not None else made.make_task(seed))
        with UserThreads() as threads:
            session = EnvironmentSession(lambda: made(**args), threads)
            try:
                played.first = [str(m["content"]) for m in await session.reset(played.task, 60)]
                played.tools = session.tools
                for action in actions:
                    played.steps.append(await session.step(Action(action) if isinstance(action, str) else action, 60))
                    if played.last.done:
                        break
                if finish:
                    played.final = await session.finalize(60)
            finally:
                await session.close(60)
        return played

    return run
