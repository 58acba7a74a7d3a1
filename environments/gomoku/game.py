"""A game whose moves are texts: finds the move in an answer, and says what becomes of one that is illegal.

The seats are equal here, so that the same game serves one policy against an opponent and, with multi-agent training, two.
"""

import re
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from opentinker.environments.gomoku.board import MAX_SIZE, Board, Cell, Color, cell_name, cell_of
from opentinker.errors import ConfigError, InvalidRequestError

IllegalRule = Literal["lose", "retry", "random"]
_CELL = re.compile(r"(?<![A-Za-z0-9])[A-Za-z][0-9]{1,3}(?![A-Za-z0-9])")
LONGEST_ANSWER = 4000
"""Characters from an answer's end in which its move is looked for."""


@dataclass(frozen=True)
class Rules:
    """Of a game: its board, and what an illegal answer does.

    `illegal`: 'lose' ends the game; 'retry' asks again, up to `retries` times in a row, then the game is lost; 'random' plays a
    random legal move instead.
    """

    size: int = 9
    win_length: int = 5
    illegal: IllegalRule = "retry"
    retries: int = 2

    def __post_init__(self) -> None:
        if not 3 <= self.size <= MAX_SIZE:
            raise ConfigError(f"a board of {self.size} rows cannot be played", hint=f"size is 3 to {MAX_SIZE}")
        if not 3 <= self.win_length <= self.size:
            raise ConfigError(
                f"a line of {self.win_length} does not fit the game on {self.size} rows", hint=f"win_length is 3 to {self.size}"
            )
        if self.illegal not in get_args(IllegalRule):
            raise ConfigError(
                f"there is no rule '{self.illegal}'", hint=f"illegal is one of {', '.join(get_args(IllegalRule))}"
            )
        if self.retries < 0:
            raise ConfigError(f"retries cannot be {self.retries}", hint="it is 0 or more; it counts with illegal: retry")


@dataclass(frozen=True)
class Ruling:
    """What an answer did. `cell` is the stone that was set, if one was; `problem` says what was wrong with the answer."""

    cell: Cell | None = None
    problem: str = ""


class Game:
    """From an opening to its end. `winner` and `over` know of forfeits, too."""

    def __init__(self, rules: Rules, opening: tuple[Cell, ...], seed: int) -> None:
        """`seed` and the answers determine the random moves.

        Raises:
            ValueError: the opening has an illegal move, or ends the game.
        """
        board = Board(rules.size, rules.win_length)
        for cell in opening:
            board = board.play(cell)
        if board.over:
            raise ValueError("the opening ends the game")
        self.rules = rules
        self.board = board
        self.forfeited: Color | None = None
        self._seed = seed
        self._failures_in_a_row = 0

    @property
    def over(self) -> bool:
        return self.forfeited is not None or self.board.over

    @property
    def winner(self) -> Color | None:
        return self.forfeited.other if self.forfeited is not None else self.board.winner

    def play(self, cell: Cell) -> None:
        """A move that is known to be legal.

        Raises:
            ValueError: it is not.
        """
        self.board = self.board.play(cell)
        self._failures_in_a_row = 0

    def answer(self, text: str) -> Ruling:
        """The answer of the colour whose turn it is. The last cell that it names is its move.

        Raises:
            InvalidRequestError: the game is over.
        """
        if self.over:
            raise InvalidRequestError("the game is over", hint="an environment plays one game; make another one")
        cell, problem = self._read(text)
        if not problem and cell is not None:
            self.play(cell)
            return Ruling(cell)
        if self.rules.illegal == "random":
            # The answer counts, so that members of a group who are wrong in different ways do not play the same game.
            random = Random(f"{self._seed} {self.board.moves} {text[-LONGEST_ANSWER:]}")
            cell = random.choice(self.board.empty_cells())
            self.play(cell)
            return Ruling(cell, problem)
        self._failures_in_a_row += 1
        if self.rules.illegal == "lose" or self._failures_in_a_row > self.rules.retries:
            self.forfeited = self.board.to_move
        return Ruling(None, problem)

    def _read(self, text: str) -> tuple[Cell | None, str]:
        names = _CELL.findall(text[-LONGEST_ANSWER:])
        if not names:
            return None, "The answer names no cell."
        cell = cell_of(names[-1])
        if not self.board.contains(cell):
            return None, f"There is no cell {names[-1].lower()}."
        if self.board.color_at(cell) is not None:
            return None, f"Cell {cell_name(cell)} is taken."
        return cell, ""
