"""PPO's part of a step: advantages and returns of each token from the critic's values, and what trains the critic."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from opentinker.algorithms.gae import Floats, explained_variance, gae, whitened
from opentinker.client.messages import AdamParams, CriticStep, Datum
from opentinker.config.algorithms import KLConfig, PolicyGradient, PPOConfig
from opentinker.training.batch import Member, token_divergences, turn_rewards, turns_of


def token_advantages(groups: Sequence[Sequence[Member]], config: PPOConfig) -> list[list[Member]]:
    """The members, their data with `advantages` and `returns` at each sampled token; they come with `old_values`.

    Raises:
        ValueError: a reward or a value is not finite.
    """
    members = [member for group in groups for member in group]
    found = [
        gae(token_rewards(m, config), _sampled(m, "old_values"), discount=config.discount, gae_lambda=config.gae_lambda)
        for m in members
    ]
    advantages = [advantages for advantages, _ in found]
    if config.whiten:
        advantages = whitened(advantages)
    judged = iter(
        _judged(member, {"advantages": scores, "returns": returns})
        for member, scores, (_, returns) in zip(members, advantages, found, strict=True)
    )
    return [[next(judged) for _ in group] for group in groups]


def token_rewards(member: Member, config: PPOConfig) -> Floats:
    """What each sampled token of the episode earned: a turn's reward falls on its last token, the price of distance from the
    reference (with `kl.place: reward`) on each token's own."""
    per_turn = turn_rewards(member, config.model_copy(update={"kl": KLConfig()}))
    turn_T = np.concatenate([turn[turn >= 0] for turn in turns_of(member)]).astype(np.int64)
    last_T = np.append(turn_T[1:] != turn_T[:-1], True)
    rewards = np.where(last_T, per_turn[turn_T], 0.0).astype(np.float64)
    if config.kl.coefficient and config.kl.place == "reward":
        priced = [token_divergences(datum, config.kl)[datum.weights != 0] for datum in member.data]
        rewards -= config.kl.coefficient * np.concatenate(priced)
    return rewards


def critic_step(algorithm: PolicyGradient, optimizer: AdamParams, step: int, steps: int) -> CriticStep | None:
    """How the `step`-th of `steps` steps (from 1) trains the critic; None for algorithms without one. What the critic's config
    leaves open is as in the policy's `optimizer`."""
    if not isinstance(algorithm, PPOConfig):
        return None
    critic = algorithm.critic
    left = max(0.0, (steps + 1 - step) / steps) if critic.decay == "linear" else 1.0
    return CriticStep(
        value_clip=critic.value_clip,
        optimizer=optimizer.model_copy(update={"learning_rate": critic.learning_rate * left}),
        alone=step <= critic.warmup_steps,
    )


def critic_metrics(data: Sequence[Datum], trained: Mapping[str, Any] | None) -> dict[str, float | None]:
    """A step's numbers of the critic, None without one. `explained_variance` is that of the values before the update, the rest
    is over all minibatches."""
    row: dict[str, float | None] = dict.fromkeys(
        ("value_loss", "explained_variance", "value_clip_fraction", "critic_grad_norm")
    )
    parts = [part["critic"] for part in trained["minibatches"] if "critic" in part] if trained else []
    if parts:
        tokens = sum(part["metrics"]["tokens"] for part in parts)
        row["value_loss"] = float(np.mean([part["loss"] for part in parts]))
        row["critic_grad_norm"] = float(np.mean([part["grad_norm"] for part in parts]))
        row["value_clip_fraction"] = sum(part["metrics"].get("value_clipped_sum", 0.0) for part in parts) / tokens
        returns, values = (np.concatenate([d.arrays[n][d.weights != 0] for d in data]) for n in ("returns", "old_values"))
        row["explained_variance"] = explained_variance(returns, values)
    return row


def _sampled(member: Member, name: str) -> Floats:
    found: Floats = np.concatenate([datum.arrays[name][datum.weights != 0] for datum in member.data]).astype(np.float64)
    return found


def _judged(member: Member, arrays: Mapping[str, Floats]) -> Member:
    """The member with these numbers of its sampled tokens as arrays of its data."""
    data, start = [], 0
    for datum in member.data:
        sampled = datum.weights != 0
        stop = start + int(sampled.sum())
        found = {name: np.zeros(len(datum), np.float32) for name in arrays}
        for name, values in arrays.items():
            found[name][sampled] = values[start:stop]
        data.append(replace(datum, arrays={**datum.arrays, **found}))
        start = stop
    return replace(member, data=tuple(data))
