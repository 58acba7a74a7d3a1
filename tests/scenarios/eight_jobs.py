"""Eight real jobs of three users at once: full-parameter and LoRA training, a model to sample from, an interactive job.

    python tests/scenarios/eight_jobs.py MODEL_DIR

They share two CPU slots, so most of them wait first. Prints one line per job, then `jobs 8 wrong 0 seconds N`. Exits with 1
if a job did not end as it should, a user saw another's job, or a process was left.
"""

import argparse
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import opentinker as ot
from opentinker.client.messages import SamplingParams
from opentinker.client.scheduler import SchedulerClient
from opentinker.client.users import UsersClient
from opentinker.config.server import EngineConfig, TrainerConfig
from opentinker.errors import NotFoundError
from opentinker.scheduler.cluster import EmbeddedCluster
from opentinker.scheduler.processes import processes_of

SLOTS = 2
USERS = ("ann", "bob", "eve")
DEADLINE_S = 900.0


def training(model: str, lora: bool, seed: int) -> dict[str, Any]:
    return {
        "kind": "rl",
        "base_model": model,
        "lora": {"rank": 8} if lora else None,
        "engine": {"max_model_len": 256, "cache_gib": 0.1},
        "environment": {"name": "arithmetic"},
        "algorithm": {"group_size": 4},
        "rollout": {"groups_per_step": 2},
        "sampling": {"max_tokens": 8},
        "evaluation": {"max_tasks": 4, "samples_per_task": 2},
        "training": {"steps": 2, "seed": seed},
    }


def submit(client: SchedulerClient, config: dict[str, Any]) -> dict[str, Any]:
    """A job that the cluster drives, to its end."""
    job = client.submit(config)
    deadline = time.monotonic() + DEADLINE_S
    while job["ended_at"] is None and time.monotonic() < deadline:
        job = client.job(job["id"], wait_s=20.0, state=job["state"])
    return job


def interactive(url: str, key: str, model: str) -> dict[str, Any]:
    """A job that is driven from here."""
    engine, trainer = EngineConfig(max_model_len=256, cache_gib=0.1), TrainerConfig()
    with ot.Client(url, key) as client, client.create_job(model, engine=engine, trainer=trainer, name="mine") as job:
        job.run(lambda policy: policy.sample([5, 6, 7], SamplingParams(max_tokens=8)))
        job.save("mine")
    return client_job(url, key, job.id)


def inference(url: str, key: str, model: str) -> dict[str, Any]:
    """A model that is only sampled from."""
    with ot.Client(url, key) as client, client.serve(model, engine=EngineConfig(max_model_len=256, cache_gib=0.1)) as job:
        result = job.run(lambda policy: policy.sample([5, 6, 7], SamplingParams(max_tokens=8), n=2))
        assert len(result.samples) == 2
    return client_job(url, key, job.id)


def client_job(url: str, key: str, job_id: str) -> dict[str, Any]:
    client = SchedulerClient(url, key)
    try:
        return client.job(job_id)
    finally:
        client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    model = parser.parse_args().model
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ot-eight-") as name:
        folder = Path(name)
        with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=SLOTS, gpus=0) as cluster:
            admin = UsersClient(cluster.url, cluster.key_path.read_text())
            keys = {user: add_user(admin, user) for user in USERS}
            clients = {user: SchedulerClient(cluster.url, key) for user, key in keys.items()}
            work = [
                ("ann", "rl full", partial(submit, clients["ann"], training(model, lora=False, seed=0))),
                ("ann", "rl lora", partial(submit, clients["ann"], training(model, lora=True, seed=1))),
                ("ann", "inference", partial(inference, cluster.url, keys["ann"], model)),
                ("bob", "rl full", partial(submit, clients["bob"], training(model, lora=False, seed=2))),
                ("bob", "interactive", partial(interactive, cluster.url, keys["bob"], model)),
                ("eve", "rl lora", partial(submit, clients["eve"], training(model, lora=True, seed=3))),
                ("eve", "rl full", partial(submit, clients["eve"], training(model, lora=False, seed=4))),
                ("eve", "inference", partial(inference, cluster.url, keys["eve"], model)),
            ]
            with ThreadPoolExecutor(len(work)) as pool:
                jobs = [future.result() for future in [pool.submit(call) for _, _, call in work]]
            wrong = check(work, jobs, clients)
            for client in (admin, *clients.values()):
                client.close()
    wrong += [f"{job['id']} left {left}" for job in jobs if (left := processes_of(job["id"]))]
    print("\n".join([f"jobs {len(jobs)} wrong {len(wrong)} seconds {time.monotonic() - started:.0f}", *wrong]))
    sys.exit(bool(wrong))


def add_user(admin: UsersClient, name: str) -> str:
    return str(admin.add(name, ["submit"])["key"]["key"])


def check(work: list[Any], jobs: list[dict[str, Any]], clients: dict[str, SchedulerClient]) -> list[str]:
    wrong = []
    for (user, what, _), job in zip(work, jobs, strict=True):
        waited, ran = job["started_at"] - job["created_at"], job["ended_at"] - job["started_at"]
        print(f"{job['id']}  {user:4} {what:12} {job['state']:10} waited {waited:5.1f} s  ran {ran:5.1f} s  {job['cause']}")
        if job["state"] != "COMPLETED" or job["owner"] != user:
            wrong.append(f"{job['id']} is {job['state']}: {job['cause']}")
        for other in set(USERS) - {user}:
            try:
                clients[other].job(job["id"])
            except NotFoundError:
                continue
            wrong.append(f"{other} sees {job['id']} of {user}")
    return wrong


if __name__ == "__main__":
    main()
