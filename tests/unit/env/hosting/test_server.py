"""The plain HTTP routes, what they refuse, and a server's end."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hosted_environments import TOOL, Doer, png
from hosting_tools import HERE, TOKEN, Hosted, Serve, alive, command, until
from typer.testing import CliRunner

from opentinker.cli.main import app
from opentinker.env.environment import Action
from opentinker.env.frames import pack, unpack
from opentinker.env.load import load_environment
from opentinker.env.remote import remote_environment
from opentinker.errors import EnvironmentFailedError
from opentinker.images import Image
from opentinker.multiagent.seats import identity_of


class Curl:
    """A client that knows HTTP and JSON only."""

    def __init__(self, there: Hosted, token: str = TOKEN) -> None:
        self.http = httpx.AsyncClient(base_url=there.url, headers={"Authorization": f"Bearer {token}"}, timeout=20)

    async def post(self, path: str, **body: Any) -> httpx.Response:
        return await self.http.post(path, json=body)

    async def reset(self, **body: Any) -> str:
        answer = await self.post("/reset", task={"name": "x"}, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["session"])


@pytest.fixture
async def there(serve: Serve) -> Hosted:
    return await serve(Doer, max_body_bytes=1_000_000)


@pytest.fixture
async def curl(there: Hosted) -> AsyncIterator[Curl]:
    client = Curl(there)
    yield client
    await client.http.aclose()


def problem(answer: httpx.Response) -> tuple[int, str, str]:
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == answer.status_code
    return answer.status_code, document["code"], document["detail"]


async def test_an_episode_in_plain_http(curl: Curl) -> None:
    begun = (await curl.post("/reset", task={"name": "x"}, args={"opening": "hi"})).json()
    assert begun["observation"][1] == {"role": "user", "content": "hi, {'name': 'x'}"}
    assert begun["tools"] == [TOOL]
    assert begun["finalizes"] is True
    session = begun["session"]
    step = (await curl.post("/step", session=session, action="say")).json()
    assert (step["step"], step["reward"], step["done"], step["metrics"]) == (0, 0.5, False, {"turn": 0.0})
    pictured = (await curl.post("/step", session=session, action="image 3")).json()
    assert pictured["step"] == 1
    assert pictured["observation"][0]["content"][1] == {"type": "image", "image": Image(png(3)).data_url()}
    assert pictured["components"] == {"seen": 0.25, "said": 0.5}
    again = (await curl.post("/step", session=session, action="image 3", step=1)).json()
    assert again == pictured
    done = (await curl.post("/step", session=session, action="done", step=2)).json()
    assert done["done"] is True
    assert (await curl.post("/finalize", session=session)).json()["components"] == {"last": 0.125}
    assert (await curl.post("/close", session=session)).json() == {"session": session, "closed": True}
    stats = (await curl.http.get("/stats")).json()
    assert (stats["sessions"], stats["total"]["steps"], stats["total"]["finalized"]) == (0, 3, 1)
    info = (await curl.http.get("/info")).json()
    assert (info["name"], info["task_columns"], info["isolation"]) == ("Doer", ["name"], "thread")
    assert (await curl.post("/tasks", split="held_out", limit=2)).json() == {
        "result": [{"name": "held out 0"}, {"name": "held out 1"}]
    }
    assert len((await curl.post("/tasks", seed=1, start=5, count=3)).json()["result"]) == 3


async def test_batches_answer_each_item_by_itself(curl: Curl) -> None:
    begun = (await curl.post("/reset/batch", items=[{"task": {}}, {"task": {}, "args": {"lives": 3}}, 7])).json()["results"]
    assert begun[1]["problem"]["code"] == "environment_failed"
    assert begun[2]["problem"]["code"] == "invalid_request"
    session = begun[0]["session"]
    other = await curl.reset()
    items = [{"session": session, "action": "a"}, {"session": other, "action": "raise"}, {"session": "ff" * 16, "action": "b"}]
    results = (await curl.post("/step/batch", items=items)).json()["results"]
    assert results[0]["reward"] == 0.5
    assert [r["problem"]["code"] for r in results[1:]] == ["environment_failed", "not_found"]
    assert problem(await curl.post("/step/batch", items={}))[:2] == (400, "invalid_request")
    assert problem(await curl.post("/step/batch", items=[{}] * 1025))[:2] == (413, "too_large")


async def test_mistakes_are_told_apart(curl: Curl) -> None:
    session = await curl.reset()
    for answer, expected in [
        (await curl.post("/step", session=session, action=7), (400, "invalid_request", "an action must be a text")),
        (await curl.post("/step", session=session), (400, "invalid_request", "an action must be a text")),
        (
            await curl.post("/step", session="zz", action="x"),
            (400, "invalid_request", "'session' must be 32 hexadecimal digits"),
        ),
        (await curl.post("/step", action="x"), (400, "invalid_request", "'session' must be 32 hexadecimal digits")),
        (await curl.post("/step", session="ab" * 16, action="x"), (404, "not_found", "there is no such session")),
        (await curl.post("/step", session=session, action="x", step=3), (409, "conflict", "step 3 came where step 0 is next")),
        (await curl.post("/step", session=session, action="x", step=-1), (400, "invalid_request", "'step' must be")),
        (await curl.post("/step", session=session, action="x", timeout_s="1"), (400, "invalid_request", "'timeout_s' must be")),
        (await curl.post("/reset", session=session, task={}), (409, "conflict", "this session was reset before")),
        (await curl.post("/reset", session="00" * 16, task={}), (400, "invalid_request", "must not be zero")),
        (await curl.post("/reset", task={}, args=[1]), (400, "invalid_request", "'args' must be an object")),
        (await curl.post("/tasks", split="test", count=1), (400, "invalid_request", "tasks are asked for with a split")),
        (await curl.post("/tasks", method="draw", numbers=["a"]), (400, "invalid_request", "must be integers")),
        (await curl.post("/tasks", method="burn", numbers=[]), (400, "invalid_request", "no method 'burn'")),
        (await curl.http.post("/step", content=b"{"), (400, "invalid_request", "the body is not JSON")),
        (await curl.http.post("/step", content=b"[" * 100_000), (400, "invalid_request", "the body is not JSON")),
        (await curl.http.post("/step", content=b"[1]"), (400, "invalid_request", "the body must be a JSON object")),
        (await curl.post("/step", session=session, action="x" * 10_000_000), (413, "too_large", "the limit is 1,000,000")),
        (await curl.http.get("/step"), (405, "method_not_allowed", "POST")),
        (await curl.post("/stats"), (405, "method_not_allowed", "GET")),
        (await curl.http.get("/steps"), (404, "not_found", "there is no /steps here")),
    ]:
        status, code, detail = problem(answer)
        assert (status, code) == expected[:2]
        assert expected[2] in detail
    step = await curl.post("/step", session=session, action="say", step=0)  # none of it harmed the session
    assert step.status_code == 200, step.text
    assert step.json()["reward"] == 0.5


@pytest.mark.parametrize(
    ("action", "detail"),
    [
        ("nan", "Doer.step: the reward is nan; it must be finite"),
        ("text-reward", "Doer.step: the reward must be a number, not str"),
        ("object", "Doer.step gave something that cannot be sent"),
        ("number", "Doer.step gave an observation of type int"),
        ("raise too bad", "Doer.step raised ValueError: too bad"),
    ],
)
async def test_what_the_environment_does_wrong_is_its_error(curl: Curl, action: str, detail: str) -> None:
    session = await curl.reset()
    status, code, text = problem(await curl.post("/step", session=session, action=action))
    assert (status, code) == (500, "environment_failed")
    assert text.startswith(detail)
    after = problem(await curl.post("/step", session=session, action="say", step=1))
    assert after[:2] == (409, "conflict")
    assert "the session failed before" in after[2]
    assert problem(await curl.post("/finalize", session=session))[:2] == (409, "conflict")
    await curl.post("/close", session=session)


async def test_a_late_call_is_a_504_and_a_full_server_a_429_that_says_when(serve: Serve) -> None:
    there = await serve(Doer, max_sessions=1, call_timeout_s=1.5)
    curl = Curl(there)
    session = await curl.reset()
    assert problem(await curl.post("/step", session=session, action="sleep 20")) == (
        504,
        "deadline_exceeded",
        "Doer.step did not return within 1.5 s",
    )
    full = await curl.post("/reset", task={})
    assert problem(full)[:2] == (429, "rate_limited")
    assert full.headers["retry-after"] == "1"
    await curl.post("/close", session=session)
    await curl.reset()
    await curl.http.aclose()


async def test_only_health_is_open(there: Hosted) -> None:
    async with httpx.AsyncClient(base_url=there.url) as bare:
        assert (await bare.get("/health")).json() == {"status": "ok"}
        for headers in (
            {},
            {"Authorization": "Bearer no"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Authorization": "Bearer é".encode()},
        ):
            for path in ("/stats", "/info", "/nowhere"):
                answer = await bare.get(path, headers=headers)  # type: ignore[arg-type]
                assert problem(answer)[:2] == (401, "unauthenticated")
            stream = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "x", "Sec-WebSocket-Version": "13"}
            answer = await bare.get("/v1/stream", headers={**stream, **headers})  # type: ignore[arg-type, dict-item]
            assert problem(answer)[:2] == (401, "unauthenticated")


async def test_what_comes_over_a_stream_cannot_harm_the_server(there: Hosted) -> None:
    good = there.remote()
    await good.reset({})
    port = int(there.url.rpartition(":")[2])
    for rubbish in (b"\x82\x81aaaa!", b"\x81\x01x", os.urandom(5000), b"\x82\xff" + b"\xff" * 8, b"\x88\x80aaaa"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"GET /v1/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            f"Sec-WebSocket-Key: abc\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101")
        writer.write(rubbish)
        await asyncio.wait_for(reader.read(), 5) if rubbish != b"\x82\x81aaaa!" else None
        writer.close()
    assert (await good.step(Action("say"))).reward == 0.5
    await good.close()


async def test_a_crash_loses_only_the_sessions_of_its_worker(serve: Serve) -> None:
    there = await serve(Doer, workers=2)
    environments = [there.remote() for _ in range(10)]
    await asyncio.gather(*(e.reset({}) for e in environments))
    pids = [(await e.step(Action("pid"))).observation[0]["content"] for e in environments]  # type: ignore[index, call-overload]
    assert {pids.count(pid) for pid in pids} == {5}
    with pytest.raises(EnvironmentFailedError):
        await environments[0].step(Action("killed"))
    for environment, pid in zip(environments[1:], pids[1:], strict=True):
        if pid == pids[0]:
            with pytest.raises(EnvironmentFailedError, match="killed by SIGKILL"):
                await environment.step(Action("say"))
        else:
            assert (await environment.step(Action("say"))).reward == 0.5
    await until(lambda: there.server.hub.pool.ready == 2)
    await asyncio.gather(*(e.close() for e in environments))
    assert there.server.hub.statistics.total.lost == 5


async def test_a_worker_that_calls_keep_busy_is_replaced_when_its_sessions_are_over(serve: Serve, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text(
        """
