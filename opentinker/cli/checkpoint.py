"""`opentinker checkpoint`: what can be done with the checkpoints that jobs have saved."""

import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.checkpoint_names import joined_policy, split_policy
from opentinker.checkpoints import MANIFEST, parse_name, policy_root, versioned
from opentinker.cli.checkpoints import checkpoints, size
from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JobArgument,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    connected,
    err,
    out,
    print_json,
)
from opentinker.client.scheduler import SchedulerClient
from opentinker.errors import ConfigError, NotFoundError
from opentinker.export import export_checkpoint
from opentinker.storage import Storage

checkpoint = typer.Typer(help="List, tag, delete and export what jobs have saved.", no_args_is_help=True)
NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="[POLICY/]NAME[@VERSION]",
        help="The checkpoint, of the job's own policy or of a further one; without a version the newest one.",
        show_default=False,
    ),
]
TagArgument = Annotated[str, typer.Argument(metavar="TAG", help="Another name for it.", show_default=False)]
GivenArgument = Annotated[
    str, typer.Argument(metavar="[POLICY/]TAG", help="A name that was given to a checkpoint.", show_default=False)
]

checkpoint.command("list")(checkpoints)


@checkpoint.command()
def tag(
    job_id: JobArgument,
    name: NameArgument,
    tag: TagArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Give a checkpoint a tag. It can be used in place of its name (start_from=JOB/TAG), and keeps it from being deleted.

    A tag that another checkpoint of the job has moves to this one.
    """
    with connected(url, key, state_dir) as client:
        tagged = client.tag_checkpoint(job_id, name, tag)
    if as_json:
        print_json(tagged)
    else:
        out.print(f"{tagged['ref']} is {job_id}/{joined_policy(tagged['policy'], tag)}", markup=False, soft_wrap=True)


@checkpoint.command()
def untag(
    job_id: JobArgument,
    tag: GivenArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Take a tag away. The checkpoint stays, until something deletes it."""
    with connected(url, key, state_dir) as client:
        client.untag_checkpoint(job_id, tag)
    if as_json:
        print_json({"job": job_id, "untagged": tag})
    else:
        out.print(f"{job_id} has no tag {tag} any more", markup=False, soft_wrap=True)


@checkpoint.command()
def delete(
    job_id: JobArgument,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Delete a checkpoint for good, on the cluster and in its storage.

    One that has a tag, that an open job starts from, or that its own job would go on from is not deleted.
    """
    with connected(url, key, state_dir) as client:
        chosen = _chosen(client, job_id, name)
        if not yes and not _confirmed(chosen):
            raise typer.Exit(1)
        client.delete_checkpoint(job_id, joined_policy(chosen["policy"], versioned(chosen["name"], chosen["version"])))
    if as_json:
        print_json({"deleted": chosen["ref"], "bytes": chosen["bytes"]})
    else:
        out.print(f"{chosen['ref']} is deleted", markup=False, soft_wrap=True)


@checkpoint.command()
def export(
    source: Annotated[
        str, typer.Argument(metavar="JOB_ID|FOLDER", help="A job's id, or a checkpoint's own folder.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="A folder that is new or empty.", show_default=False)
    ],
    name: Annotated[
        str | None,
        typer.Argument(metavar="[[POLICY/]NAME[@VERSION]]", help="The job's checkpoint, or its tag.", show_default=False),
    ] = None,
    merge: Annotated[
        bool, typer.Option("--merge", help="Of an adapter: the base model with the adapter in it, as a model of its own.")
    ] = False,
    base_model: Annotated[
        Path | None, typer.Option(help="With --merge: where the base model is, if not where the job had it.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="With --merge: float32, bfloat16 or float16. Default: the base model's own.")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(metavar="URL", help="The cluster's storage_url, to bring from there what is not on this machine."),
    ] = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Write a checkpoint as a folder that transformers, vLLM or peft load, without the optimizer's state.

    Runs here: on a machine that has the checkpoint's folder, or may read the cluster's storage, and with --merge torch.
    """
    if not merge and (base_model is not None or dtype is not None):
        raise ConfigError("--base-model and --dtype are of a merged adapter", hint="add --merge")
    folder, place = _folder(source, name, url, key, state_dir)
    with _here(folder, place, storage, output) as found:
        written = export_checkpoint(found, output, merge=_merge(base_model, dtype) if merge else None)
    if as_json:
        print_json(written)
        return
    what = {"full": "a model", "merged": "a model, the adapter merged into it", "lora": "an adapter for peft"}[written["kind"]]
    out.print(f"{written['path']}: {what}", markup=False, soft_wrap=True)


def _merge(base_model: Path | None, dtype: str | None) -> Any:
    from opentinker.server.merging import write_merged  # loads torch

    return partial(write_merged, base_model=base_model, dtype=dtype)


@contextmanager
def _here(folder: Path, place: Path | None, storage_url: str | None, output: Path) -> Iterator[Path]:
    """The checkpoint's folder on this machine; while it is used, one beside the output that was brought from the storage.

    Raises:
        ConfigError: it is at neither place.
        UnavailableError: the storage cannot be read from here.
    """
    if folder.is_dir():
        yield folder
        return
    if storage_url is None or place is None:
        raise ConfigError(
            f"{folder} is not on this machine",
            hint="run this on the machine where the job ran, name the cluster's storage (--storage URL), or copy the folder "
            "here and name it in the job's place",
        )
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as draft:
        there = Storage(storage_url, Path(draft))
        if not there.fetch_folder(Path(draft) / place, last=MANIFEST):
            raise ConfigError(f"{place} is not in the storage {storage_url}", hint="--storage is the cluster's storage_url")
        yield Path(draft) / place


def _folder(source: str, name: str | None, url: str | None, key: Path | None, state_dir: Path) -> tuple[Path, Path | None]:
    """(the checkpoint's folder where its job ran, or one that is on this machine; where it is in a storage)."""
    if name is None:
        folder = Path(source).expanduser()
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {source}", hint="of a job, name the checkpoint too: JOB_ID NAME@VERSION")
        return folder, None
    with connected(url, key, state_dir) as client:
        chosen = _chosen(client, source, name)
        run_dir = Path(client.job(source)["run_dir"])
    folder = policy_root(run_dir / "checkpoints", chosen["policy"]) / versioned(chosen["name"], chosen["version"])
    return folder, folder.relative_to(run_dir.parent.parent)  # <user>/<job>/..., as the storage has it


def _chosen(client: SchedulerClient, job_id: str, name: str) -> dict[str, Any]:
    """The job's checkpoint that a name, a version of it, or a tag means."""
    policy, rest = split_policy(name)
    wanted, version = parse_name(rest)
    every = client.checkpoints(job_id)
    found = [row for row in every if row["policy"] == policy]
    for row in found:
        if row["name"] == wanted and version in (None, row["version"]):
            return row
    for row in found:
        if version is None and wanted in row["tags"]:
            return row
    known = ", ".join(joined_policy(row["policy"], versioned(row["name"], row["version"])) for row in (found or every)[:10])
    raise NotFoundError(f"job {job_id} has no checkpoint '{name}'", hint=f"it has {known}" if known else "it has none")


def _confirmed(chosen: dict[str, Any]) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError("there is no terminal to ask on", hint="--yes deletes without asking")
    err.print(f"{chosen['ref']}, step {chosen['step']}, {size(chosen['bytes'])}", markup=False, soft_wrap=True)
    return typer.confirm("Delete it for good?", err=True)
