"""The synchronous face of the driver loops."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from opentinker.algorithms.select import user_advantages
from opentinker.algorithms.types import AdvantageFn
from opentinker.client.client import Job
from opentinker.client.messages import AdamParams
from opentinker.client.policy import PolicyClient
from opentinker.config.agents import AgentConfig, TurnsConfig
from opentinker.config.algorithms import GRPOConfig, PolicyGradient, PPOConfig
from opentinker.config.arena import ArenaConfig
from opentinker.config.base import parse_config
from opentinker.config.coordination import CoordinatorConfig
from opentinker.config.job import InteractiveJobConfig, PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.config.preference import (
    BradleyTerryConfig,
    DPOConfig,
    PreferenceDataConfig,
    PreferenceEvaluationConfig,
    PreferenceLoss,
    PreferenceTrainingConfig,
)
from opentinker.config.rl import EvaluationConfig, RLTrainingConfig, StopConfig
from opentinker.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from opentinker.config.server import LoraConfig
from opentinker.config.sft import ChatDataConfig, SFTEvaluationConfig, SFTTrainingConfig
from opentinker.config.tasks import TasksConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.env.tasks import Split, TaskSource, task_source
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.rendering.supervised import LossOn
from opentinker.training.agents import AgentsLoop, check_agents
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.metrics import Row, summarize
from opentinker.training.own_run import OwnRun, Resume, digests, going_on, policy_places
from opentinker.training.preference import PreferenceLoop
from opentinker.training.preference_report import render_preference_report, summarize_preference
from opentinker.training.progress import Progress
from opentinker.training.recorder import Recorder, Summarize
from opentinker.training.report import Render, render_report
from opentinker.training.rl import RLLoop
from opentinker.training.run import Loop, check_arguments
from opentinker.training.sft import SFTLoop
from opentinker.training.sft_report import render_sft_report, summarize_sft
from opentinker.training.sinks.own import AskedSinks, OwnSinks, parse_sinks

L = TypeVar("L", bound=Loop)
Examples = Sequence[Mapping[str, Any]] | str | TasksConfig
"""Rows, or the name of a file or dataset."""


class _Trainer(ABC, Generic[L]):
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


def _hosted(job: Job) -> dict[str, Any]:
    """The fields of the config of what drives an interactive job.

    Raises:
        ConfigError: the job has no trainer.
    """
    if not isinstance(job.config, InteractiveJobConfig):
        raise ConfigError(f"a job of kind '{job.config.kind}' has no trainer", hint="use Client.create_job")
    return job.config.model_dump(exclude={"kind", "seed", "head", "critic", "checkpoints", "servers"})


def _training(seed: int, optimizer: AdamParams | None, stop: StopConfig | None, save_every: int) -> RLTrainingConfig:
    return RLTrainingConfig(seed=seed, optimizer=optimizer or AdamParams(), stop=stop or StopConfig(), save_every=save_every)


def _check_critic(job: Job, algorithm: PolicyGradient | None, server: str = "") -> None:
    """Raises: ConfigError when the algorithm needs a critic that a server's first policy has not; "" = the job's own."""
    if isinstance(algorithm, PPOConfig):
        wanted = LoraConfig(rank=algorithm.critic.rank, alpha=algorithm.critic.alpha)
        if (job.config.critic_on(server) if server else getattr(job.config, "critic", None)) != wanted:
            there = f" that server '{server}' began with" if server else ""
            form = f"rank {wanted.rank} and alpha {wanted.alpha:g}"
            critic = f"LoraConfig(rank={wanted.rank}, alpha={wanted.alpha:g})"
            argument = f'servers={{"{server}": {{"critic": {critic}}}}}' if server else f"critic={critic}"
            raise ConfigError(
                f"PPO with this config needs a critic of {form} beside the policy{there}",
                hint=f"create_job(..., {argument})",
            )


def _firsts(config: RLJobConfig) -> dict[str, str]:
    """By server, the agent whose policy it began with, if that learns; the others' are made with their critics."""
    firsts = {server: config.first_policy(server) for server in ("", *config.servers)}
    return {server: first for server, first in firsts.items() if first in config.learners}


