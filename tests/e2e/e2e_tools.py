"""What the end-to-end tests share: the command line, a project of a user, and a look at who is left."""

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.client.scheduler import SchedulerClient

OPENTINKER = str(Path(sys.executable).with_name("opentinker"))
MARKER = "OPENTINKER_RUN"
LEASE_S = 8.0
SLOTS = 2

CLUSTER = f"""
import sys, threading
from pathlib import Path
from opentinker.cli.common import signals_as_interrupt
from opentinker.scheduler.cluster import EmbeddedCluster

with EmbeddedCluster.start(Path(sys.argv[1]), Path(sys.argv[2]), port=0, cpu_slots={SLOTS}, gpus=0,
                           settings={{"lease_s": {LEASE_S}}}), signals_as_interrupt():
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        pass
"""

ENVIRONMENTS = '''
import time

import opentinker as ot
from words import PROMPT  # a neighbour that travels with this file


class Echo(ot.Environment):
    """Longer answers are better."""

    @classmethod
    def held_out_tasks(cls):
        return [{"question": i} for i in range(3)]

    def reset(self, task):
        return PROMPT

    def step(self, action):
        return ot.StepResult(reward=float(len(action.text)), done=True, metrics={"exact": float(len(action.text) > 4)})


class Raises(Echo):
    def step(self, action):
        raise RuntimeError("the answers are missing")


class Hangs(Echo):
    """Every third episode never comes back."""

    started = 0

    def step(self, action):
        Hangs.started += 1
        if Hangs.started % 3 == 0:
            time.sleep(3600)
        return super().step(action)


class Slow(Echo):
    def step(self, action):
        time.sleep(1.0)
        return super().step(action)
'''


@dataclass(frozen=True)
class Cluster:
    url: str
    key: str
    state_dir: Path
    client: SchedulerClient


def processes_of(marker: str) -> list[int]:
    """Ids of living processes that carry a marker in the environment they were started with."""
    wanted = f"{MARKER}={marker}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:  # it ended meanwhile, or is not ours
            continue
    return found


def wait_until(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
        time.sleep(0.1)


def marked() -> tuple[str, dict[str, str]]:
    """A fresh marker, and an environment that carries it."""
    marker = uuid.uuid4().hex
    return marker, os.environ | {MARKER: marker}


def opentinker(*arguments: str | Path, timeout_s: float = 300.0, env: dict[str, str] | None = None, **kwargs: Any) -> Any:
    """Run the command to its end."""
    command = [OPENTINKER, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=env, check=False, **kwargs)
