"""The commands of daily use, against a scheduler's real HTTP API."""

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.cli import logs as logs_module
from opentinker.cli.main import app
from opentinker.cli.ps import jobs_view
from opentinker.cli.top import cluster_screen
from opentinker.cli.wait import exit_code, reached
from opentinker.scheduler.gpus import GpuUse
from opentinker.scheduler.hosting import released
from opentinker.scheduler.placement import Node
from opentinker.scheduler.plan import DriverOutcome

runner = CliRunner()
MAIN = "from opentinker.cli.main import main; main()"


def run(live: Any, *arguments: str, width: int = 80) -> Any:
    return runner.invoke(app, [*arguments, "--state-dir", str(live.folder)], env={"COLUMNS": str(width)})


def finish(live: Any, job: dict[str, Any], cause: str = "") -> dict[str, Any]:
    """Let a running job's driver end."""
    job = live.reach(job, "RUNNING")
    launcher = live.world.launcher
    live.do(live.world.until(lambda: job["id"] in launcher.ends))
    live.do(lambda: launcher.ends[job["id"]].set_result(DriverOutcome(cause)))
    ended: dict[str, Any] = live.reach(job, "COMPLETED", "FAILED")
    live.do(live.world.until(lambda: released(live.world.store, job["id"])))
    return ended


def slots(live: Any, number: int, gpus: int = 0) -> None:
    live.do(lambda: setattr(live.world.launcher, "cluster", [Node("n1", "here", gpus=gpus, cpu_slots=number)]))


def test_ps_shows_the_living_and_the_last_that_ended_and_all_on_request(live: Any) -> None:
    old = [finish(live, live.submit(name=f"old-{i}")) for i in range(12)]
    running = live.reach(live.submit(name="alive"), "RUNNING")
    queued = live.submit("interactive")
    output = run(live, "ps").stdout
    assert re.findall(r"^\s*(job-\w+)", output, re.MULTILINE)[:2] == [queued["id"], running["id"]]
    assert "old-11" in output
    assert "old-2" in output
    assert "old-1 " not in output
    everything = run(live, "ps", "--all", "--json").stdout.splitlines()
    assert [json.loads(line)["id"] for line in everything] == [j["id"] for j in (queued, running, *reversed(old))]
    assert "otp-" not in "".join(everything)


def test_ps_filters(live: Any) -> None:
    slots(live, 2)
    done = finish(live, live.submit(name="Gomoku one"))
    running = live.reach(live.submit("interactive", name="gomoku two"), "RUNNING")

    def ids(*options: str) -> list[str]:
        return [json.loads(line)["id"] for line in run(live, "ps", "--json", *options).stdout.splitlines()]

    assert ids("--state", "running") == [running["id"]]
    assert ids("--state", "RUNNING", "-s", "completed") == [running["id"], done["id"]]
    assert ids("--kind", "rl") == [done["id"]]
    assert ids("--name", "gomoku") == [running["id"], done["id"]]
    assert ids("--name", "nothing") == []
    assert ids("--limit", "1") == [running["id"]]
    assert "--limit" in run(live, "ps", "--limit", "1").stdout
    assert run(live, "ps", "--state", "flying").exit_code == 2


CAUSE = "error_env: the environment raised KeyError: question"
NAME = "/models/an-organisation/A-Model-With-A-Rather-Long-Name-72B-Instruct"


def render(view: Any, width: int) -> list[str]:
    from rich.console import Console

    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view)
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [80, 120, 200])
@pytest.mark.parametrize("owners", [("ann",), ("ann", "somebody-with-a-name")])
def test_a_narrow_terminal_loses_neither_the_note_nor_the_id(width: int, owners: tuple[str, ...]) -> None:
    jobs = [
        {
            "id": f"job-0123456789{i}"[:14],
            "state": "CANCELLED",
            "kind": "interactive",
            "owner": owner,
            "created_at": 0.0,
            "name": NAME.rpartition("/")[2],
            "config": {"base_model": NAME},
            "cause": CAUSE,
            "waiting_for": "",
        }
        for i, owner in enumerate(owners)
    ]
    lines = render(jobs_view(jobs, 100.0, width), width)
    assert all(len(line) <= width for line in lines)
    at = lines[0].index("note")
    assert width - at >= 22
    assert " ".join(line[at:].strip() for line in lines[1:]).count(CAUSE) == len(owners)
    assert "CANCELLED" in lines[1]
    assert jobs[0]["id"] in lines[1]


