"""The driver loop of several agents: games -> each agent's groups -> all updates side by side -> the next games.

Phases are in step: no agent updates before all games of an iteration are over, and no game begins before all updates are
published. Policies are on one server or several; with a `Member` other agents are driven by other processes, and the phases and
games are those of all.
"""

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from opentinker.algorithms.select import advantage_function
from opentinker.client.messages import AdamParams
from opentinker.config.algorithms import PPOConfig
from opentinker.config.job import RLJobConfig
from opentinker.config.rollout import SamplingConfig
from opentinker.config.server import LoraConfig
from opentinker.env.environment import Environment
from opentinker.env.tasks import Split, TaskSource
from opentinker.errors import ConfigError, EpisodesFailedError, OpenTinkerError
from opentinker.multiagent.coordination.member import Member, leaving
from opentinker.multiagent.games import Groups
from opentinker.multiagent.phases import Moment, Phase, PhaseBarrier
from opentinker.multiagent.players import PolicyPlayer, SeatPlayer
from opentinker.multiagent.runner import GameRunner, check_players
from opentinker.multiagent.seats import seats_of
from opentinker.multiagent.shared import SharedEnvironment
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rollout.types import Group
from opentinker.training.agents_watch import AgentsWatch
from opentinker.training.arena import ARENA_SEED, Arena, Entrant, reference_players
from opentinker.training.arena_report import arena_files
from opentinker.training.driver_state import DriverState
from opentinker.training.evaluation import summarize_groups
from opentinker.training.homes import Home, check_alive, find_homes, lost_with
from opentinker.training.learner import Learned, Learner
from opentinker.training.loop import EpisodesLoop
from opentinker.training.meeting import join_run, runners
from opentinker.training.metrics import Row, Timing, commonest_failure, evaluation_row, step_row
from opentinker.training.opponents import Opponents, open_pools, take_starts
from opentinker.training.policy_player import policy_player
from opentinker.training.recorder import Recorder
from opentinker.training.rl import EVALUATION_TRANSCRIPTS, TrainablePolicy
from opentinker.training.schedule import BEST, kept, scheduled
from opentinker.training.tasks import JobTasks
from opentinker.training.transcripts import images_of, pick_transcripts, transcript_row
from opentinker.training.updates import together


class PlayedPolicy(TrainablePolicy, Protocol):
    """What a run of several agents needs of a `PolicyClient`: it can make others beside itself."""

    policy: str

    async def create_policy(self, lora: Any, *, name: str = "", seed: int = 0, critic: LoraConfig | None = None) -> Any: ...

    async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]: ...