import opentinker as ot
class Stubborn(ot.Environment):
    def reset(self, task):
        return "hello"
    def step(self, action):
        while action.text == "spin":
            try:
                while True:
                    pass
            except BaseException:
                pass
        return ot.StepResult(observation="x")
"""
    )
    from opentinker.env.load import load_environment

    there = await serve(load_environment(f"{tmp_path}/stubborn.py:Stubborn"), call_timeout_s=1.5)
    first = there.server.hub.pool.pids
    spinning, other = there.remote(), there.remote()
    await spinning.reset({})
    await other.reset({})
    with pytest.raises(Exception, match="did not return within"):
        await spinning.step(Action("spin"))
    await until(lambda: there.server.hub.pool.ready == 2)  # the new one is there before the old one is gone
    assert (await other.step(Action("say"))).reward == 0.0
    await asyncio.gather(other.close(), spinning.close())
    await until(lambda: there.server.hub.pool.ready == 1)
    await until(lambda: not alive(first[0]))


async def test_a_server_that_is_told_to_end_lets_sessions_end_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with command("--drain", "20") as (process, url, token):
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        assert len(children) >= 2
        log = tmp_path / "log"
        hosted = remote_environment(url, token=token)
        playing, forgotten = hosted(), hosted(log=str(log))
        await playing.reset({})
        await forgotten.reset({})
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        monkeypatch.setattr("opentinker.env.remote.LOST_S", 0.2)
        with pytest.raises(EnvironmentFailedError, match="the server is shutting down"):
            await hosted().reset({})
        assert (await playing.step(Action("say"))).reward == 0.5
        assert (await playing.step(Action("done"))).done
        await playing.close()
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)  # in a hurry now
        assert await asyncio.to_thread(process.wait, 20) == 0
        await until(lambda: not any(alive(child) for child in children))
        assert log.read_text() == "closed\n"


async def test_a_server_that_is_told_to_end_amid_requests_answers_them_and_prints_no_traceback() -> None:
    """The long poll of a driver whose run is over, and a body that never comes whole."""
    hosts = f"{HERE}/hosted_games.py:Digits"
    terms = {f"environment.{key}": value for key, value in identity_of(load_environment(hosts), {}).items()}
    with command("--drain", "60", name=hosts) as (process, url, token):
        headers = {"Authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=50) as client:

            async def coordinated(path: str, agent: str, **body: Any) -> httpx.Response:
                return await client.post(f"/coordinator{path}", content=pack({"driver": f"the-driver-of-{agent}", **body}))

            for agent in ("black", "white"):
                seat = {"run": "duel", "agents": {agent: "policy"}, "terms": terms, "steps": [0]}
                assert (await coordinated("/join", agent, **seat)).is_success
            talked = await coordinated("/talk", "black", heard=0, first=1, words=[pack(["dance"])])
            heard = len(unpack(talked.content)["words"])
            reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
            head = f"POST /step HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {token}\r\ncontent-length: 100\r\n\r\n"
            writer.write(head.encode() + b"{")
            polling = asyncio.ensure_future(coordinated("/talk", "black", heard=heard, first=2, words=[], wait_s=30.0))
            assert (await client.post("/reset", json={"task": {}})).is_success  # a session, for which the server drains
            process.send_signal(signal.SIGINT)
            answer = await polling
            assert (answer.status_code, answer.json()["detail"]) == (503, "the server is shutting down")
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            assert b"503" in await asyncio.wait_for(reader.readline(), 20)
            writer.close()
        out, _ = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        assert "stopping" in out
        assert "Traceback" not in out


async def test_a_server_whose_parent_is_killed_leaves_no_worker() -> None:
    with command() as (process, _, _):
        children = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.kill()
        await until(lambda: not any(alive(child) for child in children))


def test_the_commands_mistakes_are_explained(tmp_path: Path) -> None:
    runner = CliRunner()

    def said(*arguments: str) -> str:
        result = runner.invoke(app, ["env", "serve", *arguments])
        assert result.exit_code == 1, result.output
        return result.output

    assert "no built-in environment 'guess_numbr'" in said("guess_numbr")
    (tmp_path / "bad.py").write_text("class X(:\n")
    assert "bad.py, line 1" in said(f"{tmp_path}/bad.py:X")
    (tmp_path / "token").write_text("short")
    assert "16 or more characters" in said("guess_number", "--token-file", str(tmp_path / "token"))
    assert "cannot read the token file: No such file" in said("guess_number", "--token-file", str(tmp_path / "none"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot listen on 127.0.0.1" in said("guess_number", "--port", str(taken.getsockname()[1]))


def test_the_token_is_in_no_argument_and_no_environment_of_the_workers(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    with command("--token-file", str(file)) as (process, url, _):
        assert httpx.get(f"{url}/info", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            assert TOKEN not in json.dumps([one.cmdline(), one.environ()])
