"""What a submitted environment requires: where it is written, and the environment that it is installed into."""

import base64
import hashlib
import io
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.config.job import parse_job
from opentinker.errors import ConfigError
from opentinker.scheduler import packages
from opentinker.scheduler.clearing import clear
from opentinker.scheduler.packages import last_word, make_environment, refuse_replacements, requirements_of
from opentinker.scheduler.processes import JOB_VARIABLE, processes_of


def config(**environment: Any) -> Any:
    return parse_job({"kind": "rl", "base_model": "m", "environment": {"name": "pkg/env.py:Mine", **environment}})


def code(**files: str) -> dict[str, str]:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("__", "."), text)
    content = buffer.getvalue()
    return {"zip": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}


def test_the_configs_list_rules_and_else_the_file_beside_the_environments(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    assert requirements_of(config(), tmp_path) == ()
    (tmp_path / "requirements.txt").write_text("not-this-one\n")
    assert requirements_of(config(), tmp_path) == ()
    (tmp_path / "pkg" / "requirements.txt").write_text("sympy\n")
    assert requirements_of(config(), tmp_path) == ("sympy",)
    assert requirements_of(config(requirements=["numpy"]), tmp_path) == ("numpy",)
    assert requirements_of(config(requirements=[]), tmp_path) == ()
    assert requirements_of(config(name="arithmetic"), tmp_path) == ()
    assert requirements_of(config(), None) == ()
    assert requirements_of(parse_job({"kind": "interactive", "base_model": "m"}), tmp_path) == ()
    (tmp_path / "pkg" / "requirements.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not text"):
        requirements_of(config(), tmp_path)


def test_the_installer_leads_a_process_group_of_its_own(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom opentinker.scheduler.packages import PackageInstaller\n"
        "PackageInstaller('job-1', sys.argv[1])\nopen(sys.argv[1] + '/group', 'w').write(str(os.getpgid(0) == os.getpid()))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert (tmp_path / "group").read_text() == "True"


async def test_a_requirements_file_that_is_none_is_refused_at_submit_and_nothing_is_left(world: Any) -> None:
    body = {"kind": "rl", "base_model": "m", "environment": {"name": "env.py:Mine"}}
    with pytest.raises(ConfigError, match="option of pip"):
        await world.service.submit("admin", body, None, code(env__py="", requirements__txt="--index-url https://evil\n"))
    assert list(world.settings.runs_dir.rglob("job-*")) == []
    job = await world.service.submit("admin", body, None, code(env__py="", requirements__txt="sympy\n"))
    assert job["config"]["environment"]["requirements"] is None


def test_an_environment_sees_the_clusters_packages_behind_its_own_and_holds_them_fast(tmp_path: Path) -> None:
    constraints = make_environment(tmp_path / "job").read_text().splitlines()
    assert f"pydantic=={packages._own_versions()['pydantic']}" in constraints
    site_packages = next((tmp_path / "job" / "lib").glob("python*")) / "site-packages"
    (site_packages / "mine.py").write_text("")
    script = "import sys, mine, pydantic, pip; print(mine.__file__); print(pydantic.__file__); print(sys.prefix)"
    done = subprocess.run([tmp_path / "job" / "bin" / "python", "-c", script], capture_output=True, text=True, check=True)
    mine, theirs, prefix = done.stdout.splitlines()
    assert mine == str(site_packages / "mine.py")
    assert theirs == sys.modules["pydantic"].__file__
    assert prefix == str(tmp_path / "job")


def test_an_installation_that_takes_too_long_is_ended_whole(tmp_path: Path) -> None:
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "ot-slow-package"\nversion = "1.0"\n'
    )
    (tmp_path / "slow" / "backend.py").write_text("import time\ntime.sleep(1000)\n")
    script = """if True:
        import json, os, sys
        from pathlib import Path
        from opentinker.scheduler.packages import PackageInstaller
        answer = PackageInstaller("job-1", sys.argv[1]).install([sys.argv[2]], 2.0)
        Path(sys.argv[1], "answer").write_text(json.dumps(answer))
    """
    requirement = f"ot-slow-package @ {(tmp_path / 'slow').as_uri()}"
    # `processes_of` finds the whole family by it, as it does a job's.
    env = {**os.environ, "TMPDIR": str(tmp_path), JOB_VARIABLE: f"job-of-{tmp_path}"}
    subprocess.run([sys.executable, "-c", script, tmp_path, requirement], env=env, check=True, timeout=60)
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["python"] == ""
    assert answer["cause"].startswith("the environment's requirements were not installed: pip was not done within 2 s")
    assert processes_of(f"job-of-{tmp_path}") == []
    assert list(tmp_path.glob("opentinker-packages-*/*")) == []
    assert "ot-slow-package" in (tmp_path / packages.INSTALL_LOG_NAME).read_text()


def test_an_address_cannot_stand_in_for_one_of_the_clusters_own_packages() -> None:
    refuse_replacements(["pydantic>=1", "somebodys @ file:///x.whl"])
    for line in ("pydantic @ file:///x.whl", "Pydantic_Core @ https://evil/x.whl"):
        with pytest.raises(ConfigError, match="cluster's own packages"):
            refuse_replacements([line])


def test_pips_last_word_is_the_error_and_not_the_way_to_a_page_about_it() -> None:
    assert last_word("Collecting x\nERROR: No matching distribution found for x\n[notice] a new pip\n") == (
        "No matching distribution found for x"
    )
    conflict = (
        "ERROR: Cannot install numpy<1 because these package versions have conflicting dependencies.\n\n"
        "The conflict is caused by:\n    The user requested numpy<1\n    The user requested (constraint) numpy==2.4.0\n\n"
        "ERROR: ResolutionImpossible: for help visit https://pip.pypa.io\n"
    )
    assert last_word(conflict) == (
        "Cannot install numpy<1 because these package versions have conflicting dependencies. The cluster's own: numpy==2.4.0"
    )
    assert last_word("killed\n") == "killed"
    assert last_word("") == ""


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path) -> None:
    packages._private(tmp_path / "mine")
    packages._private(tmp_path / "mine")
    (tmp_path / "mine").chmod(0o777)
    with pytest.raises(ConfigError, match="others can write"):
        packages._private(tmp_path / "mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError):
        packages._private(tmp_path / "link")


def test_the_packages_go_with_the_jobs_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = packages.packages_folder("job-1")
    folder.mkdir(parents=True)
    assert folder.is_relative_to(tmp_path)
    assert clear(["job-1"], (), 0.1, 0.1, None) == ""
    assert not folder.exists()
