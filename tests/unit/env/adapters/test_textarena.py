"""TextArena's games are played from one seat, seen through their own wrappers, without repeating what was said."""

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("textarena", reason="pip install textarena")

from opentinker.env.adapters.textarena import guesses
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentLoadError

TTT, GUESS = "textarena:TicTacToe-v0", "textarena:GuessTheNumber-v0"
FIRST, SECOND = {"seed": 1, "seat": 0}, {"seed": 1, "seat": 1}


async def test_a_game_for_one_is_played_to_its_end(play: Any) -> None:
    played = await play(GUESS, [f"[{number}]" for number in range(1, 21)], {"max_turns": 30})
    assert "between 1 and 20" in played.first[0]
    assert "[GAME] The target number is higher." in played.said(0)
    assert "between 1 and 20" not in played.said(0)  # that was said
    assert played.last.done
    assert played.last.reward == 1
    assert played.last.metrics == {"invalid_move": 0, "won": 1, "lost": 0}


async def test_tic_tac_toe_is_won_against_a_script(play: Any) -> None:
    played = await play(TTT, ["[4]", "So: <answer>[0]</answer>", "[8]"], {"opponent": ["[1]", "[2]"]}, FIRST)
    assert "Available Moves: '[0]'" in played.first[0]
    assert "[Player 1] [1]" in played.said(0)
    assert "Your goal is to win" not in played.said(0)
    assert (played.last.done, played.last.reward) == (True, 1)
    assert "Player 0 has won" in played.said(2)


async def test_the_second_seat_sees_the_first_move_and_can_lose(play: Any) -> None:
    played = await play(TTT, ["[4]", "[8]"], {"opponent": ["[0]", "[1]", "[2]"]}, SECOND)
    assert "[Player 0] [0]" in played.first[0]
    assert (played.last.done, played.last.reward, played.last.metrics["lost"]) == (True, -1, 1)


async def test_an_invalid_move_follows_the_games_rule(play: Any) -> None:
    played = await play(TTT, ["[4]", "[4]", "[4]"], {"opponent": ["[1]"]}, FIRST)
    assert "invalid move" in played.said(1)
    assert [step.metrics["invalid_move"] for step in played.steps] == [0, 1, 1]
    assert (played.last.done, played.last.reward) == (True, -1)


async def test_a_game_that_confuses_reward_and_reason_is_lost_by_an_invalid_move(play: Any) -> None:
    played = await play("textarena:Cryptarithm-v0", ["nonsense"] * 3)
    assert (played.last.done, played.last.reward) == (True, -1)
    assert "Bad action format" in played.said(len(played.steps) - 1)


@pytest.mark.parametrize("game", ["TicTacToe-v0", "ConnectFour-v0", "Nim-v0", "KuhnPoker-v0", "IteratedPrisonersDilemma-v0"])
async def test_a_random_opponent_plays_legally_to_the_end(play: Any, game: str) -> None:
    numbers = random.Random(7)
    for seed in range(2):
        moves = (guesses_of(game, numbers) for _ in range(500))
        played = await play(f"textarena:{game}", moves, seed=seed)
        assert played.last.done
        assert -1 <= played.last.reward <= 1


def guesses_of(game: str, numbers: random.Random) -> str:
    number = numbers.randrange(9)
    forms = {
        "TicTacToe-v0": f"[{number}]",
        "ConnectFour-v0": f"[col {number % 7}]",
        "Nim-v0": f"[{number % 3} 1]",
        "KuhnPoker-v0": numbers.choice(["[check]", "[call]", "[bet]", "[fold]"]),
        "IteratedPrisonersDilemma-v0": numbers.choice(["[cooperate]", "[defect]"]),
    }
    return forms[game]


async def test_a_seed_determines_an_episode_whatever_runs_beside_it(play: Any) -> None:
    games = ["textarena:Mastermind-v0", TTT, "textarena:KuhnPoker-v0", "textarena:Mastermind-v0", TTT, "textarena:KuhnPoker-v0"]
    actions = {
        "textarena:Mastermind-v0": ["[1 2 3 4]"] * 6,
        TTT: ["[0]", "[1]", "[2]"],
        "textarena:KuhnPoker-v0": ["[check]"] * 4,
    }
    random.seed(0)
    played = await asyncio.gather(*(play(game, actions[game], seed=9) for game in games))
    assert played[:3] == played[3:]


async def test_other_seeds_are_other_episodes(play: Any) -> None:
    played = [await play("textarena:Mastermind-v0", ["[1 2 3 4]"], seed=seed) for seed in range(6)]
    assert len({game.said(0) for game in played}) > 1


async def test_the_wrappers_of_train_ids_show_the_board_each_turn(play: Any) -> None:
    played = await play("textarena:TicTacToe-v0-train", ["[4]"], {"opponent": ["[1]"]}, FIRST)
    assert "Your goal is to win" in played.first[0]
    assert " 3 | O | 5 " in played.said(0)


async def test_an_opponent_from_a_file_reads_the_game(play: Any, tmp_path: Path) -> None:
    (tmp_path / "low.py").write_text("def low(seen, legal, numbers):\n    return seen.rpartition('Moves: ')[2].split(',')[0]\n")
    played = await play(TTT, ["[4]"], {"opponent": f"{tmp_path}/low.py:low"}, FIRST)
    assert "[Player 1] '[0]'" in played.said(0)


async def test_a_move_of_any_length_is_an_invalid_one(play: Any) -> None:
    played = await play(TTT, [f"[{'9' * 100_000}]", "[" * 100_000], task=FIRST)
    assert [step.metrics["invalid_move"] for step in played.steps] == [1, 1]


async def test_sampled_actions_are_a_legal_game(play: Any) -> None:
    for name in (TTT, "textarena:ConnectFour-v0", "textarena:KuhnPoker-v0"):
        played = await play(name, load_environment(name).sample_actions(FIRST), task=FIRST)  # type: ignore[attr-defined]
        assert played.last.done
        assert not any(step.metrics["invalid_move"] for step in played.steps)


async def test_more_players_than_a_game_takes_are_refused(play: Any) -> None:
    with pytest.raises(Exception, match="refuses 3 players"):
        await play(TTT, [], {"players": 3})


async def test_three_can_play(play: Any) -> None:
    played = await play("textarena:ThreePlayerTicTacToe-v0", ["[12]"], task=FIRST)
    assert played.steps


def test_a_random_opponent_prefers_the_moves_that_are_offered() -> None:
    seen = "For example '[9]'. Available Moves: '[2]', '[5]'"
    assert set(guesses(seen, random.Random(1))[:2]) == {"[2]", "[5]"}
    assert "[0 1]" in guesses("like '[0 3]'", random.Random(1)) or "[1 1]" in guesses("like '[0 3]'", random.Random(1))


def test_a_game_that_the_package_cannot_make_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENROUTER_API_KEY", raising=False)
    with pytest.raises(EnvironmentLoadError, match="OPENROUTER_API_KEY"):
        load_environment("textarena:Debate-v0").task_source("train", {})


def test_wrong_arguments_show_before_any_episode() -> None:
    with pytest.raises(ConfigError, match="sise"):
        load_environment(TTT).task_source("train", {"sise": 4})
    with pytest.raises(ConfigError, match="no opponent 'deep'"):
        load_environment(TTT).task_source("train", {"opponent": "deep"})


def test_an_unknown_game_names_the_nearest() -> None:
    with pytest.raises(EnvironmentLoadError, match="did you mean 'TicTacToe-v0'"):
        load_environment("textarena:TicTacTo-v0")
