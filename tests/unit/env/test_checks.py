"""Every broken promise is found, named, and shown with its line; an environment that keeps them all passes."""

import signal
import subprocess
import sys
import threading
import time
from itertools import repeat
from pathlib import Path
from typing import Any

import psutil
import pytest

import opentinker as ot
from opentinker.env import play as play_module
from opentinker.env.checks import CheckOptions, Mark, Report, check_environment
from opentinker.env.checks.growth import check_growth, slope
from opentinker.env.checks.playing import Player, play
from opentinker.env.checks.subject import Subject
from opentinker.env.checks.tools import tool_problems
from opentinker.env.load import load_environment
from opentinker.env.processes import SessionFactory
from opentinker.env.threads import UserThreads
from opentinker.errors import DeadlineError

QUICK = CheckOptions(episodes=0, timeout_s=5.0, tasks=3, max_turns=6)

GOOD = '''
import json
import random
import time
import threading
import os
from typing import Any

import opentinker as ot

KEPT = []
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


class Sums(ot.Environment):
    """Up to three answers to a sum."""

    tools = (CALCULATOR,)

    @classmethod
    def make_task(cls, seed):
        generator = random.Random(seed)
        return {"a": generator.randint(0, 99), "b": generator.randint(100, 199)}

    @classmethod
    def held_out_tasks(cls):
        return [{"a": 100 + n, "b": n} for n in range(10)]

    @classmethod
    def sample_actions(cls, task):
        return ["about 1", str(task["a"] + task["b"])]

    def __init__(self, wrong=0.0):
        self.wrong = wrong

    def reset(self, task):
        self.tries = 0
        self.answer = str(task["a"] + task["b"])
        return f"{task['a']} + {task['b']} = ?"

    def step(self, action):
        self.tries += 1
        right = action.text.strip() == self.answer
        return ot.StepResult(
            reward={"right": float(right), "tries": -0.01}, done=right or self.tries == 3, observation="No. Again."
        )

    def finalize(self):
        return {"end": 0.5}

    def close(self):
        pass
'''


def written(folder: Path, *changes: tuple[str, str]) -> Path:
    """The good environment with lines replaced, in a file."""
    text = GOOD
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    file = folder / "sums.py"
    file.write_text(text)
    return file


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def check(file: Path, options: CheckOptions = QUICK) -> Report:
    return check_environment(f"{file}:Sums", options=options)


def test_a_good_environment_passes_with_what_was_seen(folder: Path) -> None:
    report = check(written(folder), CheckOptions(episodes=100, tasks=4))
    assert report.ok, str(report)
    assert {finding.mark for finding in report.findings} == {Mark.OK}, str(report)
    assert [finding.check for finding in report.findings] == [
        *("loads", "tasks", "held-out tasks", "observations", "tools", "actions", "rewards", "finalize", "close"),
        *("deadlines", "determinism", "isolation", "single use", "memory", "handles"),
    ]
    assert report.finding("tools").seen == "calculator"
    assert "components end, right, tries" in report.finding("rewards").seen
    assert "cut short" in report.finding("finalize").seen
    assert report.figures["episodes"] == 100
    assert report.to_json()["ok"] is True


