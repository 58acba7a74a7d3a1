"""A remote environment behaves as the class that is hosted, and its errors say what happened there."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hosted_environments import TOOL, AsyncDoer, Doer, ProcessDoer, png
from hosting_tools import TOKEN, Hosted, Serve, hosted, until

from opentinker.env import remote, remote_stream
from opentinker.env.environment import Action, Environment
from opentinker.env.execution import EnvironmentSession
from opentinker.env.load import load_environment
from opentinker.env.remote import RemoteEnvironment, remote_environment
from opentinker.env.threads import UserThreads
from opentinker.errors import (
    AuthenticationError,
    ConfigError,
    DeadlineError,
    EnvironmentFailedError,
    EnvironmentLoadError,
    OpenTinkerError,
    UnavailableError,
)
from opentinker.images import Image


async def play(make: Callable[[], Environment], task: Any, actions: list[str], timeout_s: float = 5.0) -> list[Any]:
    """Everything that an episode's driver sees of an environment."""
    seen: list[Any] = []
    with UserThreads() as threads:
        session = EnvironmentSession(make, threads)
        try:
            seen.append(await session.reset(task, timeout_s))
            seen.append([dict(tool) for tool in session.tools])
            for text in actions:
                seen.append(await session.step(Action(text, reasoning="hm"), timeout_s))
                if seen[-1].done:
                    break
            seen.append(await session.finalize(timeout_s))
        except OpenTinkerError as error:
            seen.append((type(error), str(error).partition(" (")[0]))
        finally:
            await session.close(timeout_s)
    return seen


EPISODES = [
    ["say a", "image 9", "\ud800 half a character", "done"],
    ["raise too bad"],
    ["exit"],
    ["nan"],
    ["text-reward"],
    ["nothing"],
    ["number"],
    ["say a"],
]


@pytest.mark.parametrize("kind", [Doer, AsyncDoer])
async def test_an_episode_is_the_same_here_and_there(serve: Serve, kind: type[Doer]) -> None:
    there = await serve(kind)
    task = {"name": "x", "nested": [1, None, {"deep": 2**80}]}
    for actions in EPISODES:
        here = await play(lambda: kind(opening="hi"), task, actions)
        assert await play(lambda: there.remote(opening="hi"), task, actions) == here


@pytest.mark.parametrize("name", ["arithmetic", "guess_number"])
async def test_built_in_environments_are_the_same_here_and_there(serve: Serve, name: str) -> None:
    local = load_environment(name)
    there = await serve(local)
    for seed in range(5):
        task = local.make_task(seed)
        assert await asyncio.to_thread(there.remote.make_task, seed) == task
        actions = ["no number", "3", "5", "7", "9", "25"]
        assert await play(there.remote, task, actions) == await play(local, task, actions)


async def test_tasks_come_from_the_server(serve: Serve) -> None:
    there = await serve(Doer)

    def ask() -> None:
        for split in ("train", "held_out"):
            ours, theirs = Doer.task_source(split, {}), there.remote.task_source(split, {})
            assert theirs.draw(3, 1000, 4) == ours.draw(3, 1000, 4)
            assert theirs.first(2) == ours.first(2)
            assert theirs.size == ours.size
        assert there.remote.held_out_tasks() == Doer.held_out_tasks()
        assert there.remote.task_columns == Doer.task_columns

    await asyncio.to_thread(ask)


async def test_images_and_tools_arrive(serve: Serve) -> None:
    there = await serve(Doer)
    environment = there.remote()
    await environment.reset({"name": "x"})
    assert environment.tools == [TOOL]
    result = await environment.step(Action("image 4"))
    assert result.observation[0]["content"][1] == {"type": "image", "image": Image(png(4))}  # type: ignore[index, typeddict-item]
    assert result.components == {"seen": 0.25, "said": 0.5}
    await environment.close()


async def test_a_deadline_comes_from_the_server_and_leaves_others_alone(serve: Serve) -> None:
    there = await serve(Doer)
    with UserThreads() as threads:
        hanging, other = EnvironmentSession(there.remote, threads), EnvironmentSession(there.remote, threads)
        await asyncio.gather(hanging.reset({}, 5), other.reset({}, 5))
        start = time.monotonic()
        with pytest.raises(DeadlineError, match=r"Doer\.step did not return within"):
            await hanging.step(Action("spin"), 0.6)
        assert time.monotonic() - start < 30
        assert (await other.step(Action("say"), 5)).reward == 0.5
        await asyncio.gather(hanging.close(5), other.close(5))
    await until(lambda: there.server.hub.sessions == 0)


