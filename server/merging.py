"""An adapter merged into its base model, as a model of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig

from opentinker.checkpoint_files import proved_state
from opentinker.errors import CheckpointError, ConfigError
from opentinker.export import ADAPTER
from opentinker.server.trainer.identity import base_digest, check_base
from opentinker.server.vision import auto_class
from opentinker.server.weights import merged

_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Tokenizer and processor files of a model directory."""
_WRITTEN = ("config.json", "generation_config.json")
"""What transformers writes with a model itself."""


@torch.no_grad()
def write_merged(folder: Path, target: Path, base_model: Path | None, dtype: str | None) -> None:
    """Write the base model with the adapter of a checkpoint in it, and its tokenizer, into an empty folder.

    Raises:
        CheckpointError: the adapter is of another base model.
        ConfigError: the base model is not there, or the dtype is none of ours.
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ConfigError(f"dtype '{dtype}' is not one of ours", hint="float32, bfloat16 or float16")
    state = proved_state(folder)
    home = base_model or Path(json.loads((folder / ADAPTER[0]).read_text())["base_model_name_or_path"])
    model = _load(home, "auto" if dtype is None else getattr(torch, dtype))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    check_base(folder, state, base_digest(parameters.items()))
    for name, weight in merged({n: p.detach() for n, p in parameters.items()}, folder, state["lora"]):
        parameters[name].copy_(weight)
    model.save_pretrained(target)
    for pattern in _SIDE_FILES:
        for path in home.glob(pattern):
            if not path.name.endswith(".index.json") and path.name not in _WRITTEN:
                shutil.copyfile(path, target / path.name)


def _load(home: Path, dtype: Any) -> Any:
    if not (home / "config.json").is_file():
        raise ConfigError(
            f"the base model is not at {home} on this machine", hint="--base-model DIR says where it is; DIR holds config.json"
        )
    try:
        config = AutoConfig.from_pretrained(home, local_files_only=True)
        return auto_class(config).from_pretrained(home, dtype=dtype, local_files_only=True)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(f"cannot load the model in {home}: {error}") from error
