"""The operating system's view of a job: its processes carry the job's id in their environment."""

import os
import time

import psutil

JOB_VARIABLE = "OPENTINKER_JOB"
POLL_S = 0.05
IDLE = "ray::IDLE"
"""What Ray calls a process without an actor or a task."""
WITHHELD = ("OPENTINKER_API_KEY", "PGPASSWORD", "PGPASSFILE", "PGSERVICEFILE")
"""Secrets of whoever started the cluster, which are none of a job's business."""
RAY_TOKEN = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
"""A process of Ray needs these to start, but not after."""


def forget_secrets() -> None:
    """Take secrets out of this process's environment, before code of a user runs in it or in its children."""
    for name in (*WITHHELD, *RAY_TOKEN):
        os.environ.pop(name, None)


def processes_of(job_id: str) -> list[psutil.Process]:
    """Living processes on this machine that a job started, children of its actors included."""
    return processes_with(JOB_VARIABLE, job_id)


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Living processes on this machine that were born with this variable in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # it ended meanwhile, or it is another user's and so not a job's
    return found


def reap(job_id: str, kill_after_s: float, timeout_s: float) -> list[int]:
    """As `reap_with`, for a job's processes."""
    return reap_with(JOB_VARIABLE, job_id, kill_after_s, timeout_s)


def reap_with(variable: str, value: str, kill_after_s: float, timeout_s: float) -> list[int]:
    """Wait until the processes that carry a variable are gone, and kill those that are not after `kill_after_s`; blocks.

    Returns:
        Process ids that are there after another `timeout_s` in spite of it.
    """
    started = time.monotonic()
    while left := processes_with(variable, value):
        waited_s = time.monotonic() - started
        if waited_s > kill_after_s + timeout_s:
            break
        for process in left:
            # One that Ray started ahead and gave no work yet does not end by itself.
            if waited_s > kill_after_s or _is_idle(process):
                _kill(process)
        time.sleep(POLL_S)
    return [process.pid for process in left]


def end_idle(job_id: str) -> None:
    """Kill those of a job's processes that were started ahead and got no work; those at work are left alone."""
    for process in processes_of(job_id):
        if _is_idle(process):
            _kill(process)


def _is_idle(process: psutil.Process) -> bool:
    try:
        return process.name().startswith(IDLE)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
