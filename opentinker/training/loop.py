"""What the driver loops of one agent and of several share: when they evaluate and save, how they stop, and which tasks a step
plays."""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from opentinker.config.job import RLJobConfig
from opentinker.errors import ConfigError, EpisodesFailedError
from opentinker.rollout.types import Group
from opentinker.training.metrics import Row, commonest_failure
from opentinker.training.recorder import Recorder
from opentinker.training.schedule import checkpoint_name
from opentinker.training.stopping import ALONE, STOPPED_EARLY, Stopping
from opentinker.training.tasks import JobTasks
from opentinker.training.trend import Verdict

FRUITLESS_STEPS = 3
"""Steps in a row without a usable episode after which a loop gives up."""

Play = Callable[[Sequence[Any], int], Awaitable[None]]
"""(tasks, the number of the first among those of the step) -> their episodes are played."""


class EpisodesLoop(ABC):
    """Holds what lasts from step to step; `run` may be called again and continues."""

    def __init__(self, config: RLJobConfig, tasks: JobTasks, recorder: Recorder, learners: Sequence[str] = (ALONE,)) -> None:
        self.config = config
        self.steps_done = 0
        self._tasks = tasks
        self._recorder = recorder
        self._task_position = 0
        self._held_out: list[Any] | None = None
        self._evaluated_at: int | None = None
        self._fruitless = 0
        self._stopping = Stopping(config.training.stop, learners)

    @property
    def stopped(self) -> str:
        """Why the run ended early; empty while it goes on."""
        return self._stopping.stopped

    async def run(self, steps: int) -> None:
        """Train for `steps` more steps, evaluating as the config says.

        Raises:
            ConfigError: the run goes by evaluations, and there are no held-out tasks.
            EpisodesFailedError: no episode was usable for several steps in a row; the detail names the commonest cause.
        """
        evaluation = self.config.evaluation
        await self._check_held_out()
        last = self.steps_done + steps
        if evaluation.at_start and self.steps_done == 0:
            await self.evaluate()
        if self._evaluation_is_due():  # the run died between a checkpoint and its evaluation
            await self.evaluate()
        await self._compare()
        while self.steps_done < last and not self.stopped:
            await self.step()
            if (every := self.config.training.save_every) and self.steps_done % every == 0:
                await self._save_step()
            if self._evaluation_is_due() and (not self.stopped or self.steps_done == last):
                await self.evaluate()
            if self.steps_done < last and not self.stopped:
                await self._compare()
        if self.stopped and self.steps_done < last and await self._leaves_others():
            return
        if evaluation.at_end and self._evaluated_at != self.steps_done:
            await self.evaluate()
        await self._compare(ends=True)

    async def _check_held_out(self) -> None:
        """Raises: ConfigError when something goes by evaluations, and there are no held-out tasks."""
        stop = self.config.training.stop
        stops = bool(stop.counted) and stop.score == "evaluation"
        if not (stops or self.config.evaluation.keep_best) or await self._held_out_tasks():
            return
        if stops:
            raise ConfigError(
                f"training.stop.{stop.counted} counts evaluations, and there are no held-out tasks",
                hint="set training.stop.score to 'training', or give held-out tasks",
            )
        raise ConfigError(
            "evaluation.keep_best saves the best of the evaluations, and there are no held-out tasks",
            hint="give held-out tasks, or leave evaluation.keep_best out; training.save_every saves without them",
        )

    @abstractmethod
    async def step(self) -> Row:
        """One training step."""

    @abstractmethod
    async def evaluate(self) -> Row | None:
        """One evaluation; None if the environment has no held-out tasks."""

    @abstractmethod
    async def save(self, name: str) -> dict[str, Any]:
        """Write a checkpoint of what the last step published, and within it what a later driver needs to go on from it. With
        several policies, `versions` says which one each has."""

    async def _save_step(self) -> None:
        """The periodic checkpoint."""
        saved = await self.save(checkpoint_name(self.steps_done))
        self._recorder.checkpoints.saved(self.steps_done, saved.get("versions") or {"": saved["version"]})

    @abstractmethod
    async def _check_server(self) -> None:
        """Raises what explains a failure better than the failure itself: that the server is gone."""

    async def _leaves_others(self) -> bool:
        """The run stops early: whether there are loops elsewhere that go on, which were told."""
        return False

    async def _compare(self, *, ends: bool = False) -> None:
        """Let players meet, if there are several and it is time; `ends`: the run is over."""
        return

    def _evaluation_is_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(every and self.steps_done and self.steps_done % every == 0 and self._evaluated_at != self.steps_done)

    async def _held_out_tasks(self) -> list[Any]:
        if self._held_out is None:
            self._held_out = await self._tasks.held_out(self.config.evaluation.max_tasks)
        return self._held_out

    async def _collect(self, rounds: int, play: Play, missing: Callable[[int], int]) -> int:
        """Play a step's tasks; where the next one draws. After them, up to `rounds` times, as many more as are `missing`, which
        is told the round, from 1."""
        position, count, played = self._task_position, self.config.rollout.groups_per_step, 0
        for round_ in range(rounds + 1):
            if round_ and (count := missing(round_)) <= 0:
                break
            tasks = await self._tasks.draw(self.config.training.seed, position, count)
            await play(tasks, played)
            position += count
            played += count
        return position

    async def _check_usable(self, groups: Sequence[Group]) -> None:
        if any(e.trains for g in groups for e in g.episodes):
            self._fruitless = 0
            return
        await self._check_server()
        self._fruitless += 1
        if self._fruitless >= FRUITLESS_STEPS:
            raise EpisodesFailedError(
                f"no episode was usable in {FRUITLESS_STEPS} steps in a row: {commonest_failure(groups)}",
                hint="transcripts.jsonl holds a failed episode of each step",
            )

    async def _act(self, *verdicts: tuple[Verdict, Sequence[str]]) -> None:
        """Save, then stop or learn more slowly."""
        if not verdicts or self.stopped:
            return
        await self.save(STOPPED_EARLY)
        for verdict, concerned in verdicts:
            if not self.stopped:
                done = self._stopping.act(verdict, concerned)
                self._recorder.row({"kind": "stopping", "step": self.steps_done, **done})
