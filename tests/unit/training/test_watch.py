"""The end of learning and its collapse are seen in the rows; a run is saved before anything is done about it."""

import itertools
import json
import random
import statistics
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opentinker.config.rl import EvaluationConfig, StopConfig
from opentinker.env.environment import Environment
from opentinker.errors import ConfigError
from opentinker.training.recorder import Recorder
from opentinker.training.rl import RLLoop
from opentinker.training.watch import Watch


def evaluation(value: float) -> dict[str, Any]:
    return {"kind": "evaluation", "step": 0, "reward_mean": value, "env": {"exact": value}, "pass_at": {"4": value}}


def step(reward: float | None) -> dict[str, Any]:
    return {"kind": "step", "step": 0, "reward_mean": reward}


scores = st.lists(st.integers(0, 10).map(lambda n: n / 10), max_size=25)


@given(values=scores, plateau=st.integers(1, 4))
def test_a_plateau_is_as_many_evaluations_without_a_new_best(values: list[float], plateau: int) -> None:
    watch = Watch(StopConfig(plateau=plateau), "exact")
    for i, value in enumerate(values):
        best = max(range(i + 1), key=lambda j: (values[j], -j))
        assert watch.improves(evaluation(value)) == (best == i)
        verdict = watch.row(evaluation(value))
        assert (verdict is not None) == (i - best >= plateau)
        assert verdict is None or verdict.final


@given(values=scores, falls=st.integers(1, 4))
def test_falls_are_in_a_row_and_are_told_once(values: list[float], falls: int) -> None:
    watch = Watch(StopConfig(falls=falls), "reward")
    told = [i for i, value in enumerate(values) if watch.row(evaluation(value))]
    fallen, expected = 0, []
    for i in range(1, len(values)):
        fallen = fallen + 1 if values[i] < values[i - 1] else 0
        if fallen == falls:
            expected.append(i)
            fallen = 0
    assert told == expected


def windows(rewards: list[float | None], size: int) -> list[list[float]]:
    """The full windows of what was earned."""
    earned = [reward for reward in rewards if reward is not None]
    return [earned[i : i + size] for i in range(0, len(earned) - size + 1, size)]


def noise(window: list[float]) -> float:
    """The variance of its mean."""
    return statistics.variance(window) / len(window)


earnings = st.lists(st.none() | st.integers(0, 100).map(lambda n: n / 100), max_size=60)


@given(rewards=earnings, falls=st.integers(1, 3), size=st.integers(2, 5))
def test_windows_of_training_fall_by_more_than_their_noise(rewards: list[float | None], falls: int, size: int) -> None:
    watch = Watch(StopConfig(falls=falls, score="training", window=size), "exact")
    verdicts = [verdict for reward in rewards if (verdict := watch.row(step(reward)))]
    expected, fallen = [], 0
    for before, after in itertools.pairwise(windows(rewards, size)):
        drop = statistics.fmean(before) - statistics.fmean(after)
        fallen = fallen + 1 if drop > (noise(before) + noise(after)) ** 0.5 else 0
        if fallen == falls:
            fallen = 0
            mean = statistics.fmean(after)
            counted = "1 window" if falls == 1 else f"{falls} windows"
            expected.append(f"the training reward has fallen {counted} of {size} steps in a row, to {mean:.3f}")
    assert [verdict.reason for verdict in verdicts] == expected
    assert not any(verdict.final for verdict in verdicts)


@given(rewards=earnings, plateau=st.integers(1, 3), size=st.integers(2, 5))
def test_a_plateau_of_training_is_as_many_windows_without_a_new_best(
    rewards: list[float | None], plateau: int, size: int
) -> None:
    watch = Watch(StopConfig(plateau=plateau, score="training", window=size), "exact")
    told = sum(watch.row(step(reward)) is not None for reward in rewards)
    means = [statistics.fmean(window) for window in windows(rewards, size)]
    best = [max(range(i + 1), key=lambda j, i=i: (means[j], -j)) for i in range(len(means))]
    assert told == sum(i - first >= plateau for i, first in enumerate(best))


@given(rewards=earnings, values=scores, cut=st.integers(0, 60), field=st.sampled_from(["plateau", "falls"]))
def test_a_watch_goes_on_from_its_state_as_if_nothing_had_happened(
    rewards: list[float | None], values: list[float], cut: int, field: str
) -> None:
    config = StopConfig(**{field: 2}, score="training", window=3)
    rows = [step(reward) for reward in rewards]
    for i, value in enumerate(values):
        rows.insert(2 * i, evaluation(value))
    whole, first = Watch(config, "exact"), Watch(config, "exact")
    seen = [whole.row(row) for row in rows]
    assert [first.row(row) for row in rows[:cut]] == seen[:cut]
    saved = json.loads(json.dumps(first.state()))
    for row in rows[cut:]:
        first.row(row)  # what comes after a checkpoint does not reach its state
    again = Watch(config, "exact")
    again.restore(saved)
    assert [again.row(row) for row in rows[cut:]] == seen[cut:]
    assert again.best == whole.best == max(values, default=None)


