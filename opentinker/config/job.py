"""The configs of a job. A YAML file, a Python call and the scheduler's store all hold the same fields."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from opentinker.client.messages import AdamParams, StopString
from opentinker.config.algorithms import AlgorithmConfig, GRPOConfig, PPOConfig
from opentinker.config.base import Config, nearest, parse_config
from opentinker.config.preference import (
    BradleyTerryConfig,
    DPOConfig,
    PreferenceDataConfig,
    PreferenceEvaluationConfig,
    PreferenceLoss,
    PreferenceTrainingConfig,
)
from opentinker.config.requirements import MAX_REQUIREMENTS, check_requirements, check_secrets
from opentinker.config.sft import ChatDataConfig, SFTEvaluationConfig, SFTTrainingConfig
from opentinker.config.sinks import Sinks
from opentinker.config.tasks import TasksConfig
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
    """CUDA only: the engine's share of the GPU; the trainer lives in the rest. 0.9 by default in a job of kind `inference`."""
    enforce_eager: bool = True
    """False compiles the model: about a minute at the start for faster decoding."""
    deterministic: bool = False
    """With the transformers engine only: sequences are decoded one by one, so that a sample depends on its prompt and seed and
    on nothing else, neither on its company nor on time. A run that was interrupted then repeats bit for bit. Slow."""
    lora_serving: Literal["auto", "merge", "adapter"] = "auto"
    """'merge' folds the adapter into the base weights at each publish (fast on CPU); 'adapter' serves it by the engine's
    LoRA kernels. 'auto' = adapter on CUDA with vLLM and wherever `max_adapters` is above 1, merge elsewhere."""
    max_adapters: Annotated[int, Field(ge=1, le=1024)] = 1
    """LoRA policies that the job's server has room for, the job's own included. More than one are served as adapters side by
    side, so the job needs `lora`; vLLM reserves memory for each."""
    kept_versions: Annotated[int, Field(ge=1, le=64)] = 2
    """Where adapters are served: how many versions of a policy, the newest, can be sampled from. Otherwise it is one."""

    @model_validator(mode="after")
    def _one_merged(self) -> "EngineConfig":
        if self.max_adapters > 1 and self.lora_serving == "merge":
            raise ValueError(
                f"max_adapters={self.max_adapters} needs adapters that are served; lora_serving='merge' folds one into the base"
            )
        return self

    @model_validator(mode="after")
    def _can_be_deterministic(self) -> "EngineConfig":
        if self.deterministic and self.kind != "transformers":
            raise ValueError(f"deterministic needs kind 'transformers': what '{self.kind}' samples depends on its batches")
        return self


Dtype = Literal["bfloat16", "float16", "float32"]
INFERENCE_MEMORY_FRACTION = 0.9
"""Default share of a GPU for an engine that has it to itself."""


class TrainerConfig(Config):
    """The trainer of the job's server."""

    dtype: Dtype = "bfloat16"
    """Type of weights and activations, in trainer and engine. Master weights and optimizer state are float32 always. `float16`
    is for GPUs without bfloat16: gradients are scaled, and a step whose gradients do not fit is skipped."""
    pack_tokens: Annotated[int, Field(ge=16)] = 1024
    """Tokens in one packed forward pass. A group that does not fit is split."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the layers until the backward pass, which then computes the rest again: less memory for a pack,
    so longer ones fit, for more time. The numbers are the same, bit for bit."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments in a byte each, in blocks with a scale: 2 bytes per trained parameter in place of 8, for slower
    steps. Of the policy; a critic's stay in float32."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How the trainer attends: `sdpa` tile by tile, `flex` with one FlexAttention kernel over a pack, which is compiled (CUDA
    only); `auto` = sdpa."""
    memory_gb: Annotated[float, Field(gt=0.0)] | None = None
    """Memory (10^9 bytes) that one pass may take, beside weights, gradients and optimizer state; None: most of what is free
    when it begins. Packs that would take more are made smaller, and data that cannot fit are refused."""
    drift_limit: Annotated[float, Field(gt=0.0)] = 3.0
    """A publish fails when engine and trainer logprobs on fixed prompts differ by more than this many times version 0's
    difference (and by more than 0.05)."""


