"""Words between two ends, in order and once each, whatever becomes of the messages that carry them: these may be lost, come
twice or late. No I/O.

Each end numbers its words from 1 and keeps them until the other says how far it has heard; a message carries the words from the
first one that was not heard, so that whatever was in a lost one is in the next.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from opentinker.errors import InvalidRequestError

MAX_WORDS = 1000
MAX_BYTES = 8 * 2**20


class Words(NamedTuple):
    """What a message carries: consecutive words, the number of the first, and how far its sender has heard the other end."""

    heard: int
    first: int
    words: Sequence[bytes]


class Channel:
    """One end."""

    def __init__(self) -> None:
        self._heard = 0
        self._kept: deque[bytes] = deque()
        self._first = 1
        """The number of the first that is kept."""

    @property
    def waiting(self) -> bool:
        """Whether there are words that the other end has not confirmed."""
        return bool(self._kept)

    @property
    def heard(self) -> int:
        """How many of the other end's words have arrived."""
        return self._heard

    def say(self, word: bytes) -> None:
        """Keep a word until the other end has heard it."""
        self._kept.append(word)

    def message(self) -> Words:
        """What to send now; a large lot goes in several messages."""
        words: list[bytes] = []
        size = 0
        for word in self._kept:
            size += len(word)
            if words and (len(words) >= MAX_WORDS or size > MAX_BYTES):
                break
            words.append(word)
        return Words(self._heard, self._first, words)

    def take(self, message: Words) -> list[bytes]:
        """What of a message is new.

        Raises:
            InvalidRequestError: it leaves something out, or has heard what was never said; nothing has changed then.
        """
        heard, first, words = message
        if not 0 <= heard < self._first + len(self._kept):
            raise InvalidRequestError(f"word {heard} was heard, and only {self._first + len(self._kept) - 1} were said")
        if not 1 <= first <= self._heard + 1:
            raise InvalidRequestError(f"the words begin with {first}, and {self._heard + 1} is missing")
        while self._first <= heard:
            self._kept.popleft()
            self._first += 1
        new = list(words[self._heard + 1 - first :])
        self._heard += len(new)
        return new
