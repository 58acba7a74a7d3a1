"""A worker's memory: kept flat, and measured."""

import ctypes
import resource
import sys
from pathlib import Path

import torch


def release_free_memory() -> None:
    """Give the allocator's free memory back; glibc keeps what lies between blocks in use, gigabytes after some commands."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)


def begin_peak() -> None:
    """From here on `peak_memory_bytes` counts what is held on a GPU."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.reset_peak_memory_stats()


def peak_memory_bytes() -> int:
    """The most that this process held: on a GPU, of tensors since `begin_peak`; without one, of resident memory since it
    began."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "linux":  # its getrusage counts what the process was forked from, too
        (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
