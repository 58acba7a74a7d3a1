"""`opentinker env check`: does an environment keep its contract?"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from opentinker.cli.common import JsonOption, err, out, print_json
from opentinker.cli.env_arguments import ArgsOption, EnvironmentArgument, constructor_arguments, environment_name
from opentinker.env.checks import CheckOptions, Finding, Mark, Report, check_environment

_LOOKS = {
    Mark.OK: Text("ok", "green"),
    Mark.WARNING: Text("warning", "yellow"),
    Mark.FAILED: Text("FAILED", "bold red"),
    Mark.SKIPPED: Text("skipped", "dim"),
}
_DEFAULTS = CheckOptions()


def check(
    name: EnvironmentArgument,
    args: ArgsOption = None,
    episodes: Annotated[
        int, typer.Option(min=0, help="Episodes over which memory is watched; 0 leaves it out.")
    ] = _DEFAULTS.episodes,
    timeout: Annotated[float, typer.Option(min=0.01, help="Deadline of every call, in seconds.")] = _DEFAULTS.timeout_s,
    time_limit: Annotated[
        float, typer.Option(min=0.1, help="The watch over memory ends after so many seconds.")
    ] = _DEFAULTS.time_limit_s,
    max_turns: Annotated[int, typer.Option(min=1, help="Longest episode, in turns.")] = _DEFAULTS.max_turns,
    tasks: Annotated[int, typer.Option(min=1, help="Tasks that are played.")] = _DEFAULTS.tasks,
    seed: Annotated[int, typer.Option(min=0, help="Tasks and actions derive from it.")] = _DEFAULTS.seed,
    as_json: JsonOption = False,
) -> None:
    """Run an environment through its contract, and print what to mend.

    Episodes are played with sensible and with senseless actions: are they determined by task and actions, do they keep to
    themselves, are rewards finite, does every call return, does memory stay? Ends with 1 if something is broken.
    """
    options = CheckOptions(
        episodes=episodes, timeout_s=timeout, time_limit_s=time_limit, max_turns=max_turns, tasks=tasks, seed=seed
    )
    arguments = constructor_arguments(args)
    with _stdout_to_stderr():  # what the environment prints is not the command's result
        report = check_environment(environment_name(name), arguments, options)
    if as_json:
        print_json(report.to_json())
    else:
        _show(report)
    if not report.ok:
        raise typer.Exit(1)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Of this process and of those that it starts."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _show(report: Report) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        table.add_row(_LOOKS[finding.mark], finding.check, Text(finding.seen))
    out.print(table)
    for finding in report.findings:
        if finding.mark in (Mark.FAILED, Mark.WARNING) and (finding.mend or finding.where):
            out.print()
            out.print(_advice(finding), soft_wrap=True)
    out.print()
    failed = sum(finding.mark is Mark.FAILED for finding in report.findings)
    warned = sum(finding.mark is Mark.WARNING for finding in report.findings)
    verdict = Text(f"{report.environment}: ", "bold")
    verdict.append(f"{failed} broken" if failed else "keeps the contract", "bold red" if failed else "bold green")
    if warned:
        verdict.append(f", {warned} warning{'' if warned == 1 else 's'}", "yellow")
    out.print(verdict, soft_wrap=True)
    if not report.ok:
        err.print(Text("hint: docs/environments.md says what each of these means", "yellow"), soft_wrap=True)


def _advice(finding: Finding) -> Text:
    text = Text(finding.check, "bold red" if finding.mark is Mark.FAILED else "bold yellow")
    if finding.where:
        path, _, line = finding.where.rpartition(":")
        text.append(f" ({_relative(path)}:{line})", "cyan")
    return text.append(f": {finding.mend}", "default not bold")


def _relative(path: str) -> str:
    try:
        return str(Path(path).relative_to(Path.cwd()))
    except ValueError:
        return path
