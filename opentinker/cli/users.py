"""`opentinker users`: who may use the cluster, for administrators."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    ago,
    err,
    out,
    print_json,
    read_key,
)
from opentinker.client.local import API_KEY_VARIABLE, find_cluster
from opentinker.client.users import UsersClient
from opentinker.errors import ConfigError

users = typer.Typer(help="Manage users, their keys, and see what was done (administrators only).", no_args_is_help=True)


class Scope(StrEnum):
    """What a key may do."""

    READ = "read"
    SUBMIT = "submit"
    ADMIN = "admin"


NameArgument = Annotated[str, typer.Argument(help="The user's name.", show_default=False)]
KeyArgument = Annotated[str, typer.Argument(help="The key's id, as `opentinker users keys` shows it.", show_default=False)]
ScopeOption = Annotated[list[Scope] | None, typer.Option("--scope", help="May be repeated.")]
ShareOption = Annotated[float | None, typer.Option(help="Weight in fair sharing; 2 gets twice what 1 gets.")]
MaxGpusOption = Annotated[float | None, typer.Option(help="GPUs at once; negative takes the limit away.")]
MaxJobsOption = Annotated[int | None, typer.Option(help="Running jobs at once; negative takes the limit away.")]
OutOption = Annotated[
    Path | None, typer.Option("--out", help="Write the key into this new file, readable by you only, instead of showing it.")
]


@users.command()
def add(
    name: NameArgument,
    scope: ScopeOption = None,
    share: ShareOption = None,
    max_gpus: MaxGpusOption = None,
    max_jobs: MaxJobsOption = None,
    out_file: OutOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Create a user with a first key, which is shown once. Without --scope the user may submit."""
    limits = _limits(share, max_gpus, max_jobs)
    with _client(url, key, state_dir) as client, _destination(out_file) as show:
        answer = client.add(name, scope or [Scope.SUBMIT], **limits)
        show(answer["key"], answer if as_json else None)


