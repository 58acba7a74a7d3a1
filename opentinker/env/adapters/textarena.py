"""TextArena's games: `textarena:TicTacToe-v0`. The policy has one seat; the others are opponents'."""

import copy
import functools
import random
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from opentinker.config.base import nearest
from opentinker.env.adapters.common import ModuleRandom, SeededEnvironment, adapted, answer_of, require, seed_of
from opentinker.env.adapters.opponents import OpponentChoice, opponent_of
from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError

MOST_PLAYERS = 12
SAMPLED = 40
"""Moves that an episode at random has at most."""
LONGEST_MOVE = 4000
"""Characters that a game is given. Games convert what looks like a number, and Python refuses one of more digits."""
GUESSES = 300
"""Moves that the random opponent tries on a copy of the game before it gives up."""
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")
_CORPUS = re.compile(r"nltk\.download\('([^']+)'\)")
_NUMBER = re.compile(r"\d+")


class TextArenaEnvironment(SeededEnvironment):
    """One game of TextArena, seen through the game's own observation wrappers (`-raw` and `-train` ids have others).

    The reward is the game's, at its end. An invalid move follows the game's rule: most allow one more try, then it is lost. The
    seat is the task's `seat`, else one by the task's seed; `players` is how many play (the fewest that the game takes).
    `opponent` is `random`, a list of texts, or a function (observation, (), random) -> text, also `path/to/file.py:function`.
    Other arguments are the game's own. An answer in <answer> tags is given to the game without the text around it.

    Raises:
        ConfigError: an argument is wrong.
    """

    game: ClassVar[str]
    host_args: ClassVar[tuple[str, ...]] = ("opponent",)
    """It may load a file."""

    def __init__(self, opponent: OpponentChoice = "random", players: int | None = None, **options: Any) -> None:
        self._opponent = opponent_of(opponent, self._at_random)
        self._players = players
        self._options = options
        self._random: Any = ModuleRandom(0)
        self._numbers = random.Random()
        self._env: Any = None
        self._shown = ""
        self._me = 0
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        environment = cls(**args)
        environment._env = environment._make()  # wrong arguments show before any episode
        with ModuleRandom(0).swapped_in():
            environment._start(0)
        return super().task_source(split, args)

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        """Legal moves at random, against the random opponent, as far as any are found."""
        environment, numbers = cls(), random.Random(seed_of(task))
        moves: list[str] = []
        seen = environment.reset(task)
        with suppress(EnvironmentFailedError):
            while not environment._done and len(moves) < SAMPLED:
                with environment._random.swapped_in():
                    moves.append(environment._at_random(seen, (), numbers))
                seen = f"{seen}\n{environment.step(Action(moves[-1])).observation}"
        return moves

    def reset(self, task: Any) -> str:
        seed = seed_of(task)
        self._random, self._numbers = ModuleRandom(seed), random.Random(seed)
        with self._random.swapped_in():
            self._env = self._make()
            players = self._start(seed)
            seat = task.get("seat", self._numbers.randrange(players))
            if not isinstance(seat, int) or not 0 <= seat < players:
                raise EnvironmentFailedError(f"the task's seat is {seat!r}", hint=f"a seat is 0 to {players - 1}")
            self._me = seat
            if self._until_my_turn():
                raise EnvironmentFailedError("the game was over before the policy's first move")
            return self._news(self._env.get_observation()[1])

    def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the game is over")
        with self._random.swapped_in():
            before = self._errors()
            self._done = bool(self._env.step(answer_of(action.text)[:LONGEST_MOVE])[0])
            invalid = self._invalid(self._env, self._me, before)
            self._done = self._done or self._until_my_turn()
            if not self._done:
                return StepResult(
                    0.0, observation=self._news(self._env.get_observation()[1]), metrics={"invalid_move": invalid}
                )
            rewards, info = self._env.close()
        reward, reason = (rewards or {}).get(self._me, 0.0), (info or {}).get(self._me, {}).get("reason")
        if isinstance(reward, str):  # some games confuse the two when a move is invalid
            reward, reason = -1.0, reward
        metrics = {"invalid_move": invalid, "won": float(reward > 0), "lost": float(reward < 0)}
        return StepResult(reward, done=True, observation=str(reason or "The game is over."), metrics=metrics)

    def _make(self) -> Any:
        try:
            return require("textarena").make(self.game, **self._options)
        except TypeError as error:
            raise ConfigError(f"textarena:{self.game}: {error}", hint="check environment.args") from error
        except LookupError as error:
            corpus = _CORPUS.search(str(error))
            named = corpus[1] if corpus else "words"
            text = f"textarena:{self.game} needs the data set '{named}' of nltk"
            raise EnvironmentLoadError(text, hint=f"python -m nltk.downloader {named}") from error
        except (SyntaxError, ImportError, OSError, ValueError) as error:
            raise EnvironmentLoadError(f"textarena cannot make {self.game}: {type(error).__name__}: {error}") from error

    def _start(self, seed: int) -> int:
        """Resets with as many players as the game takes; that number."""
        refused: list[str] = []
        for players in [self._players] if self._players else range(1, MOST_PLAYERS + 1):
            try:
                self._env.reset(num_players=players, seed=seed)
            except (AssertionError, ValueError) as error:
                refused.append(str(error))
                continue
            except (OSError, LookupError) as error:
                raise EnvironmentLoadError(f"textarena cannot start {self.game}: {type(error).__name__}: {error}") from error
            return int(self._env.state.num_players)
        raise ConfigError(f"textarena:{self.game} refuses {self._players or 'every number of'} players: {refused[0]}")

    def _until_my_turn(self) -> bool:
        """Lets the others move; whether the game is over."""
        while (player := self._env.state.current_player_id) != self._me:
            _, seen = self._env.get_observation()
            move = self._opponent(seen, (), self._numbers)
            if not isinstance(move, str):
                raise EnvironmentFailedError(f"the opponent of seat {player} moved {move!r:.60}", hint="a move is a text")
            if self._env.step(move)[0]:
                return True
        return False

    def _at_random(self, seen: Any, legal: Sequence[Any], numbers: random.Random) -> str:
        player = self._env.state.current_player_id
        outside = random.getstate()  # a trial must not use up the game's own random numbers
        for move in guesses(str(seen), numbers):
            trial = copy.deepcopy(self._env)
            before = getattr(trial.state, "error_count", 0)
            try:
                trial.step(move)
            except Exception:  # a game may fail on a text that it did not expect: no move either
                continue
            finally:
                random.setstate(outside)
            if not self._invalid(trial, player, before):
                return move
        raise EnvironmentFailedError(
            f"the random opponent found no legal move of {self.game}", hint="give an opponent: path/to/file.py:function"
        )

    def _errors(self) -> int:
        return int(getattr(self._env.state, "error_count", 0))

    @staticmethod
    def _invalid(env: Any, player: int, errors_before: int) -> float:
        refused = env.state.game_info.get(player, {}).get("invalid_move", False)
        return float(bool(refused) or getattr(env.state, "error_count", 0) > errors_before)

    def _news(self, seen: Any) -> str:
        """What is new in an observation: some wrappers repeat all that was said, which the conversation holds already."""
        text, before = str(seen), self._shown
        self._shown = text
        return (text[len(before) :] if before and text.startswith(before) else text).strip("\n") or text


