"""PettingZoo's turn games (AEC): `pettingzoo:classic.tictactoe_v3`. The policy has one seat; the others are opponents'."""

import functools
import random
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from opentinker.env.adapters.codecs import MOST_ACTIONS, in_words
from opentinker.env.adapters.common import (
    Illegal,
    IllegalMoveError,
    IllegalRule,
    SeededEnvironment,
    adapted,
    choose,
    require,
    seed_of,
)
from opentinker.env.adapters.opponents import OpponentChoice, opponent_of
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.load import load_attribute
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

FAMILIES = ("atari", "butterfly", "classic", "magent", "mpe", "sisl")


class TurnCodec:
    """Puts a game into words for one seat. Derive from it; it is made with the environment and the seat's name."""

    goal: ClassVar[str] = ""

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
    goal = "You play tic-tac-toe and are X. The squares are numbered; answer with the number of a free one."

    def board(self, observation: Any) -> str:
        mine, theirs = (observation["observation"][:, :, plane] for plane in (0, 1))
        marks = [["X" if mine[c, r] else "O" if theirs[c, r] else self.name(3 * c + r) for c in range(3)] for r in range(3)]
        return "\n".join(" ".join(row) for row in marks)

    def name(self, action: int) -> str:
        column, row = divmod(action, 3)  # PettingZoo counts down the columns
        return str(3 * row + column + 1)


class ConnectFourCodec(TurnCodec):
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
    goal = "You play rock, paper, scissors, several rounds. Answer with one of the three."
    _NAMES = ("rock", "paper", "scissors")

    def board(self, observation: Any) -> str:
        last = int(observation)
        return f"The opponent's last choice: {self.name(last)}." if last < len(self._NAMES) else "Nothing has been played yet."

    def name(self, action: int) -> str:
        return self._NAMES[action] if action < len(self._NAMES) else str(action)


KNOWN: Mapping[str, type[TurnCodec]] = {
    "connect_four": ConnectFourCodec,
    "rps": RockPaperScissorsCodec,
    "tictactoe": TicTacToeCodec,
}


