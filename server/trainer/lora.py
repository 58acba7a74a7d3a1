"""Linear layers that hold the adapters of many policies (Hu et al., 2021): y = W x + alpha / rank * B A x.

A pass says which adapter each of its tokens uses, so tokens of several policies can share one pass over the frozen base.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError
from opentinker.server.engine.base import LoraTensors
from opentinker.server.trainer.checkpoint import write_tensors
from opentinker.server.vision import auto_class, language_prefix, takes_images

PEFT_PREFIX = "base_model.model."
"""What PEFT puts before the Hugging Face name of an adapted layer."""


class AdapterPass:
    """Which adapters the current pass uses; shared by all layers of a model. Not reentrant."""

    def __init__(self) -> None:
        self.policies: tuple[str, ...] = ()
        self.rows: tuple[torch.Tensor, ...] | None = None
        """Which tokens use the adapter of each policy; None: all of them use the one."""

    @contextmanager
    def using(self, policies: Sequence[str], slots_T: torch.Tensor | None = None) -> Iterator[None]:
        """Token t uses the adapter of `policies[slots_T[t]]`, or none where the slot is -1. Without slots all tokens use
        the one adapter given."""
        if slots_T is None and len(policies) > 1:
            raise ValueError("several adapters need a slot for each token")
        self.policies = tuple(policies)
        # Found once for all layers.
        self.rows = None if slots_T is None else tuple((slots_T == slot).nonzero()[:, 0] for slot in range(len(policies)))
        try:
            yield
        finally:
            self.policies, self.rows = (), None

    def around(self) -> Callable[[], AbstractContextManager[None]]:
        """What the current pass uses, to be used once more when the pass is over."""
        now = self.policies, self.rows

        @contextmanager
        def again() -> Iterator[None]:
            before = self.policies, self.rows
            self.policies, self.rows = now
            try:
                yield
            finally:
                self.policies, self.rows = before

        return again


@dataclass(frozen=True)
class Adapter:
    """One policy's adapter of one layer: A is [rank, in], B is [out, rank]."""

    A: nn.Parameter
    B: nn.Parameter
    scale: float


class _AdaptedLinear(torch.autograd.Function):
    """W x + scale * B A x with as few passes over the activations as possible; W is frozen."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        A: torch.Tensor,
        B: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        rows = x.reshape(-1, x.shape[-1])
        low = rows @ A.t()
        out = F.linear(rows, weight, bias).addmm_(low, B.t(), alpha=scale)
        ctx.scale = scale
        ctx.save_for_backward(rows, low, weight, A, B)
        return out.view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, None, None, torch.Tensor, torch.Tensor, None]:
        rows, low, weight, A, B = ctx.saved_tensors
        grad = grads[0].reshape(-1, grads[0].shape[-1])
        low_grad = (grad @ B).mul_(ctx.scale)
        x_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = (grad @ weight).addmm_(low_grad, A).view(*grads[0].shape[:-1], -1)
        return x_grad, None, None, low_grad.t() @ rows, (grad.t() @ low).mul_(ctx.scale), None


class LoraLinear(nn.Module):
    """A frozen linear layer and the adapters of the policies that adapt it."""

    def __init__(self, base: nn.Linear, current: AdapterPass) -> None:
        super().__init__()
        self.base = base
        self.adapters: dict[str, Adapter] = {}  # a plain dict: adapters are not parameters of the base model
        self._current = current

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled layers stay as they are when policies come and go
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        policies, chosen = self._current.policies, self._current.rows
        if chosen is None:
            adapter = self.adapters.get(policies[0]) if policies else None
            if adapter is None:
                out: torch.Tensor = self.base(x)
                return out
            adapted: torch.Tensor = _AdaptedLinear.apply(  # type: ignore[no-untyped-call]
                x, self.base.weight, self.base.bias, adapter.A, adapter.B, adapter.scale
            )
            return adapted
        rows = x.reshape(-1, x.shape[-1])
        out = self.base(rows)
        for policy, rows_of_policy in zip(policies, chosen, strict=True):
            if policy in self.adapters:
                adapter = self.adapters[policy]
                update = F.linear(F.linear(rows[rows_of_policy], adapter.A), adapter.B)
                out = out.index_add(0, rows_of_policy, update, alpha=adapter.scale)
        return out.view(*x.shape[:-1], -1)


def resolve_targets(model: nn.Module, model_config: Any, config: LoraConfig) -> tuple[list[str], tuple[str, ...]]:
    """(full names of the layers to adapt, PEFT's `target_modules`), as PEFT resolves them. Of a model with a vision tower only
    the language model is adapted.

    Raises:
        ConfigError: no layer matches, or one that matches is not linear.
    """
    import peft

    # PEFT rewrites the model it is given, so it gets one without weights.
    with torch.device("meta"):
        shape = auto_class(model_config).from_config(model_config)
    wanted = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    try:
        adapted = peft.get_peft_model(
            shape, peft.LoraConfig(r=config.rank, target_modules=wanted, task_type="CAUSAL_LM"), low_cpu_mem_usage=True
        )
    except ValueError as error:
        raise ConfigError(f"lora.target_modules: {error}", hint="use 'all-linear'") from error
    names = list(adapted.base_model.targeted_module_names)
    targets = tuple(sorted(adapted.peft_config["default"].target_modules))
    if takes_images(model_config):
        prefix = language_prefix(model)
        # PEFT takes a full name for that one layer, and a short one for every layer of that name, the vision tower's too.
        names = [name for name in names if name.startswith(prefix)]
        targets = tuple(sorted(names))
        if not names:
            raise ConfigError(
                "lora.target_modules: no layer of the language model is among them, and the vision tower stays as it is",
                hint="use 'all-linear'",
            )
    for name in names:
        layer = model.get_submodule(name)
        if not isinstance(layer, nn.Linear | LoraLinear):
            raise ConfigError(f"lora.target_modules: {name} is not a linear layer", hint="use 'all-linear'")
    return names, targets


def add_adapters(
    model: nn.Module, names: Sequence[str], current: AdapterPass, policy: str, config: LoraConfig, seed: int
) -> dict[str, nn.Parameter]:
    """Give the named layers an adapter for `policy`; its parameters under their PEFT names.

    Initialized as PEFT does: A is uniform (Kaiming with a = sqrt(5)), drawn from `seed`; B is zero.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters: dict[str, nn.Parameter] = {}
    for name in names:
        layer = _adaptable(model, name, current)
        weight = layer.base.weight
        A = torch.empty(config.rank, weight.shape[1])
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        B = torch.zeros(weight.shape[0], config.rank)
        adapter = Adapter(
            nn.Parameter(A.to(weight.device, weight.dtype)),
            nn.Parameter(B.to(weight.device, weight.dtype)),
            config.alpha / config.rank,
        )
        layer.adapters[policy] = adapter
        parameters[f"{PEFT_PREFIX}{name}.lora_A.weight"] = adapter.A
        parameters[f"{PEFT_PREFIX}{name}.lora_B.weight"] = adapter.B
    return parameters


def _adaptable(model: nn.Module, name: str, current: AdapterPass) -> LoraLinear:
    """The linear layer of that name, able to hold adapters from now on."""
    layer = model.get_submodule(name)
    if not isinstance(layer, LoraLinear):
        assert isinstance(layer, nn.Linear)
        layer = LoraLinear(layer, current)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, layer)
    return layer


