"""Who plays against the policy: an `Opponent` chooses a cell on a board where it is its turn."""

from functools import cache
from random import Random
from typing import Protocol

from opentinker.environments.gomoku.board import Board, Cell, Color
from opentinker.errors import ConfigError


class Opponent(Protocol):
    """Chooses a legal move for the colour whose turn it is. One instance plays one game."""

    def move(self, board: Board) -> Cell: ...


class RandomOpponent:
    """Every empty cell is as likely as any other."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def move(self, board: Board) -> Cell:
        return self._random.choice(board.empty_cells())


class HeuristicOpponent:
    """Completes its line if it can, else blocks one that the other completes next, else takes the cell that is worth most to
    both: there, long lines that can still be completed cross. The seed chooses among equals. With probability `noise` a move is
    random instead.
    """

    def __init__(self, seed: int, noise: float = 0.0) -> None:
        self._random = Random(seed)
        self._noise = noise

    def move(self, board: Board) -> Cell:
        if self._noise and self._random.random() < self._noise:
            return self._random.choice(board.empty_cells())
        scores = {cell: _score(board, cell) for cell in board.empty_cells()}
        best = max(scores.values())
        return self._random.choice([cell for cell, score in scores.items() if score == best])


def _score(board: Board, cell: Cell) -> tuple[bool, bool, int]:
    """Wins, blocks, and how much the lines through the cell are worth: a line that only one side holds counts by its stones."""
    own, other = board.stones(board.to_move), board.stones(board.to_move.other)
    wins = blocks = False
    worth = 0
    for line in _lines(board.size, board.win_length, cell):
        mine, theirs = (line & own).bit_count(), (line & other).bit_count()
        if not theirs:
            wins |= mine == board.win_length - 1
            worth += 2 * 8**mine
        elif not mine:
            blocks |= theirs == board.win_length - 1
            worth += 8**theirs
    return wins, blocks, worth


@cache
def _lines(size: int, win_length: int, cell: Cell) -> tuple[int, ...]:
    """Every line of `win_length` cells through a cell, as bits."""
    board = Board(size, win_length)
    lines = []
    for across, down in ((1, 0), (0, 1), (1, 1), (1, -1)):
        for back in range(win_length):
            line = [(cell[0] + across * (i - back), cell[1] + down * (i - back)) for i in range(win_length)]
            if all(board.contains(c) for c in line):
                lines.append(sum(board.bit(c) for c in line))
    return tuple(lines)


OPPONENTS = ("random", "heuristic")


def check_opponent(kind: str, noise: float) -> None:
    """Whether there is such an opponent.

    Raises:
        ConfigError: there is not.
    """
    if kind == "policy":
        raise ConfigError(
            "gomoku has one seat for a policy; two play gomoku_duel in a multi-agent job",
            hint=f"opponent is one of {', '.join(OPPONENTS)}",
        )
    if kind not in OPPONENTS:
        raise ConfigError(f"gomoku has no opponent '{kind}'", hint=f"opponent is one of {', '.join(OPPONENTS)}")
    if not 0 <= noise <= 1:
        raise ConfigError(f"opponent_noise is a probability, not {noise}", hint="0 plays as well as it can, 1 at random")


def make_opponent(kind: str, seed: int, noise: float = 0.0) -> Opponent:
    """An opponent for one game.

    Raises:
        ConfigError: there is no such opponent.
    """
    check_opponent(kind, noise)
    return RandomOpponent(seed) if kind == "random" else HeuristicOpponent(seed, noise)


def play_out(board: Board, black: Opponent, white: Opponent) -> Board:
    """The final board of a game between two players, neither of them a policy."""
    while not board.over:
        player = black if board.to_move is Color.BLACK else white
        board = board.play(player.move(board))
    return board
