"""The algorithms by `kind`: what turns the rewards of a batch into advantages, and which loss they enter."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from opentinker.config.base import Config, Count

Coefficient = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


class KLConfig(Config):
    """Keeps the policy near its reference: the base model as it was before any training. For a LoRA policy that costs no
    memory, for a full-parameter policy a frozen copy of the model."""

    coefficient: Coefficient = 0.0
    """Weight of the divergence; 0 = none, and nothing is computed for it unless `measure` says so."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Of KL(policy || reference) from one sample (Schulman, 2020), with d = logprob - reference logprob: k1 = d,
    k2 = d^2 / 2, k3 = exp(-d) - 1 + d. As a loss, k2 has the gradient of the divergence itself, on policy, and k1 none at all
    on average."""
    place: Literal["loss", "reward"] = "loss"
    """'loss' adds it to the loss of each token; 'reward' subtracts it from the reward of its turn, before advantages."""
    measure: bool = False
    """Report the distance in every step (`reference_kl_mean`) also without a coefficient, for one more forward pass of the
    batch, the reference's."""

    @property
    def measured(self) -> bool:
        """Whether the reference is asked for what was sampled."""
        return self.measure or self.coefficient > 0

    @model_validator(mode="after")
    def _moves_something(self) -> "KLConfig":
        if self.coefficient and self.estimator == "k1" and self.place == "loss":
            raise ValueError("k1 in the loss has no gradient on average; take k2 or k3, or place='reward'")
        return self


class MismatchConfig(Config):
    """What is done about the difference between the engine that sampled and the trainer: two implementations of one model.

    With either of these the ratio of the loss is against the trainer's own logprobs before the update, computed by one more
    forward pass of the batch, or by none if there is one minibatch and one epoch.
    """

    truncate: Annotated[float, Field(gt=0.0)] | None = None
    """Truncated importance sampling: each token's loss is weighted with min(trainer probability / engine probability, this)
    (Yao et al., 2025). 2 is common."""
    mask_sequences: tuple[Annotated[float, Field(gt=0.0)], Annotated[float, Field(gt=0.0)]] | None = None
    """Sequences whose geometric mean of trainer probability / engine probability is outside [low, high] are left out."""

    @model_validator(mode="after")
    def _ordered(self) -> "MismatchConfig":
        if self.mask_sequences is not None and not self.mask_sequences[0] < self.mask_sequences[1]:
            raise ValueError("mask_sequences must be [low, high] with low < high")
        return self

    @property
    def active(self) -> bool:
        return self.truncate is not None or self.mask_sequences is not None


class OverlongConfig(Config):
    """Soft punishment of long answers (Yu et al., 2025, "DAPO", eq. 13): 0 up to `limit_tokens - buffer_tokens` sampled tokens,
    then falling linearly to -`penalty` at `limit_tokens`."""

    limit_tokens: Count
    """Sampled tokens of an episode that cost the whole penalty."""
    buffer_tokens: Count
    """Length of the slope before that."""
    penalty: Annotated[float, Field(gt=0.0)] = 1.0

    @model_validator(mode="after")
    def _slope_fits(self) -> "OverlongConfig":
        if self.buffer_tokens > self.limit_tokens:
            raise ValueError(f"buffer_tokens ({self.buffer_tokens}) is longer than limit_tokens ({self.limit_tokens})")
        return self


LossName = Literal["ppo", "importance_sampling", "gspo", "cispo"]
Aggregation = Literal["token_mean", "sequence_mean", "constant"]


