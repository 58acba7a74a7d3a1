"""A user's environment file travels with the job: its folder as a zip."""

import io
import os
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from opentinker.config.job import RLJobConfig
from opentinker.config.requirements import listed_requirements, missing_requirements, missing_variables
from opentinker.errors import ConfigError, EnvironmentLoadError

CODE_LIMIT_BYTES = 20 * 2**20
_SKIPPED = frozenset({"__pycache__", "node_modules", "venv", "runs"})
_EPOCH = (1980, 1, 1, 0, 0, 0)


def environment_file(config: RLJobConfig, config_folder: Path) -> Path | None:
    """The file of a `path/to/file.py:Class` environment, relative to the config's folder or else to the current one; None for
    a built-in one.

    Raises:
        EnvironmentLoadError: the file does not exist.
    """
    path, colon, _ = config.environment.name.rpartition(":")
    if not colon or not path.endswith(".py"):
        return None
    candidates = [config_folder / path, Path.cwd() / path]
    found = next((c.resolve() for c in candidates if c.is_file()), None)
    if found is None:
        raise EnvironmentLoadError(
            f"environment.name: there is no file {path}",
            hint="looked in " + " and ".join(str(f) for f in dict.fromkeys(c.parent.resolve() for c in candidates)),
        )
    return found


def relative_to_code(config: RLJobConfig, file: Path) -> RLJobConfig:
    """The config as the driver sees it: the environment's path is relative to the folder that travels."""
    name = f"{file.name}:{config.environment.name.rpartition(':')[2]}"
    return config.model_copy(update={"environment": config.environment.model_copy(update={"name": name})})


def lacking(config: RLJobConfig, file: Path | None) -> list[str]:
    """What the environment needs and this process does not have: packages, and variables as $NAME.

    Raises:
        ConfigError: see `listed_requirements`.
    """
    variables = [f"${name}" for name in missing_variables(config.environment.secrets)]
    return missing_requirements(listed_requirements(config.environment.requirements, file)) + variables


def pack_folder(folder: Path, *, limit_bytes: int = CODE_LIMIT_BYTES) -> bytes:
    """A zip of the folder's files; equal folders give equal bytes. Hidden files, caches, virtual environments and runs stay
    behind.

    Raises:
        ConfigError: the files are larger than `limit_bytes` together; the hint names the largest parts.
    """
    files = {file.relative_to(folder).as_posix(): file for file in _files(folder)}
    hint = "move the environment into a folder of its own"
    return pack_files(files, what=f"the environment's folder {folder}", hint=hint, limit_bytes=limit_bytes)


def pack_files(files: Mapping[str, Path], *, what: str, hint: str = "", limit_bytes: int = CODE_LIMIT_BYTES) -> bytes:
    """A zip of files under these names; equal files give equal bytes.

    Raises:
        ConfigError: `what` they are is larger than `limit_bytes`; the hint names the largest parts.
    """
    sizes: Counter[str] = Counter()
    for name, file in files.items():
        sizes[name.partition("/")[0]] += file.stat().st_size
        if sizes.total() > limit_bytes:
            largest = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in sizes.most_common(3))
            raise ConfigError(
                f"{what} is larger than {limit_bytes / 2**20:.0f} MiB", hint=f"{hint}; largest here: {largest}".lstrip("; ")
            )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, file in sorted(files.items()):
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, file.read_bytes())
    return buffer.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for root, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _SKIPPED and not f.startswith(".")]
        yield from (Path(root, n) for n in names if not n.startswith(".") and Path(root, n).is_file())
