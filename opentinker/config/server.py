"""The configs of a server: its model, engine and trainer."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opentinker.config.base import Config, Count


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
    """CUDA only: the engine's share of each of its GPUs; the trainer lives in the rest. 0.9 by default in a job of kind
    `inference`, and in the layout `split`."""
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
    divides the attention heads. In the layout `colocated` part i shares its device with rank i of the trainer."""
    bucket_mib: Annotated[int, Field(ge=1, le=4096)] = 64
    """Weights reach an engine in other processes in buckets of this size, of which two are on their way at a time."""
    weight_carrier: Literal["auto", "host", "ipc", "nccl"] = "auto"
    """How weights reach an engine in other processes (the layout `split`, or several parts). 'host': through the host's memory.
    Between GPUs: 'ipc', memory of the trainer's GPU that the engine maps, on one node; 'nccl', a broadcast, to any node, in the
    layout `split` only. 'auto' takes ipc, nccl or host, the first that reaches every rank of the engine; any other is an error
    where it does not."""
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
    steps."""
    optimizer_state: Literal["device", "host"] = "device"
    """'host': master weights and moments, 12 bytes per trained parameter in bfloat16 (6 with `adamw_8bit`), are in the host's
    memory, page-locked, in place of the GPU's. Each step takes them through the GPU in buckets, at the speed of the bus between
    the two. Numbers and checkpoints are the same, bit for bit. On CPU it works alike, for slower steps, and saves nothing."""
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


def training_server(base_model: str, engine: EngineConfig, trainer: TrainerConfig) -> ServerConfig:
    return ServerConfig(base_model=base_model, engine=engine, dtype=trainer.dtype, trainer=trainer)


def with_whole_gpu(values: Any) -> Any:
    """The fields of a job whose engine has its GPU to itself, if they do not say otherwise."""
    engine = values.get("engine", {}) if isinstance(values, Mapping) else None
    if isinstance(engine, EngineConfig):
        engine = engine.model_dump(include=engine.model_fields_set)
    if isinstance(engine, Mapping) and "memory_fraction" not in engine:
        return {**values, "engine": {**engine, "memory_fraction": INFERENCE_MEMORY_FRACTION}}
    return values
