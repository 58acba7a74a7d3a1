import json
from typing import Any

import numpy as np
import pytest

from opentinker.client.messages import AdamParams
from opentinker.config.rl import RLTrainingConfig
from opentinker.env.environment import Environment, StepResult
from opentinker.errors import ConfigError, EpisodesFailedError, UnavailableError
from opentinker.images import Image
from opentinker.training.loop import FRUITLESS_STEPS
from opentinker.training.rl import RLLoop, scheduled


async def test_the_reward_rises_and_the_held_out_score_with_it(policy, seven, make_config, recorder) -> None:
    loop = await RLLoop.connect(make_config(), seven, policy, recorder)
    await loop.run(15)
    summary = recorder.finish(wall_s=1.0, checkpoint=None)
    assert summary["exact_before"] < 0.35
    assert summary["exact_after"] > 0.8
    assert summary["reward_after"] == summary["exact_after"]
    assert summary["steps"] == 15
    assert np.argmax(policy.logits) == 7


async def test_with_learning_rate_zero_nothing_is_learnt(policy, seven, make_config, recorder) -> None:
    config = make_config(training={"optimizer": {"learning_rate": 0.0}})
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.run(5)
    summary = recorder.finish(wall_s=1.0, checkpoint=None)
    assert abs(summary["exact_after"] - summary["exact_before"]) <= 2 * summary["exact_ci"]


async def test_a_run_repeats_from_its_seed(policy, seven, make_config, recorder, tmp_path) -> None:
    from opentinker.training.recorder import Recorder

    rewards = []
    for name in ("a", "b"):
        policy.logits = np.zeros(10)
        again = Recorder(tmp_path / name, make_config().model_dump(mode="json"))
        await (await RLLoop.connect(make_config(), seven, policy, again)).run(3)
        rewards.append([r["reward_mean"] for r in again.rows])
    assert rewards[0] == rewards[1]


async def test_run_continues_where_the_last_one_ended(policy, seven, make_config, recorder) -> None:
    loop = await RLLoop.connect(make_config(), seven, policy, recorder)
    await loop.run(2)
    await loop.run(3)
    assert [r["step"] for r in recorder.rows if r["kind"] == "step"] == [1, 2, 3, 4, 5]
    assert [r["step"] for r in recorder.rows if r["kind"] == "evaluation"] == [0, 2, 5]


async def test_evaluations_come_as_configured_and_never_twice_for_one_policy(policy, seven, make_config, recorder) -> None:
    config = make_config(evaluation={"every": 2, "at_start": False, "samples_per_task": 2})
    await (await RLLoop.connect(config, seven, policy, recorder)).run(4)
    assert [r["step"] for r in recorder.rows if r["kind"] == "evaluation"] == [2, 4]


async def test_losses_are_means_over_the_tokens_of_each_minibatch(policy, seven, make_config, recorder) -> None:
    config = make_config(algorithm={"group_size": 8, "minibatches": 2, "epochs": 2})
    await (await RLLoop.connect(config, seven, policy, recorder)).step()
    data, minibatches = policy.batches[0]
    assert len(minibatches) == 4
    assert minibatches[:2] == minibatches[2:]
    assert sorted(i for m in minibatches[:2] for i in m.indices) == list(range(len(data)))
    for minibatch in minibatches:
        assert minibatch.factor == pytest.approx(1 / sum(data[i].weights.sum() for i in minibatch.indices))


async def test_groups_without_variance_are_counted_and_a_step_of_only_those_skips_the_update(
    policy, seven, make_config, recorder
) -> None:
    policy.logits[7] = 50.0
    row = await (await RLLoop.connect(make_config(), seven, policy, recorder)).step()
    assert row["zero_variance_groups"] == 8
    assert row["tokens_trained"] == 0
    assert row["version"] is None
    assert "train_step" not in policy.calls
    assert policy.version == 0


async def test_the_row_of_a_step_has_what_it_promises(policy, seven, make_config, recorder) -> None:
    row = await (await RLLoop.connect(make_config(), seven, policy, recorder)).step()
    assert row["episodes"] == 64
    assert row["terminations"] == {"done": 64}
    assert row["tokens_sampled"] == 128
    assert row["version"] == 1
    assert row["mismatch_kl_mean"] == pytest.approx(0.001)
    assert row["exact"] == row["env"]["exact"] == row["reward_mean"]
    assert row["rollout_s"] + row["train_s"] + row["publish_s"] == pytest.approx(row["step_s"], abs=0.01)
    written = json.loads((recorder.folder / "metrics.jsonl").read_text())
    assert {k: v for k, v in written.items() if k != "at"} == row


async def test_failed_episodes_never_train_and_are_counted_by_reason(policy, seven, make_config, recorder) -> None:
    class Flaky(seven):
        def step(self, action: Any) -> StepResult:
            if action.text == "3":
                raise RuntimeError("three is not allowed")
            return super().step(action)

    config = make_config(rollout={"groups_per_step": 8, "max_turns": 1, "member_retries": 0})
    row = await (await RLLoop.connect(config, Flaky, policy, recorder)).step()
    assert row["errors"] == row["dropped"] == row["terminations"]["error_env"] > 0
    assert row["terminations"]["done"] == row["episodes"] == 64 - row["errors"]
    data, _ = policy.batches[0]
    assert not any(policy.digits[3] in d.targets[d.weights > 0] for d in data)
    transcripts = (recorder.folder / "transcripts.jsonl").read_text()
    assert "three is not allowed" in transcripts


