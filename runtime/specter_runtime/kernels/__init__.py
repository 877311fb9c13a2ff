"""Native CPU kernels, or the news that there are none.

``native.cpp`` is compiled by ``pip install`` where there is a C++ compiler, and loaded here as a
plain shared library. Without it the model computes with torch's operators: as exact, slower, and
other in the last bits (sums run in another order). ``SPECTER_KERNELS=torch`` turns the kernels off.

A row of a result is the same to the bit whatever the number of rows and threads, and whether the
weights are raw or packed bfloat16: see the head of ``native.cpp``.

Called by: moe, layers, model, row_pass, session.  Next: native.cpp.
"""

from __future__ import annotations

import ctypes
import importlib.machinery
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Self

import torch

from specter_runtime.config import RoutingConfig, Scoring
from specter_runtime.experts import Expert, ExpertKey, ExpertWeights, PackedExpert, PackedWeights
from specter_runtime.packed import PackedTensor
from specter_runtime.packed_bf16 import ESCAPE_OUTSIDE, ESCAPES_OUT_OF_ORDER, PackedBfloat16
from specter_runtime.predictor import Predictor

logger = logging.getLogger(__name__)

ABI = 5
MAX_ROWS = 32
"""Rows of activations up to which the kernels are the faster way."""

_KINDS = {torch.bfloat16: 0, torch.float32: 2, torch.float16: 3}
_PACKED_KIND = 1
_GROUPED_KIND = 4
_CODES_TOGETHER = 8
"""Codes that the kernels take at a time: groups must be made of so many."""

Matrix = torch.Tensor | PackedBfloat16 | PackedTensor
_POINTER = ctypes.c_void_p


HIDDEN_DTYPES = {torch.bfloat16: 0, torch.float32: 2}
"""What the kernels read and write hidden states, keys and values in."""

GATE_SCORINGS: tuple[Scoring, ...] = ("softmax", "sigmoid", "softmax_topk")
"""What the gate kernel makes of logits."""


class _Matrix(ctypes.Structure):
    """``struct Matrix`` of native.cpp."""

    _fields_ = (
        ("data", _POINTER),
        ("table", _POINTER),
        ("escape_starts", _POINTER),
        ("escapes", _POINTER),
        ("scales", _POINTER),
        ("zero_points", _POINTER),
        ("bias", _POINTER),
        *((name, ctypes.c_int32) for name in ("rows", "columns", "kind", "bits", "group_size")),
        ("unused", ctypes.c_int32),
    )


class _Expert(ctypes.Structure):
    """``struct Expert`` of native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("gate", "up", "down")),
        ("id", ctypes.c_int64),
    )


class _Gate(ctypes.Structure):
    """``struct Gate`` of native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("router", "norm", "norm_bias", "correction_bias")),
        ("predictor", _POINTER),
        *((name, ctypes.c_float) for name in ("eps", "norm_min", "scaling_factor")),
        *((name, ctypes.c_int32) for name in ("scoring", "num_chosen", "norm_topk_prob")),
        *((name, ctypes.c_int32) for name in ("n_group", "topk_group", "group_is_max")),
        *((name, ctypes.c_int32) for name in ("num_ahead", "num_likely", "unused")),
    )


class _Attention(ctypes.Structure):
    """``struct Attention`` of native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("q", "k", "v", "o")),
        *((name, _POINTER) for name in ("norm", "norm_bias", "q_norm", "k_norm", "sinks")),
        *((name, ctypes.c_int32) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("num_pairs", "norm_is_full", "norm_after_rope")),
        *((name, ctypes.c_int32) for name in ("interleaved", "window")),
        *((name, ctypes.c_float) for name in ("eps", "clip", "scaling", "residual_multiplier")),
        ("cache_kind", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Layer(ctypes.Structure):
    """``struct Layer`` of native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("attention", "gate", "keys", "values")),
        *((name, ctypes.c_float) for name in ("residual_multiplier", "swiglu_limit")),
    )


