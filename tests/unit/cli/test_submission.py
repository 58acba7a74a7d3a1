"""The same job from the command line and from Python, and what becomes of it: followed, stopped, asked."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from typer.testing import CliRunner

import opentinker as ot
from opentinker.cli.main import app
from opentinker.errors import CheckpointError, ConfigError, ConflictError, DeadlineError, JobFailedError
from opentinker.scheduler.plan import DriverOutcome
from opentinker.server.listener import Listener

runner = CliRunner()
ENVIRONMENT = """
import opentinker as ot

print("imported")

class Echo(ot.Environment):
    def reset(self, task): return "say something"
    def step(self, action): return ot.StepResult(reward=1.0, done=True)
"""


def run(live: Any, *arguments: str) -> Any:
    return runner.invoke(app, [*arguments, "--state-dir", str(live.folder)], env={"COLUMNS": "100"})


@pytest.fixture
def client(live: Any) -> Any:
    with ot.Client(live.url, (live.folder / "api_key").read_text()) as client:
        yield client


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    (tmp_path / "project" / "envs" / "data").mkdir(parents=True)
    (tmp_path / "project" / "envs" / "echo.py").write_text(ENVIRONMENT)
    (tmp_path / "project" / "envs" / "data" / "words.txt").write_text("one two")
    fields = {"base_model": "some-model", "environment": {"name": "envs/echo.py:Echo"}, "scheduling": {"max_restarts": 1}}
    (tmp_path / "project" / "job.yaml").write_text(yaml.safe_dump(fields))
    return tmp_path / "project" / "job.yaml"


def end(live: Any, job_id: str, cause: str = "") -> None:
    launcher = live.world.launcher
    live.do(live.world.until(lambda: job_id in launcher.ends))
    live.do(lambda: launcher.ends[job_id].set_result(DriverOutcome(cause)))


def test_submitting_from_yaml_and_from_python_give_the_same_job(
    live: Any, client: ot.Client, job_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["training.steps=3", "lora.rank=8"]
    submitted = run(live, "submit", str(job_file), *overrides)
    assert submitted.exit_code == 0, submitted.output
    ids = [submitted.stdout.strip()]
    fields = yaml.safe_load(job_file.read_text())
    monkeypatch.chdir(job_file.parent)  # where a config without a file of its own looks for the environment's
    config = ot.RLJobConfig(
        base_model="some-model",
        environment={"name": "envs/echo.py:Echo"},
        scheduling=ot.Scheduling(max_restarts=1),
        lora=ot.LoraConfig(rank=8),
        training={"steps": 3},
    )
    ids += [client.submit(job_file, overrides=overrides).id, client.submit(str(job_file), overrides=overrides).id]
    ids += [client.submit(fields, overrides=overrides).id, client.submit(config).id]
    stored = [live.do(lambda job_id=job_id: live.world.store.job(job_id)) for job_id in ids]
    assert len(set(ids)) == 5
    assert stored[0].code_sha256
    for job in stored[1:]:
        assert (job.config, job.code_sha256, job.name) == (stored[0].config, stored[0].code_sha256, stored[0].name)
    assert (Path(stored[1].run_dir) / "code" / "data" / "words.txt").read_text() == "one two"


def test_a_submitted_job_is_followed_from_python_and_outlives_its_client(live: Any, client: ot.Client) -> None:
    job = client.submit({"base_model": "some-model", "environment": {"name": "arithmetic"}})
    with pytest.raises(DeadlineError, match=job.id):
        job.wait(0.0)
    live.reach(job.record, "RUNNING")
    assert job.state == "RUNNING"
    (Path(job.record["run_dir"]) / "driver.log").write_text("step 1\n")
    assert job.logs() == "step 1\n"
    with pytest.raises(ConflictError, match="driven by the cluster"):
        job.run(lambda policy: policy.state())
    client.close()
    assert live.client().job(job.id)["state"] == "RUNNING"
    with ot.Client(live.url, (live.folder / "api_key").read_text()) as later:
        second = later.submit({"base_model": "some-model", "environment": {"name": "arithmetic"}})
        end(live, job.id)
        end(live, second.id)
        assert second.wait(10.0)["state"] == second.state == "COMPLETED"
        third = later.submit({"base_model": "some-model", "environment": {"name": "arithmetic"}})
        third.cancel()
        assert third.state == "CANCELLED"
        with pytest.raises(JobFailedError, match="cancelled by its owner"):
            third.wait()


def test_a_job_that_lives_by_its_client_cannot_be_submitted_and_each_kind_says_what_to_do(
    live: Any, client: ot.Client, tmp_path: Path
) -> None:
    for kind, more, said in (("inference", {"lease": True}, "leave out `lease`"), ("interactive", {}, "Client.create_job")):
        fields = {"kind": kind, "base_model": "some-model", **more}
        with pytest.raises(ConfigError, match="lives as long as its client") as caught:
            client.submit(fields)
        assert said in caught.value.hint
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(fields))
        result = run(live, "submit", str(tmp_path / "job.yaml"))
        assert result.exit_code == 1
        assert said in result.stderr
    assert list(client.scheduler.jobs()) == []


@pytest.mark.parametrize(
    ("kind", "said"),
    [("inference", "`opentinker submit`"), ("interactive", "Client.create_job"), ("rll", "did you mean 'rl'?")],
)
def test_train_says_what_to_do_with_a_job_of_another_kind(tmp_path: Path, kind: str, said: str) -> None:
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"kind": kind, "base_model": "some-model"}))
    result = runner.invoke(app, ["train", str(tmp_path / "job.yaml"), "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert said in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2


def test_train_leaves_out_restarts_and_says_so(live: Any, job_file: Path) -> None:
    result = run(live, "train", str(job_file), "base_model=broken")
    assert "max_restarts is left out: this process drives the job" in result.stderr
    assert "the model does not fit" in result.stderr  # it was accepted
    (job,) = live.client().jobs()
    assert job["config"]["scheduling"]["max_restarts"] == 0


def test_arguments_that_make_no_job_are_config_errors(client: ot.Client) -> None:
    with pytest.raises(ConfigError, match="max_restarts is for jobs that the cluster drives"):
        client.create_job("some-model", scheduling=ot.Scheduling(max_restarts=1))
    with pytest.raises(ConfigError, match="max_restarts"):
        client.serve("some-model", scheduling=ot.Scheduling(max_restarts=1))
    with pytest.raises(ConfigError, match="seed"):
        client.create_job("some-model", seed=-1)
    assert list(client.scheduler.jobs()) == []


def test_serve_gives_the_engine_the_gpu_and_takes_a_checkpoint(
    live: Any, client: ot.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fraction(engine: ot.EngineConfig | None) -> float:
        with client.serve("some-model", engine=engine) as job:
            return float(job.record["config"]["engine"]["memory_fraction"])

    assert fraction(None) == fraction(ot.EngineConfig(max_model_len=64)) == 0.9
    assert fraction(ot.EngineConfig(memory_fraction=0.45)) == 0.45
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(client.scheduler, "submit", lambda config: sent.append(config) or {}["stop here"])
    with pytest.raises(KeyError):
        client.serve("some-model", start_from="job-1/final@3")
    assert sent[0]["start_from"] == "job-1/final@3"


def set_save_error(live: Any, error: CheckpointError | None) -> None:
    live.do(lambda: setattr(live.world.launcher, "save_error", error))


def test_stop_fails_when_no_checkpoint_could_be_written(live: Any, client: ot.Client) -> None:
    set_save_error(live, CheckpointError("disk full"))
    job = live.reach(live.submit(), "RUNNING")
    result = run(live, "stop", job["id"], "--json")
    assert result.exit_code == 1
    assert "no checkpoint could be written: disk full" in result.stderr
    assert json.loads(result.stdout)["state"] == "CANCELLED"
    submitted = client.submit({"base_model": "some-model", "environment": {"name": "arithmetic"}})
    live.reach(submitted.record, "RUNNING")
    with pytest.raises(CheckpointError, match="disk full"):
        submitted.stop()
    set_save_error(live, None)
    saved = client.submit({"base_model": "some-model", "environment": {"name": "arithmetic"}})
    live.reach(saved.record, "RUNNING")
    saved.stop()
    assert saved.state == "CANCELLED"
    assert "checkpoint 'stopped'" in saved.record["cause"]


def failed(live: Any) -> str:
    job = live.reach(live.submit(base_model="broken"), "FAILED")
    return str(job["id"])


def waiting(live: Any) -> str:
    live.do(lambda: live.world.launcher.may_start.clear())
    return str(live.submit()["id"])


def of(kind: str) -> Callable[[Any], str]:
    return lambda live: str(live.reach(live.submit(kind), "RUNNING")["id"])


@pytest.mark.parametrize(
    ("job", "code"),
    [(failed, 1), (waiting, 0), (of("rl"), 0), (of("inference"), 0)],
    ids=["failed", "waiting", "rl", "inference"],
)
def test_the_exit_code_of_stop_tells_whether_it_ended_as_asked(live: Any, job: Callable[[Any], str], code: int) -> None:
    result = run(live, "stop", job(live))
    assert result.exit_code == code, result.output
    assert ("the model does not fit" in result.stderr) == (code == 1)
    assert ("CANCELLED" in result.stdout) == (code == 0)


async def die_once(world: Any, job_id: str) -> None:
    """Let the job's server die, and its next one live."""
    world.launcher.may_start.clear()
    world.launcher.faults[job_id] = "killed by signal 9"
    await world.until(lambda: any(event.kind == "restarting" for event in world.store.events(job_id)))
    world.launcher.faults.clear()
    world.launcher.may_start.set()


async def health(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def policy_state(request: Request) -> JSONResponse:
    """What a server says of its policy, with the token that it was asked with."""
    token = request.headers["authorization"].removeprefix("Bearer ")
    return JSONResponse({"policy": request.path_params["policy"], "token": token})


def test_a_submitted_model_is_asked_from_python_also_after_a_restart(live: Any, client: ot.Client) -> None:
    server = Starlette(routes=[Route("/health", health), Route("/v1/policies/{policy}", policy_state)])
    listener = Listener(server, "127.0.0.1")
    live.world.launcher.endpoint = live.do(listener.start())
    job = client.submit(ot.InferenceJobConfig(base_model="some-model", scheduling=ot.Scheduling(max_restarts=1)))

    def asked() -> str:
        answer = job.run(lambda policy: policy.state())
        there = job.record["server"]
        assert answer == {"policy": there["policy"], "token": there["token"]}
        assert job.run(lambda policy: policy.state()) == answer
        return str(there["policy"])

    try:
        first = asked()
        live.do(die_once(live.world, job.id))
        assert asked() != first
        job.stop()
        with pytest.raises(JobFailedError, match="CANCELLED"):
            job.run(lambda policy: policy.state())
    finally:
        client.close()
        live.do(listener.stop())
