"""What is free, as Linux says it."""

import resource
import subprocess
import sys

import pytest
import torch

from opentinker.errors import InvalidRequestError, TrainerError
from opentinker.server.trainer.free_memory import cgroup_free, free_bytes, machine_free
from opentinker.server.trainer.out_of_memory import memory_explained

V2 = {
    "/proc/self/cgroup": "0::/job/worker\n",
    "/sys/fs/cgroup/job/worker/memory.max": "max\n",
    "/sys/fs/cgroup/job/worker/memory.current": "100\n",
    "/sys/fs/cgroup/job/memory.max": "1000\n",
    "/sys/fs/cgroup/job/memory.current": "700\n",
    "/sys/fs/cgroup/job/memory.stat": "anon 500\ninactive_file 200\n",
}
V1 = {
    "/proc/self/cgroup": "5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/docker/abc\n",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes": "900\n",
    "/sys/fs/cgroup/memory/memory.usage_in_bytes": "300\n",
    "/sys/fs/cgroup/memory/memory.stat": "total_inactive_file 50\n",
}


def test_control_groups_of_both_versions_limit() -> None:
    assert cgroup_free(V2.get) == [500]
    assert cgroup_free(V1.get) == [650]  # the host's path does not exist in a container: the mount is its own group
    assert cgroup_free({}.get) == []


def test_the_machine_says_what_is_available() -> None:
    assert machine_free({"/proc/meminfo": "MemTotal: 9 kB\nMemAvailable:      3 kB\n"}.get) == 3072
    assert machine_free({}.get) is None


def test_a_limit_of_the_process_counts() -> None:
    free = free_bytes(torch.device("cpu"))
    assert free is not None
    assert free > 0
    code = (
        "import resource, torch; from opentinker.server.trainer.free_memory import free_bytes; from pathlib import Path;"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize();"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 300_000_000, resource.RLIM_INFINITY));"
        "print(free_bytes(torch.device('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 250_000_000 < int(done.stdout) < 450_000_000
    assert resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"
        ),
        RuntimeError("std::bad_alloc"),
    ],
)
def test_memory_that_runs_out_is_a_trainer_error_with_a_hint(error: Exception) -> None:
    with pytest.raises(TrainerError, match=r"not enough memory.*nothing was trained") as caught, memory_explained():
        raise error
    assert "trainer.activation_checkpointing" in caught.value.hint


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), InvalidRequestError("no")])
def test_other_errors_pass(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, memory_explained():
        raise error
    assert caught.value is error
