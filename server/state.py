"""What a worker holds: the engine, the trainer, and the policies that live in them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.client.messages import FloatArray, IntArray
from opentinker.errors import DeadlineError, NotFoundError, OpenTinkerError
from opentinker.server.engine.base import RolloutEngine
from opentinker.server.trainer.base import Trainer
from opentinker.storage import Storage

DRAIN_S = 900.0
"""An engine with running requests of which none ends for this long counts as stuck; no single answer takes as long."""


@dataclass(frozen=True)
class Parts:
    """What a worker is built from."""

    engine: RolloutEngine
    trainer: Trainer
    checkpoint_root: Path
    canaries: tuple[IntArray, ...]
    """Fixed prompts on which engine and trainer are compared."""
    drift_limit: float
    storage: Storage | None = None
    """Where checkpoints are copied, and those come from that this node has not."""
    adapter_serving: bool = False
    """Publish a LoRA policy as an adapter; otherwise merged into the base weights."""


@dataclass
class Hosted:
    """A policy: its published version and what the last publish measured."""

    baseline: float
    """Mean |logprob difference| between engine and trainer at version 0."""
    canary_logprobs: list[FloatArray]
    digests: dict[str, str]
    version: int = 0
    attempted: int = 0
    """Highest version number that the engine was given; a failed publish uses one up."""


@dataclass
class State:
    """The parts and the policies. Used from the compute thread only."""

    parts: Parts
    pump: Callable[[], int]
    """Advance the engine by one step and deliver what ended; how many requests did."""
    policies: dict[str, Hosted] = field(default_factory=dict)
    fault: OpenTinkerError | None = None
    """Why the engine's weights cannot be trusted: set by a failed publish, cleared by the next good one."""

    def hosted(self, policy: str) -> Hosted:
        """The policy.

        Raises:
            NotFoundError: it was not created, or deleted.
        """
        if policy not in self.policies:
            raise NotFoundError(f"no policy '{policy}' on this server")
        return self.policies[policy]

    def drain(self) -> None:
        """Step the engine until no request is running.

        Raises:
            DeadlineError: it does not get on with them; they go on running.
        """
        deadline = time.monotonic() + DRAIN_S
        while self.parts.engine.has_unfinished():
            if self.pump():
                deadline = time.monotonic() + DRAIN_S
            elif time.monotonic() > deadline:
                raise DeadlineError(
                    f"the engine is busy, but none of its running requests ended for {DRAIN_S:.0f} s",
                    hint="a publish with mode 'abort' starts them anew; if that does not help, start a new server",
                )
