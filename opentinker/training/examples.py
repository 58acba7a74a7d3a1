"""The driver loop over examples: when to evaluate, to save and to go on, whatever is learnt from them."""

from abc import ABC, abstractmethod
from typing import Any, Generic, Protocol, TypeVar

from opentinker.config.job import PreferenceJobConfig, SFTJobConfig
from opentinker.env.tasks import TaskCursor, TaskSource
from opentinker.errors import ConfigError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.supervised import SupervisedRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.driver_state import DriverState
from opentinker.training.metrics import Row
from opentinker.training.policy import TrainedPolicy
from opentinker.training.recorder import Recorder
from opentinker.training.schedule import checkpoint_name, kept

J = TypeVar("J", bound=SFTJobConfig | PreferenceJobConfig)

FRUITLESS_STEPS = 3
"""Steps in a row whose examples were all left out, after which the loop gives up."""


class SupervisedPolicy(TrainedPolicy, Protocol):
    """What the loop needs of a `PolicyClient`."""

    async def publish(self, mode: str = "drain") -> dict[str, Any]: ...


async def example_renderer(policy: SupervisedPolicy) -> tuple[SupervisedRenderer, int]:
    """(what renders examples for the policy's model, the longest that it takes).

    Raises:
        RenderingError: the model has no usable chat template.
    """
    info = await policy.info()
    tokenizer = ChatTokenizer.from_files(await policy.tokenizer_files())
    return SupervisedRenderer(ConversationRenderer(tokenizer, info["stop_token_ids"])), int(info["max_model_len"])


class ExamplesLoop(ABC, Generic[J]):
    """Holds what lasts from step to step; `run` may be called again and continues. The engine gets the weights before a save
    and at the end: nothing is sampled meanwhile."""

    def __init__(self, config: J, policy: SupervisedPolicy, examples: TaskSource, recorder: Recorder) -> None:
        self.config = config
        self.steps_done = 0
        self._policy = policy
        self._cursor = TaskCursor(examples, config.training.seed)
        self._recorder = recorder
        self._evaluated_at: int | None = None
        self._fruitless = 0
        self._unpublished = False

    async def resume(self, step: int) -> None:
        """Go on after the checkpoint of `step`; 0 needs none. The place among the examples is in the checkpoint, or, of an
        older release, follows from the step.

        Raises:
            CheckpointError: a part of the checkpoint is missing, corrupt, or of another run.
        """
        loaded = await self._policy.load(self._recorder.checkpoints.where(step)) if step else {}
        self.steps_done = step
        self._cursor.position = step * self.config.training.batch_size
        state = DriverState.from_json(loaded.get("driver"), step, self.config.training.seed)
        if state is not None:
            self._cursor.position, self._evaluated_at = state.task_position, state.evaluated_at
            self._fruitless = state.fruitless
        for row in self._recorder.rows:
            if row["kind"] in ("sft_evaluation", "preference_evaluation"):
                self._evaluated_at = row["step"]

    async def run(self, steps: int) -> None:
        """Train for `steps` more steps, evaluating as the config says.

        Raises:
            ConfigError: a row cannot be trained on, or all of several steps are too long.
        """
        evaluation, last = self.config.evaluation, self.steps_done + steps
        await self.prepare()
        if evaluation.at_start and self.steps_done == 0:
            await self.evaluate()
        if self._evaluation_is_due():  # the run died between a checkpoint and its evaluation
            await self.evaluate()
        while self.steps_done < last:
            await self.step()
            if (every := self.config.training.save_every) and self.steps_done % every == 0:
                saved = await self.save(checkpoint_name(self.steps_done))
                self._recorder.checkpoints.saved(self.steps_done, {"": saved["version"]})
            if self._evaluation_is_due():
                await self.evaluate()
        if evaluation.at_end and self._evaluated_at != self.steps_done:
            await self.evaluate()
        await self._publish()

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(every and self.steps_done and self.steps_done % every == 0 and self._evaluated_at != self.steps_done)

    async def save(self, name: str) -> dict[str, Any]:
        """Publish what is new, so that the checkpoint has a version of its own and is what is sampled from, and save."""
        await self._publish()
        state = DriverState(
            step=self.steps_done,
            seed=self.config.training.seed,
            task_position=self._cursor.position,
            rows=len(self._recorder.rows),
            evaluated_at=self._evaluated_at,
            fruitless=self._fruitless,
            config=self.config.model_dump(mode="json"),
        )
        return await self._policy.save(
            name, driver=state.to_json(), keep_last=kept(self.config.training, name, self._recorder.checkpoints.spare)
        )

    async def _publish(self) -> None:
        if self._unpublished:
            await self._policy.publish()
            self._unpublished = False

    async def close(self) -> None:
        """Nothing is left running."""

    async def prepare(self) -> None:
        """What has to be known before the first step."""

    @abstractmethod
    async def evaluate(self) -> Row | None:
        """The row of an evaluation on held-out examples; None if there are none."""

    @abstractmethod
    async def step(self) -> Row:
        """One optimizer step on the next examples."""

    def _check_fruit(self, learnt: int) -> None:
        self._fruitless = 0 if learnt else self._fruitless + 1
        if self._fruitless >= FRUITLESS_STEPS:
            raise ConfigError(
                f"all examples of {FRUITLESS_STEPS} steps in a row are longer than engine.max_model_len",
                hint="raise engine.max_model_len, or shorten the examples",
            )
