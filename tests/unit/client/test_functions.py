"""Functions that a config names reach the driver wherever it runs, or are refused before anything waits in a queue."""

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from opentinker.algorithms.select import advantage_function
from opentinker.cli.train import _checked_rl
from opentinker.client.submission import prepare, read_job
from opentinker.config.job import RLJobConfig
from opentinker.env.load import load_function
from opentinker.errors import ConfigError, EnvironmentLoadError
from opentinker.training.arena import reference_players
from opentinker.training.run import checked_environment

OWN = """
import opentinker as ot

class E(ot.Environment):
    def reset(self, task): return "?"
    def step(self, action): return ot.StepResult(done=True)
"""
ADAPTED = """
from opentinker.env.adapters.gymnasium import environment_class

class Lake(environment_class("FrozenLake-v1")):
    pass
"""
DUEL = """
from opentinker.environments.gomoku_duel import GomokuDuel

class Duel(GomokuDuel):
    pass
"""
CODEC = """
from opentinker.env.adapters.codecs import SpaceCodec

class Mine(SpaceCodec):
    def __init__(self, env):
        super().__init__(env, ())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project, seen from elsewhere."""
    project = tmp_path / "project"
    (project / "envs").mkdir(parents=True)
    (project / "envs" / "e.py").write_text(OWN)
    (project / "envs" / "adapted.py").write_text(ADAPTED)
    for place in (project, project / "envs"):
        (place / "adv.py").write_text("def f(groups):\n    return [[e * 3 for e in g] for g in groups]\n")
        (place / "codecs_of_mine.py").write_text(CODEC)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return project


def config(folder: Path, environment: str, function: str = "", **args: Any) -> Path:
    fields: dict[str, Any] = {"base_model": "m", "environment": {"name": environment, "args": args}}
    if function:
        fields["algorithm"] = {"kind": "custom", "function": function}
    (folder / "job.yaml").write_text(yaml.safe_dump(fields))
    return folder / "job.yaml"


def thrice(job: RLJobConfig, base_dir: Path | None) -> bool:
    [[advantage]] = advantage_function(job.algorithm, base_dir)([[np.ones(2, np.float32)]])
    return bool((advantage == 3).all())


@pytest.mark.parametrize(
    ("environment", "function"),
    [
        ("arithmetic", "adv.py:f"),
        ("arithmetic", "envs/adv.py:f"),
        ("gymnasium:FrozenLake-v1", "adv.py:f"),
        ("envs/e.py:E", "adv.py:f"),
        ("envs/e.py:E", "envs/adv.py:f"),
    ],
)
def test_the_function_is_found_where_the_job_runs(folder: Path, tmp_path: Path, environment: str, function: str) -> None:
    if environment.startswith("gymnasium"):
        pytest.importorskip("gymnasium")
    path = config(folder, environment, function)
    sent = prepare(path)
    code = sent.code()
    assert isinstance(sent.config, RLJobConfig)
    assert code is not None
    zipfile.ZipFile(io.BytesIO(code)).extractall(tmp_path / "cluster")
    assert thrice(sent.config, tmp_path / "cluster")
    job = read_job(path)
    assert isinstance(job, RLJobConfig)
    assert thrice(*_checked_rl(job, path.parent))


def agents(folder: Path, arena: Any = None, environment: str = "gomoku_duel", **white: Any) -> Path:
    """A job of two agents."""
    path = config(folder, environment)
    fields = yaml.safe_load(path.read_text()) | {"lora": {"rank": 4}, "agents": {"black": {}, "white": white}}
    fields |= {"arena": arena} if arena else {}
    path.write_text(yaml.safe_dump(fields))
    return path


def test_what_agents_name_is_found_where_the_job_runs(folder: Path, tmp_path: Path) -> None:
    (folder / "players.py").write_text("def careful(messages, numbers):\n    return 'a1'\n")
    for white in ({"script": "players.py:careful"}, {"algorithm": {"kind": "custom", "function": "adv.py:f"}}):
        path = agents(folder, **white)
        sent, here = prepare(path), read_job(path)
        code = sent.code()
        assert isinstance(here, RLJobConfig)
        assert isinstance(sent.config, RLJobConfig)
        assert code is not None
        zipfile.ZipFile(io.BytesIO(code)).extractall(tmp_path / "cluster")
        for job, base_dir in ((sent.config, tmp_path / "cluster"), _checked_rl(here, path.parent)):
            player = job.agents["white"]
            if player.script:
                assert load_function(player.script, base_dir)([], None) == "a1"
            else:
                assert player.algorithm is not None
                assert thrice(job.model_copy(update={"algorithm": player.algorithm}), base_dir)


