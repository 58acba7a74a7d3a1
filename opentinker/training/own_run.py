"""A run that the user's own process drives, from job to job: its folder says which of their checkpoints it goes on from.

A submitted job's run lies beside its checkpoints. This one's lies with the user, its checkpoints with the cluster, below jobs
that end with the processes that drove them.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from opentinker.checkpoints import CheckpointRef
from opentinker.config.job import RLJobConfig
from opentinker.errors import CheckpointError, ConfigError, NotFoundError
from opentinker.training.book import CheckpointBook
from opentinker.training.folder_lock import lock, locked_if_whole
from opentinker.training.recorder import METRICS, check_no_run
from opentinker.training.same_run import check_same_run
from opentinker.training.schedule import checkpoint_name
from opentinker.training.whole_file import write_whole

Resume = bool | Literal["auto"]
"""True: go on with the run in the folder, which has to have a checkpoint. 'auto': go on if it has one, begin otherwise."""
FILE = "resume.json"
FORMAT = 1
MET = 2
"""Steps that the folder knows where drivers meet: they go back to one that all have, and may be a save apart. A driver alone
has its last one only, and needs no other to be there still."""


@dataclass(frozen=True)
class Left:
    """What a run's folder says of it."""

    checkpoints: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """Step -> the exact addresses of its checkpoints, by policy: agents, or "" where there is one."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Digests of what was given in Python and no config holds, such as rows, by name."""

    def to_json(self) -> dict[str, Any]:
        saved = [{"step": step, "addresses": dict(addresses)} for step, addresses in self.checkpoints.items()]
        return {"format": FORMAT, "given": dict(self.given), "checkpoints": saved}


