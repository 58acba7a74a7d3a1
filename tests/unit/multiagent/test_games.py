"""Episodes of several agents, played by stub policies: who sees and earns what, and what becomes of those who are late."""

import asyncio
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

import opentinker.rollout.sampler as sampler_module
from opentinker.client.messages import Sample, SamplingParams
from opentinker.config.agents import OnLate, TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message, Tool
from opentinker.env.load import load_environment
from opentinker.environments.gomoku_duel import GomokuDuel
from opentinker.errors import ConfigError, DeadlineError, EngineError, EnvironmentLoadError, ProtocolError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.games import Groups
from opentinker.multiagent.players import Player, PolicyPlayer, ScriptedPlayer
from opentinker.multiagent.protocol import Alternating, EnvironmentChooses, Free, ModeratorChooses, RoundRobin, Simultaneous
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats
from opentinker.rendering.chunks import NO_IMAGES, Images
from opentinker.rollout.types import Termination

STOP = 1


class Letters:
    """Renders a message as its characters' codes."""

    stop_token_ids = (STOP,)
    preserves_prefix = True

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Images = NO_IMAGES) -> list[int]:
        return [ord(c) for m in messages for c in f"{m['content']};"]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("".join(chr(t) for t in action_tokens if t != STOP))

    def observation_delta(
        self,
        action_tokens: Sequence[int],
        observation: Sequence[Message],
        tools: Sequence[Tool] = (),
        images: Images = NO_IMAGES,
    ) -> list[int]:
        return self.render_prompt(observation)


class Talker:
    """A stub policy that says a digit drawn by the request's seed; `hangs` and `fails` say in which of its calls."""

    def __init__(self, hangs: Sequence[int] = (), fails: Sequence[int] = (), delay_s: float = 0.0) -> None:
        self.hangs, self.fails, self.delay_s = hangs, fails, delay_s
        self.calls = 0
        self.running = 0
        self.peak = 0
        self.prompts: list[str] = []
        self._begun = asyncio.Semaphore(0)

    async def all_running(self, count: int) -> None:
        for _ in range(count):
            await self._begun.acquire()

    async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
        call, self.calls = self.calls, self.calls + 1
        self.prompts.append("".join(chr(t) if t != STOP else "." for t in prompt))
        self.running += 1
        self._begun.release()
        self.peak = max(self.peak, self.running)
        try:
            if call in self.hangs:
                await asyncio.sleep(3600)
            if call in self.fails:
                raise EngineError("the engine broke")
            await asyncio.sleep(self.delay_s)
            digit = int(np.random.default_rng(params.seed).integers(10))
            tokens = np.array([ord(str(digit)), STOP], np.int32)
            return Sample(tokens, np.full(2, -0.5, np.float32), "stop", ((0, 2),))
        finally:
            self.running -= 1

    def player(self, max_tokens: int = 4, room: int = 10_000) -> PolicyPlayer:
        renderer: Any = Letters()
        return PolicyPlayer(renderer, self, SamplingParams(max_tokens=max_tokens), room)


class Relay(MultiAgentEnvironment):
    """Each tells the other its number until one has said `rounds`; who said the larger last number wins."""

    agents = ("black", "white")
    protocol = Alternating()

    def __init__(self, rounds: int = 2, breaks: str = "") -> None:
        self.rounds, self.breaks = rounds, breaks
        self.said: dict[str, list[str]] = {"black": [], "white": []}

    def reset(self, task: Any) -> Mapping[str, str]:
        return {"black": f"you are black {task}", "white": f"you are white {task}"}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        if self.breaks == agent:
            raise RuntimeError("the board fell")
        other = "white" if agent == "black" else "black"
        self.said[agent].append(action.text)
        if len(self.said["white"]) < self.rounds:
            return MultiStepResult(rewards={agent: 0.1}, observations={other: f"{agent} {action.text}"})
        winner = max(self.said, key=lambda name: self.said[name][-1])
        rewards = {name: 1.0 if name == winner else -1.0 for name in self.said}
        return MultiStepResult(rewards, done=True, metrics={n: {"won": float(n == winner)} for n in self.said})

    def leave(self, agent: str) -> MultiStepResult:
        return MultiStepResult({("white" if agent == "black" else "black"): 1.0}, done=True)

    def finalize(self) -> Mapping[str, float]:
        return {"black": 0.25, "white": -0.25}