@pytest.mark.parametrize("environment", ["gomoku_duel", "envs/duel.py:Duel"])
def test_reference_players_are_found_where_the_job_runs(folder: Path, tmp_path: Path, environment: str) -> None:
    own = environment != "gomoku_duel"
    (folder / "envs" / "duel.py").write_text(DUEL)
    place = folder / "envs" if own else folder
    (place / "players.py").write_text("".join(f"def {f}(messages, numbers):\n    return '{f}'\n" for f in ("one", "two")))
    names = ["players.py:two", "random", "players.py:one"]
    path = agents(folder, {"references": names}, environment)
    sent, here = prepare(path), read_job(path)
    code = sent.code()
    assert isinstance(here, RLJobConfig)
    assert isinstance(sent.config, RLJobConfig)
    assert code is not None
    zipfile.ZipFile(io.BytesIO(code)).extractall(tmp_path / "cluster")
    for job, base_dir in ((sent.config, tmp_path / "cluster"), _checked_rl(here, path.parent)):
        assert job.arena is not None
        players = reference_players(job.arena.references, checked_environment(job, base_dir), job.agents, base_dir)
        assert list(players) == ["two", "random", "one"]
        assert job.arena.references is not None
        assert load_function(job.arena.references[0], base_dir)([], None) == "two"


@pytest.mark.parametrize(
    ("references", "says"),
    [
        (["randon"], "brings no player 'randon'"),
        (["players.py:cautious"], "has no function 'cautious'"),
        (["random", "absent.py:careful"], r"arena.references.1: there is no file absent.py"),
        (["players:careful"], "'players:careful' names no function"),
        (["players.py:black"], "a player is called as an agent, 'black'"),
    ],
)
def test_a_reference_player_that_is_not_there_is_refused_at_once(folder: Path, references: list[str], says: str) -> None:
    (folder / "players.py").write_text("def careful(messages, numbers):\n    return 'a1'\n\nblack = careful\n")
    path = agents(folder, {"references": references})
    job = read_job(path)
    assert isinstance(job, RLJobConfig)
    with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
        prepare(path)
    with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
        _checked_rl(job, path.parent)


def test_what_agents_name_and_is_not_there_is_refused_at_once(folder: Path) -> None:
    (folder / "players.py").write_text("")
    for script, says in (
        ("nope.py:careful", r"agents.white.script: there is no file nope.py"),
        ("players.py:careful", "has no function 'careful'"),
        ("players", "'players' names no function"),
    ):
        with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
            prepare(agents(folder, script=script))


@pytest.mark.parametrize(
    ("environment", "function", "says"),
    [
        ("arithmetic", "nope.py:g", r"algorithm.function: there is no file nope.py .looked in "),
        ("envs/e.py:E", "nope.py:g", r"algorithm.function: there is no file nope.py"),
        ("arithmetic", "adv.py:g", "has no function 'g'"),
        ("arithmetic", "adv", "'adv' names no function"),
        ("arithmetic", "broken.py:f", "importing .*broken.py failed: ZeroDivisionError"),
    ],
)
def test_a_function_that_is_not_there_is_refused_at_once(folder: Path, environment: str, function: str, says: str) -> None:
    (folder / "broken.py").write_text("1 / 0\n")
    path = config(folder, environment, function)
    with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
        prepare(path)
    job = read_job(path)
    assert isinstance(job, RLJobConfig)
    with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
        _checked_rl(job, path.parent)


def test_a_file_outside_of_the_folder_that_travels_is_refused_and_trains_here(folder: Path) -> None:
    (folder / "outside.py").write_text((folder / "adv.py").read_text())
    path = config(folder, "envs/e.py:E", "outside.py:f")
    with pytest.raises(ConfigError, match=r"algorithm.function: .*outside.py is not in the environment's folder"):
        prepare(path)
    job = read_job(path)
    assert isinstance(job, RLJobConfig)
    assert thrice(*_checked_rl(job, path.parent))


@pytest.mark.parametrize("environment", ["gymnasium:FrozenLake-v1", "envs/adapted.py:Lake"])
def test_files_of_adapters_are_found_by_train_and_refused_by_submit(folder: Path, environment: str) -> None:
    pytest.importorskip("gymnasium")
    path = config(folder, environment, codec="codecs_of_mine.py:Mine", map_name="4x4")
    with pytest.raises(ConfigError, match=r"environment.args.codec: .*does not travel.*derive a class in a file of yours"):
        prepare(path)
    job = read_job(path)
    assert isinstance(job, RLJobConfig)
    checked, _ = _checked_rl(job, path.parent)
    found, _, name = str(checked.environment.args["codec"]).rpartition(":")
    assert Path(found).is_file()
    assert Path(found).is_relative_to(folder)
    assert name == "Mine"
    for wrong, says in (("no.py:Mine", "there is no file no.py"), ("codecs_of_mine.py:Yours", "has no function 'Yours'")):
        job = read_job(config(folder, environment, codec=wrong))
        assert isinstance(job, RLJobConfig)
        with pytest.raises((ConfigError, EnvironmentLoadError), match=says):
            _checked_rl(job, path.parent)


def test_what_names_no_file_is_an_adapters_own_business(folder: Path) -> None:
    pytest.importorskip("pettingzoo")
    path = config(folder, "pettingzoo:classic.tictactoe_v3", opponent="random")
    sent = prepare(path)
    assert isinstance(sent.config, RLJobConfig)
    assert sent.config.environment.args == {"opponent": "random"}
    with pytest.raises(ConfigError, match=r"environment.args.opponent: the file of foe.py:f does not travel"):
        prepare(config(folder, "pettingzoo:classic.tictactoe_v3", opponent="foe.py:f"))
