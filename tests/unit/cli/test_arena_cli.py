"""`opentinker arena` against a scheduler's real HTTP API; the games themselves are in tests/unit/training."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from opentinker.checkpoints import policy_root
from opentinker.cli.main import app
from opentinker.config.job import parse_job
from opentinker.multiagent.tally import Tally, met
from opentinker.training.arena import Played, cross_play_row
from opentinker.training.checkpoint_arena import Version

AGENTS = {
    "lora": {"rank": 4},
    "agents": {"black": {}, "white": {}},
    "environment": {"name": "gomoku_duel"},
    "arena": {"tasks": 5, "samples": 3},
}


def run(live: Any, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["arena", *arguments, "--state-dir", str(live.folder)], env={"COLUMNS": "100"})


def save(job: dict[str, Any], name: str, version: int, policy: str | None = None) -> None:
    folder = policy_root(Path(job["run_dir"]) / "checkpoints", policy) / f"{name}@{version}"
    folder.mkdir(parents=True)
    state = {"kind": "lora", "model_type": "llama", "step": version, "created_at": float(version), "version": version}
    (folder / "trainer_state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(json.dumps({"files": {"w": {"bytes": 1}}}))


@pytest.fixture
def finished(live: Any) -> dict[str, Any]:
    """A run of two agents that has ended after 4 steps."""
    job: dict[str, Any] = live.reach(live.submit(**AGENTS), "RUNNING")
    for policy in (None, "white"):
        for name, version in (("arena-000000", 0), ("step-000002", 2), ("final", 4)):
            save(job, name, version, policy)
    rows = [{"kind": "agents_step", "step": step} for step in range(1, 5)]
    (Path(job["run_dir"]) / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    live.client().cancel(job["id"])
    return job


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """(settings, players) of each meeting; the first of two always wins."""
    found: list[Any] = []

    async def play(policy: Any, config: Any, settings: Any, environment: Any, players: Sequence[Version]) -> Any:
        found.append((settings, list(players)))
        names = [one.name for one in players]
        results = {}
        for place, name in enumerate([*names, "random"]):
            for other in [*names, "random"][place + 1 :]:
                results |= {(name, other): met([1.0, 1.0]), (other, name): met([0.0, 0.0])}
        tally = Tally(results, won=True)
        return cross_play_row(4, tally, results, [Played(games=2)], {n: n for n in names}, ["random"], seconds=1.0)

    monkeypatch.setattr("opentinker.cli.arena.play_versions", play)
    return found


def test_checkpoints_of_a_run_play_on_a_server_of_their_own_which_ends(
    live: Any, finished: dict[str, Any], asked: list[Any]
) -> None:
    result = run(live, finished["id"], "--versions", "2", "--samples", "1", "--reference", "random")
    assert result.exit_code == 0, result.output
    [(settings, players)] = asked
    assert (settings.tasks, settings.samples, settings.references) == (5, 1, ("random",))
    assert [one.name for one in players] == ["black@0", "black@4", "white@0", "white@4"]
    assert players[3].ref == f"admin/{finished['id']}/white/final@4"
    assert "| black@0 " in result.stdout
    assert "black@0, black@4, white@0, white@4" in result.stderr
    folder = Path(finished["run_dir"]) / "arena"
    assert sorted(path.name for path in folder.iterdir()) == ["cross_play.json", "cross_play.md", "cross_play.svg"]
    assert str(folder) in result.stdout.replace("\n", "")
    hosted = next(job for job in live.client().jobs() if job["kind"] == "interactive")
    assert hosted["state"] == "COMPLETED"
    assert hosted["config"]["engine"]["max_adapters"] == 5
    assert len(hosted["config"]["checkpoints"]) == 4


@pytest.mark.parametrize(
    ("second", "playing", "says"),
    [
        ({"lora": {"rank": 8}, "engine": {"max_model_len": 2048}}, {"black", "white"}, ""),
        ({"base_model": "another"}, {"black"}, "white is left out: the base model of its server is another"),
    ],
)
def test_agents_on_further_servers_play_or_it_is_said_why_not(
    live: Any,
    finished: dict[str, Any],
    asked: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    second: Any,
    playing: set[str],
    says: str,
) -> None:
    """The cluster here has no room for a run with two servers."""
    fields = {"kind": "rl", "base_model": "some-model", **AGENTS, "servers": {"second": second}}
    config = parse_job({**fields, "agents": {"black": {}, "white": {"server": "second"}}})
    monkeypatch.setattr("opentinker.cli.arena._run_of", lambda scheduler, job_id: (finished, config))
    result = run(live, finished["id"])
    assert result.exit_code == 0, result.output
    assert {one.agent for one in asked[0][1]} == playing
    assert says in result.stderr
    hosted = next(job for job in live.client().jobs() if job["kind"] == "interactive")["config"]
    widest = (8, 2048) if "white" in playing else (4, 1024)
    assert (hosted["lora"]["rank"], hosted["engine"]["max_model_len"]) == widest


def test_chosen_checkpoints_play_and_programs_get_json(
    live: Any, finished: dict[str, Any], asked: list[Any], tmp_path: Path
) -> None:
    result = run(live, finished["id"], "white@2", "black@4", "-o", str(tmp_path / "here"), "--json")
    assert result.exit_code == 0, result.output
    assert [one.name for one in asked[0][1]] == ["white@2", "black@4"]
    document = json.loads(result.stdout)
    assert document["meetings"][0]["matrix"]["white@2"]["black@4"]["mean"] == 1.0
    assert (tmp_path / "here" / "cross_play.md").is_file()


def test_what_cannot_meet_is_said(live: Any, finished: dict[str, Any], asked: list[Any]) -> None:
    absent = run(live, finished["id"], "black@3")
    assert (absent.exit_code, "the run has no checkpoint 'black@3'" in absent.stderr) == (1, True)
    assert "there are black@0, black@2, black@4, white@0" in absent.stderr.replace("\n", " ")
    other = live.submit()
    alone = run(live, other["id"])
    assert (alone.exit_code, "is no run of several agents" in alone.stderr) == (1, True)
    live.client().cancel(other["id"])
    gone = run(live, finished["id"], "--reference", "gone.py:careful")
    assert (gone.exit_code, "gone.py does not exist" in gone.stderr.replace("\n", "")) == (1, True)
    assert "--reference path/to/file.py:function" in gone.stderr
    assert not any(job["kind"] == "interactive" for job in live.client().jobs()), "said before a server is waited for"
    empty = live.submit(**AGENTS)
    none = run(live, empty["id"])
    assert (none.exit_code, "has saved no checkpoint of an agent that learns" in none.stderr) == (1, True)
    live.client().cancel(empty["id"])
    elsewhere = live.reach(live.submit(**{**AGENTS, "environment": {"name": "mine/game.py:Game"}}), "RUNNING")
    save(elsewhere, "final", 4)
    unknown = run(live, elsewhere["id"])
    assert (unknown.exit_code, "--environment says what 'mine/game.py:Game' is called here" in unknown.stderr) == (1, True)
    assert asked == []
