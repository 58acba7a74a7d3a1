"""Games that are not tidy: agents leave and still earn, are shown things while they think, are late again and again."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from test_games import Relay, Talker, Together, policies, runner

from opentinker.client.messages import Sample, SamplingParams
from opentinker.env.environment import Action, Message
from opentinker.errors import ConflictError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.players import Player, ScriptedPlayer
from opentinker.multiagent.protocol import EnvironmentChooses, Free, RoundRobin
from opentinker.rollout.types import Termination


class Server(Talker):
    """As a policy's server: a request's id stands for one body."""

    def __init__(self, hangs: Sequence[int] = ()) -> None:
        super().__init__(hangs)
        self.asked: dict[str, tuple[str, int]] = {}

    async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
        body = ("".join(map(chr, prompt)), params.seed or 0)
        if self.asked.setdefault(request_id, body) != body:
            raise ConflictError(f"{request_id} was already started with another body")
        return await super().__call__(prompt, params, request_id)


class Polls(Together):
    def step_together(self, actions: Mapping[str, Action]) -> MultiStepResult:
        Together.seen.append({name: action.text for name, action in actions.items()})
        return MultiStepResult({}, dict.fromkeys(self.agents, "again"), done=len(Together.seen) == 3)


async def test_the_turn_after_a_lost_one_is_a_request_of_its_own() -> None:
    late = Server(hangs=[1])
    groups = await runner(Polls, "skip", turn_timeout_s=1.5).run(policies(Polls, b=late.player()), ["x"], 1, step=0)
    assert [list(seen) for seen in Together.seen] == [["a", "b", "c"], ["a", "c"], ["a", "b", "c"]]
    assert groups["b"][0].episodes[0].turns == 2
    assert len(late.asked) == 3


class Gossip(MultiAgentEnvironment):
    """Free play: everybody hears everything, and b earns 10 whenever a speaks. Over when b has spoken three times."""

    agents = ("a", "b")
    protocol = Free()

    def __init__(self) -> None:
        self.spoken = {"a": 0, "b": 0}

    def reset(self, task: Any) -> Mapping[str, str]:
        return dict.fromkeys(self.agents, "speak")

    def step(self, agent: str, action: Action) -> MultiStepResult:
        self.spoken[agent] += 1
        word = f"{agent}{self.spoken[agent]}"
        rewards = {"b": {"heard": 10.0}} if agent == "a" else {"b": {"said": 1.0}}
        metrics = {"b": {"spoken": float(self.spoken["b"])}}
        return MultiStepResult(rewards, dict.fromkeys(self.agents, word), done=self.spoken["b"] == 3, metrics=metrics)


async def test_what_happens_while_an_agent_makes_up_its_mind_comes_before_its_action() -> None:
    """a speaks twice during each of b's first two turns."""
    a_is_heard: list[asyncio.Event] = [asyncio.Event() for _ in range(8)]
    b_has_asked: list[asyncio.Event] = [asyncio.Event() for _ in range(8)]

    class A(Talker):
        async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
            a_is_heard[self.calls].set()  # all its earlier words are heard
            await b_has_asked[self.calls // 2].wait()
            return await super().__call__(prompt, params, request_id)

    class B(Talker):
        async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
            call = self.calls
            b_has_asked[call].set()
            if call < 2:
                await a_is_heard[2 * call + 2].wait()
            return await super().__call__(prompt, params, request_id)

    b = B()
    players = policies(Gossip, a=A(hangs=[4]).player(), b=b.player())
    groups = await asyncio.wait_for(runner(Gossip).run(players, ["x"], 1, step=0), 30)
    [episode] = groups["b"][0].episodes
    first, second, _ = (str(m["content"]) for m in episode.messages if m["role"] == "assistant")
    assert b.prompts[1] == f"speak;{first}.a1;a2;b1;"
    assert b.prompts[2] == f"speak;{first}.a1;a2;b1;{second}.a3;a4;b2;"
    # What it earned before it ever acted is its first action's, and so is what it earned before its second one was heard.
    assert episode.rewards == [1.0 + 20.0 + 20.0, 1.0, 1.0]
    assert episode.components == {"heard": 40.0, "said": 3.0}
    assert episode.metrics == {"spoken": 3.0}


class Village(MultiAgentEnvironment):
    """The first one is voted out by the second; whoever is left wins with it, and everybody is told."""

    agents = ("ann", "bob", "eve")
    protocol = RoundRobin()

    def reset(self, task: Any) -> Mapping[str, str]:
        self.task = task
        return dict.fromkeys(self.agents, "vote")

    def step(self, agent: str, action: Action) -> MultiStepResult:
        if agent == "ann":
            return MultiStepResult({"ann": 0.5}, {"bob": "ann voted"})
        if agent == "bob":
            return MultiStepResult({}, {"eve": "ann is out"}, left=["ann"])
        if self.task == "falls":
            raise RuntimeError("the village fell")
        news = dict.fromkeys(self.agents, "the village won")
        won = {name: {"won": 1.0} for name in self.agents}
        return MultiStepResult(dict.fromkeys(self.agents, 1.0), news, done=True, metrics=won)


class Judged(Village):
    def finalize(self) -> Mapping[str, float]:
        return dict.fromkeys(self.agents, 0.25)


@pytest.mark.parametrize(("environment", "last"), [(Village, 0.0), (Judged, 0.25)])
async def test_who_has_left_hears_how_it_ended_and_earns_by_it(environment: type[Village], last: float) -> None:
    groups = await runner(environment, member_retries=0).run(policies(environment), ["x"], 1, step=0)
    [ann], [bob], [eve] = (groups[name][0].episodes for name in Village.agents)
    assert (ann.rewards, bob.rewards, eve.rewards) == ([1.5 + last], [1.0 + last], [1.0 + last])
    assert [e.metrics for e in (ann, bob, eve)] == [{"won": 1.0}] * 3
    assert ann.messages[-1]["content"] == "the village won"


async def test_an_episode_that_fails_after_somebody_left_says_nothing_about_anybody() -> None:
    groups = await runner(Village, member_retries=0).run(policies(Village), ["falls"], 1, step=0)
    for name in Village.agents:
        assert (groups[name][0].episodes, groups[name][0].dropped) == ([], 1)
        assert "the village fell" in groups[name][0].failures[0].error


class Relief(MultiAgentEnvironment):
    """Where the first one leaves, a substitute enters and plays; the other one is not next, though it is by the seats."""

    agents = ("first", "other", "substitute")
    protocol = EnvironmentChooses()

    def reset(self, task: Any) -> Mapping[str, str]:
        self.order: list[str] = []
        return {"first": "play", "other": "wait"}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        assert self.order == ["left"], "an action before the environment has dealt with who left"
        return MultiStepResult({agent: 1.0}, done=True)

    def leave(self, agent: str) -> MultiStepResult:
        self.order.append("left")
        return MultiStepResult(observations={"substitute": "play"}, next_agents=["substitute"])


async def test_the_environment_says_how_the_others_go_on_when_one_forfeits() -> None:
    def fails(messages: Sequence[Message], numbers: Any) -> str:
        raise ValueError("no idea")

    players = policies(Relief, first=ScriptedPlayer(fails))
    groups = await runner(Relief, "forfeit", member_retries=0).run(players, ["x"], 1, step=0)
    assert not groups["substitute"][0].failures, groups["substitute"][0].failures
    assert [e.rewards for e in groups["substitute"][0].episodes] == [[1.0]]
    assert [(e.termination, e.turns) for e in groups["other"][0].episodes] == [(Termination.DONE, 0)]


@pytest.mark.parametrize("scripted", [True, False])
async def test_an_agent_that_loses_all_its_turns_ends_the_episode(scripted: bool) -> None:
    def fails(messages: Sequence[Message], numbers: Any) -> str:
        raise ValueError("no idea")

    never: Player = ScriptedPlayer(fails) if scripted else Talker(fails=range(1000)).player()
    game = runner(Gossip, "skip", max_turns=3, generation_retries=0)
    groups = await game.run({"a": Talker(hangs=[0]).player(), "b": never}, ["x"], 1, step=0)
    [a] = groups["a"][0].episodes
    assert (a.termination, a.turns) == (Termination.TRUNCATED_TURNS, 0)


class Mixed(Relay):
    """Only its steps and its end are async."""

    threads: set[str]
    closed = 0

    def reset(self, task: Any) -> Mapping[str, str]:
        Mixed.threads.add(threading.current_thread().name)
        return super().reset(task)

    async def step(self, agent: str, action: Action) -> MultiStepResult:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().step(agent, action)

    async def close(self) -> None:  # type: ignore[override]
        await asyncio.sleep(0)
        Mixed.closed += 1


async def test_plain_methods_beside_async_ones_hold_up_nobody_and_an_async_close_is_awaited() -> None:
    Mixed.threads = set()
    groups = await runner(Mixed).run(policies(Mixed), ["x"], 2, step=0)
    assert [e.turns for e in groups["black"][0].episodes] == [2, 2]
    assert threading.current_thread().name not in Mixed.threads
    assert Mixed.closed == 2


async def test_there_is_no_last_reward_where_nobody_had_a_turn() -> None:
    class Counted(Relay):
        def finalize(self) -> Mapping[str, float]:
            raise RuntimeError("nothing to judge")

    full = Talker().player(room=2)
    groups = await runner(Counted, member_retries=0).run(policies(Counted, black=full), ["x"], 1, step=0)
    for name in Relay.agents:
        assert [e.termination for e in groups[name][0].episodes] == [Termination.TRUNCATED_CONTEXT]


async def test_a_cancellation_that_comes_while_a_leaver_is_stopped_is_not_lost() -> None:
    stopping = asyncio.Event()

    class Slow(Talker):
        async def __call__(self, prompt: Any, params: SamplingParams, request_id: str) -> Sample:
            try:
                return await super().__call__(prompt, params, request_id)
            except asyncio.CancelledError:
                stopping.set()
                await asyncio.sleep(3600)
                raise

    class Expelled(Gossip):
        def step(self, agent: str, action: Action) -> MultiStepResult:
            self.spoken[agent] += 1
            return MultiStepResult({}, {"a": "go on"}, left=["b"], done=self.spoken["a"] == 3)

    a = Talker()
    playing = asyncio.ensure_future(
        runner(Expelled).run(policies(Expelled, a=a.player(), b=Slow(hangs=[0]).player()), ["x"], 1, step=0)
    )
    await asyncio.wait_for(stopping.wait(), 30)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert a.calls == 1, "nobody acts after it"
