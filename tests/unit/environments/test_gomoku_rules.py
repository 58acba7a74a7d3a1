"""The board and the opponents: what holds in every game, whoever plays."""

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opentinker.environments.gomoku.board import Board, Cell, Color, board_text, cell_name, cell_of
from opentinker.environments.gomoku.opponents import HeuristicOpponent, RandomOpponent, make_opponent, play_out
from opentinker.errors import ConfigError


@st.composite
def games(draw: st.DrawFn) -> tuple[Board, list[Cell]]:
    """An empty board, and legal moves of a game on it that may have ended."""
    size = draw(st.integers(3, 9))
    board = Board(size, draw(st.integers(3, size)))
    order = draw(st.permutations(list(board.cells())))
    moves: list[Cell] = []
    played = board
    for cell in order[: draw(st.integers(0, size * size))]:
        if played.over:
            break
        played = played.play(cell)
        moves.append(cell)
    return board, moves


def played(board: Board, moves: list[Cell]) -> Board:
    for cell in moves:
        board = board.play(cell)
    return board


def longest_line(board: Board, color: Color) -> int:
    """Counted cell by cell."""
    longest = 0
    for column, row in board.cells():
        for across, down in ((1, 0), (0, 1), (1, 1), (1, -1)):
            length = 0
            while True:
                cell = column + across * length, row + down * length
                if not board.contains(cell) or board.color_at(cell) is not color:
                    break
                length += 1
            longest = max(longest, length)
    return longest


@given(games())
def test_a_colour_has_won_exactly_if_it_has_a_line_and_never_both(game: tuple[Board, list[Cell]]) -> None:
    board = played(*game)
    lines = {color for color in Color if longest_line(board, color) >= board.win_length}
    assert lines == ({board.winner} if board.winner is not None else set())
    assert board.over == (bool(lines) or not board.empty_cells())


@given(games())
def test_only_who_moved_last_can_have_won(game: tuple[Board, list[Cell]]) -> None:
    board = played(*game)
    assert board.winner in (None, board.to_move.other)


@given(games())
def test_stones_alternate_and_every_move_takes_one_empty_cell(game: tuple[Board, list[Cell]]) -> None:
    board, moves = game
    end = played(board, moves)
    assert end.moves == len(moves)
    assert end.black.bit_count() - end.white.bit_count() == len(moves) % 2
    assert [end.color_at(cell) for cell in moves] == [Color(i % 2) for i in range(len(moves))]
    assert set(end.empty_cells()) == set(end.cells()) - set(moves)
    assert {cell for cell in end.cells() if end.is_legal(cell)} == (set() if end.over else set(end.empty_cells()))


SYMMETRIES: list[Callable[[Cell, int], Cell]] = [
    lambda c, n: (n - 1 - c[0], c[1]),
    lambda c, n: (c[0], n - 1 - c[1]),
    lambda c, n: (c[1], c[0]),
    lambda c, n: (n - 1 - c[1], c[0]),
    lambda c, n: (n - 1 - c[0], n - 1 - c[1]),
]


@pytest.mark.parametrize("symmetry", SYMMETRIES, ids=["left-right", "up-down", "diagonal", "quarter turn", "half turn"])
@given(game=games())
@settings(max_examples=40)
def test_a_turned_or_mirrored_game_ends_the_same(symmetry: Callable[[Cell, int], Cell], game: tuple[Board, list[Cell]]) -> None:
    board, moves = game
    turned = played(board, [symmetry(cell, board.size) for cell in moves])
    assert turned.winner is played(board, moves).winner


@given(games())
def test_with_the_colours_swapped_the_other_has_won(game: tuple[Board, list[Cell]]) -> None:
    board = played(*game)
    winner = Board(board.size, board.win_length, board.white, board.black).winner
    assert winner is (None if board.winner is None else board.winner.other)


