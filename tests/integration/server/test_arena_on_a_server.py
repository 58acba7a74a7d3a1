"""On one real server: two agents, one of which has a critic, meet each other as they were and reference players."""

from pathlib import Path
from typing import Any

import pytest
from server_tools import serving
from trainer_tools import assert_same, weights

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.server import LoraConfig
from opentinker.env.load import load_environment
from opentinker.environments.gomoku.board import board_text
from opentinker.environments.gomoku_duel import GomokuDuel
from opentinker.training.agents import AgentsLoop
from opentinker.training.recorder import Recorder

LORA = LoraConfig(rank=4)


class Terse(GomokuDuel):
    """On 3 x 3 cells, in few words."""

    def __init__(self) -> None:
        super().__init__(size=3, win_length=3)

    def _introduction(self, seat: Any) -> str:
        return f"You are {seat.label}."

    def _position(self) -> str:
        assert self._game is not None
        return board_text(self._game.board)


async def test_agents_meet_as_they_were_and_one_has_a_critic_of_its_own(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = parse_config(
        RLJobConfig,
        {
            "base_model": "unused",
            "lora": LORA.model_dump(),
            "environment": {"name": "unused"},
            "agents": {"black": {}, "white": {"algorithm": {"kind": "ppo", "group_size": 4, "critic": {"rank": 2}}}},
            "arena": {"past": 1, "tasks": 1, "samples": 1, "references": ["random"]},
            "engine": {"max_model_len": 512},
            "algorithm": {"group_size": 4},
            "sampling": {"max_tokens": 3},
            "rollout": {"groups_per_step": 2, "max_turns": 6},
            "evaluation": {"at_start": False, "at_end": False},
            "training": {"steps": 1, "optimizer": {"learning_rate": 1e-2}},
        },
    )
    room = config.engine.max_adapters
    async with serving(
        tiny_model_dir, tmp_path / "checkpoints", lora=LORA, lora_serving="adapter", max_adapters=room, max_model_len=512
    ) as server:
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
