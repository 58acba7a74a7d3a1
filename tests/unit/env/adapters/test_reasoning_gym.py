"""Every dataset of reasoning-gym gives tasks by seed, and its own answer earns its own full score."""

import time
from typing import Any

import pytest

pytest.importorskip("reasoning_gym", reason="pip install reasoning-gym")

from reasoning_gym.factory import DATASETS

from opentinker.env.adapters.common import TRAINING_SEEDS
from opentinker.env.environment import Action
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentLoadError

COMPOSITE = {"datasets": [{"name": "leg_counting"}, {"name": "spell_backward", "weight": 2, "config": {"min_word_len": 4}}]}
UNANSWERED = {"boxnet", "graph_color", "propositional_logic", "rubiks_cube", "rush_hour"}
"""They only judge answers; many are right."""
SLOW_S = 20.0


def args_of(name: str) -> dict[str, Any]:
    return COMPOSITE if name == "composite" else {}


def test_every_dataset_gives_a_task_and_scores_its_own_answer_in_full() -> None:
    wrong, slow = [], []
    for name in sorted(DATASETS):
        start = time.monotonic()
        environment = load_environment(f"reasoning_gym:{name}")(**args_of(name))
        first: Any = environment.reset({"seed": 11})
        answer = environment._entry["answer"]  # type: ignore[attr-defined]
        if not first[-1]["content"] or (answer is None) != (name in UNANSWERED):
            wrong.append(f"{name}: answer {answer!r:.60}")
        result: Any = environment.step(Action(f"<answer>{answer}</answer>"))
        if answer is not None and (result.reward != 1.0 or result.metrics["exact"] != 1.0):
            wrong.append(f"{name}: {result.reward}")
        if not result.done:
            wrong.append(f"{name}: goes on")
        if time.monotonic() - start > SLOW_S:
            slow.append(name)
    assert wrong == []
    assert slow == []


def test_nothing_that_a_policy_writes_makes_a_dataset_fail_or_leave_its_range() -> None:
    wrong = []
    for name in sorted(set(DATASETS) - {"knight_swap", "intermediate_integration"}):  # seconds each, and like others
        environment: Any = load_environment(f"reasoning_gym:{name}")(**args_of(name))
        environment.reset({"seed": 11})
        for text in ("", "no tag", "<answer></answer>", "<answer>banana 17</answer>", "<answer>[1, 2</answer>"):
            environment._done = False
            result: Any = environment.step(Action(text))
            if not 0 <= result.reward <= 1:
                wrong.append(f"{name}: {text} -> {result.reward}")
    assert wrong == []


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


def test_it_runs_where_it_can_be_killed() -> None:
    assert load_environment("reasoning_gym:countdown").execution == "process"
