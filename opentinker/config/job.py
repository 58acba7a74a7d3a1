"""The configs of a job. A YAML file, a Python call and the scheduler's store all hold the same fields."""

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import PurePath
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from opentinker.client.messages import AdamParams, StopString
from opentinker.config.agents import TurnsConfig
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
    """CUDA only: the engine's share of the GPU; the trainer lives in the rest. 0.9 by default in a job of kind `inference`, and
    in the layout `split`."""
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
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices of one node that share the model, layer by layer, for models that are too large or too slow on one; vLLM only. It
    divides the attention heads. In a job that trains it needs `resources.layout=split`."""
    bucket_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Weights reach an engine in another process in buckets of this size, of which two are on their way at a time."""
    sleep: Literal["auto", "off"] = "off"
    """'auto': on CUDA, where vLLM shares the GPU with the trainer, it gives up the GPU's memory during each train step (its
    weights wait in the host's memory), unless requests are running. Costs seconds per step. 'off': it keeps
    `memory_fraction`."""

    @model_validator(mode="after")
    def _one_merged(self) -> "EngineConfig":
        if self.max_adapters > 1 and self.lora_serving == "merge":
            raise ValueError(
                f"max_adapters={self.max_adapters} needs adapters that are served; lora_serving='merge' folds one into the base"
            )
        return self

    @model_validator(mode="after")
    def _vllm_is_parallel(self) -> "EngineConfig":
        if self.tensor_parallel > 1 and self.kind == "transformers":
            raise ValueError(
                f"tensor_parallel={self.tensor_parallel} needs kind 'vllm': the engine 'transformers' has one device"
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
    pack_tokens: Annotated[int, Field(ge=16)] = 2048
    """Tokens in one packed forward pass. A group that does not fit is split."""
    activation_checkpointing: bool = False
    """Keep only the inputs of the layers until the backward pass, which then computes the rest again: less memory for a pack,
    so longer ones fit, for more time. The numbers are the same, bit for bit."""
    compile: bool = False
    """Compile the model's layers with torch.compile: half a minute or so in the first step, for faster ones after it. It takes
    a C++ compiler on CPU, Triton on CUDA. Fused kernels round less often, so that in bfloat16 the numbers differ a little."""
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    """`adamw_8bit`: moments in a byte each, in blocks with a scale: 2 bytes per trained parameter in place of 8, for slower
    steps. Of the policy; a critic's stay in float32."""
    attention: Literal["auto", "sdpa", "flex"] = "auto"
    """How the trainer attends: `sdpa` tile by tile, `flex` with one FlexAttention kernel over a pack, which is compiled (CUDA
    only); `auto` = sdpa."""
    memory_gb: Annotated[float, Field(gt=0.0)] | None = None
    """Memory (10^9 bytes) that one pass may take, beside weights, gradients and optimizer state; None: most of what is free
    when it begins. Packs that would take more are made smaller, and data that cannot fit are refused."""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes that train together, each on a GPU of its own, or on a CPU slot. Each computes a part of every batch, and holds
    a share of the optimizer's state and, if the full parameters are trained, of the layers."""
    shard_base: bool = False
    """With several ranks and an adapter: share out the layers of the frozen base model, too, so that larger ones fit. Each pass
    then gathers them, so it is slower. Full parameters are always shared out."""
    drift_limit: Annotated[float, Field(gt=0.0)] = 3.0
    """A publish fails when engine and trainer logprobs on fixed prompts differ by more than this many times version 0's
    difference (and by more than 0.05)."""

    @model_validator(mode="after")
    def _shared_out_among_several(self) -> "TrainerConfig":
        if self.memory_gb is not None and self.ranks > 1:
            raise ValueError("memory_gb is measured and kept to on one rank only; with several, pack_tokens bounds a pass")
        if self.compile and self.ranks > 1:
            raise ValueError(f"compile is for one rank, and ranks is {self.ranks}; set compile to false")
        if self.ranks > 1 and (self.optimizer != "adamw" or self.dtype == "float16"):
            which = "optimizer=adamw_8bit" if self.optimizer != "adamw" else "dtype=float16"
            raise ValueError(f"{which} is for one rank, and ranks is {self.ranks}; use bfloat16 or float32 with adamw")
        if self.shard_base and self.ranks == 1:
            raise ValueError("shard_base shares out the base model among ranks, and there is one; set ranks to 2 or more")
        return self


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

    gpus: Gpus | None = None
    """GPUs of one replica; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot. A replica is never
    split over nodes, so a tensor-parallel engine stays on one."""
    replicas: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Replicas of this size; each may be on another node. They start together or not at all. More than one are not served
    yet."""


class Resources(Config):
    """What the job's server occupies."""

    gpus: Gpus | None = None
    """GPUs on one node; None = one GPU if the cluster has any, otherwise one CPU slot; 0 = one CPU slot. A fraction, such as
    0.25, shares one GPU with other fractions. With `trainer.ranks` it is one for each rank."""
    layout: Literal["colocated", "split"] = "colocated"
    """'colocated' keeps trainer and rollout engine in one process and on the same GPUs; 'split' gives the engine a process and
    resources of its own, maybe on another node, and samples while the trainer computes."""
    trainer: RoleResources | None = None
    """Layout 'split' only: what the trainer occupies; None = its defaults."""
    rollout: RoleResources | None = None
    """Layout 'split' only: what the rollout engine occupies; None = its defaults."""

    @model_validator(mode="after")
    def _roles_fit_layout(self) -> "Resources":
        roles = {"trainer": self.trainer, "rollout": self.rollout}
        if self.layout == "colocated" and (given := [name for name, role in roles.items() if role is not None]):
            raise ValueError(f"{' and '.join(given)} can only be sized with layout 'split'; 'colocated' takes gpus")
        if self.layout == "split" and self.gpus is not None:
            raise ValueError("layout 'split' takes trainer.gpus and rollout.gpus, not gpus")
        return self

    @property
    def roles(self) -> dict[str, RoleResources]:
        """What each role occupies in the split layout."""
        return {"trainer": self.trainer or RoleResources(), "rollout": self.rollout or RoleResources()}


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

    @model_validator(mode="before")
    @classmethod
    def _split_engine_has_the_gpu(cls, values: Any) -> Any:
        """The default of `engine.memory_fraction` leaves room for a trainer, which in the split layout is elsewhere."""
        resources = values.get("resources", {}) if isinstance(values, Mapping) else None
        layout = (
            resources.layout if isinstance(resources, Resources) else isinstance(resources, Mapping) and resources.get("layout")
        )
        return _with_whole_gpu(values) if layout == "split" else values

    @model_validator(mode="after")
    def _a_gpu_for_each_part_of_the_engine(self) -> "JobConfig":
        ranks, resources = self.engine.tensor_parallel, self.resources
        if ranks == 1 and resources.layout != "split":
            return self
        if self.trains and resources.layout != "split":
            raise ValueError(
                f"engine.tensor_parallel={ranks} is for an engine apart from its trainer: set resources.layout to 'split'"
            )
        split = resources.layout == "split"
        key, gpus = ("rollout.gpus", resources.roles["rollout"].gpus) if split else ("gpus", resources.gpus)
        if gpus and max(1, gpus) != ranks:
            raise ValueError(
                f"engine.tensor_parallel={ranks} takes a GPU for each part, and resources.{key} is {gpus:g}; give both the same"
            )
        return self

    @model_validator(mode="after")
    def _a_trainer_to_split_from(self) -> "JobConfig":
        if self.resources.layout == "split" and not self.trains:
            raise ValueError(f"resources.layout 'split' is for jobs that train; a job of kind '{self.kind}' has an engine only")
        return self

    @model_validator(mode="after")
    def _a_gpu_for_each_rank(self) -> "JobConfig":
        resources, ranks = self.resources, self.trainer_ranks
        key, gpus = "resources.gpus", resources.gpus
        if resources.layout == "split":
            key, gpus = "resources.trainer.gpus", resources.roles["trainer"].gpus
        if gpus and ranks > max(1, gpus):
            raise ValueError(f"trainer.ranks={ranks} needs a GPU for each, and {key} is {gpus:g}; set {key}={ranks}")
        return self

    @property
    def trainer_ranks(self) -> int:
        """Processes of its trainer."""
        trainer = self.server().trainer
        return 1 if trainer is None else trainer.ranks

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


class AgentConfig(Config):
    """Who plays a seat of an environment for several agents. Without any field: a policy of its own, which learns as the job
    says."""

    policy: str = ""
    """Another agent, whose policy plays this seat, too, and learns from both."""
    script: str = ""
    """`path/to/file.py:function` plays instead of a policy: a function of (messages, random numbers) that gives a text."""
    frozen: bool = False
    """Its policy is never updated: it plays as it began."""
    lora: LoraConfig | None = None
    """Its adapter; None = the job's."""
    algorithm: AlgorithmConfig | None = None
    """How it learns; None = the job's."""
    optimizer: AdamParams | None = None
    """None = `training.optimizer`."""
    sampling: SamplingConfig | None = None
    """None = the job's."""

    @model_validator(mode="after")
    def _one_player(self) -> "AgentConfig":
        own = [name for name in ("lora", "algorithm", "optimizer", "sampling") if getattr(self, name) is not None]
        if self.policy and self.script:
            raise ValueError(f"bound to two players, the policy of '{self.policy}' and the script {self.script}")
        if (other := self.policy or self.script) and (own or self.frozen):
            raise ValueError(f"{', '.join(own) or 'frozen'} has no meaning: '{other}' plays this seat")
        if self.frozen and (teaches := [name for name in own if name in ("algorithm", "optimizer")]):
            raise ValueError(f"{' and '.join(teaches)} has no meaning: a frozen policy does not learn")
        return self


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
    agents: dict[str, AgentConfig] = Field(default_factory=dict)
    """Who plays which seat, for an environment of several agents: all of them learn in this one job."""
    turns: TurnsConfig = TurnsConfig()
    """With `agents`: what becomes of one that holds up the others."""
    sinks: Sinks = ()
    """Where the metrics go besides the run's folder: `tensorboard`, `wandb`, `mlflow`, `trackio`, each with its own fields."""

    @model_validator(mode="before")
    @classmethod
    def _room_for_agents(cls, values: Any) -> Any:
        """Where nothing is said of it, the server has room for the adapters of all agents. `white:` in YAML is `white: {}`."""
        agents = values.get("agents") if isinstance(values, Mapping) else None
        if isinstance(agents, Mapping):
            agents = {name: {} if agent is None else agent for name, agent in agents.items()}
            values = {**values, "agents": agents}
        engine = values.get("engine", {}) if isinstance(values, Mapping) else None
        if isinstance(engine, EngineConfig):
            engine = engine.model_dump(include=engine.model_fields_set)
        if isinstance(agents, Mapping) and isinstance(engine, Mapping) and "max_adapters" not in engine:
            count = sum(not _bound_elsewhere(agent) for agent in agents.values())
            if count > 1 and values.get("lora") is None:
                raise ValueError(f"agents: {count} policies share one base model, so they are adapters; set lora")
            return {**values, "engine": {**engine, "max_adapters": max(count, 1)}}
        return values

    @model_validator(mode="after")
    def _agents_have_players(self) -> "RLJobConfig":
        if not self.agents:
            if self.turns != TurnsConfig():
                raise ValueError("turns are those of several agents, and there are no agents")
            return self
        own = self.policies
        if not [name for name in own if not self.agents[name].frozen]:
            raise ValueError("agents: nobody learns; one needs a policy of its own that is not frozen")
        if self.agents[own[0]].lora not in (None, self.lora):
            raise ValueError(f"agents.{own[0]} has the job's own policy, so that its adapter is the job's: set lora")
        for name, agent in self.agents.items():
            if agent.policy and agent.policy not in own:
                what = "plays itself" if agent.policy == name else "is no agent with a policy of its own"
                raise ValueError(f"agents.{name}.policy: '{agent.policy}' {what}; those are {', '.join(own)}")
        if len(own) > self.engine.max_adapters:
            raise ValueError(f"agents have {len(own)} policies, and engine.max_adapters is {self.engine.max_adapters}")
        if wide := [name for name in own if (lora := self.agents[name].lora) and self.lora and lora.rank > self.lora.rank]:
            raise ValueError(f"agents.{wide[0]}.lora.rank is above lora.rank, the largest for which the server makes room")
        algorithms = {name: self.agents[name].algorithm or self.algorithm for name in own if not self.agents[name].frozen}
        if critics := [name for name, algorithm in algorithms.items() if isinstance(algorithm, PPOConfig)]:
            raise ValueError(f"agents.{critics[0]}: an agent among several cannot learn by PPO with a critic yet")
        if len({algorithm.group_size for algorithm in algorithms.values()}) > 1:
            sizes = ", ".join(f"{name} {algorithm.group_size}" for name, algorithm in algorithms.items())
            raise ValueError(f"agents play the same episodes, so their algorithms need the same group_size, not {sizes}")
        if resampling := [name for name, algorithm in algorithms.items() if algorithm.max_resamples]:
            raise ValueError(f"agents.{resampling[0]}: algorithm.max_resamples must be 0: all agents play the same episodes")
        if self.start_from or self.evaluation.keep_best or self.training.stop != StopConfig():
            raise ValueError("start_from, evaluation.keep_best and training.stop are for a job of one agent")
        return self

    @property
    def policies(self) -> list[str]:
        """The agents with policies of their own. The first of those that learn has the job's own policy."""
        own = [name for name, agent in self.agents.items() if not (agent.policy or agent.script)]
        return sorted(own, key=lambda name: self.agents[name].frozen)

    @model_validator(mode="after")
    def _action_fits_context(self) -> "RLJobConfig":
        own = {f"agents.{name}.": agent.sampling for name, agent in self.agents.items() if agent.sampling}
        for where, sampling in {"": self.sampling, **own}.items():
            if sampling.max_tokens >= self.engine.max_model_len:
                raise ValueError(
                    f"{where}sampling.max_tokens ({sampling.max_tokens}) leaves no room for a prompt in "
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
        return _with_whole_gpu(values)

    @property
    def leased(self) -> bool:
        return self.lease

    def server(self) -> ServerConfig:
        return ServerConfig(base_model=self.base_model, engine=self.engine, dtype=self.dtype)


def _with_whole_gpu(values: Any) -> Any:
    """The fields of a job whose engine has its GPU to itself, if they do not say otherwise."""
    engine = values.get("engine", {}) if isinstance(values, Mapping) else None
    if isinstance(engine, EngineConfig):
        engine = engine.model_dump(include=engine.model_fields_set)
    if isinstance(engine, Mapping) and "memory_fraction" not in engine:
        return {**values, "engine": {**engine, "memory_fraction": INFERENCE_MEMORY_FRACTION}}
    return values


def _bound_elsewhere(agent: Any) -> bool:
    """Whether an agent's config, validated or not, gives it no policy of its own."""
    fields = agent if isinstance(agent, Mapping) else vars(agent) if isinstance(agent, AgentConfig) else {}
    return bool(fields.get("policy") or fields.get("script"))


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