class RLTrainer(_Trainer[RLLoop]):
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
        stop: StopConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """Tasks given here replace the environment's own; `opentinker.load_tasks` reads them from a file or dataset.
        `advantages` replaces the algorithm's: a function of the rewards per turn of each episode of each group, see
        `opentinker.algorithms.types`. `stop` says when the run ends early; a checkpoint is written every `save_every` steps, 0:
        none.

        With `resume` the run in `run_dir` goes on from its last checkpoint, in this job, whatever became of the one before:
        True = it has to have one; 'auto' = without one it begins. What determines the run has to be as it was.

        Raises:
            EnvironmentLoadError: the environment cannot be loaded.
            ConfigError: an argument is wrong, or another one than the run began with.
            CheckpointError: the run's checkpoint is gone.
            ConflictError: another process drives the run.
        """
        hosted = _hosted(job)
        _check_critic(job, algorithm)
        self._environment = load_environment(environment)
        check_arguments(self._environment, environment_args or {})
        name = environment if isinstance(environment, str) else environment.__name__
        config = parse_config(
            RLJobConfig,
            hosted
            | {
                "environment": EnvironmentConfig(name=name, args=environment_args or {}),
                "algorithm": (algorithm or GRPOConfig()).model_dump(),
                "sampling": sampling or SamplingConfig(),
                "rollout": rollout or RolloutConfig(),
                "evaluation": evaluation or EvaluationConfig(),
                "training": _training(seed, optimizer, stop, save_every),
                "sinks": parse_sinks(sinks),
            },
        )
        self._sources = _sources(train_tasks, held_out_tasks)
        self._given_advantages = None if advantages is None else user_advantages(advantages, "advantages")
        super().__init__(
            job,
            config,
            run_dir=run_dir,
            resume=resume,
            given={"train_tasks": train_tasks, "held_out_tasks": held_out_tasks},
            progress=progress,
            summarize=summarize,
            render=render_report,
        )
        self._rl_config = config

    async def _connect(self, policy: PolicyClient) -> RLLoop:
        return await RLLoop.connect(
            self._rl_config,
            self._environment,
            policy,
            self._recorder,
            sources=self._sources,
            advantages=self._given_advantages,
        )


