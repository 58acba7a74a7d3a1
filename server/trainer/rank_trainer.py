"""One rank of a trainer: what every rank runs of a command, each on its share of the data."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opentinker.client.messages import SCALAR_LOSSES, AdamParams, Datum, FloatArray, LossConfig, TokenChunk, TokenScore
from opentinker.config.server import TrainerConfig
from opentinker.errors import TrainerError
from opentinker.server.images import ImageStore
from opentinker.server.trainer.budget import Room
from opentinker.server.trainer.gathered import Gather
from opentinker.server.trainer.identity import base_digest
from opentinker.server.trainer.losses import merge_metrics
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.optimizer import MasterOptimizer, TornError
from opentinker.server.trainer.out_of_memory import memory_explained
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.ranks import Ranks
from opentinker.server.trainer.row_eight_bit import EightBitRowOptimizer
from opentinker.server.trainer.row_optimizer import RowOptimizer
from opentinker.server.trainer.shares import Share
from opentinker.server.trainer.trainer import NO_METRICS, TorchTrainer, zeros

_GATHERED = 4
"""Layers that are whole at a time: the one that is computed, the next, and gradients; measuring on a CPU does not see them."""

Part = tuple[list[FloatArray], dict[str, float]]
"""What a rank's share gave: scores of each of its data, and the metrics."""


class AgreedError(Exception):
    """A command failed on all ranks alike, and each is as it was before. `problem` is None where another rank has it."""

    def __init__(self, problem: Exception | None) -> None:
        super().__init__(problem)
        self.problem = problem


