"""The weights of a checkpoint, for an engine that has no trainer beside it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import AutoConfig

from opentinker.errors import CheckpointError
from opentinker.server.trainer.checkpoint import open_checkpoint
from opentinker.server.trainer.identity import base_digest, check_base
from opentinker.server.trainer.lora import PEFT_PREFIX, merge
from opentinker.server.vision import auto_class

ADAPTER = "adapter_model.safetensors"


def checkpoint_weights(model_dir: Path, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every Hugging Face parameter of a checkpoint, tied ones too: its own, or its adapter merged into the base model's.

    Raises:
        CheckpointError: a part is missing or corrupt, or it is an adapter of another architecture.
    """
    state = open_checkpoint(folder)
    if state["kind"] == "full":
        return iter(_parameters(folder).items())
    base = _parameters(model_dir)
    check_base(folder, state, base_digest(base.items()))
    return merged(base, folder, state["lora"])


def _parameters(folder: Path) -> dict[str, torch.Tensor]:
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        model: Any = auto_class(config).from_pretrained(folder, dtype="auto", local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot load the model in {folder}: {error}") from error
    return {name: parameter.detach() for name, parameter in model.named_parameters(remove_duplicate=False)}


def merged(base: dict[str, torch.Tensor], folder: Path, lora: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters of a base model with the adapter of a checkpoint in them.

    Raises:
        CheckpointError: the adapter cannot be read, or is of another architecture.
    """
    try:
        adapter = load_file(folder / ADAPTER)
        scale = float(lora["alpha"]) / int(lora["rank"])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise CheckpointError(f"cannot read the adapter in {folder}: {error}") from error
    layers = {name.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0] for name in adapter}
    if strange := sorted(layer for layer in layers if f"{layer}.weight" not in base):
        raise CheckpointError(f"the adapter in {folder} is of another model: this one has no {strange[0]}")
    for name, weight in base.items():
        layer = name.removesuffix(".weight")
        if layer in layers:
            A, B = (adapter[f"{PEFT_PREFIX}{layer}.lora_{part}.weight"] for part in "AB")
            if (B.shape[0], A.shape[1]) != tuple(weight.shape):
                raise CheckpointError(f"the adapter in {folder} is of another model: {layer} has other dimensions here")
            weight = merge(weight, A, B, scale)
        yield name, weight
