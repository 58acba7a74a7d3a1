"""`opentinker secrets`: values for one's own jobs that no config holds."""

import getpass
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    ago,
    err,
    out,
    plain_table,
    print_json,
    read_key,
)
from opentinker.client.local import find_cluster
from opentinker.client.secrets import SecretsClient
from opentinker.config.requirements import SECRET_NAME
from opentinker.errors import ConfigError

secrets = typer.Typer(
    help="Keep secrets on the cluster for your own jobs; a config names them (environment.secrets).", no_args_is_help=True
)
NameArgument = Annotated[str, typer.Argument(help="The secret's name.", show_default=False)]
FileOption = Annotated[
    Path | None,
    typer.Option("--from-file", help="A file with the value; '-' reads it from standard input.", allow_dash=True),
]


@secrets.command("set")
def set_(
    name: NameArgument,
    from_file: FileOption = None,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Set a secret, or change its value. The value is asked for, or read from a file or standard input."""
    if not re.fullmatch(SECRET_NAME, name):
        raise ConfigError(f"{name[:80]!r} cannot be a secret's name", hint="up to 63 letters, digits and . _ -, no sign first")
    if str(from_file) == "-" and str(key) == "-":
        raise ConfigError("the key and the value cannot both come from standard input", hint="use a file for one of them")
    address = find_cluster(url, read_key(key), state_dir)
    with _client(address) as client:
        client.put(name, _read_value(from_file))
    out.print(f"{name} is set; a config names it so: environment.secrets.VARIABLE={name}", markup=False, soft_wrap=True)


@secrets.command("list")
def list_(
    as_json: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """List your secrets. Their values are shown to nobody."""
    with _client(find_cluster(url, read_key(key), state_dir)) as client:
        rows = client.names()
    if as_json:
        print_json({"secrets": rows})
        return
    if not rows:
        err.print("no secrets; `opentinker secrets set NAME` sets one")
        return
    table, now = plain_table(("NAME", {}), ("SET", {}), ("CREATED", {})), time.time()
    for row in rows:
        table.add_row(row["name"], f"{ago(row['updated_at'], now)} ago", f"{ago(row['created_at'], now)} ago")
    out.print(table)


@secrets.command()
def remove(
    name: NameArgument, url: UrlOption = None, key: KeyOption = None, state_dir: StateDirOption = DEFAULT_STATE_DIR
) -> None:
    """Remove a secret. Drivers that run have its value already; jobs whose driver starts later fail."""
    with _client(find_cluster(url, read_key(key), state_dir)) as client:
        client.remove(name)
    out.print(f"{name} is removed", markup=False)


@contextmanager
def _client(address: tuple[str, str]) -> Iterator[SecretsClient]:
    client = SecretsClient(*address)
    try:
        yield client
    finally:
        client.close()


def _read_value(file: Path | None) -> str:
    """The value, without a line's end after it. It is never an argument, which others on a machine could read.

    Raises:
        ConfigError: it cannot be read, or nothing is in it.
    """
    if file is None and not sys.stdin.isatty():
        raise ConfigError(
            "there is no terminal to ask for the value on", hint="`--from-file FILE`, or `--from-file -` for standard input"
        )
    if file is None:
        value = getpass.getpass("value: ")
    else:
        try:
            value = sys.stdin.read() if str(file) == "-" else file.expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            # A name that is no file may be the value itself, so it is not repeated.
            why = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigError(f"cannot read the value's file: {why}", hint="--from-file takes a file's name") from None
    value = value.removesuffix("\n").removesuffix("\r")
    if not value:
        raise ConfigError("the value is empty")
    return value