@given(games())
def test_the_text_shows_every_stone_at_its_name(game: tuple[Board, list[Cell]]) -> None:
    board = played(*game)
    header, *rows = board_text(board).split("\n")
    columns = header.split()
    for row in rows:
        number, *marks = row.split()
        for letter, mark in zip(columns, marks, strict=True):
            assert mark == {None: ".", Color.BLACK: "X", Color.WHITE: "O"}[board.color_at(cell_of(letter + number))]
    assert len({len(row) for row in [header, *rows]}) == 1


@given(st.integers(0, 25), st.integers(0, 25))
def test_a_cell_is_read_back_from_its_name(column: int, row: int) -> None:
    assert cell_of(cell_name((column, row))) == (column, row)
    assert cell_of(cell_name((column, row)).upper()) == (column, row)


@pytest.mark.parametrize("name", ["", "e", "5", "5e", "ee5", "e-1", "é5", "e²"])
def test_what_is_no_cell_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a letter and a number"):
        cell_of(name)


def test_a_move_off_the_board_on_a_stone_or_after_the_end_is_refused() -> None:
    board = Board(3, 3).play((1, 1))
    for cell in ((1, 1), (3, 0), (-1, 0)):
        with pytest.raises(ValueError, match="no legal move"):
            board.play(cell)
    won = played(Board(3, 3), [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)])
    with pytest.raises(ValueError, match="no legal move"):
        won.play((2, 2))


@given(games(), st.integers(0, 99), st.sampled_from(["random", "heuristic"]))
def test_opponents_move_legally_and_the_same_under_the_same_seed(game: tuple[Board, list[Cell]], seed: int, kind: str) -> None:
    board = played(*game)
    if board.over:
        return
    move = make_opponent(kind, seed, 0.3).move(board)
    assert board.is_legal(move)
    assert make_opponent(kind, seed, 0.3).move(board) == move


@given(games(), st.integers(0, 9))
def test_the_heuristic_wins_where_it_can_and_else_blocks_where_it_must(game: tuple[Board, list[Cell]], seed: int) -> None:
    board = played(*game)
    if board.over:
        return
    move = HeuristicOpponent(seed).move(board)

    def winning(color: Color) -> set[Cell]:
        return {cell for cell in board.empty_cells() if board.has_line(board.stones(color) | board.bit(cell))}

    if wins := winning(board.to_move):
        assert move in wins
    elif threats := winning(board.to_move.other):
        assert move in threats


def test_the_heuristic_extends_its_own_line() -> None:
    board = played(Board(9, 5), [(4, 4), (0, 8), (5, 4), (8, 0)])
    column, row = HeuristicOpponent(0).move(board)
    assert row == 4
    assert 1 <= column <= 8


def test_the_heuristic_beats_random_and_loses_its_strength_with_noise() -> None:
    def won(noise: float) -> int:
        count = 0
        for seed in range(40):
            heuristic, other = HeuristicOpponent(seed, noise), RandomOpponent(seed)
            seat = Color(seed % 2)
            end = play_out(Board(6, 4), *((heuristic, other) if seat is Color.BLACK else (other, heuristic)))
            count += end.winner is seat
        return count

    assert won(0.0) == 40
    assert 8 <= won(1.0) <= 32


def test_another_policy_is_refused_and_the_unknown_named() -> None:
    with pytest.raises(ConfigError, match="two play gomoku_duel in a multi-agent job"):
        make_opponent("policy", 0)
    with pytest.raises(ConfigError, match=r"no opponent 'alphago'.*random, heuristic"):
        make_opponent("alphago", 0)
    with pytest.raises(ConfigError, match="probability"):
        make_opponent("random", 0, 1.5)


@given(st.integers(0, 2**32))
@settings(max_examples=20)
def test_random_games_end_within_the_board(seed: int) -> None:
    random = Random(seed)
    end = play_out(Board(5, 4), RandomOpponent(random.getrandbits(32)), RandomOpponent(random.getrandbits(32)))
    assert end.over
    assert end.moves <= 25
