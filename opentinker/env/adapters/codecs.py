"""Between Gymnasium's spaces and words: what the policy reads of an observation, and which action its text means."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from opentinker.env.adapters.common import IllegalMoveError, answer_of, choose, require
from opentinker.env.environment import Observation
from opentinker.errors import ConfigError

MOST_ACTIONS = 64
"""A larger space is not listed in words; it needs a codec of its own."""
MOST_NUMBERS = 64
_COLOUR = re.compile(r"\x1b\[([\d;]*)m(.*?)\x1b\[0m", re.DOTALL)


class Codec(ABC):
    """Derive from it to say things your way; it is made with the environment, before `reset`."""

    def __init__(self, env: Any) -> None:
        self.env = env

    @abstractmethod
    def rules(self) -> str:
        """What the policy is told first: the goal, the actions, the form of an answer."""

    @abstractmethod
    def observe(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        """An observation as text, image or parts."""

    @abstractmethod
    def act(self, text: str) -> Any:
        """The action that the policy's text means.

        Raises:
            IllegalMoveError: it means none; the message is shown to the policy.
        """


class SpaceCodec(Codec):
    """Reads and writes the common spaces: Discrete, Text, small Box, MultiDiscrete, MultiBinary; observations of any kind.

    `actions` names the actions of a Discrete space in order. Where the environment draws itself as text, the drawing is shown.

    Raises:
        ConfigError: the action space is too large or of another kind.
    """

    goal: ClassVar[str] = ""
    names: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[Mapping[str, int]] = {}

    def __init__(self, env: Any, actions: Sequence[str] = ()) -> None:
        super().__init__(env)
        spaces = require("gymnasium", "gymnasium.spaces")
        space = self._space = env.action_space
        self._choices: dict[str, Any] = {}
        self._numbers = 0
        if isinstance(space, spaces.Discrete):
            self._choices = self._named(int(space.n), int(space.start), tuple(actions) or self.names)
        elif isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
            self._numbers = int(space.sample().size)
            if self._numbers > MOST_NUMBERS:
                raise self._unsupported(f"{self._numbers} numbers")
        elif not isinstance(space, spaces.Text):
            raise self._unsupported(type(space).__name__)

    def names_of_actions(self) -> list[str]:
        """The words for a Discrete space's actions; none for another space."""
        return list(self._choices)

    def rules(self) -> str:
        return "\n".join(part for part in (self.goal, self._actions()) if part)

    def observe(self, observation: Any, info: Mapping[str, Any]) -> Observation:
        drawn = self._drawn()
        mask = info.get("action_mask")
        useful = ", ".join(n for n, on in zip(self._choices, mask, strict=False) if on) if mask is not None else ""
        parts = (drawn or self.describe(observation), f"Actions with an effect now: {useful}" if useful else "")
        return "\n".join(part for part in parts if part)

    def describe(self, observation: Any) -> str:
        """An observation in words."""
        return f"Observation: {in_words(observation)}"

    def act(self, text: str) -> Any:
        if self._choices:
            numbers = {str(value): value for value in self._choices.values()}
            return choose(text, self._choices, numbers | dict(self.aliases))
        action = self._vector(text) if self._numbers else answer_of(text)
        if not self._space.contains(action):
            raise IllegalMoveError(f"your answer is not in {self._space}")
        return action

    def _vector(self, text: str) -> Any:
        numpy = require("gymnasium", "numpy")
        found = re.findall(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d{1,2})?", answer_of(text))
        if len(found) != self._numbers:
            raise IllegalMoveError(f"your answer has {len(found)} numbers instead of {self._numbers}")
        return numpy.array([float(number) for number in found]).astype(self._space.dtype).reshape(self._space.shape)

    def _actions(self) -> str:
        if self._choices:
            return f"Each turn, answer with one action: {', '.join(self._choices)}."
        if self._numbers:
            return f"Each turn, answer with {self._numbers} numbers in {self._space}."
        return "Each turn, answer with a text of at most " + f"{self._space.max_length} characters."

    def _named(self, count: int, start: int, names: tuple[str, ...]) -> dict[str, int]:
        if not names:
            if count > MOST_ACTIONS:
                raise self._unsupported(f"{count} actions")
            return {str(start + i): start + i for i in range(count)}
        if len(names) != count or len({n.lower() for n in names}) != count:
            raise ConfigError(f"{len(names)} names for {count} actions", hint="give `actions` one name of its own for each")
        return {str(name): start + i for i, name in enumerate(names)}

    def _drawn(self) -> str:
        if self.env.render_mode != "ansi":
            return ""
        # A colour marks what matters, such as where the player stands; brackets keep that.
        return _COLOUR.sub(r"[\2]", str(self.env.render())).strip("\n")

    def _unsupported(self, what: str) -> ConfigError:
        return ConfigError(
            f"the action space of {self.env.spec.id if self.env.spec else self.env} ({what}) cannot be put into words",
            hint="give a codec: codec: path/to/file.py:Class, derived from opentinker.env.adapters.codecs.Codec",
        )


