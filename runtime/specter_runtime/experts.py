"""Routed experts as values: their key, their weights, and who hands them to the model.

Two providers of what is in memory stand here: ``ResidentExperts`` holds full-precision weights
(building, profiling, tests), ``PackedExperts`` stand-ins (drafts that must not depend on a cache).
The target's is ``expert_cache.ExpertCache``, a greedy draft's ``draft_engine.ResidentDraft``.

Called by: moe (through ``ExpertProvider``).  Next: packed, scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch

from specter_runtime import packed_bf16
from specter_runtime.config import DTYPE_BYTES, Encoding, ExpertNumbers, ModelConfig
from specter_runtime.packed import PackedTensor, dequantize
from specter_runtime.packed_bf16 import PackedBfloat16, pack_bfloat16
from specter_runtime.scaled import MXFP4_BLOCK, Fp8Matrix, Mxfp4Matrix, fp8_scale_shape

Value = TypeVar("Value")

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of an expert, in the order in which a shard holds them."""

PACKED_PARTS = ("codes", "table", "escape_starts", "escapes")
"""Of a packed matrix, in the order in which a shard holds them for all three."""


class ExpertKey(NamedTuple):
    """Which routed expert: decoder layer and index within it."""

    layer: int
    expert: int


class Expert(Protocol):
    """One routed expert in whatever form it is held."""

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights to compute with."""
        ...


class StoredExpert(Expert, Protocol):
    """One expert of a checkpoint or a shard."""

    @property
    def biases(self) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Of gate, up and down projection, as the checkpoint has them; None without."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Role -> tensor as stored: what ``stored_forms`` names, in any order."""
        ...


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

    def tensors(self) -> dict[str, torch.Tensor]:
        """Role -> tensor."""
        return _matrices(self.gate_proj, self.up_proj, self.down_proj) | _present(self.biases)

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
class PackedWeights:
    """One expert in bfloat16, losslessly packed: what a packed shard holds."""

    gate_proj: PackedBfloat16
    up_proj: PackedBfloat16
    down_proj: PackedBfloat16
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Role -> tensor as the checkpoint has it."""
        return self.to(torch.bfloat16).tensors() | _present(self.biases)

    def parts(self) -> dict[str, torch.Tensor]:
        """What a packed shard holds, in its order: what has a fixed size, then escapes, biases."""
        matrices = _matrices(self.gate_proj, self.up_proj, self.down_proj)
        return {
            **{
                f"{role}.{part}": getattr(matrices[role], part)
                for part in PACKED_PARTS
                for role in PROJECTIONS
            },
            **_present(self.biases),
        }

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights, bit for bit where ``dtype`` is bfloat16."""
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        return ExpertWeights(
            *(matrix.to(dtype) for matrix in matrices),
            *(None if bias is None else bias.to(dtype) for bias in self.biases),
        )


@dataclass(frozen=True, slots=True)
class ScaledExpert:
    """One expert as fp8 and mxfp4 checkpoints have it: matrices with scales, biases as they are."""

    gate_proj: Fp8Matrix | Mxfp4Matrix
    up_proj: Fp8Matrix | Mxfp4Matrix
    down_proj: Fp8Matrix | Mxfp4Matrix
    biases: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Role -> tensor: codes under the matrix's role, their scales behind ``_scales``."""
        tensors = _present(self.biases)
        for role, matrix in _matrices(self.gate_proj, self.up_proj, self.down_proj).items():
            tensors[role] = matrix.codes if isinstance(matrix, Fp8Matrix) else matrix.blocks
            tensors[f"{role}_scales"] = matrix.scales
        return tensors

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights that the codes stand for."""
        matrices = (self.gate_proj, self.up_proj, self.down_proj)
        return ExpertWeights(
            *(matrix.to(dtype) for matrix in matrices),
            *(None if bias is None else bias.to(dtype) for bias in self.biases),
        )


def _matrices(gate: Value, up: Value, down: Value) -> dict[str, Value]:
    return dict(zip(PROJECTIONS, (gate, up, down), strict=True))


def _present(biases: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
    pairs = zip(PROJECTIONS, biases, strict=True)
    return {f"{role}_bias": bias for role, bias in pairs if bias is not None}


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

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights that the codes stand for."""
        return ExpertWeights(
            dequantize(self.gate_proj, dtype),
            dequantize(self.up_proj, dtype),
            dequantize(self.down_proj, dtype),
            *(bias.to(dtype) for bias in self.biases),
        )


