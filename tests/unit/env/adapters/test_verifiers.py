"""Environments of verifiers run their own rollouts and rubrics; the policy answers their model calls.

verifiers pins versions of `openai` and `mcp` that vLLM does not share, so it is not among what `requirements/install.sh`
installs: these tests run in an environment of their own (docs/adapters.md says how).
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

verifiers = pytest.importorskip("verifiers", reason="verifiers conflicts with vLLM's openai and mcp; see docs/adapters.md")

from opentinker.env.environment import Action  # noqa: E402
from opentinker.env.load import load_environment  # noqa: E402
from opentinker.errors import ConfigError, EnvironmentFailedError, EnvironmentLoadError  # noqa: E402

PACKAGES = Path(__file__).parent / "verifiers_packages"
CLASSIC = hasattr(verifiers, "load_environment")
classic = pytest.mark.skipif(not CLASSIC, reason=f"verifiers {verifiers.__version__} has tasksets")
tasksets = pytest.mark.skipif(CLASSIC, reason=f"verifiers {verifiers.__version__} has environments")
NAME = "verifiers:toy-classic"
CALL = '<tool_call>{"name": "NAME", "arguments": {"x": 4}}</tool_call>'


@pytest.fixture(autouse=True)
def packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PACKAGES)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(PACKAGES), os.environ.get("PYTHONPATH", "")]))


def row(args: dict[str, Any], place: int = 2, name: str = NAME) -> Any:
    return load_environment(name).task_source("train", args).first(10)[place]


@classic
async def test_a_single_turn_is_scored_by_the_rubric_with_its_components(play: Any) -> None:
    played = await play(NAME, ["4"], task=row({}))
    assert played.first == ["Add.", "2 + 2?"]
    assert (played.last.done, played.last.reward) == (True, 1.2)
    assert played.last.components == {"exact": 1.0, "short": 0.2}
    assert played.last.metrics["length"] == 1
    wrong = await play(NAME, ["I would say that it is four."], task=row({}))
    assert wrong.last.reward == 0


@classic
async def test_several_turns_end_when_the_environment_says_so(play: Any) -> None:
    args = {"kind": "guess"}
    played = await play(NAME, ["1", "9", "4"], args, row(args))
    assert [played.said(0), played.said(1), played.said(2)] == ["Higher.", "Lower.", "Yes."]
    assert [(step.reward, step.done) for step in played.steps] == [(0, False), (0, False), (1, True)]
    assert played.last.components == {"found": 1}
    assert played.last.metrics["num_turns"] == 3


@classic
async def test_the_environments_own_limit_of_turns_ends_it(play: Any) -> None:
    args = {"kind": "guess"}
    played = await play(NAME, ["1"] * 9, args, row(args))
    assert (len(played.steps), played.last.done, played.last.reward) == (6, True, 0)


@classic
async def test_an_episode_that_is_cut_short_is_scored_as_it_stands(play: Any) -> None:
    args = {"kind": "guess"}
    played = await play(NAME, ["1"], args, row(args), finish=True)
    assert not played.last.done
    assert played.final.components == {"found": 0}


@classic
async def test_tools_are_declared_and_called(play: Any) -> None:
    args = {"kind": "tool"}
    played = await play(NAME, [CALL.replace("NAME", "double"), "8"], args, row(args, 4))
    assert [tool["function"]["name"] for tool in played.tools] == ["double"]
    assert played.said(0) == "8"
    assert (played.last.done, played.last.reward) == (True, 1)


@classic
async def test_a_truncated_answer_reaches_the_environment_as_one(play: Any) -> None:
    played = await play(NAME, [Action("4", truncated=True)], task=row({}))
    assert played.last.done


@classic
@pytest.mark.parametrize(
    ("kind", "actions", "problem"),
    [
        ("guess", ["crash"], "ToolError: its own fault"),
        ("guess", ["bug"], "a bug of its author"),
        ("rewriting", ["1", "2"], "rewrites the conversation"),
        ("broken", [], "no room"),
    ],
)
async def test_a_failure_of_the_environment_fails_the_episode(play: Any, kind: str, actions: list[str], problem: str) -> None:
    args = {"kind": kind}
    with pytest.raises(EnvironmentFailedError, match=problem):
        await play(NAME, actions, args, row(args))


@classic
def test_the_datasets_are_the_splits() -> None:
    made = load_environment(NAME)
    train, held_out = made.task_source("train", {"rows": 7}), made.task_source("held_out", {"rows": 7})
    assert (train.size, held_out.size) == (7, 1)
    assert sorted(task["example_id"] for task in train.draw(1, 0, 7)) == list(range(7))
    assert held_out.first(5)[0]["answer"] == "100"
    assert made.task_source("held_out", {"kind": "guess"}).first(5) == []
    with pytest.raises(ConfigError, match="no training dataset"):
        made.task_source("train", {"kind": "eval_only"})


@classic
def test_rewards_that_compare_rollouts_are_refused() -> None:
    with pytest.raises(ConfigError, match="compare the rollouts of a group"):
        load_environment(NAME).task_source("train", {"kind": "together"})


@classic
def test_loading_leaves_the_processs_signals_alone() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    load_environment(NAME).task_source("train", {"rows": 3})
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@tasksets
async def test_a_tasksets_task_is_scored_with_its_components(play: Any) -> None:
    name = "verifiers:toy-taskset"
    played = await play(name, ["4"], task=row({}, name=name))
    assert played.first == ["Add.", "2 + 2?"]
    assert (played.last.done, played.last.components) == (True, {"exact": 2.0, "short": 0.5})
    assert played.last.metrics["turns"] == 1
    wrong = await play(name, ["it is surely four"], task=row({}, name=name))
    assert wrong.last.reward == 0


@tasksets
async def test_a_tasksets_own_environment_talks_with_the_policy(play: Any) -> None:
    name = "verifiers:toy-talk"
    played = await play(name, ["1", "9", "6"], task=row({}, name=name))
    assert (played.said(0), played.said(1)) == ("Higher.", "Lower.")
    assert (played.last.done, played.last.components) == (True, {"found": 1})
    with pytest.raises(EnvironmentFailedError, match="a bug of its author"):
        await play(name, ["crash"], task=row({}, name=name))


@tasksets
async def test_a_talk_that_is_cut_short_is_scored_as_it_stands(play: Any) -> None:
    name = "verifiers:toy-talk"
    played = await play(name, ["1"], task=row({}, name=name), finish=True)
    assert not played.last.done
    assert played.final.reward == 0


@tasksets
async def test_a_tasks_tools_are_declared_and_called(play: Any) -> None:
    name = "verifiers:toy-tools"
    played = await play(
        name, [CALL.replace("NAME", "doubler_double"), CALL.replace("NAME", "halve"), "4"], task=row({}, name=name)
    )
    assert [tool["function"]["name"] for tool in played.tools] == ["doubler_double"]
    assert (played.said(0), played.said(1)) == ("8", "error: there is no tool 'halve'")
    assert (played.last.done, played.last.reward) == (True, 1)


@tasksets
def test_arguments_select_a_tasksets_splits() -> None:
    made, args = load_environment("verifiers:toy-taskset"), {"rows": 3, "held_out": {"split": "test"}}
    assert made.task_source("train", args).size == 3
    assert made.task_source("held_out", args).first(1)[0]["answer"] == "200"
    assert made.task_source("held_out", {}).first(1) == []


@pytest.mark.parametrize("kind", ["guess", "talk"])
async def test_episodes_run_beside_each_other(play: Any, kind: str) -> None:
    if (kind == "guess") != CLASSIC:
        pytest.skip("the other version's")
    name, args = (NAME, {"kind": "guess", "rows": 7}) if CLASSIC else ("verifiers:toy-talk", {})
    tasks = load_environment(name).task_source("train", args).first(3)
    games = await asyncio.gather(*(play(name, ["1", "2", "3"], args, task) for task in tasks * 4))
    assert games[:3] == games[3:6] == games[9:]


def test_wrong_arguments_show_before_any_episode() -> None:
    name = NAME if CLASSIC else "verifiers:toy-taskset"
    with pytest.raises(EnvironmentLoadError, match=r"(?s)cannot load.*colour"):
        load_environment(name).task_source("train", {"colour": "blue"})


@pytest.mark.parametrize("name", ["owner/no-such-environment", "no such"])
def test_an_environment_that_is_not_installed_says_how_to_install_it(name: str) -> None:
    with pytest.raises(EnvironmentLoadError, match=r"is not installed.*prime env install"):
        load_environment(f"verifiers:{name}")
