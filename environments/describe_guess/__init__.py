"""A cooperative game: one agent knows a word and describes it, the other guesses which it is."""

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

from opentinker.env.environment import Action
from opentinker.environments.describe_guess.players import letters, random_words
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment, MultiStepResult
from opentinker.multiagent.protocol import Alternating

# fmt: off
WORDS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "guitar", "hammer", "island", "jacket", "kettle", "ladder",
    "mirror", "needle", "orange", "pencil", "queen", "river", "saddle", "temple", "umbrella", "violin", "window", "yellow",
    "zebra", "anchor", "butter", "camera", "dragon", "eagle", "feather", "garden", "honey", "iron", "jungle", "king",
    "lemon", "mountain", "night", "ocean", "piano", "quilt", "rabbit", "silver", "tiger", "uncle", "valley", "winter",
    "yacht", "zero",
)
# fmt: on
HELD_OUT = 64


class DescribeGuess(MultiAgentEnvironment):
    """The describer sees the secret word, the guesser only `choices` words, one of which it is. Both earn 1 for a right guess
    and lose `hint_penalty` per wrong one; a description that contains the word, or nothing, costs the describer `leak_penalty`
    and is not passed on. Up to `rounds` descriptions and guesses.
    """

    agents = ("describer", "guesser")
    protocol = Alternating()
    version = "1"
    players: ClassVar = {"random": random_words, "letters": letters}
    task_columns = ("word", "words")

    def __init__(self, choices: int = 8, rounds: int = 3, hint_penalty: float = 0.1, leak_penalty: float = 0.5) -> None:
        if not 2 <= choices <= len(WORDS):
            raise ConfigError(f"choices is {choices}", hint=f"it is 2 to {len(WORDS)}")
        if rounds < 1:
            raise ConfigError(f"rounds is {rounds}", hint="it is 1 or more")
        self._choices, self._rounds = choices, rounds
        self._hint_penalty, self._leak_penalty = hint_penalty, leak_penalty
        self._word = ""
        self._words: tuple[str, ...] = ()
        self._guesses = self._leaks = 0

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return _task(Random(seed))

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return [_task(Random(f"held out {number}")) for number in range(HELD_OUT)]

    def reset(self, task: Any) -> Mapping[str, str]:
        self._word, self._words = task["word"], tuple(task["words"][: self._choices])
        if self._word not in self._words:
            self._words = (*self._words[:-1], self._word)
        words = ", ".join(sorted(self._words))
        return {
            "describer": f"Your partner has to find one of these words: {words}. It is {self._word}. Describe it in one "
            "sentence, without the word itself.",
            "guesser": f"Your partner describes one of these words: {words}. Answer with the word.",
        }

    def step(self, agent: str, action: Action) -> MultiStepResult:
        return self._described(action.text) if agent == "describer" else self._guessed(action.text)

    def _described(self, text: str) -> MultiStepResult:
        said = _words_of(text)
        if not said or self._word in said:
            self._leaks += 1
            told = "Your partner's description was not allowed. Guess nevertheless."
            return self._result({"describer": {"leak": -self._leak_penalty}}, {"guesser": told})
        return self._result({}, {"guesser": f"Your partner says: {text.strip()}"})

    def _guessed(self, text: str) -> MultiStepResult:
        self._guesses += 1
        named = [word for word in _words_of(text) if word in self._words]
        if named and named[-1] == self._word:
            return self._result({name: {"found": 1.0} for name in self.agents}, {}, done=True, found=True)
        over = self._guesses >= self._rounds
        wrong = named[-1] if named else "nothing"
        told = {} if over else {"describer": f"Your partner guessed {wrong}, which is wrong. Describe the word again."}
        rewards = {name: {"wrong": -self._hint_penalty} for name in self.agents}
        return self._result(rewards, told, done=over)

    def _result(
        self, rewards: Mapping[str, Mapping[str, float]], told: Mapping[str, str], *, done: bool = False, found: bool = False
    ) -> MultiStepResult:
        numbers = {"exact": float(found), "guesses": float(self._guesses), "leaks": float(self._leaks)}
        return MultiStepResult(rewards, told, done=done, metrics=dict.fromkeys(self.agents, numbers))


def _words_of(text: str) -> list[str]:
    return re.findall(r"[a-z]+", text.lower())


def _task(random: Random) -> dict[str, Any]:
    words = random.sample(WORDS, len(WORDS))
    return {"word": random.choice(words[:8]), "words": words}
