"""Does anything grow from episode to episode: memory, open files, threads, processes?"""

import asyncio
import gc
import os
import threading
import time
import tracemalloc
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path

from opentinker.env.checks.report import Finding, Mark
from opentinker.env.checks.source import method_line, source_file
from opentinker.env.checks.subject import STYLES, Subject

LOOKS = 8
"""How often memory is looked at, the warm-up left out."""
WARM_UP = 0.2
"""Share of the episodes in which caches may fill."""
LEAK_BYTES = 64.0
"""Growth of Python's memory per episode that is a leak: the smallest environment that is kept costs more."""
NOISE_BYTES = 64 * 1024
"""Growth that is no leak, however few the episodes: caches of Python's own fill for a while."""
RESIDENT_LEAK_BYTES = 64 * 1024
"""The same for the whole process, which is a much coarser measure."""
RESIDENT_NOISE_BYTES = 48 << 20
_OURS = [
    tracemalloc.Filter(False, f"*/{file}")
    for file in ("asyncio/base_events.py", "asyncio/events.py", "asyncio/timeouts.py", "pathlib.py", "tracemalloc.py")
] + [tracemalloc.Filter(False, __file__)]
"""What looking itself costs."""
FRAMES = 12
TRACED = 50
"""Episodes in which whole stacks are traced, to find what leaks."""


@dataclass(frozen=True)
class Look:
    """What the process held after so many episodes."""

    episodes: int
    traced_bytes: int
    resident_bytes: int
    files: int
    threads: int
    processes: int


async def check_growth(subject: Subject) -> tuple[list[Finding], dict[str, float]]:
    """Plays many short episodes. Findings, and the figures they rest on."""
    options = subject.options
    if subject.elsewhere:
        why = f"episodes run {subject.elsewhere}: this process says nothing about what they hold"
        return [Finding(check, Mark.SKIPPED, why) for check in ("memory", "handles")], {}
    if options.episodes < 2 * LOOKS:
        return [Finding("memory", Mark.SKIPPED, f"it takes at least {2 * LOOKS} episodes to see growth")], {}
    end = time.monotonic() + options.time_limit_s
    warm_up, pace = int(options.episodes * WARM_UP), count()
    # What was made untraced and is freed later would look like growth, so the warm-up is traced, too.
    tracemalloc.start()
    try:
        played, late = await _play(subject, pace, warm_up, time.monotonic() + options.time_limit_s * WARM_UP)
        looks = [await _look(played)]
        for number in range(1, LOOKS + 1):
            due = warm_up + (options.episodes - warm_up) * number // LOOKS - played
            begun = time.monotonic()
            more, late = await _play(subject, pace, due, begun + max(0.0, end - begun) / (LOOKS - number + 1))
            played += more
            looks.append(await _look(played))
    finally:
        tracemalloc.stop()
    culprit = await _culprit(subject, pace) if _grows(looks) else None
    figures = {
        "episodes": float(played),
        "bytes_per_episode": slope([(look.episodes, look.traced_bytes) for look in looks]),
        "resident_bytes_per_episode": slope([(look.episodes, look.resident_bytes) for look in looks]),
    }
    many = f"{played:,} episodes" + (f" (of {options.episodes:,}: the time was up)" if played < options.episodes else "")
    findings = [_memory(subject, looks, figures, many, culprit), _handles(subject, looks, many)]
    if late:
        findings.append(Finding("memory deadlines", Mark.FAILED, late, "", method_line(subject.environment, "step")))
    return findings, figures


async def _play(subject: Subject, pace: "count[int]", episodes: int, until: float) -> tuple[int, str]:
    """Up to `episodes`, until a moment; how many, and why one that was late ended the whole."""
    for played in range(episodes):
        if time.monotonic() > until:
            return played, ""
        number = next(pace)
        style = STYLES[number % 2]  # hostile ones are a megabyte each
        transcript = await subject.episode(number // 2 % len(subject.tasks), style)
        if transcript.problem is not None and transcript.problem.kind == "late":
            return played + 1, transcript.problem.detail
    return episodes, ""


async def _look(episodes: int) -> Look:
    await _settled()
    return Look(
        episodes,
        sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces(_OURS).traces),
        _resident_bytes(),
        _open_files(),
        threading.active_count(),
        _children(),
    )


