"""The sections of a job of kind `sft`."""

from typing import Annotated, Literal

from pydantic import Field

from opentinker.client.messages import AdamParams
from opentinker.config.base import Config, Count
from opentinker.config.tasks import TasksConfig


class ChatDataConfig(Config):
    """Conversations to learn from: rows with `messages` (a list of {"role", "content"}), or with `prompt` and `completion`,
    texts or lists of messages. A row may have `tools`, as OpenAI's function schemas."""

    train: TasksConfig
    """What is trained on."""
    held_out: TasksConfig | None = None
    """What is evaluated on."""
    loss_on: Literal["assistant", "last", "all"] = "assistant"
    """'assistant' trains every assistant turn with its end-of-turn token, 'last' only the last one, 'all' every token. Of rows
    with a prompt, only the completion's turns."""
    overlong: Literal["drop", "error"] = "drop"
    """Conversations longer than engine.max_model_len are left out and counted, or end the job."""


class SFTEvaluationConfig(Config):
    """Mean loss on held-out conversations."""

    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every this many steps; 0 = only at start and end."""
    max_examples: Count = 256
    """Held-out conversations used, from the first."""


class SFTTrainingConfig(Config):
    """The loop of supervised fine-tuning."""

    steps: Count = 100
    """Optimizer steps."""
    batch_size: Count = 16
    """Conversations per step. The loss is the mean over the trained tokens of all of them."""
    seed: Annotated[int, Field(ge=0)] = 0
    """The order of examples and adapter initialisation derive from it."""
    optimizer: AdamParams = AdamParams()
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps."""
    decay: Literal["none", "linear"] = "linear"
    """'linear' lets the learning rate fall after the warm-up, to reach 0 one step after the last."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint every this many steps; the last step is always saved under 'final'."""
    keep_last: Count | None = None
    """Keep this many of the newest periodic checkpoints and delete those before, but none that has a tag or that a job
    started from. None = keep all."""
