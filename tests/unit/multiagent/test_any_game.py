"""Whatever an environment does, in whatever order of play, whoever fails: each game ends, and every reward is somebody's."""

import asyncio
from collections import Counter
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from test_games import Talker, runner

from opentinker.config.agents import OnLate
from opentinker.env.environment import Action
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.players import Player, ScriptedPlayer
from opentinker.multiagent.protocol import EnvironmentChooses, Free, ModeratorChooses, RoundRobin, Simultaneous
from opentinker.rollout.types import Episode, Termination


class Anything(MultiAgentEnvironment):
    """Agents enter, leave, earn and are named as the task's random numbers say. Everybody who takes part hears everything."""

    agents = ("a", "b", "c", "d")
    games: list["Anything"]

    def reset(self, task: Any) -> Mapping[str, str]:
        Anything.games.append(self)
        self.random = Random(task)
        self.paid: Counter[str] = Counter()
        self.words = 0
        self.inside = set(self.random.sample(self.agents, self.random.randint(1, 4)))
        self.outside = set(self.agents) - self.inside
        return dict.fromkeys(sorted(self.inside), "go")

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return self.step_together({agent: action})

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        assert set(actions) <= self.inside, "who has left does not act"
        return self._goes_on()

    def leave(self, agent: str) -> MultiStepResult:
        assert agent in self.inside, "who has left does not leave again"
        self.inside.remove(agent)
        return self._goes_on()

    def _goes_on(self) -> MultiStepResult:
        random, self.words = self.random, self.words + 1
        done = self.words > 12 or random.random() < 0.05
        left = [name for name in sorted(self.inside) if random.random() < 0.1]
        entering = [name for name in sorted(self.outside) if random.random() < 0.2]
        self.inside = self.inside - set(left) | set(entering)
        self.outside -= set(entering)
        rewards = {name: float(random.randint(-3, 3)) for name in self.agents if random.random() < 0.5}
        self.paid.update(rewards)  # type: ignore[arg-type]
        shown = self.agents if done else sorted(self.inside)
        named = [name for name in self.agents if random.random() < 0.4]
        return MultiStepResult(
            {name: {"r": reward} for name, reward in rewards.items()},
            dict.fromkeys(shown, f"word {self.words}"),
            done=done,
            left=left,
            next_agents=named,
            metrics={name: {"words": float(self.words)} for name in self.agents},
        )

    def finalize(self) -> Mapping[str, float]:
        last = {name: float(self.random.randint(-3, 3)) for name in self.agents}
        self.paid.update(last)  # type: ignore[arg-type]
        return last


class Chaired(Anything):
    protocol = ModeratorChooses("a")


class Named(Anything):
    protocol = EnvironmentChooses()


class Each(Anything):
    protocol = RoundRobin()


class AtOnce(Anything):
    protocol = Simultaneous()


class AtWill(Anything):
    protocol = Free()


def check(episode: Episode, game: Anything, name: str) -> None:
    if not episode.termination.trains:
        return
    assert episode.reward == pytest.approx(game.paid[name])
    assert sum(episode.components.values()) == pytest.approx(game.paid[name])
    actions = [m for m in episode.messages if m["role"] == "assistant"]
    assert sum(t.actions for t in episode.trajectories) == len(actions) >= episode.turns
    words = [int(str(m["content"]).split()[1]) for m in episode.messages if str(m["content"]).startswith("word ")]
    assert words == sorted(words), "news comes in its order"
    if words:
        assert episode.metrics["words"] >= words[-1]


@settings(max_examples=100, deadline=None)
@given(
    environment=st.sampled_from([Chaired, Named, Each, AtOnce, AtWill]),
    on_late=st.sampled_from(["abort", "forfeit", "skip"]),
    seed=st.integers(0, 10**6),
    fails=st.lists(st.integers(0, 9), max_size=2),
    scripted=st.booleans(),
)
def test_any_game_ends_and_every_reward_is_somebodys(
    environment: type[Anything], on_late: OnLate, seed: int, fails: list[int], scripted: bool
) -> None:
    calls = Counter[str]()

    def act(messages: Any, numbers: Random) -> str:
        calls["d"] += 1
        if calls["d"] in fails:
            raise ValueError("no idea")
        return "5"

    async def play() -> Any:
        Anything.games = []
        players: dict[str, Player] = {name: Talker(fails=fails if name == "b" else ()).player() for name in environment.agents}
        if scripted:
            players["d"] = ScriptedPlayer(act)
        game = runner(environment, on_late, member_retries=0, max_turns=6, generation_retries=0, max_concurrent_episodes=1)
        return await asyncio.wait_for(game.run(players, [seed], 1, step=0), 60)

    groups = asyncio.run(play())
    [game] = Anything.games
    for name, [group] in groups.items():
        for episode in group.episodes:
            check(episode, game, name)
            event(f"{on_late}: {episode.termination}")
        for failure in group.failures:
            event(f"{on_late}: {failure.termination}")
            assert failure.termination is not Termination.ERROR_TIMEOUT
            assert "no idea" in failure.error or "the engine broke" in failure.error or "shown nothing" in failure.error