def test_evaluations_say_which_checkpoint_is_best_and_nothing_of_the_end_where_training_does() -> None:
    watch = Watch(StopConfig(falls=1, plateau=1, score="training", window=2), "exact")
    assert not watch.needs_score
    assert [(watch.improves(evaluation(v)), watch.row(evaluation(v))) for v in (0.5, 0.2, 0.6)] == [
        (True, None),
        (False, None),
        (True, None),
    ]


def test_noise_alone_is_no_collapse() -> None:
    rng = random.Random(0)
    watch = Watch(StopConfig(falls=3, score="training"), "reward")
    assert not [1 for _ in range(20_000) if watch.row(step(rng.gauss(0.5, 0.1)))]
    verdicts = [watch.row(step(rng.gauss(0.5 - 0.02 * i, 0.1))) for i in range(50)]
    assert any(verdicts), "2 of the noise per window of 10"


def test_of_two_reasons_at_one_step_the_one_that_ends_the_run_counts() -> None:
    watch = Watch(StopConfig(plateau=1, score="training", window=2, max_grad_norm=1.0), "reward")
    found = [watch.row({**step(0.5), "grad_norm": norm}) for norm in (0.5, 2.0, 0.5, 2.0)]
    assert [verdict and verdict.final for verdict in found] == [None, False, None, True]


def test_limits_of_a_step_are_named() -> None:
    watch = Watch(StopConfig(max_grad_norm=10.0, max_mismatch_kl=0.1, max_reference_kl=1.0), "exact")
    row = {**step(0.5), "step": 7, "grad_norm": 5.0, "mismatch_kl_mean": None, "reference_kl_mean": 0.5}
    assert watch.row(row) is None
    verdict = watch.row({**row, "grad_norm": 11.0})
    assert verdict is not None
    assert verdict.reason == "grad_norm is 11 at step 7, above its limit 10"


class Sinking(Environment):
    """Every episode earns less than the one before, whatever is said: 10 of a step and 5 of an evaluation on average."""

    played = 0

    @classmethod
    def held_out_tasks(cls) -> list[int]:
        return [0]

    def reset(self, task: Any) -> str:
        return "?"

    def step(self, action: Any) -> Any:
        from opentinker.env.environment import StepResult

        type(self).played += 1
        return StepResult(-float(self.played), done=True)


async def run(policy: Any, config: Any, recorder: Recorder, steps: int = 12) -> dict[str, Any]:
    Sinking.played = 0
    await (await RLLoop.connect(config, Sinking, policy, recorder)).run(steps)
    return recorder.finish(wall_s=1.0, checkpoint=None)


async def test_a_run_that_falls_is_saved_and_ends(policy, make_config, recorder) -> None:
    config = make_config(
        evaluation={"every": 1, "metric": "reward"}, training={"stop": {"falls": 3}, "optimizer": {"learning_rate": 0.1}}
    )
    summary = await run(policy, config, recorder)
    assert "reward has fallen 3 evaluations in a row" in summary["stopped"]
    assert summary["steps"] == 3
    assert policy.calls[-1] == "save stopped-early"
    assert [r["step"] for r in recorder.rows if r["kind"] == "evaluation"] == [0, 1, 2, 3]


async def test_or_it_learns_more_slowly_and_stops_at_the_third_time(policy, make_config, recorder) -> None:
    config = make_config(
        evaluation={"every": 1, "metric": "reward"},
        training={"stop": {"falls": 2, "action": "reduce", "factor": 0.5}, "optimizer": {"learning_rate": 0.1}},
    )
    summary = await run(policy, config, recorder)
    assert [o.learning_rate for o in policy.optimizers] == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    assert [r["action"] for r in recorder.rows if r["kind"] == "stopping"] == ["learning rate x 0.5"] * 2 + ["stopped"]
    assert summary["stopped"]


