"""`opentinker up`: a cluster on this machine, in the foreground."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import DEFAULT_STATE_DIR, StateDirOption, out, signals_as_interrupt, uninterrupted
from opentinker.errors import UnavailableError

_OF_A_HEAD = ("state_dir", "runs_dir", "port", "database_url", "ray_address", "ray_port", "settings")
_OF_RAY = ("cpu_slots", "gpus", "ray_port")


def up(
    ctx: typer.Context,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    runs_dir: Annotated[Path, typer.Option(help="Where jobs write their runs.")] = Path("runs"),
    host: Annotated[
        str, typer.Option(help="Address to listen on; with --join, that of this machine which the others reach.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8780,
    cpu_slots: Annotated[
        int | None, typer.Option(min=1, help="Servers that may share this machine's CPU. Default: half the cores.")
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=0, help="GPUs to use. Default: all that are there.")] = None,
    database_url: Annotated[
        str | None,
        typer.Option(
            help="postgresql://user@host/name, without a password (docs/security.md). Default: SQLite in --state-dir."
        ),
    ] = None,
    ray_address: Annotated[
        str | None, typer.Option(help="Serve a running Ray cluster instead of starting one; 'auto' finds it.")
    ] = None,
    settings: Annotated[
        Path | None,
        typer.Option(
            help="YAML file of scheduler settings: quotas, shares, storage, models, ... (docs/scheduling.md, storage.md)."
        ),
    ] = None,
    ray_port: Annotated[int, typer.Option(min=0, max=65535, help="Port at which other nodes join; 0 takes a free one.")] = 0,
    join: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Add this machine to a running cluster, at the address that its `up` printed."),
    ] = None,
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C.

    With --join this machine becomes a node of a running cluster instead, until Ctrl-C or until that cluster ends.
    With --ray-address the cluster is Ray's own: its nodes offer GPUs, or the custom resource `cpu_slot`, and the scheduler
    stays there when this command ends. It creates an API key on its first start; the other commands find it by themselves.
    """
    if join is not None:
        _refuse(ctx, _OF_A_HEAD, "--join", "a node that joins takes them from the cluster that it joins")
        _join(join, cpu_slots, gpus, host if _given(ctx, ["host"]) else None)
        return
    if ray_address is not None:
        _refuse(ctx, _OF_RAY, "--ray-address", "a running Ray cluster has them already")
    from opentinker.config.base import read_yaml
    from opentinker.scheduler.cluster import EmbeddedCluster

    with signals_as_interrupt():
        cluster = EmbeddedCluster.start(
            state_dir=state_dir.resolve(),
            runs_dir=runs_dir.resolve(),
            host=host,
            port=port,
            cpu_slots=cpu_slots,
            gpus=gpus,
            ray_address=ray_address,
            ray_port=ray_port,
            settings={
                **(read_yaml(settings) if settings else {}),
                **({"database_url": database_url} if database_url else {}),
            },
        )
        try:
            with signals_as_interrupt():  # again: Ray has set a handler of its own
                out.print(f"cluster is up at [bold]{cluster.url}[/bold]")
                out.print(f"API key in {cluster.key_path}", soft_wrap=True)
                for line in how_to_join(cluster.ray_address):
                    out.print(line, soft_wrap=True)
                out.print("Ctrl-C stops it")
                threading.Event().wait()
        except KeyboardInterrupt:
            out.print("stopping")
        finally:
            with uninterrupted():
                cluster.stop()


def how_to_join(address: str) -> list[str]:
    """What is told of the address at which further nodes join."""
    from opentinker.scheduler.ray_daemons import is_loopback

    command = f"opentinker up --join {address}"
    if is_loopback(address.rpartition(":")[0].strip("[]")):
        return [
            f"another node on this machine joins with: {command}",
            "other machines can join if it is started with --host and this machine's address",
        ]
    return [f"other machines join with: {command}", "they need this account's ~/.ray/auth_token (docs/deploy.md)"]


def _refuse(ctx: typer.Context, names: Iterable[str], beside: str, why: str) -> None:
    if given := _given(ctx, names):
        options = " and ".join("--" + name.replace("_", "-") for name in given)
        raise typer.BadParameter(f"{options} cannot be given with {beside}: {why}")


def _given(ctx: typer.Context, names: Iterable[str]) -> list[str]:
    sources = {name: ctx.get_parameter_source(name) for name in names}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def _join(address: str, cpu_slots: int | None, gpus: int | None, host: str | None) -> None:
    from opentinker.scheduler.joining import JoinedNode

    with signals_as_interrupt():
        node = JoinedNode.start(address, cpu_slots, gpus, host)
        try:
            offers = node.offers
            out.print(f"this machine is a node of the cluster at [bold]{node.address}[/bold], as {offers.ip}")
            out.print(f"it offers {offers}")
            out.print("Ctrl-C takes it out again; jobs that run here fail then")
            if lost := node.wait():
                raise UnavailableError(lost)
        except KeyboardInterrupt:
            out.print("leaving")
        finally:
            with uninterrupted():
                node.stop()
