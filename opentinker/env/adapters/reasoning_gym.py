"""The tasks of reasoning-gym: `reasoning_gym:leg_counting`. One question, one answer, scored by the task's own function."""

import ast
import functools
import re
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.config.base import nearest
from opentinker.env.adapters.common import SeededEnvironment, adapted, require, seed_of
from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EnvironmentLoadError

LITERALS = frozenset({"binary_matrix", "n_queens", "number_sorting", "spiral_matrix", "string_insertion"})
"""Their scorers call `eval` on the answer, to read a list. They are given one that reads literals only."""
EXPRESSIONS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Their scorers have sympy evaluate the answer."""
_EXPRESSION = re.compile(r"(?:[\w\s+*/^(),=-]|\.(?=\d|[ \t]*(?:$|[+*/^(),=-]))){1,1000}")


class ReasoningGymEnvironment(SeededEnvironment):
    """A question of one of reasoning-gym's generators; its arguments are the generator's own (`min_animals`, `max_terms`, ...).

    `system_prompt` is a name of the package's (default, simple, direct, chain_of_draft, DeepSeekZero), a text, or empty. The
    answer stands in <answer> tags. A text without them is scored as it is if `strict` is off, else it earns nothing.

    Raises:
        ConfigError: an argument is wrong.
    """

    dataset: ClassVar[str]

    def __init__(self, system_prompt: str = "default", strict: bool = True, **options: Any) -> None:
        gym = require("reasoning_gym")
        prompts: Mapping[str, str] = require("reasoning_gym", "reasoning_gym.utils").SYSTEM_PROMPTS
        self._system = prompts.get(system_prompt, system_prompt)
        self._strict = strict
        self._options = options
        self._create = gym.create_dataset
        self._extract = require("reasoning_gym", "reasoning_gym.utils").extract_answer
        self._generator: Any = None
        self._entry: Any = None
        self._done = False

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args)._generate(0)  # wrong arguments show before any episode
        return super().task_source(split, args)

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        """The right answer, where the dataset has one and needs no arguments."""
        if cls.dataset == "composite":
            return []
        answer = cls()._generate(seed_of(task))[0]["answer"]
        return [] if answer is None else [f"<answer>{answer}</answer>"]

    def reset(self, task: Any) -> list[Message]:
        self._generator = self._generate(seed_of(task))
        self._entry = self._generator[0]
        system: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*system, {"role": "user", "content": self._entry["question"]}]

    def step(self, action: Action) -> StepResult:
        if self._done:
            raise RuntimeError("the episode is over")
        self._done = True
        answer = self._extract(action.text)
        formatted = answer is not None
        if answer is None and not self._strict:
            answer = action.text.strip()
        score, failed = self._score(answer)
        metrics = {"formatted": float(formatted), "exact": float(score >= 1.0), "scorer_errors": float(failed)}
        return StepResult(score, done=True, metrics=metrics)

    def _score(self, answer: str | None) -> tuple[float, bool]:
        if answer is None:
            return 0.0, False
        if self._source() in EXPRESSIONS and not is_expression(answer):
            return 0.0, False
        try:
            return float(self._generator.score_answer(answer=answer, entry=self._entry)), False
        except Exception:  # some scorers raise on what they cannot parse; a wrong answer is no failed environment
            return 0.0, True

    def _source(self) -> str:
        return str((self._entry.get("metadata") or {}).get("source_dataset", self.dataset))

    def _generate(self, seed: int) -> Any:
        options: dict[str, Any] = {"size": 1} | self._options
        if self.dataset == "composite":
            options["datasets"] = _composed(options.get("datasets"))
        try:
            return self._create(self.dataset, seed=seed, **options)
        except (TypeError, AssertionError, ValueError) as error:
            raise ConfigError(
                f"reasoning_gym:{self.dataset} refuses its arguments: {error}", hint=_fields(self.dataset)
            ) from error


@functools.cache
def environment_class(spec: str) -> type[Environment]:
    """The environment of reasoning-gym's dataset `spec`.

    Raises:
        EnvironmentLoadError: reasoning-gym is not installed, or has no such dataset.
    """
    require("reasoning_gym")
    known = require("reasoning_gym", "reasoning_gym.factory").DATASETS
    if spec not in known:
        raise EnvironmentLoadError(f"reasoning_gym has no dataset '{spec}'", hint=nearest(spec, known))
    for name in LITERALS & known.keys():
        vars(sys.modules[known[name][0].__module__])["eval"] = ast.literal_eval
    # What the policy wrote can take for ever to evaluate; a process can be killed.
    execution = "process" if spec in EXPRESSIONS or spec == "composite" else "thread"
    return adapted("reasoning_gym", spec, ReasoningGymEnvironment, dataset=spec, execution=execution)


def is_expression(answer: str) -> bool:
    """Whether it can only be a formula: sympy evaluates it as Python, where attributes lead anywhere."""
    return bool(_EXPRESSION.fullmatch(answer)) and "__" not in answer


def _composed(datasets: Any) -> list[Any]:
    spec = require("reasoning_gym", "reasoning_gym.composite").DatasetSpec
    if not isinstance(datasets, list) or not datasets:
        raise ConfigError("reasoning_gym:composite needs datasets", hint="datasets: [{name: leg_counting, weight: 1}, ...]")
    try:
        return [spec(**{"weight": 1.0, "config": {}} | dict(d)) for d in datasets]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reasoning_gym:composite: {error}", hint="a dataset has name, weight and config") from error


def _fields(dataset: str) -> str:
    fields = require("reasoning_gym", "reasoning_gym.factory").DATASETS[dataset][1].__dataclass_fields__
    return f"its arguments are {', '.join(name for name in fields if name not in ('seed', 'size'))}"