def runner(
    environment: type[MultiAgentEnvironment], on_late: OnLate = "abort", turn_timeout_s: float = 60.0, **config: Any
) -> GameRunner:
    loaded = load_environment(environment)
    seats = Seats(environment.agents, environment.protocol)
    turns = TurnsConfig(on_late=on_late, turn_timeout_s=turn_timeout_s)
    return GameRunner(loaded, seats, RolloutConfig(**config), turns, run_seed=0)


def policies(environment: type[MultiAgentEnvironment], **players: Player) -> dict[str, Player]:
    return {name: players.get(name) or Talker().player() for name in environment.agents}


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "FIRST_BACKOFF_S", 0.001)


def fingerprint(groups: Groups) -> Any:
    return {
        name: [[(e.member, e.termination, e.rewards, e.trajectories[0].tokens.tolist()) for e in g.episodes] for g in of_agent]
        for name, of_agent in groups.items()
    }


async def test_each_agent_sees_its_part_and_earns_for_its_own_actions() -> None:
    black, white = Talker(), Talker()
    groups = await runner(Relay).run({"black": black.player(), "white": white.player()}, ["x"], 1, step=0)
    [mine], [theirs] = groups["black"][0].episodes, groups["white"][0].episodes
    b1, b2 = (str(m["content"]) for m in mine.messages if m["role"] == "assistant")
    w1, w2 = (str(m["content"]) for m in theirs.messages if m["role"] == "assistant")
    assert black.prompts == ["you are black x;", f"you are black x;{b1}.white {w1};"]
    assert white.prompts == [f"you are white x;black {b1};", f"you are white x;black {b1};{w1}.black {b2};"]
    won = b2 >= w2
    assert mine.rewards == pytest.approx([0.1, 0.1 + (1.0 if won else -1.0) + 0.25])
    assert theirs.rewards == pytest.approx([0.1, (-1.0 if won else 1.0) - 0.25])
    assert (mine.metrics, theirs.metrics) == ({"won": float(won)}, {"won": float(not won)})
    assert (mine.termination, theirs.termination) == (Termination.DONE, Termination.DONE)
    assert [t.actions for t in mine.trajectories] == [2]
    assert mine.trains
    assert theirs.trains


async def test_a_run_repeats_and_agents_draw_apart() -> None:
    game = runner(Relay)
    first = fingerprint(await game.run(policies(Relay), ["a", "b"], 3, step=1))
    assert fingerprint(await runner(Relay, max_concurrent_episodes=1).run(policies(Relay), ["a", "b"], 3, step=1)) == first
    assert fingerprint(await game.run(policies(Relay), ["a", "b"], 3, step=2)) != first
    assert [len(group) for group in first["black"]] == [3, 3]


async def test_only_one_of_two_alternating_agents_runs() -> None:
    both = Talker(delay_s=0.002)
    await runner(Relay).run({"black": both.player(), "white": both.player()}, ["x"], 1, step=0)
    assert both.peak == 1
    assert both.calls == 4


async def test_the_environment_may_say_who_begins() -> None:
    class WhiteBegins(Relay):
        protocol = EnvironmentChooses()

        def reset(self, task: Any) -> MultiStepResult:  # type: ignore[override]  # the relay gives observations alone
            return MultiStepResult(observations=super().reset(task), next_agents=["white"])

    white = Talker()
    groups = await runner(WhiteBegins).run(policies(WhiteBegins, white=white.player()), ["x"], 1, step=0)
    assert white.prompts[0] == "you are white x;"
    assert [e.turns for e in groups["black"][0].episodes] == [1]


class Together(MultiAgentEnvironment):
    """All say a number at once; the largest wins."""

    agents = ("a", "b", "c")
    protocol = Simultaneous()
    seen: list[dict[str, str]]

    def reset(self, task: Any) -> Mapping[str, str]:
        Together.seen = []
        return dict.fromkeys(self.agents, "go")

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        Together.seen.append({name: action.text for name, action in actions.items()})
        told = dict.fromkeys(self.agents, "again")
        return MultiStepResult(dict.fromkeys(actions, 1.0), told, done=len(Together.seen) == 2)


