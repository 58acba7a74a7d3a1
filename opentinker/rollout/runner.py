"""Runs the episodes of a training step or an evaluation: all members of all groups at once, up to a limit."""

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from opentinker.client.messages import SamplingParams
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Environment
from opentinker.env.processes import SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.rendering.renderer import ConversationRenderer
from opentinker.rollout.episode import EpisodeDriver
from opentinker.rollout.machine import EpisodeMachine
from opentinker.rollout.sampler import Sampler
from opentinker.rollout.seeds import derive_seed
from opentinker.rollout.types import Episode, GenerateFn, Group, UploadFn

OnEpisode = Callable[[Episode], None]


@dataclass(frozen=True)
class _Batch:
    """What the episodes of one call to `run` share. `nonce` keeps their request ids apart from every other call's."""

    step: int
    nonce: str
    threads: UserThreads
    slots: asyncio.Semaphore
    on_episode: OnEpisode | None


class RolloutRunner:
    """Plays episodes with one policy. Seeds derive from (run seed, step, task, member, turn), so that their order is free.

    `make_environment` is the class, or a `functools.partial` of it, whose `execution` says where it runs. Processes are kept
    from one `run` to the next; they end with `close`, or with the event loop.
    """

    def __init__(
        self,
        renderer: ConversationRenderer,
        generate: GenerateFn,
        make_environment: Callable[[], Environment],
        config: RolloutConfig,
        sampling: SamplingConfig,
        max_model_len: int,
        run_seed: int,
        upload: UploadFn | None = None,
    ) -> None:
        self._renderer = renderer
        self._generate = generate
        self._sessions = SessionFactory(make_environment)
        self._config = config
        self._sampling = SamplingParams(**sampling.model_dump(), stop_token_ids=renderer.stop_token_ids)
        self._max_model_len = max_model_len
        self._run_seed = run_seed
        self._upload = upload

    async def run(
        self,
        tasks: Sequence[Any],
        group_size: int,
        step: int,
        on_episode: OnEpisode | None = None,
        *,
        first_index: int = 0,
    ) -> list[Group]:
        """One group of `group_size` episodes per task, in the order of the tasks. Their indices count from `first_index`, so
        that tasks drawn later for the same step get other seeds.

        An episode that ends in an error is run anew, up to `member_retries` times, and then missing from its group; the others
        do not wait for it. `on_episode` sees every finished episode, failed ones too, as it ends. However this returns, no
        episode is left running.

        Raises:
            OpenTinkerError: the policy's server refuses or is lost.
        """
        groups = [Group(task, index) for index, task in enumerate(tasks, first_index)]
        with UserThreads() as threads:
            slots = asyncio.Semaphore(self._config.max_concurrent_episodes)
            batch = _Batch(step, uuid.uuid4().hex[:16], threads, slots, on_episode)
            members = [
                asyncio.ensure_future(self._run_member(group, member, batch))
                for group in groups
                for member in range(group_size)
            ]
            try:
                await asyncio.gather(*members)
            finally:
                for running in members:
                    if not running.cancelling():  # a second cancellation would interrupt the closing of environments
                        running.cancel()
                await asyncio.gather(*members, return_exceptions=True)
        for group in groups:
            group.episodes.sort(key=lambda episode: episode.member)
        return groups

    async def close(self) -> None:
        """End the processes of the environments, if they have any."""
        await self._sessions.close()

    async def _run_member(self, group: Group, member: int, batch: _Batch) -> None:
        for attempt in range(self._config.member_retries + 1):
            async with batch.slots:
                episode = await self._run_episode(group, member, attempt, batch)
            if batch.on_episode is not None:
                batch.on_episode(episode)
            if not episode.termination.is_error:
                group.episodes.append(episode)
                return
            group.failures.append(episode)
            if attempt < self._config.member_retries:
                group.replaced += 1
        group.dropped += 1

    async def _run_episode(self, group: Group, member: int, attempt: int, batch: _Batch) -> Episode:
        machine = EpisodeMachine(
            self._renderer,
            group.task,
            max_turns=self._config.max_turns,
            max_action_tokens=self._sampling.max_tokens,
            max_model_len=self._max_model_len,
        )
        # A replaced member draws other actions: with the same ones a deterministic environment would fail again.
        identity: list[int | str] = [batch.step, group.index, member, *([f"attempt {attempt}"] if attempt else [])]
        request_id = f"{batch.nonce}-{group.index}-{member}-{attempt}"
        sampler = Sampler(
            self._generate,
            self._config,
            self._sampling,
            request_id,
            seed_of_turn=lambda turn: derive_seed(self._run_seed, *identity, turn),
            upload=self._upload,
        )
        driver = EpisodeDriver(machine, self._sessions.session(batch.threads), sampler, self._config, request_id)
        return await driver.run(member)
