"""The critic of a policy: what PPO's baseline comes from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opentinker.config.server import LoraConfig
from opentinker.server.trainer import checkpoint, lora
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.packing import Pack
from opentinker.server.trainer.scalar_head import ScalarHead

CRITIC = "critic.safetensors"
"""In a checkpoint: the critic's weights and its optimizer's state."""


class Critic:
    """A value model: an adapter of its own on the frozen base model, and a scalar head. Its values are 0 until it is trained.

    It shares no trained weight with the policy, so neither moves the other.
    """

    def __init__(
        self,
        base: PackedModel,
        current: lora.AdapterPass,
        policy: str,
        config: LoraConfig,
        seed: int,
        optimize: Callable[[str, Mapping[str, nn.Parameter]], MasterOptimizer],
    ) -> None:
        """`optimize` makes the optimizer of parameters, under a name of its own.

        Raises:
            ConfigError: the adapter's config fits no layer.
            TooLargeError, TrainerError: as `optimize` raises it.
        """
        self.config = config
        self._base, self._current = base, current
        self._name = f"critic of {policy}"
        self._head = ScalarHead(base.hidden_size, base.device, bias=True)
        names, self.targets = lora.resolve_targets(base.model, base.config, config)
        adapter = lora.add_adapters(base.model, names, current, self._name, config, seed)
        try:
            self.optimizer = optimize(self._name, {**adapter, **self._head.parameters()})
        except Exception:
            lora.remove_adapters(base.model, self._name)
            raise

    def values(self, pack: Pack) -> torch.Tensor:
        """V(s) before each weighted target of the pack is sampled, float32[N], differentiable in the critic's weights."""
        with self._current.using([self._name]):
            return self._base.scalars(pack, self._head)

    def identity(self) -> dict[str, Any]:
        """What a checkpoint's critic must have in common with the one that loads it."""
        return lora.identity(self.config, self.targets)

    def save(self, folder: Path) -> dict[str, Any]:
        """Write what it takes to continue bit for bit; what `load` needs in the trainer's state."""
        checkpoint.write_tensors(folder / CRITIC, self.optimizer.state())
        return {"critic_step": self.optimizer.step_count, "critic_progress": self.optimizer.progress()}

    def load(self, folder: Path, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint with this trainer's state.

        Raises:
            CheckpointError: it has other tensors; nothing was changed.
        """
        tensors = checkpoint.read_tensors(folder / CRITIC, self.optimizer.like())
        self.optimizer.load_state(tensors, int(state["critic_step"]))
        self.optimizer.load_progress(state.get("critic_progress", {}))

    def start_from(self, folder: Path) -> None:
        """Begin anew at a checkpoint's weights.

        Raises:
            CheckpointError: it has other tensors; nothing was changed.
        """
        self.optimizer.start_from(checkpoint.read_tensors(folder / CRITIC, self.optimizer.weights(), part=True))

    def close(self) -> None:
        """Take the adapter off the base model."""
        self.optimizer.close()
        lora.remove_adapters(self._base.model, self._name)
