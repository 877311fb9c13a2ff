"""Routed experts as values: their key, their weights, and who hands them to the model.

Two providers exist beside the cache (``expert_cache.ExpertCache``): ``ResidentExperts`` holds
full-precision weights in memory (building, profiling, tests), ``PackedExperts`` is the draft.

Called by: moe (through ``ExpertProvider``).  Next: packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from specter_runtime.config import DTYPE_BYTES, ModelConfig
from specter_runtime.packed import PackedTensor, dequantize

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of an expert, in the order in which a shard holds them."""


class ExpertKey(NamedTuple):
    """Which routed expert: decoder layer and index within it."""

    layer: int
    expert: int


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert in full precision; gate and up are ``[I, D]``, down is ``[D, I]``.

    Biases are ``[I]``, ``[I]`` and ``[D]``, None in families without.
    """

    gate_proj: torch.Tensor
    up_proj: torch.Tensor
    down_proj: torch.Tensor
    gate_proj_bias: torch.Tensor | None = None
    up_proj_bias: torch.Tensor | None = None
    down_proj_bias: torch.Tensor | None = None

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of gate, up and down projection."""
        return self.gate_proj_bias, self.up_proj_bias, self.down_proj_bias

    def tensors(self) -> list[torch.Tensor]:
        """All tensors in shard order."""
        biases = [bias for bias in self.biases if bias is not None]
        return [self.gate_proj, self.up_proj, self.down_proj, *biases]

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The same weights in ``dtype``; itself when it has that already."""
        if self.gate_proj.dtype == dtype:
            return self
        return ExpertWeights(
            self.gate_proj.to(dtype),
            self.up_proj.to(dtype),
            self.down_proj.to(dtype),
            *(None if bias is None else bias.to(dtype) for bias in self.biases),
        )


@dataclass(frozen=True, slots=True)
class PackedExpert:
    """One expert of the draft: matrices quantized, biases as they are."""

    gate_proj: PackedTensor
    up_proj: PackedTensor
    down_proj: PackedTensor
    biases: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of matrices and biases."""
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        return sum(m.nbytes for m in matrices) + sum(bias.nbytes for bias in self.biases)

    def dequantize(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights that the codes stand for."""
        return ExpertWeights(
            dequantize(self.gate_proj, dtype),
            dequantize(self.up_proj, dtype),
            dequantize(self.down_proj, dtype),
            *(bias.to(dtype) for bias in self.biases),
        )


class ExpertProvider(Protocol):
    """Hands experts to the model, one at a time and in any order.

    The weights are valid until the iterator advances: the provider owns the memory. An expert that
    is not yielded is *left out*: the model renormalizes the rest. Only a draft may do that.
    """

    def experts(self, layer: int, expert_ids: Sequence[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield ``(expert_id, weights)`` once for each of the distinct ``expert_ids``."""
        ...


class ResidentExperts:
    """A provider for experts that are all in memory in full precision."""

    def __init__(self, weights: Mapping[ExpertKey, ExpertWeights]) -> None:
        self._weights = weights

    def experts(self, layer: int, expert_ids: Sequence[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the experts in the order asked for."""
        for expert in expert_ids:
            yield expert, self._weights[ExpertKey(layer, expert)]


class PackedExperts:
    """The draft's provider: stand-ins at any bit width; experts without one are left out."""

    def __init__(self, packed: Mapping[ExpertKey, PackedExpert], dtype: torch.dtype) -> None:
        self._packed = packed
        self._dtype = dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all stand-ins."""
        return sum(expert.nbytes for expert in self._packed.values())

    def experts(self, layer: int, expert_ids: Sequence[int]) -> Iterator[tuple[int, ExpertWeights]]:
        """Yield the dequantized stand-ins of those experts that have one."""
        for expert in expert_ids:
            packed = self._packed.get(ExpertKey(layer, expert))
            if packed is not None:
                yield expert, packed.dequantize(self._dtype)


def matrix_shapes(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Shape of each matrix of an expert, in shard order."""
    wide = (config.moe_intermediate_size, config.hidden_size)
    return {"gate_proj": wide, "up_proj": wide, "down_proj": (wide[1], wide[0])}


def expert_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each tensor of an expert, in shard order: matrices, then biases."""
    matrices = matrix_shapes(config)
    if not config.expert_bias:
        return dict(matrices)
    biases = {f"{name}_bias": shape[:1] for name, shape in matrices.items()}
    return {**matrices, **biases}


def expert_nbytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of one expert's tensors, unpadded."""
    num_weights = sum(math.prod(shape) for shape in expert_shapes(config).values())
    return num_weights * DTYPE_BYTES[dtype]


def view_expert(buffer: torch.Tensor, config: ModelConfig, dtype: str) -> ExpertWeights:
    """See the bytes of a raw shard as weights; no copy.

    Args:
        buffer: uint8, at least ``expert_nbytes`` long, in shard order.
        config: gives the shapes.
        dtype: the checkpoint's dtype.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    views: dict[str, torch.Tensor] = {}
    start = 0
    for name, shape in expert_shapes(config).items():
        nbytes = math.prod(shape) * DTYPE_BYTES[dtype]
        views[name] = buffer[start : start + nbytes].view(torch_dtype).view(shape)
        start += nbytes
    return ExpertWeights(**views)