class PolicyGradient(Config):
    """What all algorithms have: groups of episodes, a loss, and how often a batch is gone through."""

    group_size: Annotated[int, Field(ge=1)] = 8
    """Episodes per task, compared with each other."""
    credit: Literal["episode", "turn"] = "episode"
    """'episode' gives all turns the advantage of the episode's whole reward; 'turn' gives each turn that of what it and later
    turns earned, compared over all turns of the group."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """With credit 'turn': how much a reward counts one turn earlier."""
    loss: LossName = "ppo"
    """'ppo' clips each token's probability ratio, 'importance_sampling' does not, 'gspo' clips the ratio of whole sequences,
    and 'cispo' clips it as a weight, so that every token keeps its gradient."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Ratios below 1 - clip_low stop pushing."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """Ratios above 1 + clip_high stop pushing."""
    aggregation: Aggregation = "token_mean"
    """How the tokens of a minibatch become one number: the mean over tokens, the mean over sequences of each one's mean, or the
    sum over tokens divided by sequences times `constant_tokens`, so that no length is favoured."""
    constant_tokens: Count | None = None
    """With aggregation 'constant': the divisor per sequence; None = sampling.max_tokens."""
    kl: KLConfig = KLConfig()
    entropy_coefficient: Coefficient = 0.0
    """Weight of the entropy of the policy's distribution, which is added to what is maximised. 0 computes none."""
    mismatch: MismatchConfig = MismatchConfig()
    overlong: OverlongConfig | None = None
    """None = length has no price."""
    max_resamples: Annotated[int, Field(ge=0)] = 0
    """How many more times a step draws tasks for groups whose episodes all earned the same and so teach nothing."""
    minibatches: Count = 1
    """Optimizer steps per rollout batch; groups are dealt over them."""
    epochs: Count = 1
    """Passes over each rollout batch."""

    @model_validator(mode="after")
    def _can_compare(self) -> "PolicyGradient":
        if self.max_resamples and self.group_size < 2:
            raise ValueError("max_resamples looks for groups whose episodes differ: group_size must be 2 or more")
        return self

    @property
    def one_update(self) -> bool:
        """The batch is trained on once, with the policy that sampled it."""
        return self.minibatches == 1 and self.epochs == 1


Group = Annotated[int, Field(ge=2)]


class GRPOConfig(PolicyGradient):
    """Group relative policy optimization (Shao et al., 2024)."""

    kind: Literal["grpo"] = "grpo"
    group_size: Group = 8
    """Episodes per task, compared with each other."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (eq. 3 of the paper)."""


class DrGRPOConfig(PolicyGradient):
    """GRPO without its two biases (Liu et al., 2025): no division by the standard deviation, nor by the length."""

    kind: Literal["dr_grpo"] = "dr_grpo"
    group_size: Group = 8
    """Episodes per task, compared with each other."""
    aggregation: Aggregation = "constant"
    """How the tokens of a minibatch become one number; see `grpo`."""


class RLOOConfig(PolicyGradient):
    """REINFORCE with the mean of the group's other episodes as baseline (Ahmadian et al., 2024)."""

    kind: Literal["rloo"] = "rloo"
    group_size: Group = 8
    """Episodes per task, compared with each other."""
    loss: LossName = "importance_sampling"
    """See `grpo`."""


class ReinforcePPConfig(PolicyGradient):
    """REINFORCE++ (Hu et al., 2025): advantages are normalised over the whole batch, with PPO's clip."""

    kind: Literal["reinforce_pp"] = "reinforce_pp"
    group_size: Annotated[int, Field(ge=1)] = 1
    """Episodes per task; the baseline is the batch's."""
    group_baseline: bool = False
    """Subtract the mean of the group first (the paper's REINFORCE++-baseline); needs group_size of 2 or more."""

    @model_validator(mode="after")
    def _has_group(self) -> "ReinforcePPConfig":
        if self.max_resamples and not self.group_baseline:
            raise ValueError("max_resamples redraws groups of equal rewards, which teach here: the baseline is the batch's")
        if self.group_baseline and self.group_size < 2:
            raise ValueError("group_baseline needs algorithm.group_size of 2 or more")
        return self


class DAPOConfig(PolicyGradient):
    """Decoupled clip and dynamic sampling (Yu et al., 2025): a higher upper clip, the mean over tokens, and groups that teach
    nothing are drawn anew. Its price of length is `overlong`."""

    kind: Literal["dapo"] = "dapo"
    group_size: Group = 16
    """Episodes per task, compared with each other."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """Ratios above 1 + clip_high stop pushing."""
    max_resamples: Annotated[int, Field(ge=0)] = 3
    """How many more times a step draws tasks for groups whose episodes all earned the same and so teach nothing."""


class GSPOConfig(PolicyGradient):
    """Group sequence policy optimization (Zheng et al., 2025): the ratio is the geometric mean over a sequence's tokens, and
    whole sequences are clipped."""

    kind: Literal["gspo"] = "gspo"
    group_size: Group = 8
    """Episodes per task, compared with each other."""
    loss: Literal["gspo"] = "gspo"
    """See `grpo`."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 3e-4
    """Ratios below 1 - clip_low stop pushing."""
    clip_high: Annotated[float, Field(gt=0.0)] = 4e-4
    """Ratios above 1 + clip_high stop pushing."""
    aggregation: Aggregation = "sequence_mean"
    """How the tokens of a minibatch become one number; see `grpo`."""


