"""Players of gomoku_duel that know the game: they read the board from what they are shown."""

import random
import re
from collections.abc import Sequence

from opentinker.env.environment import Message
from opentinker.environments.gomoku.board import Board, cell_name
from opentinker.environments.gomoku.opponents import HeuristicOpponent

_ROW = re.compile(r"^ *\d+((?: [.XO])+)$", re.MULTILINE)
_LENGTH = re.compile(r"Whoever first has (\d+) stones in a line")
SHORTEST = 3
"""The line that wins where the rules are not told."""


def random_move(messages: Sequence[Message], numbers: random.Random) -> str:
    """Any empty cell."""
    return cell_name(numbers.choice(shown_board(messages).empty_cells()))


def heuristic_move(messages: Sequence[Message], numbers: random.Random) -> str:
    """Completes its line, else blocks the other's, else takes the cell where most lines cross."""
    return cell_name(HeuristicOpponent(numbers.getrandbits(60)).move(shown_board(messages)))


def shown_board(messages: Sequence[Message]) -> Board:
    """The last board that was shown.

    Raises:
        ValueError: none was.
    """
    texts = [message["content"] for message in messages if isinstance(message["content"], str)]
    shown = next((rows for text in reversed(texts) if (rows := _ROW.findall(text))), None)
    if shown is None:
        raise ValueError("no board was shown")
    told = next((int(found[1]) for text in texts if (found := _LENGTH.search(text))), SHORTEST)
    size = len(shown[0].split())
    board = Board(size, min(told, size))
    stones = {"X": 0, "O": 0}
    for row, marks in enumerate(shown[-size:]):
        for column, mark in enumerate(marks.split()):
            if mark in stones:
                stones[mark] |= board.bit((column, row))
    return Board(size, board.win_length, stones["X"], stones["O"])
