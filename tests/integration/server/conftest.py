"""Lets the tests here import their helpers, and serves them a model."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if TYPE_CHECKING:
    from server_tools import Server


@pytest.fixture
async def server(tiny_model_dir: Path, tmp_path: Path) -> "AsyncIterator[Server]":
    from server_tools import serving  # it loads torch

    async with serving(tiny_model_dir, tmp_path) as server:
        yield server
