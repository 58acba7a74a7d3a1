"""What memory is left for this process: of a CUDA device, or of the machine, its control groups and its own limits."""

import ctypes
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path

import torch

Read = Callable[[str], str | None]
"""The text of a file, None if there is none."""


def free_bytes(device: torch.device) -> int | None:
    """Bytes that this process could still take; None where nothing says so."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    limits = [machine_free(_read), *cgroup_free(_read), _address_space_free()]
    known = [limit for limit in limits if limit is not None]
    return min(known) if known else None


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text()
    except OSError:
        return None


def machine_free(read: Read) -> int | None:
    """What Linux counts as available."""
    for line in (read("/proc/meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def cgroup_free(read: Read) -> list[int]:
    """What is left of the limit of each control group that this process is in, of version 2 or 1. A group's reclaimable file
    cache counts as free."""
    found = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, names = "/sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            root = "/sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        # In a container the path may be the host's, and the root of the mount the container's own group.
        for depth in range(len(parts), -1, -1):
            folder = "/".join([root, *parts[:depth]])
            limit, used = read(f"{folder}/{names[0]}"), read(f"{folder}/{names[1]}")
            if limit is None or used is None or not limit.strip().isdigit():
                continue
            statistics = dict(line.split(" ", 1) for line in (read(f"{folder}/memory.stat") or "").splitlines())
            found.append(int(limit) - int(used) + int(statistics.get(names[2], 0)))
    return found


def _address_space_free() -> int | None:
    """What is left of RLIMIT_AS; None if there is no such limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    size = _read("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or size is None:
        return None
    return limit - int(size.split()[0]) * os.sysconf("SC_PAGE_SIZE") + _free_in_heap()


class _MallInfo(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    )


def _free_in_heap() -> int:
    """Bytes that the allocator has of the system and not handed out."""
    call = getattr(ctypes.CDLL(None), "mallinfo2", None) if sys.platform == "linux" else None
    if call is None:
        return 0
    call.restype = _MallInfo
    return int(call().fordblks)
