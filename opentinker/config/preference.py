"""The sections of a job of kind `preference`."""

from typing import Annotated, Literal

from pydantic import Field

from opentinker.client.messages import AdamParams
from opentinker.config.base import Config, Count
from opentinker.config.sft import SFTEvaluationConfig, SFTTrainingConfig
from opentinker.config.tasks import TasksConfig

Beta = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]


class PreferenceDataConfig(Config):
    """Pairs of answers to learn from: rows with `chosen` and `rejected`, whole conversations that differ in their last turn, or
    answers beside a `prompt`. Texts or lists of messages. A row may have `tools`, and for a reward model a `margin`."""

    train: TasksConfig
    """What is trained on."""
    held_out: TasksConfig | None = None
    """What is evaluated on."""
    overlong: Literal["drop", "error"] = "drop"
    """Pairs of which one conversation is longer than engine.max_model_len are left out and counted, or end the job."""
    unusable: Literal["error", "drop"] = "error"
    """Rows that are no comparison (equal answers, prompts that differ, no assistant turn at the end) end the job, or are left
    out and counted."""


class _ReferencedConfig(Config):
    beta: Beta = 0.1
    """How strongly the policy is held to its reference; smaller lets it move further."""
    reference: Literal["auto", "precomputed"] = "auto"
    """The reference is the policy as the run begins. 'auto' asks the server for the base model's logprobs in each step where
    that is the same (for full parameters it then holds a frozen copy), and otherwise computes all of them before the first
    step; 'precomputed' always does the latter."""


class DPOConfig(_ReferencedConfig):
    """Direct preference optimisation (Rafailov et al., 2023)."""

    kind: Literal["dpo"] = "dpo"
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """The share of pairs that are taken to be labelled the wrong way round (conservative DPO; Mitchell, 2023)."""


class IPOConfig(_ReferencedConfig):
    """Identity preference optimisation (Azar et al., 2024), on the mean log-ratio of an answer's tokens, as in TRL."""

    kind: Literal["ipo"] = "ipo"


class BradleyTerryConfig(Config):
    """A reward model (Ouyang et al., 2022, eq. 1): a scalar head on the model, which scores conversations."""

    kind: Literal["bradley_terry"] = "bradley_terry"
    centring_coefficient: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    """Weight of the squared sum of both scores, which keeps them around 0."""


PreferenceLoss = Annotated[DPOConfig | IPOConfig | BradleyTerryConfig, Field(discriminator="kind")]


class PreferenceEvaluationConfig(SFTEvaluationConfig):
    """Accuracy, margin and loss on held-out pairs."""

    max_examples: Count = 256
    """Held-out pairs used, from the first."""


class PreferenceTrainingConfig(SFTTrainingConfig):
    """The loop of preference training."""

    batch_size: Count = 16
    """Pairs per step. The loss is the mean over them."""
    optimizer: AdamParams = AdamParams(learning_rate=1e-6)
