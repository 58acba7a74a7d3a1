"""The scheduler's promises on a real Ray cluster: real processes, real kills."""

import base64
import hashlib
import io
import os
import signal
import time
import zipfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from opentinker.scheduler.processes import processes_of
from opentinker.scheduler.state_dir import StateDir

CAUSE = "died (killed, out of memory, or crashed)"


def pids_of(job: dict[str, Any]) -> list[int]:
    return [process.pid for process in processes_of(job["id"])]


def test_a_server_carries_its_jobs_marker_and_complete_leaves_no_process(api: Any) -> None:
    job = api.wait(api.interactive("bears-a-child"), "RUNNING")
    pids = pids_of(job)
    assert {job["server"]["pid"], job["server"]["front_pid"]} < set(pids)
    assert len(pids) == 3
    assert api.free_slots() == 1
    job = api.post(f"/v1/jobs/{job['id']}/complete")
    assert (job["state"], job["server"]) == ("COMPLETED", None)
    assert pids_of(job) == []
    assert api.free_slots() == 2


def test_a_worker_killed_with_kill_9_fails_the_job_within_seconds(api: Any) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    pid = job["server"]["pid"]
    os.kill(pid, signal.SIGKILL)
    job = api.wait(job, "FAILED", timeout_s=30.0)
    assert job["cause"] == f"the server's worker process (pid {pid}) {CAUSE}"
    api.wait_free(2)
    assert pids_of(job) == []


def test_a_front_killed_with_kill_9_fails_the_job_too(api: Any) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    pid = job["server"]["front_pid"]
    os.kill(pid, signal.SIGKILL)
    job = api.wait(job, "FAILED", timeout_s=30.0)
    assert job["cause"] == f"the server's front process (pid {pid}) {CAUSE}"
    api.wait_free(2)


@pytest.mark.parametrize("what", ["driver", "server"])
def test_a_job_with_restarts_left_goes_on_after_a_death_on_a_new_server(api: Any, what: str) -> None:
    """The driver kills itself the first time; or the worker is killed under it."""
    environment = "dies-once" if what == "driver" else "waits-unless-resumed"
    config = {"kind": "rl", "base_model": "fine", "environment": {"name": environment}, "scheduling": {"max_restarts": 1}}
    job = api.post("/v1/jobs", {"config": config})
    if what == "server":
        first = api.wait(job, "RUNNING")["server"]
        os.kill(first["pid"], signal.SIGKILL)
    job = api.wait(job, "COMPLETED", "FAILED", timeout_s=120.0)
    assert job["state"] == "COMPLETED", job["cause"]
    kinds = [event["kind"] for event in api.get(f"/v1/jobs/{job['id']}/events")["events"]]
    assert kinds.count("restarting") == 1
    assert kinds.count("running") == 2
    assert "at work again" in api.get(f"/v1/jobs/{job['id']}/logs")["text"]
    api.wait_free(2)
    assert processes_of(job["id"]) == []


def test_stop_writes_a_checkpoint_before_the_end(api: Any) -> None:
    job = api.wait(api.rl("waits"), "RUNNING")
    job = api.post(f"/v1/jobs/{job['id']}/stop")
    assert (job["state"], job["cause"]) == (
        "CANCELLED",
        "stopped by its owner; its weights are in checkpoint 'stopped'",
    )
    assert "checkpoint stopped" in api.get(f"/v1/jobs/{job['id']}/logs", source="server")["text"]


def test_an_inference_job_that_nobody_asks_is_given_back(api: Any) -> None:
    config = {"kind": "inference", "base_model": "fine", "scheduling": {"idle_limit_s": 1.5}}
    job = api.wait(api.post("/v1/jobs", {"config": config}), "COMPLETED", "FAILED", timeout_s=120.0)
    assert (job["state"], job["cause"]) == ("COMPLETED", "its server was idle for 2 s, its limit")
    api.wait_free(2)


def test_killing_the_server_under_a_driver_fails_the_job_with_the_servers_death(api: Any) -> None:
    job = api.wait(api.rl("loses-its-server"), "RUNNING")
    Path(job["run_dir"], "worker_pid").write_text(str(job["server"]["pid"]))
    job = api.wait(job, "FAILED", timeout_s=30.0)
    assert job["cause"].startswith("the server's worker process")
    api.wait_free(2)
    assert pids_of(job) == []


