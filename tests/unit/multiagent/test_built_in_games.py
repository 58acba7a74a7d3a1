"""The built-in games of several agents: what they pay, whom they tell what, and what they refuse."""

from random import Random
from typing import Any

import pytest

from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.environments.describe_guess import WORDS, DescribeGuess
from opentinker.environments.gomoku_duel import GomokuDuel
from opentinker.environments.negotiation import Negotiation
from opentinker.environments.registry import FOR_AGENTS
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Table, checked_turn
from opentinker.multiagent.shared import SharedEnvironment

CELLS = [f"{column}{row}" for column in "abcde" for row in range(1, 6)]
LINES = {
    GomokuDuel: [*CELLS, "I resign", "z9"],
    DescribeGuess: [*WORDS, "", "It is round and grows on trees."],
    Negotiation: ["3 3 4", "accept", "no", "5 5 5", "1 2 3 4", "6 0 0"],
}


def total(reward: Any) -> float:
    return sum(reward.values()) if isinstance(reward, dict) else float(reward)


def play(game: MultiAgentEnvironment, task: Any, numbers: Random) -> tuple[dict[str, float], MultiStepResult]:
    """One game of random answers; what each agent earned, and the last result. Checks that the order of play can go on."""
    said = LINES[type(game)]  # type: ignore[index]
    waiting = dict.fromkeys(game.reset(task), 1)
    earned = dict.fromkeys(game.agents, 0.0)
    last: tuple[str, ...] = ()
    for _ in range(100):
        [agent] = checked_turn(game.protocol, Table(game.agents, game.agents, last)).agents
        assert waiting.pop(agent, 0), f"{agent} is shown something before it acts"
        result = game.step(agent, Action(numbers.choice(said)))
        assert isinstance(result, MultiStepResult)
        for name, reward in result.rewards.items():
            earned[name] += total(reward)
        for name in result.observations:
            waiting[name] = 1
        last = (agent,)
        if result.done:
            return earned, result
    raise AssertionError("the game does not end")


@pytest.mark.parametrize("make", LINES)
def test_any_answers_come_to_an_end_and_tasks_repeat(make: type[MultiAgentEnvironment]) -> None:
    for seed in range(60):
        task = make.make_task(seed)
        assert task == make.make_task(seed)
        assert set(make.task_columns) <= set(task)
        first, result = play(make(), task, Random(seed))
        assert set(result.metrics) == set(make.agents)
        assert first == play(make(), task, Random(seed))[0]
    held_out = [str(task) for task in make.held_out_tasks()]
    assert len(set(held_out)) == len(held_out) == 64
    assert not set(held_out) & {str(make.make_task(seed)) for seed in range(500)}


def test_they_load_by_name() -> None:
    for name in FOR_AGENTS:
        environment = load_environment(name)
        assert issubclass(environment, SharedEnvironment)
        assert environment.played in LINES


@pytest.mark.parametrize("illegal", ["random", "lose"])
def test_the_rewards_of_a_duel_sum_to_zero(illegal: Any) -> None:
    outcomes = set()
    for seed in range(200):
        earned, result = play(GomokuDuel(illegal=illegal), GomokuDuel.make_task(seed), Random(seed))
        assert sum(earned.values()) == pytest.approx(0.0)
        metrics = result.metrics["black"]
        assert metrics["won"] + metrics["lost"] + metrics["draw"] == 1.0
        assert metrics["won"] == result.metrics["white"]["lost"]
        outcomes.add((metrics["won"], metrics["lost"]))
    assert {(1.0, 0.0), (0.0, 1.0)} <= outcomes


def test_a_duel_tells_each_side_what_it_has_to_know() -> None:
    game = GomokuDuel()
    shown = game.reset({"seed": 1, "opening": ["a1", "b1"]})
    assert "as black (X)" in shown["black"]
    assert "as white (O)" in shown["white"]
    assert "Your move" in shown["black"]
    assert "Your move" not in shown["white"]
    result = game.step("black", Action("c3"))
    assert list(result.observations) == ["white"]
    assert str(result.observations["white"]).startswith("Black plays c3.")
    result = game.step("white", Action("c3"))
    assert str(result.observations["white"]).startswith("Cell c3 is taken. ")
    assert str(result.observations["white"]).endswith(" was played for you.")
    assert {name: total(reward) for name, reward in result.rewards.items()} == {"black": 0.1, "white": -0.1}
    for arguments, says in (({"illegal": "retry"}, "order of play"), ({"size": 2}, "cannot be played")):
        with pytest.raises(ConfigError, match=says):
            GomokuDuel(**arguments)


def test_describing_pays_both_and_never_leaks_the_word() -> None:
    game = DescribeGuess(rounds=2)
    shown = game.reset({"word": "river", "words": ["lemon", "river", *WORDS]})
    assert "It is river" in shown["describer"]
    assert "It is" not in shown["guesser"]
    leak = game.step("describer", Action("A RIVER, of course"))
    assert "river" not in str(leak.observations["guesser"]).lower()
    assert leak.rewards == {"describer": {"leak": -0.5}}
    wrong = game.step("guesser", Action("lemon"))
    assert wrong.rewards == {name: {"wrong": -0.1} for name in game.agents}
    game.step("describer", Action("Water that runs to the sea."))
    right = game.step("guesser", Action("the river!"))
    assert right.done
    assert right.rewards == {name: {"found": 1.0} for name in game.agents}
    assert right.metrics["describer"] == {"exact": 1.0, "guesses": 2.0, "leaks": 1.0}


def test_a_proposal_that_another_accepts_is_paid_by_what_it_is_worth() -> None:
    game = Negotiation()
    shown = game.reset({"coins": 10, "values": [1.0, 0.5, 1.5]})
    assert "0.5 to you" in shown["bob"]
    assert "0.5" not in shown["ann"]
    assert not game.step("ann", Action("ann 6, bob 2, eve 2")).done
    assert game.step("bob", Action("hm")).rewards == {"bob": {"invalid": -0.1}}
    result = game.step("eve", Action("I accept."))
    assert result.done
    assert {name: total(reward) for name, reward in result.rewards.items()} == pytest.approx(
        {"ann": 0.6, "bob": 0.1, "eve": 0.3}
    )
    own = Negotiation()
    own.reset({"coins": 10, "values": [1.0, 1.0, 1.0]})
    own.step("ann", Action("10 0 0"))
    own.step("bob", Action("hm"))
    own.step("eve", Action("hm"))
    assert not own.step("ann", Action("accept")).done, "nobody accepts what it proposed"
