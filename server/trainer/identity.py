"""Which base model an adapter belongs to: told by its weights, for two models of one architecture differ in nothing else."""

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from opentinker.errors import CheckpointError
from opentinker.server.digest import tensor_digest

BASE = "base_model_digest"
"""Where a checkpoint's trainer state says so; those of older releases do not."""


@torch.no_grad()
def base_digest(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """A digest of a model's weights, the same in whichever of our dtypes they were loaded, and of however many files."""
    digest = hashlib.blake2b(digest_size=16)
    for line in sorted(f"{name} {tensor_digest(tensor.detach().to(torch.bfloat16))}\n" for name, tensor in parameters):
        digest.update(line.encode())
    return digest.hexdigest()


def check_base(folder: Path, state: Mapping[str, Any], mine: str) -> None:
    """Whether an adapter is of this base model.

    Raises:
        CheckpointError: it is of another one.
    """
    theirs = state.get(BASE)
    if theirs is not None and theirs != mine:
        raise CheckpointError(
            f"the adapter {folder} is of another base model: that one's weights have the digest {theirs}, this one's {mine}",
            hint="load it beside the model that it was trained on",
        )
