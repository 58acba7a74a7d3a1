"""Every dataset of reasoning-gym gives tasks by seed, and its own answer earns its own full score."""

import inspect
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

from reasoning_gym.factory import DATASETS

from opentinker.env.adapters.common import TRAINING_SEEDS
from opentinker.env.adapters.reasoning_gym import EXPRESSIONS, LITERALS, is_expression
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentLoadError

COMPOSITE = {"datasets": [{"name": "leg_counting"}, {"name": "spell_backward", "weight": 2, "config": {"min_word_len": 4}}]}
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""They only judge answers; many are right."""
SLOW_S = 20.0


def args_of(name: str) -> dict[str, Any]:
    return COMPOSITE if name == "composite" else {}


def test_every_dataset_gives_a_task_scores_its_own_answer_in_full_and_takes_any_text() -> None:
    wrong, slow = [], []
    for name in sorted(DATASETS):
        start = time.monotonic()
        environment: Any = load_environment(f"reasoning_gym:{name}")(**args_of(name))
        question = environment.reset({"seed": 11})[-1]["content"]
        answer = environment._entry["answer"]
        if not question or (answer is None) != (name in UNANSWERED):
            wrong.append(f"{name}: answer {answer!r:.60}")

        def result(text: str, environment: Any = environment) -> Any:
            environment._done = False
            return environment.step(Action(text))

        own = result(f"<answer>{answer}</answer>")
        if answer is not None and (own.reward, own.metrics["exact"]) != (1.0, 1.0):
            wrong.append(f"{name}: {own.reward} for its own answer")
        for text in ("", "no tag", "<answer></answer>", "<answer>banana 17</answer>", "<answer>[1, 2</answer>"):
            other = result(text)
            if not other.done or not 0 <= other.reward <= 1:
                wrong.append(f"{name}: {other.reward} for {text}")
        if time.monotonic() - start > SLOW_S:
            slow.append(name)
    assert wrong == []
    assert slow == []


async def test_a_question_is_asked_and_its_answer_scored(play: Any) -> None:
    args = {"min_animals": 2, "max_animals": 2, "system_prompt": "simple"}
    played = await play("reasoning_gym:leg_counting", ["The legs: <answer>0</answer>"], args, task={"seed": 5})
    assert "<answer>" in played.first[0]
    assert "how many legs" in played.first[1]
    assert (played.last.done, played.last.reward) == (True, 0)
    assert played.last.metrics == {"formatted": 1, "exact": 0, "scorer_errors": 0}


async def test_a_sampled_action_is_the_right_answer(play: Any) -> None:
    task = {"seed": 5}
    actions = load_environment("reasoning_gym:countdown").sample_actions(task)  # type: ignore[attr-defined]
    assert (await play("reasoning_gym:countdown", actions, task=task)).last.reward == 1


async def test_an_answer_without_tags_counts_only_if_that_is_wanted(play: Any) -> None:
    name, task = "reasoning_gym:spell_backward", {"seed": 5}
    environment: Any = load_environment(name)()
    environment.reset(task)
    answer = environment._entry["answer"]
    strict = await play(name, [answer], task=task)
    assert (strict.last.reward, strict.last.metrics["formatted"]) == (0, 0)
    lenient = await play(name, [answer], {"strict": False}, task=task)
    assert (lenient.last.reward, lenient.last.metrics["formatted"]) == (1, 0)


async def test_a_scorer_that_raises_is_counted_apart(play: Any) -> None:
    played = await play("reasoning_gym:prime_factorization", ["<answer>banana</answer>"])
    assert (played.last.reward, played.last.metrics["scorer_errors"]) == (0, 1)


@pytest.mark.parametrize("name", ["leg_counting", "countdown", "maze", "composite"])
async def test_a_seed_determines_a_task_and_others_differ(play: Any, name: str) -> None:
    asked = [(await play(f"reasoning_gym:{name}", [], args_of(name), seed=seed)).first for seed in (1, 1, 2)]
    assert asked[0] == asked[1] != asked[2]


async def test_held_out_tasks_are_other_seeds(play: Any) -> None:
    source = load_environment("reasoning_gym:leg_counting").task_source("held_out", {})
    tasks = source.first(3)
    assert [task["seed"] - TRAINING_SEEDS for task in tasks] == [0, 1, 2]
    assert (await play("reasoning_gym:leg_counting", ["x"], task=tasks[0])).last.done


@pytest.mark.parametrize(
    ("name", "args", "problem"),
    [
        ("leg_counting", {"min_animal": 3}, r"min_animal.*its arguments are.*min_animals"),
        ("leg_counting", {"min_animals": 5, "max_animals": 2}, "refuses its arguments"),
        ("composite", {}, "needs datasets"),
        ("composite", {"datasets": [{"nom": "x"}]}, "nom"),
        ("composite", {"datasets": [{"name": "no_such_dataset"}]}, "no_such_dataset"),
    ],
)
def test_wrong_arguments_show_before_any_episode(name: str, args: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_environment(f"reasoning_gym:{name}").task_source("train", args)


def test_an_unknown_dataset_names_the_nearest() -> None:
    with pytest.raises(EnvironmentLoadError, match=r"no dataset 'leg_count'.*did you mean 'leg_counting'"):
        load_environment("reasoning_gym:leg_count")


def test_what_takes_for_ever_to_evaluate_runs_where_it_can_be_killed() -> None:
    for name in ("countdown", "composite"):
        assert load_environment(f"reasoning_gym:{name}").execution == "process"
    assert load_environment("reasoning_gym:leg_counting").execution == "thread"


HOSTILE = (
    "__import__('pathlib').Path({path!r}).touch()",
    "[__import__('pathlib').Path({path!r}).touch()]",
    "().__class__.__base__.__subclasses__()",
    "x.func.__globals__",
    "Symbol .  name",
)


def test_no_answer_is_executed(tmp_path: Path) -> None:
    proof = tmp_path / "executed"
    for name in sorted(LITERALS | EXPRESSIONS):
        environment: Any = load_environment(f"reasoning_gym:{name}")()
        environment.reset({"seed": 11})
        for text in HOSTILE:
            environment._done = False
            result = environment.step(Action(f"<answer>{text.format(path=str(proof))}</answer>"))
            assert result.reward <= 0.05  # some give a little for any answer
    assert not proof.exists()


def test_every_dataset_that_evaluates_text_is_known() -> None:
    evaluates = re.compile(r"parse_expr|sympify|(?<!literal_)(?<!\w)eval\(|exec\(")
    own = {"basic_arithmetic", "bitwise_arithmetic", "codeio", "propositional_logic"}
    """They evaluate what they wrote themselves."""
    sources = {name: inspect.getsource(sys.modules[made.__module__]) for name, (made, _) in DATASETS.items()}
    found = {name for name, source in sources.items() if any(map(evaluates.search, source.splitlines()))}
    assert found - own == LITERALS | EXPRESSIONS


@pytest.mark.parametrize(
    "text", ["(3 + 4)*2", "x**3/3 + C", "2.5*x", "-x**2 + 0.5", "log(x) + C", "-5*sin(x)/3", "f = 3^2", "7."]
)
def test_a_formula_is_one(text: str) -> None:
    assert is_expression(text)


@pytest.mark.parametrize(
    "text", ["", "a.b", "a. b", "a .\nb", "x.__class__", "'a'", "[1]", "1;2", "lambda: 1", "1" * 1001, "a\\b"]
)
def test_what_could_be_a_program_is_none(text: str) -> None:
    assert not is_expression(text)
