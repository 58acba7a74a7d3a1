"""How busy a machine's GPUs are, as NVML tells it."""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GpuUse:
    """`busy` is the share of the last moment (up to a second) in which a kernel ran, from 0 to 1."""

    index: int
    name: str
    busy: float
    memory_used_bytes: int
    memory_bytes: int


def read_gpu_use(nvml: Any | None = None) -> list[GpuUse]:
    """Every GPU of this machine; empty where NVML or a driver is missing. `nvml` stands for the `pynvml` module."""
    try:
        nvml = importlib.import_module("pynvml") if nvml is None else nvml
    except ImportError:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return []
    try:
        return [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return []
    finally:
        nvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    name = nvml.nvmlDeviceGetName(handle)
    return GpuUse(
        index=index,
        name=name.decode() if isinstance(name, bytes) else str(name),
        busy=nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0,
        memory_used_bytes=int(memory.used),
        memory_bytes=int(memory.total),
    )


def own_gpu_indexes(_: Any = None) -> list[int]:
    """Indexes of the GPUs that Ray gave to the process of an actor; called in there, where little else should be imported."""
    import ray

    return [int(index) for index in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]
