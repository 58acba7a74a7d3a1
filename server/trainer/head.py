"""Logprobs of targets and entropies under an output head, without ever holding all logits.

Axes: N = rows (weighted targets), H = hidden size, V = vocabulary, S = one slice of the vocabulary.
"""

from typing import Any, cast

import torch

SLICE_ELEMENTS = 1 << 21
"""Logits held at once: sized for the processor's caches rather than for its memory."""


class _TargetLogprobs(torch.autograd.Function):
    """The softmax runs over slices of the vocabulary, and the backward pass computes them again.

    With p = softmax over V, m = the slice's part of p and q = softmax over the slice, the gradient of a target's logprob is
    onehot - p = -m * (q - onehot / m). Its row factors go into the small matrices, so that in the big ones only the
    target's own entry is touched; that one is exact in float32 (expm1), for it is a small difference in confident rows.

    With an entropy, whose gradient is -p * (log p + H), both gradients are added up in the big matrix, and its row factors are
    the masses alone.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_N: torch.Tensor,
        weight_grad_VH: torch.Tensor | None,
        cap: float,
        temperature: float,
        entropy: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.cap, ctx.temperature, ctx.weight_grad_VH, ctx.entropy = cap, temperature, weight_grad_VH, entropy
        target_N, parts_N, entropies_N = _scan(hidden_NH, weight_VH, targets_N, cap, temperature, entropy=entropy)
        logprobs_N = target_N - torch.logsumexp(parts_N, 0)
        masses_N = torch.softmax(parts_N, 0).clamp_min_(1e-30)
        entropy_N = logprobs_N.new_zeros(0) if entropies_N is None else _joined_entropy(parts_N, entropies_N)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, logprobs_N, masses_N, entropy_N)
        return logprobs_N, entropy_N

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None, None]:
        hidden_NH, weight_VH, targets_N, logprobs_N, masses_N, entropy_N = ctx.saved_tensors
        hidden_grad_NH = torch.zeros_like(hidden_NH, dtype=torch.float32)
        scale_N = grads[0] / -ctx.temperature
        for (start, stop), mass_N in zip(_slices(hidden_NH, weight_VH), masses_N, strict=True):
            weight_SH = weight_VH[start:stop]
            logits_NS = _logits(hidden_NH, weight_SH, ctx.cap, ctx.temperature)
            grad_NS = torch.softmax(logits_NS, 1)
            rows, columns = _targets_in(targets_N, start, stop)
            if ctx.entropy:
                towards_NS = grad_NS.float() * (torch.log_softmax(logits_NS.float(), 1) + (mass_N.log() + entropy_N)[:, None])
                towards_NS *= (grads[1] / -ctx.temperature)[:, None]
            grad_NS[rows, columns] = (torch.expm1(logprobs_N) / mass_N)[rows].to(grad_NS.dtype)
            if ctx.entropy:
                grad_NS = towards_NS.addcmul_(grad_NS.float(), scale_N[:, None]).to(hidden_NH.dtype)
            if ctx.cap:
                grad_NS *= 1 - (logits_NS.float() * (ctx.temperature / ctx.cap)).square()
            factor_N1 = (mass_N if ctx.entropy else scale_N * mass_N)[:, None]
            hidden_grad_NH.addcmul_((grad_NS @ weight_SH).float(), factor_N1)
            if ctx.weight_grad_VH is not None:
                ctx.weight_grad_VH[start:stop] += grad_NS.t() @ (hidden_NH * factor_N1).to(hidden_NH.dtype)
        return hidden_grad_NH.to(hidden_NH.dtype), None, None, None, None, None, None


def _scan(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    cap: float,
    temperature: float,
    *,
    entropy: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One pass over the vocabulary: (the targets' logits [N], logsumexp of each slice [slices, N], and, if asked for, the
    entropy of the softmax over each slice alone [slices, N]), all float32."""
    target_N = hidden_NH.new_empty(len(hidden_NH), dtype=torch.float32)
    parts, entropies = [], []
    for start, stop in _slices(hidden_NH, weight_VH):
        logits_NS = _logits(hidden_NH, weight_VH[start:stop], cap, temperature).float()
        first_N = logits_NS[:, 0].clone()
        rows, columns = _targets_in(targets_N, start, stop)
        target_N[rows] = logits_NS[rows, columns]
        logprobs_NS = torch.log_softmax(logits_NS, 1)
        parts.append(first_N - logprobs_NS[:, 0])  # one fused pass, unlike logsumexp
        if entropy:
            entropies.append(_entropy(logprobs_NS, 1))
        del logprobs_NS  # its memory is still in the caches when the next slice takes it
    return target_N, torch.stack(parts), torch.stack(entropies) if entropy else None


