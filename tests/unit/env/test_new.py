"""What `env new` writes works as it stands, and nothing that is there already is touched."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from opentinker.config.job import parse_job
from opentinker.env.new import TEMPLATES, class_name, write_environment
from opentinker.errors import ConfigError


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_passes_its_test_the_check_and_the_linter(tmp_path: Path, template: str) -> None:
    files = write_environment(f"my-{template}", template, tmp_path)  # type: ignore[arg-type]
    folder = tmp_path / f"my_{template}"
    assert {f.name for f in files} >= {f"my_{template}.py", f"test_my_{template}.py", f"my_{template}.yaml", "README.md"}
    assert {f.parent for f in files} == {folder}
    for file in files:
        text = file.read_text()
        assert not [word for word in ("NewEnvironment", "new_environment", "templates", "MAX_TURNS") if word in text], file
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]  # the check is one of its tests
    done = subprocess.run(tests, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for command in (["check", "--isolated", "--select", "E4,E7,E9,F,I,UP,B"], ["format", "--isolated", "--check"]):
        linted = subprocess.run([sys.executable, "-m", "ruff", *command, "."], capture_output=True, text=True, cwd=folder)
        assert linted.returncode == 0, linted.stdout
    job = parse_job(yaml.safe_load((folder / f"my_{template}.yaml").read_text()))
    assert job.environment.name == f"my_{template}.py:{class_name(f'my_{template}')}"  # type: ignore[attr-defined]
    assert job.environment.name.split(":")[0] in {f.name for f in files}  # type: ignore[attr-defined]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "my_game").mkdir()
    (tmp_path / "my_game" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="my_game exists already"):
        write_environment("my_game", "single", tmp_path)
    assert [f.name for f in (tmp_path / "my_game").iterdir()] == ["notes"]


@pytest.mark.parametrize("name", ["", "9lives", "My_Game", "a/b", "../up", "class", "opentinker", "a b", "é"])
def test_a_name_that_python_could_not_import_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError) as error:
        write_environment(name, "single", tmp_path)
    assert error.value.hint
    assert list(tmp_path.iterdir()) == []