class AgentsLoop(EpisodesLoop):
    """Several agents learn from the episodes that they play together. `policies` are by agent; the first is the job's own,
    whose checkpoints are written last, so that those of the others are there when it is."""

    def __init__(
        self,
        config: RLJobConfig,
        environment: type[Environment],
        policies: Mapping[str, TrainablePolicy],
        renderer: ConversationRenderer,
        max_model_len: int,
        recorder: Recorder,
        base_dir: Path | None = None,
        sources: Mapping[Split, TaskSource] | None = None,
        member: Member | None = None,
        homes: Mapping[str, Home] | None = None,
    ) -> None:
        """`homes` are of the agents whose prompts are made otherwise: those whose server has another model."""
        tasks = JobTasks(
            environment, config.environment, timeout_s=config.rollout.reset_timeout_s, base_dir=base_dir, sources=sources
        )
        super().__init__(config, tasks, recorder, config.learners)
        self.phases = PhaseBarrier(list(policies))
        self._policies = dict(policies)
        self._renderer = renderer
        self._max_model_len = max_model_len
        self._homes = homes or {}
        self._learners = {
            name: Learner(
                policies[name],
                algorithm,
                _sampling(config, name),
                None if isinstance(algorithm, PPOConfig) else advantage_function(algorithm, base_dir),
                config.training.steps,
            )
            for name in config.learners
            for algorithm in [config.algorithm_of(name)]
        }
        judged = config.evaluation.agent
        player = (config.agents[judged].policy or judged) if judged else ""
        watched = player if player in self._learners else ""
        self._watch = AgentsWatch(config.training.stop, config.evaluation, config.learners, watched)
        self._group_size = next(iter(self._learners.values())).algorithm.group_size
        self._opponents = Opponents(config.agents, base_dir)
        seats = seats_of(environment, config.environment.args)
        if seats is None:
            raise _for_one(environment)
        self._member = member
        self._start_saved = False
        """Whether there is a checkpoint of step 0."""
        self._recorded_at: int | None = None
        """The step whose evaluation was recorded before a restart, and is played again for the others."""
        self._runner, self._evaluator = runners(config, environment, seats, member)
        if member is None:
            check_players(config.agents, seats.agents)
        self._arena: Arena | None = None
        if config.arena is not None:
            # It must not reuse the seeds of training, nor those of evaluation.
            seed = config.training.seed + ARENA_SEED
            make = partial(environment, **config.environment.args)
            games = GameRunner(make, seats, config.rollout, config.turns, seed)
            references = reference_players(config.arena.references, environment, config.agents, base_dir)
            draw = partial(self._tasks.standing, seed, config.arena.tasks)
            fixed, at_once = self._opponents.fixed, config.rollout.max_concurrent_episodes
            self._arena = Arena(config.arena, games, seats.agents, self._entrants(), references, fixed, draw, at_once)

    @classmethod
    async def connect(
        cls,
        config: RLJobConfig,
        environment: type[Environment],
        policy: PlayedPolicy,
        recorder: Recorder,
        base_dir: Path | None = None,
        sources: Mapping[Split, TaskSource] | None = None,
        servers: Mapping[str, PlayedPolicy] | None = None,
        steps: Sequence[int] = (),
    ) -> "AgentsLoop":
        """A loop on servers that run: makes the policies that are not there yet, asks for the tokenizers and the limits.
        `policy` is what the job's own server began with, `servers` what its others did. Where other processes drive other
        agents, it joins them; `steps` are those of which it has checkpoints. Without any it begins anew.

        Raises:
            ConfigError: the environment is for one agent, or its agents are not those of the config.
            ConflictError: the drivers of the agents do not agree on something.
            RenderingError: a model has no usable chat template.
        """
        await asyncio.to_thread(check_agents, config, environment)  # it may ask the environment's server
        member = await join_run(config, environment, steps or (0,))
        async with leaving(member):
            policies, homes = await find_homes(config, policy, servers or {})
            await take_starts(config.agents, policies)
            own = homes[config.policies[0]]
            loop = cls(
                config, environment, policies, own.renderer, own.max_model_len, recorder, base_dir, sources, member, homes
            )
            loop._opponents.pools = await open_pools(config, policies, loop._plays)
            loop._start_saved = 0 in steps
            if member is not None:
                loop.steps_done = await member.started()
            return loop

    async def resume(self, step: int) -> None:
        """Go on after the checkpoints of `step`, or of an earlier one on which all drivers agreed; 0 needs none on
        servers that have just begun.

        Raises:
            CheckpointError: a part of one is missing, corrupt, or of another run.
        """
        async with leaving(self._member):
            if self._member is not None and self.steps_done != step:
                step = self.steps_done
                self._recorder.take_back(step)
            await self._resume(step)

    async def _resume(self, step: int) -> None:
        self.steps_done = step
        self.phases = PhaseBarrier(list(self._policies), start=Moment(step, Phase.ROLLOUT))
        if not step and not self._start_saved:
            return
        where = self._recorder.checkpoints.where
        loaded = await asyncio.gather(*(policy.load(where(step, name)) for name, policy in self._policies.items()))
        state = DriverState.from_json(loaded[0].get("driver"), step, self.config.training.seed)
        if state is not None:
            self._task_position, self._evaluated_at = state.task_position, state.evaluated_at
            self._fruitless, self._stopping.stopped = state.fruitless, state.stopped
            self._stopping.reductions |= state.agents.get("reductions", {})
            self._opponents.restore(state.agents.get("pools", {}))
            self._watch.restore(state.watch)
            later = state.later(self._recorder.rows)
            if self._arena is not None:
                self._arena.restore(state.agents.get("arena", {}), later)
            for row in later:
                self._watch.row(row)
                if row["kind"] == "agents_evaluation":
                    self._evaluated_at = row["step"]
                elif row["kind"] == "stopping":
                    self._stopping.heard(row)
        if self._member is not None and self._evaluated_at == step:
            self._evaluated_at, self._recorded_at = None, step  # another driver may have died before it recorded its own

    async def run(self, steps: int) -> None:
        """As every loop's. What ends it is what the drivers of other agents are told, if there are any.

        Raises:
            AgentLostError: another driver is lost.
            AgentStuckError: a server's updates do not end while another's have.
            EpisodesFailedError: no episode was usable for several steps in a row; the detail names the commonest cause.
        """
        async with leaving(self._member):
            if self._member is not None and self.config.training.save_every and not (self.steps_done or self._start_saved):
                # Where another driver dies before it has a checkpoint, this one's server knows no other way back.
                await self._save_step()
                self._start_saved = True
            await super().run(steps)

    async def step(self) -> Row:
        """One iteration: all games, then all updates."""
        config, number = self.config, self.steps_done + 1
        moment = Moment(self.steps_done, Phase.ROLLOUT)
        started = time.monotonic()
        groups: Groups = {}

        async def play(tasks: Sequence[Any], first_index: int) -> None:
            players = self._players() | await self._opponents.drawn(number, len(tasks), first_index)
            found = await self._runner.run(players, tasks, self._group_size, number, first_index=first_index)
            for agent, of_agent in found.items():
                groups.setdefault(agent, []).extend(of_agent)

        rounds = max(learner.algorithm.max_resamples for learner in self._learners.values())
        position = await self._collect(rounds, play, lambda round_: self._missing(groups, round_))
        sampled = time.monotonic()
        await self._finish(moment)
        if self._took_part(groups):
            await self._check_usable([group for name in self._learners for group in self._experience(name, groups)])
        assert all(self.phases.may(name, moment.next) for name in self._policies), "no update before all games are over"
        optimizers = {name: self._optimizer(name, number) for name in self._learners}
        updates = {name: self._update(name, groups, optimizers[name], number) for name in self._learners}
        servers = {name: config.agents[name].server for name in self._learners}
        learned = await together(updates, servers, moment.next, config.turns.barrier_timeout_s)
        ended = time.monotonic()
        pools = self._opponents.record(groups, list(self._learners))
        await self._opponents.after(number)
        await self._finish(moment.next)
        self._task_position = position
        rows = {
            name: step_row(
                number,
                self._experience(name, groups),
                result.batch,
                result.trained,
                Timing(sampled - started, ended - sampled - result.publish_s, result.publish_s, ended - started),
                learning_rate=optimizers[name].learning_rate,
                task_position=self._task_position,
            )
            for name, result in learned.items()
        }
        row = agents_row("agents_step", number, rows, task_position=self._task_position, step_s=ended - started, **pools)
        self._recorder.row(row)
        for name, of_agent in groups.items():
            for episode in pick_transcripts(of_agent, config.training.transcripts_per_step):
                record = transcript_row(episode, step=number, phase="train") | {"agent": name}
                self._recorder.transcript(record, images_of(episode))
        self.steps_done = number
        await self._act(*self._watch.row(row))
        return row

    def _missing(self, groups: Groups, round_: int) -> int:
        """Tasks that are drawn besides in a round of resampling. A game counts for all: so there are as many as whoever still
        resamples lacks most, and everybody learns from all of them."""
        wanted, lacking = self.config.rollout.groups_per_step, [0]
        for name, learner in self._learners.items():
            if learner.algorithm.max_resamples >= round_:
                seats = len(self._seats_of(name))
                teaching = sum(map(learner.teaches, self._experience(name, groups)))
                lacking.append(math.ceil((wanted * seats - teaching) / seats))
        return max(lacking)

    async def evaluate(self) -> Row | None:
        """All agents play the held-out tasks; None if the environment has none, or the row is there already: it was recorded
        before a restart, and other drivers need the games."""
        if not (tasks := await self._held_out_tasks()):
            return None
        started, evaluation = time.monotonic(), self.config.evaluation
        players = self._players(evaluation.temperature)
        players |= await self._opponents.reference(len(tasks), evaluation.temperature, self.steps_done)
        groups = await self._evaluator.run(players, tasks, evaluation.samples_per_task, self.steps_done)
        if self._recorded_at == self.steps_done:
            self._evaluated_at, self._recorded_at = self.steps_done, None
            return None
        rows: dict[str, Row] = {}
        for name, of_agent in groups.items():
            result = summarize_groups(of_agent, seed=self.config.training.seed, pass_at=evaluation.pass_at)
            if result is None and not any(group.failures for group in of_agent):
                continue  # it never took part
            if result is None:
                await self._check_server()
                raise EpisodesFailedError(f"no episode of '{name}' was usable in evaluation: {commonest_failure(of_agent)}")
            rows[name] = evaluation_row(self.steps_done, result, of_agent, seconds=time.monotonic() - started)
            for group in of_agent[:EVALUATION_TRANSCRIPTS]:
                for episode in (group.episodes or group.failures)[:1]:
                    record = transcript_row(episode, step=self.steps_done, phase="evaluation") | {"agent": name}
                    self._recorder.transcript(record, images_of(episode))
        row = agents_row("agents_evaluation", self.steps_done, rows, evaluation_s=time.monotonic() - started)
        self._recorder.row(row)
        self._evaluated_at = self.steps_done
        self._watch.checked(row)
        if evaluation.keep_best and self._watch.improves(row):
            await self.save(BEST)
        await self._act(*self._watch.row(row))
        return row

    async def save(self, name: str) -> dict[str, Any]:
        """Checkpoints of all policies under one name; what the job's own says of its checkpoint, and the `versions` of all."""
        state = DriverState(
            step=self.steps_done,
            seed=self.config.training.seed,
            task_position=self._task_position,
            rows=len(self._recorder.rows),
            evaluated_at=self._evaluated_at,
            fruitless=self._fruitless,
            stopped=self.stopped,
            watch=self._watch.state(),
            agents={
                "reductions": self._stopping.reductions,
                "pools": self._opponents.to_json(),
                **({} if self._arena is None else {"arena": self._arena.state()}),
            },
            config=self.config.model_dump(mode="json"),
        ).to_json()
        keep_last = kept(self.config.training, name, self._recorder.checkpoints.spare)
        own, *others = self._policies.values()
        # One more of the others': a run that dies before the job's own is written goes on from the checkpoints before. So does
        # one whose other drivers die before theirs are.
        spare = None if keep_last is None else keep_last + 1
        saved = await asyncio.gather(*(policy.save(name, driver=state, keep_last=spare) for policy in others))
        last = await own.save(name, driver=state, keep_last=keep_last if self._member is None else spare)
        return {
            **last,
            "versions": {agent: each["version"] for agent, each in zip(self._policies, [last, *saved], strict=True)},
        }

    async def close(self) -> None:
        """End what the environments left running, and leave the others, if there are any elsewhere."""
        if self._member is not None:
            await self._member.leave()
        await self._runner.close()
        await self._evaluator.close()
        await self._opponents.close()
        if self._arena is not None:
            await self._arena.close()

    async def _update(self, name: str, groups: Groups, optimizer: AdamParams, step: int) -> Learned:
        try:
            return await self._learners[name].learn(self._experience(name, groups), optimizer, step)
        except OpenTinkerError as error:
            raise type(error)(f"the update of '{name}': {error.detail}", hint=error.hint) from error

    def _experience(self, name: str, groups: Groups) -> list[Group]:
        """What the policy of an agent learns from: the agent's groups, and those of the agents that share it."""
        return [group for agent in self._seats_of(name) for group in groups[agent]]

    def _took_part(self, groups: Groups) -> bool:
        """Whether the learners were in any game. Those that were in none, because tasks do not need them, have not failed; but
        somebody must have been in one, if all who play are here."""
        learning = [group for name in self._learners for group in self._experience(name, groups)]
        anybody = [group for of_agent in groups.values() for group in of_agent]
        played = [any(group.episodes or group.failures for group in some) for some in (learning, anybody)]
        return played[0] or (self._member is None and not played[1])

    def _seats_of(self, name: str) -> list[str]:
        """Where the policy of an agent plays."""
        return [name, *(other for other, agent in self.config.agents.items() if agent.policy == name)]

    def _optimizer(self, name: str, step: int) -> AdamParams:
        training = self.config.training
        own = self.config.agents[name].optimizer
        scale = self._stopping.scale(name)
        return scheduled(training if own is None else training.model_copy(update={"optimizer": own}), step, scale)

    async def _leaves_others(self) -> bool:
        if self._member is None:
            return False
        await self._member.leave(stopped=self.stopped)
        return True

    async def _finish(self, moment: Moment) -> None:
        """All policies here have finished a phase; wait for those elsewhere."""
        for name in self._policies:
            self.phases.finish(name, moment, time.monotonic())
        if self._member is not None:
            await self._member.finish(moment)

    async def _check_server(self) -> None:
        await check_alive(self.config, self._policies)

    def _players(self, temperature: float | None = None) -> dict[str, SeatPlayer]:
        """Who plays which seat, but for those of past versions; with the temperature of an evaluation, if it is one."""
        seats = self.config.agents.items()
        own = {name: self._player(agent.policy or name, temperature) for name, agent in seats if not agent.elsewhere}
        return {**own, **self._opponents.fixed}

    def _player(self, name: str, temperature: float | None) -> PolicyPlayer:
        trains = self.config.agents[name].learns
        return self._plays(name, self._policies[name], _sampling(self.config, name), temperature, trains=trains)

    def _plays(
        self, name: str, policy: TrainablePolicy, sampling: SamplingConfig, temperature: float | None, *, trains: bool = False
    ) -> PolicyPlayer:
        """A policy on the server of an agent's, that agent's or a past version."""
        return policy_player(
            policy,
            self._homes.get(name) or Home(self._renderer, self._max_model_len),
            sampling,
            deadline_s=self.config.rollout.generation_timeout_s,
            temperature=temperature,
            trains=trains,
            within=partial(lost_with, self.config, name),
        )

    async def _compare(self, *, ends: bool = False) -> None:
        step, arena = self.steps_done, self._arena
        if arena is not None and arena.due(step, ends=ends):
            self._recorder.row(await arena.meet(step))
            self._recorder.files(arena_files(self._recorder.rows))

    def _entrants(self) -> list[Entrant]:
        """The policies that others are compared with; where past versions of one play, it plays itself."""
        pools: dict[str, list[str]] = {}
        for seat, agent in self.config.agents.items():
            if agent.pool is not None:
                pools.setdefault(agent.pool.of, []).append(seat)
        return [
            Entrant(
                name,
                policy,
                tuple(dict.fromkeys([*self._seats_of(name), *pools.get(name, ())])),
                partial(
                    self._plays, name, sampling=_sampling(self.config, name), temperature=self.config.evaluation.temperature
                ),
                self.config.lora_of(name),
                past=name in self._learners,
            )
            for name, policy in self._policies.items()
        ]


