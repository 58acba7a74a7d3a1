"""The memory budget of a trainer: its packs take no more than what is free, or are refused before anything is computed."""

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from opentinker.client.messages import Datum, IntArray, TokenChunk
from opentinker.config.server import TrainerConfig
from opentinker.errors import TooLargeError
from opentinker.server.trainer.free_memory import free_bytes
from opentinker.server.trainer.memory import (
    DoesNotFitError,
    PassCost,
    PassShape,
    fitted,
    gib,
    pass_shape,
    plan_packs,
    refusal,
)
from opentinker.server.trainer.model import PackedModel
from opentinker.server.trainer.packing import Pack, pack_data
from opentinker.server.trainer.peak import peak_bytes
from opentinker.server.trainer.state_plan import device_bytes

log = logging.getLogger(__name__)

SHARE = 0.8
"""Of what is free, that passes may take: memory is never used to the last byte, and others want some."""
CALIBRATION_TOKENS = 192
_PIECE = 16


@dataclass(frozen=True)
class ModelSize:
    """What of a model decides about the memory of its passes."""

    rough: PassCost
    """A generous guess from the sizes of its weights, for when memory is plenty."""
    windowed: bool
    longest: int | None

    @staticmethod
    def of(model: PackedModel, *, recomputes: bool) -> "ModelSize":
        text = model.config.get_text_config()
        layers, heads = int(text.num_hidden_layers), int(text.num_attention_heads)
        width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
        size = torch.finfo(model.dtype).bits // 8
        trunk = [p for p in model.trainable().values() if p.ndim >= 2 and model.vocabulary not in p.shape]
        # Inputs and outputs of each layer, three times over in float32.
        per_token = 12.0 * sum(p.numel() // p.shape[-1] + p.numel() // p.shape[-2] for p in trunk)
        fixed = 64e6 + 8.0 * max(p.numel() for p in model.trainable().values())
        held = 2 if recomputes else layers  # layers of which intermediate results are held at once
        per_long_key = 4.0 * heads * width * size * held
        # Keys and values, and their gradients in one layer; a CPU's products take them without a copy for each query head.
        copied_heads = heads if model.device.type == "cuda" else int(getattr(text, "num_key_value_heads", None) or heads)
        per_copied_key = 0.0 if model.flex else 2.0 * copied_heads * width * size * (held + 1)
        rough = PassCost(
            fixed, per_token, 8.0 * heads * held, per_long_key, model.vocabulary, model.hidden_size, per_copied_key
        )
        kinds = getattr(text, "layer_types", None) or ()
        return ModelSize(rough, "sliding_attention" in kinds or bool(getattr(text, "sliding_window", None)), model.longest)


@dataclass(frozen=True)
class PassKind:
    """One kind of pass, whose cost is measured once."""

    key: Hashable
    run: Callable[[Sequence[Datum]], object]
    """Make such a pass, and leave nothing of it."""
    device: torch.device
    random_tokens: Callable[[np.random.Generator, int], IntArray]
    lora: bool


@dataclass(frozen=True)
class Room:
    """What a pass may take on one device, and what it would."""

    limit: float | None
    """Bytes; None where nothing says so."""
    cost: PassCost


Rooms = Callable[[bool], Sequence[Room]]
"""The rooms of all that make passes of one batch, each by the guess or, if told so, measured."""


class MemoryBudget:
    """Packs data so that every pass fits. `free` says what is free now, None where nothing says so."""

    def __init__(self, config: TrainerConfig, free: Callable[[torch.device], int | None] = free_bytes) -> None:
        self._config, self._free = config, free
        self._costs: dict[Hashable, PassCost] = {}
        self._used = config.pack_tokens

    def free(self, device: torch.device, sharing: int = 1) -> float | None:
        """Bytes that are free, of which so many processes have a share; None where nothing says so."""
        free = self._free(device)
        return None if free is None else free / sharing

    def other_free(self, device: torch.device) -> float | None:
        """Bytes that are free in the host's memory, infinite where nothing says so; None where it is this device's."""
        if device.type == "cpu":
            return None
        free = self._free(torch.device("cpu"))
        return float("inf") if free is None else free

    def check_state(
        self,
        parameters: Iterable[torch.nn.Parameter],
        free: float | None,
        ranks: int = 1,
        wholes: Iterable[torch.nn.Parameter] = (),
        host: float | None = None,
    ) -> None:
        """Is there room, in so many bytes, for the optimizer state and the gradients of these parameters, or for what each of
        several ranks has of them? The gradients of `wholes`, which are among them, are whole on each. `host`: what is free to
        all ranks together in the host's memory, where that is other memory.

        Raises:
            TooLargeError: there is not; nothing was made.
        """
        moments, parameters = 2 if self._config.optimizer == "adamw_8bit" else 8, list(parameters)
        # Moments; and a master, where the parameter is none itself.
        state = sum(p.numel() * (moments + (0 if p.dtype == torch.float32 else 4)) for p in parameters)
        numbers = sum(p.numel() for p in parameters)
        gradients = 4 * numbers / ranks + sum(p.numel() * 4 for p in wholes) * (1 - 1 / ranks)
        at_home = gradients + state / ranks
        streamed = gradients + device_bytes(numbers / ranks) + (state / ranks if host is None else 0)
        away = self._config.optimizer_state == "host"
        smaller = [] if moments == 2 else ["set trainer.optimizer=adamw_8bit"]
        needed = streamed if away else at_home
        if free is not None and needed > free:
            other = not away and host is not None and state <= host and streamed <= free
            less = ["set trainer.optimizer_state=host"] if other else []
            raise TooLargeError(
                f"to train all parameters takes {gib(needed)} beside the model, and {gib(max(free, 0))} are free",
                hint=", ".join([*less, "train an adapter (lora)", "or give the server more memory"]),
            )
        if away and host is not None and state > host:
            raise TooLargeError(
                f"the optimizer state of all parameters takes {gib(state)} in the host's memory, and {gib(max(host, 0))} are "
                "free",
                hint=", ".join([*smaller, "train an adapter (lora)", "or give the server more memory"]),
            )

    def packs(self, data: Sequence[Datum], kind: PassKind, size: ModelSize, *, reserve: int, together: int = 1) -> list[Pack]:
        """The packs of `data`; `reserve` bytes of what is free are for gradients that are still to come.

        Raises:
            TooLargeError: a datum, or data that stay together, cannot fit; nothing was computed.
        """

        def rooms(measured: bool) -> list[Room]:
            return [self.room(kind, size, reserve=reserve, measured=measured)]

        return self.plan(data, rooms, size, lora=kind.lora, together=together)[0]

    def room(self, kind: PassKind, size: ModelSize, *, reserve: int, measured: bool, sharing: int = 1) -> Room:
        """What there is for a pass on this device, by the guess of what it takes or, if it is to be `measured`, by that.
        So many processes are `sharing` what is free."""
        cost = self._cost(kind, size) if measured else size.rough  # the first passes take buffers that stay
        return Room(self._limit(kind.device, reserve, sharing), cost)

    def plan(
        self, data: Sequence[Datum], rooms: Rooms, size: ModelSize, *, lora: bool, together: int = 1
    ) -> tuple[list[Pack], int]:
        """(packs that fit into each of the rooms, the tokens that they were packed to).

        Raises:
            TooLargeError: as `packs`.
        """
        packs = pack_data(data, self._config.pack_tokens, together=together)
        shapes = [pass_shape(pack, windowed=size.windowed) for pack in packs]
        guessed = rooms(False) if packs else []
        if all(room.limit is None or room.cost.bytes(shape) <= room.limit / 2 for room in guessed for shape in shapes):
            return packs, self._config.pack_tokens
        known = [(room.cost, float("inf") if room.limit is None else room.limit) for room in rooms(True)]

        def fits(pack: Pack) -> bool:
            return all(cost.bytes(pass_shape(pack, windowed=size.windowed)) <= limit for cost, limit in known)

        try:
            packs, used = plan_packs(data, self._config.pack_tokens, fits, together=together)
        except DoesNotFitError as error:
            # The tightest is the one that has least room for a single sequence.
            tokens, cost, limit = min(
                ((cost.tokens_within(limit, windowed=size.windowed), cost, limit) for cost, limit in known),
                key=lambda each: (each[0], each[2]),
            )
            needed = cost.bytes(pass_shape(error.pack, windowed=size.windowed))
            recomputes = self._config.activation_checkpointing
            raise refusal(error, needed, limit, tokens, recomputes=recomputes, lora=lora) from None
        if used != self._used:
            spare = gib(min(limit for _, limit in known))
            log.warning("event=packs_by_memory pack_tokens=%d used=%d spare=%s", self._config.pack_tokens, used, spare)
            self._used = used
        return packs, used

    def forget(self, policy: str) -> None:
        """A policy is gone, and what was measured of its passes with it."""
        self._costs = {key: cost for key, cost in self._costs.items() if not (isinstance(key, tuple) and key[0] == policy)}

    def _limit(self, device: torch.device, reserve: int, sharing: int) -> float | None:
        free = self._free(device)
        limits = [] if free is None else [SHARE * (free / sharing - reserve)]
        limits += [] if self._config.memory_gb is None else [self._config.memory_gb * 1e9]
        return min(limits) if limits else None

    def _cost(self, kind: PassKind, size: ModelSize) -> PassCost:
        if kind.key not in self._costs:
            self._costs[kind.key] = cost = _measured(kind, size)
            log.info("event=pass_measured kind=%s bytes_per_token=%.0f fixed=%s", kind.key, cost.per_token, gib(cost.fixed))
        return self._costs[kind.key]


def _measured(kind: PassKind, size: ModelSize) -> PassCost:
    """The cost from passes of at most 192 tokens: of short sequences, of a long one, and of some that begin alike."""
    rng = np.random.default_rng(0)
    whole = min(CALIBRATION_TOKENS, size.longest or CALIBRATION_TOKENS)
    count = max(whole // _PIECE, 2)
    piece = min(_PIECE, whole)
    kind.run(_sequences(rng, kind, 1, piece))  # what is made once and stays is made now
    measured: dict[PassShape, int] = {}
    for sequences, tokens, alike in (
        (1, piece, 0),
        (count, piece, 0),
        (1, whole, 0),
        (count, (whole + piece) // 2, whole // 2),
    ):
        data = _sequences(rng, kind, sequences, tokens, alike)
        (pack,) = pack_data(data, 1 << 20)
        measured[pass_shape(pack)] = peak_bytes(kind.device, lambda data=data: kind.run(data))  # type: ignore[misc]
    return fitted(size.rough, measured)


def _sequences(rng: np.random.Generator, kind: PassKind, count: int, tokens: int, alike: int = 0) -> list[Datum]:
    """Sequences of which the last target only is weighted, so that the head's part is small; the first so many tokens are the
    same in all."""
    weights = np.zeros(tokens, np.float32)
    weights[-1] = 1
    drawn = [kind.random_tokens(rng, tokens + 1) for _ in range(count)]
    for ids in drawn:
        ids[:alike] = drawn[0][:alike]
    return [Datum((TokenChunk(ids[:-1]),), ids[1:], {"weights": weights}) for ids in drawn]
