"""Users, keys and secrets on a real Ray cluster whose store is a real PostgreSQL."""

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from opentinker.errors import ConfigError
from opentinker.scheduler.database import connect
from opentinker.scheduler.state_dir import StateDir
from opentinker.scheduler.store import SqlStore

SCRIPT = """if True:
    import json, sys
    from pathlib import Path
    from opentinker.scheduler.cluster import EmbeddedCluster
    folder, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    with EmbeddedCluster.start(folder / "state", folder / "runs", port=0, cpu_slots=1, settings=settings) as cluster:
        print(cluster.url, flush=True)
        sys.stdin.read()
"""
SECRETS = {
    "OPENTINKER_API_KEY": "a-key-of-the-operator",
    "PGPASSWORD": "not-for-logs",
    "RAY_AUTH_TOKEN": "a-token-of-this-very-cluster-00000000000000000000",
    "RAY_AUTH_MODE": "token",
}


class Server:
    def __init__(self, folder: Path, url: str, database_url: str) -> None:
        self.folder, self.url, self.database_url = folder, url, database_url
        self.admin = (folder / "state" / "api_key").read_text()

    def call(self, key: str, method: str, path: str, body: Any = None, address: str = "192.0.2.1") -> httpx.Response:
        headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": address}
        return httpx.request(method, self.url + path, headers=headers, json=body, timeout=60.0)


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, run_marker: str, settings: dict[str, Any], postgres: Any
) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cluster")
    database_url = postgres.database()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder), json.dumps({**settings, "database_url": database_url})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **SECRETS},
    )
    assert process.stdout is not None
    url = process.stdout.readline().strip()
    if not url:
        pytest.fail(process.communicate()[1])
    yield Server(folder, url, database_url)
    _, errors = process.communicate("", timeout=120.0)
    assert errors == ""


def ended(server: Server, key: str, environment: str) -> dict[str, Any]:
    config = {"kind": "rl", "base_model": "fine", "environment": {"name": environment}}
    job: dict[str, Any] = server.call(key, "POST", "/v1/jobs", {"config": config}).json()
    while job["state"] not in ("COMPLETED", "FAILED", "CANCELLED"):
        job = server.call(key, "GET", f"/v1/jobs/{job['id']}?state={job['state']}&wait_s=20").json()
    assert job["state"] == "COMPLETED", job["cause"]
    return job


def test_users_are_kept_apart_across_the_actor(server: Server) -> None:
    keys = {}
    for name in ("ann", "bob"):
        answer = server.call(server.admin, "POST", "/v1/users", {"name": name})
        assert answer.status_code == 201, answer.text
        keys[name] = answer.json()["key"]["key"]
    job = ended(server, keys["ann"], "returns")
    assert server.call(keys["bob"], "GET", f"/v1/jobs/{job['id']}").status_code == 404
    assert server.call(server.admin, "GET", f"/v1/jobs/{job['id']}").json()["owner"] == "ann"
    answer = server.call(keys["ann"], "GET", "/v1/users")
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    answer = server.call(server.admin, "POST", "/v1/users", {"name": "ann"})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    (key,) = server.call(server.admin, "GET", "/v1/users/ann/keys").json()["keys"]
    assert server.call(server.admin, "POST", f"/v1/users/ann/keys/{key['id']}/revoke").status_code == 200
    assert server.call(keys["ann"], "GET", "/v1/jobs").status_code == 401


def test_who_guesses_is_told_to_wait_and_others_are_not(server: Server) -> None:
    guesses = [server.call("ot-guess", "GET", "/v1/jobs", address="198.51.100.9") for _ in range(11)]
    assert [guess.status_code for guess in guesses] == [401] * 10 + [429]
    assert int(guesses[-1].headers["Retry-After"]) >= 1
    assert server.call(server.admin, "GET", "/v1/jobs").status_code == 200
    events = server.call(server.admin, "GET", "/v1/audit").json()["events"]
    assert ("login", "198.51.100.9", "denied") in [(e["action"], e["address"], e["outcome"]) for e in events]


def test_user_code_finds_no_secret_in_its_environment(server: Server) -> None:
    job = ended(server, server.admin, "shows-its-environment")
    environment = (Path(job["run_dir"]) / "environment").read_text()
    assert f"OPENTINKER_JOB={job['id']}" in environment
    for name in ("OPENTINKER_API_KEY", "PGPASSWORD"):
        assert SECRETS[name] not in environment
    # Ray hands its token to each of its processes when it starts them; what a process was born with, the kernel remembers.
    born_with, _, now = environment.partition("\n\n")
    assert SECRETS["RAY_AUTH_TOKEN"] not in now
    assert len(born_with) > 100


def test_no_secret_is_in_arguments_logs_or_the_job(server: Server, run_marker: str, postgres: Any) -> None:
    job = ended(server, server.admin, "returns")
    secrets = [server.admin, postgres.passfile.read_text().rpartition(":")[2], SECRETS["RAY_AUTH_TOKEN"]]
    texts = [json.dumps(job), server.call(server.admin, "GET", f"/v1/jobs/{job['id']}/logs").text]
    for process in psutil.process_iter():
        try:
            if process.environ().get("OPENTINKER_RUN") == run_marker:
                texts.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    record = json.loads((server.folder / "state" / "cluster.json").read_text())
    texts += [path.read_text(errors="replace") for path in Path(record["ray_dir"]).rglob("*.log")]
    texts += [path.read_text(errors="replace") for path in Path(record["ray_dir"]).rglob("worker-*.err")]
    assert len(texts) > 5
    for secret in secrets:
        assert not any(secret in text for text in texts)


def test_the_jobs_are_in_postgresql_and_not_in_a_file(server: Server) -> None:
    ended(server, server.admin, "returns")
    assert not (server.folder / "state" / "scheduler.db").exists()
    engine = connect(server.database_url)
    with engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM jobs").scalar() >= 1
    engine.dispose()


def test_a_database_of_a_newer_version_is_named_before_anything_starts(tmp_path: Path) -> None:
    from opentinker.scheduler.cluster import EmbeddedCluster

    (tmp_path / "state").mkdir()
    SqlStore.open_sqlite(tmp_path / "state" / "scheduler.db").close()
    with sqlite3.connect(tmp_path / "state" / "scheduler.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ConfigError, match="9999"):
        EmbeddedCluster.start(tmp_path / "state", tmp_path / "runs", port=0)
    assert StateDir(tmp_path / "state").running() is None
