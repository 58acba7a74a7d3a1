"""What a run does about a verdict of its watch: it learns more slowly, or ends. Pure; whoever runs the loop saves before."""

from collections.abc import Mapping, Sequence
from typing import Any

from opentinker.config.rl import StopConfig
from opentinker.training.trend import Verdict

STOPPED_EARLY = "stopped-early"
"""The checkpoint before anything is done about a verdict."""
MAX_REDUCTIONS = 2
"""Times that a learning rate is reduced before the run is stopped."""
ALONE = ""
"""The learner of a run of one agent."""


class Stopping:
    """What was done so far, by learner."""

    def __init__(self, config: StopConfig, learners: Sequence[str] = (ALONE,)) -> None:
        self._config = config
        self.stopped = ""
        """Why the run ended early; empty while it goes on."""
        self.reductions = dict.fromkeys(learners, 0)
        """Times that each learning rate was reduced."""

    def act(self, verdict: Verdict, concerned: Sequence[str] = ()) -> dict[str, Any]:
        """Decide about a verdict on these learners, or on all; the fields of its row."""
        names = list(concerned or self.reductions)
        reduce = (
            self._config.action == "reduce"
            and not verdict.final
            and all(self.reductions[name] < MAX_REDUCTIONS for name in names)
        )
        told = [name for name in names if name != ALONE]
        action = f"learning rate{' of ' + ' and '.join(told) if told else ''} x {self._config.factor:g}"
        if reduce:
            for name in names:
                self.reductions[name] += 1
        else:
            self.stopped, action = verdict.reason, "stopped"
        return {"reason": verdict.reason, "action": action, **({"agents": told} if told else {})}

    def heard(self, row: Mapping[str, Any]) -> None:
        """A row of kind `stopping` that stands, when a run goes on behind its checkpoint."""
        if row["action"] == "stopped":
            self.stopped = row["reason"]
            return
        for name in row.get("agents", (ALONE,)):
            self.reductions[name] += 1

    def scale(self, learner: str = ALONE) -> float:
        """What its learning rate is multiplied with."""
        return float(self._config.factor ** self.reductions[learner])