BROKEN: list[tuple[str, list[tuple[str, str]], str, str, str]] = [
    # what is broken, how, the check that finds it, what it says, what the line that it shows contains
    (
        "tasks by chance",
        [("random.Random(seed)", "random.Random()")],
        "tasks",
        "the same seed gives other tasks",
        "def make_task",
    ),
    (
        "all tasks equal",
        [("random.Random(seed)", "random.Random(0)")],
        "tasks",
        "all training tasks are the same",
        "def make_task",
    ),
    (
        "tasks that are no JSON",
        [('return {"a": generator.randint(0, 99)', 'return {"x": (1, 2), "a": generator.randint(0, 99)')],
        "tasks",
        "no JSON value: it changes on the way",
        "def make_task",
    ),
    ("make_task raises", [("generator = random.Random(seed)", "return {}['x']")], "tasks", "KeyError: 'x'", "return {}['x']"),
    (
        "held-out tasks are drawn",
        [('[{"a": 100 + n, "b": n} for n in range(10)]', "[cls.make_task(n) for n in range(20_000)]")],
        "held-out tasks",
        "are drawn in training too",
        "def held_out_tasks",
    ),
    ("no held-out tasks", [('[{"a": 100 + n, "b": n} for n in range(10)]', "[]")], "held-out tasks", "there are none", ""),
    ("a constructor that fails", [("self.wrong = wrong", "self.wrong = wrong.x")], "observations", "AttributeError", "wrong.x"),
    (
        "reset fails",
        [('return f"', 'raise OSError("no data")\n        return f"')],
        "observations",
        "OSError: no data",
        "no data",
    ),
    ("reset gives nothing", [("""f"{task['a']} + {task['b']} = ?\"""", "None")], "observations", "type NoneType", "def reset"),
    ("a text that is no UTF-8", [('"No. Again."', r'"\ud800"')], "observations", "cannot be written as UTF-8", "def step"),
    ("a tool without a description", [('"description": "Adds two numbers.",', "")], "tools", "has no description", "def reset"),
    ("a tool that requires nothing", [('["a", "b"]', '["c"]')], "tools", "'c' is required", "def reset"),
    (
        "a tool of an unknown type",
        [('{"a": {"type": "number"}', '{"a": {"type": "float"}')],
        "tools",
        "'float' is no type",
        "def reset",
    ),
    ("tools that are none", [("tools = (CALCULATOR,)", 'tools = ["calculator"]')], "tools", "not a tool", "def reset"),
    (
        "an answer that is no number",
        [("right = action.text.strip()", "float(action.text); right = action.text.strip()")],
        "actions",
        "ValueError: could not convert",
        "float(action.text)",
    ),
    (
        "a tool call that is broken",
        [("self.tries += 1", "json.loads(action.text)")],
        "actions",
        "JSONDecodeError",
        "json.loads",
    ),
    ("a reward that is not finite", [('"tries": -0.01', '"tries": float("nan")')], "rewards", "is nan", "def step"),
    (
        "a reward that is no number",
        [('"tries": -0.01', '"tries": "few"')],
        "rewards",
        "must be a number, not str",
        "def step",
    ),
    (
        "a reward out of its range",
        [("tools = (CALC", "reward_range = (0, 1); tools = (CALC")],
        "rewards",
        "outside of",
        "def step",
    ),
    ("a huge reward", [('"right": float(right)', '"right": 1e6 * right')], "rewards", "e+06", "def step"),
    (
        "a reward that never differs",
        [('reward={"right": float(right), "tries": -0.01}', "reward=0.25"), ("done=right or self.tries == 3", "done=True")],
        "rewards",
        "every episode earned 0.75",
        "def step",
    ),
    (
        "finalize fails",
        [('return {"end": 0.5}', "raise ZeroDivisionError")],
        "finalize",
        "ZeroDivisionError",
        "ZeroDivisionError",
    ),
    ("close fails", [("        pass\n", "        self.file.close()\n")], "close", "AttributeError", "self.file.close()"),
    (
        "chance that no task determines",
        [('"No. Again."', 'random.choice(["No.", "Wrong."])')],
        "determinism",
        "observation: [{",
        "random.choice",
    ),
    ("the clock", [('"right": float(right)', '"right": time.time() % 1')], "determinism", "reward", "time.time()"),
    (
        "a task that is changed",
        [("self.tries = 0", 'self.tries = 0; task["seen"] = task.get("seen", 0) + 1')],
        "determinism",
        "changes its task",
        "def reset",
    ),
    (
        "state on the class",
        [("self.tries += 1", "Sums.tries = getattr(Sums, 'tries', 0) + 1; self.tries = Sums.tries % 4")],
        "determinism",
        "the same task and actions gave another episode",
        "def step",
    ),
    (
        "state on the class that reset clears",
        [("self.tries = 0", "Sums.tries = 0"), ("self.tries += 1", "Sums.tries += 1"), ("self.tries == 3", "Sums.tries == 3")],
        "isolation",
        "differs when others run",
        "def step",
    ),
    (
        "suggestions that fail",
        [('return ["about 1"', 'return [task["c"]')],
        "sample_actions",
        "KeyError",
        "",
    ),
]


