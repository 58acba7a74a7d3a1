"""Two agents on one real server: both learn from their games, and one that is frozen stays as it began."""

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


def job(agents: Any, steps: int) -> RLJobConfig:
    return parse_config(
        RLJobConfig,
        {
            "base_model": "unused",
            "lora": LORA.model_dump(),
            "environment": {"name": "unused"},
            "agents": agents,
            "engine": {"max_model_len": 512},
            "algorithm": {"group_size": 4},
            "sampling": {"max_tokens": 3},
            "rollout": {"groups_per_step": 2, "max_turns": 6},
            "evaluation": {"max_tasks": 2, "samples_per_task": 2},
            "training": {"steps": steps, "optimizer": {"learning_rate": 1e-2}, "save_every": 1},
        },
    )


@pytest.mark.parametrize("frozen", [False, True])
async def test_two_agents_learn_from_their_games_and_a_frozen_one_does_not(
    tiny_model_dir: Path, tmp_path: Path, frozen: bool
) -> None:
    async with serving(
        tiny_model_dir, tmp_path / "checkpoints", lora=LORA, lora_serving="adapter", max_adapters=2, max_model_len=512
    ) as server:
        config = job({"black": {}, "white": {"frozen": frozen}}, steps=2)
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
