"""What a worker holds: the engine, the trainer, and the policies that live in them."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opentinker.client.messages import Chunk, FloatArray
from opentinker.errors import ConflictError, DeadlineError, NotFoundError, OpenTinkerError, VersionNotServedError
from opentinker.server.engine.base import RolloutEngine
from opentinker.server.images import ImageStore
from opentinker.server.trainer.base import Trainer
from opentinker.storage import Storage

DRAIN_S = 900.0
"""An engine with running requests of which none ends for this long counts as stuck; no single answer takes as long."""


@dataclass(frozen=True)
class Parts:
    """What a worker is built from."""

    engine: RolloutEngine
    training: Trainer | None
    """None: this server only samples."""
    model_dir: Path
    checkpoint_root: Path
    canaries: tuple[tuple[Chunk, ...], ...] = ()
    """Fixed prompts on which engine and trainer are compared."""
    drift_limit: float = 0.0
    storage: Storage | None = None
    """Where checkpoints are copied, and those come from that this node has not."""
    adapter_serving: bool = False
    """Publish a LoRA policy as an adapter; otherwise merged into the base weights."""
    images: ImageStore | None = None
    """The images that requests and data may name; None: the model takes none."""

    @property
    def trainer(self) -> Trainer:
        """Raises: ConflictError when this server only samples."""
        if self.training is None:
            raise ConflictError(
                "this server has no trainer: its job is of kind 'inference'",
                hint="train in a job of kind 'rl' or 'interactive'",
            )
        return self.training


@dataclass
class Hosted:
    """A policy: its published version and what the last publish measured."""

    baseline: float
    """Mean |logprob difference| between engine and trainer at version 0."""
    canary_logprobs: list[FloatArray]
    digests: dict[str, str]
    samples: bool = True
    """False: it has a scalar head, and is never published."""
    version: int = 0
    attempted: int = 0
    """Highest version number that the engine was given; a failed publish uses one up."""


@dataclass
class State:
    """The parts and the policies. Used from the compute thread only."""

    parts: Parts
    pump: Callable[[], int]
    """Advance the engine by one step and deliver what ended; how many requests did."""
    fail: Callable[[str, OpenTinkerError], None]
    """Deliver the failure of a running request, by the id that the engine knows it by; the engine has given it up."""
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

    def check_samples(self, policy: str) -> None:
        """Raises: ConflictError when the policy only scores, NotFoundError when there is none."""
        if not self.hosted(policy).samples:
            raise ConflictError(
                f"policy '{policy}' has a scalar head: it scores, and cannot be published or sampled",
                hint="ask `forward` for its 'values'; train it with publish=False",
            )

    def check_version(self, policy: str, version: int | None) -> None:
        """Is `version` what the policy's samples come from? None stands for whichever does.

        Raises:
            NotFoundError: there is no such policy.
            VersionNotServedError: another version is live.
        """
        live = self.hosted(policy).version
        if version is None or version == live:
            return
        raise VersionNotServedError(
            f"version {version} of policy '{policy}' is not served: version {live} is live, and the engine holds one at a time",
            hint="leave the version out for the latest; an earlier one that was saved can be loaded, as a new version"
            if version < live
            else f"ask again, under another request_id, when a publish has answered with version {version}",
        )

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
