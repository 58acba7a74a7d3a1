"""Players of describe_guess that know the game; each plays both roles."""

import random
import re
from collections.abc import Sequence

from opentinker.env.environment import Message

_TASK = re.compile(r"one of these words: ([a-z, ]+)\.(?: It is ([a-z]+)\.)?")
_HINT = re.compile(r"(\d+) letters, the first is ([a-z])(?: and the last is ([a-z]))?")


def random_words(messages: Sequence[Message], numbers: random.Random) -> str:
    """Describes nothing, and guesses any word."""
    words, secret = _task(messages)
    return "It is one of them." if secret else numbers.choice(words)


def letters(messages: Sequence[Message], numbers: random.Random) -> str:
    """Describes how the word is written, and guesses one that is written so, if the partner describes words like that."""
    words, secret = _task(messages)
    if secret:
        return f"The word has {len(secret)} letters, the first is {secret[0]} and the last is {secret[-1]}."
    hints = [found for message in messages if (found := _HINT.search(str(message["content"]).lower()))]
    said = [str(message["content"]) for message in messages if message["role"] == "assistant"]
    left = [word for word in words if word not in said] or words
    if hints:
        length, first, last = int(hints[-1][1]), hints[-1][2], hints[-1][3]
        fits = [word for word in left if len(word) == length and word[0] == first and (not last or word[-1] == last)]
        left = fits or left
    return numbers.choice(left)


def _task(messages: Sequence[Message]) -> tuple[list[str], str]:
    """The words, and the secret one for whoever describes it.

    Raises:
        ValueError: the words were not shown.
    """
    for message in messages:
        if (found := _TASK.search(str(message["content"]))) is not None:
            return found[1].split(", "), found[2] or ""
    raise ValueError("no words were shown")
