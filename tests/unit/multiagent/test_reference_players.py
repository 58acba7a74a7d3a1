"""The reference players of the built-in games know their game: they never break a rule, and better ones do better."""

from random import Random
from typing import Any

import pytest

from opentinker.env.environment import Action, Message
from opentinker.environments.describe_guess import DescribeGuess
from opentinker.environments.gomoku_duel import GomokuDuel
from opentinker.environments.gomoku_duel.players import shown_board
from opentinker.environments.negotiation import Negotiation
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.multiagent.protocol import Table, checked_turn


def played(game: MultiAgentEnvironment, cast: dict[str, str], seed: int) -> tuple[dict[str, float], Any]:
    """What each seat earned in a game of reference players, and the last metrics."""
    shown: dict[str, list[Message]] = {name: [] for name in game.agents}
    earned = dict.fromkeys(game.agents, 0.0)

    def tell(observations: Any) -> None:
        for name, text in observations.items():
            shown[name].append({"role": "user", "content": text})

    tell(game.reset(game.make_task(seed)))
    last: tuple[str, ...] = ()
    for turn in range(100):
        [agent] = checked_turn(game.protocol, Table(game.agents, game.agents, last)).agents
        text = game.players[cast[agent]](shown[agent], Random(f"{seed} {turn}"))
        shown[agent].append({"role": "assistant", "content": text})
        result = game.step(agent, Action(text))
        for name, reward in result.rewards.items():  # type: ignore[union-attr]
            earned[name] += sum(reward.values()) if isinstance(reward, dict) else float(reward)
        tell(result.observations)  # type: ignore[union-attr]
        last = (agent,)
        if result.done:  # type: ignore[union-attr]
            return earned, result.metrics  # type: ignore[union-attr]
    raise AssertionError("the game does not end")


@pytest.mark.parametrize("size", [(3, 3), (5, 4)])
def test_in_gomoku_the_heuristic_beats_random_moves_and_nobody_plays_an_illegal_one(size: tuple[int, int]) -> None:
    score = 0.0
    for seed in range(40):
        mine, other = ("black", "white") if seed % 2 else ("white", "black")
        # Openings are for the default board; a smaller one may lack their cells.
        game = GomokuDuel(*size)
        if size[0] < 5:
            game.make_task = lambda seed: {"seed": seed, "opening": []}  # type: ignore[method-assign]
        _, metrics = played(game, {mine: "heuristic", other: "random"}, seed)
        assert all(agent["illegal"] == 0 for agent in metrics.values())
        score += (1 + metrics[mine]["won"] - metrics[mine]["lost"]) / 2
    assert score / 40 > 0.8


def test_the_board_is_read_as_it_was_shown() -> None:
    game = GomokuDuel(5, 4)
    first = game.reset({"seed": 1, "opening": ["a1", "c3"]})
    messages: list[Message] = [{"role": "user", "content": str(first["black"])}]
    game.step("black", Action("b2"))
    assert game._game is not None
    before = shown_board(messages)
    assert before.play((1, 1)) == game._game.board
    with pytest.raises(ValueError, match="no board was shown"):
        shown_board([{"role": "user", "content": "hello"}])


def test_who_describes_letters_is_understood_and_leaks_nothing() -> None:
    found = {"letters": 0.0, "random": 0.0}
    for name in found:
        for seed in range(60):
            _, metrics = played(DescribeGuess(rounds=1), dict.fromkeys(DescribeGuess.agents, name), seed)
            assert metrics["describer"]["leaks"] == 0
            found[name] += metrics["guesser"]["exact"] / 60
    assert found["letters"] > 0.9
    assert found["random"] < 0.4


@pytest.mark.parametrize("cast", [("random", "fair", "greedy"), ("fair", "fair", "fair"), ("greedy", "greedy", "greedy")])
def test_those_who_negotiate_say_only_what_counts(cast: tuple[str, ...]) -> None:
    for seed in range(30):
        earned, metrics = played(Negotiation(), dict(zip(Negotiation.agents, cast, strict=True)), seed)
        assert all(agent["invalid"] == 0 for agent in metrics.values())
        assert all(value >= 0 for value in earned.values())
        if set(cast) == {"fair"}:
            assert metrics["ann"]["agreed"] == 1
