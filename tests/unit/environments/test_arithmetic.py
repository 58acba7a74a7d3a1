"""What is held out is never trained on, and the reward is what the README says."""

import pytest

from opentinker.env.environment import Action
from opentinker.environments.arithmetic import EXAMPLES, HELD_OUT, TRAINING, Arithmetic


def test_thirty_pairs_are_held_out_and_neither_they_nor_their_mirrors_are_drawn_or_shown() -> None:
    held_out = {(t["a"], t["b"]) for t in Arithmetic.held_out_tasks()}
    assert len(held_out) == 30
    drawn = {(t["a"], t["b"]) for t in map(Arithmetic.make_task, range(5000))}
    assert drawn == set(TRAINING)
    for pairs in (drawn, set(EXAMPLES)):
        assert not held_out & (pairs | {(b, a) for a, b in pairs})
    assert held_out == {(b, a) for a, b in HELD_OUT}
    assert all(0 <= digit <= 9 for pair in held_out | drawn for digit in pair)


def test_a_task_is_determined_by_its_seed() -> None:
    assert [Arithmetic.make_task(s) for s in range(50)] == [Arithmetic.make_task(s) for s in range(50)]


def test_the_prompt_is_three_solved_examples_and_the_question() -> None:
    messages = Arithmetic().reset({"a": 4, "b": 9})
    assert [m["role"] for m in messages] == ["user", "assistant"] * 3 + ["user"]
    for question, answer in zip(messages[::2], messages[1::2], strict=False):
        a, b = question["content"].split(" + ")
        assert int(a) + int(b) == int(answer["content"])
    assert messages[-1]["content"] == "4 + 9"


@pytest.mark.parametrize(
    ("text", "reward", "exact"),
    [
        ("13", 1.0, 1.0),
        (" 13.", 1.0, 1.0),
        ("It is 13", 1.0, 1.0),
        ("12", 0.27, 0.0),
        ("8", 0.15, 0.0),
        ("99", 0.0, 0.0),
        ("9" * 5000, 0.0, 0.0),
        ("thirteen", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_the_exact_sum_earns_one_and_a_near_one_a_part(text: str, reward: float, exact: float) -> None:
    environment = Arithmetic()
    environment.reset({"a": 4, "b": 9})
    result = environment.step(Action(text))
    assert result.done
    assert result.reward == pytest.approx(reward)
    assert result.metrics == {"exact": exact}
