"""The configs of what several agents share."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

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
    barrier_timeout_s: Annotated[float, Field(gt=0.0)] = 30.0
    """With `coordinator`: how long one driver may hold up the others, from when the first has finished its games or its update
    (or is ready for the next games) until the last has. Make it longer than the slowest agent's update and checkpoint take
    beyond the fastest one's. A driver whose process dies is found by its lease, which does not depend on this."""
    join_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """With `coordinator`: how long drivers wait until every seat has one, and then until all are ready for the first games."""
    on_lost: Literal["fail", "go_on"] = "fail"
    """With `coordinator`: what becomes of a run when a driver is lost, or holds up the others for too long: 'fail' = it ends
    for all with an error that says who and why; 'go_on' = the others go on without its agents, which takes
    `on_late: forfeit`, so that games go on, too."""

    @model_validator(mode="after")
    def _games_go_on_too(self) -> "TurnsConfig":
        if self.on_lost == "go_on" and self.on_late != "forfeit":
            raise ValueError("on_lost 'go_on' takes on_late 'forfeit': the environment says how games go on without an agent")
        return self


class CoordinatorConfig(Config):
    """A run whose agents are driven by different processes, each with a job of its own: where they meet."""

    run: Annotated[str, Field(min_length=1, max_length=200)]
    """Its name, which all drivers give."""
    url: str = ""
    """The environment server that coordinates, such as http://10.0.0.7:8790; empty = `environment.name`, if that is one."""
    token_file: str = ""
    """A file with that server's token, as the driver sees it; empty = the variable OPENTINKER_ENV_TOKEN."""