@dataclass(frozen=True, slots=True)
class SlotExpert:
    """Whatever expert has last been read into a slot."""

    buffer: torch.Tensor
    config: ModelConfig
    numbers: ExpertNumbers
    encoding: Encoding

    def view(self) -> StoredExpert:
        """See it; raises ``ValueError`` if its bytes are none."""
        return view_expert(self.buffer, self.config, self.numbers, self.encoding)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """The weights to compute with."""
        return self.view().to(dtype)


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router chose for T tokens of one layer, most probable expert first.

    Attributes:
        layer: the decoder layer.
        selected_experts: int64 ``[T, K]``.
        routing_weights: float32 ``[T, K]``, renormalized where the family does so.
        router_probs: float32 ``[T, E]``: the softmax of the router's logits, whatever the family
            makes of them; what is known of the experts that were not chosen. None where nobody
            kept it.
    """

    layer: int
    selected_experts: torch.Tensor
    routing_weights: torch.Tensor
    router_probs: torch.Tensor | None = None

    def expert_ids(self) -> list[int]:
        """The distinct experts, ascending."""
        return sorted(set(self.selected_experts.flatten().tolist()))


Batch = Sequence[tuple[int, Expert]]
"""Experts by id that can be computed at the same time."""


class ExpertProvider(Protocol):
    """Hands experts to the model, batch by batch and in any order.

    A batch is valid until the iterator advances: the provider owns the memory. An expert that
    is not yielded is *left out*: the model renormalizes the rest. Only a draft may do that.
    """

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield ``(expert_id, weights)`` once for each distinct expert of ``routing``."""
        ...


class ResidentExperts:
    """A provider for experts that are all in memory as the checkpoint has them."""

    def __init__(self, weights: Mapping[ExpertKey, Expert]) -> None:
        self._weights = weights

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield the experts, ascending."""
        layer = routing.layer
        yield [(expert, self._weights[ExpertKey(layer, expert)]) for expert in routing.expert_ids()]


class PackedExperts:
    """Stand-ins at any bit width; experts without one are left out."""

    def __init__(self, packed: Mapping[ExpertKey, Expert]) -> None:
        self._packed = packed

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield the stand-ins of those experts that have one."""
        found = [(e, self._packed.get(ExpertKey(routing.layer, e))) for e in routing.expert_ids()]
        yield [(expert, packed) for expert, packed in found if packed is not None]


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


def stored_forms(
    config: ModelConfig, numbers: ExpertNumbers
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each stored tensor of an expert, in shard order.

    Wider elements come first, so that every tensor is aligned to its elements; gate, up and down
    otherwise follow each other.
    """
    forms: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for role, shape in matrix_shapes(config).items():
        if numbers.dtype == "float8_e4m3fn":
            assert config.fp8_block_size is not None, "bundle_loader checks this"
            forms[role] = (shape, torch.float8_e4m3fn)
            scales = fp8_scale_shape(shape, config.fp8_block_size)
            forms[f"{role}_scales"] = (scales, getattr(torch, str(numbers.scale_dtype)))
        elif numbers.dtype == "mxfp4":
            blocks = (shape[0], shape[1] // MXFP4_BLOCK)
            forms[role] = ((*blocks, MXFP4_BLOCK // 2), torch.uint8)
            forms[f"{role}_scales"] = (blocks, torch.uint8)
        else:
            forms[role] = (shape, getattr(torch, numbers.dtype))
    for role, any_shape in expert_shapes(config).items():
        if role not in forms:
            forms[role] = (any_shape, getattr(torch, str(numbers.bias_dtype)))
    return dict(sorted(forms.items(), key=lambda item: -item[1][1].itemsize))


def expert_nbytes(config: ModelConfig, numbers: ExpertNumbers) -> int:
    """Bytes of one expert's tensors as stored, unpadded."""
    forms = stored_forms(config, numbers).values()
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)


