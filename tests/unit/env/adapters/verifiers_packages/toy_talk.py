"""A taskset made with verifiers 0.4 that brings an environment of several turns."""

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf


class Data(vf.TaskData):  # type: ignore[misc]
    secret: int


class Secret(vf.Task[Data]):  # type: ignore[misc]
    pass


class Secrets(vf.Taskset[Secret, vf.TasksetConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Secret]:
        for secret in range(4, 7):
            yield Secret(Data(prompt="Guess a number.", secret=secret), self.config.task)


class Config(vf.EnvConfig):  # type: ignore[misc]
    agent: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[Config]):  # type: ignore[misc]
    async def run(self, task: Any, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            segment = await talk.turn()
            for _ in range(5):
                if segment.terminated:
                    break
                if segment.last_reply == "crash":
                    raise ZeroDivisionError("a bug of its author")
                if segment.last_reply == str(task.data.secret):
                    talk.trace.record_reward("found", 1.0)
                    break
                segment = await talk.turn("Higher." if int(segment.last_reply) < task.data.secret else "Lower.")


__all__ = ["Guess", "Secrets"]
