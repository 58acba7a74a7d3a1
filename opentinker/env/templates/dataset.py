"""Tasks from a file: questions and answers, one row each. The two files beside this one travel with a submitted job."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import opentinker as ot
from opentinker.env.parsing import tagged
from opentinker.env.tasks import Split

FOLDER = Path(__file__).parent


class NewEnvironment(ot.Environment):
    """A question from a file. The answer stands between <answer> and </answer>.

    The right one earns 1, and another one 0.1 for its form.
    """

    task_columns = ("question", "answer")
    """What a row must have; a file that lacks one is refused before anything is trained."""

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> ot.TaskSource:
        """Where tasks come from. The configs' `train_tasks` and `held_out_tasks` name other files or datasets."""
        file, shuffle = str(FOLDER / f"{split}.jsonl"), split == "train"
        return ot.load_tasks(file, shuffle=shuffle, required=cls.task_columns)

    @classmethod
    def sample_actions(cls, task: Mapping[str, str]) -> list[str]:
        """What a good policy would say, for `opentinker env check`."""
        return [f"<answer>{task['answer']}</answer>"]

    def reset(self, task: Mapping[str, str]) -> str:
        self._answer = task["answer"]
        return f"{task['question']}\nPut your answer between <answer> and </answer>."

    def step(self, action: ot.Action) -> ot.StepResult:
        answer = tagged(action.text, "answer")
        said = (answer or "").casefold()
        exact = float(said == self._answer.casefold())
        reward = {"correct": 0.9 * exact, "form": 0.1 * (answer is not None)}
        return ot.StepResult(reward=reward, done=True, metrics={"exact": exact})