@users.command("list")
def list_(
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List the users."""
    with _client(url, key, state_dir) as client:
        rows = client.users()
    if as_json:
        print_json({"users": rows})
        return
    table = _table("name", "scopes", "share", "max gpus", "max jobs", "state")
    for user in rows:
        limits = (_number(user["share"]), _number(user["max_gpus"]), _number(user["max_jobs"]))
        state = Text("disabled", "red") if user["disabled"] else Text("active", "green")
        table.add_row(user["name"], " ".join(user["scopes"]), *limits, state)
    out.print(table)


@users.command("set")
def set_(
    name: NameArgument,
    scope: ScopeOption = None,
    share: ShareOption = None,
    max_gpus: MaxGpusOption = None,
    max_jobs: MaxJobsOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Change a user. Scopes that are taken away are taken from all of the user's keys."""
    changes: dict[str, Any] = _limits(share, max_gpus, max_jobs)
    if scope:
        changes["scopes"] = [str(one) for one in scope]
    if not changes:
        raise ConfigError("nothing to change", hint="use --scope, --share, --max-gpus or --max-jobs")
    with _client(url, key, state_dir) as client:
        user = client.change(name, changes)
    out.print(f"{user['name']}: {' '.join(user['scopes'])}, share {_number(user['share'])}")


@users.command()
def disable(
    name: NameArgument, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """Make all of a user's keys invalid until `enable`. Jobs that the cluster drives go on; cancel them to end them."""
    with _client(url, key, state_dir) as client:
        client.change(name, {"disabled": True})
    out.print(f"{name} is disabled")


@users.command()
def enable(
    name: NameArgument, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """Make a disabled user's keys valid again."""
    with _client(url, key, state_dir) as client:
        client.change(name, {"disabled": False})
    out.print(f"{name} is enabled")


@users.command()
def keys(
    name: NameArgument,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List a user's keys; the keys themselves are not kept anywhere."""
    with _client(url, key, state_dir) as client:
        rows = client.keys(name)
    if as_json:
        print_json({"keys": rows})
        return
    table, now = _table("id", "name", "scopes", "created", "last used", "state"), time.time()
    for row in rows:
        revoked = row["revoked_at"]
        state = Text("valid", "green") if revoked is None else Text(f"revoked {ago(revoked, now)} ago", "red")
        ages = (ago(row["created_at"], now), ago(row["last_used_at"], now))
        table.add_row(row["id"], row["name"], " ".join(row["scopes"]), *ages, state)
    out.print(table)


@users.command("add-key")
def add_key(
    name: NameArgument,
    label: Annotated[str, typer.Option("--name", help="What the key is for.")] = "default",
    scope: ScopeOption = None,
    out_file: OutOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Give a user another key, which is shown once. Without --scope it may do all that the user may."""
    with _client(url, key, state_dir) as client, _destination(out_file) as show:
        answer = client.add_key(name, label, scope)
        show(answer, answer if as_json else None)


@users.command()
def revoke(
    name: NameArgument,
    key_id: KeyArgument,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Make a key invalid, at once and for ever."""
    with _client(url, key, state_dir) as client:
        client.revoke(name, key_id)
    out.print(f"{key_id} is revoked")


@users.command()
def rotate(
    name: NameArgument,
    key_id: KeyArgument,
    out_file: OutOption = None,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Replace a key by a new one, which is shown once; the old one is invalid at once."""
    with _client(url, key, state_dir) as client, _destination(out_file) as show:
        answer = client.rotate(name, key_id)
        show(answer, answer if as_json else None)


@users.command()
def audit(
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, newest first.")] = 50,
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Show who did what: changes of users and keys, refused keys, and jobs cancelled by others than their owners."""
    with _client(url, key, state_dir) as client:
        rows = client.audit(limit)
    if as_json:
        print_json({"events": rows})
        return
    table = _table("time", "actor", "action", "target", "from", "outcome")
    for row in rows:
        at = datetime.fromtimestamp(row["at"], UTC).strftime("%Y-%m-%d %H:%M:%SZ")
        outcome = Text(row["outcome"], "" if row["outcome"] == "ok" else "red")
        table.add_row(at, row["actor"] or "-", row["action"], row["target"] or "-", row["address"] or "-", outcome)
    out.print(table)


@contextmanager
def _client(url: str | None, key: Path | None, state_dir: Path) -> Iterator[UsersClient]:
    client = UsersClient(*find_cluster(url, read_key(key), state_dir))
    try:
        yield client
    finally:
        client.close()


class _Show:
    """Where a new key goes. The file is opened before the key exists: one that nobody could read would be lost."""

    def __init__(self, descriptor: int | None, file: Path | None) -> None:
        self._descriptor = descriptor
        self._file = file

    def __call__(self, key: dict[str, Any], document: dict[str, Any] | None) -> None:
        if self._descriptor is not None:
            with os.fdopen(self._descriptor, "w") as target:
                target.write(key.pop("key") + "\n")
            self._descriptor = None
        if document is not None:
            print_json(document)
            return
        err.print(f"key {key['id']} of {key['owner']}, with the scope {' '.join(key['scopes'])}", soft_wrap=True)
        if self._file is not None:
            err.print(f"written to {self._file}", soft_wrap=True)
            return
        err.print(f"It is not shown again. Its owner puts it into ${API_KEY_VARIABLE}, or into a file for --key-file:")
        print(key["key"])

    def give_up(self) -> None:
        if self._descriptor is not None and self._file is not None:
            os.close(self._descriptor)
            self._file.unlink()


@contextmanager
def _destination(file: Path | None) -> Iterator[_Show]:
    descriptor = None
    if file is not None:
        try:
            descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot create {file}: {error.strerror}") from error
    show = _Show(descriptor, file)
    try:
        yield show
    finally:
        show.give_up()


def _limits(share: float | None, max_gpus: float | None, max_jobs: int | None) -> dict[str, float | None]:
    """The limits that were given; a negative one means none."""
    limits: dict[str, float | None] = {} if share is None else {"share": share}
    for name, value in (("max_gpus", max_gpus), ("max_jobs", max_jobs)):
        if value is not None:
            limits[name] = None if value < 0 else value
    return limits


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
