"""Drives one episode of several agents: each has its own machine, the barrier says who acts, the environment is one."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from opentinker.config.agents import TurnsConfig
from opentinker.config.rollout import RolloutConfig
from opentinker.env.environment import Action, Message, StepResult
from opentinker.env.processes import Session
from opentinker.env.threads import UserThreads
from opentinker.errors import DeadlineError, EnvironmentFailedError, OpenTinkerError, UnavailableError
from opentinker.multiagent.agent import Agent, Waiting
from opentinker.multiagent.coordination.seat import RemotePlayer, RemoteSeat
from opentinker.multiagent.players import Player, PolicyPlayer, SeedOfTurn
from opentinker.multiagent.shared import Earned, News, acted, gone, news_of
from opentinker.multiagent.spoken import spoken
from opentinker.multiagent.turns import Next, TurnBarrier
from opentinker.rollout.episode import CLOSE_TIMEOUT_S
from opentinker.rollout.machine import (
    Cancelled,
    DeadlinePassed,
    EpisodeEnded,
    Event,
    Failed,
    Finalize,
    Finalized,
    Finish,
    Generate,
    Reset,
    ResetDone,
    Step,
    StepDone,
    TurnGranted,
    TurnLost,
)
from opentinker.rollout.types import Episode, Termination

log = logging.getLogger(__name__)


class _CutError(Exception):
    """An agent's limits are reached, which ends the episode for all."""

    def __init__(self, termination: Termination) -> None:
        super().__init__(termination)
        self.termination = termination


class _AbortError(Exception):
    """The episode says nothing about any policy."""

    def __init__(self, event: DeadlinePassed | Failed) -> None:
        super().__init__(event.error)
        self.event = event