def place_adapter(model: nn.Module, current: AdapterPass, policy: str, adapter: LoraTensors) -> dict[str, torch.Tensor]:
    """Give the layers that an adapter names a frozen copy of it, for `policy`; what was placed, by its PEFT names. Tensors that
    fit no layer are left out."""
    modules = dict(model.named_modules())
    placed: dict[str, torch.Tensor] = {}
    for name in sorted({name.removeprefix(PEFT_PREFIX).rsplit(".lora_", 1)[0] for name in adapter.tensors}):
        parts = [f"{PEFT_PREFIX}{name}.lora_{part}.weight" for part in "AB"]
        layer = modules.get(name)
        if not isinstance(layer, nn.Linear | LoraLinear) or any(part not in adapter.tensors for part in parts):
            continue
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.base.weight
        A, B = (adapter.tensors[part].detach().to(weight.device, weight.dtype, copy=True) for part in parts)
        if (A.shape, B.shape) != ((adapter.rank, weight.shape[1]), (weight.shape[0], adapter.rank)):
            continue
        frozen_A, frozen_B = (nn.Parameter(tensor, requires_grad=False) for tensor in (A, B))
        _adaptable(model, name, current).adapters[policy] = Adapter(frozen_A, frozen_B, adapter.alpha / adapter.rank)
        placed |= dict(zip(parts, (A, B), strict=True))
    return placed


def remove_adapters(model: nn.Module, policy: str) -> None:
    """Take the policy's adapters out of every layer."""
    for layer in model.modules():
        if isinstance(layer, LoraLinear):
            layer.adapters.pop(policy, None)


def merged_weight(weight: torch.Tensor, layer: LoraLinear, policy: str) -> torch.Tensor:
    """The layer's weight with the policy's adapter in it; see `merge`."""
    adapter = layer.adapters[policy]
    return merge(weight, adapter.A.detach(), adapter.B.detach(), adapter.scale)


def merge(weight: torch.Tensor, A: torch.Tensor, B: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A, computed in float32 from the frozen W and cast to its dtype."""
    return torch.add(weight.float(), B.float() @ A.float(), alpha=scale).to(weight.dtype)


def peft_tensors(config: LoraConfig, targets: tuple[str, ...], parameters: Mapping[str, nn.Parameter]) -> LoraTensors:
    """The adapter in PEFT's layout; the tensors are copies."""
    tensors = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    return LoraTensors(config.rank, config.alpha, targets, tensors)


def identity(config: LoraConfig, targets: tuple[str, ...]) -> dict[str, Any]:
    """What makes two adapters alike, as JSON."""
    return {**config.model_dump(mode="json"), "target_modules": list(targets)}


def save_peft(folder: Path, adapter: LoraTensors, base_model: str, *, classifier: bool = False) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`, as `peft.PeftModel.from_pretrained` reads them; with
    `classifier`, onto a sequence classifier whose head is among the tensors."""
    import peft

    config = peft.LoraConfig(
        r=adapter.rank,
        lora_alpha=adapter.alpha,
        target_modules=list(adapter.target_modules),
        task_type="SEQ_CLS" if classifier else "CAUSAL_LM",
        modules_to_save=["score"] if classifier else None,
        base_model_name_or_path=base_model,
        inference_mode=True,
    )
    config.save_pretrained(folder)
    write_tensors(folder / "adapter_model.safetensors", adapter.tensors)
