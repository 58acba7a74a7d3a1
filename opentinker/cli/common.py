"""What the commands share: options, the connection to a cluster, and how errors look."""

import getpass
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from opentinker.client.local import API_KEY_VARIABLE, STATE_DIR, find_cluster
from opentinker.client.scheduler import SchedulerClient
from opentinker.client.submission import read_job
from opentinker.config.job import PreferenceJobConfig, RLJobConfig, SFTJobConfig
from opentinker.errors import ConfigError, OpenTinkerError

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

UrlOption = Annotated[str | None, typer.Option("--url", help="The cluster's address. Default: the cluster on this machine.")]
KeyOption = Annotated[
    Path | None,
    typer.Option(
        "--key-file",
        help="A file with your API key; '-' asks for it, or reads it from standard input. "
        f"Default: the key of the cluster on this machine, else ${API_KEY_VARIABLE}.",
        allow_dash=True,
    ),
]
StateDirOption = Annotated[Path, typer.Option("--state-dir", help="Where the cluster on this machine keeps its state.")]
DEFAULT_STATE_DIR = STATE_DIR
_INSTEAD = {
    "inference": "`opentinker submit` starts a model to sample from; from Python, `Client.serve`",
    "interactive": "create it from Python with `Client.create_job`, where your own program drives it",
}
"""Of jobs that `train` has nothing to do for."""
_ENDINGS = (signal.SIGTERM, signal.SIGHUP)
JsonOption = Annotated[bool, typer.Option("--json", help="For programs: one JSON document, or one per line.")]
JobsArgument = Annotated[
    list[str], typer.Argument(metavar="JOB_ID...", help="Jobs' ids, as `opentinker ps` shows them.", show_default=False)
]
JobArgument = Annotated[str, typer.Argument(help="The job's id, as `opentinker ps` shows it.", show_default=False)]
ConfigArgument = Annotated[Path, typer.Argument(help="A YAML file with the job's config.", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None, typer.Argument(help="Dotted overrides, such as training.steps=10.", show_default=False)
]


def print_error(error: OpenTinkerError) -> None:
    """One red line, and a hint where there is one."""
    err.print(Text(f"error: {error.detail}", "bold red"), soft_wrap=True)
    if error.hint:
        err.print(Text(f"hint: {error.hint}", "yellow"), soft_wrap=True)


def read_key(file: Path | None) -> str | None:
    """The API key in a file, or on standard input for "-". It is never an argument: those are visible to every user of a
    machine, and shells remember them.

    Raises:
        ConfigError: it cannot be read, or nothing is in it.
    """
    if file is None:
        return None
    if str(file) == "-":
        key = getpass.getpass("API key: ") if sys.stdin.isatty() else sys.stdin.readline()
    else:
        try:
            key = file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            # A name that is no file may be the key itself, so it is not repeated.
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read the key file: {why}", hint="--key-file takes a file's name, not the key") from None
    if not key.strip():
        raise ConfigError("the key file is empty")
    return key.strip()


@contextmanager
def connected(url: str | None, key: Path | None, state_dir: Path) -> Iterator[SchedulerClient]:
    """A scheduler client for what the options say.

    Raises:
        UnavailableError: no cluster is named and none runs here.
        AuthenticationError: no key.
        ConfigError: the key file cannot be read.
    """
    client = SchedulerClient(*find_cluster(url, read_key(key), state_dir))
    try:
        yield client
    finally:
        client.close()


def read_driven_config(path: Path, overrides: list[str] | None) -> RLJobConfig | SFTJobConfig | PreferenceJobConfig:
    """The job with a driver that a YAML file and overrides describe.

    Raises:
        ConfigError: it is of another kind, or see `read_job`.
    """
    job = read_job(path, overrides or ())
    if not isinstance(job, RLJobConfig | SFTJobConfig | PreferenceJobConfig):
        raise ConfigError(
            f"{path} describes a job of kind '{job.kind}': there is nothing to drive from this process", hint=_INSTEAD[job.kind]
        )
    return job


@contextmanager
def signals_as_interrupt() -> Iterator[None]:
    """SIGTERM, and SIGHUP unless it is ignored (nohup), raise KeyboardInterrupt within, to tidy up like Ctrl-C."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = [n for n in _ENDINGS if n == signal.SIGTERM or signal.getsignal(n) != signal.SIG_IGN]
    with _handled(numbers, interrupt):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP are ignored within, for cleaning up that must not be cut short and has deadlines itself."""
    with _handled([signal.SIGINT, *_ENDINGS], signal.SIG_IGN):
        yield


@contextmanager
def _handled(numbers: Sequence[int], handler: Any) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def print_json(document: Any) -> None:
    """One line of JSON on stdout, at once."""
    print(json.dumps(document, allow_nan=False), flush=True)


def without_token(job: dict[str, Any]) -> dict[str, Any]:
    """The job as it may be shown: a terminal's history is no place for its policies' tokens."""
    shown = dict(job)
    if job.get("server"):
        shown["server"] = _untold(job["server"])
    if job.get("servers"):
        shown["servers"] = {name: _untold(server) for name, server in job["servers"].items()}
    return shown


def _untold(server: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in server.items() if name != "token"}


def ago(then: float | None, now: float) -> str:
    """How long since a Unix time, for people."""
    if then is None:
        return "-"
    return duration(now - then)


def duration(seconds: float) -> str:
    """A length of time, for people."""
    seconds = max(0.0, seconds)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def amount(gpus: float, cpu_slots: int) -> str:
    """What a job holds or needs, for people."""
    parts = [f"{gpus:g} GPU{'' if gpus <= 1 else 's'}"] if gpus else []
    return " + ".join(parts + ([f"{cpu_slots} slot{'' if cpu_slots == 1 else 's'}"] if cpu_slots else [])) or "-"


def plain_table(*columns: tuple[str, dict[str, Any]]) -> Table:
    """A table of (heading, options) without lines; cells are cut rather than wrapped unless a column says otherwise."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold dim")
    for heading, options in columns:
        table.add_column(heading, **{"no_wrap": True, "overflow": "ellipsis", **options})
    return table


STATE_STYLE: dict[str, str] = {
    "QUEUED": "yellow",
    "STARTING": "yellow",
    "RUNNING": "green",
    "COMPLETED": "blue",
    "FAILED": "red",
    "CANCELLED": "magenta",
}


def state_text(job: dict[str, Any]) -> Text:
    return Text(job["state"], STATE_STYLE.get(job["state"], ""))
