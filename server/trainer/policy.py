"""One policy of a trainer: its optimizer, what it trains, and its checkpoints."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from opentinker.config.server import LoraConfig
from opentinker.errors import CheckpointError
from opentinker.server.trainer import checkpoint, lora
from opentinker.server.trainer.critic import Critic
from opentinker.server.trainer.identity import BASE, check_base
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.scalar_head import HEAD_WEIGHT, ScalarHead, classifier_config

_SIDE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
"""Tokenizer and config files of a model directory, which a full checkpoint carries along."""


@dataclass(frozen=True)
class Origin:
    """The base model that a policy learns on."""

    directory: Path
    config: Any
    """Of transformers."""
    digest: Callable[[], str]
    """Of the weights, which are frozen for adapters."""


@dataclass(frozen=True)
class Policy:
    """What a trainer holds of a policy, besides the model."""

    optimizer: MasterOptimizer
    lora: LoraConfig | None
    targets: tuple[str, ...]
    """PEFT's `target_modules`; empty for a full-parameter policy."""
    head: ScalarHead | None = None
    """Of a reward model; its weights are among the optimizer's."""
    critic: Critic | None = None

    def save(
        self,
        folder: Path,
        origin: Origin,
        whole: Callable[[Mapping[str, nn.Parameter]], Mapping[str, torch.Tensor]],
        about: Mapping[str, Any],
        beside: Mapping[str, str],
    ) -> dict[str, Any]:
        """See `Trainer.save`; `whole` gives parameters as full tensors."""
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CheckpointError(f"{folder} is not empty")
        if self.lora is None:
            for pattern in _SIDE_FILES:
                for path in origin.directory.glob(pattern):
                    if not path.name.endswith(".index.json"):
                        shutil.copyfile(path, folder / path.name)
            config = origin.config if self.head is None else classifier_config(origin.config)
            config.save_pretrained(folder)
            checkpoint.write_tensors(folder / "model.safetensors", whole(self.optimizer.parameters))
        else:
            adapter = lora.peft_tensors(self.lora, self.targets, self.optimizer.parameters)
            lora.save_peft(folder, adapter, str(origin.directory), classifier=self.head is not None)
        checkpoint.write_tensors(folder / checkpoint.OPTIMIZER, self.optimizer.state())
        critic = {} if self.critic is None else self.critic.save(folder)
        for name, text in beside.items():
            (folder / name).write_text(text)
        base = {} if self.lora is None else {BASE: origin.digest()}
        known = {**about, **self._identity(origin), **base, **critic, **self.optimizer.progress()}
        return checkpoint.seal(folder, {**known, "step": self.optimizer.step_count})

    def load(self, folder: Path, origin: Origin, *, weights_only: bool) -> None:
        """See `Trainer.load`."""
        found = checkpoint.open_checkpoint(folder)
        for key, mine in self._identity(origin).items():
            begins = weights_only and (key == "critic" or (key == "head" and found.get(key) is None))
            if found.get(key) != mine and not begins:
                raise CheckpointError(f"the checkpoint {folder} does not fit: its {key} is {found.get(key)}, not {mine}")
        if self.lora is not None:
            check_base(folder, found, origin.digest())
        if weights_only:
            like = self.optimizer.weights()
            if self.head is not None and found.get("head") is None:  # a new head on what has learnt to talk
                like = {key: weight for key, weight in like.items() if not key.endswith(HEAD_WEIGHT)}
            weights = checkpoint.read_tensors(folder / checkpoint.OPTIMIZER, like, part=True)
            if self.critic is not None and self.critic.identity() == found.get("critic"):
                self.critic.start_from(folder)
            self.optimizer.start_from(weights)
            return
        tensors = checkpoint.read_tensors(folder / checkpoint.OPTIMIZER, self.optimizer.like())
        if self.critic is not None:
            self.critic.load(folder, found)
        self.optimizer.load_state(tensors, int(found["step"]))
        self.optimizer.load_progress(found)

    def _identity(self, origin: Origin) -> dict[str, Any]:
        """What a checkpoint and the policy that loads it must have in common, besides all tensor shapes."""
        config = None if self.lora is None else lora.identity(self.lora, self.targets)
        return {
            "kind": "full" if config is None else "lora",
            "model_type": origin.config.model_type,
            "lora": config,
            "head": None if self.head is None else "scalar",  # None also in checkpoints from before there were heads
            "critic": None if self.critic is None else self.critic.identity(),
        }
