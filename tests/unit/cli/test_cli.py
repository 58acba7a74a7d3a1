import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from opentinker.cli import demo as demo_module
from opentinker.cli.demo import demo_config, headline
from opentinker.cli.main import app
from opentinker.cli.up import how_to_join

runner = CliRunner()
COMMANDS = ["up", "down", "submit", "train", "ps", "top", "describe", "logs", "events", "wait", "cancel", "secrets", "demo"]
ENVIRONMENT = """
import opentinker as ot

class Echo(ot.Environment):
    def __init__(self, shout: bool = False): self.shout = shout
    def reset(self, task): return "say something"
    def step(self, action): return ot.StepResult(reward=1.0, done=True)
"""


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "envs").mkdir()
    (tmp_path / "envs" / "echo.py").write_text(ENVIRONMENT)
    config = {"base_model": "smollm2-135m", "environment": {"name": "envs/echo.py:Echo"}}
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str) -> None:
    result = runner.invoke(app, [command, "--help"], terminal_width=120)
    assert result.exit_code == 0
    assert "Usage" in plain(result.output)


def test_the_help_lists_every_command() -> None:
    output = plain(runner.invoke(app, ["--help"]).output)
    for command in COMMANDS:
        assert f" {command} " in output


def test_a_dry_run_prints_the_resolved_config_and_needs_no_cluster(project: Path) -> None:
    result = runner.invoke(
        app, ["submit", str(project / "job.yaml"), "training.steps=3", "lora.rank=8", "--dry-run", "--state-dir", str(project)]
    )
    assert result.exit_code == 0, result.output
    resolved = yaml.safe_load(result.stdout)
    assert resolved["training"]["steps"] == 3
    assert resolved["lora"]["rank"] == 8
    assert resolved["algorithm"]["kind"] == "grpo"
    assert resolved["environment"]["name"] == "echo.py:Echo"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["training.step=3"], ["unknown key 'training.step'", "did you mean 'steps'?"]),
        (["nonsense"], ["'nonsense' is not an override"]),
        (["training.steps=0"], ["training.steps"]),
        (["environment.name=arithmetics"], ["arithmetics", "arithmetic"]),
        (["environment.name=envs/echo.py:Eco"], ["no class 'Eco'", "did you mean 'Echo'?"]),
        (["environment.name=envs/other.py:Echo"], ["there is no file envs/other.py"]),
        (["environment.args.loud=true"], ["environment.args", "loud"]),
        (["sampling.max_tokens=5000"], ["leaves no room for a prompt"]),
    ],
)
@pytest.mark.parametrize("command", ["submit", "train"])
def test_a_mistake_in_the_config_is_one_red_line_before_anything_is_sent(
    project: Path, command: str, arguments: list[str], said: list[str]
) -> None:
    result = runner.invoke(app, [command, str(project / "job.yaml"), *arguments, "--state-dir", str(project)])
    assert result.exit_code == 1
    assert "Traceback" not in result.output
    for text in said:
        assert text in result.stderr
    assert len(result.stderr.strip().splitlines()) <= 2


def test_an_environment_file_that_does_not_import_is_named_with_its_line(project: Path) -> None:
    (project / "envs" / "echo.py").write_text("import opentinker\nimport no_such_module\n")
    result = runner.invoke(app, ["submit", str(project / "job.yaml"), "--state-dir", str(project)])
    assert result.exit_code == 1
    assert "no_such_module" in result.stderr
    assert "echo.py:2" in result.stderr


@pytest.mark.parametrize("content", [None, "a: [", "- 1\n- 2\n"])
def test_a_config_file_that_is_none_is_said_so(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "job.yaml").write_text(content)
    result = runner.invoke(app, ["submit", str(tmp_path / "job.yaml")])
    assert result.exit_code == 1
    assert str(tmp_path / "job.yaml") in result.stderr.replace("\n", "")