async def _settled() -> None:
    """An event loop keeps cancelled timers, and what hangs on them, until they are many: make them many."""
    loop = asyncio.get_running_loop()
    for _ in range(200):
        loop.call_later(3600.0, gc.collect).cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    gc.collect()


def _resident_bytes() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # not Linux
        return 0


def _open_files() -> int:
    try:
        return len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return 0


def _children() -> int:
    try:
        return sum(len(path.read_text().split()) for path in Path("/proc/self/task").glob("*/children"))
    except OSError:  # not Linux, or a thread that ended meanwhile
        return 0


def slope(points: list[tuple[int, int]]) -> float:
    """The median of the slopes between all pairs of points (Theil-Sen): a jump or two does not move it."""
    slopes = sorted((y2 - y1) / (x2 - x1) for i, (x1, y1) in enumerate(points) for x2, y2 in points[i + 1 :] if x2 > x1)
    middle = len(slopes) // 2
    return slopes[middle] if slopes else 0.0


def _steady(points: list[tuple[int, int]]) -> bool:
    """Growing in at least three of four intervals of the last half."""
    later = points[len(points) // 2 :]
    return sum(b > a for (_, a), (_, b) in pairwise(later)) >= 0.75 * (len(later) - 1)


def _grows(looks: list[Look]) -> bool:
    points = [(look.episodes, look.traced_bytes) for look in looks]
    later = points[len(points) // 2 :]  # what fills up grows less and less
    return min(slope(points), slope(later)) > LEAK_BYTES and points[-1][1] - points[0][1] > NOISE_BYTES and _steady(points)


def _memory(
    subject: Subject, looks: list[Look], figures: dict[str, float], many: str, culprit: tuple[str, str] | None
) -> Finding:
    per_episode = figures["bytes_per_episode"]
    if culprit is not None:
        where, what = culprit
        seen = f"{per_episode:,.0f} bytes more with each of {many}"
        return Finding("memory", Mark.FAILED, seen, f"something keeps what an episode makes{what}", where)
    resident = [(look.episodes, look.resident_bytes) for look in looks]
    per_resident = figures["resident_bytes_per_episode"]
    if per_resident > RESIDENT_LEAK_BYTES and resident[-1][1] - resident[0][1] > RESIDENT_NOISE_BYTES and _steady(resident):
        seen = f"the process grows by {per_resident / 1024:,.0f} KiB with each of {many}, outside of Python's own memory"
        return Finding(
            "memory", Mark.FAILED, seen, "free what a library holds in close()", method_line(subject.environment, "close")
        )
    return Finding("memory", Mark.OK, f"steady over {many}")


async def _culprit(subject: Subject, pace: "count[int]") -> tuple[str, str]:
    """The author's line under which most memory is allocated that stays. Whole stacks are slow to trace: few episodes do."""
    file = source_file(subject.environment)
    folder = str(file.parent) if file is not None else ""
    end = time.monotonic() + subject.options.timeout_s
    tracemalloc.start(FRAMES)
    try:
        await _play(subject, pace, 5, end)
        await _settled()
        first = tracemalloc.take_snapshot()
        await _play(subject, pace, TRACED, end)
        await _settled()
        last = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    grown: dict[str, int] = {}
    for difference in last.compare_to(first, "traceback"):
        own = [frame for frame in difference.traceback if folder and frame.filename.startswith(folder)]
        if own and difference.size_diff > 0:
            line = f"{own[-1].filename}:{own[-1].lineno}"
            grown[line] = grown.get(line, 0) + difference.size_diff
    if not grown:
        return method_line(subject.environment, "step"), ""
    where = max(grown, key=lambda line: grown[line])
    return where, f"; most of it is made at this line ({grown[where] / 1024:,.0f} KiB)"


def _handles(subject: Subject, looks: list[Look], many: str) -> Finding:
    first, last = looks[0], looks[-1]
    allowed = max(4, (last.episodes - first.episodes) // 20)
    for noun, before, after in (
        ("open files", first.files, last.files),
        ("threads", first.threads, last.threads),
        ("processes", first.processes, last.processes),
    ):
        if after - before > allowed:
            seen = f"{noun}: {before} after the warm-up, {after} after {many}"
            return Finding(
                "handles",
                Mark.FAILED,
                seen,
                "end in close() what an episode opens or starts",
                method_line(subject.environment, "close"),
            )
    return Finding("handles", Mark.OK, "no more open files, threads or processes than before")
