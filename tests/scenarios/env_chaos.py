"""A thousand sessions on a server whose environment raises and hangs, and whose workers are killed.

Usage: python tests/scenarios/env_chaos.py [--sessions 1000] [--workers 8] [--raising 0.05] [--hanging 0.01] [--kill-every 10]
The episodes are played by the real runner and driver with a stub in place of the policy. Prints what was done to them and what
became of them, and ends with 1 if a count is wrong: an episode that raised, hung or lost its worker must end `error_env`,
`error_timeout` and `error_env`, and be replaced once; every other must complete; nothing may be left.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from opentinker.client.messages import IntArray, Sample, SamplingParams
from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment, Message, StepResult, Tool
from opentinker.env.remote import remote_environment
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Episode, Group, Termination

TOKEN = "a-token-of-this-scenario"
STOP = 1
SPINNING = 0.1
"""Of the hanging steps; the others sleep."""


class Chaos(Environment):
    """Notes in the file `log` what it is about to do wrong."""

    def __init__(self, log: str, turns: int, raising: float, hanging: float) -> None:
        self._log = log
        self._turns = turns
        self._raising = raising
        self._hanging = hanging
        self._turn = 0
        self._chance = random.Random()

    def reset(self, task: Any) -> str:
        return f"session {task}"

    def step(self, action: Action) -> StepResult:
        self._turn += 1
        drawn = self._chance.random()
        if drawn < self._raising:
            self._note("raise")
            raise RuntimeError("chaos raised")
        if drawn < self._raising + self._hanging:
            self._note("hang")
            while self._chance.random() < SPINNING:
                while True:
                    pass
            time.sleep(3600)
        return StepResult(1.0, done=self._turn == self._turns, observation="go on")

    def close(self) -> None:
        self._note("close")

    def _note(self, what: str) -> None:
        descriptor = os.open(self._log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{what}\n".encode())
        os.close(descriptor)


class Bytes:
    """In place of a renderer: a message is its characters' codes."""

    stop_token_ids = (STOP,)
    preserves_prefix = True

    def render_prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), images: Any = None) -> list[int]:
        return [ord(c) for m in messages for c in str(m["content"])] + [STOP]

    def parse(self, action_tokens: Sequence[int], finished: bool = False) -> Action:
        return Action("".join(chr(t) for t in action_tokens if t != STOP))

    def observation_delta(
        self, action_tokens: Sequence[int], observation: Sequence[Message], tools: Sequence[Tool] = (), images: Any = None
    ) -> list[int]:
        return self.render_prompt(observation)


def policy(seconds: float) -> Callable[..., Any]:
    """Answers after about so long."""
    tokens = np.array([48, STOP], np.int32)
    sample = Sample(tokens, np.full(2, -1, np.float32), "stop", ((0, 2),))

    async def generate(prompt: IntArray, params: SamplingParams, request_id: str) -> Sample:
        await asyncio.sleep(random.uniform(0.5, 1.5) * seconds)
        return sample

    return generate


class Server:
    """`opentinker env serve` with the environment of this file."""

    def __init__(self, folder: Path, workers: int, sessions: int) -> None:
        (folder / "token").write_text(TOKEN)
        command = [sys.executable, "-m", "opentinker", "env", "serve", f"{__file__}:Chaos", "--port", "0", "--drain", "5"]
        options = ["--workers", str(workers), "--max-sessions", str(sessions), "--token-file", str(folder / "token")]
        self.log = open(folder / "server.log", "w")  # noqa: SIM115
        self.process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=self.log, text=True)
        assert self.process.stdout is not None
        found = re.search(r"http://\S+", self.process.stdout.readline())
        assert found is not None, (folder / "server.log").read_text()
        self.url = found[0]

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def kill_one(self, workers: int) -> bool:
        """Kill a worker, if all of them are ready."""
        if self.stats()["workers"] < workers:
            return False
        random.choice(self.workers()).send_signal(signal.SIGKILL)
        return True

    def stats(self) -> dict[str, Any]:
        import httpx

        answer: dict[str, Any] = httpx.get(f"{self.url}/stats", headers={"Authorization": f"Bearer {TOKEN}"}).json()
        return answer

    def stop(self) -> list[psutil.Process]:
        """What is left of it afterwards."""
        family = [*self.workers()]
        self.process.terminate()
        self.process.wait(30)
        self.log.close()
        return psutil.wait_procs(family, timeout=5)[1]


def cause(episode: Episode) -> str:
    """What was done to a failed episode."""
    if "chaos raised" in episode.error:
        return "raised"
    if "did not return within" in episode.error:
        return "hung"
    if "the session was lost" in episode.error:
        return "lost"
    return f"unexpected: {episode.termination}: {episode.error}"


