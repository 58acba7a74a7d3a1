"""Activation checkpointing (Chen et al., 2016): the layers keep their inputs only, and compute the rest again when the backward
pass comes to them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from opentinker.errors import ConfigError

Again = Callable[[], AbstractContextManager[None]]
"""Restores what was set around a pass, for as long as a part of it runs once more."""


def recompute_layers(model: nn.Module, around: Callable[[], Again]) -> None:
    """Let each layer of the model keep its input only while gradients are computed. `around` is asked in each pass for what to
    run a layer in when it is computed again: which adapters are on, for the pass has ended by then.

    The results are the same bit for bit, since what is computed again are the same operations on the same numbers.

    Raises:
        ConfigError: the model does not say what its layers are.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"{type(model).__name__} has no layers that could be computed again",
            hint="set trainer.activation_checkpointing=false",
        )
    for layer in layers:
        layer.forward = partial(_recomputed, layer.forward, around)


def _recomputed(forward: Callable[..., Any], around: Callable[[], Again], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    again = around()
    # Nothing in a layer draws random numbers: the model is in evaluation mode.
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        preserve_rng_state=False,
        context_fn=lambda: (nullcontext(), again()),
        **kwargs,
    )