class FrozenLakeCodec(SpaceCodec):
    goal = (
        "You walk on a frozen lake, from S to the goal G. F is frozen; on a hole H you fall in and lose. "
        "The ice can be slippery: you may slide to a side. Your place is in brackets."
    )
    names = ("left", "down", "right", "up")

    def describe(self, observation: Any) -> str:
        board = [[cell.decode() for cell in row] for row in self.env.unwrapped.desc]
        row, column = divmod(int(observation), len(board[0]))
        board[row][column] = f"[{board[row][column]}]"
        return "\n".join(" ".join(line) for line in board) + f"\nYou are at row {row + 1}, column {column + 1}."


class CliffWalkingCodec(SpaceCodec):
    goal = (
        "You walk on a grid of 4 rows and 12 columns, from the lower left corner to the lower right one. The fields between "
        "them, in row 4, are a cliff: who steps there starts again. Every step costs 1, the cliff 100."
    )
    names = ("up", "right", "down", "left")

    def describe(self, observation: Any) -> str:
        row, column = divmod(int(observation), 12)
        return f"You are at row {row + 1}, column {column + 1}. The goal is at row 4, column 12."


class TaxiCodec(SpaceCodec):
    goal = (
        "You drive a taxi: fetch the passenger and bring them to where they want to go. The map has 5 rows and 5 columns; "
        "| is a wall, : is none; R, G, Y, B are stops. Every step costs 1, a wrong pickup or dropoff 10; the delivery earns 20."
    )
    names = ("south", "north", "east", "west", "pickup", "dropoff")
    aliases: ClassVar[Mapping[str, int]] = {"pick up": 4, "drop off": 5, "down": 0, "up": 1, "right": 2, "left": 3}
    _STOPS = ("R (row 1, column 1)", "G (row 1, column 5)", "Y (row 5, column 1)", "B (row 5, column 4)")

    def rules(self) -> str:
        board = "\n".join("".join(cell.decode() for cell in row) for row in self.env.unwrapped.desc)
        return f"{self.goal}\n{board}\n{self._actions()}"

    def describe(self, observation: Any) -> str:
        row, column, passenger, stop = self.env.unwrapped.decode(int(observation))
        where = "in the taxi" if passenger == 4 else f"at {self._STOPS[passenger]}"
        return f"The taxi is at row {row + 1}, column {column + 1}. The passenger is {where} and wants to {self._STOPS[stop]}."


class BlackjackCodec(SpaceCodec):
    goal = "You play blackjack: come closer to 21 than the dealer without going over it."
    names = ("stick", "hit")
    aliases: ClassVar[Mapping[str, int]] = {"stand": 0}

    def describe(self, observation: Any) -> str:
        total, dealer, ace = (int(number) for number in observation)
        shown = "an ace" if dealer == 1 else str(dealer)
        return f"Your cards add up to {total}{', with an ace that counts 11' if ace else ''}. The dealer shows {shown}."


KNOWN: Mapping[str, type[SpaceCodec]] = {
    "Blackjack": BlackjackCodec,
    "CliffWalking": CliffWalkingCodec,
    "CliffWalkingSlippery": CliffWalkingCodec,
    "FrozenLake": FrozenLakeCodec,
    "FrozenLake8x8": FrozenLakeCodec,
    "Taxi": TaxiCodec,
}
"""By Gymnasium's name, whatever its version."""


def in_words(value: Any) -> str:
    """A value of any space: numbers with few digits, parts of a composite one after another."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {in_words(part)}" for key, part in value.items())
    if isinstance(value, str):
        return value
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence):
        return f"[{', '.join(in_words(part) for part in value)}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