class ServerConfig(Config):
    """What a server hosts. Two jobs with equal ServerConfigs could share one."""

    base_model: str
    """A known model name, or a directory with a Hugging Face model (on the cluster)."""
    engine: EngineConfig = EngineConfig()
    dtype: Dtype = "bfloat16"
    """Type of weights and activations."""
    trainer: TrainerConfig | None = None
    """None: the server only samples."""

    @model_validator(mode="after")
    def _one_dtype(self) -> "ServerConfig":
        if self.trainer is not None and self.trainer.dtype != self.dtype:
            raise ValueError(f"the engine's dtype is {self.dtype}, the trainer's {self.trainer.dtype}")
        return self


def _whole_or_fraction(gpus: float) -> float:
    if gpus > 1 and gpus != int(gpus):
        raise ValueError(f"{gpus:g} GPUs: more than one GPU must be a whole number; only a fraction of one GPU can be shared")
    if 0 < gpus < 0.01:
        raise ValueError(f"{gpus:g} of a GPU is less than the smallest share, 0.01")
    return int(gpus) if gpus == int(gpus) else round(gpus, 4)


Gpus = Annotated[float, Field(ge=0.0, le=100_000, allow_inf_nan=False), AfterValidator(_whole_or_fraction)]
"""0, a fraction of one GPU, or a whole number."""


class RoleResources(Config):
    """What one role occupies in the split layout."""

    gpus: Annotated[Gpus, Field(gt=0.0)] = 1
    """GPUs of one replica. A replica is never split over nodes, so a tensor-parallel engine stays on one."""
    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Replicas of this size; each may be on another node. They start together or not at all."""


class Resources(Config):
    """What the job's server occupies."""

    gpus: Gpus | None = None
    """GPUs on one node; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot. A fraction, such as
    0.25, shares one GPU with other fractions."""
    layout: Literal["colocated", "split"] = "colocated"
    """'colocated' keeps trainer and rollout engine on the same GPUs; 'split' sizes them apart (not yet served)."""
    trainer: RoleResources | None = None
    """Layout 'split' only: what the trainer occupies."""
    rollout: RoleResources | None = None
    """Layout 'split' only: what the rollout engines occupy."""

    @model_validator(mode="after")
    def _roles_fit_layout(self) -> "Resources":
        roles = {"trainer": self.trainer, "rollout": self.rollout}
        if self.layout == "colocated" and (given := [name for name, role in roles.items() if role is not None]):
            raise ValueError(f"{' and '.join(given)} can only be sized with layout 'split'; 'colocated' takes gpus")
        if self.layout == "split" and (absent := [name for name, role in roles.items() if role is None]):
            raise ValueError(f"layout 'split' needs {' and '.join(absent)}, such as {absent[0]}.gpus=1")
        if self.layout == "split" and self.gpus is not None:
            raise ValueError("layout 'split' takes trainer.gpus and rollout.gpus, not gpus")
        return self


