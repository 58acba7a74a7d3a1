"""The configs of several agents: who plays which seat, and what they share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from opentinker.checkpoints import parse_ref
from opentinker.client.messages import AdamParams
from opentinker.config.algorithms import AlgorithmConfig
from opentinker.config.base import Config
from opentinker.config.opponents import ChatModelConfig, PoolConfig
from opentinker.config.rollout import SamplingConfig
from opentinker.config.server import LoraConfig
from opentinker.errors import ConfigError


def _address(text: str) -> str:
    if text:
        try:
            parse_ref(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None
    return text


Address = Annotated[str, AfterValidator(_address)]
"""Of a checkpoint; empty = none."""
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
    beyond the fastest one's. A driver whose process dies is found by its lease, which does not depend on this. With `servers`
    also: how long a server may go without finishing an agent's update, from when the first server has finished all of its own.
    Then the job ends, or restarts (`scheduling.max_restarts`), with an error that names the server and the agents. Make it
    longer than the slowest server's update takes beyond the fastest one's."""
    join_timeout_s: Annotated[float, Field(gt=0.0)] = 600.0
    """With `coordinator`: how long drivers wait until every seat has one, and then until all are ready for the first games."""
    on_lost: Literal["fail", "go_on"] = "fail"
    """With `coordinator`: what becomes of a run when a driver is lost, or holds up the others for too long: 'fail' = it ends
    for all with an error that says who and why; 'go_on' = the others go on without its agents, which takes
    `on_late: forfeit`, so that games go on, too. The agents of one driver are lost together: it says nothing of `servers`."""

    @model_validator(mode="after")
    def _games_go_on_too(self) -> "TurnsConfig":
        if self.on_lost == "go_on" and self.on_late != "forfeit":
            raise ValueError("on_lost 'go_on' takes on_late 'forfeit': the environment says how games go on without an agent")
        return self


class AgentConfig(Config):
    """Who plays a seat of an environment for several agents. Without any field: a policy of its own, which learns as the job
    says."""

    policy: str = ""
    """Another agent, whose policy plays this seat, too, and learns from both."""
    script: str = ""
    """`path/to/file.py:function` plays instead of a policy: a function of (messages, random numbers) that gives a text."""
    checkpoint: Address = ""
    """A policy with the weights of this checkpoint, which is never updated: `user/job/name@version`, or, of an agent of a job,
    `user/job/agent/name@version`; `user/` and `@version` may be left out. Base model and adapter have to be the same."""
    pool: PoolConfig | None = None
    """Past versions of an agent that learns play."""
    model: ChatModelConfig | None = None
    """A model plays that a server with OpenAI's chat API has."""
    frozen: bool = False
    """Its policy is never updated: it plays as it began."""
    server: str = ""
    """Which of the job's `servers` has its policy; "" = the job's own."""
    start_from: Address = ""
    """A checkpoint whose weights its policy begins with, as in `checkpoint`; its optimizer starts anew."""
    lora: LoraConfig | None = None
    """Its adapter; None = the job's."""
    algorithm: AlgorithmConfig | None = None
    """How it learns; None = the job's."""
    optimizer: AdamParams | None = None
    """None = `training.optimizer`."""
    sampling: SamplingConfig | None = None
    """None = the job's."""

    @model_validator(mode="after")
    def _one_player(self) -> "AgentConfig":
        own = [name for name in ("lora", "algorithm", "optimizer", "sampling", "start_from", "server") if getattr(self, name)]
        players = {
            f"the policy of '{self.policy}'": self.policy,
            f"the script {self.script}": self.script,
            f"the checkpoint {self.checkpoint}": self.checkpoint,
            "a pool of past versions": self.pool,
            f"the model '{self.model.name if self.model else ''}'": self.model,
        }
        bound = [what for what, given in players.items() if given]
        if len(bound) > 1:
            raise ValueError(f"bound to two players, {bound[0]} and {bound[1]}")
        if bound and (idle := self._idle(own)):
            raise ValueError(f"{', '.join(idle)} has no meaning: {bound[0].replace('the policy of ', '')} plays this seat")
        if self.frozen and (teaches := [name for name in own if name in ("algorithm", "optimizer")]):
            raise ValueError(f"{' and '.join(teaches)} has no meaning: a frozen policy does not learn")
        return self

    def _idle(self, own: list[str]) -> list[str]:
        """Of the fields that were given, those that say nothing of the player that was bound."""
        if self.checkpoint:
            return [name for name in own if name in ("algorithm", "optimizer", "start_from")]
        if self.pool is not None:  # on the server of the agent whose past versions it has
            own = [name for name in own if name != "sampling"]
        return own or (["frozen"] if self.frozen else [])

    @property
    def elsewhere(self) -> bool:
        """Whoever plays is no policy of an agent's."""
        return bool(self.script or self.pool or self.model)

    @property
    def learns(self) -> bool:
        """It has a policy of its own that is updated."""
        return not (self.policy or self.elsewhere or self.checkpoint or self.frozen)

    @property
    def begins_with(self) -> str:
        """The address of the checkpoint whose weights its policy has at first; empty = none."""
        return self.checkpoint or self.start_from


def bound_elsewhere(agent: Any) -> bool:
    """Whether an agent's config, validated or not, gives it no policy of its own."""
    fields = fields_of(agent)
    return any(fields.get(name) for name in ("policy", "script", "pool", "model"))


def fields_of(config: Any) -> Mapping[str, Any]:
    """The fields of a config, validated or not; none of what is no config."""
    return config if isinstance(config, Mapping) else vars(config) if isinstance(config, Config) else {}
