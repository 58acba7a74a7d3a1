"""What a sandbox sees of the machine's files: the interpreter, its standard library, the system's libraries, named packages."""

import functools
import glob
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass

from opentinker.errors import ConfigError

_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64")
_LOADER_FILES = ("/etc/ld.so.cache", f"/etc/ld-musl-{os.uname().machine}.path")
_KINDS = ("site", "dist")
PACKAGES = "/packages"
GUEST = "/sandbox/guest.py"


@dataclass(frozen=True)
class Layout:
    """Paths of the machine and where the sandbox has them. It has nothing else but four devices and an empty /tmp."""

    python: str
    binds: tuple[tuple[str, str], ...]
    """(source, target), read-only."""
    covered: tuple[str, ...]
    """Folders below the targets that are empty in the sandbox: other packages, this one's rewards and answers among them."""
    links: tuple[tuple[str, str], ...]
    """(text, target) of symbolic links."""


@functools.cache
def layout(packages: tuple[str, ...] = ()) -> Layout:
    """The files of a sandbox of this interpreter, with `packages` importable.

    Raises:
        ConfigError: a package is not installed.
    """
    python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    multiarch = sysconfig.get_config_var("MULTIARCH") or ""
    links = tuple((os.readlink(p), p) for p in _LIBRARIES if os.path.islink(p))
    folders = []
    for folder in (p for p in _LIBRARIES if os.path.isdir(p) and not os.path.islink(p)):
        # Where libraries have a folder per architecture, the other ones beside it hold programs.
        inner = os.path.join(folder, multiarch)
        folders.append(inner if multiarch and os.path.isdir(inner) else folder)
    if not _below(standard, folders):
        # A Python of its own keeps its shared libraries beside its standard library; the system's does not.
        own = os.path.dirname(standard)
        folders.append(standard if own in _LIBRARIES else own)
    binds = [(p, p) for p in folders]
    binds += [(p, p) for p in _LOADER_FILES if os.path.isfile(p)]
    if not _below(python, folders):
        binds.append((python, python))
    inside = [
        f"{glob.escape(folder)}/{depth}{kind}-packages" for folder in folders for depth in ("", "python*/") for kind in _KINDS
    ]
    covered = [p for pattern in inside for p in glob.glob(pattern)]
    binds.append((os.path.join(os.path.dirname(__file__), "guest.py"), GUEST))
    binds += [found for name in packages for found in _package(name)]
    return Layout(python, tuple(binds), tuple(p for p in covered if not os.path.islink(p)), links)


def _below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(folder + "/") for folder in folders)


def _package(name: str) -> list[tuple[str, str]]:
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is None or spec.origin in (None, "built-in", "frozen"):
        raise ConfigError(f"the sandbox's package '{name}' is not installed", hint="name importable packages of this Python")
    path = os.path.dirname(str(spec.origin)) if spec.submodule_search_locations else str(spec.origin)
    found = [(os.path.realpath(path), f"{PACKAGES}/{os.path.basename(path)}")]
    libraries = f"{path}.libs"  # where wheels keep the shared libraries that they bring
    if os.path.isdir(libraries):
        found.append((os.path.realpath(libraries), f"{PACKAGES}/{os.path.basename(libraries)}"))
    return found


def bubblewrap_arguments(
    where: Layout, environment: dict[str, str], guest: Sequence[str], tmp_bytes: int, program: str = ""
) -> list[str]:
    """The command that runs `guest` in the same surroundings by bubblewrap.

    Raises:
        ConfigError: bubblewrap is not installed.
    """
    found = program or shutil.which("bwrap")
    if found is None:
        raise ConfigError("bubblewrap is not installed", hint="install the system's package 'bubblewrap'")
    line = [found, "--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    line += ["--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--die-with-parent", "--new-session", "--clearenv"]
    for name, value in environment.items():
        line += ["--setenv", name, value]
    for source, target in where.binds:
        line += ["--ro-bind", source, target]
    for text, target in where.links:
        line += ["--symlink", text, target]
    for target in where.covered:
        line += ["--size", "4096", "--tmpfs", target, "--remount-ro", target]
    for device in ("null", "zero", "random", "urandom"):
        line += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    line += ["--size", str(tmp_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp", "--"]
    return [*line, *guest]
