"""Turn games of PettingZoo are played from one seat, against opponents that a seed determines."""

import importlib.util
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pettingzoo", reason="pip install pettingzoo")
pytest.importorskip("pygame", reason="pip install pygame-ce: PettingZoo's classic games import it")

from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentLoadError

TTT, FOUR = "pettingzoo:classic.tictactoe_v3", "pettingzoo:classic.connect_four_v3"
FIRST, SECOND = {"seed": 1, "seat": 0}, {"seed": 1, "seat": 1}


async def test_tic_tac_toe_is_won_against_a_script(play: Any) -> None:
    # PettingZoo numbers down the columns: 0, 3, 6 are the top row.
    played = await play(TTT, ["5", "I take <answer>1</answer>", "9"], {"opponent": [3, 6]}, FIRST)
    assert played.first[0].endswith("1 2 3\n4 5 6\n7 8 9\nLegal moves: 1, 2, 3, 4, 5, 6, 7, 8, 9")
    assert played.said(0) == "1 O 3\n4 X 6\n7 8 9\nLegal moves: 1, 3, 4, 6, 7, 8, 9"
    assert [step.reward for step in played.steps] == [0, 0, 1]
    assert played.said(2) == "X O O\n4 X 6\n7 8 X\nThe game is over."
    assert played.last.metrics == {"illegal_moves": 0, "won": 1, "lost": 0}


async def test_a_lost_game_costs_one(play: Any) -> None:
    played = await play(TTT, ["2", "3", "6"], {"opponent": [0, 4, 8]}, FIRST)
    assert (played.last.done, played.last.reward) == (True, -1)
    assert played.last.metrics["lost"] == 1


async def test_a_draw_earns_nothing(play: Any) -> None:
    played = await play(TTT, ["1", "2", "6", "7", "9"], {"opponent": [4, 6, 1, 5]}, FIRST)
    assert (played.last.done, played.last.reward) == (True, 0)


async def test_the_second_seat_sees_the_first_move(play: Any) -> None:
    played = await play(TTT, ["1"], {"opponent": [4, 8]}, SECOND)
    assert "1 2 3\n4 O 6\n7 8 9\nLegal moves: 1, 2, 3, 4, 6, 7, 8, 9" in played.first[0]
    assert "X 2 3\n4 O 6\n7 8 O" in played.said(0)


async def test_connect_four_is_won_in_a_column(play: Any) -> None:
    played = await play(FOUR, ["4", "4", "4", "column 4"], {"opponent": [0, 0, 0]}, FIRST)
    assert "O . . X . . ." in played.said(0)
    assert played.said(0).startswith("1 2 3 4 5 6 7\n. . . . . . .")
    assert (played.last.done, played.last.reward) == (True, 1)


async def test_a_full_column_is_no_legal_move(play: Any) -> None:
    played = await play(FOUR, ["4"] * 5, {"opponent": [3, 3, 3]}, FIRST)
    assert "Legal moves: 1, 2, 3, 5, 6, 7" in played.said(2)
    assert "names none of: 1, 2, 3, 5, 6, 7" in played.said(3)
    assert (len(played.steps), played.last.done, played.last.reward) == (4, True, -1)


async def test_an_illegal_move_can_be_asked_again(play: Any) -> None:
    args = {"opponent": [3, 6], "illegal": "continue", "illegal_reward": -0.1}
    played = await play(TTT, ["5", "5", "", "1", "9"], args, FIRST)
    assert [step.reward for step in played.steps] == [0, -0.1, -0.1, 0, 1]
    assert played.last.metrics["illegal_moves"] == 2


async def test_rock_paper_scissors_pays_every_round(play: Any) -> None:
    played = await play("pettingzoo:classic.rps_v2", ["rock"] * 3, {"opponent": [1, 2, 0], "max_cycles": 3}, FIRST)
    assert [step.reward for step in played.steps] == [-1, 1, 0]
    assert "last choice: paper" in played.said(0)
    assert played.last.done


async def test_chess_is_played_in_its_own_notation(play: Any) -> None:
    pytest.importorskip("chess")
    fools_mate = {"opponent": chess_actions(["f2f3", "g2g4"])}
    played = await play("pettingzoo:classic.chess_v6", ["I answer <answer>e7e5</answer>", "d8h4"], fools_mate, SECOND)
    assert "You play chess and are black" in played.first[0]
    assert "4 . . . . . . . ." in played.first[0]
    assert "The last move: f2f3." in played.first[0]
    assert "4 . . . . . . P ." in played.said(0)
    assert (played.last.done, played.last.reward) == (True, 1)