async def test_simultaneous_agents_sample_side_by_side_and_the_environment_sees_all_at_once() -> None:
    all_of_them = Talker(delay_s=0.05)
    players: dict[str, Player] = {name: all_of_them.player() for name in Together.agents}
    groups = await runner(Together).run(players, ["x"], 1, step=0)
    assert all_of_them.peak == 3
    assert [list(seen) for seen in Together.seen] == [["a", "b", "c"]] * 2
    assert all(groups[name][0].episodes[0].rewards == [1.0, 1.0] for name in Together.agents)


async def test_an_action_that_the_environment_never_saw_is_no_turn_of_the_episode() -> None:
    hangs = Talker(hangs=[1])
    game = runner(Together, "forfeit", turn_timeout_s=1.5, member_retries=0)
    groups = await game.run(policies(Together, b=hangs.player()), ["x"], 1, step=0)
    assert len(Together.seen) == 1, "when b left, the second actions of a and c were there, and were not shown"
    for name in ("a", "c"):
        episode = groups[name][0].episodes[0]
        assert episode.rewards == [1.0]
        assert [t.actions for t in episode.trajectories] == [1], "what is not seen is not trained on"
        assert episode.messages[-1]["role"] == "user"


class Bidding(MultiAgentEnvironment):
    """Free play: whoever speaks is heard; after 12 words it is over."""

    agents = ("a", "b", "c")
    protocol = Free()

    def __init__(self) -> None:
        self.words: list[str] = []

    async def reset(self, task: Any) -> Mapping[str, str]:  # type: ignore[override]
        return dict.fromkeys(self.agents, "speak")

    async def step(self, agent: str, action: Action) -> MultiStepResult:  # type: ignore[override]
        self.words.append(agent)
        told = dict.fromkeys(self.agents, f"{agent}: {action.text}")
        metrics = {name: {"words": float(self.words.count(name))} for name in self.agents}
        return MultiStepResult({agent: 1.0}, told, done=len(self.words) == 12, metrics=metrics)


async def test_in_free_play_nobody_waits_for_a_slow_one() -> None:
    slow = Talker(delay_s=30.0)
    groups = await asyncio.wait_for(runner(Bidding).run(policies(Bidding, c=slow.player()), ["x"], 1, step=0), 20)
    episodes = {name: groups[name][0].episodes[0] for name in Bidding.agents}
    assert episodes["c"].metrics == {"words": 0.0}
    assert not episodes["c"].trains, "its action was never said"
    assert episodes["a"].turns + episodes["b"].turns == 12
    assert slow.running == 0
    assert all(e.termination is Termination.DONE for e in episodes.values())


class Debate(MultiAgentEnvironment):
    """A chair names who speaks; `late` enters after the first word, and whoever said a word that ends on 0 has to leave."""

    agents = ("chair", "ann", "late")
    protocol = ModeratorChooses("chair")

    def __init__(self, words: int = 3) -> None:
        self.words, self.left = words, words

    def reset(self, task: Any) -> Mapping[str, str]:
        return {"chair": "choose", "ann": "listen"}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        if agent == "chair":
            chosen = "late" if self.left < self.words else "ann"
            return MultiStepResult(observations={chosen: "speak"}, next_agents=[chosen])
        self.left -= 1
        told = {"chair": f"{agent} spoke", "late": f"{agent} spoke"}
        return MultiStepResult({agent: 1.0, "chair": 0.5}, told, done=not self.left)


async def test_a_moderator_names_who_speaks_and_agents_enter() -> None:
    groups = await runner(Debate).run(policies(Debate), ["x"], 1, step=0)
    assert not groups["ann"][0].failures, groups["ann"][0].failures[0].error
    rewards = {name: groups[name][0].episodes[0].rewards for name in Debate.agents}
    assert rewards == {"chair": [0.5, 0.5, 0.5], "ann": [1.0], "late": [1.0, 1.0]}
    assert groups["late"][0].episodes[0].messages[0]["content"] == "ann spoke"


async def test_a_scripted_player_plays_and_leaves_no_trajectory() -> None:
    heard: list[str] = []

    def act(messages: Sequence[Message], numbers: Any) -> str:
        heard.append(str(messages[-1]["content"]))
        return str(numbers.randrange(10))

    groups = await runner(Relay).run(policies(Relay, white=ScriptedPlayer(act)), ["x"], 2, step=0)
    assert list(groups) == ["black"]
    assert [e.turns for e in groups["black"][0].episodes] == [2, 2]
    assert len(heard) == 4
    assert all(text.startswith("black ") for text in heard)


