"""Hundreds of short jobs through the real launcher: how much of the slots' time they run, and what is left of them.

    python tests/scenarios/many_jobs.py --jobs 200 --slots 4 --seconds 5

Each job is an inference job with a stand-in server, without torch, on a GPU that Ray is only told of; it ends when it was idle
for `--seconds`. Prints one line `jobs N completed N running_share X ...`: the share of the slots' time in which a job was
RUNNING, from the first start until the queue was empty. Exits with 1 if a job did not complete, if the share is not above
`--at-least`, or if processes, actors, listening ports or open files are left beyond those from before.
"""

import argparse
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import ray

from opentinker.scheduler.cluster import EmbeddedCluster

FOLDER = Path(__file__).parent
ENDED = ("COMPLETED", "FAILED", "CANCELLED")
SETTLE_S = 30.0


@dataclass(frozen=True)
class Footprint:
    """What a cluster occupies on this machine. Files are those of the processes that live on: the scheduler's and Ray's."""

    processes: int
    actors: int
    ports: int
    files: int

    def exceeds(self, other: "Footprint") -> list[str]:
        return [
            f"{name}: {before} before, {after} now"
            for name in ("processes", "actors", "ports", "files")
            if (after := getattr(self, name)) > (before := getattr(other, name))
        ]


def footprint() -> Footprint:
    family = psutil.Process().children(recursive=True)
    # Ray keeps some processes without work, and starts and ends those as it likes.
    working = [p for p in family if not p.name().startswith("ray::IDLE")]
    lasting = [p for p in working if p.name().startswith(("ray::SchedulerActor", "raylet", "gcs_server"))]
    ports = {c.laddr.port for p in working for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
    actors = [a for a in ray._private.state.actors().values() if a["State"] not in ("DEAD",)]
    return Footprint(len(working), len(actors), len(ports), sum(p.num_fds() for p in lasting))


class Site:
    def __init__(self, cluster: Any) -> None:
        key = cluster.key_path.read_text()
        self.http = httpx.Client(base_url=cluster.url, headers={"Authorization": f"Bearer {key}"}, timeout=60.0)

    def get(self, path: str) -> dict[str, Any]:
        answer: dict[str, Any] = self.http.get(path).raise_for_status().json()
        return answer

    def submit(self, config: dict[str, Any]) -> str:
        return str(self.http.post("/v1/jobs", json={"config": config}).raise_for_status().json()["id"])

    def times(self, job_id: str) -> dict[str, float]:
        """When the job first was at each point of its life."""
        events = self.get(f"/v1/jobs/{job_id}/events")["events"]
        return {event["kind"]: event["at"] for event in reversed(events)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--slots", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--at-least", type=float, default=0.9)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(FOLDER), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    settings = {
        "worker_class": "light_stand_ins:Worker",
        "front_class": "light_stand_ins:Front",
        "check_model": "light_stand_ins:any_model",
    }
    with tempfile.TemporaryDirectory(prefix="ot-many-") as name:
        folder = Path(name)
        with EmbeddedCluster.start(
            folder / "state", folder / "runs", port=0, cpu_slots=1, gpus=options.slots, settings=settings
        ) as cluster:
            sys.exit(run(Site(cluster), options))


def run(site: Site, options: argparse.Namespace) -> int:
    config = {
        "kind": "inference",
        "base_model": "fine",
        "resources": {"gpus": 1},
        "scheduling": {"idle_limit_s": options.seconds},
    }
    warm_up = site.submit(config)
    wait_for(site, [warm_up])
    before = footprint()
    started = time.monotonic()
    jobs = [site.submit(config) for _ in range(options.jobs)]
    records = wait_for(site, jobs)
    times = [site.times(job_id) for job_id in jobs]
    first, last = min(t["starting"] for t in times), max(t["starting"] for t in times)
    running = sum(max(0.0, min(records[j]["ended_at"], last) - t["running"]) for j, t in zip(jobs, times, strict=True))
    share = running / (options.slots * (last - first))
    states = Counter(record["state"] for record in records.values())
    deadline = time.monotonic() + SETTLE_S
    while (left := footprint().exceeds(before)) and time.monotonic() < deadline:
        time.sleep(0.5)

    def median(begin: str, end: str) -> float:
        return sorted(t[end] - t[begin] for t in times if begin in t and end in t)[len(times) // 2]

    wall_s = time.monotonic() - started
    print(
        f"jobs {options.jobs} completed {states['COMPLETED']} running_share {share:.3f} wall_s {wall_s:.0f} "
        f"start_s {median('starting', 'running'):.2f} stop_s {median('completed', 'released'):.2f} left {len(left)}"
    )
    print("\n".join([f"{state}: {count}" for state, count in states.items() if state != "COMPLETED"] + left))
    return int(states["COMPLETED"] != options.jobs or share <= options.at_least or bool(left))


def wait_for(site: Site, jobs: list[str]) -> dict[str, dict[str, Any]]:
    """The jobs' records, once all have ended."""
    records: dict[str, dict[str, Any]] = {}
    begin = time.monotonic()
    while len(records) < len(jobs):
        for job_id in jobs:
            if job_id not in records and (record := site.get(f"/v1/jobs/{job_id}"))["state"] in ENDED:
                records[job_id] = record
            elif job_id not in records:
                break  # they end in their order, nearly
        print(f"\r\033[K{time.monotonic() - begin:5.0f} s  {len(records)}/{len(jobs)}", end="", file=sys.stderr, flush=True)
        time.sleep(0.5)
    print(file=sys.stderr)
    return records


if __name__ == "__main__":
    main()
