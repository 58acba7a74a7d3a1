"""Tensors that are on several ranks, one after the other as full tensors: in a mapping, and into a file."""

import json
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from pathlib import Path

import torch

Gather = Callable[[Sequence[str]], Iterator[tuple[str, torch.Tensor]]]
"""(name, full tensor) of each name, in any order."""
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8"}
"""Those of ours, as safetensors calls them."""


class Gathered(Mapping[str, torch.Tensor]):
    """Full tensors by name that are gathered when they are asked for; by `items` several at a time, in an order of its own."""

    def __init__(self, like: Mapping[str, torch.Tensor], gather: Gather) -> None:
        """`like` has the full shapes and dtypes."""
        self.like, self.gather = like, gather

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self.like:
            raise KeyError(name)
        ((_, tensor),) = self.gather([name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.like)

    def __len__(self) -> int:
        return len(self.like)

    def items(self) -> ItemsView[str, torch.Tensor]:
        return _GatheredItems(self)


class _GatheredItems(ItemsView[str, torch.Tensor]):
    def __init__(self, mapping: Gathered) -> None:
        super().__init__(mapping)
        self._gathered = mapping

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._gathered.gather(list(self._gathered))


def stream_tensors(path: Path, tensors: Gathered) -> None:
    """Write a safetensors file of which no more is in memory at once than is gathered at once.

    Raises:
        OSError: it cannot be written.
    """
    places: dict[str, int] = {}
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, like in tensors.like.items():
        places[name], start = end, end
        end += like.numel() * like.element_size()
        header[name] = {"dtype": _DTYPES[like.dtype], "shape": list(like.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + end)
        for name, tensor in tensors.items():
            file.seek(begin + places[name])
            file.write(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
