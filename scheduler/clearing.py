"""Is a node rid of a job? Runs there: its process table and, where there is one, NVML have the word."""

import time
from collections.abc import Callable, Sequence

from opentinker.scheduler.gpus import GpuUse, read_gpu_use
from opentinker.scheduler.packages import remove_packages
from opentinker.scheduler.processes import reap

POLL_S = 0.2


def clear(
    job_ids: Sequence[str], gpus: Sequence[int], kill_after_s: float, timeout_s: float, gpu_free_bytes: int | None
) -> str:
    """Wait until the jobs' processes are gone, killing those that stay, and remove their packages; then wait until no more than
    `gpu_free_bytes` (None: whatever) of each of the GPUs is in use. Blocks.

    Returns:
        What is left after all; empty if nothing.
    """
    left = [pid for job_id in job_ids for pid in reap(job_id, kill_after_s, timeout_s)]
    if left:
        plural = len(left) > 1
        return f"process{'es' if plural else ''} {', '.join(map(str, left))} cannot be killed"
    for job_id in job_ids:
        remove_packages(job_id)
    return "" if gpu_free_bytes is None else wait_for_memory(gpus, gpu_free_bytes, timeout_s)


def wait_for_memory(
    gpus: Sequence[int], free_bytes: int, timeout_s: float, read: Callable[[], Sequence[GpuUse]] = read_gpu_use
) -> str:
    """Which of the GPUs (by index) still has more than `free_bytes` in use after `timeout_s`; empty if none, or if NVML does
    not tell."""
    deadline = time.monotonic() + timeout_s
    while gpus:
        full = [gpu for gpu in read() if gpu.index in gpus and gpu.memory_used_bytes > free_bytes]
        if not full:
            return ""
        if time.monotonic() >= deadline:
            return "; ".join(
                f"GPU {gpu.index} still holds {gpu.memory_used_bytes / 2**30:.1f} GiB, though the job's processes are gone"
                for gpu in full
            )
        time.sleep(POLL_S)
    return ""
