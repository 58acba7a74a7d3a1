"""What a step trains on: groups of episodes turned into data, advantages and minibatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from opentinker.algorithms.overlong import overlong_penalty
from opentinker.algorithms.types import AdvantageFn
from opentinker.client.messages import Datum, FloatArray, Minibatch
from opentinker.config.algorithms import KLConfig, PolicyGradient
from opentinker.rollout.types import Episode, Group


@dataclass(frozen=True)
class Batch:
    """What one training step sends to the server."""

    data: list[Datum] = field(default_factory=list)
    minibatches: list[Minibatch] = field(default_factory=list)
    action_tokens: int = 0
    zero_variance_groups: int = 0
    """Groups whose advantages are all zero: unless a KL or entropy term has a gradient for them, they are left out."""


@dataclass(frozen=True)
class Member:
    """An episode that trains, its data, and their reference logprobs where they were asked for."""

    episode: Episode
    data: tuple[Datum, ...]

    @property
    def tokens(self) -> int:
        return sum(int(np.count_nonzero(datum.weights)) for datum in self.data)


def members_of(groups: Sequence[Group]) -> list[list[Member]]:
    """The episodes of each group that train, with their data; groups without any are left out."""
    found = [
        [Member(e, tuple(t.to_datum() for t in e.trajectories if t.action_tokens)) for e in group.episodes if e.trains]
        for group in groups
    ]
    return [members for members in found if members]


def turn_rewards(member: Member, config: PolicyGradient) -> FloatArray:
    """What an algorithm is told that each turn earned, float32[turns]: the environment's reward, less the price of length (at
    the last turn) and of distance from the reference."""
    turns = sum(t.actions for t in member.episode.trajectories)
    rewards = np.zeros(turns, np.float64)
    rewards[: len(member.episode.rewards)] = member.episode.rewards
    if config.overlong is not None:
        rewards[-1] += overlong_penalty(member.tokens, config.overlong)
    if config.kl.coefficient and config.kl.place == "reward":
        rewards -= config.kl.coefficient * _turn_divergences(member, config.kl)
    return rewards.astype(np.float32)


def token_divergences(datum: Datum, config: KLConfig) -> npt.NDArray[np.float64]:
    """The KL estimate at each target, under the logprobs with which it was sampled; meaningless where it was not."""
    d_T = datum.arrays["behaviour_logprobs"].astype(np.float64) - datum.arrays["reference_logprobs"]
    return {"k1": d_T, "k2": d_T**2 / 2, "k3": np.expm1(-d_T) + d_T}[config.estimator]


def _turn_divergences(member: Member, config: KLConfig) -> FloatArray:
    """The KL estimate of each turn's action: the sum over its tokens, under the logprobs with which it was sampled."""
    divergences: list[float] = []
    for datum, turn_T in zip(member.data, turns_of(member), strict=True):
        kl_T = token_divergences(datum, config)
        divergences += [float(kl_T[turn_T == turn].sum()) for turn in range(len(divergences), int(turn_T.max()) + 1)]
    return np.asarray(divergences, np.float32)


def turns_of(member: Member) -> list[FloatArray]:
    """For each datum, the turn that each target belongs to, counted over the episode; -1 where it was not sampled."""
    turn, result = 0, []
    acted = [t for t in member.episode.trajectories if t.action_tokens]
    for trajectory, datum in zip(acted, member.data, strict=True):
        parts = []
        for run in trajectory.runs:
            parts.append(np.full(len(run), turn if run.sample is not None else -1))
            turn += run.sample is not None
        result.append(np.concatenate(parts)[1 : len(datum) + 1])  # what follows the last action may have been left out
    return result


def build_batch(
    groups: Sequence[Sequence[Member]], advantages: AdvantageFn | None, config: PolicyGradient, *, longest_tokens: int = 1
) -> Batch:
    """Data of every member with its advantages and weights, dealt by group over the minibatches. Without `advantages` the data
    have theirs, and none is left out.

    The losses of a minibatch are aggregated as the config says; `longest_tokens` is the divisor of aggregation `constant` where
    the config names none. The whole is repeated `epochs` times. A minibatch that got no group is left out.

    Raises:
        ValueError: the algorithm's own, such as a reward that is not finite.
    """
    judged = groups if advantages is None else _judged(groups, advantages, config)
    regularised = bool(config.entropy_coefficient or (config.kl.coefficient and config.kl.place == "loss"))
    data: list[Datum] = []
    dealt: list[list[int]] = [[] for _ in range(config.minibatches)]
    sequences = [0] * config.minibatches
    zero_variance = hand = 0
    for group in judged:
        if advantages is not None and not any(d.arrays["advantages"].any() for m in group for d in m.data):
            zero_variance += 1
            if not regularised:
                continue
        for member in group:
            weight = np.float32(1.0 / member.tokens if config.aggregation == "sequence_mean" else 1.0)
            for datum in member.data:
                dealt[hand].append(len(data))
                data.append(replace(datum, arrays={**datum.arrays, "weights": datum.weights * weight}))
            sequences[hand] += 1
        hand = (hand + 1) % config.minibatches
    tokens = [int(np.count_nonzero(d.weights)) for d in data]
    once = [
        Minibatch(indices=tuple(part), factor=_factor(config, sum(tokens[i] for i in part), count, longest_tokens))
        for part, count in zip(dealt, sequences, strict=True)
        if part
    ]
    return Batch(data, once * config.epochs, sum(tokens), zero_variance)


def _factor(config: PolicyGradient, tokens: int, sequences: int, longest_tokens: int) -> float:
    """What the summed loss of a minibatch is multiplied with."""
    match config.aggregation:
        case "token_mean":
            return 1.0 / tokens
        case "sequence_mean":
            return 1.0 / sequences
    return 1.0 / (sequences * (config.constant_tokens or longest_tokens))


def _judged(groups: Sequence[Sequence[Member]], advantages: AdvantageFn, config: PolicyGradient) -> list[list[Member]]:
    """The members, their data with the advantages of their turns."""
    scores = advantages([[turn_rewards(member, config) for member in group] for group in groups])
    return [
        [
            replace(
                member,
                data=tuple(_spread(d, per_turn, turn_T) for d, turn_T in zip(member.data, turns_of(member), strict=True)),
            )
            for member, per_turn in zip(group, values, strict=True)
        ]
        for group, values in zip(groups, scores, strict=True)
    ]


def _spread(datum: Datum, per_turn: FloatArray, turn_T: FloatArray) -> Datum:
    """Each turn's advantage at its tokens."""
    advantages_T = np.where(turn_T >= 0, per_turn[np.maximum(turn_T, 0).astype(np.int64)], 0.0).astype(np.float32)
    return replace(datum, arrays={**datum.arrays, "advantages": datum.weights * advantages_T})
