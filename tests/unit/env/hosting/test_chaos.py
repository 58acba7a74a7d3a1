"""A small run of the scenario in tests/scenarios/env_chaos.py."""

import importlib.util
import sys
from pathlib import Path

import pytest


def test_episodes_whose_environment_fails_hangs_or_is_killed_are_replaced_once_and_nothing_is_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = Path(__file__).parents[3] / "scenarios" / "env_chaos.py"
    spec = importlib.util.spec_from_file_location("env_chaos", path)
    assert spec is not None
    assert spec.loader is not None
    scenario = importlib.util.module_from_spec(spec)
    sys.modules["env_chaos"] = scenario
    spec.loader.exec_module(scenario)
    small = "--sessions 40 --workers 2 --turns 3 --generation 0.3 --kill-every 0.7 --step-timeout 1.5 --hanging 0.03"
    assert scenario.chaos(scenario.parser().parse_args(small.split())) == [], capsys.readouterr().out
