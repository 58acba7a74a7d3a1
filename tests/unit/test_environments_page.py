"""docs/environments.md is true: its code runs, its configs parse, its commands do what they say."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from opentinker.cli.main import app
from opentinker.config.base import parse_config
from opentinker.config.job import parse_job
from opentinker.config.rollout import EnvironmentConfig
from opentinker.env.checks import CheckOptions, check_environment

PAGE = Path(__file__).parents[2] / "docs" / "environments.md"
BLOCKS = re.findall(r"^```(\w+)(?: (\S+))?\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[Any]:
    found = [pytest.param(text, id=file or text.splitlines()[0][:40]) for kind, file, text in BLOCKS if kind == language]
    assert found
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files, as a reader who copies them would have them."""
    for _, file, text in BLOCKS:
        if file:
            (tmp_path / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {kind for kind, _, _ in BLOCKS} == {"python", "jsonl", "yaml", "bash", "text"}
    assert len(re.findall("^```", PAGE.read_text(), re.MULTILINE)) == 2 * len(BLOCKS)


@pytest.mark.parametrize("text", blocks("python"))
def test_code_runs(folder: Path, text: str) -> None:
    namespace: dict[str, Any] = {"__file__": str(folder / "block.py"), "__name__": "block"}
    exec(compile(text, str(folder / "block.py"), "exec"), namespace)
    for name, value in namespace.items():
        if name.startswith("test_"):
            value()


@pytest.mark.parametrize(
    "name", [f"{file}:{c}" for _, file, text in BLOCKS if file.endswith(".py") for c in re.findall(r"^class (\w+)", text, re.M)]
)
def test_environments_keep_the_contract(folder: Path, name: str) -> None:
    report = check_environment(name, options=CheckOptions(episodes=0, tasks=3), base_dir=folder)
    assert report.ok, str(report)


@pytest.mark.parametrize("text", blocks("yaml"))
def test_configs_parse(text: str) -> None:
    fields = yaml.safe_load(text)
    if "kind" in fields:
        parse_job(fields)
    else:
        parse_config(EnvironmentConfig, fields["environment"])


@pytest.mark.parametrize("line", [line for param in blocks("bash") for line in param.values[0].splitlines()])
def test_commands_work(folder: Path, line: str) -> None:
    words = shlex.split(line, comments=True)
    assert words[0] == "opentinker"
    if words[1:3] == ["env", "check"] and words[3] == "my_game":
        CliRunner().invoke(app, ["env", "new", "my_game"])
        words += ["--episodes", "0"]
    result = CliRunner().invoke(app, words[1:])
    assert result.exit_code == 0, result.output


def test_the_checks_are_those_that_there_are(folder: Path) -> None:
    report = check_environment("doors.py:Doors", options=CheckOptions(episodes=20, tasks=1), base_dir=folder)
    table = PAGE.read_text().partition("| check | the promise |")[2].partition("\n\n")[0]
    named = {name.strip() for row in table.splitlines() if row.startswith("| ") for name in row.split("|")[1].split(",")}
    assert {finding.check for finding in report.findings} - {"loads"} <= named