class Scheduling(Config):
    """When the job's turn comes."""

    priority: Annotated[int, Field(ge=-10, le=10)] = 0
    """Jobs of a higher priority go first, whatever anybody used; within a priority, fair share and waiting time decide."""
    time_limit_s: Seconds | None = None
    """Longest time that the job may hold its resources; then it FAILs, with its weights saved as checkpoint `stopped`. With a
    limit, a job may fill gaps in front of larger jobs; without one, it never overtakes."""
    idle_limit_s: Seconds | None = None
    """Longest time that a RUNNING job's server may have nothing to do; then the job ends: FAILED if the cluster drives it,
    CANCELLED if a client does, COMPLETED if nobody has to. None = no limit."""
    max_restarts: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a job whose server or driver died goes back into the queue, to go on from its last checkpoint; without one, it
    starts anew. Not for jobs with a lease: their client gets a ServerLostError, and starts anew from a checkpoint."""


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
    pass_at: tuple[Count, ...] = ()
    """Report pass@k for these k: the chance that one of k episodes of a task is exact (reports `exact` of 1, or without that
    metric earns 1 or more), estimated from `samples_per_task` without bias (Chen et al., 2021, eq. 1)."""
    metric: str = ""
    """What `keep_best` and `training.stop` look at: `reward`, `exact`, `pass@4`, or a metric that the environment reports.
    Empty = `exact` where the environment reports it, else `reward`."""
    keep_best: bool = False
    """Save the checkpoint `best` whenever an evaluation is better than all before it."""

    @model_validator(mode="after")
    def _enough_samples(self) -> "EvaluationConfig":
        if self.pass_at and max(self.pass_at) > self.samples_per_task:
            raise ValueError(
                f"pass_at {max(self.pass_at)} needs samples_per_task of at least that, not {self.samples_per_task}"
            )
        if self.metric.startswith("pass@") and self.metric not in [f"pass@{k}" for k in self.pass_at]:
            raise ValueError(f"metric {self.metric} needs {self.metric.removeprefix('pass@')} in pass_at")
        return self


class StopConfig(Config):
    """When a run has learnt all it will, or breaks. It is saved first, as checkpoint `stopped-early`."""

    plateau: Count | None = None
    """End after this many evaluations in a row without a new best."""
    falls: Count | None = None
    """Act after this many evaluations in a row, each worse than the one before."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] | None = None
    """Act when a step's gradient norm, before clipping, is larger."""
    max_mismatch_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Act when engine and trainer are further apart."""
    max_reference_kl: Annotated[float, Field(gt=0.0)] | None = None
    """Act when the policy is further from its reference; needs algorithm.kl with place 'loss'."""
    action: Literal["stop", "reduce"] = "stop"
    """'stop' ends the run, COMPLETED; 'reduce' multiplies the learning rate with `factor`, and stops at the third time."""
    factor: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.3
    """Of action 'reduce'."""


class RLTrainingConfig(Config):
    """The driver loop."""

    steps: Count = 100
    """Rollout-and-update steps."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Tasks, samples and adapter initialisation derive from it."""
    optimizer: AdamParams = AdamParams()
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """The learning rate rises linearly over these steps."""
    decay: Literal["none", "linear"] = "none"
    """'linear' lets the learning rate fall after the warm-up, to reach 0 one step after the last; steadier endings."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoint every this many steps; the last step is always saved under 'final'."""
    keep_last: Count | None = None
    """Keep this many of the newest periodic checkpoints, and of those called 'best' the best one; delete those before, but none
    that has a tag or that a job started from. None = keep all."""
    stop: StopConfig = StopConfig()
    transcripts_per_step: Annotated[int, Field(ge=0)] = 2
    """Sample episodes written to the run's transcripts."""