@pytest.mark.parametrize(("changes", "found_by", "seen", "shown"), [b[1:] for b in BROKEN], ids=[b[0] for b in BROKEN])
def test_a_broken_promise_is_found_and_shown(
    folder: Path, changes: list[tuple[str, str]], found_by: str, seen: str, shown: str
) -> None:
    file = written(folder, *changes)
    report = check(file)
    finding = report.finding(found_by)
    assert finding.mark in (Mark.FAILED, Mark.WARNING), str(report)
    assert seen in finding.seen, str(report)
    assert finding.mend, "it says what to do"
    if shown:
        path, _, line = finding.where.rpartition(":")
        assert Path(path) == file, str(report)
        text = file.read_text().splitlines()[int(line) - 1]
        assert shown in text or text.strip() == "@classmethod", text


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ([("self.tries += 1", "while True: pass")], "while True"),
        ([("self.tries += 1", "time.sleep(30)")], "time.sleep"),
        ([("self.tries = 0", "threading.Event().wait(30)")], "Event().wait"),
        ([("    def step(", "    async def step("), ("self.tries += 1", "while True: pass")], "while True"),
        ([("    def step(", "    async def step("), ("self.tries += 1", "await __import__('asyncio').sleep(30)")], "sleep(30)"),
    ],
    ids=["it spins", "it sleeps", "it waits in reset", "it blocks the event loop", "it awaits for ever"],
)
def test_a_call_that_hangs_is_found_soon_and_shown_where_it_hangs(
    folder: Path, changes: list[tuple[str, str]], shown: str
) -> None:
    file = written(folder, *changes)
    start = time.monotonic()
    report = check(file, CheckOptions(timeout_s=1.0))
    assert time.monotonic() - start < 25
    finding = report.finding("deadlines")
    assert finding.mark is Mark.FAILED, str(report)
    path, _, line = finding.where.rpartition(":")
    assert Path(path) == file
    assert shown in file.read_text().splitlines()[int(line) - 1], finding
    assert not report.ok


def test_an_async_method_that_computes_for_long_is_a_warning(folder: Path) -> None:
    slow = "KEPT or KEPT.append(time.sleep(0.9)); self.tries += 1"
    report = check(
        written(folder, ("    def step(", "    async def step("), ("self.tries += 1", slow)), CheckOptions(tasks=1, episodes=0)
    )
    assert report.finding("event loop").mark is Mark.WARNING, str(report)


@pytest.mark.parametrize(
    ("changes", "found_by", "seen", "shown"),
    [
        (
            [("self.tries = 0", "self.tries = 0; KEPT.append(bytearray(3000))")],
            "memory",
            "bytes more with each of",
            "KEPT.append",
        ),
        (
            [("self.tries = 0", "self.tries = 0; KEPT.append((self, list(range(300, 340))))")],
            "memory",
            "bytes more with each of",
            "",
        ),
        ([("self.tries = 0", "self.tries = 0; KEPT.append(os.dup(0))")], "handles", "open files", "def close"),
        (
            [("self.tries = 0", "self.tries = 0; threading.Thread(target=threading.end_of_test.wait).start()")],
            "handles",
            "threads",
            "def close",
        ),
    ],
    ids=["memory", "instances", "files", "threads"],
)
def test_what_grows_with_the_episodes_is_found(
    folder: Path, monkeypatch: pytest.MonkeyPatch, changes: list[tuple[str, str]], found_by: str, seen: str, shown: str
) -> None:
    end = threading.Event()
    monkeypatch.setattr(threading, "end_of_test", end, raising=False)
    file = written(folder, *changes)
    report = check(file, CheckOptions(episodes=240, tasks=2, max_turns=3))
    end.set()
    finding = report.finding(found_by)
    assert finding.mark is Mark.FAILED, str(report)
    assert seen in finding.seen
    if shown:
        assert shown in file.read_text().splitlines()[int(finding.where.rpartition(":")[2]) - 1]


