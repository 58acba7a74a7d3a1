"""The driver loop of preference training: pairs of answers -> data -> train step -> metrics."""

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from opentinker.client.messages import Datum, LossConfig, Minibatch, TokenScore
from opentinker.config.job import PreferenceJobConfig
from opentinker.config.preference import BradleyTerryConfig, DPOConfig
from opentinker.errors import ConfigError
from opentinker.training.evaluation import bootstrap
from opentinker.training.examples import ExamplesLoop, SupervisedPolicy, example_renderer
from opentinker.training.metrics import Row, finite, pass_metrics
from opentinker.training.pair_rewards import score_pairs
from opentinker.training.preferences import Preferences, RenderedPairs
from opentinker.training.recorder import Recorder
from opentinker.training.references import References
from opentinker.training.schedule import scheduled

EVALUATION_PAIRS = 64
"""Of one forward pass."""
ROWS = 256
"""Rows that are rendered at once for their reference logprobs."""
PROBED_ROWS = 8


class PreferenceLoop(ExamplesLoop[PreferenceJobConfig]):
    """Learns which of two answers is preferred. A reward model is not published: it cannot be sampled."""

    def __init__(
        self,
        config: PreferenceJobConfig,
        policy: SupervisedPolicy,
        train: Preferences,
        held_out: Preferences | None,
        recorder: Recorder,
        *,
        ends: bool = True,
    ) -> None:
        """`ends` says that the run has the config's number of steps, so that only what these see needs a reference."""
        super().__init__(config, policy, train.rows, recorder)
        self._train = train
        self._held_out = held_out
        self._held_out_pairs: RenderedPairs | None = None
        self._compared: list[Datum] | None = None
        """The held-out data with their references."""
        self._scores = isinstance(config.loss, BradleyTerryConfig)
        self._references = None if self._scores else References(policy, recorder.folder)
        self._ends = ends
        self._prepared = False

    @classmethod
    async def connect(
        cls,
        config: PreferenceJobConfig,
        policy: SupervisedPolicy,
        recorder: Recorder,
        base_dir: Path | None = None,
        rows: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
        *,
        ends: bool = True,
    ) -> "PreferenceLoop":
        """As `SFTLoop.connect`.

        Raises:
            ConfigError: the examples cannot be read.
            RenderingError: the model has no usable chat template.
        """
        renderer, longest = await example_renderer(policy)
        data, given, scored = config.data, rows or {}, isinstance(config.loss, BradleyTerryConfig)
        train = Preferences(data.train, data, renderer, longest, base_dir, given.get("train"), scored=scored)
        held_out = None
        if data.held_out is not None:
            held_out = Preferences(data.held_out, data, renderer, longest, base_dir, given.get("held_out"), scored=scored)
        return cls(config, policy, train, held_out, recorder, ends=ends)

    async def prepare(self) -> None:
        """Fix what the policy is compared with: itself as it is before the first step, or, of a run that goes on, what was kept
        then.

        Raises:
            CheckpointError: a run that goes on has lost it.
            ConfigError: a row cannot be trained on.
        """
        loss, references = self.config.loss, self._references
        if self._prepared or references is None or isinstance(loss, BradleyTerryConfig):
            return
        precomputed = loss.reference == "precomputed" or bool(self.config.start_from)
        if self.steps_done:
            if precomputed or any(row["kind"] == "preference_reference" for row in self._recorder.rows):
                references.load()
        elif precomputed or not await self._is_base(references):
            started = time.monotonic()
            kept = await references.compute(self._all_data())
            took = time.monotonic() - started
            self._recorder.row({"kind": "preference_reference", "step": 0, "answers": kept, "reference_s": took})
        self._prepared = True

    async def _is_base(self, references: References) -> bool:
        """A start without any usable row is found out by the steps."""
        data = self._train.render(self._train.rows.first(PROBED_ROWS)).data
        return not data or await references.is_base(data)

    def _all_data(self) -> Iterator[Sequence[Datum]]:
        """Of every row that the run will see."""
        if self._held_out is not None:
            yield from _parts(self._held_out_data().data)
        rows, training = self._train.rows, self.config.training
        size = rows.size or 0
        drawn = training.steps * training.batch_size
        wanted = rows.draw(training.seed, 0, drawn) if self._ends and drawn < size else rows.first(size)
        for start in range(0, len(wanted), ROWS):
            yield self._train.render(wanted[start : start + ROWS]).data

    def _held_out_data(self) -> RenderedPairs:
        """They are few, and the same each time."""
        assert self._held_out is not None
        if self._held_out_pairs is None:
            self._held_out_pairs = self._held_out.render(self._held_out.rows.first(self.config.evaluation.max_examples))
        return self._held_out_pairs

    async def _publish(self) -> None:
        if not self._scores:
            await super()._publish()

    async def evaluate(self) -> Row | None:
        """Accuracy, margin and loss on held-out pairs; None if there are none."""
        if self._held_out is None:
            return None
        await self.prepare()
        started = time.monotonic()
        rendered = self._held_out_data()
        if not rendered.data:
            raise ConfigError(
                f"all {rendered.dropped + rendered.unusable} held-out pairs are too long or unusable",
                hint="raise engine.max_model_len, or look at data.held_out",
            )
        if self._compared is None:
            self._compared = rendered.data
            if self._references is not None:
                self._compared = [d for part in _parts(rendered.data) for d in await self._references.attach(part)]
        output: TokenScore = "values" if self._scores else "logprobs"
        outputs = []
        # Without their references, as when these were computed: the same packs, so that an untrained policy is its reference.
        for part in _parts(rendered.data):
            outputs += (await self._policy.forward(part, compute=(output,), temperature=1.0))[output]
        scores = score_pairs(self.config.loss, self._compared, outputs)
        accuracy, margin = bootstrap(scores.correct), bootstrap(scores.margins)
        row: Row = finite(
            {
                "kind": "preference_evaluation",
                "step": self.steps_done,
                "loss": float(scores.loss.mean()),
                "accuracy": accuracy.mean,
                "accuracy_ci": accuracy.half_width,
                "margin": margin.mean,
                "margin_ci": margin.half_width,
                "chosen_reward": float(scores.chosen.mean()),
                "rejected_reward": float(scores.rejected.mean()),
                "pairs": rendered.pairs,
                "dropped": rendered.dropped,
                "unusable": rendered.unusable,
                "tokens": rendered.learnt,
                "evaluation_s": time.monotonic() - started,
            }
        )
        self._recorder.row(row)
        self._evaluated_at = self.steps_done
        return row

    async def step(self) -> Row:
        """One optimizer step on the next pairs."""
        await self.prepare()
        training, number = self.config.training, self.steps_done + 1
        started = time.monotonic()
        rendered = self._train.render(self._cursor.take(training.batch_size))
        self._check_fruit(rendered.pairs)
        optimizer = scheduled(training, number)
        trained: dict[str, Any] | None = None
        if rendered.data:
            data = rendered.data if self._references is None else await self._references.attach(rendered.data)
            minibatch = Minibatch(indices=tuple(range(len(data))), factor=1.0 / rendered.pairs)
            trained = await self._policy.train_step(data, [minibatch], self._loss(), optimizer, publish=False)
            self._unpublished = True
        took = time.monotonic() - started
        report = trained["minibatches"][0] if trained else {"loss": None, "grad_norm": None, "metrics": {}}
        row: Row = finite(
            {
                "kind": "preference_step",
                "step": number,
                "loss": report["loss"],
                **_pair_means(report["metrics"]),
                "grad_norm": report["grad_norm"],
                "learning_rate": optimizer.learning_rate,
                "epoch": self._cursor.position / self._train.rows.size if self._train.rows.size else None,
                "pairs": rendered.pairs,
                "dropped": rendered.dropped,
                "unusable": rendered.unusable,
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

    def _loss(self) -> LossConfig:
        loss = self.config.loss
        if isinstance(loss, BradleyTerryConfig):
            return LossConfig(name="bradley_terry", centring_coefficient=loss.centring_coefficient)
        smoothing = loss.label_smoothing if isinstance(loss, DPOConfig) else 0.0
        return LossConfig(name=loss.kind, beta=loss.beta, label_smoothing=smoothing)


def _pair_means(metrics: Mapping[str, float]) -> dict[str, float | None]:
    """Means over the pairs of a step of what the server summed up; None for what it did not."""
    names = {
        "accuracy": "correct_sum",
        "margin": "margin_sum",
        "chosen_reward": "chosen_reward_sum",
        "rejected_reward": "rejected_reward_sum",
        "chosen_logprob": "chosen_logprob_sum",
        "rejected_logprob": "rejected_logprob_sum",
    }
    return {name: metrics[total] / metrics["pairs"] if total in metrics else None for name, total in names.items()}


def _parts(data: Sequence[Datum]) -> Iterator[Sequence[Datum]]:
    for start in range(0, len(data), 2 * EVALUATION_PAIRS):
        yield data[start : start + 2 * EVALUATION_PAIRS]