class GameDriver:
    """One episode. `request_id` is unique to it.

    An agent whose context is full, or who has no turns left, ends the episode for all as truncated. One whose turn takes too
    long, or whose policy fails, is dealt with as `turns.on_late` says.
    """

    def __init__(
        self,
        task: Any,
        players: Mapping[str, Player | RemotePlayer],
        barrier: TurnBarrier[Action],
        session: Session,
        threads: UserThreads,
        config: RolloutConfig,
        turns: TurnsConfig,
        request_id: str,
        seed_of_turn: SeedOfTurn,
    ) -> None:
        self._task = task
        self._barrier = barrier
        self._session = session
        self._threads = threads
        self._config = config
        self._turns = turns
        self._request_id = request_id
        self._seed_of_turn = seed_of_turn
        self._clock = asyncio.get_running_loop().time
        self._deadline = self._clock() + config.episode_timeout_s
        self._agents = {name: self._agent(name, player) for name, player in players.items()}
        self._acting: dict[str, asyncio.Task[Event | Action]] = {}
        self._begun = False
        """The environment has seen an action."""
        self._aborted: DeadlinePassed | Failed | None = None

    @property
    def aborted(self) -> DeadlinePassed | Failed | None:
        """Why the episode says nothing about anybody, if it does not."""
        return self._aborted

    def _agent(self, name: str, player: Player | RemotePlayer) -> Agent:
        if isinstance(player, RemotePlayer):
            return Agent(name, player, player.machine(self._task, self._config), player.seat)
        if not isinstance(player, PolicyPlayer):
            return Agent(name, player, None, None)
        sampler = player.sampler(self._config, f"{self._request_id}-{name}", lambda turn: self._seed_of_turn(name, turn))
        return Agent(name, player, player.machine(self._task, self._config), sampler)

    async def run(self, member: int) -> dict[str, Episode]:
        """Play to the end: the episode of each agent that a policy plays. The environment is closed however it ends.

        Raises:
            DeadlineError: an agent was too late, and `turns.on_late` is 'fail'.
            ProtocolError: the order of play cannot go on.
            OpenTinkerError: a policy's server refuses or is lost, which no other episode would survive either.
        """
        try:
            await self._play()
        except _AbortError as abort:
            self._aborted = abort.event
            for agent in self._agents.values():
                if agent.machine is not None and not agent.ended:
                    agent.machine.handle(abort.event)
        except asyncio.CancelledError:
            for agent in self._agents.values():
                if agent.machine is not None and not agent.ended:
                    agent.machine.handle(Cancelled())
            raise
        finally:
            await self._stop_acting()
            try:
                await self._session.close(CLOSE_TIMEOUT_S)
            except (EnvironmentFailedError, DeadlineError) as error:
                log.warning("environment_not_closed episode=%s error=%r", self._request_id, str(error))
        return {
            name: agent.episode(self._task, member, self._aborted, self._session.seconds)
            for name, agent in self._agents.items()
            if agent.machine is not None
        }

    async def _play(self) -> None:
        termination = Termination.DONE
        try:
            messages = await self._called(lambda left: self._session.reset(self._task, min(left, self._config.reset_timeout_s)))
            news = news_of(messages)
            present = await self._tell(news, actors=())
            following = self._barrier.start(present, news.next_agents)
            while not following.over:
                following = await self._follow(following)
        except _CutError as cut:
            termination = cut.termination
        await self._finish(termination)

    async def _follow(self, following: Next[Action]) -> Next[Action]:
        """Do what the barrier says, and tell it what came of that."""
        for name in following.grant:
            await self._grant(self._agents[name])
        if following.apply:
            actions = dict(following.apply)
            self._begun = True
            result = await self._step(acted(actions, together=following.together))
            news = news_of(result.observation, done=result.done)  # type: ignore[arg-type]
            present = await self._tell(news, actors=tuple(actions))
            return self._barrier.applied(present=present, named=news.next_agents, over=news.done)
        return await self._one_acts()

    async def _one_acts(self) -> Next[Action]:
        """Wait for the next action of whoever is running."""
        left = self._left()
        done, _ = await asyncio.wait(self._acting.values(), timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
        if not done or self._left() <= 0:  # whoever is late by that was not late by itself
            raise _AbortError(self._too_long())
        name = next(name for name, task in self._acting.items() if task in done)
        agent, said = self._agents[name], self._acting.pop(name).result()
        if isinstance(said, DeadlinePassed | Failed):
            return await self._late(agent, said)
        if agent.machine is not None:
            assert not isinstance(said, Action)
            request = agent.machine.handle(said)
            self._check_cut(agent)
            if isinstance(request, Finish):  # the sample was none
                return await self._late(agent, Failed(agent.machine.error))
            assert isinstance(request, Step)
            said = request.action
        assert isinstance(said, Action)
        agent.turns += 1
        return self._barrier.act(name, said)

    async def _grant(self, agent: Agent) -> None:
        """The agent's turn begins: what it is to be shown is shown, and it is asked."""
        waiting = agent.take()
        if agent.machine is None:
            agent.messages += waiting.shown
            self._acting[agent.name] = asyncio.ensure_future(self._act(agent))
            return
        images = await self._images(agent, waiting.shown)
        earned = waiting.earned
        granted = TurnGranted(waiting.shown, images, earned.reward, earned.components, waiting.metrics)
        request = agent.machine.handle(granted)
        if isinstance(request, Generate):
            self._acting[agent.name] = asyncio.ensure_future(self._sample(agent, request))
            return
        self._check_cut(agent)
        raise _AbortError(Failed(f"'{agent.name}': {agent.machine.error}"))

    def _check_cut(self, agent: Agent) -> None:
        """Raises: _CutError when a limit ended this agent's episode."""
        pending = None if agent.machine is None else agent.machine.pending
        if isinstance(pending, Finish | Finalize) and str(pending.termination).startswith("truncated"):
            raise _CutError(pending.termination)

    async def _sample(self, agent: Agent, request: Generate) -> Event:
        assert agent.sampler is not None
        timeout_s = min(self._left(), self._turns.turn_timeout_s, self._config.generation_timeout_s)
        return await agent.sampler.sample(request, agent.turns, timeout_s)

    async def _act(self, agent: Agent) -> Event | Action:
        """The action of a player that is no policy.

        Raises:
            OpenTinkerError: a model elsewhere refuses to be asked, which no other episode would survive either.
        """
        timeout_s = min(self._left(), self._turns.turn_timeout_s)
        if agent.sampler is not None:  # whoever speaks for it is in another process
            assert isinstance(agent.sampler, RemoteSeat)
            said = await agent.sampler.act(agent.messages, agent.turns, timeout_s)
        else:
            assert not isinstance(agent.player, PolicyPlayer | RemotePlayer)
            seed = self._seed_of_turn(agent.name, agent.turns)
            said = await spoken(agent.player, agent.messages, seed, self._threads, timeout_s)
        if isinstance(said, Action):
            agent.messages.append({"role": "assistant", "content": said.text})
        return said

    async def _late(self, agent: Agent, why: DeadlinePassed | Failed) -> Next[Action]:
        """The agent has no action for its turn."""
        text = f"'{agent.name}': {why.error}"
        match self._turns.on_late:
            case "fail":
                raise DeadlineError(f"the turn of {text}", hint="turns.on_late says what becomes of such an episode")
            case "skip" if not agent.ended:
                if agent.machine is not None:
                    agent.machine.handle(TurnLost())
                # The next turn is another one: it has a seed and a request of its own, and there are not endlessly many.
                agent.turns += 1
                if agent.turns >= self._config.max_turns:
                    raise _CutError(Termination.TRUNCATED_TURNS)
                return self._barrier.skip(agent.name)
            case "forfeit":
                if agent.machine is not None and not agent.ended:
                    agent.machine.handle(type(why)(text))
                result = await self._step(gone(agent.name))
                news = news_of(result.observation, done=result.done)  # type: ignore[arg-type]
                present = await self._tell(news, actors=())
                if news.done:
                    return Next(over=True)
                return self._barrier.leave(agent.name, present=present, named=news.next_agents)
        if agent.machine is not None and not agent.ended:
            agent.machine.handle(type(why)(text))
        raise _AbortError(type(why)(text))

    async def _step(self, action: Action) -> StepResult:
        result: StepResult = await self._called(lambda left: self._session.step(action, min(left, self._config.step_timeout_s)))
        return result

    async def _called(self, call: Callable[[float], Any]) -> Any:
        """What the environment answers.

        Raises:
            _AbortError: it failed, or it or the episode takes too long.
        """
        left = self._left()
        if left <= 0:
            raise _AbortError(self._too_long())
        try:
            return await call(left)
        except DeadlineError as error:
            raise _AbortError(DeadlinePassed(error.detail)) from error
        except (EnvironmentFailedError, UnavailableError) as error:
            raise _AbortError(Failed(str(error))) from error

    async def _tell(self, news: News, actors: tuple[str, ...]) -> tuple[str, ...]:
        """Give each agent its part of the news; who takes part from now on."""
        for name, agent in self._agents.items():
            shown, leaves = news.shown.get(name, ()), name in news.left
            told = Waiting(shown, news.earned.get(name, Earned()), news.metrics.get(name, {}))
            if agent.machine is None:
                agent.entered = (agent.entered or bool(shown)) and not leaves
                agent.waiting.shown += shown
                if leaves:
                    await self._end(agent, Termination.DONE)
                continue
            if name in actors:
                await self._answer(agent, told, ends=news.done or leaves)
            else:
                if shown and not agent.entered and not (agent.left and news.done):
                    await self._enter(agent, shown)
                    told.shown = ()
                agent.waiting = agent.waiting.then(told)
                if leaves and agent.entered:
                    await self._end(agent, Termination.DONE)
            agent.left = agent.left or leaves
            agent.entered = agent.entered and not leaves
        if not news.done:
            for agent in self._agents.values():
                self._check_cut(agent)
        return tuple(name for name, agent in self._agents.items() if agent.entered and not agent.ended)

    async def _answer(self, agent: Agent, told: Waiting, *, ends: bool) -> None:
        """The environment has answered to the agent's action. What it was told while it made up its mind comes before that."""
        assert agent.machine is not None
        before = agent.take()
        whole = before.then(told)
        images = {} if ends else await self._images(agent, whole.shown)
        reward, components = told.earned.reward, whole.earned.components
        agent.machine.handle(
            StepDone(reward, ends, whole.shown, whole.metrics, components, images, earlier_reward=before.earned.reward)
        )

    async def _enter(self, agent: Agent, shown: tuple[Message, ...]) -> None:
        assert agent.machine is not None
        if agent.left or agent.ended:
            raise _AbortError(Failed(f"'{agent.name}' has left and cannot come back: its trajectory has ended"))
        agent.entered = True
        images = await self._images(agent, shown)
        agent.machine.handle(ResetDone(shown, self._session.tools, self._session.finalizes, images))

    async def _end(self, agent: Agent, termination: Termination) -> None:
        """The episode is over for an agent who did not end it, or over for all after it had left."""
        acting = self._acting.pop(agent.name, None)
        if acting is not None:
            acting.cancel()
            [outcome] = await asyncio.gather(acting, return_exceptions=True)
            if isinstance(outcome, Exception) and not isinstance(outcome, OpenTinkerError):
                raise outcome
        machine = agent.machine
        if machine is None:
            return
        if isinstance(machine.pending, Reset):  # it never took part
            machine.handle(Cancelled())
        elif not isinstance(machine.pending, Finish) or machine.pending.termination.trains:
            told = agent.take()
            machine.handle(EpisodeEnded(told.shown, told.earned.reward, told.earned.components, told.metrics, termination))

    async def _finish(self, termination: Termination) -> None:
        """The episode is over for everybody: last rewards, then the end of each machine."""
        for agent in self._agents.values():
            await self._end(agent, termination)
        waiting = [a.machine for a in self._agents.values() if a.machine and isinstance(a.machine.pending, Finalize)]
        if not self._begun:
            for machine in waiting:
                machine.handle(Finalized(0.0))
        if not waiting or not self._begun:
            return
        result = await self._called(lambda left: self._session.finalize(min(left, self._config.step_timeout_s)))
        for name, agent in self._agents.items():
            if agent.machine is not None and isinstance(agent.machine.pending, Finalize):
                reward = result.components.get(name, 0.0)
                agent.machine.handle(Finalized(reward, {"last": reward} if reward else {}))

    async def _images(self, agent: Agent, shown: tuple[Message, ...]) -> Any:
        assert agent.sampler is not None
        return await self._called(lambda left: agent.sampler.images(shown, left))  # type: ignore[union-attr]

    async def _stop_acting(self) -> None:
        acting = list(self._acting.values())
        for task in acting:
            task.cancel()
        await asyncio.gather(*acting, return_exceptions=True)
        self._acting.clear()

    def _left(self) -> float:
        return self._deadline - self._clock()

    def _too_long(self) -> DeadlinePassed:
        awaited = ", ".join(self._barrier.running) or "the environment"
        return DeadlinePassed(f"the episode took longer than {self._config.episode_timeout_s:.3g} s; awaited: {awaited}")