def _entropy(logprobs: torch.Tensor, dim: int) -> torch.Tensor:
    return -logprobs.exp().mul_(logprobs).sum(dim)


def _slices(hidden_NH: torch.Tensor, weight_VH: torch.Tensor) -> list[tuple[int, int]]:
    vocabulary = len(weight_VH)
    size = max(SLICE_ELEMENTS // max(len(hidden_NH), 1), 256)
    return [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]


def head_bytes(targets: int, vocabulary: int, hidden_size: int) -> int:
    """At least what a pass of that many targets holds at once here: a slice's logits, their softmax and gradients in the
    model's dtype and in float32, the slice's part of the weight's gradient, and the gradient of the hidden states."""
    size = min(max(SLICE_ELEMENTS // max(targets, 1), 256), vocabulary)
    return 24 * targets * size + 6 * size * hidden_size + 12 * targets * hidden_size


def _targets_in(targets_N: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows whose target lies in the slice, its column there)."""
    rows = ((targets_N >= start) & (targets_N < stop)).nonzero()[:, 0]
    return rows, targets_N[rows] - start


def _logits(hidden_NH: torch.Tensor, weight_SH: torch.Tensor, cap: float, temperature: float) -> torch.Tensor:
    """Logits [N, S] of a slice in the dtype of the hidden states, at the temperature."""
    logits = hidden_NH @ weight_SH.t()
    if cap:
        logits.div_(cap).tanh_().mul_(cap)
    return logits if temperature == 1 else logits.div_(temperature)


def target_logprobs(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    weight_grad_VH: torch.Tensor | None = None,
    *,
    cap: float = 0.0,
    temperature: float = 1.0,
) -> torch.Tensor:
    """log softmax(cap * tanh(hidden @ weight.T / cap) / temperature) at the targets, float32[N].

    Differentiable in `hidden_NH`. The backward pass adds the gradient of the weight, the largest there is, straight to
    `weight_grad_VH` (float32, once per slice), if given. `cap` 0 = no soft cap. `targets_N` is int64.
    """
    logprobs, _ = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH.detach(), targets_N, weight_grad_VH, cap, temperature, False
    )
    return cast(torch.Tensor, logprobs)


def logprobs_and_entropies(
    hidden_NH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_N: torch.Tensor,
    weight_grad_VH: torch.Tensor | None = None,
    *,
    cap: float = 0.0,
    temperature: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`target_logprobs`, bit for bit; the entropy of each row's distribution in nats), float32[N] each, in one pass.

    Both are differentiable as `target_logprobs` is.
    """
    both = _TargetLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH.detach(), targets_N, weight_grad_VH, cap, temperature, True
    )
    return cast(tuple[torch.Tensor, torch.Tensor], both)


def _joined_entropy(parts_N: torch.Tensor, entropies_N: torch.Tensor) -> torch.Tensor:
    """That of the slices' shares of the softmax plus the mean of the slices' own, weighted by the shares: a sum of terms that
    are not negative, so that nothing cancels."""
    shares_N = torch.log_softmax(parts_N, 0)
    return _entropy(shares_N, 0) + (shares_N.exp() * entropies_N).sum(0)
