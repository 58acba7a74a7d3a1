"""Do the tasks come as they should: the same for a seed, as JSON values, and none of the held-out ones in training?"""

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

from opentinker.env.checks.report import Finding, Mark
from opentinker.env.checks.source import error_line, method_line, unseeded_lines
from opentinker.env.checks.subject import Subject
from opentinker.env.tasks import Split, TaskSource

DRAWN = 2_000
"""Training tasks that are compared with the held-out ones; of a list, up to `LISTED`."""
LISTED = 10_000
GENERATED = 256
"""Held-out tasks that are asked of a generator."""
CHUNK = 100
JSON_ONLY = "make tasks of dicts, lists, texts and numbers"


async def check_tasks(subject: Subject) -> list[Finding]:
    """Finds the subject's tasks on the way. Its first finding FAILED means that there are none to play."""
    try:
        train, drawn = await _asked(subject, "train", lambda source: source.draw(subject.options.seed, 0, 32))
    except Exception as error:
        return [_broken(subject, "tasks", "train", error)]
    subject.tasks = drawn[: subject.options.tasks]
    found = [await _training(subject, train, drawn)]
    if found[0].mark is not Mark.FAILED:
        found.append(await _held_out(subject, train))
    return found


async def _training(subject: Subject, source: TaskSource, drawn: list[Any]) -> Finding:
    line = _line(subject, "train")
    for task in drawn:
        if problem := not_json(task):
            return Finding(
                "tasks",
                Mark.FAILED,
                f"a task is no JSON value: {problem}",
                JSON_ONLY,
                line,
            )
    seed = subject.options.seed
    _, again = await _asked(subject, "train", lambda fresh: fresh.draw(seed, 0, 16) + fresh.draw(seed, 16, 16))
    differs = [
        place for place, (one, other) in enumerate(zip(drawn, again, strict=False)) if canonical(one) != canonical(other)
    ]
    if differs:
        suspects = unseeded_lines(subject.environment)
        return Finding(
            "tasks",
            Mark.FAILED,
            f"the same seed gives other tasks the second time, first at place {differs[0]}",
            "derive tasks from the seed alone: random.Random(seed)"
            + (f"; suspects: {', '.join(suspects[:3])}" if suspects else ""),
            line,
        )
    distinct = len({canonical(task) for task in drawn})
    size = f" of {source.size:,}" if source.size is not None else ""
    if distinct == 1 and source.size != 1:
        return Finding("tasks", Mark.WARNING, "all training tasks are the same", "let make_task use its seed", line)
    return Finding("tasks", Mark.OK, f"{distinct} different in {len(drawn)} draws{size}; the same for the same seed")


async def _held_out(subject: Subject, train: TaskSource) -> Finding:
    line = _line(subject, "held_out")
    try:
        _, held_out = await _asked(subject, "held_out", lambda source: source.first(LISTED if source.size else GENERATED))
    except Exception as error:
        return _broken(subject, "held-out tasks", "held_out", error)
    if not held_out:
        return Finding(
            "held-out tasks", Mark.WARNING, "there are none, so nothing is evaluated", "give some in held_out_tasks", line
        )
    for task in held_out:
        if problem := not_json(task):
            return Finding("held-out tasks", Mark.FAILED, f"a task is no JSON value: {problem}", JSON_ONLY, line)
    count = min(train.size, LISTED) if train.size is not None else DRAWN
    try:
        _, drawn = await _asked(subject, "train", lambda source: _many(source, subject, count))
    except Exception as error:
        return _broken(subject, "tasks", "train", error)
    shared = {canonical(task) for task in held_out} & {canonical(task) for task in drawn}
    if shared:
        return Finding(
            "held-out tasks",
            Mark.FAILED,
            f"{len(shared)} of {len(held_out)} are drawn in training too, such as {min(shared)[:80]}",
            "keep them out of make_task, or split the data into two files",
            line,
        )
    return Finding("held-out tasks", Mark.OK, f"{len(held_out):,}, none of them among {len(drawn):,} training draws")


def _many(source: TaskSource, subject: Subject, count: int) -> list[Any]:
    """Up to `count` training tasks; fewer where making them is slow."""
    drawn: list[Any] = []
    end = time.monotonic() + subject.options.timeout_s
    while len(drawn) < count and time.monotonic() < end:
        drawn += source.draw(subject.options.seed, len(drawn), min(CHUNK, count - len(drawn)))
    return drawn


async def _asked(subject: Subject, split: Split, ask: Callable[[TaskSource], list[Any]]) -> tuple[TaskSource, list[Any]]:
    def work() -> tuple[TaskSource, list[Any]]:
        source = subject.environment.task_source(split, subject.args)
        return source, ask(source)

    # Reading a dataset for the first time takes longer than a call of an episode may.
    async with asyncio.timeout(10 * subject.options.timeout_s):
        return await subject.threads.call(work)


def _broken(subject: Subject, check: str, split: Split, error: Exception) -> Finding:
    if isinstance(error, TimeoutError):
        seen = f"they were not there after {10 * subject.options.timeout_s:g} s"
        return Finding(check, Mark.FAILED, seen, "make fewer at once, or read them from a file", _line(subject, split))
    where = error_line(subject.environment, error)
    return Finding(
        check,
        Mark.FAILED,
        f"{type(error).__name__}: {error}",
        str(getattr(error, "hint", "")) or "mend the code that makes them",
        where,
    )


def _line(subject: Subject, split: Split) -> str:
    method = "make_task" if split == "train" else "held_out_tasks"
    return method_line(subject.environment, method) or method_line(subject.environment, "task_source")


def canonical(task: Any) -> str:
    """A task as text that is equal for equal tasks."""
    return json.dumps(task, sort_keys=True, ensure_ascii=False)


def not_json(value: Any) -> str:
    """Why a value is none that JSON can carry both ways; empty if it is one."""
    try:
        text = json.dumps(value, allow_nan=False)
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        return str(error)
    return "" if json.loads(text) == value else "it changes on the way: keys must be texts, and sequences lists"
