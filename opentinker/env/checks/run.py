"""Runs all checks on an environment, in a thread of its own that is watched from outside: even an event loop may hang."""

import asyncio
import functools
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from opentinker.env.checks.conduct import check_conduct
from opentinker.env.checks.growth import check_growth
from opentinker.env.checks.repetition import check_repetition
from opentinker.env.checks.report import Finding, Mark, Report
from opentinker.env.checks.source import location_in, stack_line
from opentinker.env.checks.subject import STYLES, CheckOptions, Subject
from opentinker.env.checks.tasks import check_tasks
from opentinker.env.environment import Environment
from opentinker.env.load import load_for_one
from opentinker.env.processes import SessionFactory
from opentinker.env.stopping import raise_in_thread, stack_of
from opentinker.env.threads import UserThreads
from opentinker.errors import ConfigError, EnvironmentLoadError

BEAT_S = 0.1
TRIES = 20
CLOSING_S = 5.0
"""How long environments may take to close after Ctrl-C."""
SLUGGISH_S = 0.5
"""An async method that keeps the loop from turning for longer is worth a warning."""


def check_environment(
    environment: str | type[Environment],
    args: Mapping[str, Any] | None = None,
    options: CheckOptions | None = None,
    *,
    base_dir: Path | None = None,
) -> Report:
    """Run an environment through its contract. What is wrong with it is in the report, never an exception.

    `environment` is a class or a name as in `environment.name` of a config; `args` are its constructor's.
    """
    options = options or CheckOptions()
    report = Report(environment if isinstance(environment, str) else environment.__name__)
    try:
        loaded = load_for_one(environment, base_dir)
    except EnvironmentLoadError as error:
        report.findings.append(Finding("loads", Mark.FAILED, error.detail, error.hint, location_in(error.detail)))
        return report
    report.findings.append(Finding("loads", Mark.OK, loaded.__name__))
    _Watched(loaded, dict(args or {}), options, report).run()
    return report


class _Watched:
    """The checks on an event loop in a thread, whose heart beats as long as nothing blocks it."""

    def __init__(self, environment: type[Environment], args: Mapping[str, Any], options: CheckOptions, report: Report) -> None:
        self._environment = environment
        self._args = args
        self._options = options
        self._report = report
        self._beat = time.monotonic()
        self._longest_pause_s = 0.0
        self._paused_at = ""
        self._error: BaseException | None = None
        self._given_up = False
        self._ended = threading.Event()
        self._checking: asyncio.Task[Any] | None = None

    def run(self) -> None:
        thread = threading.Thread(target=self._work, name="opentinker-check", daemon=True)
        thread.start()
        while not self._ended.is_set():  # not `join`: interrupted by Ctrl-C, that takes the thread for one that has ended
            try:
                self._ended.wait(BEAT_S)
            except KeyboardInterrupt:
                self._cancel()
                self._ended.wait(CLOSING_S)
                raise
            pause = time.monotonic() - self._beat
            if pause > max(self._longest_pause_s, SLUGGISH_S):
                where = stack_line(self._environment, stack_of(thread.ident or 0))
                if where:  # it is not the checks themselves that take long
                    self._longest_pause_s, self._paused_at = pause, where
            if pause > self._options.timeout_s + SLUGGISH_S:
                self._loop_hangs()
                self._give_up(thread)
                return
        if self._error is not None:
            raise self._error

    def _give_up(self, thread: threading.Thread) -> None:
        """Ends what keeps the loop from turning, and the checks with it."""
        self._cancel()
        for _ in range(TRIES):
            if not self._ended.is_set() and time.monotonic() - self._beat > SLUGGISH_S:
                raise_in_thread(thread.ident or 0)
            self._ended.wait(BEAT_S)

    def _cancel(self) -> None:
        self._given_up = True
        if self._checking is not None:
            self._checking.get_loop().call_soon_threadsafe(self._checking.cancel)

    def _loop_hangs(self) -> None:
        self._report.findings.append(
            Finding(
                "deadlines",
                Mark.FAILED,
                f"an async method blocks the event loop for more than {self._options.timeout_s:g} s; in training, every other "
                "episode and the deadlines themselves would wait for it",
                "await what takes long; or write a plain method, which runs in a thread (execution = 'process': in a process)",
                self._paused_at,
            )
        )

    def _work(self) -> None:
        try:
            asyncio.run(self._checks())
        except BaseException as error:
            if not self._given_up:
                self._error = error
        finally:
            self._ended.set()

    async def _checks(self) -> None:
        self._checking = asyncio.current_task()
        try:
            sessions = SessionFactory(functools.partial(self._environment, **self._args))
        except ConfigError as error:
            self._report.findings.append(Finding("processes", Mark.FAILED, error.detail, error.hint))
            return
        heart = asyncio.ensure_future(self._heart())
        try:
            with UserThreads() as threads:
                await self._all(Subject(self._environment, self._args, self._options, threads, sessions))
        finally:
            heart.cancel()
            await sessions.close()

    async def _heart(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    async def _all(self, subject: Subject) -> None:
        report = self._report
        found = await check_tasks(subject)
        report.findings += found
        if found[0].mark is Mark.FAILED:
            return self._skip("there are no tasks to play", "actions", "determinism", "isolation", "single use", "memory")
        suggestions = self._suggestions(subject)
        if suggestions is not None:
            report.findings.append(suggestions)
        played = []
        for index in range(len(subject.tasks)):
            for style in STYLES:
                transcript = await subject.episode(index, style)
                played.append((style, transcript))
                if transcript.problem is not None and transcript.problem.kind == "late":
                    report.findings += check_conduct(subject, played)
                    return self._skip("calls hang: see deadlines", "determinism", "isolation", "single use", "memory")
        report.findings += check_conduct(subject, played)
        report.figures |= {"episodes_played": float(len(played)), "turns_played": float(sum(len(t.turns) for _, t in played))}
        report.findings += await check_repetition(subject, played)
        if not any(t.turns for _, t in played):
            return self._skip("no episode came as far as a turn", "memory")
        findings, figures = await check_growth(subject)
        report.findings += findings
        report.figures |= figures
        self._sluggish()

    def _suggestions(self, subject: Subject) -> Finding | None:
        try:
            subject.suggestions = [subject.scripts.suggested(task) for task in subject.tasks]
        except Exception as error:
            subject.suggestions = [[] for _ in subject.tasks]
            mend = "make it a class method that gives a list of texts for a task"
            return Finding("sample_actions", Mark.FAILED, f"it raised {type(error).__name__}: {error}", mend)
        return None

    def _skip(self, why: str, *checks: str) -> None:
        self._report.findings += [Finding(check, Mark.SKIPPED, why) for check in checks]

    def _sluggish(self) -> None:
        if self._longest_pause_s > SLUGGISH_S:
            seen = f"something kept the event loop from turning for {self._longest_pause_s:.1f} s"
            mend = "an async method must await what takes long; a plain one runs in a thread of its own"
            self._report.findings.append(Finding("event loop", Mark.WARNING, seen, mend, self._paused_at))