async def play(args: argparse.Namespace, server: Server, log: Path) -> tuple[list[Group], int]:
    """All groups, and how many workers were killed meanwhile."""
    hosted = remote_environment(server.url, token=TOKEN)
    make = partial(hosted, log=str(log), turns=args.turns, raising=args.raising, hanging=args.hanging)
    config = RolloutConfig(
        max_turns=args.turns + 1,
        max_concurrent_episodes=args.sessions,
        member_retries=1,
        step_timeout_s=args.step_timeout,
        reset_timeout_s=60,
        episode_timeout_s=600,
    )
    runner = RolloutRunner(
        Bytes(),  # type: ignore[arg-type]
        policy(args.generation),
        make,
        config,
        SamplingConfig(max_tokens=4),
        10_000,
        run_seed=0,
    )
    kills = 0

    async def killer() -> None:
        nonlocal kills
        while True:
            await asyncio.sleep(args.kill_every)
            kills += await asyncio.to_thread(server.kill_one, args.workers)

    killing = asyncio.create_task(killer())
    groups = await runner.run(range(args.sessions), 1, step=0)
    killing.cancel()
    await runner.close()
    return groups, kills


def check(args: argparse.Namespace, groups: list[Group], done: Counter[str], stats: dict[str, Any], kills: int) -> list[str]:
    """What is wrong."""
    wrong = []

    def expect(what: str, fine: bool) -> None:
        if not fine:
            wrong.append(what)

    failures = [episode for group in groups for episode in group.failures]
    causes = Counter(cause(episode) for episode in failures)
    ends = Counter((cause(episode), episode.termination) for episode in failures)
    completed = sum(len(group.episodes) for group in groups)
    dropped = sum(group.dropped for group in groups)
    print(f"episodes {completed + len(failures)} completed {completed} failed {len(failures)} dropped {dropped}")
    print("failures " + " ".join(f"{name} {count}" for name, count in sorted(causes.items())))
    print(
        f"done to them: raised {done['raise']} hung {done['hang']} workers killed {kills}; environments closed {done['close']}"
    )
    total = stats["total"]
    print(f"server: sessions {total['sessions']} lost {total['lost']} open {stats['sessions']} workers {stats['workers']}")
    expect(f"unexpected failures: {causes}", set(causes) <= {"raised", "hung", "lost"})
    fitting = {("raised", Termination.ERROR_ENV), ("hung", Termination.ERROR_TIMEOUT), ("lost", Termination.ERROR_ENV)}
    expect(f"causes and terminations do not fit: {ends}", set(ends) <= fitting)
    for group in groups:
        attempts = len(group.failures)
        expect(f"session {group.index} has {len(group.episodes)} episodes", len(group.episodes) + group.dropped == 1)
        expect(f"session {group.index} was not replaced once", group.replaced == min(attempts, 1) and attempts <= 2)
        expect(f"session {group.index} was dropped after {attempts} failures", bool(group.dropped) == (attempts == 2))
        for episode in group.episodes:
            whole = episode.termination is Termination.DONE and episode.reward == args.turns
            expect(f"session {group.index} did not complete", whole)
    # What was noted, but whose answer was lost with the worker, counts as lost.
    unseen = (done["raise"] - causes["raised"]) + (done["hang"] - causes["hung"])
    expect(f"{unseen} faults were not seen, {causes['lost']} sessions were lost", 0 <= unseen <= causes["lost"])
    expect("more failures seen than done", causes["raised"] <= done["raise"] and causes["hung"] <= done["hang"])
    expect("a killed worker lost no session", kills == 0 or causes["lost"] > 0)
    expect(f"{stats['sessions']} sessions are open", stats["sessions"] == 0)
    expect(f"{stats['workers']} workers, of {args.workers}", stats["workers"] == args.workers)
    return wrong


def left_behind(threads: int, connections: int) -> list[str]:
    """What this process still has."""
    ends = time.monotonic() + 10
    while True:
        now = threading.active_count() - threads, len(psutil.Process().net_connections()) - connections
        if now[0] <= 0 and now[1] <= 0:
            return []
        if time.monotonic() > ends:
            return [f"{now[0]} threads and {now[1]} sockets are left"]
        time.sleep(0.05)


def chaos(args: argparse.Namespace) -> list[str]:
    """Run it all; what is wrong."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        log = folder / "log"
        log.touch()
        server = Server(folder, args.workers, args.sessions)
        try:
            threads, connections = threading.active_count(), len(psutil.Process().net_connections())
            started = time.monotonic()
            groups, kills = asyncio.run(play(args, server, log))
            print(f"took {time.monotonic() - started:.0f} s")
            ends = time.monotonic() + 10
            while (stats := server.stats())["workers"] != args.workers and time.monotonic() < ends:
                time.sleep(0.1)
            wrong = check(args, groups, Counter(log.read_text().split()), stats, kills)
            wrong += left_behind(threads, connections)
        finally:
            left = server.stop()
        wrong += [f"process {process.pid} is left" for process in left]
        if server.process.returncode:
            wrong.append(f"the server ended with {server.process.returncode}")
    return wrong


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--sessions", type=int, default=1000)
    options.add_argument("--workers", type=int, default=8)
    options.add_argument("--turns", type=int, default=6)
    options.add_argument("--raising", type=float, default=0.05)
    options.add_argument("--hanging", type=float, default=0.01)
    options.add_argument("--kill-every", type=float, default=10.0)
    options.add_argument("--step-timeout", type=float, default=5.0)
    options.add_argument("--generation", type=float, default=3.0, help="seconds that the policy takes for an action")
    return options


def main() -> None:
    args = parser().parse_args()
    print(json.dumps(vars(args)))
    wrong = chaos(args)
    for line in wrong[:20]:
        print(f"WRONG: {line}")
    print("wrong" if wrong else "all as it should be")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
