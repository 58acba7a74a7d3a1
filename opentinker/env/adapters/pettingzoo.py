"""PettingZoo's turn games (AEC): `pettingzoo:classic.tictactoe_v3`. The policy has one seat; the others are opponents'."""

import functools
import random
from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.env.adapters.common import (
    Illegal,
    IllegalMoveError,
    IllegalRule,
    SeededEnvironment,
    adapted,
    choose,
    seed_of,
)
from opentinker.env.adapters.opponents import OpponentChoice, opponent_of
from opentinker.env.adapters.pettingzoo_common import (
    CodecChoice,
    codec_for,
    game_module,
    legal_actions,
    listed,
    make_game,
    seed_actions,
)
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.load import load_function
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import EnvironmentFailedError


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
    host_args: ClassVar[tuple[str, ...]] = ("opponent", "codec")
    """What loads files."""

    def __init__(
        self,
        opponent: OpponentChoice = "random",
        codec: CodecChoice = None,
        illegal: IllegalRule = "end",
        illegal_reward: float | None = None,
        **options: Any,
    ) -> None:
        self._illegal = Illegal(illegal, illegal_reward if illegal_reward is not None else -1.0 if illegal == "end" else 0.0)
        self._opponent = opponent_of(opponent, lambda seen, legal, numbers: numbers.choice(legal))
        self._codec_choice: Any = load_function(codec) if isinstance(codec, str) else codec
        self._env = make_game("pettingzoo", self.module, "env", options)
        self._numbers = random.Random()
        self._me = ""
        self._illegal_moves = 0
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args).close()  # wrong arguments show before any episode
        return super().task_source(split, args)

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        """Legal moves at random, to the end of a game against the random opponent."""
        environment, numbers, moves = cls(), random.Random(seed_of(task)), []
        environment.reset(task)
        while not environment._done:
            moves.append(environment._codec.name(numbers.choice(environment._legal())))
            environment.step(Action(moves[-1]))
        environment.close()
        return moves

    def reset(self, task: Any) -> str:
        seed = seed_of(task)
        self._numbers = random.Random(seed)
        self._env.reset(seed=seed)
        seats = self._env.possible_agents
        seed_actions(self._env, seed)
        seat = task.get("seat", self._numbers.randrange(len(seats)))
        if not isinstance(seat, int) or not 0 <= seat < len(seats):
            raise EnvironmentFailedError(f"the task's seat is {seat!r}", hint=f"a seat is 0 to {len(seats) - 1}")
        self._me = seats[seat]
        self._codec = codec_for(self._codec_choice, self._env)(self._env, self._me)
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
        return legal_actions(self._env, agent, observation, info)

    def _position(self) -> str:
        names = [self._codec.name(action) for action in self._legal()]
        return f"{self._codec.board(self._env.observe(self._me))}\n{listed(names)}"

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
    return adapted("pettingzoo", spec, PettingZooEnvironment, module=game_module("pettingzoo", spec, "env"))