class _Pass(ctypes.Structure):
    """``struct Pass`` of native.cpp."""

    _fields_ = (
        *((name, _POINTER) for name in ("layers", "hidden", "normed", "probs", "selected")),
        *((name, _POINTER) for name in ("weights", "likely", "probabilities")),
        *((name, _POINTER) for name in ("experts", "pins")),
        *((name, ctypes.c_int32) for name in ("num_layers", "num_experts", "num_chosen", "width")),
        *((name, ctypes.c_int32) for name in ("num_ahead", "num_likely", "kind", "unused")),
    )


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library; None if there is none, or it is turned off."""
    if os.environ.get("SPECTER_KERNELS") == "torch":
        return None
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        path = Path(__file__).with_name(f"native{suffix}")
        if path.is_file():
            return _open(path)
    logger.info("no native kernels: installed without a C++ compiler; computing with torch")
    return None


def _native() -> ctypes.CDLL:
    """The library, for those who only exist where there is one."""
    native = library()
    assert native is not None
    return native


def _open(path: Path) -> ctypes.CDLL | None:
    try:
        native = ctypes.CDLL(str(path))
        abi = native.specter_abi()
    except (OSError, AttributeError) as exc:
        logger.warning("native kernels cannot be loaded, computing with torch: %s", exc)
        return None
    if abi != ABI:
        logger.warning("native kernels of version %d, expected %d: install anew", abi, ABI)
        return None
    native.specter_isa.restype = ctypes.c_char_p
    native.specter_matmul.argtypes = (
        _POINTER, _POINTER, ctypes.c_int64, ctypes.c_int32, _POINTER,
    )  # fmt: skip
    native.specter_experts.argtypes = (
        _POINTER, ctypes.c_int32, _POINTER, ctypes.c_int32, _POINTER, ctypes.c_int32,
        ctypes.c_int32, ctypes.c_float, _POINTER,
    )  # fmt: skip
    native.specter_locate_escapes.argtypes = (_POINTER, ctypes.c_int32, _POINTER, ctypes.c_int64)
    native.specter_widen.argtypes = (_POINTER, _POINTER)
    native.specter_normalize.argtypes = (
        _POINTER, _POINTER, _POINTER, ctypes.c_float, ctypes.c_int32, ctypes.c_int32, _POINTER,
    )  # fmt: skip
    native.specter_attention.argtypes = (
        _POINTER, _POINTER, ctypes.c_int32, ctypes.c_int64, _POINTER, _POINTER, _POINTER, _POINTER,
        _POINTER,
    )  # fmt: skip
    native.specter_gate.argtypes = (
        _POINTER, _POINTER, ctypes.c_int32, ctypes.c_int32, _POINTER, _POINTER, _POINTER, _POINTER,
        _POINTER, _POINTER,
    )  # fmt: skip
    native.specter_combine.argtypes = (
        _POINTER, _POINTER, _POINTER, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32,
        ctypes.c_int32, _POINTER,
    )  # fmt: skip
    native.specter_release.argtypes = (_POINTER, _POINTER, ctypes.c_int64)
    native.specter_pass.argtypes = (
        _POINTER, ctypes.c_int32, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, _POINTER,
        _POINTER, ctypes.c_double, _POINTER,
    )  # fmt: skip
    return native


def name() -> str:
    """What computes: the instruction set of the native kernels, or ``torch``."""
    native = library()
    return "torch" if native is None else str(native.specter_isa().decode())


def serves(dtype: torch.dtype, num_rows: int) -> bool:
    """Whether the kernels are there, and the better way for so many rows of activations."""
    return num_rows <= MAX_ROWS and dtype in _KINDS and library() is not None


def set_threads(num_threads: int) -> None:
    """How many threads the kernels take, the caller's included."""
    native = library()
    if native is not None:
        native.specter_set_threads(num_threads)


