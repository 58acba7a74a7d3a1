"""What an environment needs, on the command line: secrets set and listed, and what this machine lacks."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from opentinker.cli.main import app

runner = CliRunner()
VALUE = "sk-tr0ub4dor-and-3"
MAIN = "from opentinker.cli.main import main; main()"
ENVIRONMENT = """
import os
import package_of_the_cluster
KEY = os.environ["OT_TEST_KEY"]
"""


def run(live: Any, *arguments: str, **options: Any) -> Any:
    return runner.invoke(app, [*arguments, "--state-dir", str(live.folder)], env={"COLUMNS": "100"}, **options)


def stored(live: Any) -> dict[str, str]:
    names = {secret.name: secret.name for secret in live.do(lambda: live.world.store.secrets("admin"))}
    values: dict[str, tuple[str, str]] = live.do(lambda: live.world.service.vault.values("admin", names))
    return dict(values.values())


def test_a_secrets_life_on_the_command_line(live: Any, tmp_path: Path) -> None:
    assert "secrets set NAME" in run(live, "secrets", "list").stderr
    (tmp_path / "value").write_text(f"{VALUE}\n")
    from_file = run(live, "secrets", "set", "openai", "--from-file", str(tmp_path / "value"))
    assert from_file.exit_code == 0, from_file.output
    assert "environment.secrets.VARIABLE=openai" in from_file.stdout
    from_stdin = run(live, "secrets", "set", "pem", "--from-file", "-", input="two\nlines\n")
    assert from_stdin.exit_code == 0, from_stdin.output
    assert stored(live) == {"openai": VALUE, "pem": "two\nlines"}
    listed = run(live, "secrets", "list")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == ["NAME", "openai", "pem"]
    document = json.loads(run(live, "secrets", "list", "--json").stdout)
    assert [sorted(secret) for secret in document["secrets"]] == [["created_at", "name", "updated_at"]] * 2
    assert run(live, "secrets", "remove", "pem").exit_code == 0
    assert stored(live) == {"openai": VALUE}
    assert VALUE not in from_file.output + listed.output + json.dumps(document)


def test_the_value_is_asked_for_without_showing_it(live: Any) -> None:
    leader, follower = pty.openpty()
    arguments = ["secrets", "set", "asked", "--state-dir", str(live.folder)]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], stdin=follower, stdout=follower, stderr=follower, start_new_session=True
    )
    os.close(follower)
    seen = b""
    while b"value: " not in seen:
        seen += os.read(leader, 1000)
    time.sleep(0.2)  # getpass switches the echo off, then asks
    os.write(leader, VALUE.encode() + b"\n")
    assert process.wait(30) == 0
    seen += os.read(leader, 1000)
    os.close(leader)
    assert VALUE.encode() not in seen
    assert stored(live) == {"asked": VALUE}


@pytest.mark.parametrize(
    ("arguments", "typed", "said"),
    [
        (["set", "a/b", "--from-file", "-"], "x", "cannot be a secret's name"),
        (["set", "openai"], "", "--from-file -"),
        (["set", "openai", "--from-file", "-"], "\n", "the value is empty"),
        (["set", "openai", "--from-file", VALUE], "", "cannot read the value's file"),
        (["set", "openai", "--from-file", "-", "--key-file", "-"], "", "cannot both come from standard input"),
        (["remove", "openai"], "", "you have no secret 'openai'"),
    ],
)
def test_mistakes_are_one_line_with_a_hint_and_without_the_value(
    live: Any, arguments: list[str], typed: str, said: str
) -> None:
    result = run(live, "secrets", *arguments, input=typed)
    assert result.exit_code == 1
    assert said in result.stderr
    assert VALUE not in result.output
    assert len(result.stderr.strip().splitlines()) <= 2


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv("OT_TEST_KEY", raising=False)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "env.py").write_text(ENVIRONMENT)
    (tmp_path / "code" / "requirements.txt").write_text("package-of-the-cluster>=1  # not on this machine\n")
    environment = {"name": "code/env.py:Mine", "secrets": {"OT_TEST_KEY": "openai"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump({"base_model": "some-model", "environment": environment}))
    return tmp_path / "job.yaml"


def test_what_only_the_cluster_has_does_not_keep_a_job_from_being_submitted(live: Any, job_file: Path) -> None:
    refused = run(live, "submit", str(job_file))
    assert refused.exit_code == 1
    assert "opentinker secrets set openai" in refused.stderr
    assert run(live, "secrets", "set", "openai", "--from-file", "-", input=VALUE).exit_code == 0
    submitted = run(live, "submit", str(job_file))
    assert submitted.exit_code == 0, submitted.output
    assert "package-of-the-cluster>=1, $OT_TEST_KEY missing here" in submitted.stderr
    job = live.client().job(submitted.stdout.strip())
    assert (Path(job["run_dir"]) / "code" / "requirements.txt").exists()
    described = run(live, "describe", job["id"])
    assert "openai" in described.output
    assert VALUE not in described.output


def test_train_names_what_this_process_lacks(live: Any, job_file: Path) -> None:
    result = run(live, "train", str(job_file))
    assert result.exit_code == 1
    assert "lacks package-of-the-cluster>=1, $OT_TEST_KEY" in result.stderr
    assert "opentinker submit" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 2


def test_a_requirements_file_with_options_says_where_to_write_them(live: Any, job_file: Path) -> None:
    (job_file.parent / "code" / "requirements.txt").write_text("-r more.txt\n")
    result = run(live, "submit", str(job_file))
    assert result.exit_code == 1
    assert "option of pip" in result.stderr
    assert "environment.requirements" in result.stderr
