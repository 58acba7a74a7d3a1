"""What single episodes show: answers to sensible and senseless actions, rewards, time, and what is said without a word."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import median
from typing import Any

from opentinker.env.checks.playing import Problem, Transcript
from opentinker.env.checks.report import Finding, Mark
from opentinker.env.checks.source import method_line
from opentinker.env.checks.subject import Subject
from opentinker.env.checks.tools import tool_problems

SLOW_S = 1.0
"""A step that takes longer is worth a warning: a group waits for its slowest episode."""
LARGE_REWARD = 100.0
SEVERAL = 3


def check_conduct(subject: Subject, played: Sequence[tuple[str, Transcript]]) -> list[Finding]:
    """Findings about transcripts of (style, episode)."""
    transcripts = [transcript for _, transcript in played]
    checks: list[Callable[[], Finding]] = [
        lambda: _observations(subject, transcripts),
        lambda: _tools(subject, transcripts),
        lambda: _actions(subject, played),
        lambda: _rewards(subject, transcripts),
        lambda: _finalize(subject, transcripts),
        lambda: _close(transcripts),
        lambda: _deadlines(subject, transcripts),
    ]
    return [check() for check in checks]


def _problems(transcripts: Sequence[Transcript], kind: str, *methods: str) -> list[Problem]:
    found = [t.problem for t in transcripts if t.problem is not None]
    return [p for p in found if p.kind == kind and (not methods or p.method in methods)]


def _about_reward(problem: Problem) -> bool:
    return any(word in problem.detail for word in (": the reward", ": component"))


def _first(check: str, problems: Sequence[Problem], mend: str = "") -> Finding:
    problem = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    said = f", answering {problem.said}" if problem.method == "step" and problem.said else ""
    return Finding(check, Mark.FAILED, f"{problem.detail}{said}{more}", problem.hint or mend, problem.where)


def _observations(subject: Subject, transcripts: Sequence[Transcript]) -> Finding:
    broken = [
        p for p in _problems(transcripts, "malformed", "reset", "step") if not _about_reward(p) and ".tools" not in p.detail
    ]
    if broken:
        return _first("observations", broken)
    if raised := _problems(transcripts, "raised", "reset"):
        return _first("observations", raised, "reset must give a first observation for every task")
    texts = images = 0
    for method, text in _texts(transcripts):
        texts += 1
        try:
            text.encode()
        except UnicodeEncodeError:
            return Finding(
                "observations",
                Mark.FAILED,
                f"a text of {method} cannot be written as UTF-8: {text[:40]!r}",
                "decode bytes with errors='replace'",
                method_line(subject.environment, method),
            )
    images = sum(
        part["type"] == "image" for t in transcripts for m in _messages(t) for part in m["content"] if isinstance(part, dict)
    )
    return Finding("observations", Mark.OK, f"{texts:,} texts" + (f" and {images:,} images" if images else ""))


def _messages(transcript: Transcript) -> Iterator[dict[str, Any]]:
    yield from transcript.first
    yield from chain.from_iterable(turn["observation"] for turn in transcript.turns)


def _texts(transcripts: Sequence[Transcript]) -> Iterator[tuple[str, str]]:
    for transcript in transcripts:
        for number, message in enumerate(_messages(transcript)):
            method = "reset" if number < len(transcript.first) else "step"
            content = message["content"]
            parts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
            yield from ((method, text) for text in parts)


def _tools(subject: Subject, transcripts: Sequence[Transcript]) -> Finding:
    broken = [p for p in _problems(transcripts, "malformed", "reset") if ".tools" in p.detail]
    if broken:
        return _first("tools", broken)
    tools = next((t.tools for t in transcripts if t.tools), [])
    problems = list(dict.fromkeys(problem for t in transcripts for problem in tool_problems(t.tools)))
    if not tools:
        return Finding("tools", Mark.OK, "none are declared")
    if problems:
        seen = "; ".join(problems[:SEVERAL])
        return Finding("tools", Mark.FAILED, seen, "see docs/environments.md, Tools", method_line(subject.environment, "reset"))
    return Finding("tools", Mark.OK, ", ".join(str(tool["function"]["name"]) for tool in tools))


def _actions(subject: Subject, played: Sequence[tuple[str, Transcript]]) -> Finding:
    transcripts = [transcript for _, transcript in played]
    if raised := _problems(transcripts, "raised", "step"):
        return _first("actions", raised, "a policy will say this: answer it with an observation, and no reward")
    turns = sum(len(t.turns) for t in transcripts)
    if turns == 0:
        return Finding("actions", Mark.SKIPPED, "no episode came as far as an action")
    seen = f"{turns:,} answered, among them empty, very long and broken ones"
    if not subject.scripts.suggests:
        seen += "; sample_actions(task) would let me play well, too"
    return Finding("actions", Mark.OK, seen)


def _rewards(subject: Subject, transcripts: Sequence[Transcript]) -> Finding:
    if broken := [p for p in _problems(transcripts, "malformed", "step") if _about_reward(p)]:
        return _first("rewards", broken, "give a finite number, whatever the action was")
    totals = [sum(t.rewards) for t in transcripts if t.turns and not t.failure]
    if not totals:
        return Finding("rewards", Mark.SKIPPED, "no episode ended")
    low, high = min(totals), max(totals)
    names = sorted(
        {name for t in transcripts for turn in [*t.turns, *([t.last] if t.last else [])] for name in turn["components"]}
    )
    seen = f"{low:.3g} to {high:.3g} an episode" + (f"; components {', '.join(names)}" if names else "")
    line = method_line(subject.environment, "step")
    declared = getattr(subject.environment, "reward_range", None)
    if declared is not None and not (declared[0] <= low and high <= declared[1]):
        seen += f", outside of reward_range {declared[0]:g} to {declared[1]:g}"
        return Finding("rewards", Mark.FAILED, seen, "correct the reward or the declaration", line)
    if max(abs(low), abs(high)) > LARGE_REWARD:
        return Finding(
            "rewards", Mark.WARNING, seen, "scale it to about 1: large rewards make logs and thresholds hard to read", line
        )
    if low == high:
        mend = "a group whose rewards are equal teaches nothing"
        if not subject.scripts.suggests:
            mend += "; give sample_actions(task), so that the check sees a good episode"
        return Finding("rewards", Mark.WARNING, f"every episode earned {low:.3g}", mend, line)
    return Finding("rewards", Mark.OK, seen)


def _finalize(subject: Subject, transcripts: Sequence[Transcript]) -> Finding:
    problems = _problems(transcripts, "raised", "finalize") + _problems(transcripts, "malformed", "finalize")
    if problems:
        return _first("finalize", problems, "give a number, named components or None, also for an episode that was cut short")
    given = [t.last["reward"] for t in transcripts if t.last is not None]
    if not given:
        return Finding("finalize", Mark.OK, "not defined, which is fine")
    cut = sum(t.last is not None and not t.done for t in transcripts)
    return Finding(
        "finalize", Mark.OK, f"{min(given):.3g} to {max(given):.3g} in {len(given)} episodes, {cut} of them cut short"
    )


def _close(transcripts: Sequence[Transcript]) -> Finding:
    problems = [t.close_problem for t in transcripts if t.close_problem is not None]
    if problems:
        return _first("close", problems, "close must not fail, whatever state the episode is in")
    return Finding("close", Mark.OK, f"called after each of {len(transcripts)} episodes")


def _deadlines(subject: Subject, transcripts: Sequence[Transcript]) -> Finding:
    if late := _problems(transcripts, "late"):
        mend = "give everything that it waits for a deadline of its own"
        if not subject.elsewhere:
            mend += "; execution = 'process' lets a call be killed"
        return _first("deadlines", late, mend)
    slowest = {
        method: max(chain.from_iterable(t.seconds.get(method, ()) for t in transcripts), default=0.0)
        for method in ("reset", "step")
    }
    steps = list(chain.from_iterable(t.seconds.get("step", ()) for t in transcripts))
    usual = median(steps) if steps else 0.0
    seen = f"reset at most {_time(slowest['reset'])}; step usually {_time(usual)}, at most {_time(slowest['step'])}"
    if max(slowest.values()) > SLOW_S:
        method = max(slowest, key=lambda name: slowest[name])
        mend = "the slowest episode of a group is what a training step waits for"
        return Finding("deadlines", Mark.WARNING, seen, mend, method_line(subject.environment, method))
    return Finding("deadlines", Mark.OK, seen)


def _time(seconds: float) -> str:
    return f"{seconds * 1000:.2g} ms" if seconds < 0.1 else f"{seconds:.2g} s"