async def test_with_a_process_each_a_late_session_costs_its_process_only(serve: Serve) -> None:
    there = await serve(Doer, isolation="process", workers=2)
    with UserThreads() as threads:
        sessions = [EnvironmentSession(there.remote, threads) for _ in range(4)]
        await asyncio.gather(*(s.reset({}, 10) for s in sessions))
        pids = [(await s.step(Action("pid"), 5)).observation[0]["content"] for s in sessions]  # type: ignore[index, call-overload]
        assert len(set(pids)) == 4
        with pytest.raises(DeadlineError, match=r"step did not return within"):
            await sessions[0].step(Action("hold 30"), 1.0)
        with pytest.raises(EnvironmentFailedError, match="the session was lost: its worker process exited with code 5"):
            await sessions[1].step(Action("die 5"), 5)
        for session in sessions[2:]:
            assert (await session.step(Action("say"), 5)).reward == 0.5
        await asyncio.gather(*(s.close(5) for s in sessions))
        again = EnvironmentSession(there.remote, threads)
        await again.reset({}, 5)
        assert (await again.step(Action("pid"), 5)).observation[0]["content"] in pids[2:]  # type: ignore[index, call-overload]
        await again.close(5)
    assert there.server.hub.sessions == 0


async def test_a_class_that_wants_processes_gets_them_unless_told_otherwise(serve: Serve) -> None:
    for settings, isolation in (({}, "process"), ({"isolation": "thread"}, "thread")):
        there = await serve(ProcessDoer, **settings)
        assert there.server.hub.info["isolation"] == isolation
        environments = [there.remote() for _ in range(2)]
        await asyncio.gather(*(e.reset({}) for e in environments))
        pids = {(await e.step(Action("pid"))).observation[0]["content"] for e in environments}  # type: ignore[index, call-overload]
        assert len(pids) == (2 if isolation == "process" else 1)
        await asyncio.gather(*(e.close() for e in environments))


async def test_a_session_whose_worker_died_while_it_was_idle_learns_why(serve: Serve) -> None:
    there = await serve(Doer)
    environment, killer = there.remote(), there.remote()
    await environment.reset({})
    await killer.reset({})
    with pytest.raises(EnvironmentFailedError, match="killed by SIGKILL"):
        await killer.step(Action("killed"))
    with pytest.raises(EnvironmentFailedError, match="the session was lost: its worker process was killed by SIGKILL"):
        await environment.step(Action("say"))
    await environment.close()
    await killer.close()
    fresh = there.remote()
    await fresh.reset({})
    assert (await fresh.step(Action("say"))).reward == 0.5
    await fresh.close()
    assert there.server.hub.pool.replaced == 1


async def test_what_is_refused_is_an_error_of_the_environment_with_the_servers_text(serve: Serve) -> None:
    there = await serve(Doer, max_body_bytes=1_000_000)
    environment = there.remote()
    with pytest.raises(EnvironmentFailedError, match="was not reset"):
        await environment.step(Action("early"))
    await environment.reset({})
    with pytest.raises(EnvironmentFailedError, match=r"an action has 10,000,0\d\d bytes; the limit is 1,000,000"):
        await environment.step(Action("x" * 10_000_000))
    with pytest.raises(EnvironmentFailedError, match="an action must be a text"):
        await environment.step(Action(7))  # type: ignore[arg-type]
    with pytest.raises(EnvironmentFailedError, match="the action cannot be sent: a value of type object does not travel"):
        await environment.step(Action(object()))  # type: ignore[arg-type]
    assert (await environment.step(Action("say"))).reward == 0.5
    with pytest.raises(EnvironmentFailedError, match=r"Doer\.step gave something that cannot be sent: .*object"):
        await environment.step(Action("object"))
    with pytest.raises(EnvironmentFailedError, match="cannot be sent"):  # the step's answer, repeated
        await environment.step(Action("say"))
    with pytest.raises(EnvironmentFailedError, match="was reset before"):
        await environment.reset({})
    await environment.close()
    await environment.close()
    with pytest.raises(EnvironmentFailedError, match="is closed"):
        await environment.step(Action("late"))
    over = there.remote()
    await over.reset({})
    await over.step(Action("done"))
    with pytest.raises(EnvironmentFailedError, match="the episode is done"):
        await over.step(Action("more"))
    await over.close()
    with pytest.raises(EnvironmentFailedError, match=r"constructor raised TypeError: .*unexpected keyword argument 'lives'"):
        await there.remote(lives=3).reset({})
    with pytest.raises(EnvironmentFailedError, match="the task cannot be sent"):
        await there.remote().reset({"x": {1}})
    assert there.server.hub.sessions == 0