class JobConfig(Config):
    """What jobs of every kind have: a server, and a place in the queue. Subclasses are the kinds."""

    driven: ClassVar[bool] = False
    """The cluster runs a driver for it; otherwise whoever has its token uses its server."""
    trains: ClassVar[bool] = True
    """Its server has a trainer, so that there is something to save."""

    kind: str
    name: str = ""
    """Shown by `opentinker ps`; free text."""
    base_model: str
    """A known model name (`smollm2-135m`), or a directory with a Hugging Face model on the cluster."""
    lora: LoraConfig | None = None
    """An adapter to train; None trains the full parameters."""
    start_from: str = ""
    """A checkpoint whose weights the policy starts from, as `user/job/name@version`; `user/` and `@version` may be left out.
    Its base model has to be this job's, and its adapter, too, if the job trains; the optimizer starts anew."""
    engine: EngineConfig = EngineConfig()
    resources: Resources = Resources()
    scheduling: Scheduling = Scheduling()

    @model_validator(mode="after")
    def _can_restart(self) -> "JobConfig":
        if self.scheduling.max_restarts and self.leased:
            raise ValueError(
                "scheduling.max_restarts is for jobs that the cluster drives: here the client has to go on, from a checkpoint"
            )
        return self

    @model_validator(mode="after")
    def _only_adapters_share(self) -> "JobConfig":
        if self.engine.max_adapters > 1 and self.lora is None:
            raise ValueError(
                f"engine.max_adapters={self.engine.max_adapters} is for adapters, and this job has no lora: full parameters "
                "need the server to themselves"
            )
        return self

    @property
    def leased(self) -> bool:
        """It ends when its client stops to send heartbeats."""
        return False

    @property
    def policy_seed(self) -> int:
        """Of the adapter's initialisation."""
        return 0

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        """'scalar' for a reward model."""
        return "lm"

    @property
    def policy_critic(self) -> LoraConfig | None:
        """The adapter of the policy's critic, if it has one."""
        return None

    def default_name(self) -> str:
        """What it is called if its user gave it no name."""
        return PurePath(self.base_model).name or self.base_model

    @abstractmethod
    def server(self) -> ServerConfig:
        """What hosts it."""


class RLJobConfig(JobConfig):
    """A reinforcement-learning job."""

    driven: ClassVar[bool] = True

    kind: Literal["rl"] = "rl"
    trainer: TrainerConfig = TrainerConfig()
    environment: EnvironmentConfig
    algorithm: AlgorithmConfig = GRPOConfig()
    sampling: SamplingConfig = SamplingConfig()
    rollout: RolloutConfig = RolloutConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    training: RLTrainingConfig = RLTrainingConfig()
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @model_validator(mode="after")
    def _action_fits_context(self) -> "RLJobConfig":
        if self.sampling.max_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"sampling.max_tokens ({self.sampling.max_tokens}) leaves no room for a prompt in "
                f"engine.max_model_len ({self.engine.max_model_len})"
            )
        return self

    @model_validator(mode="after")
    def _limits_are_measured(self) -> "RLJobConfig":
        kl = self.algorithm.kl
        if self.training.stop.max_reference_kl is not None and not (kl.coefficient and kl.place == "loss"):
            raise ValueError(
                "training.stop.max_reference_kl needs algorithm.kl.coefficient above 0 and algorithm.kl.place 'loss'"
            )
        return self

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    @property
    def policy_critic(self) -> LoraConfig | None:
        if not isinstance(self.algorithm, PPOConfig):
            return None
        return LoraConfig(rank=self.algorithm.critic.rank, alpha=self.algorithm.critic.alpha)

    def default_name(self) -> str:
        name = self.environment.name
        return name.partition("//")[2].partition(",")[0] if name.startswith("http") else name.rpartition(":")[2]

    def server(self) -> ServerConfig:
        return _training_server(self.base_model, self.engine, self.trainer)


class SFTJobConfig(JobConfig):
    """Supervised fine-tuning on conversations."""

    driven: ClassVar[bool] = True

    kind: Literal["sft"] = "sft"
    trainer: TrainerConfig = TrainerConfig()
    data: ChatDataConfig
    evaluation: SFTEvaluationConfig = SFTEvaluationConfig()
    training: SFTTrainingConfig = SFTTrainingConfig()
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    def default_name(self) -> str:
        return PurePath(self.data.train.name).stem

    def server(self) -> ServerConfig:
        return _training_server(self.base_model, self.engine, self.trainer)


