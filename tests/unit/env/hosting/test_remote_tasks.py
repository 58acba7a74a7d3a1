"""Tasks of a hosted environment survive what its sessions survive, and are asked for with the arguments of the job."""

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hosted_environments import Doer
from hosting_tools import TOKEN, Serve, hosted

from opentinker.client.submission import prepare
from opentinker.config.job import parse_job
from opentinker.config.requirements import check_secrets
from opentinker.config.rollout import EnvironmentConfig
from opentinker.env import remote
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.env.remote import remote_environment
from opentinker.env.secret_files import TOKEN_VARIABLES
from opentinker.env.tasks import ListTasks, Split, TaskSource
from opentinker.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    EnvironmentFailedError,
    EnvironmentLoadError,
    UnavailableError,
)
from opentinker.training.run import checked_environment
from opentinker.training.tasks import JobTasks


class Tasked(Doer):
    """Its tasks say which process made them; `dies` names a file without which the process ends."""

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        if dies := args.get("dies"):
            file = Path(dies)
            if not file.exists():
                if not args.get("always"):
                    file.touch()
                os._exit(4)
        time.sleep(args.get("slow", 0))
        return ListTasks([{"name": str(os.getpid())}], shuffle=False)

    @classmethod
    def check_tasks(cls, tasks: TaskSource, args: Mapping[str, Any]) -> None:
        if any(task["name"] == args.get("not_this") for task in tasks.first(10)):
            raise ConfigError("a task has an unfit name", hint="take another")

    @classmethod
    def sample_actions(cls, task: Any) -> list[str]:
        return [f"say {task['name']}", "done"]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


async def test_a_server_that_is_away_for_a_moment_does_not_end_a_job() -> None:
    port = free_port()
    away = remote_environment(f"http://127.0.0.1:{port}", token=TOKEN)
    asked = asyncio.ensure_future(asyncio.to_thread(away.make_task, 3))
    await asyncio.sleep(0.3)
    assert not asked.done()
    async with hosted(Doer, port=port):
        assert await asked == Doer.make_task(3)


async def test_a_worker_that_ends_over_tasks_is_replaced_by_another_once(serve: Serve, tmp_path: Path) -> None:
    there = await serve(Tasked, workers=2)
    once = there.remote.task_source("train", {"dies": str(tmp_path / "once")})
    assert len(await asyncio.to_thread(once.first, 1)) == 1
    always = there.remote.task_source("train", {"dies": str(tmp_path / "none"), "always": True})
    with pytest.raises(EnvironmentFailedError, match=r"the worker that was asked for tasks was lost: .*exited with code 4"):
        await asyncio.to_thread(always.first, 1)


async def test_with_a_process_each_sessions_and_tasks_do_not_harm_each_other(serve: Serve) -> None:
    there = await serve(Tasked, isolation="process", workers=1, call_timeout_s=20.0)
    environments = [there.remote() for _ in range(2)]
    pids = []
    for environment in environments:
        await environment.reset({})
        pids.append((await environment.step(Action("pid"))).observation[0]["content"])  # type: ignore[index, call-overload]
    source = there.remote.task_source("train", {})
    made_by = (await asyncio.to_thread(source.first, 1))[0]["name"]
    assert made_by not in pids
    assert (await asyncio.to_thread(source.draw, 0, 0, 1))[0]["name"] == made_by  # what is loaded stays loaded
    late, _ = await asyncio.gather(
        there.server.hub.ask(remote.STEP, environments[0]._id, 1, 0.3, remote.pack(["sleep 60", False, ""]), ""),
        asyncio.to_thread(there.remote.task_source("train", {"slow": 0.6}).first, 1),  # goes on while the session is killed
    )
    assert isinstance(remote.error_of(late[1]), DeadlineError)
    body = remote.pack(["train", {"slow": 60}, "first", [1], []])
    late = await there.server.hub.ask(5, bytes(16), 0, 0.3, body, "")
    assert isinstance(remote.error_of(late[1]), DeadlineError)
    assert (await environments[1].step(Action("say"))).reward == 0.5
    assert (await asyncio.to_thread(source.first, 1))[0]["name"] not in (made_by, *pids)
    await asyncio.gather(*(e.close() for e in environments))


async def test_a_forgotten_token_is_what_the_error_says_and_the_server_stays_known_as_alive(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)
    there = await serve(Doer)
    bare = remote_environment(there.url)
    with pytest.raises(AuthenticationError, match=r"needs its token .*OPENTINKER_ENV_TOKEN"):
        await asyncio.to_thread(bare.make_task, 1)
    assert bare.servers is not None
    assert not bare.servers.ring.is_dead(there.url, time.monotonic())


async def test_a_jobs_token_file_is_used_for_everything_that_is_asked(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)
    there = await serve(Tasked)
    (tmp_path / "token").write_text(TOKEN)
    (tmp_path / "rows.jsonl").write_text('{"name": "x"}\n')
    (tmp_path / "wrong.jsonl").write_text('{"other": "x"}\n')

    async def drawn(rows: str, **args: Any) -> list[Any]:
        given = {"token_file": str(tmp_path / "token"), **args}
        config = EnvironmentConfig.model_validate(
            {"name": there.url, "args": given, "train_tasks": {"name": str(tmp_path / rows)}}
        )
        return await JobTasks(remote_environment(there.url), config, timeout_s=20).draw(0, 0, 1)

    assert await drawn("rows.jsonl") == [{"name": "x"}]
    with pytest.raises(ConfigError, match="no column 'name'"):
        await drawn("wrong.jsonl")
    with pytest.raises(ConfigError, match=r"^a task has an unfit name .take another.$"):  # the hosted class looked at them
        await drawn("rows.jsonl", not_this="x")


