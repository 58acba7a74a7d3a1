"""What a driver needs to go on is in the checkpoint, whatever has become of the files beside it."""

from pathlib import Path
from typing import Any

import pytest

from opentinker.errors import CheckpointError
from opentinker.training.driver_state import DriverState
from opentinker.training.recorder import Recorder
from opentinker.training.rl import RLLoop
from opentinker.training.schedule import kept


async def test_a_run_goes_on_from_its_checkpoint_alone(policy: Any, seven: Any, make_config: Any, tmp_path: Path) -> None:
    config = make_config(
        training={"save_every": 2, "keep_last": 2, "optimizer": {"learning_rate": 0.5}, "stop": {"plateau": 9}},
        evaluation={"every": 2, "keep_best": True},
    )
    fields = config.model_dump(mode="json")
    loop = await RLLoop.connect(config, seven, policy, Recorder(tmp_path / "whole", fields))
    await loop.run(4)
    state = policy.drivers["step-000004"]
    assert (state["step"], state["config"]) == (4, fields)
    assert policy.kept == {"step-000002": 2, "step-000004": 2, "best": 1}
    lost = Recorder(tmp_path / "lost", fields)  # no row is left
    again = await RLLoop.connect(config, seven, policy, lost)
    await again.resume(4)
    assert again._task_position == loop._task_position == 4 * config.rollout.groups_per_step
    assert again._evaluated_at == 2, "the evaluation of step 4 came after the checkpoint"
    assert again._watch.best == state["watch"]["best"]
    policy.drivers["step-000002"] = state
    for seed, step in ((1, 4), (0, 2)):
        other = make_config(training={"seed": seed})
        resumed = await RLLoop.connect(other, seven, policy, lost)
        with pytest.raises(CheckpointError, match="of step 4 of a run with seed 0"):
            await resumed.resume(step)


def test_a_state_reads_back_and_nothing_else_does() -> None:
    state = DriverState(step=3, seed=5, task_position=24, rows=4, evaluated_at=2, watch={"best": 0.5})
    assert DriverState.from_json(state.to_json(), 3, 5) == state
    assert DriverState.from_json(None, 3, 5) is None
    for damage in ({"format": 2}, {"rows": None, "step": 4}):
        with pytest.raises(CheckpointError):
            DriverState.from_json({**state.to_json(), **damage}, 3, 5)
    with pytest.raises(CheckpointError, match="cannot be read"):
        DriverState.from_json({"step": 3}, 3, 5)


def test_only_periodic_checkpoints_and_the_best_are_replaced_by_later_ones(make_config: Any) -> None:
    training = make_config(training={"keep_last": 3}).training
    assert [kept(training, name) for name in ("step-000010", "best", "final", "stopped-early")] == [3, 1, None, None]
    assert kept(make_config().training, "step-000010") is None
