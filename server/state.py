"""What a worker holds: the engine, the trainer, and the policies that live in them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from opentinker.checkpoints import policy_root
from opentinker.client.messages import Chunk, FloatArray
from opentinker.errors import ConflictError, DeadlineError, NotFoundError, OpenTinkerError, VersionNotServedError
from opentinker.server.engine.base import AdapterId, RolloutEngine
from opentinker.server.engine.remote import RemoteEngine
from opentinker.server.engine.sleeping import Sleeper
from opentinker.server.images import ImageStore, resolved
from opentinker.server.protocol import SampleWork
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
    """Publish a LoRA policy as an adapter; otherwise merged into the base weights, which then are one policy's."""
    images: ImageStore | None = None
    """The images that requests and data may name; None: the model takes none."""
    max_adapters: int = 1
    """LoRA policies that there is room for where adapters are served."""
    kept_versions: int = 1
    """Versions of a policy that the engine keeps where adapters are served."""

    sleeper: Sleeper | None = None
    """Has the engine give its memory to the trainer while that computes."""

    @property
    def apart(self) -> RemoteEngine | None:
        """The engine, if it has a process of its own."""
        return self.engine if isinstance(self.engine, RemoteEngine) else None

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
    kept: tuple[int, ...] = (0,)
    """The versions that the engine can sample from, oldest first."""
    fault: OpenTinkerError | None = None
    """Why the engine's weights cannot be trusted: set by a failed publish, cleared by the next good one."""


@dataclass(frozen=True)
class Running:
    """A request in the engine, and the version that it is sampled from."""

    work: SampleWork
    version: int


@dataclass
class State:
    """The parts and the policies. Used from the compute thread only, or by whoever has the turn."""

    parts: Parts
    pump: Callable[[], int]
    """Advance the engine by one step and deliver what ended; how many requests did."""
    fail: Callable[[str, OpenTinkerError], None]
    """Deliver the failure of a running request, by the id that the engine knows it by; the engine has given it up."""
    running: dict[str, Running] = field(default_factory=dict)
    """What the engine has, by the id that it knows it by."""
    policies: dict[str, Hosted] = field(default_factory=dict)
    first: str = ""
    """The first policy of this server: the job's own."""
    stale: bool = False
    """The engine's base weights are those of a policy that is gone."""
    turn: Callable[[], AbstractContextManager[None]] = nullcontext
    """To be held by a command while it uses the engine or changes versions. Beside an engine in another process, others sample
    as long as it is not held."""

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

    def serves_adapter(self, policy: str) -> bool:
        """Whether the engine samples the policy under an adapter, and not from its base weights."""
        training = self.parts.training
        return self.parts.adapter_serving and training is not None and training.is_lora(policy)

    def adapter(self, policy: str, version: int) -> AdapterId | None:
        """What the engine knows a version by; None: it is in its base weights."""
        return AdapterId(policy, version) if self.serves_adapter(policy) else None

    def checkpoint_root(self, policy: str) -> Path:
        """Where the policy's checkpoints are: each policy has names of its own."""
        root = self.parts.checkpoint_root
        if policy == self.first:
            return root
        # A server beside the job's own began with one of the job's further policies: the others are beside that one.
        return root.parent / policy if root.parent.name == "policies" else policy_root(root, policy)

    def check_room(self, policy: str, *, lora: bool) -> None:
        """Whether another policy can be created.

        Raises:
            ConflictError: there is one of this name, no room for another, or full parameters would share the server.
        """
        if policy in self.policies:
            raise ConflictError(f"there already is a policy '{policy}' on this server")
        if self.parts.training is None:
            if self.policies or self.stale:
                raise ConflictError(f"this server already has a policy; '{policy}' needs a server of its own")
            return
        if not self.policies:
            return
        if not lora or not all(self.parts.training.is_lora(known) for known in self.policies):
            raise ConflictError(
                "a full-parameter policy needs the server to itself", hint="train adapters (lora), or use another server"
            )
        room = self.parts.max_adapters if self.parts.adapter_serving else 1
        if len(self.policies) >= room:
            known = ", ".join(f"'{known}'" for known in self.policies)
            raise ConflictError(
                f"this server has room for {room} {'policy' if room == 1 else 'policies'}, and has {known}",
                hint=f"engine.max_adapters={len(self.policies) + 1} in the job's config makes room; or delete one",
            )

    def has_version(self, work: SampleWork) -> bool:
        """Whether a sample could be had from the version that it names; true if it names none."""
        hosted = self.policies.get(work.policy)
        return work.request.version is None or (hosted is not None and work.request.version in hosted.kept)

    def version_of(self, policy: str, asked: int | None) -> int:
        """The version that the policy's samples come from; `asked` None stands for the latest.

        Raises:
            NotFoundError: there is no such policy.
            VersionNotServedError: the engine does not keep that version.
        """
        hosted = self.hosted(policy)
        live = hosted.version
        if asked is None or asked in hosted.kept:
            return live if asked is None else asked
        several = self.serves_adapter(policy)
        kept = ", ".join(str(version) for version in hosted.kept)
        held = (
            f"the engine keeps the newest {self.parts.kept_versions}: {kept}" if several else "the engine holds one at a time"
        )
        older = "leave the version out for the latest"
        older += f", or take one that is kept ({kept}; engine.kept_versions says how many)" if several else ""
        raise VersionNotServedError(
            f"version {asked} of policy '{policy}' is not served: version {live} is live, and {held}",
            hint=f"{older}; an earlier one that was saved can be loaded, as a new version"
            if asked < live
            else f"ask again, under another request_id, when a publish has answered with version {asked}",
        )

    def start(self, work: SampleWork) -> None:
        """Give the engine a request, or one that it has given up, anew.

        Raises:
            OpenTinkerError: it is refused, or the policy's last publish failed; the engine has nothing of it.
        """
        hosted = self.hosted(work.policy)
        self.check_samples(work.policy)
        if hosted.fault is not None:
            raise hosted.fault
        version = self.version_of(work.policy, work.request.version)
        # Request ids are unique within a policy; operation ids within the server.
        prompt = resolved(self.parts.images, work.request.prompt)
        request = replace(work.request, request_id=work.operation, prompt=prompt)
        self.parts.engine.add(request, self.adapter(work.policy, version))
        self.running[work.operation] = Running(work, version)

    def leaving(self, policy: str) -> Sequence[int]:
        """The versions that make room for the policy's next one."""
        kept = self.hosted(policy).kept
        return kept[: max(0, len(kept) + 1 - self.parts.kept_versions)] if self.serves_adapter(policy) else kept

    def drop(self, policy: str, versions: Sequence[int]) -> None:
        """Let the engine forget versions that no running request uses. Base weights stay until others replace them."""
        if not self.serves_adapter(policy):
            return
        hosted = self.hosted(policy)
        for version in versions:
            self.parts.engine.drop_adapter(AdapterId(policy, version))
            hosted.kept = tuple(kept for kept in hosted.kept if kept != version)

    def drain(self, policy: str, versions: Sequence[int]) -> None:
        """Step the engine until no request of these versions of the policy is running; the others go on.

        Raises:
            DeadlineError: it does not get on with them; they go on running.
        """
        deadline = time.monotonic() + DRAIN_S
        while any(r.work.policy == policy and r.version in versions for r in self.running.values()):
            if self.pump():
                deadline = time.monotonic() + DRAIN_S
            elif time.monotonic() > deadline:
                raise DeadlineError(
                    f"the engine is busy, but none of its running requests ended for {DRAIN_S:.0f} s",
                    hint="a publish with mode 'abort' starts them anew; if that does not help, start a new server",
                )
