"""On one real server: two agents, one of which has a critic, meet each other as they were and reference players."""

from pathlib import Path

import pytest
from agents_tools import LORA, Terse, agents_server, job_of
from trainer_tools import assert_same, weights

from opentinker.env.load import load_environment
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder


async def test_agents_meet_as_they_were_and_one_has_a_critic_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = job_of(
        {"black": {}, "white": {"algorithm": {"kind": "ppo", "group_size": 4, "critic": {"rank": 2}}}},
        {"steps": 1},
        arena={"past": 1, "tasks": 1, "samples": 1, "references": ["random"]},
    )
    async with agents_server(tiny_model_dir, tmp_path / "checkpoints", config.engine.max_adapters) as server:
        recorder = Recorder(tmp_path / "run", config.model_dump(mode="json"))
        loop = await AgentsLoop.connect(config, load_environment(Terse), server.client, recorder)
        first = weights(server.parts.trainer, "white")
        await loop.run(1)
        step = next(row["agents"] for row in recorder.rows if row["kind"] == "agents_step")
        assert step["white"]["value_loss"] is not None
        assert step["black"]["value_loss"] is None
        begin, end = (row for row in recorder.rows if row["kind"] == "cross_play")
        assert set(begin["matrix"]["black@0"]) == {"white@0", "random"}
        assert set(end["matrix"]["black@1"]) == {"white@1", "black@0", "white@0", "random"}
        assert all(cell["games"] == 2 for row in end["matrix"].values() for cell in row.values()), "in both seats"
        assert (recorder.folder / "cross_play.svg").is_file()
        # The place of past versions is free again, and what is loaded there is what was saved.
        slot = await server.client.create_policy(LORA, name="slot")
        await slot.load_weights("arena-000000", policy="white")
        assert_same(weights(server.parts.trainer, "slot"), first)
        with pytest.raises(AssertionError):
            assert_same(weights(server.parts.trainer, "white"), first)