def test_a_cache_with_a_size_is_no_leak(folder: Path) -> None:
    cache = "self.tries = 0; KEPT.append(bytearray(3000)); del KEPT[:-50]"
    report = check(written(folder, ("self.tries = 0", cache)), CheckOptions(episodes=300, tasks=2, max_turns=3))
    assert report.finding("memory").mark is Mark.OK, str(report)


def test_the_watch_over_memory_ends_when_its_time_is_up(folder: Path) -> None:
    slow = written(folder, ("self.tries = 0", "self.tries = 0; time.sleep(0.01)"))
    start = time.monotonic()
    report = check(slow, CheckOptions(episodes=100_000, tasks=1, time_limit_s=1.5))
    assert time.monotonic() - start < 30
    assert "the time was up" in report.finding("memory").seen


@pytest.mark.parametrize(
    ("text", "seen"),
    [("import opentinker\n\nclass Sums(\n", "SyntaxError"), ("import opentinker\nraise OSError('disk')\n", "OSError: disk")],
)
def test_a_file_that_cannot_be_imported_is_shown_with_its_line(folder: Path, text: str, seen: str) -> None:
    (folder / "sums.py").write_text(text)
    report = check_environment(f"{folder}/sums.py:Sums")
    assert not report.ok
    (finding,) = report.findings
    assert seen in finding.seen
    assert "sums.py" in finding.seen + finding.where
    assert "line 3" in finding.seen or finding.where.endswith(":2")


def test_ctrl_c_ends_the_check_and_closes_what_was_open(folder: Path) -> None:
    closing = ("        pass\n", f"        open({str(folder / 'closed')!r}, 'w').close()\n")
    slow = ("self.tries = 0", "self.tries = 0; time.sleep(0.3)")
    file = written(folder, slow, closing)
    code = f"from opentinker.env.checks import check_environment; check_environment({f'{file}:Sums'!r})"
    check = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True)
    time.sleep(0.2)
    end = time.monotonic() + 30
    while not (folder / "closed").exists():  # the first episode is over
        assert time.monotonic() < end
        time.sleep(0.02)
    (folder / "closed").unlink()
    check.send_signal(signal.SIGINT)
    _, errors = check.communicate(timeout=20)
    assert (folder / "closed").exists(), "the episode that ran was closed"
    assert errors.rstrip().endswith("KeyboardInterrupt")


IN_PROCESSES = ("    tools = (CALCULATOR,)", '    tools = (CALCULATOR,)\n    execution = "process"')
HOLDS_THE_LOCK = ("self.tries += 1", "self.tries += len(__import__('re').findall('(a+)+$', 'a' * 40 + 'b'))")


def test_episodes_of_a_class_that_wants_processes_are_played_in_them(folder: Path) -> None:
    report = check(written(folder, IN_PROCESSES), CheckOptions(episodes=100, timeout_s=20.0, tasks=2, max_turns=6))
    assert report.ok, str(report)
    for skipped in ("memory", "handles", "single use"):
        assert report.finding(skipped).mark is Mark.SKIPPED
        assert "in processes of their own" in report.finding(skipped).seen
    assert report.finding("determinism").mark is Mark.OK
    assert report.finding("isolation").mark is Mark.OK


def test_a_step_that_holds_pythons_lock_is_killed_and_found(folder: Path) -> None:
    report = check(written(folder, IN_PROCESSES, HOLDS_THE_LOCK), CheckOptions(episodes=0, timeout_s=1.0, tasks=1))
    assert report.finding("deadlines").mark is Mark.FAILED, str(report)
    assert "step did not return within 1 s" in report.finding("deadlines").seen


