"""Servers that end with the test."""

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hosting_tools import Hosted, Serve, hosted

from opentinker.env.environment import Environment


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Starts servers that end with the test, and looks that their processes do."""
    async with AsyncExitStack() as stack:

        async def start(environment: type[Environment], **settings: Any) -> Hosted:
            return await stack.enter_async_context(hosted(environment, **settings))

        yield start