async def test_what_an_agent_earns_without_ever_acting_is_counted_and_trains_nothing() -> None:
    class Forfeit(Relay):
        def step(self, agent: str, action: Action) -> MultiStepResult:
            return MultiStepResult({"black": -1.0, "white": 1.0}, done=True)

    groups = await runner(Forfeit).run(policies(Forfeit), ["x"], 1, step=0)
    [black], [white] = groups["black"][0].episodes, groups["white"][0].episodes
    assert (black.reward, white.reward) == (-1.0 + 0.25, 1.0 - 0.25)
    assert (white.rewards, white.turns, white.trains) == ([], 0, False)


@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("on_late", ["abort", "forfeit", "skip", "fail"])
async def test_an_agent_that_is_late_is_dealt_with_as_configured_and_named(on_late: OnLate, scripted: bool) -> None:
    def stuck(messages: Sequence[Message], numbers: Any) -> str:
        calls.append(1)
        if len(calls) == 1:
            time.sleep(10)
        return "5"

    calls: list[int] = []
    white: Player = ScriptedPlayer(stuck) if scripted else Talker(hangs=[0]).player()
    game = runner(Relay, on_late, turn_timeout_s=1.0, member_retries=0)
    start = time.monotonic()
    if on_late == "fail":
        with pytest.raises(DeadlineError, match=r"the turn of 'white': the (policy|player) did not answer within 1 s"):
            await game.run(policies(Relay, white=white), ["x"], 1, step=0)
        return
    groups = await game.run(policies(Relay, white=white), ["x"], 1, step=0)
    assert time.monotonic() - start < 9.5, "nobody waited for what hangs"
    black = groups["black"][0]
    if on_late == "abort":
        assert (black.episodes, black.dropped) == ([], 1)
        assert "'white': the" in black.failures[0].error
        assert black.failures[0].termination is Termination.ERROR_TIMEOUT
    elif on_late == "forfeit":
        assert black.episodes[0].rewards == pytest.approx([0.1 + 1.0 + 0.25])
        assert black.episodes[0].termination is Termination.DONE
        if not scripted:
            assert groups["white"][0].failures[0].termination is Termination.ERROR_TIMEOUT
    else:
        # White's first turn was lost. Black was shown nothing since, so that this order of play cannot go on.
        assert "shown nothing" in black.failures[0].error


class Polls(Together):
    """Simultaneous, and everybody is told something after each round: a lost turn holds up nobody."""

    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        Together.seen.append({name: action.text for name, action in actions.items()})
        return MultiStepResult({}, dict.fromkeys(self.agents, "again"), done=len(Together.seen) == 3)


async def test_a_lost_turn_is_shown_again() -> None:
    late = Talker(hangs=[1])
    groups = await runner(Polls, "skip", turn_timeout_s=1.5).run(policies(Polls, b=late.player()), ["x"], 1, step=0)
    assert [list(seen) for seen in Together.seen] == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]
    [episode] = groups["b"][0].episodes
    first = episode.messages[1]["content"]
    assert late.prompts == ["go;", f"go;{first}.again;", f"go;{first}.again;again;"]
    assert episode.trajectories[0].actions == 2


async def test_an_engine_that_fails_once_replaces_the_episode() -> None:
    broken = Talker(fails=[0, 1, 2])
    groups = await runner(Relay).run(policies(Relay, white=broken.player()), ["x"], 1, step=0)
    assert (groups["white"][0].replaced, groups["black"][0].replaced) == (1, 1)
    assert "'white': the engine broke" in groups["black"][0].failures[0].error
    assert len(groups["black"][0].episodes) == len(groups["white"][0].episodes) == 1


async def test_an_environment_that_raises_is_an_error_of_the_episode_at_the_authors_line() -> None:
    class Falls(Relay):
        def step(self, agent: str, action: Action) -> MultiStepResult:
            raise RuntimeError("the board fell")

    groups = await runner(Falls, member_retries=0).run(policies(Falls), ["x"], 1, step=0)
    for name in Falls.agents:
        [failure] = groups[name][0].failures
        assert failure.termination is Termination.ERROR_ENV
        assert failure.error.startswith("Falls.step raised RuntimeError: the board fell")
        assert "test_games.py:" in failure.error


