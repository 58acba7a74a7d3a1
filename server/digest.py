"""Digests of tensors, computed where the tensor lives, so that trainer and engine can prove they hold the same weights."""

import hashlib
from functools import lru_cache

import torch

_ROW = 1 << 14
"""32-bit words hashed into one 64-bit sum."""


@lru_cache(maxsize=16)
def _multipliers(device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0x0D16E57)
    words = torch.randint(-(1 << 63), (1 << 63) - 1, (_ROW,), dtype=torch.int64, generator=generator)
    return (words | 1).to(device)


@torch.no_grad()
def tensor_digest(tensor: torch.Tensor) -> str:
    """A hex digest that changes with any value, position, dtype or shape; the same on CPU and CUDA.

    Rows of 32-bit words are hashed multilinearly modulo 2^64 (Lemire & Kaser, 2014) with fixed odd multipliers. That finds
    faults; it is no defence against an adversary.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if raw.storage_offset() % 4:
        raw = raw.clone()
    words = raw[: raw.numel() // 4 * 4].view(torch.int32)
    multipliers = _multipliers(tensor.device)
    # On CPU the products of a block must stay in the cache; on a GPU few launches matter more.
    block = 8 if tensor.device.type == "cpu" else 1 << 10
    whole = words.numel() // _ROW
    rows = words[: whole * _ROW].view(whole, _ROW)
    products = torch.empty(min(block, whole), _ROW, dtype=torch.int64, device=tensor.device)
    sums = []
    for start in range(0, whole, block):
        part = rows[start : start + block]
        sums.append(products[: len(part)].copy_(part).mul_(multipliers).sum(dim=1))
    rest = words[whole * _ROW :].to(torch.int64)
    sums.append((rest * multipliers[: rest.numel()]).sum(dim=0, keepdim=True))
    digest = hashlib.blake2b(f"{tensor.dtype} {tuple(tensor.shape)}".encode(), digest_size=16)
    digest.update(torch.cat(sums).cpu().numpy().tobytes())
    digest.update(raw[words.numel() * 4 :].cpu().numpy().tobytes())
    return digest.hexdigest()
