"""Geometry problems whose numbers stand in a picture: Geometry3K, or problems generated and drawn here. A single turn."""

from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.env.environment import Action, Environment, Message, StepResult
from opentinker.env.tasks import Split, TaskSource
from opentinker.environments.geo3k.judging import Verdict, judge
from opentinker.environments.geo3k.problems import FAMILIES, check_families, held_out_tasks, training_task
from opentinker.environments.geo3k.tasks import COLUMNS, HELD_OUT, SIZES, Posed, check_size, pose, source
from opentinker.environments.math.judging import require_checker
from opentinker.errors import ConfigError, InvalidRequestError

TASKS_CHECKED = 20
"""Of given ones, before a run."""


class Geo3k(Environment):
    """One problem and one answer. A right answer earns 1 - `format_reward`, an answer in a box `format_reward`.

    `dataset` is Geometry3K's name, with the splits `train_split` and `held_out_split`, or a file of that form; then
    `held_out_dataset` is another one. Without it, problems of `families` (all of them by default) are generated and drawn with
    `image_size` pixels a side.
    """

    task_columns = COLUMNS
    host_args = ("dataset", "held_out_dataset")

    def __init__(
        self,
        dataset: str | None = None,
        held_out_dataset: str | None = None,
        train_split: str = "train",
        held_out_split: str = "test",
        families: Sequence[str] = (),
        image_size: int = 336,
        format_reward: float = 0.1,
    ) -> None:
        if not 0 <= format_reward <= 1:
            raise ConfigError(f"format_reward cannot be {format_reward}", hint="it is a part of the reward, from 0 to 1")
        check_families(families)
        self._image_size = check_size(image_size)
        self._format_reward = format_reward
        self._posed: Posed | None = None

    @classmethod
    def make_task(cls, seed: int) -> dict[str, Any]:
        return training_task(seed, tuple(FAMILIES))

    @classmethod
    def held_out_tasks(cls) -> Sequence[dict[str, Any]]:
        return held_out_tasks(tuple(FAMILIES), HELD_OUT)

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        cls(**args)  # what is wrong with the arguments is said before any problem
        return source(split, args)

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: a picture or its place is missing, or there is no checker of answers.
        """
        require_checker()
        size = cls(**args)._image_size
        for task in tasks.first(TASKS_CHECKED):
            try:
                pose(task, size)
            except InvalidRequestError as error:
                raise ConfigError(error.detail, hint=error.hint) from error

    @classmethod
    def sample_actions(cls, task: Mapping[str, Any]) -> list[str]:
        """What a good policy would say."""
        return [f"\\boxed{{{pose(task, SIZES.start).answer}}}"]

    def reset(self, task: Any) -> Sequence[Message]:
        posed = self._pose(task)
        return [{"role": "user", "content": [*posed.parts, {"type": "text", "text": posed.instructions}]}]

    def step(self, action: Action) -> StepResult:
        verdict = judge(action.text, self._open_problem().answer)
        self._posed = None
        return StepResult(rewards(verdict, self._format_reward), done=True, metrics=metrics(verdict))

    def _pose(self, task: Any) -> Posed:
        self._posed = pose(task, self._image_size)
        return self._posed

    def _open_problem(self) -> Posed:
        """The problem that awaits an answer.

        Raises:
            InvalidRequestError: there is none.
        """
        if self._posed is None:
            raise InvalidRequestError(
                "no problem is posed: reset was not called, or it is answered", hint="an environment poses one problem"
            )
        return self._posed


def rewards(verdict: Verdict, format_reward: float) -> dict[str, float]:
    """The components of an answer's reward."""
    return {
        "answer": (1 - format_reward) if verdict.correct else 0.0,
        "format": format_reward if verdict.formatted else 0.0,
    }


def metrics(verdict: Verdict) -> dict[str, float]:
    return {
        "exact": float(verdict.correct),
        "boxed": float(verdict.formatted),
        "unreadable": float(verdict.unreadable),
        "checker_error": float(verdict.unchecked),
    }
