import io

import pytest
from rich.console import Console

from opentinker.training.progress import Progress, sparkline

STEP = {"kind": "step", "step": 3, "reward_mean": 0.5, "exact": 0.25, "tokens_per_s": 812.4, "step_s": 9.81, "errors": 0}
EVALUATION = {
    "kind": "evaluation",
    "step": 0,
    "reward_mean": 0.4,
    "reward_ci": 0.1,
    "exact": 0.17,
    "exact_ci": 0.06,
    "tasks": 30,
}


def test_off_a_terminal_each_row_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Progress("arithmetic", 25, console=console) as progress:
        progress.status("queued")
        progress.status("queued")
        progress(EVALUATION)
        progress(STEP)
        progress(STEP | {"reward_mean": None, "tokens_per_s": None, "errors": 4})
    assert console.file.getvalue().splitlines() == [
        "arithmetic: queued",
        "arithmetic: held-out exact 0.170 ±0.060 after 0 steps (30 tasks)",
        "arithmetic: step  3/25  reward 0.500  exact 0.250  812 tok/s  9.8 s",
        "arithmetic: step  3/25  reward -  exact 0.250  0 tok/s  9.8 s  4 failed episodes",
    ]


def test_on_a_terminal_a_curve_grows() -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    with Progress("arithmetic", 25, console=console) as progress:
        for reward in (0.0, 0.5, 1.0):
            progress(STEP | {"reward_mean": reward})
    assert "▁▅█" in console.file.getvalue()


@pytest.mark.parametrize(("values", "drawn"), [([], ""), ([2.0], "▁"), ([1, 1, 1], "▁▁▁"), ([0, 1], "▁█")])
def test_sparklines_of_little_data(values: list[float], drawn: str) -> None:
    assert sparkline(values) == drawn


def test_a_sparkline_shows_the_newest_values() -> None:
    assert sparkline([9.0] * 100 + [0.0], width=2) == "█▁"


def test_rows_of_preference_training_are_one_line_each() -> None:
    step = {"kind": "preference_step", "step": 3, "loss": 0.65, "accuracy": 0.75, "margin": 0.1, "tokens_per_s": 580.2}
    step |= {"step_s": 2.94, "dropped": 1, "unusable": 0}
    held_out = {"kind": "preference_evaluation", "step": 0, "accuracy": 0.5, "accuracy_ci": 0.0, "loss": 0.693, "pairs": 60}
    console = Console(file=io.StringIO(), width=40)
    with Progress("pairs", 25, console=console) as progress:
        progress({"kind": "preference_reference", "step": 0, "answers": 24, "reference_s": 1.26})
        progress(held_out)
        progress(step)
    assert console.file.getvalue().splitlines() == [
        "pairs: reference logprobs of 24 answers in 1.3 s",
        "pairs: held-out accuracy 0.500 ±0.000, loss 0.693 after 0 steps (60 pairs)",
        "pairs: step  3/25  loss 0.650  accuracy 0.750  margin 0.100  580 tok/s  2.9 s  1 pairs too long",
    ]