class CISPOConfig(PolicyGradient):
    """Clipped importance-sampling weights (MiniMax-M1, 2025): no token loses its gradient to the clip."""

    kind: Literal["cispo"] = "cispo"
    group_size: Group = 8
    """Episodes per task, compared with each other."""
    loss: Literal["cispo"] = "cispo"
    """See `grpo`."""
    clip_low: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Weights are at least 1 - clip_low; 1 = no lower bound."""
    clip_high: Annotated[float, Field(gt=0.0)] = 4.0
    """Weights are at most 1 + clip_high."""


class CriticConfig(Config):
    """The value model of PPO: an adapter of its own with a scalar head on the frozen base model, whatever the policy trains. A
    full-parameter policy pays for it with one more copy of the model in `trainer.dtype`, a LoRA policy with none."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Of its adapter, on all linear layers."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The adapter's update is scaled by alpha / rank."""
    learning_rate: Coefficient = 1e-4
    """Of its own AdamW: `training`'s warm-up and decay are the policy's. All else is as in `training.optimizer`."""
    decay: Literal["none", "linear"] = "none"
    """'linear' takes the critic's learning rate down to 0 over the job's steps."""
    value_clip: Annotated[float, Field(gt=0.0)] | None = 0.2
    """A value that has moved further than this since the batch was sampled gets no gradient that takes it further away; None =
    no clip. In units of reward."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The first steps train the critic alone, so that the policy is not judged by values that say nothing yet."""


class PPOConfig(PolicyGradient):
    """Proximal policy optimization with a critic (Schulman et al., 2017): each sampled token is judged by what came after it
    less what the critic expected (generalized advantage estimation; Schulman et al., 2016). A turn's reward falls on its last
    token; tokens that were not sampled do not count."""

    kind: Literal["ppo"] = "ppo"
    group_size: Annotated[int, Field(ge=1)] = 1
    """Episodes per task; they are not compared with each other."""
    credit: Literal["turn"] = "turn"
    """A token is always judged by what it and later ones earned."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Gamma: how much a reward counts one sampled token earlier."""
    gae_lambda: Annotated[float, Field(ge=0.0, le=1.0)] = 1.0
    """How far an advantage looks ahead before it takes the critic's word: 1 = to the end of the episode, which no critic can
    bias; 0 = to the next token. 0.95 is common for short answers; over n tokens it leaves 0.95^n of a reward."""
    whiten: bool = True
    """Scale the advantages of a batch to mean 0 and variance 1 over its tokens."""
    max_resamples: Literal[0] = 0
    """None: with a critic, groups of equal rewards teach, too."""
    critic: CriticConfig = CriticConfig()


class CustomConfig(PolicyGradient):
    """Advantages from a function of your own."""

    kind: Literal["custom"] = "custom"
    function: str
    """`path/to/file.py:function`, beside the YAML file or the environment's. A submitted job takes it in the folder of the
    environment's file, or as this one file if there is none. It is given the groups of a step, a list of episodes each, an
    episode as float32[turns] of its rewards per turn; it returns advantages in the same shape."""


def _kind(value: Any) -> str:
    """GRPO, if nothing else is said."""
    return str(value.get("kind", "grpo") if isinstance(value, Mapping) else getattr(value, "kind", value))


AlgorithmConfig = Annotated[
    Annotated[GRPOConfig, Tag("grpo")]
    | Annotated[DrGRPOConfig, Tag("dr_grpo")]
    | Annotated[RLOOConfig, Tag("rloo")]
    | Annotated[ReinforcePPConfig, Tag("reinforce_pp")]
    | Annotated[DAPOConfig, Tag("dapo")]
    | Annotated[GSPOConfig, Tag("gspo")]
    | Annotated[CISPOConfig, Tag("cispo")]
    | Annotated[PPOConfig, Tag("ppo")]
    | Annotated[CustomConfig, Tag("custom")],
    Discriminator(_kind),
]
"""How a batch is trained on; `kind` says which, GRPO if it is left out."""
