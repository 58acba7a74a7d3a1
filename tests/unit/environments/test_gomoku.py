"""Gomoku as an environment: both seats, every end, every rule for illegal answers, and tasks that are never trained on."""

import re
from random import Random
from typing import Any

import pytest

from opentinker.env.environment import Action, StepResult
from opentinker.environments.gomoku import HELD_OUT, Gomoku
from opentinker.environments.gomoku.board import Board, Color, cell_name, cell_of
from opentinker.environments.gomoku.opponents import HeuristicOpponent, RandomOpponent
from opentinker.errors import ConfigError, InvalidRequestError

BLACK = {"seat": "black", "opponent_seed": 3, "opening": []}
WHITE = {"seat": "white", "opponent_seed": 3, "opening": []}


def first(environment: Gomoku, task: dict[str, Any]) -> str:
    """The text of the only first message."""
    (message,) = environment.reset(task)
    return str(message["content"])


def board_of(text: str, size: int, win_length: int) -> Board:
    """The board that a prompt or reply shows: what a policy knows."""
    rows = re.findall(rf"^ *\d+((?: [.XO]){{{size}}})$", text, re.MULTILINE)[-size:]
    board = Board(size, win_length)
    stones = {"X": 0, "O": 0, ".": 0}
    for row, marks in enumerate(rows):
        for column, mark in enumerate(marks.split()):
            stones[mark] |= board.bit((column, row))
    return Board(size, win_length, stones["X"], stones["O"])


def play(environment: Gomoku, task: dict[str, Any], seed: int = 0, *, heuristic: bool = False) -> list[StepResult]:
    """A whole game by what the texts show."""
    size, length = environment._rules.size, environment._rules.win_length
    player = HeuristicOpponent(seed) if heuristic else RandomOpponent(seed)
    text, results = first(environment, task), []
    while not results or not results[-1].done:
        results.append(environment.step(Action(cell_name(player.move(board_of(text, size, length))))))
        text = str(results[-1].observation)
    return results


def total(results: list[StepResult], component: str) -> float:
    return sum(r.reward[component] for r in results if isinstance(r.reward, dict))


def test_black_begins_and_white_is_answered_first() -> None:
    text = first(Gomoku(), BLACK)
    assert "as black (X)" in text
    assert board_of(text, 9, 5).moves == 0
    second = first(Gomoku(), WHITE)
    assert "as white (O)" in second
    assert board_of(second, 9, 5).moves == 1
    assert "Black plays" in second


def test_the_opening_is_on_the_board_and_says_whose_turn_it_is() -> None:
    text = first(Gomoku(), {"seat": "black", "opponent_seed": 1, "opening": ["e5"]})
    board = board_of(text, 9, 5)
    assert board.color_at(cell_of("e5")) is Color.BLACK
    assert board.moves == 2  # white answered, so it is black's turn again
    text = first(Gomoku(), {"seat": "black", "opponent_seed": 1, "opening": ["e5", "a1"]})
    assert board_of(text, 9, 5).color_at(cell_of("a1")) is Color.WHITE


def test_the_prompt_says_the_rules_and_how_to_answer() -> None:
    text = first(Gomoku(size=7, win_length=4), BLACK)
    for part in ("7 columns, a to g", "4 stones in a line", "such as d4", "Your move."):
        assert part in text


@pytest.mark.parametrize("task", [BLACK, WHITE])
@pytest.mark.parametrize("opponent", ["random", "heuristic"])
def test_whoever_completes_a_line_wins_and_both_sides_of_the_outcome_are_told(task: dict[str, Any], opponent: str) -> None:
    ends = set()
    for seed in range(12):
        environment = Gomoku(size=5, win_length=4, opponent=opponent)
        results = play(environment, {**task, "opponent_seed": seed}, seed, heuristic=seed % 2 == 0)
        last = results[-1]
        board = board_of(str(last.observation), 5, 4)
        seat = Color[task["seat"].upper()]
        expected = "draw" if board.winner is None else "won" if board.winner is seat else "lost"
        assert {name: last.metrics[name] for name in ("won", "lost", "draw")} == {
            name: float(name == expected) for name in ("won", "lost", "draw")
        }
        assert last.metrics["exact"] == last.metrics["won"]
        assert total(results, "outcome") == {"won": 1.0, "lost": -1.0, "draw": 0.0}[expected]
        assert total(results, "illegal") == last.metrics["illegal"] == 0
        assert environment.finalize() is None
        ends.add(expected)
    assert "won" in ends if opponent == "random" else "lost" in ends


