"""The dense parts of a decoder layer: pure functions of tensors.

All of them take a *block* of rows ``[T, D]``. Rounding may depend on how many rows a block has (a
matrix product over 1 row and over 5 rows may use different kernels), so whoever needs a row to come
out the same whatever else is computed hands in blocks of one row (see ``model``).

Called by: model, moe.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

from specter_runtime import kernels
from specter_runtime.config import RopeConfig


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


class LayerTensors(dict[str, torch.Tensor]):
    """Role -> tensor of one layer, with what the kernels need to know of each, made when needed."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self._matrices: dict[str, kernels.NativeMatrix] = {}
        self._wide: dict[str, torch.Tensor] = {}

    def matrix(self, role: str, bias_role: str) -> kernels.NativeMatrix:
        """A matrix and its bias, if it has one, for the kernels."""
        found = self._matrices.get(role)
        if found is None:
            found = kernels.NativeMatrix.of(self[role], self.get(bias_role))
            self._matrices[role] = found
        return found

    def wide(self, role: str) -> torch.Tensor | None:
        """A vector in float32; None if there is none."""
        if role not in self:
            return None
        if role not in self._wide:
            self._wide[role] = self[role].to(torch.float32).contiguous()
        return self._wide[role]


def linear(tensors: Mapping[str, torch.Tensor], role: str, rows: torch.Tensor) -> torch.Tensor:
    """``rows @ W.T + b`` for the matrix ``role`` and its bias, in the rows' dtype.

    A few rows are multiplied by the kernels, in which case a row's result does not depend on how
    many they are.
    """
    bias_role = f"{role}_bias"
    if isinstance(tensors, LayerTensors) and kernels.serves(rows.dtype, rows.shape[0]):
        wide = tensors.matrix(role, bias_role).multiply(rows.to(torch.float32))
        return wide.to(rows.dtype)
    return functional.linear(rows, tensors[role], tensors.get(bias_role))


def normalize(
    hidden: torch.Tensor,  # [T, D]
    tensors: Mapping[str, torch.Tensor],
    name: str,
    eps: float,
) -> torch.Tensor:
    """The norm ``name``: layer norm where it has a bias, else root-mean-square norm."""
    if isinstance(tensors, LayerTensors) and kernels.serves(hidden.dtype, hidden.shape[0]):
        weight = tensors.wide(name)
        assert weight is not None
        rows = hidden.to(torch.float32)
        return kernels.normalize(rows, weight, tensors.wide(f"{name}_bias"), eps).to(hidden.dtype)
    bias = tensors.get(f"{name}_bias")
    if bias is None:
        return rms_norm(hidden, tensors[name], eps)
    return functional.layer_norm(hidden, hidden.shape[-1:], tensors[name], bias, eps)


Biases = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Of gate, up and down projection."""

Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each ``[T, 1, pairs]`` in float32."""


class RotaryEmbedding:
    """Rotary position embedding. Source: arXiv 2104.09864, equation 34."""

    def __init__(self, rope: RopeConfig) -> None:
        self._frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32)
        self._factor = rope.attention_factor

    def angles(self, start: int, num_tokens: int, dtype: torch.dtype) -> Angles:
        """Angles of positions ``start ..``, rounded to ``dtype`` and held in float32."""
        positions = torch.arange(start, start + num_tokens, dtype=torch.float32)
        angles = (positions.unsqueeze(-1) * self._frequencies).unsqueeze(1)  # [T, 1, pairs]
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return cos.to(dtype).to(torch.float32), sin.to(dtype).to(torch.float32)


def rotate(
    heads: torch.Tensor,  # [T, heads, C]
    angles: Angles,
    interleaved: bool,
) -> torch.Tensor:
    """Turn the first dimensions of each head, pair by pair; the rest passes.

    Interleaved pairs come out in the half-split order: queries and keys alike, so their products
    are the same.
    """
    cos, sin = (part.to(heads.dtype) for part in angles)
    width = 2 * cos.shape[-1]
    turned = heads[..., :width]
    if interleaved:
        low, high = turned[..., 0::2], turned[..., 1::2]
    else:
        low, high = turned.chunk(2, dim=-1)
    parts = (low * cos - high * sin, high * cos + low * sin, heads[..., width:])
    return torch.cat(parts, dim=-1)


