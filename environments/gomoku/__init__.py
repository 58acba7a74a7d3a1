"""Gomoku on a board of any size, against an opponent that is not trained."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.tasks import GeneratedTasks, ListTasks, Split, TaskSource
from opentinker.environments.gomoku.board import Board, Cell, Color, board_text, cell_name, cell_of
from opentinker.environments.gomoku.game import Game, IllegalRule, Rules
from opentinker.environments.gomoku.opponents import HeuristicOpponent, Opponent, check_opponent, make_opponent
from opentinker.errors import InvalidRequestError

HELD_OUT = 64
"""Held-out tasks; their opponents' seeds lie below this number, those of training above."""
MAX_OPENING = 2
EXAMPLE = -1
"""Seeds the game of the example; no task has it."""
_MARKS = {Color.BLACK: "X", Color.WHITE: "O"}


class Gomoku(Environment):
    """One game; the task says which colour the policy plays, from which opening, and seeds the opponent.

    Won, drawn and lost games earn `win`, `draw` and `loss`; each illegal answer costs `illegal_penalty`. A game that is cut off
    before its end is lost. `example` shows a game that was won before the one to play.
    """

    task_columns = ("seat", "opponent_seed", "opening")

    def __init__(
        self,
        size: int = 9,
        win_length: int = 5,
        opponent: str = "random",
        opponent_noise: float = 0.0,
        illegal: IllegalRule = "retry",
        retries: int = 2,
        illegal_penalty: float = 0.1,
        win: float = 1.0,
        draw: float = 0.0,
        loss: float = -1.0,
        example: bool = False,
    ) -> None:
        check_opponent(opponent, opponent_noise)
        self._rules = Rules(size, win_length, illegal, retries)
        self._opponent_kind, self._opponent_noise = opponent, opponent_noise
        self._penalty = illegal_penalty
        self._earned = {"won": win, "draw": draw, "lost": loss}
        self._example = example
        self._seat = Color.BLACK
        self._game: Game | None = None
        self._opponent: Opponent | None = None
        self._illegal = self._moves = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return _training_task(seed, Rules().size)

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return _held_out_tasks(Rules().size)

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        size = cls(**args)._rules.size  # and what is wrong with the arguments is said before any game
        if split == "train":
            return GeneratedTasks(lambda seed: _training_task(seed, size))
        return ListTasks(_held_out_tasks(size), shuffle=False)

    @classmethod
    def sample_actions(cls, task: Mapping[str, Any]) -> list[str]:
        """What a good policy would say: the heuristic's moves."""
        return [str(message["content"]) for message in _won(cls(), task)[1::2]]

    def reset(self, task: Any) -> Sequence[Message]:
        seed = task["opponent_seed"]
        try:
            self._seat = Color[task["seat"].upper()]
            opening = tuple(cell_of(name) for name in task["opening"])
            self._game = Game(self._rules, opening, seed)
        except (KeyError, ValueError) as error:
            raise InvalidRequestError(f"the task {task!r} cannot be played on this board: {error}") from error
        self._opponent = make_opponent(self._opponent_kind, seed, self._opponent_noise)
        news = []
        if opening:
            news.append(f"Stones on the board from the start: {', '.join(map(cell_name, opening))}.")
        if self._game.board.to_move is not self._seat:
            news.append(self._opponent_moves(self._game, self._opponent))
        position = "\n\n".join([*news, self._position(self._game.board)])
        if not self._example:
            return [_message("user", f"{self._introduction()}\n\n{position}")]
        rules, example = self._rules, {"seat": self._seat.label, "opponent_seed": EXAMPLE, "opening": []}
        *messages, end = _won(Gomoku(rules.size, rules.win_length), example)
        return [*messages, _message("user", f"{end['content']}\n\nA new game.\n\n{position}")]

    def step(self, action: Action) -> StepResult:
        game, opponent = self._game, self._opponent
        if game is None or opponent is None:
            raise InvalidRequestError("the game has not begun", hint="call reset first")
        ruling = game.answer(action.text)
        news = []
        if ruling.problem:
            self._illegal += 1
            news.append(ruling.problem)
        if ruling.cell is not None:
            self._moves += 1
            if ruling.problem:
                news.append(f"{cell_name(ruling.cell)} was played for you.")
            if not game.over:
                news.append(self._opponent_moves(game, opponent))
        elif not game.over:
            news.append("Choose an empty cell.")
        outcome = self._outcome(game)
        if game.over:
            news.append({"won": "You win.", "lost": "You lose.", "draw": "The game is drawn."}[outcome])
        board = self._position(game.board) if ruling.cell is not None else ""
        return StepResult(
            {"outcome": self._earned.get(outcome, 0.0), "illegal": -self._penalty if ruling.problem else 0.0},
            done=game.over,
            observation="\n\n".join(filter(None, [" ".join(news), board])),
            metrics=self._metrics(outcome),
        )

    def finalize(self) -> dict[str, float] | None:
        """A game that the limits of the episode cut off is lost, so that stalling does not pay."""
        return None if self._game is None or self._game.over else {"outcome": self._earned["lost"]}

    def _introduction(self) -> str:
        size, length = self._rules.size, self._rules.win_length
        seat, other = self._seat, self._seat.other
        middle = cell_name((size // 2, size // 2))
        return (
            f"You play gomoku as {seat.label} ({_MARKS[seat]}) against {other.label} ({_MARKS[other]}) on a board of {size} "
            f"columns, a to {cell_name((size - 1, 0))[0]}, and {size} rows, 1 to {size}. In turns, each side puts a stone on "
            f"an empty cell. Whoever first has {length} stones in a line (a row, a column or a diagonal) wins. "
            f"Answer with the cell of your move, such as {middle}; the last cell that you name counts."
        )

    def _opponent_moves(self, game: Game, opponent: Opponent) -> str:
        cell = opponent.move(game.board)
        game.play(cell)
        return f"{self._seat.other.label.capitalize()} plays {cell_name(cell)}."

    def _position(self, board: Board) -> str:
        return board_text(board) if board.over else f"{board_text(board)}\n\nYour move."

    def _outcome(self, game: Game) -> str:
        if not game.over:
            return "unfinished"
        return "draw" if game.winner is None else "won" if game.winner is self._seat else "lost"

    def _metrics(self, outcome: str) -> dict[str, float]:
        won = float(outcome == "won")
        return {
            "exact": won,
            "won": won,
            "lost": float(outcome == "lost"),
            "draw": float(outcome == "draw"),
            "illegal": float(self._illegal),
            "moves": float(self._moves),
        }


def _won(game: Gomoku, task: Mapping[str, Any]) -> list[Message]:
    """A game as messages, with the heuristic in the policy's seat."""
    messages, player, done = list(game.reset(task)), HeuristicOpponent(EXAMPLE), False
    while not done and game._game is not None:
        move = cell_name(player.move(game._game.board))
        result = game.step(Action(move))
        messages += [_message("assistant", move), _message("user", str(result.observation))]
        done = result.done
    return messages


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _training_task(seed: int, size: int) -> dict[str, Any]:
    random = Random(seed)
    return _task(random, HELD_OUT + random.getrandbits(40), random.choice(list(Color)), size)


def _held_out_tasks(size: int) -> list[dict[str, Any]]:
    return [_task(Random(f"held out {seed}"), seed, Color(seed % 2), size) for seed in range(HELD_OUT)]


def _task(random: Random, opponent_seed: int, seat: Color, size: int) -> dict[str, Any]:
    cells: list[Cell] = list(Board(size, 1).cells())
    opening = random.sample(cells, random.randint(0, MAX_OPENING))
    return {"seat": seat.label, "opponent_seed": opponent_seed, "opening": [cell_name(cell) for cell in opening]}
