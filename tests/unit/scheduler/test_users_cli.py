"""`opentinker users` against a real scheduler over real HTTP, and how the commands take a key."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from typer.testing import CliRunner, Result

from opentinker.cli.common import read_key
from opentinker.cli.main import app
from opentinker.errors import ConfigError
from opentinker.scheduler.api import create_app

Run = Callable[..., Awaitable[Result]]


@pytest.fixture
async def run(world: Any, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """Run the command line as the cluster's administrator."""
    monkeypatch.delenv("OPENTINKER_API_KEY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        folder = world.settings.state_dir
        (folder / "cluster.json").write_text(json.dumps({"url": url, "pid": 1}))
        server = uvicorn.Server(uvicorn.Config(create_app(world.service), log_config=None, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))

        async def invoke(*arguments: Any, **options: Any) -> Result:
            words = [*map(str, arguments), "--state-dir", str(folder)]
            return await asyncio.to_thread(CliRunner().invoke, app, words, **options)

        yield invoke
        server.should_exit = True
        await serving


async def test_a_users_life_on_the_command_line(run: Run, tmp_path: Path) -> None:
    added = await run("users", "add", "ann", "--share", "2", "--max-gpus", "4")
    assert added.exit_code == 0, added.output
    key = added.stdout.strip()  # alone there, for `> file`
    assert key.startswith("ot-")
    assert "not shown again" in added.stderr
    file = tmp_path / "ann.key"
    second = await run("users", "add-key", "ann", "--name", "dashboard", "--scope", "read", "--out", file)
    assert second.exit_code == 0, second.output
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.read_text().strip() not in second.output
    assert (await run("ps", "--key-file", file)).exit_code == 0
    assert (await run("ps", "--key-file", "-", input=key)).exit_code == 0
    refused = await run("users", "list", "--key-file", file)
    assert refused.exit_code == 1
    assert "'admin'" in refused.stderr
    listed = await run("users", "list")
    assert [line.split() for line in listed.stdout.splitlines() if "ann" in line] == [
        ["ann", "submit", "2", "4", "-", "active"]
    ]
    keys = {k["name"]: k for k in json.loads((await run("users", "keys", "ann", "--json")).stdout)["keys"]}
    assert set(keys) == {"default", "dashboard"}
    rotated = await run("users", "rotate", "ann", keys["default"]["id"], "--json")
    new = json.loads(rotated.stdout)
    assert (await run("ps", "--key-file", "-", input=key)).exit_code == 1
    assert (await run("ps", "--key-file", "-", input=new["key"])).exit_code == 0
    assert (await run("users", "revoke", "ann", new["id"])).exit_code == 0
    assert (await run("ps", "--key-file", "-", input=new["key"])).exit_code == 1
    assert (await run("users", "set", "ann", "--scope", "read", "--max-gpus", "-1")).exit_code == 0
    assert (await run("users", "disable", "ann")).exit_code == 0
    assert (await run("ps", "--key-file", file)).exit_code == 1
    assert (await run("users", "enable", "ann")).exit_code == 0
    assert (await run("ps", "--key-file", file)).exit_code == 0
    shown = (await run("users", "keys", "ann")).stdout + (await run("users", "audit")).stdout
    assert "revoked" in shown
    assert "key.rotate" in shown
    for secret in (key, new["key"], file.read_text().strip()):
        assert secret not in shown


async def test_mistakes_are_one_line_with_a_hint(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("precious")
    for arguments, words in (
        (("add", "Ann"), "cannot be a user's name"),
        (("add", "admin"), "already"),
        (("keys", "nobody"), "no user 'nobody'"),
        (("revoke", "admin", "embedded"), "state folder"),
        (("disable", "admin"), "must stay an administrator"),
        (("set", "admin"), "nothing to change"),
        (("add", "ann", "--out", str(tmp_path / "taken")), "cannot create"),
    ):
        result = await run("users", *arguments)
        assert result.exit_code == 1, arguments
        assert words in result.stderr
        assert "Traceback" not in result.output
    assert (tmp_path / "taken").read_text() == "precious"
    failed = await run("users", "add", "admin", "--out", tmp_path / "new")
    assert failed.exit_code == 1
    assert not (tmp_path / "new").exists()
    assert "ann" not in (await run("users", "list")).stdout


def test_no_command_takes_a_key_as_an_argument() -> None:
    """Other users of a machine can read every process's arguments."""

    def commands(command: Any, path: str) -> list[tuple[str, Any]]:
        below = getattr(command, "commands", {})
        return [(path, command)] + [found for name, child in below.items() for found in commands(child, f"{path} {name}")]

    found = 0
    for path, command in commands(typer.main.get_command(app), "opentinker"):
        for option in command.params:
            assert not {"--key", "--api-key", "--token", "--password"} & set(option.opts), path
            found += "--key-file" in option.opts
    assert found >= 10


def test_a_key_in_the_place_of_its_file_is_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_key(Path("ot-this-is-the-key-itself"))
    assert "itself" not in str(caught.value)
    assert caught.value.__cause__ is None
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        read_key(tmp_path / "empty")
    (tmp_path / "key").write_text("ot-1\n")
    assert read_key(tmp_path / "key") == "ot-1"
    assert read_key(None) is None