async def test_a_full_server_is_asked_again_until_the_deadline(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.environments.hosting.hub.RETRY_AFTER_S", 0.1)
    there = await serve(Doer, max_sessions=1)
    first, second = there.remote(), there.remote()
    await first.reset({})
    waiting = asyncio.ensure_future(second.reset({}))
    await asyncio.sleep(0.3)
    assert not waiting.done()
    await first.close()
    await asyncio.wait_for(waiting, 5)
    with UserThreads() as threads:
        session = EnvironmentSession(there.remote, threads)
        with pytest.raises(DeadlineError, match=r"no session was free within .*: all 1 sessions are in use"):
            await session.reset({}, 0.6)
        await session.close(5)
    await second.close()
    assert there.server.hub.sessions == 0


async def test_the_token_comes_from_argument_file_or_variable_and_a_wrong_one_is_refused(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = await serve(Doer)
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    monkeypatch.delenv(remote.TOKEN_VARIABLE, raising=False)

    async def works(environment: RemoteEnvironment) -> None:
        await environment.reset({})
        await environment.close()

    await works(remote_environment(there.url, token_file=file)())
    await works(RemoteEnvironment(there.url, token=TOKEN))
    bare = remote_environment(there.url)
    await works(bare(token_file=str(file)))
    with pytest.raises(EnvironmentFailedError, match="needs its token"):
        await bare().reset({})
    with pytest.raises(EnvironmentFailedError, match="that is not this environment server's token"):
        await remote_environment(there.url, token="wrong")().reset({})
    with pytest.raises(AuthenticationError, match="that is not this"):
        await asyncio.to_thread(lambda: remote_environment(there.url, token="wrong").task_columns)
    with pytest.raises(EnvironmentFailedError, match="cannot read the environment's token file"):
        await bare(token_file=str(tmp_path / "none")).reset({})
    monkeypatch.setenv(remote.TOKEN_VARIABLE, TOKEN)
    await works(bare())
    source = bare.task_source("train", {"token_file": str(file), "opening": "x"})
    assert await asyncio.to_thread(source.draw, 0, 0, 1) == Doer.task_source("train", {}).draw(0, 0, 1)


async def test_a_server_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_S", 0.3)
    gone = remote_environment("http://127.0.0.1:9", token="x")
    with pytest.raises(EnvironmentFailedError, match=r"cannot reach the environment server http://127\.0\.0\.1:9"):
        await gone().reset({})
    with pytest.raises(UnavailableError, match="env serve"):
        await asyncio.to_thread(gone.make_task, 1)
    for wrong in ("ftp://x:1", "http://", "http://x:y"):
        with pytest.raises(ConfigError, match="is not an environment server's address"):
            remote_environment(wrong)
    with pytest.raises((ConfigError, EnvironmentLoadError)):
        load_environment("http://")


async def test_sessions_spread_over_servers_and_a_dead_one_is_avoided(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "LOST_S", 0.5)
    servers = [await serve(Doer) for _ in range(2)]
    async with hosted(Doer) as third:
        servers.append(third)
        spread = remote_environment(",".join(s.url for s in servers), token=TOKEN)
        environments = [spread() for _ in range(60)]
        await asyncio.gather(*(e.reset({}) for e in environments))
        assert [s.server.hub.sessions > 5 for s in servers] == [True] * 3
        assert sum(s.server.hub.sessions for s in servers) == 60
        lost_url = third.url
    lost = [e for e in environments if e._link is not None and e._link.url == lost_url]
    kept = [e for e in environments if e not in lost]
    for result in await asyncio.gather(*(e.step(Action("say")) for e in lost), return_exceptions=True):
        assert isinstance(result, EnvironmentFailedError)
        assert "is gone, and the session with it" in str(result)
    await asyncio.gather(*(e.step(Action("say")) for e in kept))
    fresh = [spread() for _ in range(30)]
    await asyncio.gather(*(e.reset({}) for e in fresh))
    assert sum(s.server.hub.sessions for s in servers[:2]) == len(kept) + 30
    await asyncio.gather(*(e.close() for e in [*environments, *fresh]))
    assert sum(s.server.hub.sessions for s in servers[:2]) == 0


async def test_all_sessions_of_a_loop_share_one_connection_that_ends_when_unused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_stream, "LINGER_S", 0.2)
    monkeypatch.setattr(remote_stream, "KEEP_S", 0.05)
    there = await serve(Doer)
    environments = [there.remote() for _ in range(50)]
    await asyncio.gather(*(e.reset({}) for e in environments))
    assert len(there.server.hub._clients) == 1
    assert list(there.server.hub._clients.values()) == [1]
    await asyncio.gather(*(e.close() for e in environments))
    await until(lambda: not there.server.hub._clients)


class Flaky:
    """A way to a server that can be cut."""

    def __init__(self, there: Hosted) -> None:
        self.port = int(there.url.rpartition(":")[2])
        self.writers: list[asyncio.StreamWriter] = []
        self.drop_answers = False
        self.url = ""

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self.connect, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        return server

    async def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, there_writer]

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: bool) -> None:
            while data := await source.read(2**16):
                if answers and self.drop_answers:
                    self.cut()
                    return
                sink.write(data)
            sink.close()

        await asyncio.gather(pump(reader, there_writer, False), pump(there_reader, writer, True), return_exceptions=True)

    def cut(self) -> None:
        writers, self.writers = self.writers, []
        for writer in writers:
            writer.transport.abort()


