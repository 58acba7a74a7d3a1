"""The driver loop of supervised fine-tuning: examples -> data -> train step -> metrics. What it shares with every loop over
examples is `ExamplesLoop`."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from opentinker.client.messages import LossConfig, Minibatch
from opentinker.config.job import PreferenceJobConfig, SFTJobConfig
from opentinker.env.tasks import TaskCursor, TaskSource
from opentinker.errors import ConfigError
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.supervised import SupervisedRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.training.conversations import Conversations
from opentinker.training.driver_state import DriverState
from opentinker.training.metrics import Row, finite, pass_metrics
from opentinker.training.policy import TrainedPolicy
from opentinker.training.recorder import Recorder
from opentinker.training.schedule import checkpoint_name, kept, scheduled

J = TypeVar("J", bound=SFTJobConfig | PreferenceJobConfig)

FRUITLESS_STEPS = 3
"""Steps in a row whose examples were all left out, after which the loop gives up."""
EVALUATION_BATCH = 64


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
        loaded = await self._policy.load(checkpoint_name(step)) if step else {}
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
        while self.steps_done < last:
            await self.step()
            if (every := self.config.training.save_every) and self.steps_done % every == 0:
                await self.save(checkpoint_name(self.steps_done))
            if evaluation.every and self.steps_done % evaluation.every == 0:
                await self.evaluate()
        if evaluation.at_end and self._evaluated_at != self.steps_done:
            await self.evaluate()
        await self._publish()

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
        return await self._policy.save(name, driver=state.to_json(), keep_last=kept(self.config.training, name))

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


class SFTLoop(ExamplesLoop[SFTJobConfig]):
    """Learns the answers of conversations."""

    def __init__(
        self,
        config: SFTJobConfig,
        policy: SupervisedPolicy,
        train: Conversations,
        held_out: Conversations | None,
        recorder: Recorder,
    ) -> None:
        super().__init__(config, policy, train.rows, recorder)
        self._train = train
        self._held_out = held_out

    @classmethod
    async def connect(
        cls,
        config: SFTJobConfig,
        policy: SupervisedPolicy,
        recorder: Recorder,
        base_dir: Path | None = None,
        rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> "SFTLoop":
        """A loop on a server that runs. Files of examples are relative to `base_dir`; `rows` (by `train` and `held_out`) are
        used instead of what the config names.

        Raises:
            ConfigError: the examples cannot be read.
            RenderingError: the model has no usable chat template.
        """
        renderer, longest = await example_renderer(policy)
        data = config.data
        given = rows or {}
        train = Conversations(data.train, data, renderer, longest, base_dir, given.get("train"))
        held_out = None
        if data.held_out is not None:
            held_out = Conversations(data.held_out, data, renderer, longest, base_dir, given.get("held_out"))
        return cls(config, policy, train, held_out, recorder)

    async def evaluate(self) -> Row | None:
        """The mean loss on held-out conversations; None if there are none."""
        if self._held_out is None:
            return None
        started = time.monotonic()
        rendered = self._held_out.render(self._held_out.rows.first(self.config.evaluation.max_examples))
        if not rendered.learnt:
            raise ConfigError(
                f"all {rendered.dropped} held-out examples are longer than engine.max_model_len",
                hint="raise engine.max_model_len",
            )
        total = 0.0
        for start in range(0, len(rendered.data), EVALUATION_BATCH):
            part = rendered.data[start : start + EVALUATION_BATCH]
            scores = (await self._policy.forward(part, compute=("logprobs",), temperature=1.0))["logprobs"]
            total -= sum(float(np.sum(s, dtype=np.float64)) for s in scores)
        loss = total / rendered.learnt
        row: Row = finite(
            {
                "kind": "sft_evaluation",
                "step": self.steps_done,
                "loss": loss,
                "perplexity": math.exp(min(loss, 700.0)),
                "examples": len(rendered.data),
                "tokens": rendered.learnt,
                "dropped": rendered.dropped,
                "evaluation_s": time.monotonic() - started,
            }
        )
        self._recorder.row(row)
        self._evaluated_at = self.steps_done
        return row

    async def step(self) -> Row:
        """One optimizer step on the next examples."""
        training, number = self.config.training, self.steps_done + 1
        started = time.monotonic()
        rendered = self._train.render(self._cursor.take(training.batch_size))
        self._check_fruit(rendered.learnt)
        optimizer = scheduled(training, number)
        trained = None
        if rendered.learnt:
            minibatch = Minibatch(indices=tuple(range(len(rendered.data))), factor=1.0 / rendered.learnt)
            loss = LossConfig(name="cross_entropy")
            trained = await self._policy.train_step(rendered.data, [minibatch], loss, optimizer, publish=False)
            self._unpublished = True
        took = time.monotonic() - started
        report = trained["minibatches"][0] if trained else {"loss": None, "grad_norm": None}
        row: Row = finite(
            {
                "kind": "sft_step",
                "step": number,
                "loss": report["loss"],
                "grad_norm": report["grad_norm"],
                "learning_rate": optimizer.learning_rate,
                "epoch": self._cursor.position / self._train.rows.size if self._train.rows.size else None,
                "examples": training.batch_size - rendered.dropped,
                "dropped": rendered.dropped,
                "tokens": rendered.tokens,
                "tokens_trained": rendered.learnt,
                "tokens_per_s": rendered.tokens / took if took > 0 else None,
                **pass_metrics(trained),
                "step_s": took,
            }
        )
        self._recorder.row(row)
        self.steps_done = number
        return row
