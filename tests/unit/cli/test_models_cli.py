"""`opentinker models`, against a scheduler's real HTTP API."""

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.cli.main import app
from opentinker.cli.models import count


def test_models_are_listed_by_name(live: Any) -> None:
    arguments = ["--state-dir", str(live.folder)]
    assert "smollm2-135m" in CliRunner().invoke(app, ["models", *arguments]).stdout
    (row,) = [json.loads(line) for line in CliRunner().invoke(app, ["models", "--json", *arguments]).stdout.splitlines()]
    assert (row["name"], row["source"]) == ("smollm2-135m", "built-in")


@pytest.mark.parametrize(("parameters", "text"), [(None, "-"), (12, "12"), (134_515_008, "135 M"), (7_600_000_000, "7.6 B")])
def test_numbers_of_parameters_are_for_people(parameters: int | None, text: str) -> None:
    assert count(parameters) == text
