"""The optimizer of one policy on several ranks: each keeps masters and moments of its rows, and steps those."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from opentinker.client.messages import AdamParams
from opentinker.errors import TrainerError
from opentinker.server.trainer.gathered import Gather, Gathered
from opentinker.server.trainer.optimizer import MasterOptimizer
from opentinker.server.trainer.ranks import Ranks
from opentinker.server.trainer.state_stream import Host


class RowOptimizer(MasterOptimizer):
    """A `MasterOptimizer` of which every rank has one. A parameter is sharded by FSDP2, or whole on all ranks: then gradients
    here are those of this rank's data alone, until a step sums them, and every rank gets what the others made of their rows.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], ranks: Ranks, gather: Gather | None = None, host: Host | None = None
    ) -> None:
        """`gather` gives the full tensors of `state`, on the rank that saves."""
        self._ranks, self._gather = ranks, gather
        self.closed = False
        super().__init__(parameters, host)
        self._wholes = [name for name, p in self.parameters.items() if not isinstance(p, DTensor)]

    def close(self) -> None:
        super().close()
        self.closed = True

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else self._ranks.rows(tensor)

    def _collected(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to_local() if isinstance(gradient, DTensor) else gradient

    def _no_gradient(self, name: str) -> torch.Tensor:
        return torch.zeros_like(self._collected(self.parameters[name].detach()), dtype=torch.float32)

    def _gradient_size(self, name: str) -> int:
        parameter = self.parameters[name]
        return (self.masters[name] if isinstance(parameter, DTensor) else parameter).numel()

    @contextmanager
    def _room(self, params: AdamParams) -> Iterator[None]:
        """All ranks have it, or none steps.

        Raises:
            TrainerError: one has not.
        """
        problem: str | None = None  # no error, whose frames hold the tensors of the rehearsal
        with ExitStack() as stack:
            try:
                stack.enter_context(super()._room(params))
            except Exception as error:
                problem = str(error) or repr(error)
            if self._stream is not None and not self._ranks.agree(problem is None):
                why = "" if problem is None else f": {problem}"
                raise TrainerError(
                    f"there was no room on some rank's device to step in{why}; nothing was trained",
                    hint="give the server more memory, or lower engine.memory_fraction",
                )
            yield

    def _take_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        summed = self._ranks.sum_rows([self.gradient(name) for name in self._wholes])
        own = dict(zip(self._wholes, summed, strict=True))
        return [own[name] if name in own else self.gradient(name) for name in names]

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        square = torch.zeros(1, dtype=torch.float64, device=self._ranks.device)
        if present := [gradient for gradient in gradients if gradient.numel()]:
            square += torch.stack(torch._foreach_norm(present)).double().square().sum()
        return float(self._ranks.sum(square).sqrt())

    def _exchange(self) -> None:
        wholes = [self.parameters[name].detach() for name in self._wholes]
        rows = [self._own(whole) for whole in wholes]
        for whole, full in zip(wholes, self._ranks.gather(rows, [whole.shape for whole in wholes]), strict=True):
            whole.copy_(full)

    def _publish_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Every rank has the full state at hand, so that nothing is exchanged."""
        self._publish_own()
        for name in self._wholes:
            parameter, key = self.parameters[name].detach(), f"master/{name}"
            parameter.copy_(state[key]) if key in state else parameter.zero_()

    def state(self) -> Mapping[str, torch.Tensor]:
        assert self._gather is not None, "only the rank that saves asks for the state"
        return Gathered(self.like(), self._whole_state)

    def _whole_state(self, keys: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors of the state."""
        assert self._gather is not None
        return self._gather(keys)

    def like(self) -> dict[str, torch.Tensor]:
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        return {key: torch.empty(shapes[key.split("/", 1)[1]], device="meta") for key in self.held()}

    def rows(self, keys: Sequence[str]) -> tuple[list[torch.Tensor], list[torch.Size]]:
        """(this rank's rows, the full shapes) of tensors of the state."""
        held = self.held()
        return [held[key] for key in keys], [self.parameters[key.split("/", 1)[1]].shape for key in keys]