@pytest.mark.parametrize(
    ("result", "says"),
    [
        (None, "Odd.step returned NoneType"),
        (MultiStepResult({"red": 1.0}), "rewards names 'red', which is no agent"),
        (MultiStepResult(observations={"red": "x"}), "observations names 'red', which is no agent"),
        (MultiStepResult({"black": float("nan")}), "Odd.step for 'black': the reward is nan"),
        (MultiStepResult(observations={"black": 7}), "observation of type int"),  # type: ignore[dict-item]
        (MultiStepResult(left="black"), "left is str"),
        (MultiStepResult(metrics={"black": {"n": "x"}}), "metric 'n' must be a number"),  # type: ignore[dict-item]
    ],
)
async def test_a_result_that_is_none_is_explained(result: Any, says: str) -> None:
    class Odd(Relay):
        def step(self, agent: str, action: Action) -> Any:
            return result

    groups = await runner(Odd, member_retries=0).run(policies(Odd), ["x"], 1, step=0)
    assert says in groups["black"][0].failures[0].error


async def test_limits_of_one_end_the_episode_for_all_as_truncated() -> None:
    groups = await runner(Relay, max_turns=1).run(policies(Relay), ["x"], 1, step=0)
    [black], [white] = groups["black"][0].episodes, groups["white"][0].episodes
    assert (black.termination, white.termination) == (Termination.TRUNCATED_TURNS, Termination.TRUNCATED_TURNS)
    assert black.rewards == pytest.approx([0.1 + 0.25])
    full = Talker().player(room=20)
    groups = await runner(Relay).run(policies(Relay, black=full), ["x"], 1, step=0)
    [black], [white] = groups["black"][0].episodes, groups["white"][0].episodes
    assert (black.termination, white.termination) == (Termination.TRUNCATED_CONTEXT, Termination.TRUNCATED_CONTEXT)
    assert (black.turns, white.turns) == (1, 1)


async def test_seats_without_players_and_players_without_seats_are_refused() -> None:
    with pytest.raises(ConfigError, match="nobody plays 'white'"):
        await runner(Relay).run({"black": Talker().player()}, ["x"], 1, step=0)
    with pytest.raises(ConfigError, match="no agent 'red'"):
        await runner(Relay).run({**policies(Relay), "red": Talker().player()}, ["x"], 1, step=0)


async def test_a_protocol_of_ones_own_that_names_no_one_ends_the_run() -> None:
    class Nobody:
        def next_turn(self, table: Any) -> Any:
            from opentinker.multiagent.protocol import Turn

            return Turn(())

    class Stuck(Relay):
        protocol = Nobody()

    with pytest.raises(ProtocolError, match="Nobody names no one"):
        await runner(Stuck).run(policies(Stuck), ["x"], 1, step=0)


def test_a_class_that_cannot_be_played_is_not_loaded() -> None:
    class NoAgents(Relay):
        agents = ()

    class ThreeAlternate(Relay):
        agents = ("a", "b", "c")

    class Empty(MultiAgentEnvironment):
        agents = ("a",)
        protocol = RoundRobin()

    for environment, says in ((NoAgents, "names no agents"), (ThreeAlternate, "takes 2 agents"), (Empty, "defines no reset")):
        with pytest.raises(EnvironmentLoadError, match=says):
            load_environment(environment)


def test_a_loaded_class_travels_as_the_authors_class_and_keeps_what_its_bases_reserve() -> None:
    loaded = load_environment(GomokuDuel)
    assert pickle.loads(pickle.dumps(loaded)) is loaded

    class Walls(GomokuDuel):
        host_args = ("size",)

    class More(Walls):
        host_args = ("win",)

    assert set(load_environment(More).host_args) == {"size", "win"}


async def test_nothing_is_left_running_when_a_run_is_cancelled() -> None:
    slow = Talker(delay_s=3600)
    running = asyncio.ensure_future(runner(Relay).run(policies(Relay, black=slow.player()), list("abc"), 4, step=0))
    await slow.all_running(12)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert slow.running == 0
