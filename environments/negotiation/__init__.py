"""Three agents divide coins: each proposes a division or accepts the last one; two who agree decide."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from opentinker.env.environment import Action
from opentinker.environments.negotiation.players import fair, greedy, random_offer
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import RoundRobin

HELD_OUT = 64


class Negotiation(MultiAgentEnvironment):
    """In turns, an agent names three numbers that sum to the coins, or accepts. A proposal that another agent accepts is the
    result: each earns its share of the coins times how much it values them, which the others do not know. Without agreement
    after `rounds` rounds nobody earns anything; an answer that is neither costs `penalty`.
    """

    agents = ("ann", "bob", "eve")
    protocol = RoundRobin()
    version = "1"
    players: ClassVar = {"random": random_offer, "fair": fair, "greedy": greedy}
    task_columns = ("coins", "values")

    def __init__(self, rounds: int = 3, penalty: float = 0.1) -> None:
        if rounds < 1:
            raise ConfigError(f"rounds is {rounds}", hint="it is 1 or more")
        self._rounds, self._penalty = rounds, penalty
        self._coins = 0
        self._values: dict[str, float] = {}
        self._proposal: tuple[int, ...] = ()
        self._proposer = ""
        self._turns = 0
        self._invalid = dict.fromkeys(self.agents, 0)

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return _task(Random(seed), coins=(6, 20))

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return [_task(Random(f"held out {number}"), coins=(21, 24)) for number in range(HELD_OUT)]

    def reset(self, task: Any) -> Mapping[str, str]:
        self._coins = int(task["coins"])
        self._values = dict(zip(self.agents, task["values"], strict=True))
        return {name: self._rules(name) for name in self.agents}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        self._turns += 1
        others = [name for name in self.agents if name != agent]
        numbers = [int(number) for number in re.findall(r"\d+", action.text)]
        if self._proposal and self._proposer != agent and re.search(r"\baccept", action.text.lower()):
            return self._agreed()
        over = self._turns >= self._rounds * len(self.agents)
        if len(numbers) == len(self.agents) and sum(numbers) == self._coins:
            self._proposal, self._proposer = tuple(numbers), agent
            said = ", ".join(f"{name} {number}" for name, number in zip(self.agents, numbers, strict=True))
            told = dict.fromkeys(others, f"{agent} proposes: {said}.")
            return MultiStepResult({}, told, done=over, metrics=self._metrics(agreed=False))
        self._invalid[agent] += 1
        told = dict.fromkeys(others, f"{agent} says nothing that counts.") | {agent: "That was no proposal."}
        rewards = {agent: {"invalid": -self._penalty}}
        return MultiStepResult(rewards, told, done=over, metrics=self._metrics(agreed=False))

    def _agreed(self) -> MultiStepResult:
        shares = dict(zip(self.agents, self._proposal, strict=True))
        rewards = {name: {"share": shares[name] / self._coins * self._values[name]} for name in self.agents}
        return MultiStepResult(rewards, done=True, metrics=self._metrics(agreed=True))

    def _metrics(self, *, agreed: bool) -> dict[str, dict[str, float]]:
        return {name: {"agreed": float(agreed), "invalid": float(self._invalid[name])} for name in self.agents}

    def _rules(self, name: str) -> str:
        example = " ".join(str(number) for number in _even(self._coins, len(self.agents)))
        return (
            f"You are {name}. You, {' and '.join(other for other in self.agents if other != name)} divide {self._coins} coins. "
            f"Each in turn proposes how many {', '.join(self.agents)} get, such as: {example}. Or say: accept. The last "
            f"proposal counts as soon as somebody else accepts it. Without agreement after {self._rounds} rounds nobody gets "
            f"any. All coins together are worth {self._values[name]:g} to you."
        )


def _even(coins: int, parts: int) -> list[int]:
    return [coins // parts + (place < coins % parts) for place in range(parts)]


def _task(random: Random, coins: tuple[int, int]) -> dict[str, Any]:
    return {"coins": random.randint(*coins), "values": [round(random.uniform(0.5, 1.5), 1) for _ in range(3)]}
