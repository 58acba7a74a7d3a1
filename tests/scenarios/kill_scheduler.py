"""Kill the real scheduler's process again and again while jobs flow through a real Ray cluster, and count what is wrong.

Usage: python tests/scenarios/kill_scheduler.py [--instants 200] [--calls 60]
`--instants N`: kill -9 at N random instants. `--calls N`: the process kills itself before, and then after, its nth
write to the store or call to the cluster, n = 1 .. N; a job needs about 15 of them. Jobs are stand-ins whose driver writes one
line; a user submits them with idempotency keys and repeats what got no answer.
In the end every job must have COMPLETED with exactly one line, no job may
exist twice, and no process of any job may be left. The exit code is 1 otherwise.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

from opentinker.scheduler import actor
from opentinker.scheduler.cluster import EmbeddedCluster
from opentinker.scheduler.processes import processes_of

FOLDERS = (Path(__file__).parent, Path(__file__).parents[1] / "integration" / "scheduler")
"""Of the modules that the cluster's processes import."""
SLOTS = 2
OPEN_JOBS = 4
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


class Site:
    """A user of a scheduler that dies a lot."""

    def __init__(self, cluster: EmbeddedCluster, runs: Path) -> None:
        self.runs = runs
        self.keys: dict[str, str] = {}
        self._http = httpx.Client(
            base_url=cluster.url, headers={"Authorization": f"Bearer {cluster.key_path.read_text().strip()}"}, timeout=60.0
        )

    def ask(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        deadline = time.monotonic() + 60.0
        while True:
            response = self._http.request(method, path, json=body)
            if response.status_code != 503:
                response.raise_for_status()
                answer: dict[str, Any] = response.json()
                return answer
            if time.monotonic() > deadline:
                raise TimeoutError("the scheduler did not come back within a minute")
            time.sleep(0.05)

    def jobs(self) -> list[dict[str, Any]]:
        page = self.ask("GET", "/v1/jobs?limit=500")
        found: list[dict[str, Any]] = page["jobs"]
        while page["next"] is not None:
            page = self.ask("GET", f"/v1/jobs?limit=500&cursor={page['next']}")
            found += page["jobs"]
        return found

    def keep_busy(self) -> None:
        """Submit until a few jobs are open."""
        while sum(job["state"] not in ENDED for job in self.jobs()) < OPEN_JOBS:
            key = f"key-{len(self.keys)}"
            config = {"kind": "rl", "base_model": "fine", "environment": {"name": "writes-a-line"}}
            self.keys[key] = self.ask("POST", "/v1/jobs", {"config": config, "idempotency_key": key})["id"]

    def settle(self) -> list[str]:
        """Wait for all jobs to end; what is wrong then."""
        deadline = time.monotonic() + 120.0
        while any(job["state"] not in ENDED for job in self.jobs()) and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(3.0)
        jobs, wrong = self.jobs(), []
        if sorted(job["id"] for job in jobs) != sorted(self.keys.values()):
            wrong.append(f"{len(self.keys)} jobs were accepted, {len(jobs)} exist")
        for job in jobs:
            path = Path(job["run_dir"], "runs")
            lines = path.read_text().count("\n") if path.exists() else 0
            if (job["state"], lines) != ("COMPLETED", 1):
                wrong.append(f"{job['id']} is {job['state']} after {lines} runs: {job['cause']}")
            if left := processes_of(job["id"]):
                wrong.append(f"{job['id']} left {left}")
        free = sum(node["free_cpu_slots"] for node in self.ask("GET", "/v1/cluster")["nodes"])
        if free != SLOTS:
            wrong.append(f"{free} of {SLOTS} slots are free")
        return wrong


def scheduler_process() -> psutil.Process | None:
    me = os.getpid()
    for process in psutil.process_iter():
        try:
            if process.name().startswith("ray::Chaos") and me in [parent.pid for parent in process.parents()]:
                return process
        except psutil.Error:
            continue
    return None


def at_instants(site: Site, count: int, note: Callable[[str], None]) -> int:
    rng = random.Random(0)
    kills = 0
    while kills < count:
        site.keep_busy()
        time.sleep(rng.uniform(0.0, 1.5))
        if (process := scheduler_process()) is not None:
            process.send_signal(signal.SIGKILL)
            process.wait(10.0)
            kills += 1
            note(f"kill {kills}/{count}")
    return kills


def at_calls(site: Site, plan_file: Path, count: int, note: Callable[[str], None]) -> int:
    """Each life of the scheduler finds a plan for its own end, and carries it out."""
    armed = Path(f"{plan_file}.armed")
    for at in range(1, count + 1):
        for after in (False, True):
            plan_file.write_text(json.dumps({"at": at, "after": after}))
            if (process := scheduler_process()) is not None:
                process.send_signal(signal.SIGKILL)  # the life with the plan begins
            deadline = time.monotonic() + 30.0
            while plan_file.exists() or armed.exists():
                site.keep_busy()
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the scheduler made no call {at} in 30 s")
                time.sleep(0.05)
            note(f"call {at}/{count}, {'after' if after else 'before'} its effect")
    return 4 * count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instants", type=int, default=0)
    parser.add_argument("--calls", type=int, default=0)
    options = parser.parse_args()
    sys.path[:0] = map(str, FOLDERS)
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, FOLDERS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    import chaos_scheduler

    actor.SchedulerActor = chaos_scheduler.ChaosScheduler  # type: ignore[misc]
    started = time.monotonic()

    def note(text: str) -> None:
        print(f"\r\033[K{time.monotonic() - started:6.0f} s  {text}", end="", file=sys.stderr, flush=True)

    with tempfile.TemporaryDirectory(prefix="ot-chaos-") as name:
        folder = Path(name)
        settings = {
            "worker_class": "scheduler_stand_ins:WorkerProcess",
            "front_class": "scheduler_stand_ins:FrontProcess",
            "drivers": {"rl": "chaos_scheduler:drive"},
            "check_model": "scheduler_stand_ins:check_model",
            "reconcile_s": 0.2,
            "probe_s": 0.2,
            "graceful_stop_s": 1.0,
        }
        with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=SLOTS, settings=settings) as cluster:
            site = Site(cluster, folder / "runs")
            kills = 0
            if options.instants:
                kills += at_instants(site, options.instants, note)
            if options.calls:
                kills += at_calls(site, folder / "state" / chaos_scheduler.PLAN, options.calls, note)
            wrong = site.settle()
        print(f"\nkills {kills} jobs {len(site.keys)} wrong {len(wrong)} seconds {time.monotonic() - started:.0f}")
        print("\n".join(wrong))
        sys.exit(bool(wrong) or not kills)


if __name__ == "__main__":
    main()
