"""The driver loop of reinforcement learning: tasks -> rollouts -> advantages -> train step and publish -> metrics.

The same code runs in the user's process and in the cluster's driver actor. It is asynchronous and talks to the world through
the policy it is given (HTTP in practice) and the recorder (files).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from opentinker.algorithms.select import advantage_function
from opentinker.algorithms.types import AdvantageFn
from opentinker.client.messages import (
    Chunk,
    ImageChunk,
    IntArray,
    Sample,
    SampleResult,
    SamplingParams,
)
from opentinker.config.algorithms import PPOConfig
from opentinker.config.job import RLJobConfig
from opentinker.env.environment import Environment
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EpisodesFailedError
from opentinker.images import Image
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rendering.tokenizer import ChatTokenizer
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Group
from opentinker.training.driver_state import DriverState
from opentinker.training.evaluation import summarize_groups
from opentinker.training.learner import Learner
from opentinker.training.loop import EpisodesLoop
from opentinker.training.metrics import Row, Timing, commonest_failure, evaluation_row, step_row
from opentinker.training.policy import TrainedPolicy
from opentinker.training.recorder import Recorder
from opentinker.training.schedule import BEST, kept, scheduled
from opentinker.training.stopping import ALONE
from opentinker.training.tasks import JobTasks
from opentinker.training.transcripts import images_of, pick_transcripts, transcript_row
from opentinker.training.watch import Watch, score

EVALUATION_TRANSCRIPTS = 8


class TrainablePolicy(TrainedPolicy, Protocol):
    """What the loop needs of a `PolicyClient`."""

    async def upload(self, images: Iterable[bytes]) -> dict[str, ImageChunk]: ...

    async def sample(
        self, prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, *, request_id: str, deadline_s: float
    ) -> SampleResult: ...


class RLLoop(EpisodesLoop):
    """One policy learns from episodes of its own."""

    def __init__(
        self,
        config: RLJobConfig,
        environment: type[Environment],
        policy: TrainablePolicy,
        renderer: ConversationRenderer,
        max_model_len: int,
        recorder: Recorder,
        base_dir: Path | None = None,
        sources: Mapping[Split, TaskSource] | None = None,
        advantages: AdvantageFn | None = None,
    ) -> None:
        self._environment = environment
        tasks = JobTasks(
            environment,
            config.environment,
            timeout_s=config.rollout.reset_timeout_s,
            base_dir=base_dir,
            sources=sources,
        )
        super().__init__(config, tasks, recorder)
        if isinstance(config.algorithm, PPOConfig) and advantages is not None:
            raise ConfigError("algorithm.kind 'ppo' takes its advantages from a critic", hint="give yours with kind 'custom'")
        if not isinstance(config.algorithm, PPOConfig):
            advantages = advantages or advantage_function(config.algorithm, base_dir)
        self._learner = Learner(policy, config.algorithm, config.sampling, advantages, config.training.steps)
        self._policy = policy
        self._renderer = renderer
        self._watch = Watch(config.training.stop, config.evaluation.metric)
        self._runner = self._make_runner(config.sampling.temperature, max_model_len, seed=config.training.seed)
        # Evaluation must not reuse training's sampling seeds.
        self._evaluator = self._make_runner(config.evaluation.temperature, max_model_len, seed=config.training.seed + 2**31)

    @classmethod
    async def connect(
        cls,
        config: RLJobConfig,
        environment: type[Environment],
        policy: TrainablePolicy,
        recorder: Recorder,
        base_dir: Path | None = None,
        sources: Mapping[Split, TaskSource] | None = None,
        advantages: AdvantageFn | None = None,
    ) -> "RLLoop":
        """A loop on a server that runs: asks it for the tokenizer and the limits. Files of tasks are relative to `base_dir`;
        `sources` replace the tasks of the config and the environment, `advantages` those of the config's algorithm.

        Raises:
            RenderingError: the model has no usable chat template.
        """
        info = await policy.info()
        tokenizer = ChatTokenizer.from_files(await policy.tokenizer_files())
        renderer = ConversationRenderer(tokenizer, info["stop_token_ids"], image_placeholder=info.get("image_placeholder"))
        return cls(config, environment, policy, renderer, int(info["max_model_len"]), recorder, base_dir, sources, advantages)

    async def resume(self, step: int) -> None:
        """Go on after the checkpoint of `step`; 0 needs none. A step is determined by the config's seed, its number and its
        place in the stream of tasks, which the checkpoint says, or, of an older release, the last row of the metrics.

        Raises:
            CheckpointError: a part of the checkpoint is missing, corrupt, or of another run.
        """
        loaded = await self._policy.load(self._recorder.checkpoints.where(step)) if step else {}
        self.steps_done = step
        state = DriverState.from_json(loaded.get("driver"), step, self.config.training.seed)
        standing: Sequence[Row] = self._recorder.rows
        if state is not None:
            self._task_position, self._evaluated_at = state.task_position, state.evaluated_at
            self._stopping.reductions[ALONE], self._stopping.stopped = state.reductions, state.stopped
            self._fruitless = state.fruitless
            self._watch.restore(state.watch)
            standing = state.later(standing)
        else:
            drawn = step * self.config.rollout.groups_per_step
            rows = [row for row in standing if row["kind"] == "step" and row["step"] == step]
            self._task_position = int(rows[-1].get("task_position", drawn)) if rows else drawn
        for row in standing:
            self._watch.row(row)
            if row["kind"] == "evaluation":
                self._evaluated_at = row["step"]
            elif row["kind"] == "stopping":
                self._stopping.heard(row)

    async def save(self, name: str) -> dict[str, Any]:
        """Write a checkpoint of what the last step published, and within it what a later driver needs to go on from it."""
        state = DriverState(
            step=self.steps_done,
            seed=self.config.training.seed,
            task_position=self._task_position,
            rows=len(self._recorder.rows),
            evaluated_at=self._evaluated_at,
            reductions=self._stopping.reductions[ALONE],
            fruitless=self._fruitless,
            stopped=self.stopped,
            watch=self._watch.state(),
            config=self.config.model_dump(mode="json"),
        )
        return await self._policy.save(
            name, driver=state.to_json(), keep_last=kept(self.config.training, name, self._recorder.checkpoints.spare)
        )

    async def close(self) -> None:
        """End what the environments left running."""
        await self._runner.close()
        await self._evaluator.close()

    async def evaluate(self) -> Row | None:
        """One evaluation; None if the environment has no held-out tasks."""
        if not (tasks := await self._held_out_tasks()):
            return None
        started = time.monotonic()
        groups = await self._evaluator.run(tasks, self.config.evaluation.samples_per_task, self.steps_done)
        for group in groups[:EVALUATION_TRANSCRIPTS]:
            for episode in (group.episodes or group.failures)[:1]:
                row = transcript_row(episode, step=self.steps_done, phase="evaluation")
                self._recorder.transcript(row, images_of(episode))
        evaluation = self.config.evaluation
        result = summarize_groups(groups, seed=self.config.training.seed, pass_at=evaluation.pass_at)
        if result is None:
            await self._check_server()
            raise EpisodesFailedError(f"no episode of the evaluation was usable: {commonest_failure(groups)}")
        row = evaluation_row(self.steps_done, result, groups, seconds=time.monotonic() - started)
        self._recorder.row(row)
        self._evaluated_at = self.steps_done
        if (evaluation.keep_best or self._watch.needs_score) and score(row, evaluation.metric) is None:
            there = ", ".join(["reward", *row["env"], *(f"pass@{k}" for k in row["pass_at"])])
            raise ConfigError(
                f"evaluation.metric: no held-out episode reports '{evaluation.metric}'", hint=f"there are {there}"
            )
        if evaluation.keep_best and self._watch.improves(row):
            await self.save(BEST)
        if (verdict := self._watch.row(row)) is not None:
            await self._act((verdict, ()))
        return row

    async def step(self) -> Row:
        """One training step."""
        config, number = self.config, self.steps_done + 1
        started = time.monotonic()
        groups: list[Group] = []
        wanted, algorithm = config.rollout.groups_per_step, config.algorithm

        async def play(tasks: Sequence[Any], first_index: int) -> None:
            groups.extend(await self._runner.run(tasks, algorithm.group_size, number, first_index=first_index))

        # Groups that teach nothing are replaced as often as the algorithm says; they stay in what is measured.
        position = await self._collect(
            algorithm.max_resamples, play, lambda _: wanted - sum(self._learner.teaches(group) for group in groups)
        )
        sampled = time.monotonic()
        await self._check_usable(groups)
        optimizer = scheduled(config.training, number, self._stopping.scale())
        learned = await self._learner.learn(groups, optimizer, number)
        ended = time.monotonic()
        row = step_row(
            number,
            groups,
            learned.batch,
            learned.trained,
            Timing(sampled - started, ended - sampled - learned.publish_s, learned.publish_s, ended - started),
            learning_rate=optimizer.learning_rate,
            task_position=position,
        )
        self._recorder.row(row)
        for episode in pick_transcripts(groups, config.training.transcripts_per_step):
            self._recorder.transcript(transcript_row(episode, step=number, phase="train"), images_of(episode))
        self.steps_done, self._task_position = number, position
        if (verdict := self._watch.row(row)) is not None:
            await self._act((verdict, ()))
        return row

    async def _check_server(self) -> None:
        await self._policy.info()

    def _make_runner(self, temperature: float, max_model_len: int, *, seed: int) -> RolloutRunner:
        return RolloutRunner(
            self._renderer,
            self._generate,
            partial(self._environment, **self.config.environment.args),
            self.config.rollout,
            self.config.sampling.model_copy(update={"temperature": temperature}),
            max_model_len,
            seed,
            self._upload,
        )

    async def _upload(self, images: Sequence[Image]) -> Mapping[str, ImageChunk]:
        if not self._renderer.takes_images:
            raise ConfigError(
                f"{self._environment.__name__} shows images, but the base model takes none",
                hint="use a vision-language model as base_model",
            )
        return await self._policy.upload([image.data for image in images])

    async def _generate(self, prompt: IntArray | tuple[Chunk, ...], params: SamplingParams, request_id: str) -> Sample:
        deadline_s = self.config.rollout.generation_timeout_s
        result = await self._policy.sample(prompt, params, request_id=request_id, deadline_s=deadline_s)
        return result.samples[0]
