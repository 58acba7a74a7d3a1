"""One number per hidden state: the head of a critic and of a reward model.

Axes: N = rows (weighted targets), H = hidden size.
"""

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForSequenceClassification

HEAD_WEIGHT = "score.weight"
"""How its name ends, whatever is before it."""


class ScalarHead:
    """weight . hidden + bias in float32, whatever the model computes in. Both begin at 0, and so does every output.

    A reward model has no bias: only differences of its scores mean anything, and transformers' `score` layer has none.
    """

    def __init__(self, hidden_size: int, device: torch.device, *, bias: bool) -> None:
        self.weight = nn.Parameter(torch.zeros(1, hidden_size, device=device), requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(1, device=device), requires_grad=False) if bias else None

    def __call__(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """float32[N], differentiable in the hidden states and the head."""
        return nn.functional.linear(hidden_NH.float(), self.weight, self.bias)[:, 0]

    def parameters(self, prefix: str = "") -> dict[str, nn.Parameter]:
        """Under the names that transformers gives the head of a sequence classifier."""
        found = {f"{prefix}{HEAD_WEIGHT}": self.weight}
        return found if self.bias is None else {**found, f"{prefix}score.bias": self.bias}


def classifier_config(config: Any) -> Any:
    """The transformers config of a sequence classifier with one label on the model of `config`."""
    changed = copy.deepcopy(config)
    classes = AutoModelForSequenceClassification._model_mapping
    changed.architectures = [classes[type(config)].__name__] if type(config) in classes else None
    changed.num_labels = 1
    if changed.pad_token_id is None:  # a classifier looks for the last token that is none
        ends = changed.eos_token_id
        changed.pad_token_id = ends[0] if isinstance(ends, list) else ends
    return changed