def escapes_start(config: ModelConfig) -> int:
    """Where the escapes of a packed expert begin: behind all that has a fixed size."""
    matrices = matrix_shapes(config).values()
    forms = [form for shape in matrices for form in packed_bf16.forms(shape).values()]
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in forms)


def packed_nbytes(config: ModelConfig, numbers: ExpertNumbers, num_escapes: int) -> int:
    """Bytes of one losslessly packed expert with so many escapes, unpadded."""
    biases = expert_nbytes(config, numbers) - DTYPE_BYTES["bfloat16"] * config.expert_num_weights
    return escapes_start(config) + 4 * num_escapes + biases


def view_expert(
    buffer: torch.Tensor, config: ModelConfig, numbers: ExpertNumbers, encoding: Encoding = "raw"
) -> StoredExpert:
    """See the bytes of a shard as an expert; no copy.

    Args:
        buffer: uint8, at least as long as the shard's data.
        config: gives the shapes.
        numbers: how the checkpoint stores them.
        encoding: of the shard.

    Raises:
        ValueError: a packed shard's bytes are none.
    """
    if encoding == "packed":
        return _view_packed(_Reader(buffer), config, numbers)
    reader = _Reader(buffer)
    forms = stored_forms(config, numbers)
    return make_expert({role: reader.take(*form) for role, form in forms.items()}, config)


class _Reader:
    """Takes one tensor after another from a buffer, without a copy."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._start = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The next tensor."""
        stop = self._start + math.prod(shape) * dtype.itemsize
        if not self._start <= stop <= len(self._buffer):
            raise ValueError(f"{len(self._buffer)} bytes are too few, {stop} are needed")
        part = self._buffer[self._start : stop]
        self._start = stop
        return part.view(dtype).view(shape)


def _view_packed(reader: _Reader, config: ModelConfig, numbers: ExpertNumbers) -> PackedWeights:
    shapes = matrix_shapes(config)
    parts: dict[str, dict[str, torch.Tensor]] = {role: {} for role in shapes}
    for part in PACKED_PARTS:
        for role, shape in shapes.items():
            if part == "escapes":
                num_escapes = int(parts[role]["escape_starts"][-1])
                parts[role][part] = reader.take((num_escapes,), torch.int32)
            else:
                parts[role][part] = reader.take(*packed_bf16.forms(shape)[part])
    gate, up, down = (PackedBfloat16(**parts[role], shape=shapes[role]) for role in PROJECTIONS)
    for matrix in (gate, up, down):
        matrix.check()
    biases: dict[str, torch.Tensor] = {}
    for role, any_shape in expert_shapes(config).items():
        if role not in shapes:
            biases[role] = reader.take(any_shape, getattr(torch, str(numbers.bias_dtype)))
    gate_bias, up_bias, down_bias = (biases.get(f"{role}_bias") for role in PROJECTIONS)
    return PackedWeights(gate, up, down, (gate_bias, up_bias, down_bias))


def pack_expert(weights: ExpertWeights) -> PackedWeights:
    """Pack an expert whose matrices are bfloat16."""
    return PackedWeights(
        pack_bfloat16(weights.gate_proj),
        pack_bfloat16(weights.up_proj),
        pack_bfloat16(weights.down_proj),
        weights.biases,
    )


def make_expert(tensors: Mapping[str, torch.Tensor], config: ModelConfig) -> StoredExpert:
    """An expert from its stored tensors by role."""
    biases = tuple(tensors.get(f"{role}_bias") for role in PROJECTIONS)
    if "gate_proj_scales" not in tensors:
        return ExpertWeights(*(tensors[role] for role in PROJECTIONS), *biases)
    gate, up, down = (
        _scaled_matrix(tensors[role], tensors[f"{role}_scales"], config) for role in PROJECTIONS
    )
    return ScaledExpert(gate, up, down, (biases[0], biases[1], biases[2]))


def _scaled_matrix(
    codes: torch.Tensor, scales: torch.Tensor, config: ModelConfig
) -> Fp8Matrix | Mxfp4Matrix:
    if codes.dtype != torch.float8_e4m3fn:
        return Mxfp4Matrix(codes, scales)
    assert config.fp8_block_size is not None, "bundle_loader and checkpoint check this"
    return Fp8Matrix(codes, scales, config.fp8_block_size)
