"""The configs of a job. A YAML file, a Python call and the scheduler's store all hold the same fields."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opentinker.client.messages import AdamParams, StopString
from opentinker.config.base import Config, nearest, parse_config
from opentinker.errors import ConfigError

Seconds = Annotated[float, Field(gt=0.0)]
Count = Annotated[int, Field(ge=1)]


class LoraConfig(Config):
    """A low-rank adapter (Hu et al., 2021). Fields and meaning are PEFT's."""

    rank: Annotated[int, Field(ge=1, le=512)] = 16
    """Columns of A and B: more can express more, and costs more."""
    alpha: Annotated[float, Field(gt=0.0)] = 32.0
    """The update is scaled by alpha / rank."""
    target_modules: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Linear layers that get an adapter; 'all-linear' = all but the output head."""


class EngineConfig(Config):
    """The rollout engine of the job's server."""

    kind: Literal["auto", "vllm", "transformers"] = "auto"
    """'auto' takes vLLM where it is installed, transformers elsewhere."""
    max_model_len: Annotated[int, Field(ge=16)] = 1024
    """Longest context, prompt and answer together, in tokens. Larger needs more cache memory."""
    max_num_seqs: Count = 128
    """Sequences decoded together; more wait in the engine's queue."""
    cache_gib: Annotated[float, Field(gt=0.0)] = 0.5
    """Key/value cache on CPU, in GiB. On CUDA `memory_fraction` rules instead."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.45
    """CUDA only: the engine's share of the GPU; the trainer lives in the rest."""
    enforce_eager: bool = True
    """False compiles the model: about a minute at the start for faster decoding."""
    lora_serving: Literal["auto", "merge", "adapter"] = "auto"
    """'merge' folds the adapter into the base weights at each publish (fast on CPU); 'adapter' serves it by the engine's
    LoRA kernels. 'auto' = merge on CPU and with the transformers engine, adapter on CUDA."""


class TrainerConfig(Config):
    """The trainer of the job's server."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Type of weights and activations, in trainer and engine. Master weights and optimizer state are float32 always."""
    pack_tokens: Annotated[int, Field(ge=16)] = 1024
    """Tokens in one packed forward pass. A group that does not fit is split."""
    drift_limit: Annotated[float, Field(gt=0.0)] = 3.0
    """A publish fails when engine and trainer logprobs on fixed prompts differ by more than this many times version 0's
    difference (and by more than 0.05)."""


class ServerConfig(Config):
    """What a server hosts. Two jobs with equal ServerConfigs could share one."""

    base_model: str
    """A known model name, or a directory with a Hugging Face model (on the cluster)."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()


class Resources(Config):
    """What the job's server occupies."""

    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot."""


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


class GRPOConfig(Config):
    """Group relative policy optimization (Shao et al., 2024)."""

    kind: Literal["grpo"] = "grpo"
    group_size: Annotated[int, Field(ge=2)] = 8
    """Episodes per task, compared with each other."""
    normalize_std: bool = True
    """Divide by the group's standard deviation (eq. 3 of the paper); False gives Dr. GRPO's mean-only baseline."""
    loss: Literal["ppo", "importance_sampling"] = "ppo"
    """'ppo' clips the probability ratio, 'importance_sampling' does not."""
    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    """Ratios below 1 - clip_low stop pushing (ppo)."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    """Ratios above 1 + clip_high stop pushing (ppo)."""
    minibatches: Count = 1
    """Optimizer steps per rollout batch; groups are dealt over them."""
    epochs: Count = 1
    """Passes over each rollout batch."""


AlgorithmConfig = Annotated[GRPOConfig, Field()]
"""Becomes a union discriminated by `kind` with the second algorithm."""


class EnvironmentConfig(Config):
    """Which environment the driver resets and steps."""

    name: str
    """A built-in name, or path/to/file.py:Class."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""


class EvaluationConfig(Config):
    """Evaluation on held-out tasks with the same FSM as training."""

    at_start: bool = True
    """Evaluate before the first step."""
    at_end: bool = True
    """Evaluate after the last step."""
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate every this many steps; 0 = only at start and end."""
    max_tasks: Count = 64
    """Held-out tasks used, from the first."""
    samples_per_task: Count = 8
    """Episodes per held-out task."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Divides the logits, in sampling and in the loss alike."""


class RLTrainingConfig(Config):
    """The driver loop."""

    steps: Count = 100
    """Rollout-and-update steps."""
    seed: int = 0
    """Tasks, samples and adapter initialisation derive from it."""
    optimizer: AdamParams = AdamParams()
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps."""
    decay: Literal["none", "linear"] = "none"
    """'linear' lets the learning rate fall after the warm-up, to reach 0 one step after the last; steadier endings."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint every this many steps; the last step is always saved under 'final'."""
    transcripts_per_step: Annotated[int, Field(ge=0)] = 2
    """Sample episodes written to the run's transcripts."""


class RLJobConfig(Config):
    """A reinforcement-learning job."""

    kind: Literal["rl"] = "rl"
    name: str = ""
    """Shown by `opentinker ps`; free text."""
    base_model: str
    """A known model name (`smollm2-135m`), or a directory with a Hugging Face model on the cluster."""
    lora: LoraConfig | None = None
    """An adapter to train; None trains the full parameters."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    resources: Resources = Resources()
    environment: EnvironmentConfig
    algorithm: AlgorithmConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: RLTrainingConfig = RLTrainingConfig()

    @model_validator(mode="after")
    def _action_fits_context(self) -> "RLJobConfig":
        if self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len})"
            )
        return self

    def server(self) -> ServerConfig:
        return ServerConfig(base_model=self.base_model, engine=self.engine, trainer=self.trainer)


class InteractiveJobConfig(Config):
    """A job whose driver runs in the user's process: only what the cluster must host."""

    kind: Literal["interactive"] = "interactive"
    name: str = ""
    """Shown by `opentinker ps`; free text."""
    base_model: str
    """A known model name (`smollm2-135m`), or a directory with a Hugging Face model on the cluster."""
    lora: LoraConfig | None = None
    """An adapter to train; None trains the full parameters."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    resources: Resources = Resources()
    seed: int = 0
    """Tasks, samples and adapter initialisation derive from it."""

    def server(self) -> ServerConfig:
        return ServerConfig(base_model=self.base_model, engine=self.engine, trainer=self.trainer)


JobConfig = Annotated[RLJobConfig | InteractiveJobConfig, Field(discriminator="kind")]


def parse_job(values: Mapping[str, Any]) -> JobConfig:
    """Validate a job's config by its `kind`.

    Raises:
        ConfigError: an unknown kind, or whatever `parse_config` finds.
    """
    kinds: dict[str, type[RLJobConfig] | type[InteractiveJobConfig]] = {"rl": RLJobConfig, "interactive": InteractiveJobConfig}
    kind = values.get("kind")
    if kind not in kinds:
        raise ConfigError(f"kind: {kind!r} is not a kind of job", hint=nearest(str(kind), kinds))
    return parse_config(kinds[kind], values)
