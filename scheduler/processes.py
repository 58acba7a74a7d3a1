"""The operating system's view of a job: its processes carry the job's id in their environment."""

import time

import psutil

JOB_VARIABLE = "OPENTINKER_JOB"
POLL_S = 0.05


def processes_of(job_id: str) -> list[psutil.Process]:
    """Living processes on this machine that a job started, children of its actors included."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(JOB_VARIABLE) == job_id and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue  # it ended meanwhile, or it is another user's and so not a job's
    return found


def reap(job_id: str, patience_s: float) -> list[int]:
    """Wait until a job's processes are gone, and kill those that are not after `patience_s`; blocks.

    Returns:
        Process ids that outlived even that, after another `patience_s`.
    """
    for kill in (False, True):
        deadline = time.monotonic() + patience_s
        while left := processes_of(job_id):
            if kill:
                for process in left:
                    _kill(process)
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        else:
            return []
    return [process.pid for process in left]


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
