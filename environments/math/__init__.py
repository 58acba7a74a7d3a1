"""Mathematical problems with one answer: a single turn, judged by math-verify."""

from collections.abc import Mapping
from typing import Any, ClassVar

from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.environments.math.judging import ANSWER_IN, AnswerIn, check_gold, gold_of, judge, require_checker
from opentinker.environments.math.rows import EXAMPLES, rows
from opentinker.errors import ConfigError

INSTRUCTIONS: dict[AnswerIn, str] = {
    "boxed": "Think step by step, and put your final answer within \\boxed{}.",
    "tagged": "Think step by step, and put your final answer between <answer> and </answer>.",
    "last_number": "Think step by step. The last number that you write is your answer.",
}
GOLDS_CHECKED = 500
"""Right answers that are read by math-verify when given tasks are loaded; the others are when their episode begins."""


class Math(Environment):
    r"""A problem, and an answer in `\boxed{}` (or as `answer_in` says). Tasks have the keys `question` and `answer`.

    A right answer earns 1. Of that, `format_reward` is for an answer in the form asked for, right or wrong. `answer` may be a
    worked solution that ends as GSM8K's or MATH's do. `examples` (0 to 3) solved problems can precede the question.
    `check_timeout_s` is the processor time that judging may take.
    """

    task_columns: ClassVar[tuple[str, ...]] = ("question", "answer")
    host_args: ClassVar[tuple[str, ...]] = ("check_timeout_s",)

    def __init__(
        self,
        format_reward: float = 0.1,
        answer_in: AnswerIn = "boxed",
        examples: int = 0,
        instruction: str | None = None,
        check_timeout_s: float = 1.0,
    ) -> None:
        if answer_in not in ANSWER_IN:
            raise ConfigError(f"answer_in '{answer_in}' is not known", hint=f"take one of {', '.join(ANSWER_IN)}")
        if not 0 <= format_reward <= 1:
            raise ConfigError(f"format_reward is {format_reward}", hint="it is a part of the reward, from 0 to 1")
        if not 0 <= examples <= len(EXAMPLES) or (examples and answer_in != "boxed"):
            raise ConfigError(f"there are no {examples} examples", hint=f"0 to {len(EXAMPLES)}, answered in \\boxed{{}}")
        self._format_reward = format_reward
        self._answer_in = answer_in
        self._examples = EXAMPLES[:examples]
        self._instruction = INSTRUCTIONS[answer_in] if instruction is None else instruction
        self._check_timeout_s = check_timeout_s
        self._gold = ""

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        """Word problems that come with the package; others are named by `environment.train_tasks` and `held_out_tasks`."""
        require_checker()
        return ListTasks(list(rows(split)), shuffle=split == "train")

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a right answer is missing or cannot be read, or there is no checker.
        """
        require_checker()
        for task in tasks.first(GOLDS_CHECKED):
            check_gold(gold_of(task["answer"]))

    def reset(self, task: Any) -> list[Message]:
        self._gold = gold_of(task["answer"])
        messages: list[Message] = []
        for question, answer in self._examples:
            messages += [self._asked(question), {"role": "assistant", "content": answer}]
        return [*messages, self._asked(str(task["question"]))]

    def step(self, action: Action) -> StepResult:
        judgement = judge(action.text, self._gold, self._answer_in, self._check_timeout_s)
        reward = {
            "answer": (1.0 - self._format_reward) * judgement.right,
            "format": self._format_reward * judgement.found,
        }
        metrics = {**judgement.metrics, "truncated": float(action.truncated)}
        return StepResult(reward, done=True, metrics=metrics)

    def _asked(self, question: str) -> Message:
        return {"role": "user", "content": f"{question}\n\n{self._instruction}" if self._instruction else question}
