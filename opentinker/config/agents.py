"""The configs of several agents: who plays which seat, and what they share."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from opentinker.client.messages import AdamParams
from opentinker.config.algorithms import AlgorithmConfig
from opentinker.config.base import Config
from opentinker.config.rollout import SamplingConfig
from opentinker.config.server import LoraConfig

OnLate = Literal["abort", "forfeit", "skip", "fail"]


class TurnsConfig(Config):
    """Turns of several agents, and what becomes of an agent that holds up the others."""

    turn_timeout_s: Annotated[float, Field(gt=0.0)] = 300.0
    """Longest time from when a turn is granted until its action is there."""
    on_late: OnLate = "abort"
    """What becomes of an episode in which an agent's turn takes too long or its policy fails: 'abort' = it ends in an error and
    is run anew; 'forfeit' = the agent leaves and the environment says how the others go on; 'skip' = its turn is lost and
    counts as one of `rollout.max_turns`; 'fail' = the run ends with an error that names the agent."""


class AgentConfig(Config):
    """Who plays a seat of an environment for several agents. Without any field: a policy of its own, which learns as the job
    says."""

    policy: str = ""
    """Another agent, whose policy plays this seat, too, and learns from both."""
    script: str = ""
    """`path/to/file.py:function` plays instead of a policy: a function of (messages, random numbers) that gives a text."""
    frozen: bool = False
    """Its policy is never updated: it plays as it began."""
    server: str = ""
    """Which of the job's `servers` has its policy; "" = the job's own."""
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
        own = [name for name in ("lora", "algorithm", "optimizer", "sampling") if getattr(self, name) is not None]
        if self.policy and self.script:
            raise ValueError(f"bound to two players, the policy of '{self.policy}' and the script {self.script}")
        if (other := self.policy or self.script) and (own or self.frozen or self.server):
            given = ", ".join(own) or ("frozen" if self.frozen else "server")
            raise ValueError(f"{given} has no meaning: '{other}' plays this seat")
        if self.frozen and (teaches := [name for name in own if name in ("algorithm", "optimizer")]):
            raise ValueError(f"{' and '.join(teaches)} has no meaning: a frozen policy does not learn")
        return self


def bound_elsewhere(agent: Any) -> bool:
    """Whether an agent's config, validated or not, gives it no policy of its own."""
    fields = agent if isinstance(agent, Mapping) else vars(agent) if isinstance(agent, AgentConfig) else {}
    return bool(fields.get("policy") or fields.get("script"))
