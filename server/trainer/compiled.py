"""The layers of a model compiled by torch.compile, so that what is neither a matrix product nor attention runs as a few fused
kernels."""

from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from opentinker.errors import ConfigError


def compile_layers(model: Any, device: torch.device) -> None:
    """Compile the layers of the language model. The first passes do the work, one with gradients and one without; packs of
    other lengths use the same kernels. Attention over a pack and linear layers with adapters stay as they are. What FSDP2 does
    around a layer that is shared out among ranks is no part of what is compiled: the layer finds its parameters whole.

    Raises:
        ConfigError: there is no compiler for the device, or the model does not say what its layers are.
    """
    _check_compiler(device)
    decoder: nn.Module = model.get_decoder()
    layers = [module for module in decoder.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(f"{type(model).__name__} has no layers that could be compiled", hint="set trainer.compile=false")
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=True)


def _check_compiler(device: torch.device) -> None:
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            raise ConfigError("trainer.compile needs Triton on CUDA, and it is not installed", hint="set trainer.compile=false")
        return
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise ConfigError(
            "trainer.compile needs a C++ compiler, and there is none where the server runs",
            hint="install g++ there, or set trainer.compile=false",
        ) from error