def chess_actions(moves: list[str]) -> list[int]:
    """PettingZoo's numbers of white's moves."""
    import chess
    from pettingzoo.classic.chess import chess_utils

    board, found = chess.Board(), []
    for move in moves:
        by_name = {chess_utils.action_to_move(board, a, 0).uci(): a for a in chess_utils.legal_moves(board)}
        found.append(by_name[move])
        board.push_uci(move)
        board.push(chess.Move.null())
    return found


async def test_go_is_played_on_points(play: Any) -> None:
    played = await play("pettingzoo:classic.go_v5", ["c4", "pass"], {"board_size": 5, "opponent": [0, 25]}, FIRST)
    assert " 1 O . . . .\n 2 . . . . .\n 3 . . . . .\n 4 . . X . ." in played.said(0)
    assert "pass" in played.first[0]
    assert played.last.done


@pytest.mark.parametrize("name", [TTT, FOUR])
async def test_a_seed_determines_seat_and_opponent(play: Any, name: str) -> None:
    moves = [str(number) for number in (1, 2, 3, 4)]
    args = {"illegal": "continue"}
    games = [await play(name, moves, args, seed=seed) for seed in (3, 3, *range(10, 18))]
    assert games[0] == games[1]
    assert len({game.said(0) for game in games}) > 3


@pytest.mark.parametrize("name", [TTT, FOUR])
async def test_sampled_actions_are_a_legal_game(play: Any, name: str) -> None:
    for task in ({"seed": 1}, {"seed": 2}):
        played = await play(name, load_environment(name).sample_actions(task), task=task)  # type: ignore[attr-defined]
        assert played.last.done
        assert played.last.metrics["illegal_moves"] == 0


async def test_random_games_end_with_a_result_in_the_range(play: Any) -> None:
    numbers = random.Random(0)
    seats, results = set(), set()
    for seed in range(12):
        moves = [str(numbers.randrange(1, 10)) for _ in range(200)]
        played = await play(TTT, moves, {"illegal": "continue"}, seed=seed)
        assert played.last.done
        seats.add("O" in played.first[0].rpartition("free one.")[2])
        results.add(sum(step.reward for step in played.steps))
    assert seats == {True, False}
    assert results <= {-1, 0, 1}
    assert len(results) > 1


async def test_an_opponent_from_a_file_sees_the_board_and_its_legal_moves(play: Any, tmp_path: Path) -> None:
    (tmp_path / "last.py").write_text(
        "def last(seen, legal, numbers):\n    assert 'observation' in seen\n    return max(legal)\n"
    )
    played = await play(TTT, ["1", "2"], {"opponent": f"{tmp_path}/last.py:last"}, FIRST)
    assert "7 8 O" in played.said(0)
    assert "4 5 O" in played.said(1)


async def test_a_script_that_is_too_short_says_so(play: Any) -> None:
    with pytest.raises(Exception, match="script has only 0 moves"):
        await play(TTT, ["1"], {"opponent": []}, FIRST)


async def test_a_seat_that_does_not_exist_is_refused(play: Any) -> None:
    with pytest.raises(Exception, match="a seat is 0 to 1"):
        await play(TTT, [], task={"seed": 1, "seat": 2})


async def test_a_game_of_ones_own_module_is_played_too(play: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_own_game.py").write_text("from pettingzoo.classic.tictactoe_v3 import env\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (await play("pettingzoo:my_own_game", ["5"], task=FIRST)).steps


def test_a_game_that_needs_another_package_names_it() -> None:
    if importlib.util.find_spec("rlcard") is None:
        with pytest.raises(EnvironmentLoadError, match="pip install rlcard"):
            load_environment("pettingzoo:classic.leduc_holdem_v4")


@pytest.mark.parametrize(
    ("args", "problem"),
    [({"opponent": "stockfish"}, "no opponent 'stockfish'"), ({"opponent": 7}, "7 is no opponent"), ({"size": 4}, "size")],
)
def test_wrong_arguments_show_before_any_episode(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_environment(TTT).task_source("train", args)


@pytest.mark.parametrize("name", ["classic.tictactoe_v99", "no_such_module_anywhere", "json"])
def test_an_unknown_game_is_refused(name: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=r"classic\.tictactoe_v3"):
        load_environment(f"pettingzoo:{name}")