class RankTrainer(TorchTrainer):
    """Any other exception than `AgreedError` in a command that exchanges something leaves the other ranks waiting: they have to
    be ended."""

    def __init__(self, model_dir: Path, config: TrainerConfig, ranks: Ranks, images: ImageStore | None = None) -> None:
        self._ranks = ranks
        self._optimizers: dict[str, RowOptimizer] = {}
        self._problem: Exception | None = None
        super().__init__(model_dir, config, device=ranks.device, images=images)

    def _load_base(self) -> PackedModel:
        base = super()._load_base()
        if self._config.shard_base:
            if self._base is None:
                self._base = base_digest(base.names.items())
            self._ranks.shard(base)
        return base

    def _before_full(self, model: PackedModel) -> None:
        if not _is_sharded(model):
            self._ranks.shard(model)

    def _after_full(self) -> None:
        if _is_sharded(self._model) and not self._config.shard_base:
            self._model = self._load_base()

    def _check_state(self) -> None:
        """The lead rank asks for all."""

    def free_share(self) -> float | None:
        """Bytes that are free to this rank."""
        return self._budget.free(self._device, self._sharing)

    @property
    def _sharing(self) -> int:
        """How many ranks have to do with the memory that is free here."""
        return self._ranks.count if self._device.type == "cpu" else 1

    def room_share(self, policy: str, scalar: bool, trains: bool, measured: bool) -> Room:
        """What there is for a pass on this rank. To measure one, all ranks make it.

        Raises:
            AgreedError: memory ran out while one was measured that exchanges nothing.
        """
        kind, reserve = self._pass_kind(policy, scalar=scalar, trains=trains)
        if self._device.type == "cpu" and self._exchanges(policy):
            reserve += _GATHERED * self._ranks.layer_bytes(self._model)
        try:
            with memory_explained():
                return self._budget.room(kind, self._size, reserve=reserve, measured=measured, sharing=self._sharing)
        except TrainerError as error:
            if self._exchanges(policy):
                raise  # the others are waiting in the middle of a pass
            raise AgreedError(error) from error

    def _exchanges(self, policy: str) -> bool:
        """Whether the passes of the policy and its critic need all ranks."""
        return self._config.shard_base or not self.is_lora(policy)

    def _optimizer(self, name: str, parameters: Mapping[str, nn.Parameter]) -> MasterOptimizer:
        self._optimizers[name] = self._row_optimizer(parameters)
        return self._optimizers[name]

    def _row_optimizer(self, parameters: Mapping[str, nn.Parameter], gather: Gather | None = None) -> RowOptimizer:
        kind = EightBitRowOptimizer if self._config.optimizer == "adamw_8bit" else RowOptimizer
        return kind(parameters, self._ranks, gather, self._host())

    def delete_policy(self, policy: str) -> None:
        super().delete_policy(policy)
        gone = [name for name, optimizer in self._optimizers.items() if optimizer.closed]
        for name in gone:
            del self._optimizers[name]
        self._after_full()

    def score_share(
        self, policy: str, share: Share, compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]:
        """What is asked for of the share's data.

        Raises:
            AgreedError: it failed on any rank, in passes that exchange nothing.
        """
        with torch.no_grad(), self._shown(share):
            if self._exchanges(policy):
                scores = self._score_packs(policy, share.data, share.packs, compute, temperature)
                for _ in range(share.passes - len(share.packs)):
                    self._score_packs(policy, *_nothing(), compute, temperature)
                return scores
            problem: Exception | None = None
            try:
                scores = self._score_packs(policy, share.data, share.packs, compute, temperature)
            except Exception as error:
                problem = error
            if not self._ranks.agree(problem is None):
                raise AgreedError(problem)
            return scores

    def train_share(self, policy: str, share: Share, loss: LossConfig, factor: float) -> Part:
        """Add the gradient of the share's loss to the rank's, if no rank's is refused.

        Raises:
            AgreedError: one was.
        """
        scores, metrics = zeros(share.data), [NO_METRICS]
        self._problem = None
        with self._trained_by(policy, loss).all_or_nothing(), self._shown(share):
            try:
                with memory_explained():
                    metrics += [self._train_pack(policy, share.data, pack, loss, factor, scores) for pack in share.packs]
            except Exception as error:
                if self._exchanges(policy):
                    raise  # the others are waiting in the middle of a pass
                self._problem = error
            if self._exchanges(policy):
                for _ in range(share.passes - len(share.packs)):
                    self._train_nothing(policy, loss)
            if not self._ranks.agree(self._problem is None):
                raise AgreedError(self._problem)
        return scores, merge_metrics(metrics)

    @contextmanager
    def _shown(self, share: Share) -> Iterator[None]:
        """Hold the share's images, as long as its passes need them."""
        if self._images is None or not share.images:  # the server's store holds the lead rank's
            yield
            return
        hashes = tuple(self._images.add(share.images))
        self._images.pin(hashes)
        try:
            yield
        finally:
            self._images.unpin(hashes)

    def _check_loss(self, loss_sum: float, factor: float) -> None:
        """The backward pass goes on, for the others' sake, and is taken back when all have done theirs."""
        try:
            super()._check_loss(loss_sum, factor)
        except TrainerError as error:
            self._problem = self._problem or error

    def _train_nothing(self, policy: str, loss: LossConfig) -> None:
        """A pass of a rank that has no data left, in which the layers are gathered and a gradient of 0 is summed."""
        data, (pack,) = _nothing()
        if loss.name in SCALAR_LOSSES:
            scores_N = self._values(policy, pack)
        else:
            scores_N, _ = self._logprobs(policy, data, pack, LossConfig(name="cross_entropy"))
        (scores_N.sum() * 0).backward()  # type: ignore[no-untyped-call]

    def step_share(self, policy: str, params: AdamParams, critic: bool) -> dict[str, float]:
        """One step of the rank's rows.

        Raises:
            AgreedError: the gradient over all ranks is not finite.
        """
        optimizer = (self._critic(policy) if critic else self._get(policy)).optimizer
        try:
            return optimizer.report_step(params)
        except TornError:
            raise  # the others may be amid the step
        except TrainerError as error:
            raise AgreedError(error) from error

    def load_share(self, policy: str, folder: Path, weights_only: bool) -> None:
        """What the lead rank has loaded; nothing is exchanged."""
        self.load(policy, folder, weights_only=weights_only)

    def contribute(self, source: str, names: Sequence[str]) -> list[torch.Tensor]:
        """The full tensors of the model ("model") or of the state of an optimizer ("optimizer NAME"), from all ranks' rows."""
        kind, _, name = source.partition(" ")
        if kind == "model":
            parameters = [self._model.names[each] for each in names]
            rows = [p.to_local().detach() if isinstance(p, DTensor) else self._ranks.rows(p.detach()) for p in parameters]
            return list(self._ranks.gather(rows, [p.shape for p in parameters]))
        return list(self._ranks.gather(*self._optimizers[name].rows(names)))


def _nothing() -> tuple[tuple[Datum, ...], tuple[Pack, ...]]:
    """Data whose passes stand for those that a rank has not. They are two tokens, each with one after it: for a single one,
    compiled layers would be compiled once more."""
    tokens = np.zeros(2, np.int32)
    data = (Datum((TokenChunk(tokens),), tokens, {"weights": np.ones(2, np.float32)}),)
    return data, tuple(pack_data(data, 16))


def _is_sharded(model: PackedModel) -> bool:
    return any(isinstance(parameter, DTensor) for parameter in model.names.values())
