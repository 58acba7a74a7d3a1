"""Lets the tests here import their helpers, and gives them sandboxes that end with the test."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from opentinker.environments.sandbox import PythonSandbox, Walls, usable_walls
from opentinker.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module", params=["namespaces", "bubblewrap"])
def walls(request: pytest.FixtureRequest) -> Walls:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    try:
        return usable_walls(request.param)
    except ConfigError as error:
        pytest.skip(f"this kernel gives us no namespaces: {error.detail}")


@pytest.fixture
def walled(walls: Walls) -> Iterator[PythonSandbox]:
    """By either kind of walls: for what they keep out."""
    with PythonSandbox(walls) as sandbox:
        yield sandbox


@pytest.fixture
def sandbox() -> Iterator[PythonSandbox]:
    """For what the interpreter does, which is the same within all walls."""
    try:
        usable_walls()
    except ConfigError as error:
        pytest.skip(f"this kernel gives us no namespaces: {error.detail}")
    with PythonSandbox() as sandbox:
        yield sandbox
