"""What one policy learns from the episodes of a step: advantages, data, the train step and the publish."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentinker.algorithms.types import AdvantageFn
from opentinker.client.messages import AdamParams, LossConfig, TokenScore
from opentinker.config.algorithms import KLConfig, PolicyGradient, PPOConfig
from opentinker.config.rollout import SamplingConfig
from opentinker.rollout.types import Group
from opentinker.training.batch import Batch, Member, build_batch, members_of, turn_rewards
from opentinker.training.policy import TrainedPolicy
from opentinker.training.ppo import critic_step, token_advantages
from opentinker.training.proximal import with_proximal_logprobs


@dataclass(frozen=True)
class Learned:
    """What an update was made of, and what the server said to it (None: there was nothing to train)."""

    batch: Batch
    trained: Mapping[str, Any] | None

    @property
    def publish_s(self) -> float:
        return float(self.trained["publish"]["seconds"]) if self.trained and self.trained["publish"] else 0.0


class Learner:
    """One policy and its algorithm. `advantages` judges the rewards of groups; None for PPO, whose critic does."""

    def __init__(
        self,
        policy: TrainedPolicy,
        algorithm: PolicyGradient,
        sampling: SamplingConfig,
        advantages: AdvantageFn | None,
        steps: int,
    ) -> None:
        """`steps` are those of the whole run, over which learning rates fall."""
        self.algorithm = algorithm
        self._policy = policy
        self._sampling = sampling
        self._advantages = advantages
        self._steps = steps

    async def learn(self, groups: Sequence[Group], optimizer: AdamParams, step: int) -> Learned:
        """Train on the groups and publish. `step` counts from 1.

        Raises:
            ValueError: an advantage function's own, such as a reward that is not finite.
            OpenTinkerError: what the server reports.
        """
        members = await self._scored(members_of(groups))
        if isinstance(self.algorithm, PPOConfig):
            members = token_advantages(members, self.algorithm)
        batch = build_batch(members, self._advantages, self.algorithm, longest_tokens=self._sampling.max_tokens)
        if self.algorithm.mismatch.active and not self.algorithm.one_update:
            batch = await with_proximal_logprobs(self._policy, batch, self._sampling.temperature)
        return Learned(batch, await self._train(batch, optimizer, step))

    def teaches(self, group: Group) -> bool:
        """Whether its episodes get advantages, before what the reference would say."""
        assert self._advantages is not None, "a critic's algorithm compares no groups, and draws none anew"
        [members] = members_of([group]) or [[]]
        rewards = [turn_rewards(member, self.algorithm.model_copy(update={"kl": KLConfig()})) for member in members]
        return any(values.any() for values in self._advantages([rewards])[0])

    async def _scored(self, groups: list[list[Member]]) -> list[list[Member]]:
        """The members with what their advantages and losses need from the model: reference logprobs, and the critic's values
        before the update."""
        algorithm = self.algorithm
        names: dict[TokenScore, str] = {}
        if algorithm.kl.measured:
            names["reference_logprobs"] = "reference_logprobs"
        if isinstance(algorithm, PPOConfig):
            names["values"] = "old_values"
        data = [datum for members in groups for member in members for datum in member.data]
        if not names or not data:
            return groups
        temperature = self._sampling.temperature
        scores = await self._policy.forward(data, compute=tuple(names), temperature=temperature)
        found = iter(
            replace(datum, arrays={**datum.arrays, **{names[score]: scores[score][index] for score in names}})
            for index, datum in enumerate(data)
        )
        return [[replace(m, data=tuple(next(found) for _ in m.data)) for m in members] for members in groups]

    async def _train(self, batch: Batch, optimizer: AdamParams, step: int) -> Mapping[str, Any] | None:
        if not batch.data:
            return None
        loss = loss_config(self.algorithm, self._sampling.temperature)
        critic = critic_step(self.algorithm, optimizer, step, self._steps)
        return await self._policy.train_step(
            batch.data, batch.minibatches, loss, optimizer, critic=critic, publish=critic is None or not critic.alone
        )


def loss_config(algorithm: PolicyGradient, temperature: float) -> LossConfig:
    """The loss of an algorithm's train steps."""
    mismatch, kl = algorithm.mismatch, algorithm.kl
    return LossConfig(
        name=algorithm.loss,
        clip_low=algorithm.clip_low,
        clip_high=algorithm.clip_high,
        temperature=temperature,
        anchor="behaviour" if not mismatch.active else "current" if algorithm.one_update else "proximal",
        truncate=mismatch.truncate,
        mask_sequences=mismatch.mask_sequences,
        kl_coefficient=kl.coefficient if kl.place == "loss" else 0.0,
        kl_estimator=kl.estimator,
        entropy_coefficient=algorithm.entropy_coefficient,
    )
