"""The driver loop of supervised fine-tuning: examples -> data -> train step -> metrics."""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from opentinker.client.messages import LossConfig, Minibatch
from opentinker.config.job import SFTJobConfig
from opentinker.errors import ConfigError
from opentinker.training.conversations import Conversations
from opentinker.training.examples import ExamplesLoop, SupervisedPolicy, example_renderer
from opentinker.training.metrics import Row, finite, pass_metrics
from opentinker.training.recorder import Recorder
from opentinker.training.schedule import scheduled

EVALUATION_BATCH = 64


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
