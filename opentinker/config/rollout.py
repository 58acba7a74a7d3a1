"""The configs of rollouts: the environment, how episodes run, how actions are sampled."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field

from opentinker.client.messages import StopString
from opentinker.config.base import Config, Count, Seconds
from opentinker.config.requirements import MAX_REQUIREMENTS, check_requirements, check_secrets
from opentinker.config.tasks import TasksConfig


class SamplingConfig(Config):
    """How actions are sampled in rollouts."""

    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits, in sampling and in the loss alike."""
    max_tokens: Count = 256
    """Longest action, in tokens."""
    stop: tuple[StopString, ...] = ()
    """Strings that end an action, besides the model's end of turn."""


class RolloutConfig(Config):
    """Episodes of one training step, and their deadlines."""

    groups_per_step: Count = 16
    """Tasks per step; each is run `algorithm.group_size` times."""
    max_turns: Count = 16
    """An episode with this many actions ends as truncated_turns, and still trains."""
    max_concurrent_episodes: Count = 128
    """Episodes that run at once; more wait."""
    reset_timeout_s: Seconds = 30.0
    """A reset that takes longer ends its episode with error_timeout."""
    step_timeout_s: Seconds = 30.0
    """A step that takes longer ends its episode with error_timeout."""
    generation_timeout_s: Seconds = 300.0
    """Longest wait for one action, retries included."""
    episode_timeout_s: Seconds = 600.0
    """Longest whole episode; also bounds what a straggler can delay a step."""
    generation_retries: Annotated[int, Field(ge=0)] = 2
    """Retries of a sample that failed for a transient cause."""
    member_retries: Annotated[int, Field(ge=0)] = 1
    """How often an episode that ended in an error is run anew before its member is dropped from the group."""


class EnvironmentConfig(Config):
    """Which environment the driver resets and steps."""

    name: str
    """A built-in name, `path/to/file.py:Class`, the URL of an environment server (several, separated by commas, share the
    episodes), or an adapter and what it adapts, such as `gymnasium:FrozenLake-v1`."""
    train_tasks: TasksConfig | None = None
    """Tasks to train on; None = the environment's own."""
    held_out_tasks: TasksConfig | None = None
    """Tasks to evaluate on; None = the environment's own."""
    tasks_timeout_s: Seconds = 600.0
    """Longest time to get the first tasks of a split: a dataset is downloaded, and rows are checked. Later draws have the time
    of a reset."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    requirements: Annotated[tuple[str, ...], Field(max_length=MAX_REQUIREMENTS), AfterValidator(check_requirements)] | None = (
        None
    )
    """Packages that the environment's code needs, as PEP 508 requirements such as `sympy>=1.13`. The cluster installs them for
    the driver of a submitted job, beside its own packages, which stay as they are. A URL holds no credentials; a `file:` URL
    is a path on the driver's node. None = those of a `requirements.txt` beside
    the environment's file, if there is one; an empty list = none, whatever that file says."""
    secrets: Annotated[dict[str, str], AfterValidator(check_secrets)] = Field(default_factory=dict)
    """Environment variable -> name of a secret of yours (`opentinker secrets set NAME`). The driver of a submitted job gets the
    variables with the secrets' values; `opentinker train` takes them from your own environment."""
