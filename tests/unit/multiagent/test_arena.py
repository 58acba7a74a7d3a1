"""Scores and ratings of players who met: against known strengths, and from real games of scripted ones."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError
from opentinker.multiagent.arena import ELO_PER_NAT, CrossPlay, cross_play, elo
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.players import ScriptedPlayer
from opentinker.multiagent.runner import GameRunner
from opentinker.multiagent.seats import Seats


@given(st.lists(st.floats(-300, 300), min_size=2, max_size=6))
def test_ratings_are_found_again_from_the_scores_that_they_give(ratings: list[float]) -> None:
    strength = np.exp(np.array(ratings) / ELO_PER_NAT)
    scores = strength[:, None] / (strength[:, None] + strength[None, :])
    games = 100_000 * (1 - np.eye(len(ratings), dtype=np.int64))
    found = elo(scores, games)
    assert found == pytest.approx(np.array(ratings) - np.mean(ratings), abs=1.0)


def test_400_points_win_ten_times_as_often_and_who_never_lost_has_a_finite_rating() -> None:
    games = np.array([[0, 11_000], [11_000, 0]])
    first, second = elo(np.array([[np.nan, 10 / 11], [1 / 11, np.nan]]), games)
    assert first - second == pytest.approx(400.0, abs=1.0)
    best, worst = elo(np.array([[np.nan, 1.0], [0.0, np.nan]]), np.array([[0, 10], [10, 0]]))
    assert 0 < best < 1000
    assert best == -worst


def test_who_met_nobody_is_in_the_middle() -> None:
    scores = np.array([[np.nan, 0.8, np.nan], [0.2, np.nan, np.nan], [np.nan] * 3])
    found = elo(scores, np.array([[0, 10, 0], [10, 0, 0], [0, 0, 0]]))
    assert np.isfinite(found).all()
    assert found[0] > found[2] > found[1]


def test_the_table_has_every_pair() -> None:
    result = CrossPlay(
        ("random", "trained"), np.array([[np.nan, 0.25], [0.75, np.nan]]), np.array([[0, 100], [100, 0]], np.int64)
    )
    lines = result.table().splitlines()
    assert "random" in lines[0]
    assert "trained" in lines[0]
    assert lines[1].split() == ["random", "-", "0.250", f"{result.ratings()['random']:+.0f}"]
    score = result.against("trained", "random")
    assert (score.mean, score.games) == (0.75, 100)
    assert score.half_width == pytest.approx(0.085, abs=0.001)


class Larger(MultiAgentEnvironment):
    """Whoever says the larger number wins; the first seat wins when they are equal."""

    agents = ("first", "second")

    def __init__(self) -> None:
        self.said = ""

    def reset(self, task: Any) -> Mapping[str, str]:
        return {"first": "say", "second": "say"}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        if agent == "first":
            self.said = action.text
            return MultiStepResult()
        first = int(self.said) >= int(action.text)
        return MultiStepResult(
            done=True, metrics={"first": {"won": float(first), "lost": float(not first)}, "second": {"won": float(not first)}}
        )


def say(number: int) -> ScriptedPlayer:
    def act(messages: Sequence[Message], numbers: random.Random) -> str:
        return str(number)

    return ScriptedPlayer(act)


async def test_two_scripts_have_no_episodes_to_score_and_one_player_has_nobody_to_meet() -> None:
    game = GameRunner(
        load_environment(Larger),
        Seats(Larger.agents, Larger.protocol),
        RolloutConfig(),
        TurnsConfig(),
        run_seed=0,
    )
    with pytest.raises(ConfigError, match="neither 'one' nor 'two' is a policy"):
        await cross_play(game, ("first", "second"), {"one": say(1), "two": say(2)}, ["x"], 1)
    with pytest.raises(ConfigError, match="needs two players"):
        await cross_play(game, ("first", "second"), {"one": say(1)}, ["x"], 1)