async def test_a_run_without_held_out_tasks_stops_by_its_training(policy, make_config, recorder, tmp_path) -> None:
    stop = {"falls": 3, "score": "training", "window": 2}
    config = make_config(training={"stop": stop, "save_every": 3, "optimizer": {"learning_rate": 0.1}})
    summary = await run(policy, config, recorder)
    assert summary["stopped"].startswith("the training reward has fallen 3 windows of 2 steps in a row, to -")
    assert summary["steps"] == 8
    assert policy.calls[-1] == "save stopped-early"
    assert f"after step 8: {summary['stopped']}: stopped" in (recorder.folder / "report.html").read_text()

    again = Recorder(tmp_path / "again", config.model_dump(mode="json"))
    loop = await RLLoop.connect(config, Sinking, policy, again)
    await loop.resume(3)  # in the midst of a window
    await loop.run(9)
    assert loop.steps_done == 8


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"training": {"stop": {"falls": 3}}},
            r"falls counts evaluations, and .* no held-out tasks .set training.stop.score to",
        ),
        ({"evaluation": {"keep_best": True}}, r"keep_best saves the best of the evaluations, and there are no held-out tasks"),
    ],
)
async def test_what_goes_by_evaluations_needs_held_out_tasks(policy, make_config, recorder, changes, match) -> None:
    class Unheld(Sinking):
        @classmethod
        def held_out_tasks(cls) -> list[int]:
            return []

    evaluation = {"every": 1, "at_start": False, **changes.get("evaluation", {})}
    config = make_config(evaluation=evaluation, training=changes.get("training", {}))
    with pytest.raises(ConfigError, match=match):
        await (await RLLoop.connect(config, Unheld, policy, recorder)).run(1)
    assert not recorder.rows, "before anything is played"


async def test_the_best_checkpoint_is_that_of_the_best_evaluation(policy, seven, make_config, recorder) -> None:
    config = make_config(evaluation={"every": 1, "keep_best": True})
    await (await RLLoop.connect(config, seven, policy, recorder)).run(6)
    rows = [r for r in recorder.rows if r["kind"] == "evaluation"]
    risen = sum(r["exact"] > max([e["exact"] for e in rows[:i]], default=-1) for i, r in enumerate(rows))
    assert policy.calls.count("save best") == risen >= 2


async def test_a_metric_that_nobody_reports_is_named_at_the_first_evaluation(policy, seven, make_config, recorder) -> None:
    config = make_config(evaluation={"metric": "won", "keep_best": True})
    with pytest.raises(ConfigError, match=r"no held-out episode reports 'won' \(there are reward, exact\)"):
        await (await RLLoop.connect(config, seven, policy, recorder)).run(1)


async def test_without_exact_answers_the_reward_is_what_counts(policy, make_config, recorder) -> None:
    config = make_config(evaluation={"every": 1}, training={"stop": {"falls": 2}, "optimizer": {"learning_rate": 0.1}})
    assert "the held-out score has fallen 2 evaluations in a row" in (await run(policy, config, recorder))["stopped"]


def test_a_limit_on_what_is_not_measured_is_refused(make_config) -> None:
    from opentinker.config.job import parse_job

    fields = make_config(training={"stop": {"max_reference_kl": 1.0}, "steps": 1}, algorithm={"kl": {"coefficient": 0.1}})
    assert fields.training.stop.max_reference_kl == 1.0
    with pytest.raises(ConfigError, match="max_reference_kl needs"):
        parse_job({**fields.model_dump(mode="json"), "algorithm": {}})
    parse_job({**fields.model_dump(mode="json"), "algorithm": {"kl": {"measure": True}}})


@pytest.mark.parametrize("stop", [{"plateau": 3}, {"falls": 3}])
def test_a_stop_that_counts_evaluations_needs_some_between_steps(make_config, stop: dict[str, int]) -> None:
    from opentinker.config.job import parse_job

    fields = make_config().model_dump(mode="json") | {"training": {"stop": stop}}
    with pytest.raises(ConfigError, match=rf"training.stop.{next(iter(stop))} counts evaluations.*evaluation.every.*score to"):
        parse_job(fields)
    assert parse_job(fields | {"training": {"stop": stop | {"score": "training"}}})
    assert parse_job(fields | {"evaluation": {"every": 5}})


def test_metrics_that_will_not_be_there_are_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 in pass_at"):
        EvaluationConfig(metric="pass@4")
    with pytest.raises(ValueError, match="needs samples_per_task of at least that"):
        EvaluationConfig(pass_at=(16,), samples_per_task=8)
    assert EvaluationConfig(metric="pass@4", pass_at=(4,)).metric == "pass@4"


def test_a_score_that_nothing_counts_is_refused() -> None:
    with pytest.raises(ValueError, match="score 'training' is what plateau and falls count"):
        StopConfig(score="training", max_grad_norm=1.0)
    with pytest.raises(ValueError, match="greater than or equal to 2"):
        StopConfig(falls=3, score="training", window=1)
