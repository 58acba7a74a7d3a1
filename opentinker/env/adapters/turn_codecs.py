"""PettingZoo's turn games in words."""

from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.env.adapters.codecs import in_words
from opentinker.env.adapters.common import require


class TurnCodec:
    """Puts a game into words for one seat. Derive from it; it is made with the environment and the seat's name."""

    goal: ClassVar[str] = ""
    moves_are_public: ClassVar[bool] = False
    """Where several agents play, each is told what the others played. Not for games that hide it, nor if the board says it."""

    def __init__(self, env: Any, agent: str) -> None:
        self.env, self.agent = env, agent

    def rules(self) -> str:
        """What the policy is told first."""
        return self.goal or f"You play {self.env.metadata.get('name', 'a game')} as {self.agent}."

    def board(self, observation: Any) -> str:
        """The position as the seat sees it."""
        seen = observation.get("observation", observation) if isinstance(observation, Mapping) else observation
        return f"Observation: {in_words(seen)}"

    def name(self, action: int) -> str:
        """The word for an action."""
        return str(action)


class TicTacToeCodec(TurnCodec):
    moves_are_public = True
    goal = "You play tic-tac-toe and are X. The squares are numbered; answer with the number of a free one."

    def board(self, observation: Any) -> str:
        mine, theirs = (observation["observation"][:, :, plane] for plane in (0, 1))
        marks = [["X" if mine[c, r] else "O" if theirs[c, r] else self.name(3 * c + r) for c in range(3)] for r in range(3)]
        return "\n".join(" ".join(row) for row in marks)

    def name(self, action: int) -> str:
        column, row = divmod(action, 3)  # PettingZoo counts down the columns
        return str(3 * row + column + 1)


class ConnectFourCodec(TurnCodec):
    moves_are_public = True
    goal = (
        "You play connect four and are X: four of your pieces in a line, across, up or diagonally, win. A piece falls to the "
        "lowest free place of its column. Answer with a column, 1 to 7 from the left."
    )

    def board(self, observation: Any) -> str:
        mine, theirs = (observation["observation"][:, :, plane] for plane in (0, 1))
        rows = [["X" if m else "O" if t else "." for m, t in zip(*row, strict=True)] for row in zip(mine, theirs, strict=True)]
        return "\n".join(" ".join(row) for row in [["1", "2", "3", "4", "5", "6", "7"], *rows])

    def name(self, action: int) -> str:
        return str(action + 1)


class RockPaperScissorsCodec(TurnCodec):
    _NAMES = ("rock", "paper", "scissors", "spock", "lizard")

    def rules(self) -> str:
        names = [self.name(action) for action in range(self._count())]
        of = "three" if len(names) == 3 else str(len(names))
        return f"You play {', '.join(names)}, several rounds. Answer with one of the {of}."

    def board(self, observation: Any) -> str:
        last = int(observation)
        return f"The opponent's last choice: {self.name(last)}." if last < self._count() else "Nothing has been played yet."

    def name(self, action: int) -> str:
        return self._NAMES[action] if action < len(self._NAMES) else str(action)

    def _count(self) -> int:
        return int(self.env.action_space(self.agent).n)


class ChessCodec(TurnCodec):
    def rules(self) -> str:
        colour = "white" if self.agent == self.env.possible_agents[0] else "black"
        return f"You play chess and are {colour}; capitals are white. Answer with a move like e2e4, or e7e8q for a promotion."

    def board(self, observation: Any) -> str:
        board = self.env.unwrapped.board
        last = f"\nThe last move: {board.peek().uci()}." if board.move_stack else ""
        ranks = [f"{8 - row} {rank}" for row, rank in enumerate(str(board).splitlines())]
        return "\n".join([*ranks, "  a b c d e f g h"]) + last

    def name(self, action: int) -> str:
        moves = require("pettingzoo", "pettingzoo.classic.chess.chess_utils")
        player = self.env.possible_agents.index(self.env.agent_selection)
        return str(moves.action_to_move(self.env.unwrapped.board, action, player).uci())


class GoCodec(TurnCodec):
    moves_are_public = True
    goal = "You play go; your stones are X, the opponent's O. Answer with a point like c4 (column, row from the top), or pass."

    def board(self, observation: Any) -> str:
        # The planes of the observation are those of whoever moved last, not the observer's: the board itself is asked.
        board = self.env.unwrapped._go.board
        mine = 1 if self.agent == self.env.possible_agents[0] else -1
        marks = {0: ".", mine: "X", -mine: "O"}
        rows = [f"{row:>2} {' '.join(marks[int(stone)] for stone in line)}" for row, line in enumerate(board, 1)]
        return "\n".join(["   " + " ".join(chr(ord("a") + column) for column in range(len(board))), *rows])

    def name(self, action: int) -> str:
        size = round((self.env.action_space(self.agent).n - 1) ** 0.5)
        row, column = divmod(action, size)
        return "pass" if action == size * size else f"{chr(ord('a') + column)}{row + 1}"


KNOWN: Mapping[str, type[TurnCodec]] = {
    "chess": ChessCodec,
    "connect_four": ConnectFourCodec,
    "go": GoCodec,
    "rps": RockPaperScissorsCodec,
    "tictactoe": TicTacToeCodec,
}
"""By PettingZoo's name of the game, without its version."""
