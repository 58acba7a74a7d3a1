"""The configs of what several agents share."""

from typing import Annotated, Literal

from pydantic import Field

from opentinker.config.base import Config

OnLate = Literal["abort", "forfeit", "skip", "fail"]


class TurnsConfig(Config):
    """Turns of several agents, and what becomes of an agent that holds up the others."""

    turn_timeout_s: Annotated[float, Field(gt=0.0)] = 300.0
    """Longest time from when a turn is granted until its action is there."""
    on_late: OnLate = "abort"
    """What becomes of an episode in which an agent's turn takes too long or its policy fails: 'abort' = it ends in an error and
    is run anew; 'forfeit' = the agent leaves and the environment says how the others go on; 'skip' = its turn is lost and
    counts as one of `rollout.max_turns`; 'fail' = the run ends with an error that names the agent."""