async def test_a_step_whose_answer_was_lost_is_not_applied_twice(serve: Serve, tmp_path: Path) -> None:
    there = await serve(Doer)
    way = Flaky(there)
    async with await way.start():
        log = tmp_path / "log"
        environment = RemoteEnvironment(way.url, token=TOKEN, log=str(log))
        await environment.reset({})
        await environment.step(Action("a"))
        way.drop_answers = True
        step = asyncio.ensure_future(environment.step(Action("b")))
        await until(lambda: not way.writers)
        way.drop_answers = False
        assert (await step).metrics == {"turn": 1.0}
        running = asyncio.ensure_future(environment.step(Action("sleep 0.5")))
        await asyncio.sleep(0.1)
        way.cut()  # while it runs: the repeated request joins it
        assert (await running).metrics == {"turn": 2.0}
        await environment.close()
        assert log.read_text().splitlines() == ["0 a", "1 b", "2 sleep 0.5", "closed"]
        way.cut()


async def test_sessions_of_a_client_that_is_gone_are_closed_and_those_of_one_that_lives_are_not(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub = "opentinker.environments.hosting.hub"
    monkeypatch.setattr(f"{hub}.ORPHAN_S", 0.5)
    monkeypatch.setattr(f"{hub}.REAP_EVERY_S", 0.05)
    there = await serve(Doer)
    way = Flaky(there)
    log = tmp_path / "log"
    async with await way.start() as server:
        environment = RemoteEnvironment(way.url, token=TOKEN, log=str(log))
        await environment.reset({})
        way.cut()
        await asyncio.sleep(1.0)  # it connects again by itself, because a session is open
        assert there.server.hub.sessions == 1
        server.close()
        way.cut()
        await until(lambda: there.server.hub.sessions == 0)
        await until(lambda: log.exists() and "closed" in log.read_text())
        environment._link.leave()  # type: ignore[union-attr]


async def test_idle_sessions_are_closed_and_their_client_learns_why(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("opentinker.environments.hosting.hub.REAP_EVERY_S", 0.05)
    there = await serve(Doer, idle_timeout_s=0.3)
    environment = there.remote()
    await environment.reset({})
    await until(lambda: there.server.hub.sessions == 0)
    with pytest.raises(EnvironmentFailedError, match="it got no request for 0 s"):
        await environment.step(Action("say"))
    await environment.close()


async def test_a_reset_that_is_given_up_leaves_no_session(serve: Serve) -> None:
    there = await serve(Doer)
    with UserThreads() as threads:
        session = EnvironmentSession(there.remote, threads)
        running = asyncio.ensure_future(session.reset("sleep 0.5", 30))
        await until(lambda: there.server.hub.sessions == 1)
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await session.close(5)
    assert there.server.hub.sessions == 0


async def test_a_job_is_counted_apart(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENTINKER_JOB", "job-7")
    there = await serve(Doer)
    await play(there.remote, {}, ["a", "b", "done"])
    await play(there.remote, {}, ["raise"])
    counts = there.server.hub.statistics.document()["jobs"]["job-7"]
    assert (counts["sessions"], counts["resets"], counts["steps"], counts["finalized"]) == (2, 2, 3, 1)
    assert counts["environment_errors"] == 1


def test_a_class_of_a_server_is_loaded_by_its_address_without_asking_it() -> None:
    found = load_environment("http://127.0.0.1:9,http://127.0.0.1:10")
    assert issubclass(found, RemoteEnvironment)
    assert found.servers is not None
    assert found.servers.ring.urls == ("http://127.0.0.1:9", "http://127.0.0.1:10")
    assert os.environ.get(remote.TOKEN_VARIABLE) is None
