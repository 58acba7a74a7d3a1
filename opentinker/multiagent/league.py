"""Which past version of a policy plays which games. Pure: no I/O, no clock, and no randomness but what a seed gives."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from opentinker.config.opponents import PoolConfig
from opentinker.errors import CheckpointError
from opentinker.rollout.types import Episode


@dataclass(frozen=True)
class Member:
    """A past version of a policy: the checkpoint that holds it, and how it did."""

    checkpoint: str
    step: int
    """After which step it entered."""
    games: int = 0
    lost: float = 0.0
    """Games that its opponents won; half of those that were drawn."""

    def loss_rate(self, prior_games: float) -> float:
        """The share of games that it loses, of those played and `prior_games` more that were drawn; 0.5 without any."""
        games = self.games + prior_games
        return (self.lost + prior_games / 2) / games if games else 0.5


@dataclass(frozen=True)
class Pool:
    """The members by age, the oldest first."""

    members: tuple[Member, ...] = ()

    def enter(self, member: Member, size: int) -> "Pool":
        """With another member. If that is one too many, the oldest leaves, except the first, as long as there is room for it
        and another one."""
        members = (*self.members, member)
        if len(members) > size:
            members = (members[0], *members[2:]) if size > 1 else members[-1:]
        return Pool(members)

    def played(self, checkpoint: str, results: Iterable[float]) -> "Pool":
        """After games against a member; a result is 1 if it lost, 0 if it won, 0.5 if it was a draw."""
        found = list(results)
        return Pool(
            tuple(
                replace(m, games=m.games + len(found), lost=m.lost + math.fsum(found)) if m.checkpoint == checkpoint else m
                for m in self.members
            )
        )

    def weights(self, config: PoolConfig) -> list[float]:
        """By member, how likely it is to be drawn; their sum is 1.

        'pfsp' is prioritized fictitious self-play: the chance to play a member is proportional to f(x), where x is the
        probability to beat it; f_hard(x) = (1 - x)^p and f_var(x) = x (1 - x) (Vinyals et al., 2019, "Grandmaster level in
        StarCraft II using multi-agent reinforcement learning", Methods, "Prioritized fictitious self-play").
        """
        if config.strategy == "latest":
            return [0.0] * (len(self.members) - 1) + [1.0]
        raw = [1.0] * len(self.members)
        if config.strategy == "pfsp":
            rates = [member.loss_rate(config.prior_games) for member in self.members]
            raw = [(1 - x) ** config.power if config.weighting == "hard" else x * (1 - x) for x in rates]
        total = math.fsum(raw)
        if not total > 0:  # it always wins against all of them, and none is harder than another
            return [1.0 / len(raw)] * len(raw)
        return [weight / total for weight in raw]

    def draw(self, config: PoolConfig, groups: int, seed: int) -> list[Member]:
        """Who plays each group: `config.slots` different members at most, each with the chance of its weight in every group.

        With no more members than slots, groups draw independently. Otherwise `slots` members are drawn, maybe the same ones,
        and dealt to the groups in turn: what a single group gets has the same distribution, only groups share members.
        """
        numbers, weights = random.Random(seed), self.weights(config)
        independent = len(self.members) <= config.slots
        drawn = numbers.choices(self.members, weights, k=groups if independent else min(config.slots, groups))
        return [drawn[place % len(drawn)] for place in range(groups)]

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(member) for member in self.members]

    @classmethod
    def from_json(cls, state: Any) -> "Pool":
        """What `to_json` gave.

        Raises:
            CheckpointError: it is something else.
        """
        try:
            return cls(tuple(Member(**member) for member in state))
        except TypeError as error:
            raise CheckpointError(f"the checkpoint's state of a pool cannot be read: {error!r}") from error


def result_of(learner: Episode, member: Episode) -> float:
    """1 if the learner won, 0 if the member did, 0.5 if neither: by the metrics `won` and `lost` where the environment reports
    them, otherwise by who earned more."""
    if "won" in learner.metrics or "lost" in learner.metrics:
        return (1.0 + learner.metrics.get("won", 0.0) - learner.metrics.get("lost", 0.0)) / 2
    return 0.5 if learner.reward == member.reward else float(learner.reward > member.reward)


def results(learners: Mapping[str, Sequence[Episode]], member: Sequence[Episode]) -> list[float]:
    """The results of a group's games against a member, by everyone who learns in them: of those games that all of the two
    played to an end."""
    ended = {episode.member: episode for episode in member if episode.termination.trains}
    return [
        result_of(episode, ended[episode.member])
        for name in sorted(learners)
        for episode in learners[name]
        if episode.termination.trains and episode.member in ended
    ]