def test_the_same_task_and_answers_give_the_same_game() -> None:
    task = {"seat": "white", "opponent_seed": 11, "opening": ["b2", "c3"]}
    games = [play(Gomoku(size=6, win_length=4, opponent="heuristic", opponent_noise=0.5), task, 5) for _ in range(2)]
    assert games[0] == games[1]
    other = play(Gomoku(size=6, win_length=4, opponent="heuristic", opponent_noise=0.5), {**task, "opponent_seed": 12}, 5)
    assert other != games[0]


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("e5", "e5"),
        ("E5.", "e5"),
        ("I take e5!", "e5"),
        ("a1 is taken, so <move>e5</move>", "e5"),
        ("\\boxed{e5}", "e5"),
        ("b2 would do, but e5", "e5"),
        ("x" * 1_000_000 + " e5", "e5"),
    ],
)
def test_the_last_cell_that_an_answer_names_is_played(text: str, cell: str) -> None:
    environment = Gomoku()
    environment.reset(BLACK)
    result = environment.step(Action(text))
    assert board_of(str(result.observation), 9, 5).color_at(cell_of(cell)) is Color.BLACK
    assert result.metrics["illegal"] == 0


ILLEGAL = [
    ("", "names no cell"),
    ("the middle", "names no cell"),
    ("5-in-a-row", "names no cell"),
    ("j1", "no cell j1"),
    ("e0", "no cell e0"),
    ("e10", "no cell e10"),
    ("a1", "a1 is taken"),
]
TAKEN = {"seat": "black", "opponent_seed": 3, "opening": ["a1", "b1"]}


@pytest.mark.parametrize(("text", "problem"), ILLEGAL)
def test_an_illegal_answer_loses_where_the_rule_says_so(text: str, problem: str) -> None:
    environment = Gomoku(illegal="lose")
    environment.reset(TAKEN)
    result = environment.step(Action(text))
    assert result.done
    assert problem in str(result.observation)
    assert result.reward == {"outcome": -1.0, "illegal": -0.1}
    assert (result.metrics["lost"], result.metrics["illegal"], result.metrics["moves"]) == (1, 1, 0)


@pytest.mark.parametrize(("text", "problem"), ILLEGAL)
def test_an_illegal_answer_is_asked_again_and_costs_the_penalty(text: str, problem: str) -> None:
    environment = Gomoku(illegal="retry", retries=2, illegal_penalty=0.25)
    environment.reset(TAKEN)
    results = [environment.step(Action(text)) for _ in range(2)]
    assert all(not r.done and problem in str(r.observation) for r in results)
    assert [r.reward for r in results] == [{"outcome": 0.0, "illegal": -0.25}] * 2
    # A legal move in between gives all retries back; the third illegal answer in a row loses.
    assert not environment.step(Action("i9")).done
    results = [environment.step(Action(text)) for _ in range(3)]
    assert [r.done for r in results] == [False, False, True]
    assert results[-1].reward == {"outcome": -1.0, "illegal": -0.25}
    assert results[-1].metrics["illegal"] == 5


@pytest.mark.parametrize(("text", "problem"), ILLEGAL)
def test_a_random_move_replaces_an_illegal_answer(text: str, problem: str) -> None:
    environment = Gomoku(illegal="random")
    environment.reset(TAKEN)
    result = environment.step(Action(text))
    assert not result.done
    assert problem in str(result.observation)
    played = re.search(r"([a-i]\d) was played for you", str(result.observation))
    assert played
    board = board_of(str(result.observation), 9, 5)
    assert board.color_at(cell_of(played[1])) is Color.BLACK
    assert board.moves == 4
    assert result.reward == {"outcome": 0.0, "illegal": -0.1}


def test_a_game_of_illegal_answers_only_ends_where_random_moves_replace_them() -> None:
    environment = Gomoku(size=5, win_length=4, illegal="random")
    environment.reset(BLACK)
    results = [environment.step(Action("?"))]
    while not results[-1].done:
        results.append(environment.step(Action("?")))
    assert len(results) <= 13
    assert results[-1].metrics["illegal"] == results[-1].metrics["moves"] == len(results)