@pytest.mark.parametrize("width", [80, 120])
def test_the_clusters_view_fits_the_terminal(width: int) -> None:
    use = {"index": 0, "name": "H200", "busy": 0.97, "memory_used_bytes": 130 * 2**30, "memory_bytes": 140 * 2**30}
    who = {
        "job": "job-0123456789",
        "name": NAME[-40:],
        "kind": "interactive",
        "owner": "somebody-with-a-name",
        "state": "STARTING",
    }
    held = {**who, "server_state": "STARTING", "gpus": 8, "cpu_slots": 0, "since": 0.0}
    waiting = {**who, "job": None, "gpus": 0.25, "cpu_slots": 0, "since": 0.0, "waiting_for": "its turn: 12 jobs ahead"}
    node = {"name": "gpu-node-017.cluster.internal", "id": "n", "gpus": 8, "free_gpus": 0, "cpu_slots": 2, "free_cpu_slots": 1}
    cluster = {
        "nodes": [{**node, "held": [held] * 3, "gpu_use": [use] * 8}, {**node, "held": [], "gpu_use": []}],
        "queue": [waiting] * 50,
        "queued": 400,
        "running": 3,
    }
    lines = render(cluster_screen(cluster, "http://127.0.0.1:8780", 100.0, width, None), width)
    assert all(len(line) <= width for line in lines)
    text = "\n".join(lines)
    for said in ("16/16 GPUs held", "400 waiting", "job-0123456789", "STARTING", "97%", "8 GPUs", "0.25 GPU", "12 jobs ahead"):
        assert said in text, said
    assert "and 350 more" in text
    fitted = render(cluster_screen(cluster, "http://127.0.0.1:8780", 100.0, width, 24), width)
    assert len(fitted) <= 24


def test_top_shows_the_cluster_once_or_as_json(live: Any) -> None:
    slots(live, 1, gpus=2)
    live.do(lambda: setattr(live.world.launcher, "use", {"n1": [GpuUse(i, "H200", 0.5, 0, 2**30) for i in range(2)]}))
    job = live.reach(live.submit(name="mine", resources={"gpus": 2}), "RUNNING")
    live.submit(resources={"gpus": 1})
    output = run(live, "top", "--once").stdout
    for said in ("2/2 GPUs held", "1 running", "1 waiting", job["id"], "mine", "50%"):
        assert said in output
    [document] = run(live, "top", "--once", "--json").stdout.splitlines()
    assert json.loads(document)["nodes"][0]["held"][0]["job"] == job["id"]


def test_describe_says_why_a_job_waits_and_shows_no_token(live: Any) -> None:
    running = live.reach(live.submit("interactive"), "RUNNING")
    queued = live.submit()
    live.do(live.world.until(lambda: "slot" in live.world.service._reconciler.waiting_for(live.world.store.job(queued["id"]))))
    assert "waits for: needs 1 CPU slot; no CPU slot is free" in run(live, "describe", queued["id"]).stdout
    shown = run(live, "describe", running["id"]).stdout
    assert "submitted" in shown
    document = json.loads(run(live, "describe", running["id"], "--json").stdout)
    assert [event["kind"] for event in document["events"]] == ["submitted", "starting", "running"]
    assert document["server"]["endpoint"]
    for output in (shown, json.dumps(document)):
        assert running["server"]["token"] not in output


