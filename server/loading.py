"""Loads what a worker consists of."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from opentinker.config.server import LoraConfig, ServerConfig, TrainerConfig
from opentinker.server.engine.base import RolloutEngine
from opentinker.server.engine.host import BucketEngine, HostedEngine
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.engine.select import create_engine, resolve_engine_kind, resolve_lora_serving, resolve_sleep
from opentinker.server.engine.sleeping import Sleeper
from opentinker.server.images import ImageProcessor, ImageStore
from opentinker.server.models import stop_token_ids, tokenizer_files
from opentinker.server.state import Parts
from opentinker.server.sync import canary_prompts
from opentinker.server.trainer.lead_trainer import LeadTrainer
from opentinker.server.trainer.trainer import TorchTrainer
from opentinker.server.vision import takes_images


def device() -> str:
    """Where this process computes."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def load_engine(model_dir: Path, config: ServerConfig, lora: LoraConfig | None) -> HostedEngine:
    """Load an engine that has its process to itself. Call it from the thread that will use it."""
    images = _images(model_dir)
    return HostedEngine(_engine(model_dir, config, lora, images), images)


def _engine(
    model_dir: Path,
    config: ServerConfig,
    lora: LoraConfig | None,
    images: ImageStore | None,
    *,
    sleeps: bool = False,
    trainer_device: str | None = None,
) -> BucketEngine:
    return create_engine(
        model_dir,
        config.engine,
        config.dtype,
        lora=lora,
        stop_token_ids=stop_token_ids(model_dir),
        images=images,
        sleeps=sleeps,
        trainer_device=trainer_device,
    )


def _images(model_dir: Path) -> ImageStore | None:
    return ImageStore(ImageProcessor(model_dir)) if takes_images(AutoConfig.from_pretrained(model_dir)) else None


def load_parts(
    model_dir: Path,
    config: ServerConfig,
    lora: LoraConfig | None,
    checkpoint_root: Path,
    connect: Callable[[ImageStore | None], RemoteEngine] | None = None,
) -> Parts:
    """Load the engine and, if the config has one, the trainer: one after the other, for both set torch's global default dtype
    and initialisers meanwhile, so side by side they spoil each other's weights. Call it from the thread that will use them.
    With `connect` the engine is in another process, which loads it meanwhile; `connect` waits for that."""
    kind = resolve_engine_kind(config.engine)
    images = _images(model_dir)
    beside = None if config.trainer is None else device()
    sleeps = beside is not None and resolve_sleep(config.engine, kind, beside)
    engine: RolloutEngine | None = None
    if connect is None:
        engine = _engine(model_dir, config, lora, images, sleeps=sleeps, trainer_device=beside)
    if config.trainer is None:
        assert engine is not None, "an engine is split from a trainer"
        return Parts(engine, None, model_dir, checkpoint_root, images=images)
    trainer: TorchTrainer | None = None
    try:
        trainer = _load_trainer(model_dir, config.trainer, images)
        if connect is not None:
            engine = connect(images)
        assert engine is not None
        sleeper: Sleeper | None = getattr(engine, "sleeper", None)
        if sleeper is not None and config.engine.tensor_parallel > 1:
            sleeper.make_room = trainer.release_cache  # on each GPU that the engine wakes up on
        canaries = canary_prompts(model_dir / "tokenizer.json", images, engine.max_model_len)
    except BaseException:
        for part in (engine, trainer):
            if part is not None:
                part.close()
        raise
    return Parts(
        engine,
        trainer,
        model_dir,
        checkpoint_root,
        images=images,
        canaries=canaries,
        drift_limit=config.trainer.drift_limit,
        adapter_serving=resolve_lora_serving(config.engine, kind, device()) == "adapter",
        max_adapters=config.engine.max_adapters,
        kept_versions=config.engine.kept_versions,
        sleeper=sleeper,
    )


def _load_trainer(model_dir: Path, config: TrainerConfig, images: ImageStore | None) -> TorchTrainer:
    if config.ranks == 1:
        return TorchTrainer(model_dir, config, device=device(), images=images)
    return LeadTrainer(model_dir, config, device=device(), images=images)


def server_info(model_dir: Path, config: ServerConfig, parts: Parts) -> dict[str, Any]:
    """What clients may know, with the tokenizer's files under `tokenizer_files`."""
    return {
        "base_model": config.base_model,
        "engine": resolve_engine_kind(config.engine),
        "max_model_len": parts.engine.max_model_len,
        "vocab_size": int(AutoConfig.from_pretrained(model_dir).get_text_config().vocab_size),
        "stop_token_ids": list(stop_token_ids(model_dir)),
        "device": device(),
        "image_placeholder": None if parts.images is None else parts.images.processor.placeholder,
        "tokenizer_files": tokenizer_files(model_dir),
    }