async def test_an_environment_that_always_fails_ends_the_run_with_its_cause(policy, seven, make_config, recorder) -> None:
    class Broken(seven):
        def step(self, action: Any) -> StepResult:
            raise RuntimeError("no such file: answers.txt")

    config = make_config(evaluation={"at_start": False})
    loop = await RLLoop.connect(config, Broken, policy, recorder)
    with pytest.raises(EpisodesFailedError, match=r"no such file: answers\.txt"):
        await loop.run(10)
    assert loop.steps_done == FRUITLESS_STEPS - 1
    assert "train_step" not in policy.calls


async def test_a_server_that_is_gone_is_reported_as_such(policy, seven, make_config, recorder) -> None:
    config = make_config(rollout={"groups_per_step": 2, "generation_retries": 0, "member_retries": 0})
    loop = await RLLoop.connect(config, seven, policy, recorder)
    policy.broken = UnavailableError("connection refused")
    with pytest.raises(UnavailableError, match="connection refused"):
        await loop.run(10)


async def test_prompts_that_never_fit_end_the_run_with_their_length(policy, seven, make_config, recorder) -> None:
    class Long(seven):
        def reset(self, task: Any) -> str:
            return "7 " * 2000

    for evaluation in ({"at_start": False}, {"at_start": True}):
        loop = await RLLoop.connect(make_config(evaluation=evaluation), Long, policy, recorder)
        with pytest.raises(EpisodesFailedError, match=r"truncated_context: the context has \d+ tokens, .*max_model_len = \d+"):
            await loop.run(10)
    assert sum(row["kind"] == "step" for row in recorder.rows) < FRUITLESS_STEPS


async def test_checkpoints_come_as_configured(policy, seven, make_config, recorder) -> None:
    config = make_config(training={"save_every": 2}, evaluation={"at_start": False, "at_end": False})
    await (await RLLoop.connect(config, seven, policy, recorder)).run(4)
    assert [c for c in policy.calls if c.startswith("save")] == ["save step-000002", "save step-000004"]


async def test_a_run_that_is_cut_off_resumes_as_if_nothing_had_happened(policy, seven, make_config, tmp_path) -> None:
    from opentinker.training.recorder import Recorder, standing_rows

    config = make_config(training={"save_every": 2, "optimizer": {"learning_rate": 0.5}}, evaluation={"every": 2})
    whole = Recorder(tmp_path / "whole", config.model_dump(mode="json"))
    await (await RLLoop.connect(config, seven, policy, whole)).run(6)
    policy.logits, policy.saved, cut = np.zeros(10), {}, tmp_path / "cut"
    await (await RLLoop.connect(config, seven, policy, Recorder(cut, config.model_dump(mode="json")))).run(5)
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')  # the driver died within a line
    recorder = Recorder(cut, config.model_dump(mode="json"), resume_at=4)
    loop = await RLLoop.connect(config, seven, policy, recorder)
    await loop.resume(4)
    await loop.run(2)

    def told(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
        return [(row["kind"], row["step"], row["reward_mean"]) for row in rows]

    assert told(recorder.rows) == told(whole.rows)
    on_disk = [json.loads(line) for line in (cut / "metrics.jsonl").read_text().splitlines()]
    assert told(standing_rows(on_disk)) == told(whole.rows)
    assert recorder.finish(wall_s=1.0, checkpoint=None)["steps"] == 6


async def test_an_environment_without_held_out_tasks_is_not_evaluated(policy, seven, make_config, recorder) -> None:
    class NoTasks(seven):
        held_out_tasks = Environment.held_out_tasks

    await (await RLLoop.connect(make_config(), NoTasks, policy, recorder)).run(2)
    summary = recorder.finish(wall_s=1.0, checkpoint=None)
    assert [r["kind"] for r in recorder.rows] == ["step", "step"]
    assert summary["exact_before"] is None
    assert summary["reward_before"] == recorder.rows[0]["reward_mean"]


def test_the_learning_rate_rises_linearly_over_the_warm_up_and_stays() -> None:
    rates = [
        scheduled(RLTrainingConfig(optimizer=AdamParams(learning_rate=1.0), warmup_steps=4), n).learning_rate
        for n in range(1, 7)
    ]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_the_learning_rate_falls_linearly_after_the_warm_up_and_the_last_step_still_learns() -> None:
    training = RLTrainingConfig(steps=5, optimizer=AdamParams(learning_rate=1.0), decay="linear")
    assert [round(scheduled(training, step).learning_rate, 3) for step in range(1, 8)] == [1.0, 0.8, 0.6, 0.4, 0.2, 0.0, 0.0]
    warmed = training.model_copy(update={"warmup_steps": 2})
    assert [round(scheduled(warmed, step).learning_rate, 3) for step in range(1, 6)] == [0.5, 1.0, 0.75, 0.5, 0.25]


async def test_an_environment_that_shows_images_to_a_model_without_eyes_ends_the_run_at_once(
    policy, make_config, recorder
) -> None:
    class Pictures(Environment):
        def reset(self, task: Any) -> Any:
            return Image(b"\x89PNG\r\n\x1a\n")

        def step(self, action: Any) -> StepResult:
            return StepResult(1.0, True)

    loop = await RLLoop.connect(make_config(evaluation={"at_start": False}), Pictures, policy, recorder)
    with pytest.raises(ConfigError, match="Pictures shows images, but the base model takes none"):
        await loop.run(1)
