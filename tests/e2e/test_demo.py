"""`opentinker demo` and `opentinker up`: what they start, they stop."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from e2e_tools import OPENTINKER, Cluster, marked, opentinker, processes_of, wait_until

Arguments = list[str | Path]


@pytest.fixture
def demo(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Arguments]:
    def arguments(*more: str | Path) -> Arguments:
        return [
            "demo",
            "--base-model",
            tiny_model_dir,
            "--engine",
            "transformers",
            "--runs-dir",
            tmp_path / "runs",
            "--state-dir",
            tmp_path / "state",
            *more,
        ]

    return arguments


@pytest.mark.parametrize(
    ("environment", "engine", "options"),
    [("arithmetic", "vllm", ()), ("guess_number", "transformers", ("--lora",))],  # vLLM is what `make demo` runs
)
def test_a_demo_trains_reports_and_leaves_nothing_running(
    demo, tmp_path: Path, environment: str, engine: str, options: tuple[str, ...]
) -> None:
    marker, env = marked()
    options = ("--env", environment, "--engine", engine, "--steps", "2", "--seed", "3", "--json", *options)
    result = opentinker(*demo(*options), env=env)
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["steps"] == 2
    assert yaml.safe_load(Path(summary["run_dir"], "config.yaml").read_text())["engine"]["kind"] == engine
    for key in ("exact_before", "exact_after", "exact_ci", "reward_before", "reward_after", "wall_s", "mismatch_kl_mean"):
        assert isinstance(summary[key], float), key
    assert summary["tokens_sampled"] > 0
    report, checkpoint = Path(summary["report"]), Path(summary["checkpoint"])
    assert report.parent.parent == tmp_path / "runs" / "admin"
    assert "<svg" in report.read_text()
    assert any(checkpoint.iterdir())
    assert f"{environment}: held-out exact" in result.stderr
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the demo is left")


def test_a_demo_uses_the_cluster_that_runs(demo, cluster: Cluster) -> None:
    result = opentinker(*demo("--steps", "1", "--state-dir", cluster.state_dir))
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"using the cluster at {cluster.url}" in result.stdout
    assert cluster.client.health() == {"status": "ok"}
    assert next(cluster.client.jobs())["name"] == "arithmetic"


@pytest.mark.parametrize(
    ("number", "when", "engine"),
    [
        (signal.SIGINT, "starting a cluster", "transformers"),
        (signal.SIGHUP, "starting, ", "transformers"),
        (signal.SIGTERM, "step ", "transformers"),
        (signal.SIGINT, "step ", "vllm"),
    ],
    ids=["ctrl-c while the cluster starts", "a closed terminal while the server starts", "sigterm", "ctrl-c with vllm"],
)
def test_an_interrupted_demo_leaves_no_process(demo, tmp_path: Path, number: signal.Signals, when: str, engine: str) -> None:
    log = tmp_path / "log"
    marker, env = marked()
    with log.open("w") as file:
        command = [OPENTINKER, *map(str, demo("--engine", engine, "--steps", "1000"))]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file, start_new_session=True)
        wait_until(lambda: when in log.read_text() or process.poll() is not None, 180, f"the demo says '{when}'")
        assert process.poll() is None, log.read_text()
        assert processes_of(marker)
        os.killpg(process.pid, number)  # the whole group, as terminals and service managers do
        assert process.wait(120) == 130, log.read_text()
    assert "Traceback" not in log.read_text()
    assert "processes_left" not in log.read_text()
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the demo is left")


def test_a_demo_that_fails_says_why(demo) -> None:
    marker, env = marked()
    result = opentinker(*demo("--base-model", "/no/such/model"), env=env)
    assert result.returncode == 1
    assert "/no/such/model" in result.stderr
    assert "Traceback" not in result.stderr
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the demo is left")


def test_a_cluster_says_where_it_is_and_stops_on_down(tmp_path: Path) -> None:
    marker, env = marked()
    log = tmp_path / "log"
    state = tmp_path / "state"
    with log.open("w") as file:
        command = [OPENTINKER, "up", "--state-dir", str(state), "--runs-dir", str(tmp_path), "--port", "0"]
        process = subprocess.Popen(command, env=env, stdout=file, stderr=file)
        wait_until(lambda: "Ctrl-C" in log.read_text() or process.poll() is not None, 180, "the cluster is up")
        said = log.read_text()
        assert json.loads((state / "cluster.json").read_text())["url"] in said
        assert str(state / "api_key") in said.replace("\n", "")
        assert (state / "api_key").read_text() not in said
        assert opentinker("ps", "--state-dir", state).stdout == "no jobs\n"
        second = opentinker("up", "--state-dir", state, "--port", "0")
        assert second.returncode == 1
        assert "already runs" in second.stderr
        assert opentinker("down", "--state-dir", state).stdout == "stopped\n"
        assert process.wait(120) == 0
    wait_until(lambda: processes_of(marker) == [], 25, "no process of the cluster is left")


def test_a_port_in_use_is_said_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = opentinker("up", "--state-dir", tmp_path / "state", "--port", str(port))
    assert result.returncode == 1
    assert str(port) in result.stderr
    assert "--port 0" in result.stderr