class Odd(Doer):
    """Its tasks are not JSON."""

    @classmethod
    def task_source(cls, split: Split, args: Mapping[str, Any]) -> TaskSource:
        odd = {"nan": float("nan"), "bytes": b"raw", "object": object(), "many": [float("inf")]}
        return ListTasks([{"name": odd[args["odd"]]}], shuffle=False)


async def test_tasks_that_are_no_json_are_the_environments_error_and_the_server_goes_on(serve: Serve) -> None:
    there = await serve(Odd)
    for odd in ("nan", "bytes", "object", "many"):
        source = there.remote.task_source("train", {"odd": odd})
        with pytest.raises(EnvironmentFailedError, match=r"JSON cannot hold|cannot be sent"):
            await asyncio.to_thread(source.first, 1)
    assert await asyncio.to_thread(there.remote.make_task, 1) == Doer.make_task(1)


async def test_as_many_tasks_are_shown_to_the_hosted_class_as_its_server_takes(serve: Serve) -> None:
    there = await serve(Tasked, max_body_bytes=2000)
    rows = ListTasks([{"name": f"{i} {'x' * 50}"} for i in range(400)], shuffle=False)
    await asyncio.to_thread(there.remote.check_tasks, rows, {})
    with pytest.raises(ConfigError, match="unfit name"):
        await asyncio.to_thread(there.remote.check_tasks, rows, {"not_this": f"3 {'x' * 50}"})


async def test_sample_actions_are_there_if_the_hosted_class_has_them(serve: Serve) -> None:
    with_them, without = await serve(Tasked), await serve(Doer)
    suggested = await asyncio.to_thread(lambda: with_them.remote.sample_actions({"name": "x"}))
    assert suggested == ["say x", "done"]
    assert await asyncio.to_thread(lambda: getattr(without.remote, "sample_actions", None)) is None


async def test_submitting_does_not_need_the_environments_server_or_its_token(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr("opentinker.client.submission.ASK_S", 0.5)
    there = await serve(Doer)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"name": "x"}\n')

    def missing(url: str, **args: Any) -> list[str]:
        given = {"name": url, "args": args, "train_tasks": {"name": str(rows)}}
        return list(prepare({"kind": "rl", "base_model": "m", "environment": given}).lacking)

    (unreached,) = await asyncio.to_thread(missing, f"http://127.0.0.1:{free_port()}")
    assert "cannot reach the environment server" in unreached
    (unknown,) = await asyncio.to_thread(missing, there.url)
    assert "needs its token" in unknown
    (unread,) = await asyncio.to_thread(lambda: missing(there.url, token_file="/on/the/cluster/token"))
    assert "cannot read the environment's token file" in unread
    monkeypatch.setenv(remote.TOKEN_VARIABLE, TOKEN)
    remote._servers.cache_clear()
    assert await asyncio.to_thread(missing, there.url) == []
    rows.write_text('{"other": "x"}\n')
    with pytest.raises(ConfigError, match="no column 'name'"):
        await asyncio.to_thread(missing, there.url)


@pytest.mark.parametrize("name", ["http://127.0.0.1:9", "https://h", "openenv:http://127.0.0.1:9"])
def test_a_token_in_a_config_is_refused_before_the_config_is_stored(name: str) -> None:
    job = parse_job({"kind": "rl", "base_model": "m", "environment": {"name": name, "args": {"token": "a-secret-text"}}})
    with pytest.raises(ConfigError, match=r"no place for a token.*token_file, or the variable OPEN\w+_TOKEN") as raised:
        checked_environment(job)  # type: ignore[arg-type]
    assert "a-secret-text" not in str(raised.value)
    secrets = {"A_VARIABLE_THAT_NO_MACHINE_HAS": "x"}  # so that the environment is not checked here
    environment = job.environment.model_copy(update={"secrets": secrets})  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="no place for a token"):
        prepare(job.model_copy(update={"environment": environment}))


@pytest.mark.parametrize(
    "address", ["http://user:a-secret-text@h:1", "http://a-secret-text@h", "http://h?a-secret-text", "http://h#a-secret-text"]
)
def test_an_address_holds_no_secret_and_the_error_does_not_repeat_it(address: str) -> None:
    with pytest.raises((ConfigError, EnvironmentLoadError), match="an environment server's address has no") as raised:
        load_environment(address)
    assert "a-secret-text" not in str(raised.value)


def test_the_variables_with_tokens_can_be_secrets_of_a_submitted_job() -> None:
    assert check_secrets(dict.fromkeys(TOKEN_VARIABLES.values(), "x"))


def test_a_token_for_openenv_comes_from_a_file_or_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: Any = load_environment("openenv:http://127.0.0.1:9")
    monkeypatch.delenv("OPENENV_TOKEN", raising=False)
    assert made()._headers == {}
    monkeypatch.setenv("OPENENV_TOKEN", "from-the-variable")
    assert made()._headers == {"Authorization": "Bearer from-the-variable"}
    (tmp_path / "token").write_text("from-a-file\n")
    assert made(token_file=str(tmp_path / "token"))._headers == {"Authorization": "Bearer from-a-file"}


async def test_what_no_server_answers_is_given_up_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_S", 0.3)
    gone = remote_environment(f"http://127.0.0.1:{free_port()}", token="x")
    with pytest.raises(UnavailableError, match="cannot reach"):
        await asyncio.to_thread(gone.make_task, 1)
