"""Is an episode a function of its task and its actions, whatever else runs beside it or ran before?"""

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from opentinker.env.checks.playing import Transcript, difference, shortened
from opentinker.env.checks.report import Finding, Mark
from opentinker.env.checks.source import method_line, unseeded_lines
from opentinker.env.checks.subject import STYLES, Subject
from opentinker.env.checks.tasks import canonical
from opentinker.env.environment import Action, Environment
from opentinker.errors import DeadlineError

Played = Sequence[tuple[str, Transcript]]


async def check_repetition(subject: Subject, played: Played) -> list[Finding]:
    """Compares with episodes that were played one after another: STYLES for each task in turn."""
    determinism = await _determinism(subject, played)
    if determinism.mark is Mark.FAILED:
        reason = "episodes differ by themselves: see determinism"
        return [determinism, Finding("isolation", Mark.SKIPPED, reason), await _single_use(subject)]
    return [determinism, await _isolation(subject, played), await _single_use(subject)]


async def _determinism(subject: Subject, played: Played) -> Finding:
    for place, (style, before) in enumerate(played):
        index = place // len(STYLES)
        task = copy.deepcopy(subject.tasks[index])
        again = await subject.episode(index, style)
        if canonical(subject.tasks[index]) != canonical(task):
            subject.tasks[index] = task
            line = method_line(subject.environment, "reset")
            return Finding(
                "determinism",
                Mark.FAILED,
                "the episode changes its task, which all members of a group share",
                "copy what is changed: self.state = copy.deepcopy(task)",
                line,
            )
        where, method = difference(before, again)
        if where:
            suspects = unseeded_lines(subject.environment)
            mend = "derive all chance from the task: random.Random(task['seed']); and keep nothing on the class or the module"
            if suspects:
                mend += f"; suspects: {', '.join(suspects[:3])}"
            line = suspects[0].partition(" ")[0] if suspects else method_line(subject.environment, method)
            return Finding("determinism", Mark.FAILED, f"the same task and actions gave another episode: {where}", mend, line)
    return Finding("determinism", Mark.OK, f"{len(played)} episodes played twice were the same")


async def _isolation(subject: Subject, played: Played) -> Finding:
    """All tasks at once: turn by turn in one thread after the other, then really at the same time."""
    for together in (False, True):
        for offset, style in enumerate(STYLES):
            alone = [transcript for _, transcript in played[offset :: len(STYLES)]]
            beside = await (_in_parallel(subject, style) if together else _in_turns(subject, style))
            for one, other in zip(alone, beside, strict=True):
                where, method = difference(one, other)
                if where:
                    return Finding(
                        "isolation",
                        Mark.FAILED,
                        f"an episode differs when others run {'at the same time' if together else 'in between'}: {where}",
                        "keep an episode's state on self, set in __init__ or reset; none on the class or the module",
                        method_line(subject.environment, method),
                    )
    return Finding("isolation", Mark.OK, f"{len(subject.tasks)} episodes side by side were the same as one by one")


async def _in_turns(subject: Subject, style: str) -> list[Transcript]:
    players = [subject.player(task) for task in subject.tasks]
    for player in players:
        await player.start()
    scripts = [subject.script(i, style)(player.transcript.tools) for i, player in enumerate(players)]
    for _ in range(subject.options.max_turns):
        for player, script in zip(players, scripts, strict=True):
            if not player.over:
                await player.act(next(script))
    for player in players:
        await player.finish()
    return [player.transcript for player in players]


async def _in_parallel(subject: Subject, style: str) -> list[Transcript]:
    return list(await asyncio.gather(*(subject.episode(index, style) for index in range(len(subject.tasks)))))


async def _single_use(subject: Subject) -> Finding:
    """What an instance does when it is used after its episode. It may refuse; it must not hang."""
    if subject.sessions.processes is not None:
        return Finding("single use", Mark.SKIPPED, "episodes run in processes of their own, which let nobody use one again")
    kept: list[Environment] = []

    def make() -> Environment:
        kept.append(subject.make())
        return kept[0]

    player = subject.player(subject.tasks[0], make)
    await player.start()
    script = subject.script(0, "good")(player.transcript.tools)
    for _ in range(subject.options.max_turns):
        if not player.over:
            await player.act(next(script))
    if not kept:
        return Finding("single use", Mark.SKIPPED, "it is not constructed here")
    try:
        step = await _outcome(subject, lambda: kept[0].step(Action("once more")))
        reset = await _outcome(subject, lambda: kept[0].reset(subject.tasks[0]))
    except DeadlineError as error:
        mend = "raise an error when a method is called after the episode"
        return Finding("single use", Mark.FAILED, error.detail, mend, method_line(subject.environment, "step"))
    finally:
        await player.finish()
    when = "when the episode is done" if player.transcript.done else "when the episode was cut short"
    return Finding("single use", Mark.OK, f"{when}, a step {step}, another reset {reset}; training does neither")


async def _outcome(subject: Subject, call: Any) -> str:
    async def awaited() -> None:
        value = await subject.threads.call(call)
        if hasattr(value, "__await__"):
            await value

    try:
        async with asyncio.timeout(subject.options.timeout_s) as limit:
            await awaited()
    except TimeoutError as error:
        if limit.expired():
            raise DeadlineError(f"a call after the episode did not return within {subject.options.timeout_s:g} s") from error
        return "raises TimeoutError"
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError | KeyboardInterrupt):
            raise
        return shortened(f"raises {type(error).__name__}")
    return "is answered"
