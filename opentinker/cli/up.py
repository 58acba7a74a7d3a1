"""`opentinker up`: a cluster on this machine, in the foreground."""

import threading
from pathlib import Path
from typing import Annotated

import typer

from opentinker.cli.common import DEFAULT_STATE_DIR, StateDirOption, out, signals_as_interrupt, uninterrupted


def up(
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
    runs_dir: Annotated[Path, typer.Option(help="Where jobs write their runs.")] = Path("runs"),
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
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
) -> None:
    """Start a cluster on this machine and keep it until Ctrl-C.

    With --ray-address the cluster is Ray's own: its nodes offer GPUs, or the custom resource `cpu_slot`, and the scheduler
    stays there when this command ends. It creates an API key on its first start; the other commands find it by themselves.
    """
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
            settings={
                **(read_yaml(settings) if settings else {}),
                **({"database_url": database_url} if database_url else {}),
            },
        )
        try:
            with signals_as_interrupt():  # again: Ray has set a handler of its own
                out.print(f"cluster is up at [bold]{cluster.url}[/bold]")
                out.print(f"API key in {cluster.key_path}", soft_wrap=True)
                out.print("Ctrl-C stops it")
                threading.Event().wait()
        except KeyboardInterrupt:
            out.print("stopping")
        finally:
            with uninterrupted():
                cluster.stop()
