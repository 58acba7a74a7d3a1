"""Packages that a submitted environment requires: a virtual environment of the job's own on the driver's node.

Ray's own `pip` and `uv` plugins copy the whole virtual environment that Ray runs in, gigabytes with PyTorch, for each set of
requirements, and cannot be cancelled. Here the job's environment only holds what the cluster's lacks, and is given to Ray as
the `py_executable` of the driver's runtime environment. It is gone when the job is.
"""

import ctypes
import importlib.util
import json
import logging
import os
import shutil
import signal
import site
import stat
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from opentinker.config.job import JobConfig, RLJobConfig
from opentinker.config.requirements import listed_requirements
from opentinker.errors import ConfigError, OpenTinkerError
from opentinker.logfile import write_to
from opentinker.process_group import own_process_group
from opentinker.scheduler.processes import forget_secrets

INSTALL_LOG_NAME = "install.log"
"""What the installer prints. It becomes the beginning of driver.log when the driver comes up, or when there will be none."""
_READY = "ready.json"
_PR_SET_PDEATHSIG = 1
_NO_HELP = "ResolutionImpossible: for help visit"
_CONSTRAINED = "The user requested (constraint) "


def requirements_of(config: JobConfig, code_dir: Path | None) -> tuple[str, ...]:
    """What a submitted job requires, with its code in `code_dir`. Raises: ConfigError, see `listed_requirements`."""
    if not isinstance(config, RLJobConfig):
        return ()
    path, _, _ = config.environment.name.rpartition(":")
    file = code_dir / path if code_dir is not None and path.endswith(".py") else None
    return listed_requirements(config.environment.requirements, file)


def packages_folder(job_id: str) -> Path:
    """Where a job's packages are on each node: in a folder that no other account can write to."""
    return Path(tempfile.gettempdir()) / f"opentinker-packages-{os.getuid()}" / job_id


def remove_packages(job_id: str) -> None:
    """Remove a job's packages from this node, when none of its processes is left to use them."""
    shutil.rmtree(packages_folder(job_id), ignore_errors=True)


class PackageInstaller:
    """A Ray actor on the driver's node. It dies with its job, and pip with it, by the job's marker in their environment."""

    def __init__(self, job_id: str, run_dir: str) -> None:
        forget_secrets()
        own_process_group()
        self._job_id = job_id
        self._log = Path(run_dir) / INSTALL_LOG_NAME
        write_to(self._log, job=job_id)

    def describe(self) -> dict[str, Any]:
        return {"pid": os.getpid()}

    def install(self, requirements: Sequence[str], timeout_s: float) -> dict[str, str]:
        """Install them; blocks. A repeat finds what was installed before.

        Returns:
            {"python", "cause"}: the interpreter to run the driver with, or why there is none.
        """
        try:
            return {"python": str(self._installed(requirements, timeout_s)), "cause": ""}
        except OpenTinkerError as error:
            logging.getLogger(__name__).error("event=install_failed cause=%r", str(error))
            return {"python": "", "cause": f"the environment's requirements were not installed: {error}"}

    def _installed(self, requirements: Sequence[str], timeout_s: float) -> Path:
        folder = packages_folder(self._job_id)
        python = folder / "bin" / "python"
        ready = folder / _READY
        if ready.exists() and json.loads(ready.read_text()) == list(requirements):
            return python
        refuse_replacements(requirements)
        if importlib.util.find_spec("pip") is None:
            raise ConfigError("the cluster has no pip", hint="its operator installs it: `pip install 'opentinker[cluster]'`")
        _private(folder.parent)
        shutil.rmtree(folder, ignore_errors=True)
        try:
            constraints = make_environment(folder)
            self._pip(python, requirements, constraints, timeout_s)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        ready.write_text(json.dumps(list(requirements)))
        return python

    def _pip(self, python: Path, requirements: Sequence[str], constraints: Path, timeout_s: float) -> None:
        options = ["--disable-pip-version-check", "--no-input", "--no-color", "--progress-bar=off", "--no-cache-dir"]
        command = [str(python), "-m", "pip", "install", *options, "-c", str(constraints)]
        logging.getLogger(__name__).info("event=install requirements=%r", " ".join(requirements))
        begin = self._log.stat().st_size
        process = subprocess.Popen(
            [*command, "--", *requirements],
            stdin=subprocess.DEVNULL,
            cwd=constraints.parent,
            start_new_session=True,
            preexec_fn=_die_with_parent,
        )
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"pip was not done within {timeout_s:g} s", hint="fewer packages, or a mirror near the cluster"
            ) from None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code:
            raise ConfigError(_last_word(self._log, begin) or f"pip ended with {code}")


def refuse_replacements(requirements: Sequence[str]) -> None:
    """Raises: ConfigError for an address of a package that the cluster itself runs with. Names and versions of those are held
    fast by constraints, but what an address leads to may call itself by any version."""
    for line in requirements:
        requirement = Requirement(line)
        if requirement.url is not None and canonicalize_name(requirement.name) in _own_versions():
            raise ConfigError(f"{requirement.name} is one of the cluster's own packages and cannot be replaced")


def make_environment(folder: Path) -> Path:
    """A virtual environment that sees this one's packages behind its own. The path of constraints that hold theirs fast."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    inherited = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    # As code, so that .pth files in there, such as those of editable installs, count as well.
    lines = [f"import site; site.addsitedir({path!r})\n" for path in inherited]
    (folder / "lib" / name / "site-packages" / "_inherited.pth").write_text("".join(lines))
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in sorted(_own_versions().items())))
    return constraints


def _own_versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        if distribution.name and distribution.version:
            found.setdefault(canonicalize_name(distribution.name), distribution.version)
    return found


def _private(folder: Path) -> None:
    """Raises: ConfigError when the folder is another account's, which could put code into it."""
    folder.mkdir(mode=0o700, exist_ok=True)
    there = folder.lstat()
    if not stat.S_ISDIR(there.st_mode) or there.st_uid != os.getuid() or there.st_mode & 0o022:
        raise ConfigError(f"{folder} belongs to another account, or others can write to it", hint="remove it")


def _die_with_parent() -> None:
    """Runs in pip's process before pip: when the installer is killed, so is pip, and never do two of them work at once."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _last_word(log: Path, begin: int) -> str:
    """The last error that pip printed, or else its last line."""
    with log.open("rb") as file:
        file.seek(begin)
        return last_word(file.read().decode(errors="replace"))


def last_word(printed: str) -> str:
    """The last error in what pip printed, or else the last line; with the cluster's versions that stand against it, if any."""
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    # It ends with a link to a page about conflicts, and says before that which one it is.
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ") and _NO_HELP not in line]
    held = dict.fromkeys(line.removeprefix(_CONSTRAINED) for line in lines if line.startswith(_CONSTRAINED))
    return (errors or lines or [""])[-1] + (f" The cluster's own: {', '.join(held)}" if held else "")
