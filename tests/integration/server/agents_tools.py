"""Several agents on one real server, for tests: a short game, a job whose agents play it, and the server."""

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from server_tools import Server, serving

from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig
from opentinker.config.server import LoraConfig
from opentinker.environments.gomoku.board import board_text
from opentinker.environments.gomoku_duel import GomokuDuel

LORA = LoraConfig(rank=4)


class Terse(GomokuDuel):
    """On 3 x 3 cells, in few words."""

    def __init__(self, **rules: Any) -> None:
        super().__init__(size=3, win_length=3, **rules)

    def _introduction(self, seat: Any) -> str:
        return f"You are {seat.label}."

    def _position(self) -> str:
        assert self._game is not None
        return board_text(self._game.board)


def job_of(agents: Any, training: dict[str, Any], **sections: Any) -> RLJobConfig:
    """A job of these agents, with adapters as `agents_server` has them. What is given counts in place of what is here."""
    fields = {
        "base_model": "unused",
        "lora": LORA.model_dump(),
        "environment": {"name": "unused"},
        "agents": agents,
        "engine": {"max_model_len": 512},
        "algorithm": {"group_size": 4},
        "sampling": {"max_tokens": 3},
        "rollout": {"groups_per_step": 2, "max_turns": 6},
        "evaluation": {"at_start": False, "at_end": False},
        "training": {"optimizer": {"learning_rate": 1e-2}, **training},
    }
    return parse_config(RLJobConfig, fields | sections)


def agents_server(
    model_dir: Path, root: Path, max_adapters: int, max_model_len: int = 512, **options: Any
) -> AbstractAsyncContextManager[Server]:
    """A server that serves so many adapters at a time."""
    return serving(
        model_dir,
        root,
        lora=LORA,
        lora_serving="adapter",
        max_adapters=max_adapters,
        max_model_len=max_model_len,
        **options,
    )
