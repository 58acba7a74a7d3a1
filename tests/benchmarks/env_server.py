"""Steps per second of an environment server, next to OpenEnv's with the same environment, in the same run.

Usage: python tests/benchmarks/env_server.py [--sessions 256 1] [--seconds 8] [--rounds 2] [--openenv FILE]
A no-op environment; every session is a `RemoteEnvironment` of its own that awaits each step before the next. Server and load
generator are separate processes on loopback, all on two cores. Prints `opentinker sessions N steps_per_s N` and, where OpenEnv
(pip install openenv-core websockets uvicorn) and its script are there, the same of it and the ratio. The aim is 3 at 256.
"""

import argparse
import asyncio
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.remote import RemoteEnvironment, remote_environment

ROOT = Path(__file__).parents[2]
TEXT = "the action of this turn"


class NoOp(Environment):
    """As cheap as an environment can be."""

    def reset(self, task: Any) -> str:
        return "ready"

    def step(self, action: Action) -> StepResult:
        return StepResult(0.0, observation=action.text)


@contextmanager
def served(workers: int, sessions: int) -> Iterator[type[RemoteEnvironment]]:
    """The class, hosted by a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        token = Path(folder, "token")
        token.write_text("a-token-of-this-benchmark")
        command = [sys.executable, "-m", "opentinker", "env", "serve", f"{__file__}:NoOp", "--port", "0", "--drain", "0"]
        options = ["--workers", str(workers), "--max-sessions", str(sessions + 8), "--token-file", str(token)]
        server = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None, "the server did not start"
            yield remote_environment(found[0], token_file=token)
        finally:
            server.terminate()
            server.wait(30)


async def one_session(hosted: type[RemoteEnvironment], until: float) -> int:
    environment, steps = hosted(), 0
    await environment.reset(None)
    action = Action(TEXT)
    while time.perf_counter() < until:
        result = await environment.step(action)
        if result.observation[0]["content"] != TEXT:  # type: ignore[index, call-overload]
            raise RuntimeError(result)
        steps += 1
    await environment.close()
    return steps


async def load(hosted: type[RemoteEnvironment], sessions: int, seconds: float) -> float:
    start = time.perf_counter()
    counts = await asyncio.gather(*(one_session(hosted, start + seconds) for _ in range(sessions)))
    return sum(counts) / (time.perf_counter() - start)


def openenv(script: Path, sessions: int, seconds: float) -> float:
    """What OpenEnv's server does."""
    done = subprocess.run(
        [sys.executable, str(script), str(sessions), str(seconds)], capture_output=True, text=True, timeout=seconds + 90
    )
    found = re.search(r"steps_per_s (\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"{script} failed: {done.stderr[-2000:]}")
    return float(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[256, 1])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--openenv", type=Path, default=ROOT.parent / "shared" / "bench" / "openenv_server.py")
    args = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    beside = args.openenv.is_file() and importlib.util.find_spec("openenv") is not None
    if not beside:
        why = "it is not installed" if args.openenv.is_file() else f"{args.openenv} is not there"
        print(f"openenv skipped: {why}")
    for sessions in args.sessions:
        ours, theirs = [], []
        for _ in range(args.rounds):
            with served(args.workers, sessions) as hosted:
                ours.append(asyncio.run(load(hosted, sessions, args.seconds)))
            print(f"opentinker sessions {sessions} steps_per_s {ours[-1]:.0f}", flush=True)
            if beside:
                theirs.append(openenv(args.openenv, sessions, args.seconds))
                print(f"openenv sessions {sessions} steps_per_s {theirs[-1]:.0f}", flush=True)
        if theirs:
            print(f"sessions {sessions} ratio {median(ours) / median(theirs):.2f}", flush=True)


if __name__ == "__main__":
    main()
