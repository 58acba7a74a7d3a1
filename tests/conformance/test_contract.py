"""The contract of an environment's session, the same wherever the environment runs."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from places import HERE, MakeSession
from probe import PARTS, PICTURE, TOOL

from opentinker.env.environment import Action, Environment, StepResult
from opentinker.errors import DeadlineError, EnvironmentFailedError

pytestmark = [
    pytest.mark.parametrize("name", ["probe.py:Probe", "probe.py:AsyncProbe"]),
    pytest.mark.asyncio(loop_scope="session"),
]
HELLO = ({"role": "user", "content": "hello"},)
T = 30.0
SHORT_S = 0.5


def user(content: Any) -> tuple[Any, ...]:
    return ({"role": "user", "content": content},)


def of(name: str, method: str) -> str:
    return f"{name.rpartition(':')[2]}.{method}"


async def started(session: MakeSession, name: str, **task: Any) -> Any:
    running = session(name)
    assert await running.reset({"reset": "text", **task}, T) == HELLO
    return running


@pytest.mark.parametrize(
    ("first", "messages"),
    [
        ("text", HELLO),
        ("image", user([{"type": "image", "image": PICTURE}])),
        ("parts", user(PARTS)),
        (
            "messages",
            (
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": "1 + 1"},
                {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
                {"role": "user", "content": PARTS},
            ),
        ),
    ],
)
async def test_reset_gives_messages_with_images_as_they_were(
    session: MakeSession, name: str, first: str, messages: tuple[Any, ...]
) -> None:
    assert await session(name).reset({"reset": first}, T) == messages


@pytest.mark.parametrize("declared", [True, False])
async def test_tools_are_those_of_the_instance_after_reset(session: MakeSession, name: str, declared: bool) -> None:
    running = await started(session, name, tools=declared)
    assert [dict(tool) for tool in running.tools] == ([TOOL] if declared else [])


@pytest.mark.parametrize(
    ("said", "result"),
    [
        ("plain", StepResult(0.5, False, user("go on"), {"turns": 1.0})),
        ("done", StepResult(1.0, True, ())),
        ("last words", StepResult(1.0, True, user("bye"))),
        ("components", StepResult(0.75, False, user("go on"), {}, {"right": 1.0, "length": -0.25})),
        ("picture", StepResult(0.0, False, user([{"type": "image", "image": PICTURE}]))),
        ("tool messages", StepResult(0.0, False, ({"role": "tool", "content": PARTS}, {"role": "tool", "content": "no"}))),
    ],
)
async def test_a_step_gives_reward_components_observation_metrics_and_the_end(
    session: MakeSession, name: str, said: str, result: StepResult
) -> None:
    running = await started(session, name)
    assert await running.step(Action(said), T) == result


async def test_an_action_arrives_whole_however_long_and_strange_it_is(session: MakeSession, name: str) -> None:
    running = await started(session, name, number=5)
    first = await running.step(Action("echo abc", truncated=True, reasoning="because é"), T)
    assert first.observation == user("3 ba7816bf True because é 1 5")
    for number, text in enumerate(["", "x" * 3_000_000, "\x00🙂 \n", "é" * 1000], 2):
        result = await running.step(Action(f"echo {text}"), T)
        assert result.observation[0]["content"].split()[0] == str(len(text))
        assert result.observation[0]["content"].endswith(f"False  {number} 5")


@pytest.mark.parametrize(
    ("wanted", "reward", "components"),
    [(None, 0.0, {}), (0.5, 0.5, {}), ({"end": 1.0, "tidy": -0.5}, 0.5, {"end": 1.0, "tidy": -0.5})],
)
async def test_finalize_gives_a_last_reward(
    session: MakeSession, name: str, wanted: Any, reward: float, components: dict[str, float]
) -> None:
    running = await started(session, name, finalize=wanted)
    await running.step(Action("done"), T)
    assert running.finalizes
    result = await running.finalize(T)
    assert (result.reward, result.components) == (reward, components)


async def test_an_episode_that_is_cut_short_can_be_finalized(session: MakeSession, name: str) -> None:
    running = await started(session, name, finalize=0.25)
    await running.step(Action("plain"), T)
    assert (await running.finalize(T)).reward == 0.25


@pytest.mark.parametrize(
    ("wrong", "error"),
    [("raise", "ValueError: no such word"), ("exit", "SystemExit: 3"), ("stop", "StopIteration: empty")],
)
@pytest.mark.parametrize("method", ["reset", "step"])
async def test_what_an_environment_raises_names_class_method_and_line(
    session: MakeSession, name: str, method: str, wrong: str, error: str
) -> None:
    running = session(name)
    with pytest.raises(EnvironmentFailedError) as caught:  # noqa: PT012 - it is one of the two
        await running.reset({"reset": wrong if method == "reset" else "text"}, T)
        await running.step(Action(wrong), T)
    text = str(caught.value)
    assert text.startswith(f"{of(name, method)} raised {error} ({HERE}/probe.py:"), text


async def test_a_constructor_that_raises_is_named(session: MakeSession, name: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=r"constructor raised LookupError: no such constructor .*probe\.py:\d+\)"):
        await session(name, fail=True).reset({"reset": "text"}, T)
    with pytest.raises(EnvironmentFailedError, match="unexpected keyword argument 'lives'"):
        await session(name, lives=3).reset({"reset": "text"}, T)


async def test_finalize_and_close_report_what_they_raise(session: MakeSession, name: str) -> None:
    running = await started(session, name, finalize="raise", close="raise")
    await running.step(Action("done"), T)
    with pytest.raises(EnvironmentFailedError, match=rf"{of(name, 'finalize')} raised RuntimeError: no end"):
        await running.finalize(T)
    with pytest.raises(EnvironmentFailedError, match=rf"{of(name, 'close')} raised OSError: still open"):
        await running.close(T)


@pytest.mark.parametrize(
    ("first", "error"),
    [
        ("nothing", "gave an empty observation"),
        ("number", "gave an observation of type int"),
        ("no message", "gave a message that is not one"),
        ("no image", "gave an image that is not one"),
        ("object", "gave an observation of type object"),
    ],
)
async def test_a_malformed_first_observation_is_refused(session: MakeSession, name: str, first: str, error: str) -> None:
    with pytest.raises(EnvironmentFailedError, match=f"{of(name, 'reset')} {error}"):
        await session(name).reset({"reset": first}, T)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("nan", ": the reward is nan; it must be finite"),
        ("text reward", ": the reward must be a number, not str"),
        ("bad component", ": component 'right' is inf; it must be finite"),
        ("bad metric", ": metric 'exact' must be a number, not str"),
        ("no result", " returned tuple"),
        ("empty", " gave an empty observation, but the episode goes on"),
        ("object", " gave an observation of type object"),
    ],
)
async def test_a_malformed_result_is_refused_with_what_is_wrong(session: MakeSession, name: str, said: str, error: str) -> None:
    running = await started(session, name)
    with pytest.raises(EnvironmentFailedError) as caught:
        await running.step(Action(said), T)
    assert str(caught.value).startswith(of(name, "step") + error)


async def test_a_call_that_hangs_ends_at_its_deadline_and_others_go_on(session: MakeSession, name: str) -> None:
    hanging, other = await asyncio.gather(started(session, name), started(session, name))
    start = time.monotonic()
    if name.endswith("AsyncProbe"):
        late = asyncio.ensure_future(hanging.step(Action("hang"), SHORT_S))
    else:
        late = asyncio.ensure_future(hanging.step(Action("spin"), SHORT_S))
    await asyncio.sleep(0.05)
    assert (await other.step(Action("plain"), T)).reward == 0.5
    with pytest.raises(DeadlineError, match=rf"{of(name, 'step')} did not return within"):
        await late
    assert time.monotonic() - start < SHORT_S + 20
    await hanging.close(T)
    assert (await other.step(Action("plain"), T)).reward == 0.5


async def test_a_step_after_the_end_is_refused(session: MakeSession, name: str) -> None:
    running = await started(session, name)
    await running.step(Action("done"), T)
    with pytest.raises(EnvironmentFailedError, match="the episode is done"):
        await running.step(Action("plain"), T)


async def test_an_environment_is_closed_once_however_often_that_is_asked(
    session: MakeSession, name: str, tmp_path: Path
) -> None:
    note = tmp_path / "note"
    running = session(name, note=str(note))
    await running.reset({"reset": "text"}, T)
    await running.close(T)
    await running.close(T)
    assert note.read_text() == "closed\n"
    await session(name, note=str(note)).close(T)
    assert note.read_text() == "closed\n", "what was never constructed is not closed"


async def test_many_sessions_at_once_keep_apart(session: MakeSession, name: str, where: str) -> None:
    count = 3 if where == "process" else 24
    running = await asyncio.gather(*(started(session, name, number=n) for n in range(count)))
    for turn in range(1, 4):
        results = await asyncio.gather(*(one.step(Action("echo abc"), T) for one in running))
        assert [r.observation for r in results] == [user(f"3 ba7816bf False  {turn} {n}") for n in range(count)]


async def test_tasks_are_the_same(name: str, where: str, environment_class: Callable[[str], type[Environment]]) -> None:
    environment = environment_class(name)

    def asked() -> list[Any]:
        train, held_out = environment.task_source("train", {}), environment.task_source("held_out", {})
        parts = train.draw(3, 0, 5) + train.draw(3, 5, 3)
        return [parts, train.draw(3, 0, 8), held_out.first(4), held_out.size, list(environment.held_out_tasks())[:2]]

    parts, whole, held_out, size, listed = await asyncio.to_thread(asked)
    assert parts == whole
    assert len({task["number"] for task in whole}) > 1
    assert all(set(task) == {"reset", "number"} for task in whole)
    assert held_out == [{"reset": "text", "number": number} for number in range(100, 104)]
    assert (size, listed) == (7, held_out[:2])
    assert tuple(environment.task_columns) == ("reset",)