class MultiAgentTrainer(_Trainer[AgentsLoop]):
    """Trains the policies of several agents, all on the servers of an interactive job, on an environment for several agents
    that runs in this process.

    `agents` says who plays which seat, by the names of the environment's agents; `AgentConfig()` is a policy of its own. The
    first agent that learns has the job's own policy, so the job has its adapter, and room for the others':

        job = client.create_job(base_model="smollm2-135m", lora=LoraConfig(rank=16), engine=EngineConfig(max_adapters=2))
        trainer = MultiAgentTrainer(job, "gomoku_duel", {"black": AgentConfig(), "white": AgentConfig()})
        trainer.fit(steps=50)

    Agents whose policies are on other servers of the job say so: `AgentConfig(server="second")`.

    Metrics, transcripts and report.html go to `run_dir` (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        environment: type[MultiAgentEnvironment] | str,
        agents: Mapping[str, AgentConfig],
        algorithm: PolicyGradient | None = None,
        *,
        environment_args: dict[str, Any] | None = None,
        train_tasks: TaskSource | Sequence[Any] | None = None,
        held_out_tasks: TaskSource | Sequence[Any] | None = None,
        optimizer: AdamParams | None = None,
        sampling: SamplingConfig | None = None,
        rollout: RolloutConfig | None = None,
        turns: TurnsConfig | None = None,
        arena: ArenaConfig | None = None,
        evaluation: EvaluationConfig | None = None,
        coordinator: CoordinatorConfig | None = None,
        stop: StopConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """Tasks given here replace the environment's own. `algorithm`, `optimizer` and `sampling` are those of agents that have
        none of their own. With `arena` they meet past versions and reference players, for which the job needs room. With a
        `coordinator`, agents that are not named here are driven by other processes, which join the same run. `stop` says when
        the run ends early. Checkpoints of all policies are written every `save_every` steps, on which the drivers of one run
        agree; 0: none. `resume` is as `RLTrainer`'s; not with past versions among the players (`pool`, `arena`).

        Raises: as `RLTrainer`.
        """
        self._environment = load_environment(environment)
        check_arguments(self._environment, environment_args or {})
        name = environment if isinstance(environment, str) else environment.__name__
        config = parse_config(
            RLJobConfig,
            _hosted(job)
            | {
                "servers": {name: server.model_dump(exclude={"critic"}) for name, server in job.config.further_servers.items()},
                "environment": EnvironmentConfig(name=name, args=environment_args or {}),
                "agents": {agent: config.model_dump() for agent, config in agents.items()},
                "algorithm": (algorithm or GRPOConfig()).model_dump(),
                "sampling": sampling or SamplingConfig(),
                "rollout": rollout or RolloutConfig(),
                "turns": turns or TurnsConfig(),
                "coordinator": coordinator,
                "arena": arena,
                "evaluation": evaluation or EvaluationConfig(),
                "training": _training(seed, optimizer, stop, save_every),
                "sinks": parse_sinks(sinks),
            },
        )
        check_agents(config, self._environment)
        for server, first in _firsts(config).items():
            _check_critic(job, config.algorithm_of(first), server)
        self._sources = _sources(train_tasks, held_out_tasks)
        self._agents_config = config
        super().__init__(
            job,
            config,
            run_dir=run_dir,
            resume=resume,
            given={"train_tasks": train_tasks, "held_out_tasks": held_out_tasks},
            progress=progress,
            summarize=summarize_agents,
            render=render_agents_report,
        )

    async def _connect(self, policy: PolicyClient) -> AgentsLoop:
        servers = {name: self._job.client_of(name) for name in self._agents_config.servers}
        return await AgentsLoop.connect(
            self._agents_config,
            self._environment,
            policy,
            self._recorder,
            sources=self._sources,
            servers=servers,
            steps=self._run.steps,
        )


class SFTTrainer(_Trainer[SFTLoop]):
    """Fine-tunes the policy of an interactive job on conversations.

    `train` and `held_out` are rows (see docs/sft.md), or the name of a file or dataset. Metrics and report.html go to `run_dir`
    (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        train: Examples,
        held_out: Examples | None = None,
        *,
        loss_on: LossOn = "assistant",
        batch_size: int = 16,
        optimizer: AdamParams | None = None,
        evaluation: SFTEvaluationConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """A checkpoint is written every `save_every` steps, 0: none. `resume` is as `RLTrainer`'s.

        Raises: ConfigError; with `resume` also CheckpointError, ConflictError.
        """
        self._rows, named = _examples(train, held_out)
        self._sft_config = SFTJobConfig(
            **_hosted(job),
            data=ChatDataConfig(**named, loss_on=loss_on),
            evaluation=evaluation or SFTEvaluationConfig(),
            training=SFTTrainingConfig(
                seed=seed,
                batch_size=batch_size,
                optimizer=optimizer or AdamParams(),
                decay="none",
                save_every=save_every,
            ),
            sinks=parse_sinks(sinks),
        )
        super().__init__(
            job,
            self._sft_config,
            run_dir=run_dir,
            resume=resume,
            given=self._rows,
            progress=progress,
            summarize=summarize_sft,
            render=render_sft_report,
        )

    async def _connect(self, policy: PolicyClient) -> SFTLoop:
        return await SFTLoop.connect(self._sft_config, policy, self._recorder, rows=self._rows)


class PreferenceTrainer(_Trainer[PreferenceLoop]):
    """Trains the policy of an interactive job on pairs of answers: `loss` is `DPO()`, `IPO()`, or, for a job with head
    'scalar', `BradleyTerry()`. What it is compared with is the policy as it is when training begins.

    `train` and `held_out` are rows (see docs/preference.md), or the name of a file or dataset. Metrics and report.html go to
    `run_dir` (default: runs/<job id>).
    """

    def __init__(
        self,
        job: Job,
        train: Examples,
        held_out: Examples | None = None,
        *,
        loss: PreferenceLoss | None = None,
        batch_size: int = 16,
        optimizer: AdamParams | None = None,
        evaluation: PreferenceEvaluationConfig | None = None,
        save_every: int = 0,
        seed: int = 0,
        sinks: AskedSinks = (),
        run_dir: str | Path | None = None,
        resume: Resume = False,
        progress: bool = True,
    ) -> None:
        """A checkpoint is written every `save_every` steps, 0: none. `resume` is as `RLTrainer`'s.

        Raises: ConfigError; with `resume` also CheckpointError, ConflictError.
        """
        loss = loss or DPOConfig()
        head = "scalar" if isinstance(loss, BradleyTerryConfig) else "lm"
        hosted = _hosted(job)
        if (mine := getattr(job.config, "head", head)) != head:
            raise ConfigError(
                f"the loss '{loss.kind}' trains a policy with head '{head}', this job's has head '{mine}'",
                hint=f"create_job(..., head='{head}')",
            )
        self._rows, named = _examples(train, held_out)
        training = PreferenceTrainingConfig(seed=seed, batch_size=batch_size, decay="none", save_every=save_every)
        if optimizer is not None:
            training = training.model_copy(update={"optimizer": optimizer})
        self._preference_config = PreferenceJobConfig(
            **hosted,
            data=PreferenceDataConfig(**named),
            loss=loss,
            evaluation=evaluation or PreferenceEvaluationConfig(),
            training=training,
            sinks=parse_sinks(sinks),
        )
        super().__init__(
            job,
            self._preference_config,
            run_dir=run_dir,
            resume=resume,
            given=self._rows,
            progress=progress,
            summarize=summarize_preference,
            render=render_preference_report,
        )

    async def _connect(self, policy: PolicyClient) -> PreferenceLoop:
        return await PreferenceLoop.connect(self._preference_config, policy, self._recorder, rows=self._rows, ends=False)


def _sources(train: TaskSource | Sequence[Any] | None, held_out: TaskSource | Sequence[Any] | None) -> dict[Split, TaskSource]:
    """Tasks that were given in place of the environment's own."""
    given: dict[Split, TaskSource | Sequence[Any] | None] = {"train": train, "held_out": held_out}
    return {split: task_source(tasks) for split, tasks in given.items() if tasks is not None}


def _examples(
    train: Examples, held_out: Examples | None
) -> tuple[dict[str, Sequence[Mapping[str, Any]]], dict[str, TasksConfig]]:
    """(the rows that were given, the config's fields), by `train` and `held_out`."""
    given = {name: rows for name, rows in {"train": train, "held_out": held_out}.items() if rows is not None}
    rows = {name: rows for name, rows in given.items() if not isinstance(rows, str | TasksConfig)}
    return rows, {name: _tasks(rows) for name, rows in given.items()}


def _tasks(rows: Examples) -> TasksConfig:
    if isinstance(rows, TasksConfig):
        return rows
    return TasksConfig(name=rows if isinstance(rows, str) else "given rows")
