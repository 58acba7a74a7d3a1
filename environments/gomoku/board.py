"""The rules of gomoku, pure: a board is a value, a move gives another board.

Stones of a colour are the bits of one integer. Rows are `size + 1` bits apart, so that a shift never carries a line from the
end of one row into the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from string import ascii_lowercase

MAX_SIZE = len(ascii_lowercase)


class Color(IntEnum):
    """Black moves first."""

    BLACK = 0
    WHITE = 1

    @property
    def other(self) -> "Color":
        return Color(1 - self)

    @property
    def label(self) -> str:
        return self.name.lower()


Cell = tuple[int, int]
"""Column and row, from 0."""


@dataclass(frozen=True)
class Board:
    """A position. `win_length` or more stones of a colour in a row, column or diagonal win."""

    size: int = 9
    win_length: int = 5
    black: int = 0
    white: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.size <= MAX_SIZE:
            raise ValueError(f"a board has 1 to {MAX_SIZE} rows, not {self.size}")
        if not 1 <= self.win_length <= self.size:
            raise ValueError(f"a line of {self.win_length} does not fit on {self.size} rows")

    def bit(self, cell: Cell) -> int:
        return 1 << (cell[1] * (self.size + 1) + cell[0])

    @property
    def moves(self) -> int:
        """Stones on the board."""
        return (self.black | self.white).bit_count()

    @property
    def to_move(self) -> Color:
        """Whose turn it is; colours alternate from black."""
        return Color(self.moves % 2)

    def stones(self, color: Color) -> int:
        return self.white if color else self.black

    def color_at(self, cell: Cell) -> Color | None:
        bit = self.bit(cell)
        return Color.BLACK if self.black & bit else Color.WHITE if self.white & bit else None

    def contains(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.size and 0 <= cell[1] < self.size

    def cells(self) -> Iterator[Cell]:
        return ((column, row) for row in range(self.size) for column in range(self.size))

    def empty_cells(self) -> list[Cell]:
        """Row by row; whether the game goes on is not asked."""
        taken = self.black | self.white
        return [cell for cell in self.cells() if not taken & self.bit(cell)]

    def is_legal(self, cell: Cell) -> bool:
        return not self.over and self.contains(cell) and self.color_at(cell) is None

    def play(self, cell: Cell) -> "Board":
        """The board after a stone of the colour whose turn it is.

        Raises:
            ValueError: the move is not legal.
        """
        if not self.is_legal(cell):
            raise ValueError(f"{cell} is no legal move")
        stones = (
            (self.black | self.bit(cell), self.white)
            if self.to_move is Color.BLACK
            else (self.black, self.white | self.bit(cell))
        )
        return Board(self.size, self.win_length, *stones)

    @cached_property
    def winner(self) -> Color | None:
        return next((color for color in Color if self.has_line(self.stones(color))), None)

    @property
    def full(self) -> bool:
        return self.moves == self.size**2

    @property
    def over(self) -> bool:
        return self.winner is not None or self.full

    def has_line(self, stones: int) -> bool:
        """Whether `win_length` of these stones lie in a line: each shift doubles the length that a remaining bit stands for."""
        for step in (1, self.size, self.size + 1, self.size + 2):
            remaining, length = stones, 1
            while remaining and length < self.win_length:
                longer = min(length, self.win_length - length)
                remaining &= remaining >> (longer * step)
                length += longer
            if remaining:
                return True
        return False


def cell_name(cell: Cell) -> str:
    """`a1` is the first column of the first row."""
    return f"{ascii_lowercase[cell[0]]}{cell[1] + 1}"


def cell_of(name: str) -> Cell:
    """The cell of a name such as `e5`, on this board or off it.

    Raises:
        ValueError: it is not a letter and a number.
    """
    letter, number = name[:1].lower(), name[1:]
    if letter not in ascii_lowercase or not letter or not (number.isascii() and number.isdecimal()):
        raise ValueError(f"{name!r} is not a letter and a number")
    return ascii_lowercase.index(letter), int(number) - 1


def board_text(board: Board) -> str:
    """The board for a reader: columns are letters, rows numbers, X black, O white, a dot an empty cell."""
    width = len(str(board.size))
    marks = {None: ".", Color.BLACK: "X", Color.WHITE: "O"}
    rows = [[f"{row + 1:>{width}}", *(marks[board.color_at((c, row))] for c in range(board.size))] for row in range(board.size)]
    return "\n".join(" ".join(row) for row in [[" " * width, *ascii_lowercase[: board.size]], *rows])