class PettingZooEnvironment(SeededEnvironment):
    """One game against opponents. The reward of a turn is what PettingZoo gives the policy's seat until it moves again.

    The seat is the task's `seat`, else one by the task's seed. `opponent` is `random`, a list of moves (PettingZoo's numbers),
    or a function (observation, legal actions, random) -> action, also as `path/to/file.py:function`. An illegal move ends the
    game with -1 (`illegal: end`) or asks again (`continue`) for 0; `illegal_reward` is another number. `codec`
    is a class made with (env, agent), or `path/to/file.py:Class`. Other arguments are the game's own.

    Raises:
        ConfigError: an argument is wrong.
    """

    module: ClassVar[str]

    def __init__(
        self,
        opponent: OpponentChoice = "random",
        codec: str | Callable[[Any, str], TurnCodec] | None = None,
        illegal: IllegalRule = "end",
        illegal_reward: float | None = None,
        **options: Any,
    ) -> None:
        self._illegal = Illegal(illegal, illegal_reward if illegal_reward is not None else -1.0 if illegal == "end" else 0.0)
        self._opponent = opponent_of(opponent, lambda seen, legal, numbers: numbers.choice(legal))
        self._codec_choice: Any = load_attribute(codec) if isinstance(codec, str) else codec
        try:
            self._env = require("pettingzoo", self.module).env(**options)
        except TypeError as error:
            raise ConfigError(f"pettingzoo:{self.module}: {error}", hint="check environment.args") from error
        self._numbers = random.Random()
        self._me = ""
        self._illegal_moves = 0
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args).close()  # wrong arguments show before any episode
        return super().task_source(split, args)

    def reset(self, task: Any) -> str:
        seed = seed_of(task)
        self._numbers = random.Random(seed)
        self._env.reset(seed=seed)
        seats = self._env.possible_agents
        for place, agent in enumerate(seats):
            self._env.action_space(agent).seed(seed % 2**31 + place)
        seat = task.get("seat", self._numbers.randrange(len(seats)))
        if not isinstance(seat, int) or not 0 <= seat < len(seats):
            raise EnvironmentFailedError(f"the task's seat is {seat!r}", hint=f"a seat is 0 to {len(seats) - 1}")
        self._me = seats[seat]
        name = str(self._env.metadata.get("name", "")).rsplit("_v", 1)[0]
        self._codec = (self._codec_choice or KNOWN.get(name, TurnCodec))(self._env, self._me)
        reward, over = self._until_my_turn()
        if over:
            raise EnvironmentFailedError(f"the game was over before the policy's first move (reward {reward:g})")
        return f"{self._codec.rules()}\n\n{self._position()}"

    def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the game is over")
        names = {self._codec.name(legal): legal for legal in self._legal()}
        try:
            move = choose(action.text, names)
        except IllegalMoveError as error:
            self._illegal_moves += 1
            self._done = self._illegal.rule == "end"
            return StepResult(self._illegal.reward, self._done, f"Illegal move: {error}.", metrics=self._metrics(0.0))
        self._env.step(move)
        reward, self._done = self._until_my_turn()
        observation = self._final() if self._done else self._position()
        return StepResult(reward, self._done, observation, metrics=self._metrics(reward if self._done else 0.0))

    def close(self) -> None:
        self._env.close()

    def _until_my_turn(self) -> tuple[float, bool]:
        """Lets the others move; the policy's reward since its last move, and whether its game is over."""
        while self._env.agents:
            agent = self._env.agent_selection
            observation, reward, terminated, truncated, _ = self._env.last()
            over = bool(terminated or truncated)
            if agent == self._me:
                return float(reward), over
            if over:
                self._env.step(None)
            else:
                self._env.step(self._opponent(observation, self._legal(), self._numbers))
        raise EnvironmentFailedError("the game ended without a last turn for the policy's seat")

    def _legal(self) -> list[int]:
        agent = self._env.agent_selection
        observation, _, _, _, info = self._env.last()
        mask = observation.get("action_mask") if isinstance(observation, Mapping) else None
        mask = info.get("action_mask") if mask is None else mask
        if mask is not None:
            return [action for action, legal in enumerate(mask) if legal]
        space = self._env.action_space(agent)
        if not hasattr(space, "n"):
            hint = "only games with a Discrete action space are played"
            raise EnvironmentFailedError(f"the actions of {agent} are {type(space).__name__}", hint=hint)
        return list(range(int(space.start), int(space.start + space.n)))

    def _position(self) -> str:
        legal = sorted((self._codec.name(action) for action in self._legal()), key=lambda name: (len(name), name))
        shown = ", ".join(legal[:MOST_ACTIONS]) + (
            f" and {len(legal) - MOST_ACTIONS} more" if len(legal) > MOST_ACTIONS else ""
        )
        return f"{self._codec.board(self._env.observe(self._me))}\nLegal moves: {shown}"

    def _final(self) -> str:
        return f"{self._codec.board(self._env.observe(self._me))}\nThe game is over."

    def _metrics(self, result: float) -> dict[str, float]:
        outcome = {"won": float(result > 0), "lost": float(result < 0)} if self._done else {}
        return {"illegal_moves": float(self._illegal_moves)} | outcome


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The game of PettingZoo's module `spec`, such as `classic.connect_four_v3`; or of any module that has `env()`.

    Raises:
        EnvironmentLoadError: PettingZoo is not installed, or has no such game.
    """
    require("pettingzoo")
    module = f"pettingzoo.{spec}" if spec.split(".")[0] in FAMILIES else spec
    try:
        found = require("pettingzoo", module)
    except EnvironmentLoadError as error:
        if f"'{module}'" in error.detail and "No module named" in error.detail:
            hint = "a game is named like classic.tictactoe_v3 (its file in pettingzoo)"
            raise EnvironmentLoadError(f"pettingzoo has no game '{spec}'", hint=hint) from error
        raise
    if not callable(getattr(found, "env", None)):
        raise EnvironmentLoadError(f"{module} has no env()", hint="a game is named like classic.tictactoe_v3")
    return adapted("pettingzoo", spec, PettingZooEnvironment, module=module)