def test_random_moves_for_different_wrong_answers_differ() -> None:
    played = set()
    for text in ("?", "the middle", "z9", "I resign"):
        environment = Gomoku(illegal="random")
        environment.reset(BLACK)
        played.add(str(environment.step(Action(text)).observation).partition(" was played")[0][-2:])
    assert len(played) > 1


@pytest.mark.parametrize("task", [BLACK, WHITE])
def test_the_example_is_a_game_that_was_won_from_the_same_seat(task: dict[str, Any]) -> None:
    environment = Gomoku(size=5, win_length=4, example=True)
    *example, last = environment.reset(task)
    assert [m["role"] for m in example] == ["user", "assistant"] * (len(example) // 2)
    assert str(example[0]["content"]).startswith(f"You play gomoku as {task['seat']}")
    for before, answer in zip(example[::2], example[1::2], strict=True):
        board = board_of(str(before["content"]), 5, 4)
        assert board.to_move is Color[task["seat"].upper()]
        assert board.is_legal(cell_of(str(answer["content"])))
    won, _, position = str(last["content"]).partition("A new game.")
    assert won.startswith("You win.")
    assert board_of(position, 5, 4).moves == (1 if task is WHITE else 0)
    assert not environment.step(Action("a1" if board_of(position, 5, 4).is_legal((0, 0)) else "b2")).metrics["illegal"]


@pytest.mark.parametrize("task", [BLACK, WHITE, TAKEN])
def test_the_sample_actions_win(task: dict[str, Any]) -> None:
    environment = Gomoku()
    environment.reset(task)
    results = [environment.step(Action(text)) for text in Gomoku.sample_actions(task)]
    assert [r.done for r in results] == [False] * (len(results) - 1) + [True]
    assert results[-1].metrics["won"] == 1


def test_a_game_that_is_cut_off_is_lost() -> None:
    environment = Gomoku(loss=-0.5)
    environment.reset(BLACK)
    environment.step(Action("e5"))
    assert environment.finalize() == {"outcome": -0.5}


def test_steps_before_the_beginning_and_after_the_end_are_refused() -> None:
    environment = Gomoku(illegal="lose")
    with pytest.raises(InvalidRequestError, match="not begun"):
        environment.step(Action("e5"))
    environment.reset(BLACK)
    environment.step(Action("?"))
    with pytest.raises(InvalidRequestError, match="the game is over"):
        environment.step(Action("e5"))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"size": 2}, "2 rows"),
        ({"size": 27}, "27 rows"),
        ({"size": 5, "win_length": 6}, "win_length is 3 to 5"),
        ({"illegal": "ignore"}, "illegal is one of lose, retry, random"),
        ({"retries": -1}, "0 or more"),
        ({"opponent": "policy"}, "multi-agent"),
        ({"opponent": "heuristc"}, "random, heuristic"),
        ({"opponent_noise": 2}, "probability"),
    ],
)
def test_arguments_that_make_no_game_are_named(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gomoku(**args)
    with pytest.raises(ConfigError, match=message):
        Gomoku.task_source("train", args)


@pytest.mark.parametrize(
    "task",
    [
        {"seat": "red", "opponent_seed": 0, "opening": []},
        {"seat": "black", "opponent_seed": 0, "opening": ["z9"]},
        {"seat": "black", "opponent_seed": 0, "opening": ["a1", "a1"]},
    ],
)
def test_a_task_that_does_not_fit_the_board_is_refused(task: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be played on this board"):
        Gomoku().reset(task)


@pytest.mark.parametrize("size", [5, 9])
def test_held_out_tasks_are_never_drawn_and_all_seats_and_openings_occur(size: int) -> None:
    held_out = Gomoku.task_source("held_out", {"size": size}).first(1000)
    drawn = Gomoku.task_source("train", {"size": size}).draw(0, 0, 500)
    assert len(held_out) == HELD_OUT
    assert {t["opponent_seed"] for t in held_out}.isdisjoint(t["opponent_seed"] for t in drawn)
    for tasks in (held_out, drawn):
        assert {t["seat"] for t in tasks} == {"black", "white"}
        assert {len(t["opening"]) for t in tasks} == {0, 1, 2}
        for task in tasks:
            Gomoku(size=size, win_length=4).reset(task)


def test_a_task_is_determined_by_its_seed() -> None:
    assert [Gomoku.make_task(s) for s in range(20)] == [Gomoku.make_task(s) for s in range(20)]
    assert len({str(Gomoku.make_task(Random(s).getrandbits(32))) for s in range(50)}) == 50
