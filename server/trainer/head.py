"""Logprobs of targets under an output head, without ever holding all logits.

Axes: N = rows (weighted targets), H = hidden size, V = vocabulary, S = one slice of the vocabulary.
"""

from typing import Any

import torch

SLICE_ELEMENTS = 1 << 22
"""Logits held at once, in elements (float32): sized for the processor's cache rather than for memory."""


class _TargetLogprobs(torch.autograd.Function):
    """The softmax runs over slices of the vocabulary and the backward pass computes them again. So every row of the head's
    gradient is written once, whatever N is."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: torch.Tensor, weight_VH: torch.Tensor, targets_N: torch.Tensor, cap: float, temperature: float
    ) -> torch.Tensor:
        ctx.cap, ctx.temperature = cap, temperature
        logsumexp_N = hidden_NH.new_full((len(hidden_NH),), -torch.inf, dtype=torch.float32)
        target_N = torch.empty_like(logsumexp_N)
        for start, stop in _slices(hidden_NH, weight_VH):
            logits_NS = _logits(ctx, hidden_NH, weight_VH[start:stop])[0]
            logsumexp_N = torch.logaddexp(logsumexp_N, torch.logsumexp(logits_NS, 1))
            rows = ((targets_N >= start) & (targets_N < stop)).nonzero()[:, 0]
            target_N[rows] = logits_NS[rows, targets_N[rows] - start]
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, logsumexp_N)
        return target_N - logsumexp_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None, None, None]:
        grad_N = grads[0]
        hidden_NH, weight_VH, targets_N, logsumexp_N = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        hidden_grad = torch.zeros_like(hidden_NH, dtype=torch.float32) if need_hidden else None
        weight_grad = torch.empty_like(weight_VH) if need_weight else None
        for start, stop in _slices(hidden_NH, weight_VH):
            weight_SH = weight_VH[start:stop]
            logits_NS, slope_NS = _logits(ctx, hidden_NH, weight_SH)
            # d logprob[target] / d logits = onehot(target) - softmax
            grad_NS = logits_NS.sub_(logsumexp_N[:, None]).exp_().mul_(-grad_N[:, None])
            rows = ((targets_N >= start) & (targets_N < stop)).nonzero()[:, 0]
            grad_NS[rows, targets_N[rows] - start] += grad_N[rows]
            if slope_NS is not None:
                grad_NS.mul_(slope_NS)
            grad_NS = grad_NS.div_(ctx.temperature).to(hidden_NH.dtype)
            if hidden_grad is not None:
                hidden_grad += grad_NS @ weight_SH
            if weight_grad is not None:
                torch.mm(grad_NS.t(), hidden_NH, out=weight_grad[start:stop])
        return (None if hidden_grad is None else hidden_grad.to(hidden_NH.dtype)), weight_grad, None, None, None


def _slices(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> list[tuple[int, int]]:
    vocabulary = len(weight_VH)
    size = max(SLICE_ELEMENTS // max(len(hidden_NH), 1), 256)
    return [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def _logits(ctx: Any, hidden_NH: torch.Tensor, weight_SH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Logits [N, S] in float32 at the temperature, and the soft cap's slope where there is a cap."""
    logits = (hidden_NH @ weight_SH.t()).float()
    if ctx.cap == 0:
        return logits.div_(ctx.temperature), None
    bent = logits.div_(ctx.cap).tanh_()
    return bent * (ctx.cap / ctx.temperature), 1 - bent.square()


def target_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    *,
    cap: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log softmax(cap * tanh(hidden @ weight.T / cap) / temperature) at the targets, float32[N]; differentiable.

    `cap` 0 = no soft cap. `targets_N` is int64.
    """
    logprobs: torch.Tensor = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, targets_N, cap, temperature
    )
    return logprobs
