"""Gomoku between two agents that both learn."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from opentinker.env.environment import Action
from opentinker.env.tasks import GeneratedTasks, ListTasks, Split, TaskSource
from opentinker.environments.gomoku.board import Board, Cell, Color, board_text, cell_name, cell_of
from opentinker.environments.gomoku.game import Game, IllegalRule, Rules
from opentinker.environments.gomoku_duel.players import heuristic_move, random_move
from opentinker.errors import ConfigError, InvalidRequestError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Alternating

HELD_OUT = 64
MAX_OPENING_PAIRS = 1
_MARKS = {Color.BLACK: "X", Color.WHITE: "O"}


class GomokuDuel(MultiAgentEnvironment):
    """One game. The winner earns `win` and the loser its negative; an illegal answer costs `illegal_penalty`, which the other
    side gets, and a random legal move is played (`illegal: random`), or the game is lost (`lose`). So the rewards of a game
    sum to zero. A game that is cut off is drawn.
    """

    agents = ("black", "white")
    protocol = Alternating()
    version = "1"
    players: ClassVar = {"random": random_move, "heuristic": heuristic_move}
    task_columns = ("seed", "opening")

    def __init__(
        self,
        size: int = 5,
        win_length: int = 4,
        illegal: IllegalRule = "random",
        illegal_penalty: float = 0.1,
        win: float = 1.0,
    ) -> None:
        if illegal == "retry":
            raise ConfigError("illegal: retry would break the order of play", hint="illegal is random or lose")
        self._rules = Rules(size, win_length, illegal)
        self._penalty, self._win = illegal_penalty, win
        self._game: Game | None = None
        self._illegal = dict.fromkeys(Color, 0)
        self._answers = dict.fromkeys(Color, 0)

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return _task(Random(seed), Rules(5, 4).size)

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return _held_out(Rules(5, 4).size)

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        size = cls(**args)._rules.size  # and what is wrong with the arguments is said before any game
        if split == "train":
            return GeneratedTasks(lambda seed: _task(Random(seed), size))
        return ListTasks(_held_out(size), shuffle=False)

    def reset(self, task: Any) -> Mapping[str, str]:
        try:
            opening = tuple(cell_of(name) for name in task["opening"])
            self._game = Game(self._rules, opening, task["seed"])
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(f"the task {task!r} cannot be played on this board: {error}") from error
        if self._game.board.to_move is not Color.BLACK:
            raise InvalidRequestError(
                f"the opening {task['opening']} leaves the first move to white", hint="give pairs of stones"
            )
        stones = f"Stones on the board from the start: {', '.join(map(cell_name, opening))}.\n\n" if opening else ""
        first = f"{self._introduction(Color.BLACK)}\n\n{stones}{self._position()}"
        return {"black": first, "white": f"{self._introduction(Color.WHITE)}\n\n{stones}".strip()}

    def step(self, agent: str, action: Action) -> MultiStepResult:
        game = self._game
        if game is None:
            raise InvalidRequestError("the game has not begun", hint="call reset first")
        color = Color[agent.upper()]
        ruling = game.answer(action.text)
        self._answers[color] += 1
        self._illegal[color] += bool(ruling.problem)
        told = {}
        if ruling.cell is not None:
            played = f"{agent.capitalize()} plays {cell_name(ruling.cell)}."
            told[color.other.label] = played if game.over else f"{played}\n\n{self._position()}"
            if ruling.problem:
                told[agent] = f"{ruling.problem} {cell_name(ruling.cell)} was played for you."
        penalty = self._penalty if ruling.problem else 0.0
        return MultiStepResult(
            {side.label: self._earned(game, side, -penalty if side is color else penalty) for side in Color},
            told,
            done=game.over,
            metrics={side.label: self._metrics(game, side) for side in Color},
        )

    def _earned(self, game: Game, side: Color, penalty: float) -> dict[str, float]:
        outcome = 0.0 if not game.over or game.winner is None else self._win if game.winner is side else -self._win
        return {"outcome": outcome, "illegal": penalty}

    def _metrics(self, game: Game, side: Color) -> dict[str, float]:
        over = game.over
        return {
            "won": float(over and game.winner is side),
            "lost": float(over and game.winner is side.other),
            "draw": float(over and game.winner is None),
            "illegal": self._illegal[side] / max(self._answers[side], 1),
            "moves": float(self._answers[side]),
        }

    def _introduction(self, seat: Color) -> str:
        size, length = self._rules.size, self._rules.win_length
        middle = cell_name((size // 2, size // 2))
        return (
            f"You play gomoku as {seat.label} ({_MARKS[seat]}) against {seat.other.label} ({_MARKS[seat.other]}) on a board of "
            f"{size} columns, a to {cell_name((size - 1, 0))[0]}, and {size} rows, 1 to {size}. In turns, each side puts a "
            f"stone on an empty cell. Whoever first has {length} stones in a line (a row, a column or a diagonal) wins. "
            f"Answer with the cell of your move, such as {middle}; the last cell that you name counts."
        )

    def _position(self) -> str:
        assert self._game is not None
        return f"{board_text(self._game.board)}\n\nYour move."


def _held_out(size: int) -> list[dict[str, Any]]:
    return [_task(Random(f"held out {number}"), size) for number in range(HELD_OUT)]


def _task(random: Random, size: int) -> dict[str, Any]:
    cells: list[Cell] = list(Board(size, 1).cells())
    opening = random.sample(cells, 2 * random.randint(0, MAX_OPENING_PAIRS))
    return {"seed": random.getrandbits(40), "opening": [cell_name(cell) for cell in opening]}
