"""Who plays the other seats of a game: random, a script, or a function of yours."""

import random
from collections.abc import Callable, Sequence
from typing import Any

from opentinker.env.load import load_function
from opentinker.errors import ConfigError

Opponent = Callable[[Any, Sequence[Any], random.Random], Any]
"""(what it sees, its legal moves where the game tells them, random numbers of the episode) -> its move."""
OpponentChoice = str | Sequence[Any] | Opponent
"""`random`, `path/to/file.py:function`, a list of moves to play in that order, or a function."""


def opponent_of(choice: OpponentChoice, at_random: Opponent) -> Opponent:
    """The opponent that an argument names; each episode makes its own.

    Raises:
        ConfigError: it names none.
        EnvironmentLoadError: its file or function does not exist.
    """
    if choice == "random":
        return at_random
    if isinstance(choice, str):
        if ":" not in choice:
            raise ConfigError(f"there is no opponent '{choice}'", hint="random, a list of moves, or path/to/file.py:function")
        choice = load_function(choice)
    if callable(choice):
        return choice
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        return _Script(choice)
    raise ConfigError(f"{choice!r:.80} is no opponent", hint="random, a list of moves, or path/to/file.py:function")


class _Script:
    """Plays given moves in order."""

    def __init__(self, moves: Sequence[Any]) -> None:
        self._moves = list(moves)
        self._next = 0

    def __call__(self, seen: Any, legal: Sequence[Any], numbers: random.Random) -> Any:
        if self._next >= len(self._moves):
            raise ConfigError(
                f"the opponent's script has only {len(self._moves)} moves", hint="give it as many as a game can take"
            )
        self._next += 1
        return self._moves[self._next - 1]