@pytest.mark.parametrize(
    ("model", "cause"),
    [("broken", "the model does not fit (use a smaller one)"), ("crashes", "died while starting")],
)
def test_a_server_that_does_not_start_fails_the_job_with_the_cause(api: Any, model: str, cause: str) -> None:
    job = api.wait(api.interactive(model), "FAILED")
    assert cause in job["cause"]
    api.wait_free(2)
    assert pids_of(job) == []
    logs = api.get(f"/v1/jobs/{job['id']}/logs")
    assert "the worker is at work" in logs["text"]
    assert logs["finished"]


def test_cancel_while_starting_leaves_nothing(api: Any) -> None:
    job = api.wait(api.interactive("hangs"), "STARTING")
    deadline = time.monotonic() + 60.0
    while len(pids_of(job)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job = api.post(f"/v1/jobs/{job['id']}/cancel")
    assert job["state"] == "CANCELLED"
    assert pids_of(job) == []
    assert api.free_slots() == 2


def test_cancel_before_the_first_process_is_up_leaves_nothing(api: Any) -> None:
    job = api.wait(api.interactive("hangs"), "STARTING")
    job = api.post(f"/v1/jobs/{job['id']}/cancel")
    assert api.free_slots() == 2
    time.sleep(3.0)  # longer than a process takes to come up
    assert pids_of(job) == []


def test_a_server_that_does_not_stop_by_itself_is_killed(api: Any) -> None:
    job = api.wait(api.interactive("deaf"), "RUNNING")
    started = time.monotonic()
    job = api.post(f"/v1/jobs/{job['id']}/cancel")
    assert time.monotonic() - started < 60.0
    assert pids_of(job) == []


def test_a_job_that_does_not_fit_waits_and_starts_when_a_slot_is_back(api: Any) -> None:
    first, second = (api.wait(api.rl("waits"), "RUNNING") for _ in range(2))
    third, fourth = api.rl(), api.rl()
    assert api.get(f"/v1/jobs/{third['id']}", state="QUEUED", wait_s=1)["waiting_for"] == (
        f"needs 1 CPU slot; no CPU slot is free; after {first['id']}, which has no time limit"
    )
    assert api.get(f"/v1/jobs/{fourth['id']}")["waiting_for"].startswith(
        f"its turn: 1 job ahead in the queue (next: {third['id']})"
    )
    assert api.post(f"/v1/jobs/{fourth['id']}/cancel")["state"] == "CANCELLED"
    api.post(f"/v1/jobs/{first['id']}/cancel")
    api.wait(third, "COMPLETED")
    assert api.get(f"/v1/jobs/{second['id']}")["state"] == "RUNNING"


def test_a_client_that_vanishes_loses_its_lease_and_its_resources(api: Any, lease_s: float) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    until = time.monotonic() + 1.5 * lease_s
    while time.monotonic() < until:
        time.sleep(lease_s / 8)
        assert api.post(f"/v1/jobs/{job['id']}/heartbeat")["state"] == "RUNNING"
    job = api.wait(job, "CANCELLED", timeout_s=lease_s + 60.0, alive=False)
    assert job["cause"] == f"lease expired: no heartbeat for {lease_s:g} s"
    api.wait_free(2)
    assert pids_of(job) == []


def test_a_driver_writes_its_log_and_metrics_and_completes_its_job(api: Any) -> None:
    job = api.wait(api.rl(), "COMPLETED", "FAILED")
    assert (job["state"], job["cause"]) == ("COMPLETED", "")
    api.wait_free(2)
    logs = api.get(f"/v1/jobs/{job['id']}/logs")
    assert "the driver is at work\n" in logs["text"]
    assert f"level=INFO job={job['id']} logger=drive a log line" in logs["text"]
    assert logs["finished"]
    assert api.get(f"/v1/jobs/{job['id']}/logs", offset=logs["offset"])["text"] == ""
    written = api.get(f"/v1/jobs/{job['id']}/logs", source="server")["text"]
    assert "the worker is at work\n" in written
    assert f"level=INFO job={job['id']} process=front logger=front a policy is created within 1800 s\n" in written
    assert written not in logs["text"]
    metrics = api.get(f"/v1/jobs/{job['id']}/metrics")
    assert metrics["rows"] == [{"step": 1, "reward": None}, {"step": 2}]
    assert metrics["finished"]


@pytest.mark.parametrize(
    ("environment", "cause"),
    [
        ("raises", "no such environment (look again)"),
        ("raises-oddly", "the driver failed: NotPicklableError: two arguments"),
        ("exits", "the driver failed: SystemExit: 3"),
        ("dies", "the driver process"),
    ],
)
def test_a_driver_that_fails_fails_its_job_with_one_line(api: Any, environment: str, cause: str) -> None:
    job = api.wait(api.rl(environment), "COMPLETED", "FAILED")
    assert job["state"] == "FAILED"
    assert job["cause"].startswith(cause)
    assert "\n" not in job["cause"]
    api.wait_free(2)
    assert pids_of(job) == []
    if environment.startswith("raises"):
        assert "Traceback" in api.get(f"/v1/jobs/{job['id']}/logs")["text"]


def test_the_users_code_travels_with_the_job(api: Any) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("pkg/mine.py", "my own code")
    content = buffer.getvalue()
    code = {"zip": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}
    job = api.wait(api.rl("reads-its-code", code=code), "COMPLETED", "FAILED")
    assert job["state"] == "COMPLETED", job["cause"]
    assert "my own code" in api.get(f"/v1/jobs/{job['id']}/logs")["text"]


def test_errors_keep_their_type_across_the_actor(api: Any) -> None:
    for config, code in (
        ({"kind": "interactive", "base_model": "unheard-of"}, "unknown_model"),
        ({"kind": "interactive", "base_model": "fine", "resources": {"gpus": 64}}, "invalid_config"),
        ({"kind": "interactive", "base_modle": "fine"}, "invalid_config"),
    ):
        response = api.http.post("/v1/jobs", json={"config": config})
        assert (response.status_code, response.json()["code"]) == (400, code)
    assert api.http.get("/v1/jobs/job-0").status_code == 404
    assert api.http.get("/v1/jobs", headers={"Authorization": "Bearer ot-wrong"}).status_code == 401


def test_a_lost_answer_can_be_asked_for_again(api: Any) -> None:
    first, second = (api.rl("waits", idempotency_key="once") for _ in range(2))
    assert first["id"] == second["id"]


def test_no_key_is_in_any_command_line_environment_or_log(cluster: Any, api: Any, run_marker: str) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    secrets = [cluster.key_path.read_text(), job["server"]["token"]]
    seen = 0
    for process in psutil.process_iter():
        try:
            environment, arguments = process.environ(), process.cmdline()
        except psutil.Error:
            continue
        if environment.get("OPENTINKER_RUN") == run_marker:
            seen += 1
            assert not any(secret in text for secret in secrets for text in [*arguments, *environment.values()])
    assert seen > 4
    record = StateDir(cluster.key_path.parent).record()
    assert record is not None
    logs = [path for path in Path(record["ray_dir"]).glob("session_*/logs/*") if path.is_file()]
    assert logs
    assert not any(secret in path.read_text(errors="replace") for secret in secrets for path in logs)


def scheduler_process() -> psutil.Process:
    """Of this module's cluster."""
    (scheduler,) = [p for p in psutil.process_iter() if p.name().startswith("ray::Scheduler") and _is_of(p, os.getpid())]
    return scheduler


def await_scheduler(api: Any) -> None:
    deadline = time.monotonic() + 60.0
    while api.http.get("/v1/jobs").status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_the_scheduler_answers_before_the_jobs_processes_get_the_processor(api: Any) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    niceness = psutil.Process().nice()
    assert scheduler_process().nice() == niceness
    assert [psutil.Process(job["server"][pid]).nice() for pid in ("pid", "front_pid")] == [min(niceness + 15, 19)] * 2
    api.post(f"/v1/jobs/{job['id']}/complete")


def kill_scheduler(api: Any) -> None:
    """Kill its process, and wait until the next one answers."""
    scheduler = scheduler_process()
    scheduler.kill()
    await_scheduler(api)


def test_a_restarted_scheduler_finds_its_running_jobs_again(api: Any) -> None:
    driven = api.wait(api.rl("waits-a-while"), "RUNNING")
    while not Path(driven["run_dir"], "runs").exists():
        time.sleep(0.05)
    leased = api.wait(api.interactive(), "RUNNING")
    with api.alive(leased):
        queued = api.rl()
        before = set(pids_of(leased))
        kill_scheduler(api)
        leased = api.post(f"/v1/jobs/{leased['id']}/heartbeat")
        assert (leased["state"], set(pids_of(leased))) == ("RUNNING", before)
        driven = api.wait(driven, "COMPLETED", "FAILED")
        assert (driven["state"], driven["cause"]) == ("COMPLETED", "")
        assert Path(driven["run_dir"], "runs").read_text() == "run\n"
        assert api.wait(queued, "COMPLETED", "FAILED")["state"] == "COMPLETED"
    pid = leased["server"]["pid"]
    os.kill(pid, signal.SIGKILL)
    leased = api.wait(leased, "FAILED", timeout_s=30.0)
    assert leased["cause"] == f"the server's worker process (pid {pid}) {CAUSE}"
    api.wait_free(2)
    assert pids_of(leased) == []


def test_a_restarted_scheduler_goes_on_with_starts_and_still_can_cancel(api: Any) -> None:
    slow = api.wait(api.interactive("slow"), "STARTING")
    with api.alive(slow):
        driven = api.wait(api.rl("waits"), "RUNNING")
        while "at work" not in api.get(f"/v1/jobs/{driven['id']}/logs")["text"]:
            time.sleep(0.05)
        kill_scheduler(api)
        api.wait(slow, "RUNNING")
    started = time.monotonic()
    for job in (driven, slow):
        assert api.post(f"/v1/jobs/{job['id']}/cancel")["state"] == "CANCELLED"
        assert pids_of(job) == []
    assert time.monotonic() - started < 60.0
    assert api.free_slots() == 2


def test_a_scheduler_that_restarts_without_its_store_comes_back_with_it(cluster: Any, api: Any) -> None:
    job = api.wait(api.interactive(), "RUNNING")
    database = cluster.key_path.with_name("scheduler.db")
    parts = [path for path in (database, *(Path(f"{database}-{part}") for part in ("wal", "shm"))) if path.exists()]
    scheduler = scheduler_process()
    scheduler.send_signal(signal.SIGSTOP)
    for path in parts:
        path.rename(f"{path}.away")
    database.mkdir()
    scheduler.kill()
    time.sleep(5.0)
    assert api.http.get("/v1/jobs").status_code == 503
    database.rmdir()
    for path in parts:
        Path(f"{path}.away").rename(path)
    deadline = time.monotonic() + 60.0
    while (answer := api.http.post(f"/v1/jobs/{job['id']}/heartbeat")).status_code == 503:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert answer.json()["state"] == "RUNNING"


def test_what_died_while_the_scheduler_was_down_fails_its_job(api: Any) -> None:
    leased = api.wait(api.interactive(), "RUNNING")
    with api.alive(leased):
        driven = api.wait(api.rl("waits"), "RUNNING")
        while "at work" not in api.get(f"/v1/jobs/{driven['id']}/logs")["text"]:
            time.sleep(0.05)
        (driver,) = [p for p in processes_of(driven["id"]) if p.name().startswith("ray::DriverProc")]
        scheduler = scheduler_process()
        scheduler.kill()
        os.kill(leased["server"]["pid"], signal.SIGKILL)
        driver.kill()
        await_scheduler(api)
    assert "worker process" in api.wait(leased, "FAILED", timeout_s=30.0)["cause"]
    assert "driver process" in api.wait(driven, "FAILED", timeout_s=30.0)["cause"]
    api.wait_free(2)


def _is_of(process: psutil.Process, driver: int) -> bool:
    """Whether the process belongs to the driver's own raylet; another test's cluster may be a descendant too."""
    return driver in [parent.pid for parent in process.parents()[:2]]
