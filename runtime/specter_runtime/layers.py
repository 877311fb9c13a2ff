"""The dense parts of a decoder layer: pure functions of tensors.

All of them take a *block* of rows ``[T, D]``. Rounding may depend on how many rows a block has (a
matrix product over 1 row and over 5 rows may use different kernels), so whoever needs a row to come
out the same whatever else is computed hands in blocks of one row (see ``model``).

Called by: model, moe.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from specter_runtime.config import ModelConfig


def rms_norm(
    hidden: torch.Tensor,  # [..., D]
    weight: torch.Tensor,  # [D]
    eps: float,
) -> torch.Tensor:
    """Root-mean-square norm, computed in float32 and rounded before the weight is applied.

    Source: arXiv 1910.07467, equation 4; the order of rounding is transformers'.
    """
    wide = hidden.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(hidden.dtype)


Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each ``[T, 1, C]``."""


class RotaryEmbedding:
    """Rotary position embedding, half-split layout. Source: arXiv 2104.09864, equation 34."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).to(torch.float32)
        self._inverse_frequencies = 1.0 / config.rope_theta ** (exponents / config.head_dim)

    def angles(self, start: int, num_tokens: int, dtype: torch.dtype) -> Angles:
        """Angles of positions ``start ..``; computed in float32, rounded to ``dtype``."""
        positions = torch.arange(start, start + num_tokens, dtype=torch.float32)
        angles = positions.unsqueeze(-1) * self._inverse_frequencies  # [T, C / 2]
        angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)  # [T, 1, C]
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(
    heads: torch.Tensor,  # [T, heads, C]
    angles: Angles,
) -> torch.Tensor:
    """Turn each pair (i, i + C/2) of a head by its angle."""
    cos, sin = angles
    low, high = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-high, low), dim=-1) * sin


def attend(
    queries: torch.Tensor,  # [T, H, C]
    keys: torch.Tensor,  # [S, G, C]
    values: torch.Tensor,  # [S, G, C]
) -> torch.Tensor:
    """Causal grouped-query attention of the last T of S positions: ``[T, H * C]``.

    A block of one row sees exactly its own S positions, no mask and no padding: the call is the
    same whether the row is decoded or verified.
    """
    num_new, num_seen = queries.shape[0], keys.shape[0]
    mask = None
    if num_new > 1:
        mask = torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new)
    out = functional.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),  # [1, H, T, C]
        keys.transpose(0, 1).unsqueeze(0),  # [1, G, S, C]
        values.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1).reshape(num_new, -1)


def swiglu(
    hidden: torch.Tensor,  # [T, D]
    gate_proj: torch.Tensor,  # [I, D]
    up_proj: torch.Tensor,  # [I, D]
    down_proj: torch.Tensor,  # [D, I]
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)): ``[T, D]``. Source: arXiv 2002.05202, equation 6."""
    gate = functional.silu(functional.linear(hidden, gate_proj))  # [T, I]
    return functional.linear(gate * functional.linear(hidden, up_proj), down_proj)
