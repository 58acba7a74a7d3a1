"""Reinforcement learning from the user's own process: of one policy, and of several agents."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
from opentinker.config.job import RLJobConfig
from opentinker.config.rl import EvaluationConfig, StopConfig
from opentinker.config.rollout import EnvironmentConfig, RolloutConfig, SamplingConfig
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Environment
from opentinker.env.load import load_environment
from opentinker.env.tasks import Split, TaskSource, task_source
from opentinker.errors import ConfigError
from opentinker.multiagent.environment import MultiAgentEnvironment
from opentinker.training.agents import AgentsLoop, check_agents
from opentinker.training.agents_report import render_agents_report, summarize_agents
from opentinker.training.metrics import summarize
from opentinker.training.own_run import Resume
from opentinker.training.own_trainer import OwnTrainer, hosted_fields
from opentinker.training.report import render_report
from opentinker.training.rl import RLLoop
from opentinker.training.run import check_arguments
from opentinker.training.sinks.own import AskedSinks, parse_sinks


def _training(seed: int, optimizer: AdamParams | None, stop: StopConfig | None, save_every: int) -> dict[str, Any]:
    return {"seed": seed, "optimizer": optimizer or AdamParams(), "stop": stop or StopConfig(), "save_every": save_every}


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


class RLTrainer(OwnTrainer[RLLoop]):
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
        hosted = hosted_fields(job)
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


class MultiAgentTrainer(OwnTrainer[AgentsLoop]):
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
            hosted_fields(job)
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


def _sources(train: TaskSource | Sequence[Any] | None, held_out: TaskSource | Sequence[Any] | None) -> dict[Split, TaskSource]:
    """Tasks that were given in place of the environment's own."""
    given: dict[Split, TaskSource | Sequence[Any] | None] = {"train": train, "held_out": held_out}
    return {split: task_source(tasks) for split, tasks in given.items() if tasks is not None}
