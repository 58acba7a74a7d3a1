"""What the trainers of a user's own process share: a driver loop in the job's event loop, as plain calls."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from opentinker.client.client import Job
from opentinker.client.policy import PolicyClient
from opentinker.config.job import InteractiveJobConfig, PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.errors import ConfigError
from opentinker.training.metrics import Row
from opentinker.training.own_run import OwnRun, Resume, digests, going_on, policy_places
from opentinker.training.progress import Progress
from opentinker.training.recorder import Recorder, Summarize
from opentinker.training.report import Render
from opentinker.training.run import Loop
from opentinker.training.sinks.own import OwnSinks

L = TypeVar("L", bound=Loop)


class OwnTrainer(ABC, Generic[L]):
    """Runs a driver loop in the job's event loop, with a recorder and progress."""

    def __init__(
        self,
        job: Job,
        config: RLJobConfig | SFTJobConfig | PreferenceJobConfig,
        *,
        run_dir: str | Path | None,
        resume: Resume,
        given: Mapping[str, Any],
        progress: bool,
        summarize: Summarize,
        render: Render,
    ) -> None:
        """`given` are rows and tasks that the config does not hold, by the names of their arguments."""
        self.config = config
        self._job = job
        self._progress = progress
        self._listener: Progress | None = None
        folder = Path(run_dir) if run_dir else Path("runs") / job.id
        fields = config.model_dump(mode="json")
        if resume:
            _check_resume(resume, run_dir, config.training.save_every)
        self._run = OwnRun(folder, fields, resume, digests(given))
        if self._run.addresses:
            with going_on(folder):
                job.name_checkpoints(self._run.addresses)
        places = policy_places(config) if isinstance(config, RLJobConfig) else None
        self._run.begin(job.record["owner"], job.id, places)
        self._resumes_at = self._run.step or 0
        self._asked = 0
        """Steps that `fit` was asked for, until it has come to where the run goes on."""
        self._sinks = OwnSinks(config.sinks, folder, fields, begun=self._run.step is not None)
        self._recorder = Recorder(
            folder,
            fields,
            listeners=(self._heard, self._sinks),
            resume_at=self._run.resume_at,
            summarize=summarize,
            render=render,
            checkpoints=self._run,
        )
        self._loop: L | None = None
        self._wall_s = 0.0

    @property
    def steps_done(self) -> int:
        """Of the whole run."""
        return self._loop.steps_done if self._loop else self._resumes_at

    def fit(self, steps: int) -> dict[str, Any]:
        """Train for `steps` steps (more, when called again); the run's summary so far.

        In a run that goes on, the steps that were done before count: a program that is started again with its `fit(steps=100)`
        after step 40 trains 60, and nothing if all of them are done.

        Ctrl-C stops after tidying up; what was recorded stays and the report is written.

        Raises:
            ServerLostError: the job's server died.
            EpisodesFailedError: episodes keep failing.
            ConfigError: an example cannot be trained on.
            CheckpointError: what the run goes on from is gone or corrupt.
        """
        last = (self._asked if self._asked < self._resumes_at else self.steps_done) + steps
        summary: dict[str, Any] = {}

        async def work(policy: PolicyClient) -> None:
            loop = await self._connected(policy)
            self._asked = last
            if loop.steps_done <= last:
                await loop.run(last - loop.steps_done)

        started = time.monotonic()
        with self._shown(max(last, self.steps_done)):
            try:
                self._job.run(work)
            finally:
                self._wall_s += time.monotonic() - started
                summary = self._recorder.finish(wall_s=self._wall_s, checkpoint=None)
        return summary

    def evaluate(self) -> Row | None:
        """Evaluate the policy on held-out data now; None if there are none."""

        async def work(policy: PolicyClient) -> Row | None:
            return await (await self._connected(policy)).evaluate()

        with self._shown(self.steps_done):
            return self._job.run(work)

    @abstractmethod
    async def _connect(self, policy: PolicyClient) -> L:
        """The loop, on a server that runs."""

    async def _connected(self, policy: PolicyClient) -> L:
        if self._loop is None:
            loop = await self._connect(policy)
            self._job.at_end(loop.close)
            if self._run.step is not None:
                with going_on(self._run.folder):
                    await loop.resume(self._run.step)
            self._loop = loop
        return self._loop

    @contextmanager
    def _shown(self, total_steps: int) -> Iterator[None]:
        with self._sinks.open(self.steps_done):
            if not self._progress:
                yield
                return
            self._listener = Progress(self.config.default_name(), total_steps)
            with self._listener:
                yield

    def _heard(self, row: Row) -> None:
        if self._listener:
            self._listener(row)


def _check_resume(resume: Resume, run_dir: str | Path | None, save_every: int) -> None:
    """Raises: ConfigError when a run could not go on as it is asked for."""
    if resume not in (True, "auto"):
        raise ConfigError(f"resume={resume!r} is neither True nor False nor 'auto'")
    if run_dir is None:
        raise ConfigError("resume: which run is to go on?", hint="name its folder: run_dir='runs/...'")
    if resume is not True and not save_every:
        raise ConfigError(
            f"resume={resume!r} goes on from checkpoints, and with save_every=0 there will be none",
            hint="save_every=10 writes one every ten steps",
        )


def hosted_fields(job: Job) -> dict[str, Any]:
    """The fields of the config of what drives an interactive job.

    Raises:
        ConfigError: the job has no trainer.
    """
    if not isinstance(job.config, InteractiveJobConfig):
        raise ConfigError(f"a job of kind '{job.config.kind}' has no trainer", hint="use Client.create_job")
    return job.config.model_dump(exclude={"kind", "seed", "head", "critic", "checkpoints", "servers"})
