"""The PyTorch trainer: policies on one model, and the commands that a server gives them."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opentinker.client.messages import (
    PAIR_LOSSES,
    SCALAR_LOSSES,
    AdamParams,
    Datum,
    FloatArray,
    IntArray,
    LossConfig,
    PolicySpec,
    TokenScore,
)
from opentinker.config.base import parse_config
from opentinker.config.server import LoraConfig, TrainerConfig
from opentinker.errors import ConflictError, InvalidRequestError, NotFoundError, TrainerError
from opentinker.server.engine.base import LoraTensors
from opentinker.server.images import ImageStore
from opentinker.server.trainer import lora
from opentinker.server.trainer.base import ForwardBackwardResult
from opentinker.server.trainer.budget import MemoryBudget, ModelSize, PassKind
from opentinker.server.trainer.compiled import compile_layers
from opentinker.server.trainer.critic import Critic
from opentinker.server.trainer.eight_bit import EightBitOptimizer
from opentinker.server.trainer.identity import base_digest
from opentinker.server.trainer.losses import check_arrays, merge_metrics, token_loss
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.out_of_memory import memory_explained
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.policy import Origin, Policy
from opentinker.server.trainer.recompute import recompute_layers
from opentinker.server.trainer.scalar_head import ScalarHead
from opentinker.server.trainer.state_stream import Host

NO_METRICS = {
    "tokens": 0.0,
    "loss_sum": 0.0,
    "sequence_tokens": 0.0,
    "computed_tokens": 0.0,
    "passes": 0.0,
    "pass_tokens_max": 0.0,
}
"""The metrics of no data."""


class _Undone(Exception):
    """Ends a pass that was made to see what it takes."""


class TorchTrainer:
    """A `Trainer` on one device; see the protocol for what its methods promise."""

    def __init__(
        self,
        model_dir: Path,
        config: TrainerConfig,
        *,
        device: torch.device | str,
        threads: int | None = None,
        images: ImageStore | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self._model_dir = Path(model_dir)
        self._config = config
        self._device = torch.device(device)
        self._images = images
        self._adapter_pass = lora.AdapterPass()
        self._policies: dict[str, Policy] = {}
        self._base: str | None = None
        self._model = self._load_base()
        self._budget = MemoryBudget(config)
        self._size = ModelSize.of(self._model, recomputes=config.activation_checkpointing)
        self._reference: PackedModel | None = None
        """The base model once more, when a full-parameter policy, which trains `_model`, has been compared with it."""

    def _load_base(self) -> PackedModel:
        dtype, flex = getattr(torch, self._config.dtype), self._config.attention == "flex"
        base = PackedModel(self._model_dir, dtype, self._device, self._images, flex=flex)
        if self._config.compile:
            compile_layers(base.model, self._device)
        if self._config.activation_checkpointing:
            recompute_layers(base.model, self._adapter_pass.around)
        return base

    def create_policy(self, policy: str, spec: PolicySpec) -> None:
        """Add a policy at its initial weights; `spec.checkpoint` is for `load`.

        Raises:
            ConflictError: the name is taken, or a full-parameter policy would share the model.
            ConfigError: the adapter's config, or its critic's, is wrong or fits no layer.
            TooLargeError: there is no memory for the optimizer state.
            TrainerError: the host's memory, where it would be, cannot be locked.
        """
        if policy in self._policies:
            raise ConflictError(f"there already is a policy {policy}")
        if self._policies and (spec.lora is None or any(p.lora is None for p in self._policies.values())):
            raise ConflictError(
                "a full-parameter policy needs the server to itself", hint="train adapters (lora), or use another server"
            )
        critic_config = None if spec.critic is None else parse_config(LoraConfig, spec.critic)
        head = ScalarHead(self._model.hidden_size, self._device, bias=False) if spec.head == "scalar" else None
        if spec.lora is None:
            self._check_state()
            self._before_full(self._model)
            parameters = self._model.trainable() if head is None else {**self._model.trunk(), **head.parameters()}
            try:
                optimizer = self._optimizer(policy, parameters)
            except Exception:
                self._after_full()
                raise
            self._policies[policy] = Policy(optimizer, None, (), head)
        else:
            config = parse_config(LoraConfig, spec.lora)
            names, targets = lora.resolve_targets(self._model.model, self._model.config, config)
            adapter = lora.add_adapters(self._model.model, names, self._adapter_pass, policy, config, spec.seed)
            parameters = adapter if head is None else {**adapter, **head.parameters(lora.PEFT_PREFIX)}
            try:
                optimizer = self._optimizer(policy, parameters)
            except Exception:
                lora.remove_adapters(self._model.model, policy)
                raise
            self._policies[policy] = Policy(optimizer, config, targets, head)
        if critic_config is None:
            return
        try:
            base = self._base_of(policy)
            critic = Critic(base, self._adapter_pass, policy, critic_config, spec.seed + 1, self._optimizer)
        except Exception:
            self.delete_policy(policy)
            raise
        self._policies[policy] = replace(self._policies[policy], critic=critic)

    def _check_state(self) -> None:
        """Raises: TooLargeError when there is no room for the optimizer state of all parameters."""
        free, other = self._budget.free(self._device), self._budget.other_free(self._device)
        self._budget.check_state(self._model.trainable().values(), free, host=other)

    def _before_full(self, model: PackedModel) -> None:
        """A model is about to be trained in all its parameters, or was loaded beside one that is."""

    def _after_full(self) -> None:
        """The model is not trained in all its parameters after all, or no more."""

    def _optimizer(self, name: str, parameters: Mapping[str, torch.nn.Parameter]) -> MasterOptimizer:
        kind = EightBitOptimizer if self._config.optimizer == "adamw_8bit" else MasterOptimizer
        return kind(parameters, self._host())

    def _host(self) -> Host | None:
        """Where optimizer state is kept, if not on the device."""
        return Host.of(self._device) if self._config.optimizer_state == "host" else None

    def delete_policy(self, policy: str) -> None:
        """Forget a policy. The base weights are pristine afterwards: after a full-parameter policy they are its reference's,
        or loaded anew."""
        gone = self._found(policy)
        gone.optimizer.close()
        if gone.critic is not None:
            gone.critic.close()
        del self._policies[policy]
        self._budget.forget(policy)
        if gone.lora is None:
            self._model, self._reference = self._reference or self._load_base(), None
        else:
            lora.remove_adapters(self._model.model, policy)

    def is_lora(self, policy: str) -> bool:
        return self._found(policy).lora is not None

    def samples(self, policy: str) -> bool:
        return self._found(policy).head is None

    def release_cache(self) -> None:
        """Give back what the allocator holds of the GPU's memory and does not use."""
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Nothing outlives the process."""

    @memory_explained()
    @torch.no_grad()
    def forward(
        self,
        policy: str,
        data: Sequence[Datum],
        *,
        compute: Sequence[TokenScore] = ("logprobs",),
        temperature: float = 1.0,
    ) -> dict[TokenScore, list[FloatArray]]:
        state = self._get(policy)
        if not temperature > 0:
            raise InvalidRequestError(f"the temperature must be above 0, not {temperature}")
        if "values" in compute and state.head is None and state.critic is None:
            raise InvalidRequestError(
                f"policy {policy} has no value head, so there are no 'values'; nothing was computed",
                hint="create it with a critic, or ask for some of 'logprobs', 'reference_logprobs' and 'entropy'",
            )
        if state.head is not None and (others := [name for name in compute if name != "values"]):
            raise InvalidRequestError(
                f"policy {policy} has a scalar head, so there are no '{others[0]}'; nothing was computed",
                hint="ask for 'values'",
            )
        self._model.check_tokens(data)
        return self._score(policy, data, compute, temperature)

    def _score(
        self, policy: str, data: Sequence[Datum], compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]:
        return self._score_packs(
            policy, data, self._packs(policy, data, scalar="values" in compute, trains=False), compute, temperature
        )

    def _score_packs(
        self, policy: str, data: Sequence[Datum], packs: Sequence[Pack], compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, list[FloatArray]]:
        scores = {name: zeros(data) for name in compute}
        for pack in packs:
            for name, score_N in self._scores(policy, data, pack, compute, temperature).items():
                _scatter(pack, score_N, scores[name])
        return scores

    @memory_explained()
    def check(self, policy: str, data: Sequence[Datum], loss: LossConfig) -> None:
        self._checked_packs(policy, data, loss)

    def _checked_packs(self, policy: str, data: Sequence[Datum], loss: LossConfig) -> list[Pack]:
        """See `check`; the packs that the data are trained in."""
        self._check_data(policy, data, loss)
        return self._packs(policy, data, scalar=loss.name in SCALAR_LOSSES, trains=True, together=looked_at_together(loss))

    def _check_data(self, policy: str, data: Sequence[Datum], loss: LossConfig) -> None:
        """`check` but for whether there is memory."""
        self._trained_by(policy, loss)
        self._model.check_tokens(data)
        check_arrays(data, loss)

    @memory_explained()
    def forward_backward(self, policy: str, data: Sequence[Datum], loss: LossConfig, factor: float) -> ForwardBackwardResult:
        """See `Trainer`. An empty batch, or one without a weighted target, has loss 0 and adds no gradient.

        Raises:
            InvalidRequestError: the data lack an array the loss needs, or hold a token outside the vocabulary; or it is a loss
                of a head that the policy has not.
            TooLargeError: a datum, or a pair, takes more memory than there is.
            TrainerError: the loss is not finite, or memory ran out all the same.
        """
        optimizer = self._trained_by(policy, loss)
        packs = self._checked_packs(policy, data, loss)
        scores = zeros(data)
        with optimizer.all_or_nothing():
            metrics = [self._train_pack(policy, data, pack, loss, factor, scores) for pack in packs]
        merged = merge_metrics([NO_METRICS, *metrics])
        return ForwardBackwardResult(factor * merged["loss_sum"], scores, merged)

    def _train_pack(
        self, policy: str, data: Sequence[Datum], pack: Pack, loss: LossConfig, factor: float, scores: list[FloatArray]
    ) -> dict[str, float]:
        """Add the gradient of one pack's loss; its metrics. What the loss saw is put into `scores`.

        Raises:
            TrainerError: the loss is not finite.
        """
        if loss.name in SCALAR_LOSSES:
            scores_N, entropies_N = self._values(policy, pack), None
        else:
            full = not self.is_lora(policy)
            head_grad = self._get(policy).optimizer.gradient(self._model.head_name) if full else None
            scores_N, entropies_N = self._logprobs(policy, data, pack, loss, head_grad)
        sequence_N = torch.from_numpy(pack.data_N.astype(np.int64)).to(self._device)
        total, metrics = token_loss(loss, scores_N, self._arrays(data, pack), sequence_N, entropies_N)
        self._check_loss(metrics["loss_sum"], factor)
        self._trained_by(policy, loss).scaled(total * factor).backward()  # type: ignore[no-untyped-call]
        _scatter(pack, scores_N.detach(), scores)
        size = float(len(pack))
        effort = {
            "computed_tokens": size,
            "pass_tokens_max": size,
            "passes": 1.0,
            "sequence_tokens": float(pack.sequence_tokens),
        }
        return metrics | effort

    def _check_loss(self, loss_sum: float, factor: float) -> None:
        """Raises: TrainerError when the loss is not finite."""
        if not np.isfinite(loss_sum * factor):
            raise TrainerError(f"the loss is {loss_sum}; no gradient was added")

    def _packs(self, policy: str, data: Sequence[Datum], *, scalar: bool, trains: bool, together: int = 1) -> list[Pack]:
        """Packs of the data whose passes fit into memory; see `MemoryBudget.packs`."""
        kind, reserve = self._pass_kind(policy, scalar=scalar, trains=trains)
        return self._budget.packs(data, kind, self._size, reserve=reserve, together=together)

    def _pass_kind(self, policy: str, *, scalar: bool, trains: bool) -> tuple[PassKind, int]:
        """(such a pass, the bytes of gradients that are still to come)."""
        state = self._get(policy)
        optimizer = state.critic.optimizer if scalar and state.critic is not None else state.optimizer
        lora = state.lora is not None

        def run(sample: Sequence[Datum]) -> None:
            (pack,) = pack_data(sample, 1 << 20)
            with contextlib.suppress(_Undone), torch.set_grad_enabled(trains), optimizer.all_or_nothing():
                head_grad = None if scalar or lora or not trains else optimizer.gradient(self._model.head_name)
                loss = LossConfig(name="cross_entropy", entropy_coefficient=1.0)
                scores = (self._values(policy, pack),) if scalar else self._logprobs(policy, sample, pack, loss, head_grad)
                if trains:
                    torch.stack([score.sum() for score in scores if score is not None]).sum().backward()  # type: ignore[no-untyped-call]
                raise _Undone

        kind = PassKind((policy, scalar, trains), run, self._device, self._model.random_tokens, lora)
        return kind, optimizer.pending_bytes() if trains else 0

    @memory_explained()
    def optim_step(self, policy: str, params: AdamParams, *, critic: bool = False) -> dict[str, float]:
        return (self._critic(policy).optimizer if critic else self._get(policy).optimizer).report_step(params)

    def full_weights(self, policy: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `Trainer`."""
        self._check_samples(policy)
        adapted = self._adapted_layers(policy) if self.is_lora(policy) else {}
        whole = self._whole(self._model.names)

        def weights() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in whole.items():
                layer, weight = adapted.get(name), tensor.detach()
                yield name, weight if layer is None else lora.merged_weight(weight, layer, policy)

        return weights()

    def _whole(self, parameters: Mapping[str, torch.nn.Parameter]) -> Mapping[str, torch.Tensor]:
        """The parameters as full tensors; each is valid until the next one is asked for."""
        return parameters

    def adapter(self, policy: str) -> LoraTensors:
        """See `Trainer`.

        Raises:
            ConflictError: the policy trains the full parameters, or has a scalar head.
        """
        state = self._get(policy)
        self._check_samples(policy)
        if state.lora is None:
            raise ConflictError(f"policy {policy} trains the full parameters and has no adapter")
        return lora.peft_tensors(state.lora, state.targets, state.optimizer.parameters)

    def save(
        self,
        policy: str,
        folder: Path,
        about: Mapping[str, Any] | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """See `Trainer`. Gradients that no `optim_step` has used yet are not part of a checkpoint.

        Raises:
            CheckpointError: the folder is not empty.
            OSError, SafetensorError: it cannot be written; use `checkpoint.write_checkpoint` around this.
        """
        return self._get(policy).save(folder, self._origin, self._whole, about or {}, beside or {})

    def load(self, policy: str, folder: Path, *, weights_only: bool = False) -> None:
        """See `Trainer`. Accumulated gradients are dropped."""
        self._found(policy).load(folder, self._origin, weights_only=weights_only)

    @property
    def _origin(self) -> Origin:
        return Origin(self._model_dir, self._model.config, self._base_digest)

    def _base_digest(self) -> str:
        """Of the frozen base model of adapters."""
        if self._base is None:
            self._base = base_digest(self._model.names.items())
        return self._base

    def _get(self, policy: str) -> Policy:
        """Raises: TornError when a step of the policy, or of its critic, has failed amid the parameters."""
        found = self._found(policy)
        found.optimizer.check_whole()
        if found.critic is not None:
            found.critic.optimizer.check_whole()
        return found

    def _found(self, policy: str) -> Policy:
        if policy not in self._policies:
            raise NotFoundError(f"this server has no policy {policy}")
        return self._policies[policy]

    def _critic(self, policy: str) -> Critic:
        critic = self._get(policy).critic
        if critic is None:
            raise InvalidRequestError(f"policy {policy} has no critic; nothing was trained", hint="create it with a critic")
        return critic

    def _trained_by(self, policy: str, loss: LossConfig) -> MasterOptimizer:
        """Of the weights that the loss has a gradient for.

        Raises:
            InvalidRequestError: it is a loss of a head that the policy has not.
        """
        state = self._get(policy)
        if loss.name not in SCALAR_LOSSES:
            if state.head is not None:
                raise InvalidRequestError(
                    f"policy {policy} has a scalar head, and '{loss.name}' is a loss of logprobs; nothing was trained",
                    hint=f"its losses: {', '.join(SCALAR_LOSSES)}",
                )
            return state.optimizer
        if state.head is not None:
            return state.optimizer
        if loss.name == "value" and state.critic is not None:
            return state.critic.optimizer
        raise InvalidRequestError(
            f"policy {policy} has no scalar head for the loss '{loss.name}'; nothing was trained",
            hint="create it with head 'scalar'" + (", or with a critic" if loss.name == "value" else ""),
        )

    def _check_samples(self, policy: str) -> None:
        """Raises: ConflictError when there is nothing to sample from."""
        if self._get(policy).head is not None:
            raise ConflictError(
                f"policy {policy} has a scalar head: it scores, and cannot be published or sampled",
                hint="ask `forward` for its 'values'",
            )

    def _values(self, policy: str, pack: Pack) -> torch.Tensor:
        """What the policy's scalar head, or its critic, says before each weighted target of the pack, float32[N]."""
        state = self._get(policy)
        if state.head is None:
            return self._critic(policy).values(pack)
        with self._adapter_pass.using([policy]):
            return self._model.scalars(pack, state.head)

    def _scores(
        self, policy: str, data: Sequence[Datum], pack: Pack, compute: Sequence[TokenScore], temperature: float
    ) -> dict[TokenScore, torch.Tensor]:
        """What is asked for of the pack's weighted targets, float32[N] each, in as few passes as it takes."""
        targets_N, scores = _targets(data, pack), dict[TokenScore, torch.Tensor]()
        with self._adapter_pass.using([policy]):
            if "entropy" in compute:
                logprobs_N, scores["entropy"] = self._model.logprobs_and_entropies(pack, targets_N, temperature)
                if "logprobs" in compute:
                    scores["logprobs"] = logprobs_N
            elif "logprobs" in compute:
                scores["logprobs"] = self._model.logprobs(pack, targets_N, temperature)
        if "values" in compute:
            scores["values"] = self._values(policy, pack)
        if "reference_logprobs" in compute:
            # Outside `using` no adapter is on, whichever policies have one on these layers.
            scores["reference_logprobs"] = self._base_of(policy).logprobs(pack, targets_N, temperature)
        return scores

    def _base_of(self, policy: str) -> PackedModel:
        """The base model, whatever the policy has learned; for a LoRA policy only as long as no adapter is on."""
        if self.is_lora(policy):
            return self._model
        if self._reference is None:
            reference = self._load_base()
            self._before_full(reference)
            self._reference = reference
        return self._reference

    def _logprobs(
        self,
        policy: str,
        data: Sequence[Datum],
        pack: Pack,
        loss: LossConfig,
        head_grad_VH: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(logprobs; entropies, if the loss needs them) of the pack's weighted targets, float32[N] each."""
        with self._adapter_pass.using([policy]):
            if loss.entropy_coefficient:
                return self._model.logprobs_and_entropies(pack, _targets(data, pack), loss.temperature, head_grad_VH)
            return self._model.logprobs(pack, _targets(data, pack), loss.temperature, head_grad_VH), None

    def _arrays(self, data: Sequence[Datum], pack: Pack) -> dict[str, torch.Tensor]:
        """The data's arrays at the pack's weighted targets, float32[N] each."""
        names = set.intersection(*(set(data[d].arrays) for d in np.unique(pack.data_N)))
        return {
            name: torch.tensor(
                [data[d].arrays[name][t] for d, t in zip(pack.data_N, pack.steps_N, strict=True)], device=self._device
            )
            for name in names
        }

    def _adapted_layers(self, policy: str) -> dict[str, lora.LoraLinear]:
        """Layers that the policy adapts, by the Hugging Face name of their weight."""
        return {
            f"{name}.weight": layer
            for name, layer in self._model.model.named_modules()
            if isinstance(layer, lora.LoraLinear) and policy in layer.adapters
        }


def _targets(data: Sequence[Datum], pack: Pack) -> IntArray:
    """The pack's weighted targets, int32[N]."""
    return np.array([data[d].targets[t] for d, t in zip(pack.data_N, pack.steps_N, strict=True)], np.int32)


def looked_at_together(loss: LossConfig) -> int:
    """How many consecutive data a loss compares with each other."""
    return 2 if loss.name in PAIR_LOSSES else 1


def zeros(data: Sequence[Datum]) -> list[FloatArray]:
    """An entry for each target, float32[T] per datum."""
    return [np.zeros(len(datum), np.float32) for datum in data]


def _scatter(pack: Pack, scores_N: torch.Tensor, out: list[FloatArray]) -> None:
    for datum, step, score in zip(pack.data_N, pack.steps_N, scores_N.cpu().tolist(), strict=True):
        out[datum][step] = score