def attend(
    queries: torch.Tensor,  # [T, H, C]
    keys: torch.Tensor,  # [S, G, C]
    values: torch.Tensor,  # [S, G, Cv]
    scaling: float,
    window: int | None,
    sinks: torch.Tensor | None,  # [H]
) -> torch.Tensor:
    """Causal grouped-query attention of the last T of S positions: ``[T, H * Cv]``.

    A block of one row sees exactly its own positions, no mask and no padding: the call is the same
    whether the row is decoded or verified.

    Args:
        queries: of the T new positions.
        keys: of all S positions.
        values: of all S positions.
        scaling: multiplies query-key products.
        window: positions that a row sees, itself included; None for all.
        sinks: a logit per head that takes part in the softmax and has no value (arXiv 2309.17453).
    """
    num_new, num_seen = queries.shape[0], keys.shape[0]
    mask = None
    if num_new > 1:
        mask = torch.ones(num_new, num_seen, dtype=torch.bool).tril(num_seen - num_new)
        if window is not None:
            mask = mask.triu(num_seen - num_new - window + 1)
    elif window is not None:
        keys, values = keys[-window:], values[-window:]
    q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))  # [heads, T or S, width]
    if sinks is None:
        out = functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=scaling, enable_gqa=True
        )[0]
    else:
        out = _attend_with_sinks(q, k, v, mask, scaling, sinks)
    return out.transpose(0, 1).reshape(num_new, -1)


def _attend_with_sinks(
    queries: torch.Tensor,  # [H, T, C]
    keys: torch.Tensor,  # [G, S, C]
    values: torch.Tensor,  # [G, S, Cv]
    mask: torch.Tensor | None,  # [T, S]
    scaling: float,
    sinks: torch.Tensor,  # [H]
) -> torch.Tensor:
    """Attention spelled out: ``[H, T, Cv]``. The softmax is computed in float32."""
    num_groups = queries.shape[0] // keys.shape[0]
    keys = keys.repeat_interleave(num_groups, dim=0)
    values = values.repeat_interleave(num_groups, dim=0)
    scores = (queries @ keys.transpose(1, 2)).to(torch.float32) * scaling  # [H, T, S]
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    column = sinks.to(torch.float32).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
    shares = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    return shares.to(values.dtype) @ values


def swiglu(
    hidden: torch.Tensor,  # [T, D]
    gate_proj: torch.Tensor,  # [I, D]
    up_proj: torch.Tensor,  # [I, D]
    down_proj: torch.Tensor,  # [D, I]
    biases: Biases = (None, None, None),
    limit: float | None = None,
) -> torch.Tensor:
    """down(silu(gate(x)) * up(x)): ``[T, D]``. Source: arXiv 2002.05202, equation 6.

    Args:
        hidden: the rows.
        gate_proj: see above.
        up_proj: see above.
        down_proj: see above.
        biases: of gate, up and down projection.
        limit: set for the clamped variant of gpt-oss.
    """
    inner = swiglu_inner(hidden, gate_proj, up_proj, biases, limit)
    return functional.linear(inner, down_proj, biases[2])


def swiglu_inner(
    hidden: torch.Tensor,  # [T, D]
    gate_proj: torch.Tensor,  # [I, D]
    up_proj: torch.Tensor,  # [I, D]
    biases: Biases = (None, None, None),
    limit: float | None = None,
) -> torch.Tensor:
    """What ``swiglu`` multiplies by down_proj: ``[T, I]``."""
    gate = functional.linear(hidden, gate_proj, biases[0])  # [T, I]
    up = functional.linear(hidden, up_proj, biases[1])
    return functional.silu(gate) * up if limit is None else clamped_swiglu(gate, up, limit)


def clamped_swiglu(
    gate: torch.Tensor,  # [T, I]
    up: torch.Tensor,  # [T, I]
    limit: float,
) -> torch.Tensor:
    """(up + 1) * gate * sigmoid(1.702 gate), both clamped: ``[T, I]``. Source: gpt-oss."""
    gate = gate.clamp(max=limit)
    return (up.clamp(-limit, limit) + 1) * (gate * torch.sigmoid(1.702 * gate))
