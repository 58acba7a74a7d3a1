"""Games whose seats are driven by different processes are those that one process plays: the same tokens, masks and rewards."""

import asyncio
import time
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from coordination_tools import meeting, played_apart
from hypothesis import given, settings
from hypothesis import strategies as st
from test_any_game import Anything
from test_games import Relay, Talker, fingerprint

import opentinker.multiagent.coordination.member as member_module
import opentinker.rollout.sampler as sampler_module
from opentinker.config.agents import OnLate, TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.load import load_environment
from opentinker.environments.gomoku_duel import GomokuDuel
from opentinker.errors import EngineError
from opentinker.multiagent.coordination.seat_runner import SeatRunner
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.multiagent.games import Groups
from opentinker.multiagent.players import ModelPlayer, Player, ScriptedPlayer
from opentinker.multiagent.protocol import AgentProtocol, EnvironmentChooses, Free, ModeratorChooses, RoundRobin, Simultaneous
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats
from opentinker.rollout.trajectory import Run
from opentinker.rollout.types import Episode


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "FIRST_BACKOFF_S", 0.001)
    monkeypatch.setattr(member_module, "FIRST_PAUSE_S", 0.001)


class Broken(Talker):
    """Fails in turns whose seed says so, whenever that is asked."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    async def __call__(self, prompt: Any, params: Any, request_id: str) -> Any:
        if Random(params.seed).random() < self.share:
            raise EngineError("the engine broke")
        return await super().__call__(prompt, params, request_id)


def spelled(run: Run) -> Any:
    return str(run.kind), run.tokens.tolist(), run.sample and run.sample.logprobs.tolist()


def record(episode: Episode) -> Any:
    """Everything of an episode that does not depend on time."""
    return (
        episode.task,
        episode.member,
        str(episode.termination),
        [spelled(run) for trajectory in episode.trajectories for run in trajectory.runs],
        episode.messages,
        episode.rewards,
        episode.reward_without_turn,
        episode.metrics,
        sorted(episode.components.items()),
        episode.error,
    )


def whole(groups: Groups) -> Any:
    """All of the groups; episodes that failed are filed in the order of their ends, which depends on time."""
    return {
        name: [
            {
                "played": [record(episode) for episode in group.episodes],
                "failed": sorted((record(episode) for episode in group.failures), key=repr),
                "counts": (group.replaced, group.dropped),
            }
            for group in of_agent
        ]
        for name, of_agent in sorted(groups.items())
    }


async def both_ways(
    environment: type[MultiAgentEnvironment],
    drivers: Sequence[Sequence[str]],
    players: Any,
    tasks: Sequence[Any],
    *,
    group_size: int = 2,
    on_late: OnLate = "abort",
    lossy: Any = None,
    **limits: Any,
) -> tuple[Groups, Groups]:
    """The groups of games that one process plays, and of those that these drivers play."""
    rollout, turns = RolloutConfig(**limits), TurnsConfig(on_late=on_late)
    seats = Seats(environment.agents, environment.protocol)
    here: dict[str, Player] = players()
    one = await GameRunner(load_environment(environment), seats, rollout, turns, run_seed=3).run(here, tasks, group_size, 1)
    async with meeting(environment) as place:
        apart = await played_apart(
            place,
            drivers,
            players(),
            rollout,
            turns,
            lambda runner, mine: runner.run(mine, tasks, group_size, 1),
            run_seed=3,
            lossy=lossy,
        )
    return one, apart


async def test_a_game_of_two_drivers_is_that_of_one_process() -> None:
    one, apart = await both_ways(
        Relay, [["black"], ["white"]], lambda: {name: Talker().player() for name in Relay.agents}, [1, 2, 3], group_size=4
    )
    assert whole(one) == whole(apart)
    assert fingerprint(one) == fingerprint(apart)
    assert sum(len(group.episodes) for group in apart["white"]) == 12


async def test_gomoku_with_a_script_in_another_process_is_that_of_one_process() -> None:
    def first(messages: Sequence[Any], numbers: Any) -> str:
        return f"{numbers.choice('abcdefgh')}{numbers.randint(1, 8)}"

    one, apart = await both_ways(
        GomokuDuel,
        [["black"], ["white"]],
        lambda: {"black": Talker().player(), "white": ScriptedPlayer(first)},
        load_environment(GomokuDuel).held_out_tasks()[:2],
        max_turns=4,
    )
    assert whole(one) == whole(apart)
    assert list(apart) == ["black"]


@pytest.mark.parametrize("limits", [{"max_turns": 1}, {"max_turns": 3}])
async def test_limits_end_the_game_for_all_drivers(limits: Any) -> None:
    one, apart = await both_ways(
        Relay, [["black"], ["white"]], lambda: {n: Talker().player() for n in Relay.agents}, [1], **limits
    )
    assert whole(one) == whole(apart)


async def test_a_full_context_ends_the_game_for_all_drivers() -> None:
    def players() -> dict[str, Player]:
        return {"black": Talker().player(), "white": Talker().player(max_tokens=2, room=16)}

    one, apart = await both_ways(Relay, [["black"], ["white"]], players, [1])
    assert whole(one) == whole(apart)
    assert str(apart["black"][0].episodes[0].termination) == "truncated_context"


class Chaired(Anything):
    protocol = ModeratorChooses("a")


class Named(Anything):
    protocol = EnvironmentChooses()


class Rounds(Anything):
    protocol = RoundRobin()


class Together(Anything):
    protocol = Simultaneous()


ORDERS: list[type[Anything]] = [Chaired, Named, Rounds, Together]


@settings(max_examples=10, deadline=None)
@given(
    order=st.sampled_from(ORDERS),
    seed=st.integers(0, 10_000),
    on_late=st.sampled_from(["abort", "forfeit", "skip"]),
    split=st.sampled_from([[["a"], ["b"], ["c"], ["d"]], [["a", "c"], ["d", "b"]], [["b"], ["a", "c", "d"]]]),
    failing=st.sampled_from([0.0, 0.0, 0.15]),
    lost=st.sampled_from([0.0, 0.2]),
)
def test_any_game_of_any_drivers_is_that_of_one_process(
    order: type[Anything], seed: int, on_late: OnLate, split: Any, failing: float, lost: float
) -> None:
    """Even if agents come and go, policies fail, and requests and answers are lost, doubled and late. Of simultaneous turns
    one of which fails it depends on time how far the others were, so that those are left out."""
    if failing:
        order = Rounds
    Anything.games = []
    one, apart = asyncio.run(
        both_ways(
            order,
            split,
            lambda: {name: Broken(failing).player() for name in order.agents},
            [seed, seed + 1],
            on_late=on_late,
            lossy=(Random(seed), lost) if lost else None,
            max_turns=5,
            generation_retries=0,
        )
    )
    assert whole(one) == whole(apart)


def _hung(kind: str, begun: list[str], ended: list[str]) -> Player:
    """Never answers; says in `ended` when nobody waits for it any more."""

    async def asked(messages: Any, seed: int) -> str:
        begun.append(kind)
        try:
            return await asyncio.Event().wait() or "?"
        finally:
            ended.append(kind)

    def called(messages: Any, numbers: Any) -> str:
        begun.append(kind)
        try:
            while True:
                time.sleep(0.001)
        finally:
            ended.append(kind)

    return ModelPlayer(asked) if kind == "model" else ScriptedPlayer(called)


async def _against_who_hangs(kind: str, rollout: RolloutConfig, on_late: OnLate, patience_s: float) -> set[str]:
    """How black's episodes end whose opponent never answers, with a driver that waits for so long; nobody else is impatient."""
    begun: list[str] = []
    ended: list[str] = []
    patient = TurnsConfig(on_late=on_late, turn_timeout_s=3600.0)
    own = patient.model_copy(update={"turn_timeout_s": patience_s})

    async def drive(name: str, as_: str, player: Player, turns: TurnsConfig) -> Groups:
        member = place.member({name: as_})
        await member.join(place.terms(rollout, patient), [0])
        await member.started()
        return await SeatRunner(member, "train", rollout, turns, 3).run({name: player}, ["x"], 2, 1)

    async with meeting(Relay) as place, asyncio.timeout(100):
        found, _ = await asyncio.gather(
            drive("black", "policy", Talker().player(), patient), drive("white", "script", _hung(kind, begun, ended), own)
        )
        while len(ended) < len(begun):  # noqa: ASYNC110 - a thread says so
            await asyncio.sleep(0.01)
    [group] = found["black"]
    return {str(episode.termination) for episode in (*group.episodes, *group.failures)}


