"""Checkpoints by name and version: what they are called, and which ones a folder holds. No torch here: whole files only.

A checkpoint `name` of a policy at `version` is the folder `checkpoints/name@version` of its job; `name` alone means the one
saved last. Folders without a version are of runs from before versions were kept.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentinker.errors import ConfigError, InvalidRequestError

MANIFEST = "manifest.json"
STATE = "trainer_state.json"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
_NAMED = re.compile(rf"({NAME})(?:@(\d{{1,12}}))?")
_REF = re.compile(rf"(?:([a-z0-9][a-z0-9._-]{{0,62}})/)?(job-[0-9a-f]+)/(?:({NAME})/)?({NAME})(?:@(\d{{1,12}}))?")


@dataclass(frozen=True)
class CheckpointRef:
    """`user/job/policy/name@version`; the parts that may be left out are None. `policy` is that of a further policy of the job,
    such as an agent's; None: the job's own."""

    user: str | None
    job: str
    name: str
    version: int | None
    policy: str | None = None

    def __str__(self) -> str:
        parts = (self.user, self.job, self.policy, versioned(self.name, self.version))
        return "/".join(part for part in parts if part)

    def may_mean(self, other: "CheckpointRef") -> bool:
        """Whether this one, which may say less, is a way to write `other`."""
        return (
            (self.job, self.policy, self.name) == (other.job, other.policy, other.name)
            and self.user in (None, other.user)
            and self.version in (None, other.version)
        )


@dataclass(frozen=True)
class Checkpoint:
    """One that is whole. `created_at` is Unix time."""

    name: str
    version: int | None
    path: Path
    kind: str
    """full or lora."""
    model_type: str
    step: int
    created_at: float
    bytes: int


def parse_ref(text: str) -> CheckpointRef:
    """Raises: ConfigError when it is not of the form user/job/policy/name@version."""
    match = _REF.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{text!r} is not a checkpoint's address",
            hint="user/job/name@version, such as job-46b60ae170/final; `opentinker checkpoints` lists them",
        )
    user, job, policy, name, version = match.groups()
    return CheckpointRef(user, job, name, None if version is None else int(version), policy)


def policy_root(root: Path, policy: str | None) -> Path:
    """Where the checkpoints of a job's further policy are, below those of its own (None)."""
    return root if policy is None else root / "policies" / policy


def parse_name(text: Any) -> tuple[str, int | None]:
    """(name, version or None) of `name` or `name@version`.

    Raises:
        InvalidRequestError: it is neither.
    """
    match = _NAMED.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise InvalidRequestError(
            f"'{text}' is not a checkpoint name",
            hint="letters, digits, '.', '_' and '-', up to 100; '@version' behind it means one of its versions",
        )
    return match[1], None if match[2] is None else int(match[2])


def versioned(name: str, version: int | None) -> str:
    """What the folder of a checkpoint is called."""
    return name if version is None else f"{name}@{version}"


def parse_folder(folder: str) -> tuple[str, int | None] | None:
    """(name, version or None) of a checkpoint's folder; None if it is none."""
    match = _NAMED.fullmatch(folder)
    return None if match is None else (match[1], None if match[2] is None else int(match[2]))


def folders(root: Path) -> dict[tuple[str, int | None], Path]:
    """The folders of whole checkpoints below `root`, by name and version."""
    found = {}
    for manifest in root.glob(f"*/{MANIFEST}"):
        if (named := parse_folder(manifest.parent.name)) is not None:
            found[named] = manifest.parent
    return found


def checkpoints(root: Path) -> list[Checkpoint]:
    """The whole checkpoints below `root`, newest first. One that cannot be read is left out: it cannot be used either."""
    return newest_first(c for named, path in folders(root).items() if (c := _read(*named, path)) is not None)


def newest_first(found: Iterable[Checkpoint]) -> list[Checkpoint]:
    return sorted(found, key=lambda c: (c.created_at, c.version or 0, c.name), reverse=True)


def find(found: Iterable[Checkpoint], name: str, version: int | None = None) -> Checkpoint | None:
    """Of checkpoints that come newest first, the newest of that name, or the one of that version; None if there is none."""
    return next((c for c in found if c.name == name and version in (None, c.version)), None)


def checkpoint_of(
    name: str, version: int | None, path: Path, state: Any, manifest: Any, written_at: float
) -> Checkpoint | None:
    """What its trainer state and manifest say of a checkpoint; None if they are not those of one."""
    try:
        return Checkpoint(
            name=name,
            version=version,
            path=path,
            kind=str(state["kind"]),
            model_type=str(state["model_type"]),
            step=int(state["step"]),
            created_at=float(state.get("created_at") or written_at),
            bytes=sum(int(file["bytes"]) for file in manifest["files"].values()),
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _read(name: str, version: int | None, path: Path) -> Checkpoint | None:
    try:
        state, manifest = (json.loads((path / file).read_text()) for file in (STATE, MANIFEST))
        written_at = (path / MANIFEST).stat().st_mtime
    except (OSError, ValueError):
        return None
    return checkpoint_of(name, version, path, state, manifest, written_at)
