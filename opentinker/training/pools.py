"""The seats that past versions play: members are checkpoints of a policy, and slots on its server hold those that are drawn."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from opentinker.config.opponents import PoolConfig
from opentinker.errors import OpenTinkerError
from opentinker.multiagent.games import Groups
from opentinker.multiagent.league import Member, Pool, results
from opentinker.multiagent.players import DrawnPlayers, PolicyPlayer
from opentinker.rollout.seeds import derive_seed
from opentinker.training.metrics import Row

log = logging.getLogger(__name__)
LIVES = 3
"""Spans between two of the job's checkpoints whose members are kept on disk beyond those of the pool: those since the last one,
those since the one before, which a run may have to go on from, and those that an earlier life of the run left."""


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Errors of ours inside say of what they are."""
    try:
        yield
    except OpenTinkerError as error:
        raise type(error)(f"{what}: {error.detail}", hint=error.hint) from error


class SlotPolicy(Protocol):
    """What a pool needs of a policy in a slot."""

    async def load_weights(self, name: str, *, policy: str = "") -> dict[str, Any]: ...


class SavedPolicy(Protocol):
    """What a pool needs of the policy whose past versions play."""

    policy: str

    async def save(
        self, name: str, *, driver: Mapping[str, Any] | None = None, keep_last: int | None = None
    ) -> dict[str, Any]: ...


PlayerOf = Callable[[Any, float | None], PolicyPlayer]
"""(a policy, an evaluation's temperature or None) -> its player."""


class PoolSeat:
    """One seat that is played by past versions of `source`. `slots` are policies beside it, whose weights are replaced when a
    member is drawn that none of them holds: memory is bounded by them, disk by the pool's size."""

    def __init__(
        self,
        seat: str,
        config: PoolConfig,
        source: SavedPolicy,
        slots: Sequence[SlotPolicy],
        player: PlayerOf,
        *,
        seed: int,
        save_every: int,
    ) -> None:
        self.pool = Pool()
        self._seat = seat
        self._config = config
        self._source = source
        self._slots = list(slots)
        self._held: list[str] = [""] * len(slots)
        """The member that each slot holds."""
        self._used: list[int] = [0] * len(slots)
        self._clock = 0
        self._player = player
        self._seed = seed
        spans = math.ceil(save_every / config.every) if save_every else 0
        self._keep_last = config.size + LIVES * spans
        self._drawn: list[Member] = []

    async def players(self, step: int, groups: int, first_index: int = 0) -> DrawnPlayers:
        """Who plays the groups of a training step from `first_index` on. The first call of a run lets the version of now enter.

        Raises:
            CheckpointError: a member's checkpoint is missing or corrupt.
        """
        await self._begin(step - 1)
        drawn = self.pool.draw(self._config, groups, derive_seed(self._seed, "pool", self._seat, step, first_index))
        self._drawn = [*self._drawn[:first_index], *drawn]
        return await self._seated(drawn, None)

    async def reference(self, tasks: int, temperature: float, step: int) -> DrawnPlayers:
        """Who plays each held-out task: the oldest member in all of them, so that evaluations compare.

        Raises: as `players`.
        """
        await self._begin(step)
        return await self._seated([self.pool.members[0]] * tasks, temperature)

    def record(self, groups: Groups, learners: Sequence[str]) -> Row:
        """Count the games of the step that `players` was called for; what the step's row tells of the pool."""
        games: dict[str, list[float]] = {}
        for place, member in enumerate(self._drawn):
            against = {name: groups[name][place].episodes for name in learners if name != self._seat}
            found = results(against, groups[self._seat][place].episodes)
            games.setdefault(member.checkpoint, []).extend(found)
        before = {member.checkpoint: member for member in self.pool.members}
        for checkpoint in sorted(games):
            self.pool = self.pool.played(checkpoint, games[checkpoint])
        scores = [result for found in games.values() for result in found]
        return {
            "members": len(self.pool.members),
            "score": math.fsum(scores) / len(scores) if scores else None,
            "drawn": {str(before[checkpoint].step): len(found) for checkpoint, found in sorted(games.items())},
            "win_rates": {
                str(member.step): member.loss_rate(self._config.prior_games) for member in self.pool.members if member.games
            },
        }

    async def after(self, step: int) -> None:
        """The updates of a step are published: its version enters if it is time."""
        if step % self._config.every == 0:
            await self._enter(step)

    def to_json(self) -> list[dict[str, Any]]:
        return self.pool.to_json()

    def restore(self, state: Any) -> None:
        """Go on with what `to_json` gave.

        Raises:
            CheckpointError: it is something else.
        """
        self.pool = Pool.from_json(state)

    async def _begin(self, step: int) -> None:
        if not self.pool.members:
            await self._enter(step)

    async def _enter(self, step: int) -> None:
        first = not self.pool.members and self._config.size > 1
        # What has no number at its end is of no family, so that no later save deletes it.
        name = f"pool-{self._seat}-first" if first else f"pool-{self._seat}-{step:06d}"
        saved = await self._source.save(name, keep_last=None if first else self._keep_last)
        self.pool = self.pool.enter(Member(f"{saved['name']}@{saved['version']}", step), self._config.size)
        log.info("event=pool_entered seat=%s step=%d members=%d", self._seat, step, len(self.pool.members))

    async def _seated(self, members: Sequence[Member], temperature: float | None) -> DrawnPlayers:
        wanted = list(dict.fromkeys(member.checkpoint for member in members))
        for checkpoint in wanted:
            await self._hold(checkpoint, wanted)
        players = {name: self._player(self._slots[self._held.index(name)], temperature) for name in wanted}
        return DrawnPlayers([players[member.checkpoint] for member in members])

    async def _hold(self, checkpoint: str, wanted: Sequence[str]) -> None:
        """Have a slot that holds the member: the one that was used least lately of those that hold nobody who is wanted."""
        self._clock += 1
        if checkpoint not in self._held:
            free = [place for place, held in enumerate(self._held) if held not in wanted]
            place = min(free, key=self._used.__getitem__)
            self._held[place] = ""  # a load that fails leaves nobody
            with naming(f"agents.{self._seat}.pool"):
                await self._slots[place].load_weights(checkpoint, policy=self._source.policy)
            self._held[place] = checkpoint
        self._used[self._held.index(checkpoint)] = self._clock