class PreferenceJobConfig(JobConfig):
    """Preference training on pairs of answers: a policy (DPO, IPO) or a reward model."""

    driven: ClassVar[bool] = True

    kind: Literal["preference"] = "preference"
    trainer: TrainerConfig = TrainerConfig()
    data: PreferenceDataConfig
    loss: PreferenceLoss = DPOConfig()
    evaluation: PreferenceEvaluationConfig = PreferenceEvaluationConfig()
    training: PreferenceTrainingConfig = PreferenceTrainingConfig()
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @property
    def policy_seed(self) -> int:
        return self.training.seed

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        return "scalar" if isinstance(self.loss, BradleyTerryConfig) else "lm"

    def default_name(self) -> str:
        return PurePath(self.data.train.name).stem

    def server(self) -> ServerConfig:
        return _training_server(self.base_model, self.engine, self.trainer)


class InteractiveJobConfig(JobConfig):
    """A job whose driver runs in the user's process: only what the cluster must host."""

    kind: Literal["interactive"] = "interactive"
    trainer: TrainerConfig = TrainerConfig()
    head: Literal["lm", "scalar"] = "lm"
    """'scalar' makes the policy a reward model, which scores and cannot be sampled."""
    critic: LoraConfig | None = None
    """The adapter of a critic beside the policy, for PPO; None = no critic."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Tasks, samples and adapter initialisation derive from it."""

    @model_validator(mode="after")
    def _critic_judges_actions(self) -> "InteractiveJobConfig":
        if self.critic is not None and self.head == "scalar":
            raise ValueError("a policy with head 'scalar' takes no actions that a critic could judge")
        return self

    @property
    def policy_head(self) -> Literal["lm", "scalar"]:
        return self.head

    @property
    def policy_critic(self) -> LoraConfig | None:
        return self.critic

    @property
    def leased(self) -> bool:
        return True

    @property
    def policy_seed(self) -> int:
        return self.seed

    def server(self) -> ServerConfig:
        return _training_server(self.base_model, self.engine, self.trainer)


class InferenceJobConfig(JobConfig):
    """A model to sample from: an engine without a trainer. It runs until it is ended, or until one of its limits."""

    trains: ClassVar[bool] = False

    kind: Literal["inference"] = "inference"
    lora: None = None
    """Not for this kind: a checkpoint brings its adapter along."""
    dtype: Dtype = "bfloat16"
    """Type of weights and activations."""
    lease: bool = False
    """It ends when its client stops to send heartbeats, as an interactive job does."""

    @model_validator(mode="before")
    @classmethod
    def _engine_has_the_gpu(cls, values: Any) -> Any:
        """The default of `engine.memory_fraction` leaves room for a trainer, which is not there."""
        engine = values.get("engine", {}) if isinstance(values, Mapping) else None
        if isinstance(engine, EngineConfig):
            engine = engine.model_dump(include=engine.model_fields_set)
        if isinstance(engine, Mapping) and "memory_fraction" not in engine:
            return {**values, "engine": {**engine, "memory_fraction": INFERENCE_MEMORY_FRACTION}}
        return values

    @property
    def leased(self) -> bool:
        return self.lease

    def server(self) -> ServerConfig:
        return ServerConfig(base_model=self.base_model, engine=self.engine, dtype=self.dtype)


def _training_server(base_model: str, engine: EngineConfig, trainer: TrainerConfig) -> ServerConfig:
    return ServerConfig(base_model=base_model, engine=engine, dtype=trainer.dtype, trainer=trainer)


KINDS: Mapping[str, type[JobConfig]] = {
    "rl": RLJobConfig,
    "sft": SFTJobConfig,
    "preference": PreferenceJobConfig,
    "interactive": InteractiveJobConfig,
    "inference": InferenceJobConfig,
}
"""Every kind of job there is."""


def parse_job(values: Mapping[str, Any]) -> JobConfig:
    """Validate a job's config by its `kind`.

    Raises:
        ConfigError: an unknown kind, or whatever `parse_config` finds.
    """
    kind = str(values.get("kind"))
    if kind not in KINDS:
        raise ConfigError(f"kind: {kind!r} is not a kind of job", hint=nearest(kind, KINDS))
    return parse_config(KINDS[kind], values)
