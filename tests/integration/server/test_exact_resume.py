"""A run that is killed with SIGKILL, server and driver alike, and goes on, ends with the parameters of one that was not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scenarios"))

import exact_resume


def test_a_run_that_is_killed_and_resumed_has_the_parameters_of_one_that_was_not(tmp_path: Path) -> None:
    exact_resume.prepare(tmp_path)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    uninterrupted = exact_resume.start(tmp_path, "lora", whole, 6, resume=False)
    interrupted = exact_resume.start(tmp_path, "lora", cut, 6, resume=False)
    # After the third step and its evaluation: the last checkpoint is of step 2, and what came since has to come again.
    exact_resume.kill_after(interrupted, cut, 4, 0.0)
    exact_resume.finish(uninterrupted, whole)
    exact_resume.finish(exact_resume.start(tmp_path, "lora", cut, 6, resume=True), cut)
    assert exact_resume.difference(whole, cut) == 0.0
    periodic = [path.name for path in (cut / "checkpoints").glob("step-*")]
    assert periodic == ["step-000006@6"], "keep_last keeps the newest, under the version that it would have had anyway"