@dataclass(frozen=True, slots=True)
class NativeMatrix:
    """A matrix ``[N, M]`` that the kernels can multiply; keeps its tensors alive."""

    struct: _Matrix
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, matrix: Matrix, bias: torch.Tensor | None = None) -> NativeMatrix:
        """Point at a stored matrix, without a copy if it is contiguous; a bias is widened."""
        struct, kept = _Matrix(), []

        def point(**tensors: torch.Tensor | None) -> None:
            for name, tensor in tensors.items():
                if tensor is not None:
                    kept.append(tensor.contiguous())
                    setattr(struct, name, kept[-1].data_ptr())

        struct.rows, struct.columns = matrix.shape
        if isinstance(matrix, torch.Tensor):
            struct.kind = _KINDS[matrix.dtype]
            point(data=matrix)
        elif isinstance(matrix, PackedTensor):
            struct.kind, struct.bits = _GROUPED_KIND, matrix.bits
            struct.group_size = matrix.group_size
            point(data=matrix.codes, scales=matrix.scales, zero_points=matrix.zero_points)
        else:
            struct.kind = _PACKED_KIND
            point(data=matrix.codes, table=matrix.table)
            point(escape_starts=matrix.escape_starts, escapes=matrix.escapes)
        point(bias=None if bias is None else bias.to(torch.float32))
        return cls(struct, tuple(kept))

    def multiply(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ matrix.T + bias``: float32 ``[T, M]`` to ``[T, N]``, any number of rows."""
        native = _native()
        out = torch.empty(rows.shape[0], self.struct.rows)
        native.specter_matmul(
            ctypes.byref(self.struct),
            rows.data_ptr(),
            rows.stride(0),
            rows.shape[0],
            out.data_ptr(),
        )
        return out

    def widen(self) -> torch.Tensor:
        """The matrix in float32."""
        native = _native()
        out = torch.empty(self.struct.rows, self.struct.columns)
        native.specter_widen(ctypes.byref(self.struct), out.data_ptr())
        return out


@dataclass(frozen=True, slots=True)
class NativeExpert:
    """An expert that the kernels can compute."""

    expert: Expert
    gate: NativeMatrix
    up: NativeMatrix
    down: NativeMatrix
    struct: _Expert  # its id is left open

    @classmethod
    def of(cls, expert: Expert, gate: NativeMatrix, up: NativeMatrix, down: NativeMatrix) -> Self:
        """Bind an expert's matrices."""
        struct = _Expert(*(ctypes.addressof(m.struct) for m in (gate, up, down)))
        return cls(expert, gate, up, down, struct)

    def locate_escapes(self, buffer: torch.Tensor, start: int) -> None:
        """Look anew where the escapes of a packed expert are, in a slot that was read into again.

        Args:
            buffer: the slot.
            start: of the escapes in it; all before them is where it was.

        Raises:
            ValueError: they contradict each other.
        """
        native = _native()
        pointers = (_POINTER * 3)(self.struct.gate, self.struct.up, self.struct.down)
        room = (len(buffer) - start) // 4
        problem = native.specter_locate_escapes(pointers, 3, buffer.data_ptr() + start, room)
        if problem:
            raise ValueError(ESCAPES_OUT_OF_ORDER if problem == 1 else ESCAPE_OUTSIDE)

    def to(self, dtype: torch.dtype) -> ExpertWeights:
        """See ``Expert``; packed weights are unpacked by the kernels, many times as fast."""
        matrices = (self.gate, self.up, self.down)
        if any(m.struct.kind != _PACKED_KIND or m.struct.bias for m in matrices):
            return self.expert.to(dtype)
        return ExpertWeights(*(matrix.widen().to(dtype) for matrix in matrices))


def compute_experts(
    experts: Sequence[tuple[int, NativeExpert]],
    rows: torch.Tensor,  # [T, D]
    selected: torch.Tensor,  # [T, K]
    outputs: torch.Tensor,  # [T, K, D]
    swiglu_limit: float | None,
) -> None:
    """``outputs[t, k] = down(silu(gate x) * up x)`` of the expert ``selected[t, k]``, x = rows[t].

    Outputs of other experts than these are left as they are. All tensors are contiguous.

    Args:
        experts: by id.
        rows: of a dtype of ``HIDDEN_DTYPES``.
        selected: int64.
        outputs: float32.
        swiglu_limit: set for gpt-oss's clamped form.
    """
    if not experts:
        return
    structs = (_Expert * len(experts))()
    for struct, (index, expert) in zip(structs, experts, strict=True):
        own = expert.struct
        struct.gate, struct.up, struct.down, struct.id = own.gate, own.up, own.down, index
    _native().specter_experts(
        structs,
        len(experts),
        rows.data_ptr(),
        HIDDEN_DTYPES[rows.dtype],
        selected.data_ptr(),
        *selected.shape,
        swiglu_limit or 0.0,
        outputs.data_ptr(),
    )


def prepare(expert: Expert) -> Expert:
    """A ``NativeExpert`` where there are kernels for the expert's form, else the expert itself."""
    if library() is None:
        return expert
    biases: Sequence[torch.Tensor | None]
    if isinstance(expert, PackedExpert):
        if expert.gate_proj.group_size % _CODES_TOGETHER:
            return expert
        biases = expert.biases or (None, None, None)
    elif isinstance(expert, ExpertWeights | PackedWeights):
        biases = expert.biases
    else:
        return expert
    matrices = (expert.gate_proj, expert.up_proj, expert.down_proj)
    return NativeExpert.of(expert, *map(NativeMatrix.of, matrices, biases))


def combine(
    outputs: torch.Tensor,  # [T, K, D]
    weights: torch.Tensor,  # [T, K]
    selected: torch.Tensor,  # [T, K]
    dtype: torch.dtype,
) -> torch.Tensor:
    """See ``moe.combine``; all tensors contiguous, ``dtype`` one of ``HIDDEN_DTYPES``."""
    num_rows, num_ranks, width = outputs.shape
    out = torch.empty(num_rows, width, dtype=dtype)
    _native().specter_combine(
        outputs.data_ptr(),
        weights.data_ptr(),
        selected.data_ptr(),
        num_rows,
        num_ranks,
        width,
        HIDDEN_DTYPES[dtype],
        out.data_ptr(),
    )
    return out


def normalize(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Root-mean-square norm, layer norm with a bias, of float32 rows ``[T, D]``."""
    native = _native()
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    bias_at = None if bias is None else bias.data_ptr()
    native.specter_normalize(
        rows.data_ptr(), weight.data_ptr(), bias_at, eps, *rows.shape, out.data_ptr()
    )
    return out


class AttentionKernel:
    """One layer's attention: norm, projections, rotation, cache, softmax, output, residual."""

    def __init__(
        self,
        matrices: Sequence[NativeMatrix],
        vectors: Sequence[torch.Tensor | None],
        dtype: torch.dtype,
        **options: float,
    ) -> None:
        """Point at a layer's weights.

        Args:
            matrices: q, k, v and o.
            vectors: in float32: the input norm's weight and bias, the norms of queries and keys,
                sinks; None for what the model does not have.
            dtype: of hidden states, keys and values; one of ``HIDDEN_DTYPES``.
            options: fields of ``struct Attention`` by name.
        """
        self._kept = (*matrices, *vectors)
        pointers = [None if vector is None else vector.data_ptr() for vector in vectors]
        self._struct = _Attention(
            *(ctypes.addressof(matrix.struct) for matrix in matrices), *pointers
        )
        for name, value in options.items():
            setattr(self._struct, name, value)
        self._struct.cache_kind = HIDDEN_DTYPES[dtype]

    @property
    def address(self) -> int:
        """Of the struct."""
        return ctypes.addressof(self._struct)

    def compute(
        self,
        hidden: torch.Tensor,  # [T, D]
        start: int,
        keys: torch.Tensor,  # [S, G, C]
        values: torch.Tensor,  # [S, G, C]
        cos: torch.Tensor,  # [T, 1, pairs]
        sin: torch.Tensor,  # [T, 1, pairs]
    ) -> torch.Tensor:
        """``hidden`` plus attention, ``[T, D]``; writes ``keys`` and ``values``.

        All are of the kernel's dtype, cos and sin float32.
        """
        native = _native()
        hidden = hidden.contiguous()
        out = torch.empty_like(hidden)
        native.specter_attention(
            ctypes.byref(self._struct),
            hidden.data_ptr(),
            hidden.shape[0],
            start,
            keys.data_ptr(),
            values.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
        )
        return out


class Gated(NamedTuple):
    """What a gate makes of T rows.

    Attributes:
        normed: ``[T, D]``, in the dtype of the hidden states.
        selected_experts: as the next two, see ``Routing``.
        routing_weights: see there.
        router_probs: see there.
        likely: int64 ``[T, J, C]``: the likeliest experts of J later layers, none unless asked.
        probabilities: float32 ``[T, J, C]``: of each that it is chosen.
    """

    normed: torch.Tensor
    selected_experts: torch.Tensor
    routing_weights: torch.Tensor
    router_probs: torch.Tensor
    likely: torch.Tensor
    probabilities: torch.Tensor


class GateKernel:
    """One layer's router, the norm before it, and the choice of experts behind it."""

    def __init__(
        self,
        router: NativeMatrix,
        norm: torch.Tensor,
        norm_bias: torch.Tensor | None,
        correction_bias: torch.Tensor | None,
        eps: float,
        routing: RoutingConfig,
        num_experts_per_tok: int,
        predictor: Predictor | None = None,
    ) -> None:
        """Point at a layer's weights; all but router and predictor are in float32.

        ``routing.scoring`` is one of ``GATE_SCORINGS``.
        """
        vectors = (norm, norm_bias, correction_bias)
        foretold, self.likely_shape = None, (0, 0)  # [J, C]
        if predictor is not None:
            foretold = NativeMatrix.of(predictor.matrix, predictor.bias)
            self.likely_shape = (len(predictor.layers), predictor.num_likely)
        self._kept = (router, *vectors, foretold)
        self._num_experts = router.struct.rows
        self._num_chosen = num_experts_per_tok
        self._struct = _Gate(
            ctypes.addressof(router.struct),
            *(None if vector is None else vector.data_ptr() for vector in vectors),
            None if foretold is None else ctypes.addressof(foretold.struct),
            eps=eps,
            norm_min=routing.norm_min,
            scaling_factor=routing.routed_scaling_factor,
            scoring=GATE_SCORINGS.index(routing.scoring),
            num_chosen=num_experts_per_tok,
            norm_topk_prob=routing.norm_topk_prob,
            n_group=routing.n_group,
            topk_group=routing.topk_group,
            group_is_max=routing.group_score == "max",
        )
        self._struct.num_ahead, self._struct.num_likely = self.likely_shape

    @property
    def address(self) -> int:
        """Of the struct."""
        return ctypes.addressof(self._struct)

    def compute(self, hidden: torch.Tensor, *, predicts: bool = False) -> Gated:
        """For ``hidden`` ``[T, D]``, of a dtype of ``HIDDEN_DTYPES``.

        Args:
            hidden: of the rows.
            predicts: whether the predictor is asked too; there must be one.
        """
        hidden = hidden.contiguous()
        num_rows = hidden.shape[0]
        normed = torch.empty_like(hidden)
        probs = torch.empty(num_rows, self._num_experts)
        selected = torch.empty(num_rows, self._num_chosen, dtype=torch.int64)
        weights = torch.empty(num_rows, self._num_chosen)
        shape = (num_rows, *(self.likely_shape if predicts else (0, 0)))
        likely, probabilities = torch.empty(shape, dtype=torch.int64), torch.empty(shape)
        _native().specter_gate(
            ctypes.byref(self._struct),
            hidden.data_ptr(),
            HIDDEN_DTYPES[hidden.dtype],
            num_rows,
            normed.data_ptr(),
            probs.data_ptr(),
            selected.data_ptr(),
            weights.data_ptr(),
            likely.data_ptr() if predicts else None,
            probabilities.data_ptr() if predicts else None,
        )
        return Gated(normed, selected, weights, probs, likely, probabilities)


class Residency:
    """Which experts are in fast memory, and which are in use: read by a pass without Python.

    One thread passes; those that load and evict are kept apart by a lock of their own.
    """

    def __init__(self, num_layers: int, num_experts: int) -> None:
        """Begin with none."""
        self.num_experts = num_experts
        count = num_layers * num_experts
        self._native = _native()
        self.experts = (ctypes.c_uint64 * count)()
        self.pins = (ctypes.c_int32 * count)()

    def put(self, key: ExpertKey, expert: Expert) -> None:
        """Offer an expert, if it is in a form for the kernels, until it is released."""
        if isinstance(expert, NativeExpert):
            address = ctypes.addressof(expert.struct)
            self.experts[key.layer * self.num_experts + key.expert] = address

    def release(self, key: ExpertKey) -> bool:
        """Take an expert back; False if it is in use."""
        place = key.layer * self.num_experts + key.expert
        return bool(self._native.specter_release(self.experts, self.pins, place))


@dataclass(frozen=True, slots=True)
class PassLayer:
    """What a pass needs of a layer; without kernels, it stops before it."""

    attention: AttentionKernel | None
    gate: GateKernel | None
    keys: torch.Tensor  # [S, G, C]
    values: torch.Tensor
    residual_multiplier: float
    swiglu_limit: float | None


class PassKernel:
    """A row's way through the layers, as far as the experts in fast memory reach.

    Attributes:
        hidden: ``[1, D]``: what goes in and comes out; behind the gate when stopped there.
        normed: ``[1, D]``: what the experts of that layer are given.
        selected_experts: int64 ``[L, K]``: as the next two, see ``Routing``; of each layer.
        routing_weights: float32 ``[L, K]``.
        router_probs: float32 ``[L, E]``.
        likely: int64 ``[L, J, C]``: see ``Gated``.
        probabilities: float32 ``[L, J, C]``.
    """

    def __init__(
        self,
        layers: Sequence[PassLayer],
        residency: Residency,
        num_chosen: int,
        width: int,
        dtype: torch.dtype,
    ) -> None:
        """Point at all layers.

        Args:
            layers: all of the model.
            residency: the experts.
            num_chosen: experts of a token in a layer.
            width: of hidden states.
            dtype: of hidden states, one of ``HIDDEN_DTYPES``.
        """
        shapes = [layer.gate.likely_shape for layer in layers if layer.gate is not None]
        num_ahead, num_likely = max(shapes, default=(0, 0))
        count = len(layers)
        self.hidden, self.normed = torch.empty(2, 1, width, dtype=dtype)
        self.router_probs = torch.empty(count, residency.num_experts)
        self.selected_experts = torch.empty(count, num_chosen, dtype=torch.int64)
        self.routing_weights = torch.empty(count, num_chosen)
        self.likely = torch.empty(count, num_ahead, num_likely, dtype=torch.int64)
        self.probabilities = torch.empty(count, num_ahead, num_likely)
        self._layers = (_Layer * count)()
        for struct, layer in zip(self._layers, layers, strict=True):
            if layer.attention is not None and layer.gate is not None:
                struct.attention, struct.gate = layer.attention.address, layer.gate.address
            struct.keys, struct.values = layer.keys.data_ptr(), layer.values.data_ptr()
            struct.residual_multiplier = layer.residual_multiplier
            struct.swiglu_limit = layer.swiglu_limit or 0.0
        self._kept = (layers, residency)
        arrays = [self.hidden, self.normed, self.router_probs, self.selected_experts]
        arrays += [self.routing_weights, self.likely, self.probabilities]
        tables = (residency.experts, residency.pins)
        self._struct = _Pass(
            ctypes.addressof(self._layers),
            *(array.data_ptr() for array in arrays),
            *(ctypes.addressof(table) for table in tables),
            count,
            residency.num_experts,
            num_chosen,
            width,
            num_ahead,
            num_likely,
            HIDDEN_DTYPES[dtype],
        )

    def run(
        self,
        first_layer: int,
        position: int,
        cos: torch.Tensor,  # [1, 1, pairs]
        sin: torch.Tensor,  # [1, 1, pairs]
        *,
        is_routed: bool,
        predicts: bool,
        patience_seconds: float,
    ) -> tuple[int, bool, float]:
        """Go on from a layer.

        Args:
            first_layer: where to begin.
            position: of the row.
            cos: of its rotation.
            sin: likewise.
            is_routed: whether attention and gate of the first layer have been run.
            predicts: whether the predictors are asked too.
            patience_seconds: how long to wait for absent experts of the first layer, if routed.

        Returns:
            Where it stopped; whether behind that layer's gate, since chosen experts are absent
            (else before a layer that it cannot run, or behind the last one); and the seconds that
            it has waited.
        """
        waited = ctypes.c_double()
        found = _native().specter_pass(
            ctypes.byref(self._struct),
            first_layer,
            is_routed,
            predicts,
            position,
            cos.data_ptr(),
            sin.data_ptr(),
            patience_seconds,
            ctypes.byref(waited),
        )
        return found // 2, bool(found % 2), waited.value