def test_a_step_that_raises_in_another_process_is_still_the_actions_fault(folder: Path) -> None:
    file = written(folder, IN_PROCESSES, ("self.tries += 1", "raise ValueError('mine')"))
    report = check(file, CheckOptions(episodes=0, timeout_s=20.0, tasks=1))
    assert report.finding("actions").seen.startswith("Sums.step raised ValueError: mine"), str(report)
    assert report.finding("actions").where.startswith(str(file))
    assert report.finding("observations").mark is Mark.OK


async def test_a_step_that_ends_its_process_is_told_from_a_malformed_answer(folder: Path) -> None:
    environment = load_environment(f"{written(folder, IN_PROCESSES, ('self.tries += 1', 'os._exit(3)'))}:Sums")
    sessions = SessionFactory(environment)
    with UserThreads() as threads:
        player = Player(environment, sessions.session(threads), {"a": 1, "b": 2}, 20.0)
        transcript = await play(player, lambda tools: repeat(ot.Action("3")), 2)
    await sessions.close()
    assert transcript.problem is not None
    assert (transcript.problem.kind, transcript.problem.method) == ("raised", "step")
    assert "exited with code 3" in transcript.problem.detail


async def test_what_a_server_holds_is_not_looked_for_here() -> None:
    environment = load_environment("http://127.0.0.1:9")
    with UserThreads() as threads:
        findings, figures = await check_growth(Subject(environment, {}, QUICK, threads, SessionFactory(environment)))
    assert {(f.check, f.mark) for f in findings} == {("memory", Mark.SKIPPED), ("handles", Mark.SKIPPED)}
    assert all("on a server" in f.seen for f in findings)
    assert figures == {}


def test_a_class_that_no_process_can_load_is_found() -> None:
    class Local(ot.Environment):
        execution = "process"

        def reset(self, task: Any) -> str:
            return "?"

        def step(self, action: ot.Action) -> ot.StepResult:
            return ot.StepResult(done=True)

    report = check_environment(Local, options=QUICK)
    assert not report.ok
    assert "defined inside a function" in report.finding("processes").seen


def test_a_person_who_plays_is_not_kept_by_a_step_that_holds_pythons_lock(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = load_environment(f"{written(folder, IN_PROCESSES, HOLDS_THE_LOCK)}:Sums")
    with play_module.Game(environment, {}) as game:
        [message] = game.reset(game.task("train", 0))
        assert "= ?" in str(message["content"])
        assert game.tools
        processes = game._sessions.processes
        assert processes is not None
        [pid] = processes.pids
        monkeypatch.setattr(play_module, "TIMEOUT_S", 1.0)
        with pytest.raises(DeadlineError, match="step did not return"):
            game.step("1")
    assert not psutil.pid_exists(pid)


def test_nothing_is_left_running(folder: Path) -> None:
    before = threading.active_count()
    check(written(folder, ("self.tries += 1", "while True: pass")), CheckOptions(timeout_s=0.2))
    end = time.monotonic() + 30
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_slope_is_not_moved_by_a_jump() -> None:
    assert slope([(n, 1000 + (5000 if n > 2 else 0)) for n in range(10)]) == 0
    assert slope([(n * 10, 7 * n * 10) for n in range(10)]) == 7


def test_all_that_is_wrong_with_tools_is_said() -> None:
    def tool(name: str, **parameters: object) -> dict[str, object]:
        return {
            "type": "function",
            "function": {"name": name, "description": "x", "parameters": {"type": "object", **parameters}},
        }

    assert (
        list(tool_problems([tool("fine", properties={"x": {"type": ["string", "null"], "enum": ["a"]}}, required=["x"])])) == []
    )
    assert list(tool_problems([tool("a b")])) == ["'a b' is no name for a tool: letters, digits and _ - . only, 64 at most"]
    assert "two tools are called 'a'" in list(tool_problems([tool("a"), tool("a")]))
    nested = tool("a", properties={"x": {"type": "array", "items": {"type": "text"}}})
    assert next(tool_problems([nested])).startswith("'a', x, items: 'text' is no type")
