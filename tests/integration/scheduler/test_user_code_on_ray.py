"""What a submitted environment needs, on a real Ray cluster: its packages, and its secrets."""

import base64
import hashlib
import io
import json
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from opentinker.scheduler.packages import packages_folder
from opentinker.scheduler.processes import processes_of
from opentinker.scheduler.state_dir import StateDir

SECRET = "sk-tr0ub4dor&3-of-a-user\nof two lines"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that nobody else has."""
    path = tmp_path_factory.mktemp("wheels") / "ot_tiny_package-1.0-py3-none-any.whl"
    info = "ot_tiny_package-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("ot_tiny_package.py", "ANSWER = 42\n")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: ot-tiny-package\nVersion: 1.0\nRequires-Dist: numpy\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def submitted(api: Any, environment: dict[str, Any], files: dict[str, str] | None = None) -> dict[str, Any]:
    body: dict[str, Any] = {"config": {"kind": "rl", "base_model": "fine", "environment": environment}}
    if files:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, text in files.items():
                archive.writestr(name, text)
        content = buffer.getvalue()
        body["code"] = {"zip": base64.b64encode(content).decode(), "sha256": hashlib.sha256(content).hexdigest()}
    job: dict[str, Any] = api.post("/v1/jobs", body)
    return job


@pytest.mark.parametrize("where", ["config", "file"])
def test_a_driver_imports_what_its_environment_requires_and_the_clusters_own(api: Any, wheel: Path, where: str) -> None:
    requirement = f"ot-tiny-package @ {wheel.as_uri()}"
    environment: dict[str, Any] = {"name": "imports", "args": {"modules": ["ot_tiny_package", "numpy"]}}
    if where == "config":
        job = submitted(api, {**environment, "requirements": [requirement]})
    else:
        files = {"env.py": "", "requirements.txt": f"# mine\n{requirement}  # tiny\n"}
        job = submitted(api, {**environment, "name": "env.py:imports"}, files)
    job = api.wait(job, "COMPLETED", "FAILED")
    assert (job["state"], job["cause"]) == ("COMPLETED", "")
    folder = packages_folder(job["id"])
    python, ours, theirs, numpy = Path(job["run_dir"], "imported").read_text().splitlines()
    assert python.startswith(str(folder))
    assert theirs.startswith(str(folder))
    assert not any(path.startswith(str(folder)) for path in (ours, numpy))  # the cluster's own are not installed again
    api.wait_free(2)
    assert not folder.exists()
    log = api.get(f"/v1/jobs/{job['id']}/logs")["text"]
    assert log.index("Successfully installed ot-tiny-package-1.0") < log.index("the driver is at work")
    with pytest.raises(ModuleNotFoundError):
        __import__("ot_tiny_package")


@pytest.mark.parametrize(
    ("requirement", "cause"),
    [
        ("ot-tiny-package @ file:///nowhere/ot_tiny_package-1.0-py3-none-any.whl", "No such file or directory"),
        ("numpy<1", "conflicting dependencies. The cluster's own: numpy=="),
        ("ray @ file:///tmp/ray.whl", "ray is one of the cluster's own packages and cannot be replaced"),
    ],
)
def test_an_installation_that_fails_fails_the_job_with_pips_last_word(api: Any, requirement: str, cause: str) -> None:
    job = api.wait(submitted(api, {"name": "returns", "requirements": [requirement]}), "COMPLETED", "FAILED")
    assert job["state"] == "FAILED"
    assert job["cause"].startswith("the environment's requirements were not installed: ")
    assert cause in job["cause"]
    api.wait_free(2)
    log = api.get(f"/v1/jobs/{job['id']}/logs")
    assert cause in log["text"]
    assert "the driver is at work" not in log["text"]
    assert log["finished"]
    assert not packages_folder(job["id"]).exists()


def test_a_cancel_during_the_installation_leaves_nothing(api: Any, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "ot-slow-package"\nversion = "1.0"\n'
    )
    (tmp_path / "backend.py").write_text("import time\nprint('building')\ntime.sleep(1000)\n")
    job = submitted(api, {"name": "returns", "requirements": [f"ot-slow-package @ {tmp_path.as_uri()}"]})
    deadline = time.monotonic() + 60.0
    while (
        len([p for p in processes_of(job["id"]) if "backend" in " ".join(p.cmdline()) or "_in_process" in str(p.cmdline())]) < 1
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert packages_folder(job["id"]).exists()
    assert "event=install" in api.get(f"/v1/jobs/{job['id']}/logs")["text"]
    assert api.post(f"/v1/jobs/{job['id']}/cancel")["state"] == "CANCELLED"
    assert processes_of(job["id"]) == []
    assert not packages_folder(job["id"]).exists()
    assert api.free_slots() == 2


def test_a_secret_is_in_the_drivers_environment_and_nowhere_else(cluster: Any, api: Any) -> None:
    assert api.http.put("/v1/secrets/openai", json={"value": SECRET}).is_success
    job = submitted(api, {"name": "uses-a-secret", "secrets": {"THE_SECRET": "openai"}})
    job = api.wait(job, "COMPLETED", "FAILED")
    assert Path(job["run_dir"], "digest").read_text() == hashlib.sha256(SECRET.encode()).hexdigest()
    assert job["cause"] == "the service refused [secret openai]"
    api.wait_free(2)
    log = api.get(f"/v1/jobs/{job['id']}/logs")["text"]
    for line in ("printed: [secret openai]!", "logged: [secret openai]", "raw: [secret openai]", "the service refused [secret"):
        assert line in log
    record = StateDir(cluster.key_path.parent).record()
    assert record is not None
    folders = [cluster.key_path.parent, Path(job["run_dir"]), Path(record["ray_dir"])]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert {"scheduler.db", "driver.log", "gcs_server.out"} <= {path.name for path in files}
    listed = [api.http.get(path).text for path in ("/v1/secrets", "/v1/jobs", f"/v1/jobs/{job['id']}/events", "/v1/audit")]
    for text in [*listed, json.dumps(job), *(path.read_bytes().decode("latin-1") for path in files)]:
        for part in SECRET.splitlines()[:1]:
            assert part not in text