@pytest.mark.parametrize("kind", ["model", "script"])
@pytest.mark.parametrize(("on_late", "ends"), [("forfeit", "done"), ("abort", "error_timeout")])
async def test_who_never_answers_its_driver_loses_its_turns(kind: str, on_late: OnLate, ends: str) -> None:
    rollout = RolloutConfig(max_turns=2, member_retries=0)
    assert await _against_who_hangs(kind, rollout, on_late, patience_s=0.05) == {ends}


@pytest.mark.parametrize("kind", ["model", "script"])
async def test_nobody_waits_for_a_player_whose_game_is_over(kind: str) -> None:
    rollout = RolloutConfig(member_retries=0, episode_timeout_s=0.5)
    assert await _against_who_hangs(kind, rollout, "abort", patience_s=3600.0) == {"error_timeout"}


def test_free_play_of_several_drivers_ends_with_every_reward_given() -> None:
    """Whose action comes first is nobody's to say, so that only the sums can be compared."""

    class Open(Anything):
        protocol: AgentProtocol = Free()

    Anything.games = []
    one, apart = asyncio.run(
        both_ways(Open, [["a", "b"], ["c", "d"]], lambda: {n: Talker().player() for n in Open.agents}, [5, 6])
    )
    assert {n: len(g) for n, g in one.items()} == {n: len(g) for n, g in apart.items()}
