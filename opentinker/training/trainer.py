"""The synchronous face of the RL loop."""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from opentinker.algorithms.select import user_advantages
from opentinker.algorithms.types import AdvantageFn
from opentinker.client.client import Job
from opentinker.client.messages import AdamParams
from opentinker.client.policy import PolicyClient
from opentinker.config.algorithms import GRPOConfig, PolicyGradient
from opentinker.config.job import (
    EnvironmentConfig,
    EvaluationConfig,
    InteractiveJobConfig,
    RLJobConfig,
    RLTrainingConfig,
    RolloutConfig,
    SamplingConfig,
)
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.env.tasks import Split, TaskSource, task_source
from opentinker.errors import ConfigError
from opentinker.training.metrics import Row
from opentinker.training.progress import Progress
from opentinker.training.recorder import Recorder
from opentinker.training.rl import RLLoop


class RLTrainer:
    """Trains the policy of an interactive job on an environment that runs in this process.

    `environment` is a class, a built-in name, or `path/to/file.py:Class`. Metrics, transcripts and report.html go to `run_dir`
    (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        environment: type[Environment] | str,
        algorithm: PolicyGradient | None = None,
        *,
        advantages: AdvantageFn | None = None,
        environment_args: dict[str, Any] | None = None,
        train_tasks: TaskSource | Sequence[Any] | None = None,
        held_out_tasks: TaskSource | Sequence[Any] | None = None,
        optimizer: AdamParams | None = None,
        sampling: SamplingConfig | None = None,
        rollout: RolloutConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        seed: int = 0,
        run_dir: str | Path | None = None,
        progress: bool = True,
    ) -> None:
        """Tasks given here replace the environment's own; `opentinker.load_tasks` reads them from a file or dataset.
        `advantages` replaces the algorithm's: a function of the rewards per turn of each episode of each group, see
        `opentinker.algorithms.types`.

        Raises: EnvironmentLoadError, ConfigError.
        """
        if not isinstance(job.config, InteractiveJobConfig):
            raise ConfigError(f"a job of kind '{job.config.kind}' has no trainer", hint="use Client.create_job")
        self._job = job
        self._environment = load_environment(environment)
        name = environment if isinstance(environment, str) else environment.__name__
        self.config = RLJobConfig(
            **job.config.model_dump(exclude={"kind", "seed"}),
            environment=EnvironmentConfig(name=name, args=environment_args or {}),
            algorithm=(algorithm or GRPOConfig()).model_dump(),
            sampling=sampling or SamplingConfig(),
            rollout=rollout or RolloutConfig(),
            evaluation=evaluation or EvaluationConfig(),
            training=RLTrainingConfig(seed=seed, optimizer=optimizer or AdamParams()),
        )
        given: dict[Split, TaskSource | Sequence[Any] | None] = {"train": train_tasks, "held_out": held_out_tasks}
        self._sources = {split: task_source(tasks) for split, tasks in given.items() if tasks is not None}
        self._given_advantages = None if advantages is None else user_advantages(advantages, "advantages")
        self._progress = progress
        self._listener: Progress | None = None
        self._recorder = Recorder(
            Path(run_dir) if run_dir else Path("runs") / job.id, self.config.model_dump(mode="json"), listeners=(self._heard,)
        )
        self._loop: RLLoop | None = None
        self._wall_s = 0.0

    def fit(self, steps: int) -> dict[str, Any]:
        """Train for `steps` steps (more, when called again); the run's summary so far.

        Ctrl-C stops after tidying up; what was recorded stays and the report is written.

        Raises:
            ServerLostError: the job's server died.
            EpisodesFailedError: episodes keep failing.
        """
        done = self._loop.steps_done if self._loop else 0
        summary: dict[str, Any] = {}

        async def work(policy: PolicyClient) -> None:
            await (await self._connected(policy)).run(steps)

        started = time.monotonic()
        with self._shown(done + steps):
            try:
                self._job.run(work)
            finally:
                self._wall_s += time.monotonic() - started
                summary = self._recorder.finish(wall_s=self._wall_s, checkpoint=None)
        return summary

    def evaluate(self) -> Row | None:
        """Evaluate the policy on the environment's held-out tasks now; None if it has none."""

        async def work(policy: PolicyClient) -> Row | None:
            return await (await self._connected(policy)).evaluate()

        with self._shown(self._loop.steps_done if self._loop else 0):
            return self._job.run(work)

    async def _connected(self, policy: PolicyClient) -> RLLoop:
        if self._loop is None:
            self._loop = await RLLoop.connect(
                self.config, self._environment, policy, self._recorder, sources=self._sources, advantages=self._given_advantages
            )
        return self._loop

    def _shown(self, total_steps: int) -> AbstractContextManager[Any]:
        if not self._progress:
            return nullcontext()
        self._listener = Progress(self.config.environment.name, total_steps)
        return self._listener

    def _heard(self, row: Row) -> None:
        if self._listener:
            self._listener(row)