def guesses(seen: str, numbers: random.Random) -> list[str]:
    """Moves that an observation suggests: those it lists, then what stands in brackets, then the same with other numbers."""
    offered = list(dict.fromkeys(_BRACKETS.findall(seen.rpartition("Available Moves")[2]))) if "Available Moves" in seen else []
    tokens = [
        token for token in dict.fromkeys(_BRACKETS.findall(seen)) if not token.startswith(("[Player", "[GAME", "[Observ"))
    ]
    patterns = [token for token in tokens if _NUMBER.search(token)] or ["[0]"]
    varied = [_NUMBER.sub(lambda _: str(numbers.randrange(10)), numbers.choice(patterns)) for _ in range(GUESSES)]
    others = list(dict.fromkeys([*tokens, *varied]))
    numbers.shuffle(offered)
    numbers.shuffle(others)
    return [*offered, *others]


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The game of TextArena's id `spec`.

    Raises:
        EnvironmentLoadError: TextArena is not installed, or has no such game.
    """
    require("textarena")
    known = require("textarena", "textarena.envs.registration").ENV_REGISTRY
    if spec not in known:
        raise EnvironmentLoadError(f"textarena has no game '{spec}'", hint=nearest(spec, known))
    return adapted("textarena", spec, TextArenaEnvironment, game=spec)
