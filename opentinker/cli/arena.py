"""`opentinker arena`: who of a run's checkpoints beats whom."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from opentinker.cli.common import (
    DEFAULT_STATE_DIR,
    JsonOption,
    KeyOption,
    StateDirOption,
    UrlOption,
    err,
    out,
    print_json,
    read_key,
    signals_as_interrupt,
)
from opentinker.client.client import Client
from opentinker.client.local import find_cluster
from opentinker.client.scheduler import SchedulerClient
from opentinker.config.arena import ArenaConfig
from opentinker.config.base import parse_config
from opentinker.config.job import RLJobConfig, parse_job
from opentinker.env.load import load_environment
from opentinker.errors import ConfigError, EnvironmentLoadError
from opentinker.training.agents_report import render_agents_report
from opentinker.training.arena import reference_players
from opentinker.training.arena_report import LATER, arena_files, as_json, as_markdown
from opentinker.training.checkpoint_arena import WHILE_TRAINING, Version, chosen, left_out, named, play_versions, versions
from opentinker.training.metrics import Row
from opentinker.training.recorder import render_again


def arena(
    job_id: Annotated[
        str, typer.Argument(metavar="JOB", help="A run of several agents, of `opentinker ps --all`.", show_default=False)
    ],
    players: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[AGENT@STEP ...]",
            help="Which of its checkpoints play, such as black@20 white@best. Default: of each agent the first, the last, and "
            "others between.",
            show_default=False,
        ),
    ] = None,
    versions_per_agent: Annotated[int, typer.Option("--versions", min=1, help="How many of each agent, by default.")] = 4,
    reference: Annotated[
        list[str] | None,
        typer.Option(
            help="A player that stays the same: a name that the environment brings, or path/to/file.py:function; may be given "
            "several times. Default: the run's, or all that the environment brings.",
            show_default=False,
        ),
    ] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Held-out tasks per pair.", show_default=False)] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Games per task and arrangement of the seats.", show_default=False)
    ] = None,
    environment: Annotated[
        str | None,
        typer.Option(help="The environment, where the run's name of it means nothing here.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", help="Where to save. Default: `arena` in the run's folder.", show_default=False),
    ] = None,
    as_json_: JsonOption = False,
    url: UrlOption = None,
    key: KeyOption = None,
    state_dir: StateDirOption = DEFAULT_STATE_DIR,
) -> None:
    """Let checkpoints of a run play each other and reference players: a table, ratings, and a picture.

    The games run in this process; a server on the cluster holds the checkpoints, and ends with the command.
    """
    address, api_key = find_cluster(url, read_key(key), state_dir)
    with signals_as_interrupt(), Client(address, api_key) as client:
        record, config = _run_of(client.scheduler, job_id)
        last = _last_step(client.scheduler, job_id)
        saved = versions(config, client.scheduler.checkpoints(job_id), last)
        without = left_out(config)
        playing = named(saved, players, without) if players else chosen(saved, versions_per_agent)
        if not playing:
            raise ConfigError(
                f"{job_id} has saved no checkpoint of an agent that learns", hint="training.save_every saves some"
            )
        for agent, why in without.items():
            err.print(f"{agent} is left out: {why}", markup=False, soft_wrap=True)
        asked = {"references": tuple(reference) if reference else None, "tasks": tasks, "samples": samples}
        settings = (config.arena or ArenaConfig()).model_dump() | {name: value for name, value in asked.items() if value}
        row = _play(client, job_id, config, parse_config(ArenaConfig, settings), playing, environment)
    folder = output or _folder(record, job_id)
    title = f"Checkpoints of {job_id}"
    _save(folder, arena_files([row], title))
    if output is None:
        render_again(folder.parent, render_agents_report)
    if as_json_:
        print_json(as_json([row]))
    else:
        out.print(as_markdown([row], title), markup=False, soft_wrap=True)
        out.print(f"saved: {folder}", soft_wrap=True)


def _run_of(scheduler: SchedulerClient, job_id: str) -> tuple[Mapping[str, Any], RLJobConfig]:
    """Raises: ConfigError when the job is no run of several agents, or one whose policies cannot meet on one server."""
    record = scheduler.job(job_id)
    config = parse_job(record["config"])
    if not isinstance(config, RLJobConfig) or not config.agents:
        raise ConfigError(f"{job_id} is no run of several agents", hint="a job of kind rl with `agents`")
    if config.lora is None:
        raise ConfigError(
            f"{job_id} trained full parameters, which need a server for themselves",
            hint=WHILE_TRAINING,
        )
    return record, config


def _last_step(scheduler: SchedulerClient, job_id: str) -> int | None:
    """The last step of which the run wrote a row; None if it wrote none."""
    steps, after = [], 0
    while True:
        answer = scheduler.metrics(job_id, after=after)
        steps += [int(row["step"]) for row in answer["rows"] if row["kind"] == "agents_step"]
        if not answer["rows"] or answer["next"] == after:
            return max(steps, default=None)
        after = answer["next"]


def _play(
    client: Client,
    job_id: str,
    config: RLJobConfig,
    settings: ArenaConfig,
    playing: Sequence[Version],
    environment: str | None,
) -> Row:
    name = environment or config.environment.name
    try:
        loaded = load_environment(name)
    except EnvironmentLoadError as error:
        if environment:
            raise
        raise EnvironmentLoadError(error.detail, hint=f"--environment says what '{name}' is called here") from error
    try:
        reference_players(settings.references, loaded, config.agents)
    except EnvironmentLoadError as error:  # the run's files went with it, and lie elsewhere
        raise EnvironmentLoadError(error.detail, hint="--reference path/to/file.py:function says where it is here") from error
    err.print(f"{len(playing)} checkpoints play: {', '.join(version.name for version in playing)}; waiting for a server")
    engine = config.engine.model_copy(
        update={
            "max_adapters": len(playing) + 1,
            "lora_serving": "auto",
            "max_model_len": max(config.server_of(version.agent).engine.max_model_len for version in playing),
        }
    )
    loras = [lora for version in playing if (lora := config.lora_of(version.agent)) is not None]
    with client.create_job(
        config.base_model,
        lora=max(loras, key=lambda lora: lora.rank),  # the server has room for adapters of its own one's rank
        engine=engine,
        trainer=config.trainer,
        resources=config.resources,
        name=f"arena of {job_id}",
        seed=config.training.seed,
        checkpoints=[version.ref for version in playing],
    ) as hosted:
        return hosted.run(lambda policy: play_versions(policy, config, settings, loaded, playing))


def _folder(record: Mapping[str, Any], job_id: str) -> Path:
    """In the run's folder, if that is on this machine."""
    there = Path(str(record.get("run_dir") or ""))
    return (there if record.get("run_dir") and there.is_dir() else Path("runs") / job_id) / LATER


def _save(folder: Path, texts: Mapping[str, str]) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {error.strerror}", hint="-o names another folder") from error
