"""`exact_resume.py --on-ray`: jobs on a cluster of their own, one process of which is killed at a random moment."""

import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from exact_resume import CHILD_S, difference, rows_of

import opentinker as ot
from opentinker.scheduler.cluster import EmbeddedCluster

ENDED = ("COMPLETED", "FAILED", "CANCELLED")


class Site:
    """A user of the cluster."""

    def __init__(self, client: ot.Client, folder: Path) -> None:
        """What travels with the jobs is copied from `folder`."""
        self._client, self._scheduler = client, client.scheduler
        self._project = folder / "project"
        self._project.mkdir()
        for name in ("counting.py", "chat.jsonl"):
            shutil.copyfile(folder / name, self._project / name)

    def submit(self, config: dict[str, Any]) -> str:
        path = self._project / "job.yaml"
        path.write_text(json.dumps(config))
        return self._client.submit(path).id

    def wait(self, job_id: str, until: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        deadline = time.monotonic() + CHILD_S
        while not until(job := self._scheduler.job(job_id)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"job {job_id} is {job['state']}: {job['cause']}")
            time.sleep(0.02)
        return job

    def completed(self, job_id: str) -> Path:
        """The folder of the run, when it is there."""
        job = self.wait(job_id, lambda job: job["state"] in ENDED)
        if job["state"] != "COMPLETED":
            raise RuntimeError(f"job {job_id} is {job['state']}: {job['cause']}")
        return Path(job["run_dir"])

    def restarts(self, job_id: str) -> list[str]:
        return [event["detail"] for event in self._scheduler.events(job_id) if event["kind"] == "restarting"]


def process_of(job: dict[str, Any], which: str) -> int:
    if which == "worker":
        return int(job["server"]["pid"])
    return int(json.loads((Path(job["run_dir"]) / "driver.json").read_text())["pid"])


def on_ray(folder: Path, config: dict[str, Any], kill: Sequence[str], runs: int, rng: random.Random) -> tuple[int, float]:
    """(how many jobs were killed and restarted, how far the worst ended from one that was not)."""
    config = {**config, "scheduling": {"max_restarts": 2}}
    steps, kills, worst = config["training"]["steps"], 0, 0.0
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=1) as cluster:
        client = ot.Client(cluster.url, cluster.key_path.read_text().strip())
        site = Site(client, folder)
        whole = site.completed(site.submit(config))
        for which in kill:
            for number in range(runs):
                job_id = site.submit(config)
                rows, pause_s = rng.randrange(1, steps), rng.uniform(0.0, 0.5)
                job = site.wait(job_id, lambda job, rows=rows: job["state"] in ENDED or rows_of(Path(job["run_dir"])) >= rows)
                time.sleep(pause_s)
                if job["state"] not in ENDED:
                    os.kill(process_of(job, which), signal.SIGKILL)
                cut = site.completed(job_id)
                restarts, apart = site.restarts(job_id), difference(whole, cut)
                kills, worst = kills + len(restarts), max(worst, apart)
                print(
                    f"{which} run {number}: kill -9 {pause_s:.2f} s after row {rows}, restarted {len(restarts)} times"
                    f" ({'; '.join(restarts)[:120]}), max |difference| = {apart:g}",
                    flush=True,
                )
        client.close()
    return kills, worst