def check_agents(config: RLJobConfig, environment: type[Environment]) -> None:
    """Whether the environment's agents are those of the config. A server of environments is asked, if the config has agents.

    Raises:
        ConfigError: they are not, or one of the two knows of none.
        OpenTinkerError: what the environment's server reports; UnavailableError when it does not answer.
    """
    if not config.agents and not issubclass(environment, SharedEnvironment):
        return
    seats = seats_of(environment, config.environment.args)
    if seats is None:
        raise _for_one(environment)
    there = ", ".join(seats.agents)
    missing = [name for name in seats.agents if name not in config.agents]
    if missing and config.coordinator is None:
        raise ConfigError(
            f"agents: nobody plays '{missing[0]}' of {environment.__name__}",
            hint=f"its agents are {there}; agents.{missing[0]}: {{}} gives it a policy of its own, and with `coordinator` "
            "another process may drive it",
        )
    if unknown := [name for name in config.agents if name not in seats.agents]:
        raise ConfigError(f"agents: {environment.__name__} has no agent '{unknown[0]}'", hint=f"its agents are {there}")


def _for_one(environment: type[Environment]) -> ConfigError:
    return ConfigError(
        f"agents: {environment.__name__} is an environment for one agent",
        hint="derive it from opentinker.MultiAgentEnvironment, or leave agents out",
    )


def agents_row(kind: str, step: int, rows: Mapping[str, Row], **fields: Any) -> Row:
    """One row for all agents: what each would have alone is below its name."""
    rewards = [row["reward_mean"] for row in rows.values() if row["reward_mean"] is not None]
    inner = {name: {k: v for k, v in row.items() if k not in ("kind", "step")} for name, row in rows.items()}
    mean = sum(rewards) / len(rewards) if rewards else None
    sampled = sum(row["tokens_sampled"] for row in rows.values())
    errors = max((row["errors"] for row in rows.values()), default=0)
    return {
        "kind": kind,
        "step": step,
        "reward_mean": mean,
        "tokens_sampled": sampled,
        "errors": errors,
        **fields,
        "agents": inner,
    }


def _sampling(config: RLJobConfig, name: str) -> SamplingConfig:
    return config.agents[name].sampling or config.sampling
