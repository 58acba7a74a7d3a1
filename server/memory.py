"""Keeps a worker's memory flat. Packs and batches come in ever new shapes, and two caches would grow with them."""

import ctypes
import os
import sys

KERNELS = 128
"""oneDNN keeps generated code and scratch space per shape, 1,024 shapes by default: gigabytes after some training steps."""


def bound_kernel_cache() -> None:
    """Limit oneDNN's cache; call it before the first computation of the process."""
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(KERNELS))


def release_free_memory() -> None:
    """Give the allocator's free memory back to the system; glibc keeps what lies between blocks in use."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
