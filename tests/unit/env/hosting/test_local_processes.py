"""Local environments of the kind `execution = "process"`, through the runner that training uses."""

import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hosted_environments import Doer, ProcessDoer
from hosting_tools import alive, until

from opentinker.config.rollout import RolloutConfig, SamplingConfig
from opentinker.env.environment import Action, Environment
from opentinker.env.processes import ProcessSession, SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.errors import ConfigError, DeadlineError, EnvironmentFailedError
from opentinker.rollout.runner import RolloutRunner
from opentinker.rollout.types import Termination

_spec = importlib.util.spec_from_file_location("env_chaos_parts", Path(__file__).parents[3] / "scenarios" / "env_chaos.py")
assert _spec is not None
assert _spec.loader is not None
parts = importlib.util.module_from_spec(_spec)
sys.modules["env_chaos_parts"] = parts
_spec.loader.exec_module(parts)


class Says(parts.Bytes):  # type: ignore[misc, name-defined]
    """Makes every action the same text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def parse(self, action_tokens: Any, finished: bool = False) -> Action:
        return Action(self.text)


def runner(text: str, make: Callable[[], Environment], **config: Any) -> RolloutRunner:
    renderer: Any = Says(text)
    return RolloutRunner(
        renderer, parts.policy(0.001), make, RolloutConfig(**config), SamplingConfig(max_tokens=4), 10_000, run_seed=0
    )


async def test_episodes_have_processes_of_their_own_which_are_used_again_and_end_with_the_runner() -> None:
    running = runner("pid", partial(ProcessDoer, opening="hi"), max_turns=2, max_concurrent_episodes=3)
    first = await running.run(["x", "y", "z"], 2, step=0)
    messages = [str(e.messages) for g in first for e in g.episodes]
    assert len(messages) == 6
    processes = running._sessions.processes
    assert processes is not None
    pids = processes.pids
    assert 1 <= len(pids) <= 3
    assert all(any(str(pid) in text for pid in pids) for text in messages)
    await running.run(["x"], 3, step=1)
    assert set(processes.pids) <= set(pids)
    await running.close()
    await until(lambda: not any(alive(pid) for pid in pids))
    assert processes.pids == []


@pytest.mark.parametrize("text", ["spin", "hold 60"])
async def test_a_call_that_hangs_ends_error_timeout_and_its_process_is_gone(text: str) -> None:
    running = runner(text, ProcessDoer, step_timeout_s=1.5, member_retries=1)
    start = time.monotonic()
    (group,) = await running.run(["x"], 1, step=0)
    assert time.monotonic() - start < 30
    assert [e.termination for e in group.failures] == [Termination.ERROR_TIMEOUT] * 2
    assert group.failures[0].error == "ProcessDoer.step did not return within 1.5 s"
    processes = running._sessions.processes
    assert processes is not None
    assert processes.pids == []
    await running.close()


async def test_a_process_that_dies_ends_error_env_with_the_reason() -> None:
    running = runner("die 4", ProcessDoer, member_retries=0)
    (group,) = await running.run(["x"], 1, step=0)
    assert [e.termination for e in group.failures] == [Termination.ERROR_ENV]
    assert "its worker process exited with code 4" in group.failures[0].error
    await running.close()


async def test_an_episode_is_the_same_in_a_thread_and_in_a_process() -> None:
    seen = []
    for kind in (Doer, ProcessDoer):
        factory = SessionFactory(partial(kind, opening="hi"))
        with UserThreads() as threads:
            session = factory.session(threads)
            told: list[Any] = [await session.reset({"name": "x"}, 10), session.tools, session.finalizes]
            told += [await session.step(Action(text), 5) for text in ("say", "image 3", "done")]
            told.append(await session.finalize(5))
            with pytest.raises(EnvironmentFailedError, match=r"is done|was finalized"):
                await session.step(Action("raise x"), 5)
            await session.close(5)
        await factory.close()
        seen.append(told)
    assert seen[0] == seen[1]


async def test_a_cancelled_episode_leaves_no_busy_process() -> None:
    factory = SessionFactory(ProcessDoer)
    with UserThreads() as threads:
        session = factory.session(threads)
        assert isinstance(session, ProcessSession)
        await session.reset("x", 10)
        running = asyncio.ensure_future(session.step(Action("sleep 30"), 60))
        await asyncio.sleep(0.1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await session.close(5)
    assert factory.processes is not None
    await until(lambda: factory.processes is not None and factory.processes.pids == [])
    await factory.close()


async def test_a_reset_that_is_late_is_a_deadline_but_the_start_of_the_process_does_not_count() -> None:
    factory = SessionFactory(ProcessDoer)
    with UserThreads() as threads:
        session = factory.session(threads)
        with pytest.raises(DeadlineError, match=r"ProcessDoer\.reset did not return within 0\.2 s"):
            await session.reset("sleep 5", 0.2)
        await session.close(5)
    await factory.close()


def test_processes_end_with_the_event_loop_even_if_nobody_closes_them() -> None:
    factory = SessionFactory(ProcessDoer)

    async def leave() -> list[int]:
        with UserThreads() as threads:
            await factory.session(threads).reset("x", 10)
        assert factory.processes is not None
        return factory.processes.pids

    (pid,) = asyncio.run(leave())
    asyncio.run(until(lambda: not alive(pid)))


def test_a_class_that_no_process_can_load_is_refused_at_once() -> None:
    class Local(Doer):
        execution = "process"

    with pytest.raises(ConfigError, match=r"defined inside a function.*or set execution = 'thread'"):
        runner("x", Local)
