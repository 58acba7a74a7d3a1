"""A running cluster and a user's project."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parent))

from e2e_tools import CLUSTER, ENVIRONMENTS, Cluster, marked, processes_of, wait_until

from opentinker.client.local import find_cluster
from opentinker.client.scheduler import SchedulerClient


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One cluster for all tests here: two CPU slots, a short lease. Nothing of it is left afterwards."""
    folder = tmp_path_factory.mktemp("cluster")
    marker, env = marked()
    log = (folder / "log").open("w")
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, folder / "state", folder / "runs"], env=env, stdout=log, stderr=log
    )
    try:
        wait_until(lambda: (folder / "state" / "cluster.json").exists() or process.poll() is not None, 180, "the cluster is up")
        assert process.poll() is None, (folder / "log").read_text()
        url, key = find_cluster(None, None, folder / "state")
        client = SchedulerClient(url, key)
        yield Cluster(url, key, folder / "state", client)
        client.close()
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)
        log.close()
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the cluster is left")


@pytest.fixture
def project(tmp_path: Path, tiny_model_dir: Path) -> Path:
    """A user's folder: job.yaml, the environments and a module that they import."""
    (tmp_path / "games.py").write_text(ENVIRONMENTS)
    (tmp_path / "words.py").write_text('PROMPT = "Say something."\n')
    config = {
        "base_model": str(tiny_model_dir),
        "engine": {"kind": "transformers", "max_model_len": 128},
        "trainer": {"dtype": "float32"},
        "environment": {"name": "games.py:Echo"},
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 6},
        "rollout": {"groups_per_step": 2},
        "evaluation": {"samples_per_task": 2},
        "training": {"steps": 2},
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return tmp_path
