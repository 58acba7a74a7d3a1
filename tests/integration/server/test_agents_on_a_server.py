"""Two agents on one real server: both learn from their games, and one that is frozen stays as it began."""

from pathlib import Path

import pytest
from agents_tools import Terse, agents_server, job_of
from trainer_tools import assert_same, weights

from opentinker.env.load import load_environment
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder


@pytest.mark.parametrize("frozen", [False, True])
async def test_two_agents_learn_from_their_games_and_a_frozen_one_does_not(
    tiny_model_dir: Path, tmp_path: Path, frozen: bool
) -> None:
    evaluation = {"max_tasks": 2, "samples_per_task": 2}
    config = job_of({"black": {}, "white": {"frozen": frozen}}, {"steps": 2, "save_every": 1}, evaluation=evaluation)
    async with agents_server(tiny_model_dir, tmp_path / "checkpoints", max_adapters=2) as server:
        recorder = Recorder(tmp_path / "run", config.model_dump(mode="json"))
        loop = await AgentsLoop.connect(config, load_environment(Terse), server.client, recorder)
        own, other = weights(server.parts.trainer, "p"), weights(server.parts.trainer, "white")
        await loop.run(2)
        steps = [row["agents"] for row in recorder.rows if row["kind"] == "agents_step"]
        assert [sorted(step) for step in steps] == [["black"] if frozen else ["black", "white"]] * 2
        for agents in steps:
            for row in agents.values():
                assert row["mismatch_kl_mean"] == pytest.approx(0.0, abs=1e-4), "the trainer sees what the engine saw"
            if not frozen:
                assert agents["black"]["reward_mean"] == pytest.approx(-agents["white"]["reward_mean"])
        with pytest.raises(AssertionError):
            assert_same(weights(server.parts.trainer, "p"), own)
        if frozen:
            assert_same(weights(server.parts.trainer, "white"), other)
        else:
            with pytest.raises(AssertionError):
                assert_same(weights(server.parts.trainer, "white"), other)
