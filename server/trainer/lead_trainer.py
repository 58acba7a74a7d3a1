"""A trainer on several ranks, as its server sees it: rank 0, which gives the others the same commands."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opentinker.client.messages import (
    SCALAR_LOSSES,
    AdamParams,
    Datum,
    FloatArray,
    LossConfig,
    PolicySpec,
    TokenScore,
    placed_images,
)
from opentinker.config.server import TrainerConfig
from opentinker.errors import ConfigError
from opentinker.server.images import ImageStore
from opentinker.server.trainer.base import ForwardBackwardResult
from opentinker.server.trainer.budget import Room
from opentinker.server.trainer.gathered import Gathered
from opentinker.server.trainer.losses import merge_metrics
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.rank_process import LOAD_S, RankProcesses, RankSpec
from opentinker.server.trainer.rank_trainer import AgreedError, RankTrainer
from opentinker.server.trainer.ranks import Meeting, Ranks, buckets
from opentinker.server.trainer.shares import Share, share_out
from opentinker.server.trainer.trainer import looked_at_together, zeros

EXCHANGE_S = 600.0
"""How long a rank waits for another in an exchange, and rank 0 for an answer when it has its own: the time of a pass or two."""


@dataclass(frozen=True)
class _Started:
    others: RankProcesses
    ranks: Ranks
    threads: int


class LeadTrainer(RankTrainer):
    """Rank 0 of several. What can be refused is refused here, before the others hear of it.

    When a rank dies, fails alone or hangs, the command ends with a `RanksLostError` that names it, and so does every later one.
    """

    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        *,
        device: str,
        timeout_s: float = EXCHANGE_S,
        images: ImageStore | None = None,
    ) -> None:
        """Starts the other ranks, each a process.

        Raises:
            ConfigError: there are fewer GPUs than ranks.
            RanksLostError: one did not start.
        """
        self._timeout_s, self._closed = timeout_s, False
        self._known: set[str] = set()
        """The policies that the others have."""
        started = _start(Path(model_dir), config, device, timeout_s)
        self._others, self._threads = started.others, started.threads
        self._others.watch(started.ranks.abort)
        try:
            with self._sharing_cores():
                super().__init__(Path(model_dir), config, started.ranks, images)
            self._others.collect("while it loaded the model", LOAD_S)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._others.close()
            self._ranks.close()

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the other ranks."""
        return self._others.pids

    def create_policy(self, policy: str, spec: PolicySpec) -> None:
        self._others.check()
        super().create_policy(policy, spec)  # one that it refuses, the others never hear of
        self._tell("create_policy", policy, spec)
        self._known.add(policy)

    def _check_state(self) -> None:
        """For the rank that has least."""
        known = [free for free in self._all("free_share", [()] * self._ranks.count) if free is not None]
        parameters, wholes = self._model.trainable().values(), self._ranks.wholes(self._model)
        other = self._budget.other_free(self._device)  # all ranks are on one node
        self._budget.check_state(parameters, min(known, default=None), self._ranks.count, wholes, other)

    def delete_policy(self, policy: str) -> None:
        self._others.check()
        super().delete_policy(policy)
        if policy in self._known:
            self._known.remove(policy)
            self._tell("delete_policy", policy)

    def load(self, policy: str, folder: Path, *, weights_only: bool = False) -> None:
        self._others.check()
        super().load(policy, folder, weights_only=weights_only)
        self._tell("load_share", policy, folder, weights_only)

    def release_cache(self) -> None:
        self._others.check()
        super().release_cache()
        self._tell("release_cache")

    def optim_step(self, policy: str, params: AdamParams, *, critic: bool = False) -> dict[str, float]:
        _ = self._critic(policy) if critic else self._get(policy)
        report: dict[str, float] = self._all("step_share", [(policy, params, critic)] * self._ranks.count)[0]
        return report

    def forward_backward(self, policy: str, data: Sequence[Datum], loss: LossConfig, factor: float) -> ForwardBackwardResult:
        self._check_data(policy, data, loss)
        scalar, together = loss.name in SCALAR_LOSSES, looked_at_together(loss)
        shares = self._share_out(policy, data, scalar=scalar, trains=True, together=together)
        parts = self._all("train_share", [(policy, share, loss, factor) for share in shares])
        scores = _joined(data, shares, [part[0] for part in parts])
        metrics = merge_metrics([part[1] for part in parts])
        return ForwardBackwardResult(factor * metrics["loss_sum"], scores, metrics)

    def _score(
        self, policy: str, data: Sequence[Datum], compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]:
        shares = self._share_out(policy, data, scalar="values" in compute, trains=False, together=1)
        parts = self._all("score_share", [(policy, share, tuple(compute), temperature) for share in shares])
        return {name: _joined(data, shares, [part[name] for part in parts]) for name in compute}

    def _share_out(self, policy: str, data: Sequence[Datum], *, scalar: bool, trains: bool, together: int) -> list[Share]:
        def pack(pack_tokens: int) -> Any:
            return pack_data(data, pack_tokens, together=together)

        _, tokens = self._plan(policy, data, scalar=scalar, trains=trains, together=together)
        own, *others = share_out(data, self._ranks.count, tokens, pack)
        return [own, *(replace(share, images=self._files(share.data)) for share in others)]

    def _files(self, data: Sequence[Datum]) -> tuple[bytes, ...]:
        """Of the images that the data show, each once."""
        images = self._images
        if images is None:
            return ()
        hashes = dict.fromkeys(image.sha256 for datum in data for _, image in placed_images(datum.chunks))
        return tuple(images.encoded(sha256) for sha256 in hashes)

    def _packs(self, policy: str, data: Sequence[Datum], *, scalar: bool, trains: bool, together: int = 1) -> list[Pack]:
        return self._plan(policy, data, scalar=scalar, trains=trains, together=together)[0]

    def _plan(self, policy: str, data: Sequence[Datum], *, scalar: bool, trains: bool, together: int) -> tuple[list[Pack], int]:
        """(packs that fit on every rank, the tokens that they were packed to), whichever rank gets which."""

        def rooms(measured: bool) -> list[Room]:
            return self._all("room_share", [(policy, scalar, trains, measured)] * self._ranks.count)

        return self._budget.plan(data, rooms, self._size, lora=self.is_lora(policy), together=together)

    def _optimizer(self, name: str, parameters: Mapping[str, nn.Parameter]) -> MasterOptimizer:
        def gather(keys: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            like = optimizer.like()
            return self._gather(f"optimizer {name}", keys, {key: like[key].nbytes for key in keys})

        optimizer = self._row_optimizer(parameters, gather)
        self._optimizers[name] = optimizer
        return optimizer

    def _whole(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, torch.Tensor]:
        self._others.check()
        sharded = {name: p.nbytes for name, p in parameters.items() if isinstance(p, DTensor)}
        if not sharded:
            return parameters

        def gather(names: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
            for name in names:
                if name not in sharded:
                    yield name, parameters[name].detach()
            yield from self._gather("model", [name for name in names if name in sharded], sharded)

        return Gathered(parameters, gather)

    def _gather(self, source: str, names: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, full tensor) of each, a bucket after the other; whoever asks may stop anywhere."""
        for bucket in buckets(names, lambda name: sizes[name]):
            yield from zip(bucket, self._all("contribute", [(source, bucket)] * self._ranks.count)[0], strict=True)

    def _tell(self, method: str, *arguments: Any) -> None:
        """Let the others do what was done here, in which nothing is exchanged; a model may be loaded for it.

        Raises:
            RanksLostError: one could not.
        """
        doing = f"in {method}"
        self._others.command(method, [arguments] * (self._ranks.count - 1))
        self._others.collect(doing, LOAD_S)

    def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a method gives on every rank, with the arguments of each.

        Raises:
            Exception: the problem that a rank had, if all ranks are as they were before.
            RanksLostError: a rank died, failed alone or did not answer.
        """
        doing = f"in {method}"
        self._others.command(method, arguments[1:])
        agreed: list[AgreedError] = []
        own: Any = None
        try:
            with self._sharing_cores():
                own = getattr(self, method)(*arguments[0])
        except AgreedError as error:
            agreed.append(error)
        except Exception as error:
            raise self._others.explain(error, doing) from error
        answers: list[Any] = []
        try:
            answers = self._others.collect(doing, self._timeout_s)
        except AgreedError as error:
            agreed.append(error)
        for each in agreed:
            if each.problem is not None:
                raise each.problem
        return [own, *answers]

    @contextmanager
    def _sharing_cores(self) -> Iterator[None]:
        """Leave the other ranks their share of the cores, while they compute, too."""
        before = torch.get_num_threads()
        torch.set_num_threads(self._threads)
        try:
            yield
        finally:
            torch.set_num_threads(before)


def _start(model_dir: Path, config: TrainerConfig, device: str, timeout_s: float) -> _Started:
    if device == "cuda" and torch.cuda.device_count() < config.ranks:
        raise ConfigError(
            f"trainer.ranks is {config.ranks}, but the server has {torch.cuda.device_count()} GPUs",
            hint=f"resources.gpus={config.ranks}",
        )
    threads = max(1, int(os.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))) // config.ranks)
    meeting = Meeting(config.ranks, timeout_s)
    devices = [f"cuda:{rank}" if device == "cuda" else "cpu" for rank in range(config.ranks)]
    others = RankProcesses(
        [RankSpec(rank, meeting, str(model_dir), config, devices[rank], threads) for rank in range(1, config.ranks)]
    )
    try:
        return _Started(others, Ranks(meeting, 0, torch.device(devices[0])), threads)
    except Exception as error:
        raise others.explain(error, "while the ranks met") from error


def _joined(data: Sequence[Datum], shares: Sequence[Share], parts: Sequence[Sequence[FloatArray]]) -> list[FloatArray]:
    """What each rank's share gave, in the order of the batch; 0 for data that are in no pack."""
    joined = zeros(data)
    for share, part in zip(shares, parts, strict=True):
        for index, scores in zip(share.indices, part, strict=True):
            joined[index] = scores
    return joined