@pytest.mark.parametrize("arguments", [["ps"], ["describe", "job-1"], ["logs", "job-1"], ["cancel", "job-1"]])
def test_without_a_cluster_the_hint_says_how_to_start_one(tmp_path: Path, arguments: list[str]) -> None:
    result = runner.invoke(app, [*arguments, "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "no cluster is running" in result.stderr
    assert "opentinker up" in result.stderr


def test_a_foreign_cluster_needs_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENTINKER_API_KEY", raising=False)
    result = runner.invoke(app, ["ps", "--url", "http://cluster.example:1", "--state-dir", str(tmp_path)])
    assert result.exit_code == 1
    assert "OPENTINKER_API_KEY" in result.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_without_the_cluster_extra_the_hint_says_what_to_install(tmp_path: Path, command: str) -> None:
    script = "import sys; sys.modules['ray'] = None; from opentinker.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", script, command, "--state-dir", str(tmp_path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "this command needs the package 'ray'" in done.stderr
    assert "opentinker[cluster]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_wrong_option_is_a_usage_error(project: Path) -> None:
    assert runner.invoke(app, ["demo", "--engine", "tensorrt"]).exit_code == 2
    assert runner.invoke(app, ["describe"]).exit_code == 2
    assert runner.invoke(app, ["fly"]).exit_code == 2


def test_down_without_a_cluster_does_nothing(tmp_path: Path) -> None:
    result = runner.invoke(app, ["down", "--state-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert "no cluster" in result.stdout


@pytest.mark.parametrize("environment", list(demo_module.DemoEnvironment))
@pytest.mark.parametrize("lora", [False, True])
def test_every_demo_has_a_valid_config_with_its_options_applied(environment: str, lora: bool) -> None:
    config = demo_config(
        environment, lora=lora, engine="transformers", seed=7, steps=3, learning_rate=0.0, base_model="/models/my model: x"
    )
    assert config.environment.name == environment
    assert (config.lora is not None) == lora
    assert config.engine.kind == "transformers"
    assert (config.training.seed, config.training.steps) == (7, 3)
    assert config.training.optimizer.learning_rate == 0.0
    assert config.base_model == "/models/my model: x"


def test_the_headline_says_what_was_learnt() -> None:
    summary = {"exact_before": 0.171, "exact_after": 0.782, "exact_ci": 0.06, "steps": 25, "wall_s": 246.0}
    assert headline("arithmetic", summary) == "arithmetic: held-out exact 0.17 -> 0.78 (+-0.06) in 25 steps, 4.1 min"
    summary = {
        "exact_before": None,
        "exact_after": None,
        "exact_ci": None,
        "reward_before": 0.1,
        "reward_after": 0.5,
        "steps": 2,
        "wall_s": 30.0,
    }
    assert headline("mine", summary) == "mine: held-out reward 0.10 -> 0.50 in 2 steps, 0.5 min"


def test_the_local_key_is_used_for_the_local_cluster_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentinker.client.local import find_cluster
    from opentinker.errors import AuthenticationError, UnavailableError

    monkeypatch.delenv("OPENTINKER_API_KEY", raising=False)
    with pytest.raises(UnavailableError):
        find_cluster(None, None, tmp_path)
    (tmp_path / "cluster.json").write_text(json.dumps({"url": "http://127.0.0.1:8780", "pid": 1}))
    (tmp_path / "api_key").write_text("secret\n")
    assert find_cluster(None, None, tmp_path) == ("http://127.0.0.1:8780", "secret")
    assert find_cluster("http://localhost:8780/", None, tmp_path) == ("http://localhost:8780", "secret")
    with pytest.raises(AuthenticationError):
        find_cluster("http://localhost:8781", None, tmp_path)
    with pytest.raises(AuthenticationError):
        find_cluster("http://elsewhere.example:8780", None, tmp_path)
    monkeypatch.setenv("OPENTINKER_API_KEY", "from-the-environment")
    assert find_cluster("http://elsewhere.example:8780", None, tmp_path)[1] == "from-the-environment"
    assert find_cluster(None, "argument", tmp_path)[1] == "argument"
    # A shared cluster's key in the shell is not meant for the cluster on this machine.
    assert find_cluster(None, None, tmp_path)[1] == "secret"
    (tmp_path / "cluster.json").write_text(json.dumps({"url": "http://127.0.0.1:8780", "pid": 2**22 + 1}))
    assert find_cluster("http://127.0.0.1:8780", None, tmp_path)[1] == "from-the-environment"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--join", "head:1", "--port", "8780"], "--port cannot be given with --join"),
        (["--join", "head:1", "--state-dir", "x", "--ray-address", "auto"], "--state-dir and --ray-address cannot be given"),
        (["--ray-address", "auto", "--gpus", "1"], "--gpus cannot be given with --ray-address"),
    ],
)
def test_options_of_up_that_make_no_sense_together_are_refused(options: list[str], complaint: str) -> None:
    result = runner.invoke(app, ["up", *options], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
    assert result.exit_code == 2
    assert complaint in plain(result.output)


@pytest.mark.parametrize("address", ["127.0.0.1:6379", "[::1]:6379", "10.0.0.5:6379"])
def test_up_tells_how_to_join_and_who_can(address: str) -> None:
    lines = how_to_join(address)
    assert f"opentinker up --join {address}" in lines[0]
    assert ("on this machine" in lines[0]) == (address != "10.0.0.5:6379")