@pytest.mark.parametrize("command", ["cancel", "stop"])
def test_what_ends_jobs_takes_several_and_goes_on_after_a_wrong_one(live: Any, command: str) -> None:
    slots(live, 2)
    first, second = live.submit(), live.submit()
    result = run(live, command, first["id"], "job-none", second["id"])
    assert result.exit_code == 1
    shown = [line.partition(":")[0] for line in result.stdout.splitlines()]
    assert shown == [f"{first['id']} CANCELLED", f"{second['id']} CANCELLED"]
    assert "no job 'job-none'" in result.stderr
    assert json.loads(run(live, command, first["id"], "--json").stdout)["state"] == "CANCELLED"


def test_events_are_printed_until_the_job_has_ended_and_let_go(live: Any) -> None:
    job = live.reach(live.submit(), "RUNNING")
    threading.Timer(0.5, finish, (live, job)).start()
    lines = run(live, "events", job["id"], "-f", "--json").stdout.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["submitted", "starting", "running", "completed", "released"]
    assert run(live, "events", job["id"]).stdout.count("\n") == 5


def test_wait_tells_by_its_exit_code_how_it_went(live: Any) -> None:
    done, failed = finish(live, live.submit()), finish(live, live.submit(), cause="no such luck")
    cancelled = live.client().cancel(live.submit()["id"])
    running = live.reach(live.submit(), "RUNNING")
    for job, options, code in [
        (done, [], 0),
        (failed, [], 1),
        (cancelled, [], 2),
        (done, ["--for", "failed"], 3),
        (failed, ["--for", "FAILED"], 0),
        (running, ["--for", "running"], 0),
        (running, ["--timeout", "0.1"], 124),
        ({"id": "job-none"}, [], 125),
    ]:
        result = run(live, "wait", job["id"], *options)
        assert result.exit_code == code, (options, result.output)
    assert "no such luck" in run(live, "wait", failed["id"]).stdout
    threading.Timer(0.3, finish, (live, running)).start()
    result = run(live, "wait", running["id"], "--timeout", "20", "--json")
    assert (result.exit_code, json.loads(result.stdout)["state"]) == (0, "COMPLETED")


@pytest.mark.parametrize(
    ("state", "until", "done", "code"),
    [
        ("QUEUED", None, False, 124),
        ("RUNNING", "STARTING", True, 0),
        ("STARTING", "RUNNING", False, 124),
        ("COMPLETED", "RUNNING", True, 0),
        ("FAILED", "RUNNING", True, 1),
        ("CANCELLED", "COMPLETED", True, 2),
        ("RUNNING", "CANCELLED", False, 124),
        ("COMPLETED", "CANCELLED", True, 3),
        ("FAILED", "CANCELLED", True, 1),
    ],
)
def test_where_a_wait_ends(state: str, until: str | None, done: bool, code: int) -> None:
    assert reached(state, until) == done
    assert exit_code(state, until) == code


def test_logs_of_an_ended_job_are_whole(live: Any) -> None:
    job = live.reach(live.submit(), "RUNNING")
    text = "".join(f"line {i} [bold]é\n" for i in range(1000)) + "and no newline at the end"
    Path(job["run_dir"], "driver.log").write_text(text)
    finish(live, job)
    assert run(live, "logs", job["id"]).stdout == text
    result = run(live, "logs", job["id"], "-f")
    assert result.stdout == text
    assert f"{job['id']} COMPLETED" in result.stderr
    chunks = [json.loads(line) for line in run(live, "logs", job["id"], "--json").stdout.splitlines()]
    assert "".join(chunk["text"] for chunk in chunks) == text
    assert chunks[-1]["offset"] == len(text.encode())


