import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from opentinker.scheduler.processes import IDLE, JOB_VARIABLE, end_idle, processes_of, reap


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process of job `job-x` with a child of its own, deaf to SIGTERM."""
    script = "trap '' TERM; sleep 1000 & wait"
    process = subprocess.Popen(["sh", "-c", script], env={**os.environ, JOB_VARIABLE: "job-x"})
    deadline = time.monotonic() + 5
    while len(processes_of("job-x")) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    yield process
    for left in processes_of("job-x"):
        left.kill()
    process.wait()


def test_a_jobs_processes_are_found_with_their_children(child: subprocess.Popen[bytes]) -> None:
    assert child.pid in {process.pid for process in processes_of("job-x")}
    assert processes_of("job-y") == []


def test_what_does_not_go_by_itself_is_killed(child: subprocess.Popen[bytes]) -> None:
    started = time.monotonic()
    assert reap("job-x", kill_after_s=0.2, timeout_s=15.0) == []
    assert 0.2 < time.monotonic() - started < 15.0
    assert child.wait() == -9


def test_nothing_to_wait_for_takes_no_time() -> None:
    started = time.monotonic()
    assert reap("job-without-processes", kill_after_s=20.0, timeout_s=20.0) == []
    assert time.monotonic() - started < 10.0


def test_only_processes_that_were_never_at_work_are_ended_with_the_warm_up(child: subprocess.Popen[bytes]) -> None:
    script = f"import ctypes, time; ctypes.CDLL(None).prctl(15, b'{IDLE}'); print(flush=True); time.sleep(1000)"
    env = {**os.environ, JOB_VARIABLE: "job-x"}
    idle = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
    assert idle.stdout is not None
    idle.stdout.readline()
    end_idle("job-x")
    assert idle.wait(10.0) == -9
    idle.stdout.close()
    assert child.poll() is None
    assert len(processes_of("job-x")) >= 2
