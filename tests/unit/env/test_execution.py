"""An author's mistakes come back as errors that say what, where and how; their slowness has a deadline."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from opentinker.env.environment import Action, Environment, StepResult
from opentinker.env.execution import EnvironmentSession
from opentinker.env.stopping import Abandoned, Stopper
from opentinker.env.threads import UserThreads
from opentinker.errors import DeadlineError, EnvironmentFailedError
from opentinker.images import Image

HELLO = ({"role": "user", "content": "hello"},)
Start = Callable[..., EnvironmentSession]


class Scripted(Environment):
    """Gives or raises what it was told to."""

    def __init__(self, reset: Any = "hello", step: Any = None, close: Any = None) -> None:
        self.script = {"reset": reset, "step": step, "close": close}

    def play(self, name: str) -> Any:
        act = self.script[name]
        if isinstance(act, BaseException):
            raise act
        return act() if callable(act) else act

    def reset(self, task: Any) -> Any:
        return self.play("reset")

    def step(self, action: Action) -> Any:
        return self.play("step")

    def close(self) -> None:
        self.play("close")


class AsyncScripted(Scripted):
    async def reset(self, task: Any) -> Any:
        await asyncio.sleep(0)
        return self.play("reset")

    async def step(self, action: Action) -> Any:
        await asyncio.sleep(0)
        return self.play("step")


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    with UserThreads() as threads:
        yield lambda make: EnvironmentSession(make, threads)


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
async def test_plain_and_async_environments_answer_alike(start: Start, kind: type[Scripted]) -> None:
    closed = []
    result = StepResult(np.float32(1.5), True, "", {"exact": np.int64(1)})  # type: ignore[arg-type, dict-item]
    session = start(lambda: kind(step=result, close=lambda: closed.append(1)))
    assert await session.reset("task", 5) == HELLO
    assert await session.step(Action("x"), 5) == StepResult(1.5, True, (), {"exact": 1.0})
    await session.close(5)
    await session.close(5)
    assert closed == [1]
    assert session.seconds > 0


async def test_plain_functions_run_in_a_thread_and_async_ones_on_the_loop(start: Start) -> None:
    where: list[int] = []

    def note() -> str:
        where.append(threading.get_ident())
        return "hello"

    await start(lambda: Scripted(reset=note)).reset(0, 5)
    await start(lambda: AsyncScripted(reset=note)).reset(0, 5)
    assert where[0] != threading.get_ident() == where[1]


async def test_a_plain_function_may_return_an_awaitable(start: Start) -> None:
    async def later() -> str:
        return "hello"

    assert await start(lambda: Scripted(reset=lambda: later())).reset(0, 5) == HELLO


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
@pytest.mark.parametrize("error", [ValueError("no such word"), StopIteration("empty"), SystemExit(3), asyncio.CancelledError()])
async def test_what_user_code_raises_names_class_method_and_line(
    start: Start, kind: type[Scripted], error: BaseException
) -> None:
    session = start(lambda: kind(step=error))
    await session.reset(0, 5)
    with pytest.raises(EnvironmentFailedError) as caught:
        await session.step(Action("x"), 5)
    assert str(caught.value).startswith(f"{kind.__name__}.step raised ")
    assert type(error).__name__ in str(caught.value)
    if not isinstance(error, asyncio.CancelledError):
        line = Scripted.play.__code__.co_firstlineno + 3
        assert str(caught.value).endswith(f"({__file__}:{line})")
        assert str(error) in str(caught.value)


async def test_an_error_deep_in_a_library_is_shown_at_the_authors_line(start: Start) -> None:
    session = start(lambda: Scripted(reset=lambda: np.zeros(2).reshape(3)))
    with pytest.raises(EnvironmentFailedError, match=rf"cannot reshape .*{__name__}\.py:\d+\)"):
        await session.reset(0, 5)


async def test_a_constructor_that_raises_is_named(start: Start) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"constructor raised TypeError: .*unexpected keyword argument 'lives'"):
        await start(lambda: Scripted(lives=3)).reset(0, 5)


@pytest.mark.parametrize("kind", [Scripted, AsyncScripted])
async def test_a_call_that_never_returns_has_a_deadline(start: Start, kind: type[Scripted]) -> None:
    release = threading.Event()
    session = start(lambda: kind(reset="hello"))
    await session.reset(0, 5)
    hang: Any = release.wait if kind is Scripted else lambda: None
    session._environment.script["step"] = hang  # type: ignore[union-attr]
    if kind is AsyncScripted:
        session._environment.step = lambda action: asyncio.sleep(60)  # type: ignore[method-assign, union-attr, assignment]
    start_s = time.perf_counter()
    with pytest.raises(DeadlineError, match=r"Scripted\.step did not return within 0\.05 s"):
        await session.step(Action("x"), 0.05)
    assert time.perf_counter() - start_s < 20
    await session.close(5)
    release.set()


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_a_late_call_is_shown_at_the_line_where_it_is(start: Start, kind: str) -> None:
    class Plain(Environment):
        def reset(self, task: Any) -> str:
            self.wait()
            return "late"

        def wait(self) -> None:
            time.sleep(0.3)

    class Async(Environment):
        async def reset(self, task: Any) -> str:
            await self.wait()
            return "late"

        async def wait(self) -> None:
            await asyncio.sleep(0.3)

    environment: type[Any] = Plain if kind == "plain" else Async
    line = environment.wait.__code__.co_firstlineno + 1
    with pytest.raises(DeadlineError) as caught:
        await start(environment).reset(0, 0.1)
    assert str(caught.value).startswith(f"{environment.__name__}.reset did not return within")
    assert str(caught.value).endswith(f" s ({__file__}:{line})")


async def test_an_async_method_that_ignores_its_cancellation_is_left_behind(start: Start) -> None:
    released = asyncio.Event()

    class Stubborn(Environment):
        async def reset(self, task: Any) -> str:
            while not released.is_set():
                try:
                    await released.wait()
                except asyncio.CancelledError:
                    continue
            return "late"

    with pytest.raises(DeadlineError, match=r"Stubborn\.reset did not return"):
        await start(Stubborn).reset(0, 0.05)
    released.set()


async def test_an_environment_whose_constructor_outlived_its_deadline_is_closed_when_it_is_there() -> None:
    begun, release, closed = threading.Event(), threading.Event(), threading.Event()

    def make() -> Scripted:
        begun.set()
        with suppress(Abandoned):  # as code does that catches whatever comes
            release.wait(60)
        return Scripted(close=closed.set)

    with UserThreads(Stopper(())) as threads:
        while not begun.is_set():  # a stalled machine may not come to the constructor before the deadline
            session = EnvironmentSession(make, threads)
            with pytest.raises(DeadlineError, match="constructor did not return"):
                await session.reset(0, 0.3)
            await session.close(5)
            await asyncio.sleep(0.05)  # now the call is told to stop, once
        assert not closed.is_set()
        release.set()
        assert await asyncio.to_thread(closed.wait, 30)


BAD_STEPS: list[tuple[Any, str]] = [
    (None, "returned NoneType"),
    ((1.0, True), "returned tuple"),
    (StepResult(reward=float("nan")), "the reward is nan"),
    (StepResult(reward="1"), "the reward must be a number, not str"),  # type: ignore[arg-type]
    (StepResult(reward=None), "the reward must be a number, not NoneType"),  # type: ignore[arg-type]
    (StepResult(done=True, metrics={"exact": "yes"}), "metric 'exact' must be a number"),  # type: ignore[dict-item]
    (StepResult(done=True, metrics=[1]), "metrics must be a dict"),  # type: ignore[arg-type]
    (StepResult(observation=""), "empty observation"),
    (StepResult(observation=[]), "empty observation"),
    (StepResult(observation=7), "observation of type int"),  # type: ignore[arg-type]
    (StepResult(done=True, observation=7), "observation of type int"),  # type: ignore[arg-type]
    (StepResult(observation=["hello"]), "observation of type list"),  # type: ignore[list-item]
    (StepResult(observation=[{"role": "robot", "content": "x"}]), "a message that is not one"),
    (StepResult(observation=[{"role": "user", "content": None}]), "a message that is not one"),  # type: ignore[typeddict-item]
    (StepResult(observation=b"x"), "observation of type bytes"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("result", "message"), BAD_STEPS)
async def test_a_malformed_step_result_is_refused_with_what_is_wrong(start: Start, result: Any, message: str) -> None:
    session = start(lambda: Scripted(step=result))
    await session.reset(0, 5)
    with pytest.raises(EnvironmentFailedError, match=message) as caught:
        await session.step(Action("x"), 5)
    assert "Scripted.step" in str(caught.value)


@pytest.mark.parametrize("observation", ["", [], None, 3])
async def test_a_malformed_first_observation_is_refused(start: Start, observation: Any) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"Scripted\.reset gave an"):
        await start(lambda: Scripted(reset=observation)).reset(0, 5)


def picture(color: str = "red") -> Any:
    from PIL import Image as Pillow

    return Pillow.new("RGB", (4, 3), color)


async def test_an_image_parts_and_messages_become_messages(start: Start) -> None:
    image = Image.of(picture())
    parts = [{"type": "text", "text": "look"}, {"type": "image", "image": picture()}]
    clean = [{"type": "text", "text": "look"}, {"type": "image", "image": image}]

    async def observed(value: Any) -> Any:
        return await start(lambda: Scripted(reset=lambda: value)).reset(0, 5)

    assert await observed(image) == ({"role": "user", "content": [clean[1]]},)
    assert await observed(picture()) == ({"role": "user", "content": [clean[1]]},)
    assert await observed(parts) == ({"role": "user", "content": clean},)
    assert await observed([{"role": "tool", "content": parts}]) == ({"role": "tool", "content": clean},)


@pytest.mark.parametrize(
    ("observation", "says"),
    [
        ([{"type": "image", "image": b"no image"}], "an image that is not one"),
        ([{"type": "sound"}], "a part that is not one"),
        ([{"role": "user", "content": [3]}], "a part that is not one"),
        ([{"role": "user", "content": b"bytes"}], "a message that is not one"),
        ({"role": "user"}, "observation of type dict"),
    ],
)
async def test_a_malformed_part_is_shown(start: Start, observation: Any, says: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=says):
        await start(lambda: Scripted(reset=lambda: observation)).reset(0, 5)


async def test_a_rewards_components_add_up_and_are_kept(start: Start) -> None:
    session = start(lambda: Scripted(step=StepResult({"answer": 1.0, "format": np.float64(0.25)}, done=True)))
    await session.reset(0, 5)
    result = await session.step(Action("x"), 5)
    assert (result.reward, result.components) == (1.25, {"answer": 1.0, "format": 0.25})
    bad = start(lambda: Scripted(step=StepResult({"answer": float("nan")}, done=True)))
    await bad.reset(0, 5)
    with pytest.raises(EnvironmentFailedError, match="component 'answer' is nan"):
        await bad.step(Action("x"), 5)


class Final(Scripted):
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)

    def finalize(self) -> Any:
        return self.play("close")


async def test_a_last_reward_is_checked_like_any_other(start: Start) -> None:
    session = start(lambda: Final(close=lambda: {"tidy": 0.5}))
    await session.reset(0, 5)
    assert session.finalizes
    assert session.tools == Final.tools
    assert (await session.finalize(5)).components == {"tidy": 0.5}
    for value, says in [("much", "must be a number"), (float("inf"), "must be finite")]:
        wrong = start(lambda value=value: Final(close=lambda: value))
        await wrong.reset(0, 5)
        with pytest.raises(EnvironmentFailedError, match=says):
            await wrong.finalize(5)
    plain = start(lambda: Scripted())
    await plain.reset(0, 5)
    assert (plain.finalizes, plain.tools) == (False, ())


@pytest.mark.parametrize("tools", ["search", [{"name": "search"}], [{"type": "function", "function": {"parameters": {}}}], 3])
async def test_malformed_tools_fail_the_reset(start: Start, tools: Any) -> None:
    class Odd(Scripted):
        pass

    Odd.tools = tools
    with pytest.raises(EnvironmentFailedError, match="tools"):
        await start(Odd).reset(0, 5)


@pytest.mark.parametrize("error", [EnvironmentFailedError("the other side raised ValueError: no"), DeadlineError("late there")])
async def test_what_an_environment_elsewhere_reports_passes_unchanged(start: Start, error: Exception) -> None:
    session = start(lambda: Scripted(step=error))
    await session.reset(0, 5)
    with pytest.raises(type(error)) as raised:
        await session.step(Action("x"), 5)
    assert raised.value is error
