"""The memory that a computation takes at its peak."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def peak_bytes(device: torch.device, compute: Callable[[], object]) -> int:
    """Bytes of tensors that `compute` holds at its peak, beyond what is there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = int(torch.cuda.memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)
        compute()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device)) - before
    tally = _Tally()
    with tally:
        compute()
    return tally.peak


class _Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make, for as long as each lives. What an operation uses inside itself is not seen."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._known: dict[int, object] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if _is_dense(tensor):
                storage = tensor.untyped_storage()
                self._known.setdefault(storage._cdata, storage)  # it was there before, and stays: its id is not used again
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if _is_dense(tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._add(storage)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self._known[storage._cdata] = weakref.finalize(storage, self._drop, storage._cdata, size)
        self._live += size
        self.peak = max(self.peak, self._live)

    def _drop(self, key: int, size: int) -> None:
        del self._known[key]
        self._live -= size


def _is_dense(value: Any) -> bool:
    """A sparse tensor, an embedding's gradient, has no storage of its own."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided
