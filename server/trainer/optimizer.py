"""AdamW on float32 master weights, with gradients accumulated in float32, for parameters of any dtype."""

import contextlib
import traceback
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.adamw import adamw

from opentinker.client.messages import AdamParams
from opentinker.errors import TrainerError
from opentinker.server.trainer.loss_scale import LossScale
from opentinker.server.trainer.state_plan import Piece
from opentinker.server.trainer.state_stream import Column, Host, StateStream, Views


class TornError(TrainerError):
    """A step failed amid the parameters: some have made it and others not."""


class MasterOptimizer:
    """The optimizer state of one policy. A parameter in float32 is its own master.

    From construction to `close` the parameters require gradients, and a backward pass moves each parameter's gradient from
    `parameter.grad` to the accumulated ones here.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], host: Host | None = None) -> None:
        """Masters and moments are on the parameters' device or, with `host`, in the host's memory, but for masters that are
        parameters.

        Raises:
            TooLargeError: the host has no memory for them.
            TrainerError: its memory cannot be locked, or a parameter is not contiguous.
        """
        self.parameters = dict(parameters)
        self.step_count = 0
        self._torn: str | None = None
        """Why a step failed, if some parameters have made it and others not."""
        self.loss_scale = LossScale() if any(p.dtype == torch.float16 for p in self.parameters.values()) else None
        """Of float16: whoever computes gradients computes them so many times as large."""
        self._host = host
        self._stream: StateStream | None = None
        try:
            self.masters = {name: self._master(self._own(p.detach())) for name, p in self.parameters.items()}
            self._make_moments()
            if host is not None:
                columns = {name: [self._master_column(name), *self._columns(name)] for name in self.parameters}
                sizes = {name: master.numel() for name, master in self.masters.items()}
                self._stream = StateStream(host.lanes, columns, sizes, self._uncut())
        except BaseException:
            self._unlock()
            raise
        # The buffers outlive a step, so that no step pays for fresh pages; `_filled` says which ones count.
        self._gradients: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()
        self._hooks = [
            p.requires_grad_(True).register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._accumulate, name)
            )
            for name, p in self.parameters.items()
        ]

    def _master(self, own: torch.Tensor) -> torch.Tensor:
        if self._host is not None and not own.is_contiguous():
            raise TrainerError(
                f"a parameter of shape {list(own.shape)} is not contiguous, so that its state cannot be stepped in pieces",
                hint="set trainer.optimizer_state=device",
            )
        if self._host is None or own.dtype == torch.float32:
            return own.float()
        return self._host.memory.zeros(own.shape, torch.float32).copy_(own)

    def _make_moments(self) -> None:
        kept = [name for name in self.parameters if self._keeps_float(name)]
        self.exp_avg, self.exp_avg_sq = (
            {name: self._zeros(name, self.masters[name].shape, torch.float32) for name in kept} for _ in range(2)
        )

    def _zeros(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Of the state of this parameter."""
        if self._host is not None:
            return self._host.memory.zeros(shape, dtype)
        return torch.zeros(tuple(shape), dtype=dtype, device=self.masters[name].device)

    def _keeps_float(self, name: str) -> bool:
        """Whether the moments of this parameter are kept in float32, in `exp_avg` and `exp_avg_sq`."""
        return True

    def _columns(self, name: str) -> list[Column]:
        """What is kept of this parameter beside the master."""
        return [Column(self.exp_avg[name].view(-1)), Column(self.exp_avg_sq[name].view(-1))]

    def _master_column(self, name: str) -> Column:
        own_master = self.parameters[name].dtype == torch.float32
        return Column(self.masters[name].view(-1), comes_back=not own_master)

    def _uncut(self) -> Container[str]:
        """The parameters that all ranks step together."""
        return ()

    def close(self) -> None:
        """Stop collecting gradients: the parameters are frozen again."""
        for parameter in self.parameters.values():
            parameter.requires_grad_(False)
        for hook in self._hooks:
            hook.remove()
        self._unlock()

    def _unlock(self) -> None:
        if self._host is not None:
            self._host.memory.close()

    def check_whole(self) -> None:
        """Raises: TornError when a step has failed amid the parameters, and no state was loaded since."""
        if self._torn is not None:
            raise TornError(
                f"a step failed when some parameters had made it and others not: {self._torn}",
                hint="load a checkpoint; nothing else can be done with the policy",
            )

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a parameter's values, or of anything of its shape, whose state is kept here: all of it."""
        return tensor

    def _kept_of(self, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """What `held` has of a tensor of `state`."""
        return self._own(tensor)

    def _accumulate(self, name: str, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = self._collected(parameter.grad)
        parameter.grad = None
        if gradient.is_sparse or name in self._filled:
            self.gradient(name).add_(gradient)
        elif name in self._gradients:
            self._gradients[name].copy_(gradient)
        else:
            self._gradients[name] = gradient.float()
        self._filled.add(name)

    def _collected(self, gradient: torch.Tensor) -> torch.Tensor:
        """What a backward pass left at a parameter, as it is added up here."""
        return gradient

    def _no_gradient(self, name: str) -> torch.Tensor:
        return torch.zeros_like(self.masters[name], device=self.parameters[name].device)

    def _gradient_size(self, name: str) -> int:
        """Numbers of an accumulated gradient."""
        return self.masters[name].numel()

    def gradient(self, name: str) -> torch.Tensor:
        """A parameter's accumulated gradient, float32, to add to in place; zeros if there is none yet."""
        if name not in self._filled:
            if name in self._gradients:
                self._gradients[name].zero_()
            else:
                self._gradients[name] = self._no_gradient(name)
            self._filled.add(name)
        return self._gradients[name]

    def gradients(self) -> dict[str, torch.Tensor]:
        """The accumulated gradients, float32; a parameter that took part in no pass is missing (its gradient is zero)."""
        return {name: self._gradients[name] for name in self.parameters if name in self._filled}

    def clear_gradients(self) -> None:
        self._filled.clear()

    def pending_bytes(self) -> int:
        """Memory that the next pass takes for gradients, beside what is taken: buffers that are not made yet, and copies of
        those in use."""
        missing = sum(4 * self._gradient_size(name) for name in self.parameters if name not in self._gradients)
        return missing + sum(4 * self._gradients[name].numel() for name in self._filled)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to compute gradients of in place of the loss."""
        return loss if self.loss_scale is None else loss * self.loss_scale.value

    def progress(self) -> dict[str, Any]:
        """What `load_progress` takes beside the tensors of `state`, as JSON."""
        return {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}

    def load_progress(self, progress: Mapping[str, Any]) -> None:
        if self.loss_scale is not None and "loss_scale" in progress:
            self.loss_scale.load_state(progress["loss_scale"])

    @contextlib.contextmanager
    def all_or_nothing(self) -> Iterator[None]:
        """Passes inside add their gradients together, or, when one raises, not at all."""
        before = {name: gradient.clone() for name, gradient in self.gradients().items()}
        try:
            yield
        except BaseException:
            self._gradients.update(before)
            self._filled = set(before)
            for parameter in self.parameters.values():
                parameter.grad = None
            raise

    @torch.no_grad()
    def step(self, params: AdamParams) -> float:
        """One step on the accumulated gradients, which are cleared; their L2 norm before clipping. In float16 a step whose
        gradients are not finite is skipped, with norm 0, and the loss scale is halved.

        A missing gradient counts as zero: its moments decay and its weights move by what momentum they have.

        Raises:
            TrainerError: the norm is not finite; the weights and the optimizer state stay as they are.
            TornError: it failed later; see `check_whole`.
            torch.OutOfMemoryError: there is no room to step in; nothing has changed.
        """
        self.check_whole()
        with self._room(params):
            return self._step(params)

    @contextlib.contextmanager
    def _room(self, params: AdamParams) -> Iterator[None]:
        """Hold what a step takes on the device, if the state has to come there."""
        if self._stream is None:
            yield
            return

        def rehearse(pieces: Sequence[Piece], views: Sequence[Views]) -> None:
            zeros = [torch.zeros_like(each[0]) for each in views]
            self._move(pieces, [each[0] for each in views], zeros, params, [each[1:] for each in views])

        with self._stream.room(rehearse):
            yield

    def _step(self, params: AdamParams) -> float:
        names = list(self.parameters)
        gradients = self._take_gradients(names)
        self.clear_gradients()
        if self.loss_scale is not None:
            torch._foreach_mul_(gradients, 1 / self.loss_scale.value)
        norm = self._norm(gradients)
        if not norm < float("inf"):
            if self.loss_scale is not None and self.loss_scale.overflowed():
                return 0.0
            raise TrainerError(
                f"the gradient norm is {norm}; the weights are unchanged",
                hint="lower the learning rate, or look for extreme ratios",
            )
        if self.loss_scale is not None:
            self.loss_scale.worked()
        if params.max_grad_norm is not None and norm > params.max_grad_norm:
            torch._foreach_mul_(gradients, params.max_grad_norm / norm)
        if self._stream is None:
            move = self._move_at_home(names, gradients, params)
        else:
            move = self._move_streamed(self._stream, dict(zip(names, gradients, strict=True)), params)
        try:
            move()
            self.step_count += 1
            self._exchange()
        except BaseException as error:
            self._torn = str(error) or repr(error)
            if not isinstance(error, Exception):
                raise
            traceback.clear_frames(error.__traceback__)  # which hold tensors
            raise TornError(f"the step failed amid the parameters: {self._torn}", hint="load a checkpoint") from error
        return norm

    def _move_at_home(self, names: Sequence[str], gradients: Sequence[torch.Tensor], params: AdamParams) -> Callable[[], None]:
        """What steps masters and moments where they are, and puts the masters into the parameters."""
        masters = [self.masters[name] for name in names]
        if params.learning_rate == 0:
            # A step of size zero can still turn -0.0 into 0.0, so it moves copies.
            masters = [master.clone() for master in masters]
        pieces = [Piece(name, 0, master.numel()) for name, master in zip(names, masters, strict=True)]

        def move() -> None:
            self._move(pieces, masters, gradients, params)
            self._publish_own()

        return move

    def _move_streamed(
        self, stream: StateStream, gradients: Mapping[str, torch.Tensor], params: AdamParams
    ) -> Callable[[], None]:
        """As `_move_at_home`, on the device."""
        flat = {name: gradient.reshape(-1) for name, gradient in gradients.items()}
        own = {name: self._own(p.detach()).view(-1) for name, p in self.parameters.items()}

        def move(pieces: Sequence[Piece], views: Sequence[Views]) -> None:
            masters = [each[0] for each in views]
            slices = [flat[piece.name][piece.start : piece.stop] for piece in pieces]
            self._move(pieces, masters, slices, params, [each[1:] for each in views])
            if params.learning_rate:  # as at home: otherwise no bit of a weight moves
                torch._foreach_copy_([own[piece.name][piece.start : piece.stop] for piece in pieces], masters)

        return partial(stream.run, move, masters=params.learning_rate != 0)

    def report_step(self, params: AdamParams) -> dict[str, float]:
        """`step`, and what there is to say of it."""
        report = {"grad_norm": self.step(params)}
        if self.loss_scale is not None:
            report |= {"loss_scale": self.loss_scale.value, "steps_skipped": float(self.loss_scale.skipped)}
        return report

    def _move(
        self,
        pieces: Sequence[Piece],
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        params: AdamParams,
        moments: Sequence[Views] | None = None,
    ) -> None:
        """Step these masters with the `moments` of each, as `_columns` has them, or with those that are kept, in place."""
        if moments is None:
            moments = [(self.exp_avg[piece.name], self.exp_avg_sq[piece.name]) for piece in pieces]
        self._adamw(masters, gradients, [each[0] for each in moments], [each[1] for each in moments], params)

    def _adamw(
        self,
        masters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor],
        exp_avg: Sequence[torch.Tensor],
        exp_avg_sq: Sequence[torch.Tensor],
        params: AdamParams,
    ) -> None:
        """Step `step_count` + 1 of these masters and moments, in place."""
        if not masters:
            return
        steps = torch.full((len(masters),), float(self.step_count), device=masters[0].device)
        adamw(
            list(masters),
            list(gradients),
            list(exp_avg),
            list(exp_avg_sq),
            [],
            list(steps.unbind()),
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=params.learning_rate,
            beta1=params.beta1,
            beta2=params.beta2,
            eps=params.eps,
            weight_decay=params.weight_decay,
        )

    def _take_gradients(self, names: Sequence[str]) -> list[torch.Tensor]:
        """The gradients of the masters."""
        return [self.gradient(name) for name in names]

    def _norm(self, gradients: Sequence[torch.Tensor]) -> float:
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(list(gradients))).double()))

    def _publish_own(self) -> None:
        """Put the masters into the parameters."""
        own = [self._own(p.detach()) for p in self.parameters.values()]
        if self._host is None:
            torch._foreach_copy_(own, list(self.masters.values()))
            return
        for values, master in zip(own, self.masters.values(), strict=True):
            values.copy_(master)

    def _exchange(self) -> None:
        """Get what other ranks have put into theirs."""

    def held(self) -> dict[str, torch.Tensor]:
        """Masters and moments by name, or what is kept here of them."""
        parts = {"master": self.masters, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {f"{part}/{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}

    def state(self) -> Mapping[str, torch.Tensor]:
        """Masters and moments by name: what `load_state` takes, with `step_count`, to continue bit for bit."""
        return self.held()

    def like(self) -> dict[str, torch.Tensor]:
        """Tensors of the names, shapes and dtypes of `state`."""
        return self.held()

    def weights(self) -> dict[str, torch.Tensor]:
        """The part of `like` that `start_from` takes."""
        return {key: tensor for key, tensor in self.like().items() if key.startswith("master/")}

    @torch.no_grad()
    def start_from(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Begin anew at the `weights` of a state of the same names and shapes: no moments, step 0, no gradients."""
        for key, tensor in self.held().items():
            tensor.copy_(self._own(weights[key])) if key in weights else tensor.zero_()
        self.step_count, self._torn = 0, None
        if self.loss_scale is not None:
            self.loss_scale.restart()
        self.clear_gradients()
        self._publish_state(weights)

    @torch.no_grad()
    def load_state(self, state: Mapping[str, torch.Tensor], step_count: int) -> None:
        """Continue from a `state` of the same names and shapes. Accumulated gradients are dropped."""
        for key, tensor in self.held().items():
            tensor.copy_(self._kept_of(key, state[key]))
        self.step_count, self._torn = step_count, None
        self.clear_gradients()
        self._publish_state(state)

    def _publish_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put the masters, which are those of this state, into the parameters; where it has none, they are zero."""
        self._publish_own()