class OwnRun(CheckpointBook):
    """Opened before anything is asked of a cluster; `begin` with the job that the run is, or goes on, in."""

    spare = 1  # the folder hears of a checkpoint when it is whole, and must not be left with one that was deleted for it

    def __init__(
        self, folder: Path, config: Mapping[str, Any], resume: Resume = False, given: Mapping[str, str] | None = None
    ) -> None:
        """`config` are the resolved fields of the run's job, `given` the digests of what they do not hold. Writes nothing, but
        a run that goes on is this process's from here on: no other one drives it, and what is read of it stays true.

        Raises:
            ConfigError: the folder holds a run, or with `resume` none to go on with, or one of another config; or `resume`
                cannot be had.
            ConflictError: another process drives the run.
            CheckpointError: the folder's record cannot be read.
        """
        self.folder = folder
        self._config, self._given = config, dict(given or {})
        self._remembered = MET if config.get("coordinator") else 1
        self._saved: dict[int, Mapping[str, str]] = {}
        self._owner = self._job = ""
        self._places: Mapping[str, str | None] = {}
        self._begins_anew = False
        if not resume:
            check_no_run(folder)
        else:
            check_can_resume(config)
            with _writable(folder), locked_if_whole(folder) if (folder / FILE).exists() else nullcontext():
                self._take_up(resume)

    @property
    def steps(self) -> list[int]:
        """Those after which it can go on."""
        return sorted(self._saved)

    @property
    def step(self) -> int | None:
        """After which it goes on; None if it begins."""
        return max(self._saved, default=None)

    @property
    def resume_at(self) -> int | None:
        """As the `Recorder`'s."""
        return -1 if self._begins_anew else self.step

    @property
    def addresses(self) -> list[str]:
        """The checkpoints that a job has to name so that the run can go on in it."""
        return [address for addresses in self._saved.values() for address in addresses.values()]

    def begin(self, owner: str, job_id: str, places: Mapping[str, str | None] | None = None) -> None:
        """From now on the run is in this job. `places` says for each policy what its checkpoints are called by: None is the
        job's own policy.

        Raises:
            ConflictError: another process drives the run.
            ConfigError: the folder cannot be written.
        """
        self._owner, self._job, self._places = owner, job_id, places or {"": None}
        with _writable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock(self.folder)
            self._write()

    def where(self, step: int, policy: str = "") -> str:
        return self._saved.get(step, {}).get(policy) or checkpoint_name(step)

    def saved(self, step: int, versions: Mapping[str, int]) -> None:
        found = {
            policy: str(CheckpointRef(self._owner, self._job, checkpoint_name(step), versions[policy], place))
            for policy, place in self._places.items()
        }
        earlier = [(before, addresses) for before, addresses in sorted(self._saved.items()) if before < step]
        self._saved = dict([*earlier, (step, found)][-self._remembered :])
        self._write()

    def _take_up(self, resume: Resume) -> None:
        left, has_rows = read_left(self.folder), (self.folder / METRICS).exists()
        if left is None and has_rows:
            raise ConfigError(
                f"{self.folder} holds a run that no user's process drove, or an older release's: it does not say where its "
                "checkpoints are",
                hint="begin another run in another folder, with start_from=... for what it learnt",
            )
        has_run = left is not None and bool(left.checkpoints or has_rows)  # one that died before it had either is none
        if left is not None and has_run:
            check_same_run(self.folder, self._config, left.given, self._given)
            self._saved = dict(sorted(left.checkpoints.items())[-self._remembered :])
        if not self._saved and resume is not True:
            self._begins_anew = has_run
        elif not self._saved:
            what = "a run without a checkpoint" if has_run else "no run"
            raise ConfigError(
                f"{self.folder} holds {what}: there is nothing to go on from",
                hint="begin without resume, in another folder; checkpoints are written every `save_every` steps",
            )

    def _write(self) -> None:
        write_whole(self.folder / FILE, json.dumps(Left(self._saved, self._given).to_json(), indent=1))


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """Raises: ConfigError for what the system says when the folder cannot be used."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write the run's folder {folder}: {error.strerror}") from error


@contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """Says that it is a run that cannot go on, where its checkpoint is gone, does not fit or is corrupt.

    Raises: CheckpointError.
    """
    try:
        yield
    except (CheckpointError, ConfigError, NotFoundError) as error:
        raise CheckpointError(
            f"the run in {folder} cannot go on: {error.detail}",
            hint=error.hint or "`opentinker checkpoints` lists earlier ones; another run can begin with one: start_from",
        ) from error


def read_left(folder: Path) -> Left | None:
    """What a run's folder says of it; None if it says nothing.

    Raises:
        CheckpointError: what it says cannot be read.
    """
    path = folder / FILE
    try:
        state = json.loads(path.read_text())
        if state["format"] != FORMAT:
            raise ValueError(f"it has format {state['format']}, this version reads {FORMAT}")
        saved = {int(each["step"]): dict(each["addresses"]) for each in state["checkpoints"]}
        return Left(saved, dict(state["given"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"what the run knows of its checkpoints cannot be read from {path}: {error!r}",
            hint="`opentinker checkpoints` lists them; another run can begin with one: start_from",
        ) from error


def check_can_resume(config: Mapping[str, Any]) -> None:
    """Raises: ConfigError when a run of this config could not go on in another job."""
    pools = [f"agents.{name}.pool" for name, agent in (config.get("agents") or {}).items() if agent.get("pool")]
    for where in [*pools, *(["arena"] if config.get("arena") else [])]:
        raise ConfigError(
            f"{where}: past versions are checkpoints of the job that they played in, and a run that goes on in another job "
            "has no way to them",
            hint="`opentinker submit` it, with scheduling.max_restarts, or leave resume out",
        )


def policy_places(config: RLJobConfig) -> dict[str, str | None]:
    """What the checkpoints of each policy of a run are called by, in an interactive job: None is the job's own policy."""
    if not config.agents:
        return {"": None}
    places: dict[str, str | None] = {}
    begun: set[str] = set()
    for name in config.policies:
        server = config.agents[name].server
        places[name] = name if server in begun else server or None
        begun.add(server)
    return places


def digests(given: Mapping[str, Any]) -> dict[str, str]:
    """By name, the digest of each that JSON can hold; objects that only Python knows are not compared."""
    found = {}
    for name, rows in given.items():
        if isinstance(rows, Sequence) and not isinstance(rows, str):
            digest = hashlib.sha256()
            try:
                for row in rows:
                    digest.update(json.dumps(row, sort_keys=True).encode() + b"\n")
            except (TypeError, ValueError):
                continue
            found[name] = f"{len(rows)} rows, sha256 {digest.hexdigest()[:16]}"
    return found