def test_logs_of_a_further_server_are_shown_by_its_name(live: Any) -> None:
    agents = {"black": {}, "white": {"server": "second"}}
    several = {"environment": {"name": "gomoku_duel"}, "lora": {"rank": 4}, "servers": {"second": {}}, "agents": agents}
    live.world.launcher.cluster = [Node("n1", "here", gpus=0, cpu_slots=2)]
    job = live.submit(**several)
    folder = Path(job["run_dir"], "servers", "second")
    folder.mkdir(parents=True)
    (folder / "server.log").write_text("the second\n")
    Path(job["run_dir"], "server.log").write_text("its own\n")
    assert run(live, "logs", job["id"], "--server", "second").stdout == "the second\n"
    assert run(live, "logs", job["id"], "--server").stdout == run(live, "logs", "--server", job["id"]).stdout == "its own\n"
    unknown = run(live, "logs", job["id"], "--server", "third")
    assert unknown.exit_code == 1
    assert f"job {job['id']} has no server 'third'" in unknown.stderr
    assert "beside its own it has second" in unknown.stderr
    assert f"opentinker logs {job['id']} --server second" in run(live, "logs", job["id"], "second").stderr


def test_logs_of_an_interactive_job_are_said_to_be_elsewhere(live: Any) -> None:
    job = live.submit("interactive")
    assert "a process of yours" in run(live, "logs", job["id"]).stderr


def test_following_logs_survives_a_restart_of_the_scheduler_and_loses_and_repeats_nothing(live: Any) -> None:
    job = live.reach(live.submit(), "RUNNING")
    log = Path(job["run_dir"], "driver.log")
    log.write_text("before\n")
    command = [sys.executable, "-c", MAIN, "logs", "-f", job["id"], "--state-dir", str(live.folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "before\n"
        live.down()
        with log.open("a") as file:
            file.write("meanwhile\nafter\n")
        time.sleep(4.0)  # longer than the client's own retries
        live.up()
        if live.client().job(job["id"])["state"] == "RUNNING":
            live.client().cancel(job["id"])
        rest, said = process.communicate(timeout=30)
    finally:
        process.kill()
    assert rest == "meanwhile\nafter\n"
    assert "the cluster is away" in said
    assert "the cluster is back" in said
    assert process.returncode == 0


def test_a_cluster_that_stays_away_is_given_up(live: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.cli.patience.Patience.__init__.__defaults__", (0.2,))
    monkeypatch.setattr("opentinker.client.scheduler.ATTEMPTS", 1)
    monkeypatch.setattr(logs_module, "POLL_S", 0.05)
    job = live.reach(live.submit(), "RUNNING")
    threading.Timer(0.3, live.down).start()
    result = run(live, "logs", "-f", job["id"])
    assert result.exit_code == 1
    assert "cannot reach a cluster" in result.stderr


def started(live: Any, *arguments: str, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", MAIN, *arguments, "--state-dir", str(live.folder)]
    return subprocess.Popen(command, text=True, **options)


def test_watching_as_json_prints_each_change_until_ctrl_c(live: Any) -> None:
    first = live.reach(live.submit(), "RUNNING")
    process = started(live, "ps", "--watch", "--json", stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["state"] == "RUNNING"
        second = live.submit("interactive")
        assert json.loads(process.stdout.readline())["id"] == second["id"]
        finish(live, first)
        while (change := json.loads(process.stdout.readline()))["id"] != first["id"]:
            pass
        assert change["state"] == "COMPLETED"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()


@pytest.mark.parametrize("command", [("ps", "--watch"), ("top",)])
def test_on_a_terminal_the_view_is_kept_current_in_place(live: Any, command: tuple[str, ...]) -> None:
    first = live.reach(live.submit(), "RUNNING")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = started(live, *command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        deadline = time.monotonic() + 20.0
        while text not in seen:
            assert time.monotonic() < deadline, seen
            assert select.select([ours], [], [], 20.0)[0]
            seen += os.read(ours, 2**16).decode(errors="replace")

    try:
        until(first["id"])
        second = live.submit("interactive")
        until(second["id"])
        process.send_signal(signal.SIGINT)
        until("\x1b[?1049l")  # the ordinary screen is back
        assert process.wait(10) == 0
        assert "Traceback" not in seen
    finally:
        process.kill()
        os.close(ours)
