"""What a build and its bundle will take, from configuration and headers alone.

Called by: open_inputs, cli.  Next: specter_runtime.memory.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from specter_build.architectures import find_architecture, read_config, read_quantization
from specter_build.checkpoint import SUPPORTED_DTYPES, Checkpoint, has_weights, read_json_object
from specter_build.fit_predictor import fit_nbytes
from specter_build.recipe import Recipe
from specter_runtime.config import (
    DTYPE_BYTES,
    DType,
    Encoding,
    ExpertNumbers,
    ModelConfig,
    PredictorKind,
)
from specter_runtime.errors import CapacityError, RecipeError
from specter_runtime.experts import expert_nbytes, packed_nbytes
from specter_runtime.memory import (
    MemoryUse,
    dense_nbytes,
    divide_budget,
    draft_nbytes,
    predictor_nbytes,
)
from specter_runtime.roles import dense_shapes
from specter_runtime.shards import ALIGNMENT, align_up
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS
from specter_runtime.units import format_bytes

CANDIDATES = (0, 1, 2, 4, 8, 16)
"""Numbers of draft tokens that the planner weighs."""

AUDIT_TOKENS = 48
"""Context of the audit: ``audit.PROMPT_TOKENS`` and ``audit.NUM_TOKENS``."""

WEIGHTS_PER_ESCAPE = 2048
"""One weight in so many is taken to be an escape; trained ones have one in 7,500."""

INTERPRETER_BYTES = 400 * 2**20
"""Interpreter, torch and the other libraries, as resident before a build begins."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Sizes before anything is read.

    Attributes:
        config: the model.
        dense_dtype: of the resident tensors as stored, those in fp8 aside.
        expert_numbers: how routed experts are stored.
        encoding: of the shards.
        dtype: of computation.
        memory: number of draft tokens -> division of the runtime's budget.
        bundle_bytes: of the bundle on disk, without JSON and the report's page.
        progress_bytes: on disk beside it while it is built.
        build_bytes: resident during the build, at most.
        has_weights: whether weight headers were there to be checked.
    """

    config: ModelConfig
    dense_dtype: DType
    expert_numbers: ExpertNumbers
    encoding: Encoding
    dtype: DType
    memory: dict[int, MemoryUse]
    bundle_bytes: int
    progress_bytes: int
    build_bytes: int
    has_weights: bool


def estimate(recipe: Recipe, model_folder: Path) -> Estimate:
    """Work out sizes; needs ``config.json`` and, where there are weights, their headers.

    Raises:
        SpecterError: what the recipe asks for cannot be; see ``check_lengths``, ``divide_memory``.
    """
    if has_weights(model_folder):
        return estimate_checkpoint(recipe, Checkpoint(model_folder))
    path = model_folder / "config.json"
    raw = read_json_object(path)
    named = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
    stored = next((dtype for dtype in SUPPORTED_DTYPES.values() if dtype == named), None)
    if stored is None:
        raise RecipeError(f"model: {path}: dtype {named!r} is not supported")
    config = read_config(raw, str(path))
    quantization = read_quantization(raw, find_architecture(raw, str(path)))
    bias_dtype = stored if config.expert_bias else None
    numbers = ExpertNumbers(stored, bias_dtype=bias_dtype)
    if quantization is not None and quantization.method == "mxfp4":
        numbers = ExpertNumbers("mxfp4", bias_dtype=bias_dtype)
    elif quantization is not None:
        numbers = ExpertNumbers("float8_e4m3fn", "float32", bias_dtype)
    return _estimate(recipe, config, stored, numbers, has_headers=False)


def estimate_checkpoint(recipe: Recipe, checkpoint: Checkpoint) -> Estimate:
    """Work out the sizes of an opened checkpoint."""
    dtype, numbers = checkpoint.dense_dtype, checkpoint.expert_numbers
    sizes = _estimate(recipe, checkpoint.config, dtype, numbers, has_headers=True)
    more = checkpoint.dense_nbytes - dense_nbytes(checkpoint.config, dtype)  # fp8 is less
    return replace(sizes, bundle_bytes=sizes.bundle_bytes + more)


def _estimate(
    recipe: Recipe,
    config: ModelConfig,
    dense_dtype: DType,
    expert_numbers: ExpertNumbers,
    *,
    has_headers: bool,
) -> Estimate:
    check_lengths(recipe, config)
    dtype = dense_dtype if recipe.plan.dtype == "auto" else recipe.plan.dtype
    slot_bytes = align_up(shard_nbytes(recipe, config, expert_numbers))
    return Estimate(
        config=config,
        dense_dtype=dense_dtype,
        expert_numbers=expert_numbers,
        encoding=choose_encoding(recipe, expert_numbers),
        dtype=dtype,
        memory=divide_memory(recipe, config, expert_numbers, dtype, slot_bytes),
        bundle_bytes=bundle_nbytes(recipe, config, dense_dtype, expert_numbers),
        progress_bytes=progress_nbytes(recipe, config),
        build_bytes=build_nbytes(recipe, config, dense_dtype, expert_numbers, dtype),
        has_weights=has_headers,
    )


def check_lengths(recipe: Recipe, config: ModelConfig) -> None:
    """Refuse sequences and contexts that are longer than the model's."""
    for name, length in (
        ("calibration.sequence_length", recipe.calibration.sequence_length),
        ("plan.max_context_tokens", recipe.plan.max_context_tokens),
    ):
        if length > config.max_position_embeddings:
            raise RecipeError(
                f"{name}: {length} is more than the model's max_position_embeddings, "
                f"{config.max_position_embeddings}"
            )


def divide_memory(
    recipe: Recipe, config: ModelConfig, numbers: ExpertNumbers, dtype: str, slot_bytes: int
) -> dict[int, MemoryUse]:
    """Number of draft tokens -> division of the budget, for every candidate that fits.

    Raises:
        CapacityError: none fits; states the minimum.
    """
    asked = recipe.plan.num_draft_tokens
    divisions: dict[int, MemoryUse] = {}
    refusal: CapacityError | None = None
    for candidate in CANDIDATES if asked == "auto" else (asked,):
        try:
            divisions[candidate] = _divide(
                recipe, config, numbers, dtype, slot_bytes, num_draft_tokens=candidate
            )
        except CapacityError as exc:
            refusal = refusal or exc
    if not divisions and refusal is not None:
        raise CapacityError(f"plan.memory_budget: {refusal}")
    return divisions


def divide_for_predictors(
    recipe: Recipe, config: ModelConfig, numbers: ExpertNumbers, dtype: str, slot_bytes: int
) -> dict[PredictorKind, MemoryUse]:
    """Predictor -> division of the budget without a draft, for those that there is room for."""
    layers_ahead: dict[PredictorKind, int] = {
        "fitted": recipe.predictor.layers_ahead,
        "router": 1,
    }
    divisions: dict[PredictorKind, MemoryUse] = {}
    for kind, ahead in layers_ahead.items():
        with suppress(CapacityError):
            divisions[kind] = _divide(
                recipe, config, numbers, dtype, slot_bytes, layers_ahead=ahead
            )
    return divisions


def _divide(
    recipe: Recipe,
    config: ModelConfig,
    numbers: ExpertNumbers,
    dtype: str,
    slot_bytes: int,
    *,
    num_draft_tokens: int = 0,
    layers_ahead: int = 0,
) -> MemoryUse:
    return divide_budget(
        config,
        memory_budget_bytes=recipe.plan.memory_budget,
        draft_bits=recipe.draft.widths(config) if num_draft_tokens else (),
        group_size=recipe.draft.group_size,
        symmetric=recipe.draft.symmetric,
        predictor_bytes=predictor_nbytes(config, layers_ahead),
        dtype=dtype,
        numbers=numbers,
        max_context_tokens=recipe.plan.max_context_tokens,
        prompt_chunk_tokens=PROMPT_CHUNK_TOKENS,
        num_draft_tokens=num_draft_tokens,
        slot_bytes=slot_bytes,
    )


def choose_encoding(recipe: Recipe, numbers: ExpertNumbers) -> Encoding:
    """The shards' encoding: the recipe's, or lossless packing wherever there is one.

    Raises:
        RecipeError: the recipe asks for packing and there is none for these numbers.
    """
    if recipe.shard_encoding == "auto":
        return "packed" if numbers.dtype == "bfloat16" else "raw"
    if recipe.shard_encoding == "packed" and numbers.dtype != "bfloat16":
        raise RecipeError(
            f"shard_encoding: packed is for experts in bfloat16, these are {numbers.dtype}; "
            "take raw"
        )
    return recipe.shard_encoding


def shard_nbytes(recipe: Recipe, config: ModelConfig, numbers: ExpertNumbers) -> int:
    """Bytes of an expert's shard; of a packed one, what it is for trained weights."""
    if choose_encoding(recipe, numbers) == "raw":
        return expert_nbytes(config, numbers)
    return packed_nbytes(config, numbers, config.expert_num_weights // WEIGHTS_PER_ESCAPE)


def bundle_nbytes(
    recipe: Recipe, config: ModelConfig, dense_dtype: str, numbers: ExpertNumbers
) -> int:
    """Bytes that the bundle will take, without JSON, if dense tensors are in ``dense_dtype``."""
    num_experts = len(config.moe_layers) * config.num_experts
    shards = num_experts * (shard_nbytes(recipe, config, numbers) + ALIGNMENT)
    dense = dense_nbytes(config, dense_dtype)
    predictors = predictor_nbytes(config, recipe.predictor.layers_ahead)
    return shards + _draft_bytes(recipe, config, numbers) + predictors + dense


def _draft_bytes(recipe: Recipe, config: ModelConfig, numbers: ExpertNumbers) -> int:
    draft = recipe.draft
    bits = recipe.draft.widths(config)
    return draft_nbytes(config, bits, draft.group_size, draft.symmetric, numbers)


def progress_nbytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes on disk of what a killed build would go on from, without headers.

    Hidden states of both streams in float32, the new ones beside the old; the routes so far; the
    predictors so far, and what those that are not yet fitted need.
    """
    tokens = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    num_kept = min(recipe.predictor.layers_ahead + 1, len(config.moe_layers) - 1)
    return (
        2 * 2 * 4 * tokens * config.hidden_size
        + _routes_nbytes(recipe, config)
        + predictor_nbytes(config, recipe.predictor.layers_ahead)
        + num_kept * _observation_nbytes(recipe, config)
    )


def build_nbytes(
    recipe: Recipe, config: ModelConfig, dense_dtype: str, numbers: ExpertNumbers, dtype: str
) -> int:
    """Bytes resident during the build, at most.

    While a layer is converted, while a predictor is fitted, or in the audit.
    """
    return INTERPRETER_BYTES + max(
        _converting_nbytes(recipe, config, dense_dtype, numbers),
        _fitting_nbytes(recipe, config, dense_dtype),
        _audit_nbytes(recipe, config, dense_dtype, numbers, dtype),
    )


def _audit_nbytes(
    recipe: Recipe, config: ModelConfig, dense_dtype: str, numbers: ExpertNumbers, dtype: str
) -> int:
    """Bytes that decoding a few tokens without a draft takes, and the routes.

    Dense tensors of all layers, bound one by one: if they are computed with in another dtype than
    stored, the largest of them as stored and in float32 beside.
    """
    memory = divide_budget(
        config,
        memory_budget_bytes=None,
        draft_bits=(),
        group_size=recipe.draft.group_size,
        symmetric=recipe.draft.symmetric,
        predictor_bytes=predictor_nbytes(config, recipe.predictor.layers_ahead),
        dtype=dtype,
        numbers=numbers,
        max_context_tokens=AUDIT_TOKENS,
        prompt_chunk_tokens=AUDIT_TOKENS,
        num_draft_tokens=0,
        slot_bytes=align_up(shard_nbytes(recipe, config, numbers)),
    )
    is_bound_as_stored = dtype == dense_dtype and config.fp8_block_size is None
    largest = 0 if is_bound_as_stored else _largest_dense_matrix(config)
    return memory.used_bytes + largest * (4 + 4) + _routes_nbytes(recipe, config)


def _routes_nbytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes of both streams' routes through all layers.

    An int64 and a float32 a choice, and a float16 for each expert's probability in the target.
    """
    tokens = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    per_token = 2 * (8 + 4) * config.num_experts_per_tok + 2 * config.num_experts
    return tokens * per_token * len(config.moe_layers)


def _converting_nbytes(
    recipe: Recipe, config: ModelConfig, dense_dtype: str, numbers: ExpertNumbers
) -> int:
    """Bytes that converting the last layer takes; all but the routes do not grow with depth.

    One layer's experts as stored and quantized, its dense tensors as stored and in float32, the
    tensors of no layer likewise, one expert being quantized (five float32 copies), and calibration:
    hidden states of both streams, and of the stream at work those behind attention, their norm, the
    experts' sum and its residual, in float32, with routing over all experts; its plain input in
    bfloat16, and what predictors are still to be fitted to.
    """
    c = config
    layer_experts = c.num_experts * expert_nbytes(c, numbers)
    layer_draft = _draft_bytes(recipe, c, numbers) // len(c.moe_layers)
    dense = _dense_weights(c, None) + max(_dense_weights(c, i) for i in range(c.num_hidden_layers))
    tokens = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    return (
        layer_experts
        + layer_draft
        + dense * (DTYPE_BYTES[dense_dtype] + 4)
        + tokens * (4 * (6 * c.hidden_size + 3 * c.num_experts) + 2 * c.hidden_size)
        + 5 * 4 * c.expert_num_weights // 3
        + _calibrating_nbytes(recipe, c)
        + _observed_nbytes(recipe, c)
        + _routes_nbytes(recipe, config)
    )


def _fitting_nbytes(recipe: Recipe, config: ModelConfig, dense_dtype: str) -> int:
    """Bytes that fitting a layer's predictor takes, with what is held from layer to layer."""
    asked = recipe.calibration
    layers_ahead = recipe.predictor.layers_ahead
    work = fit_nbytes(config, layers_ahead, asked.num_sequences, asked.sequence_length)
    tokens = asked.num_sequences * asked.sequence_length
    return (
        (work if predictor_nbytes(config, layers_ahead) else 0)
        + _dense_weights(config, None) * DTYPE_BYTES[dense_dtype]
        + 2 * 4 * tokens * config.hidden_size
        + _observed_nbytes(recipe, config)
        + _routes_nbytes(recipe, config)
    )


def _observed_nbytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes of all observations at a time: of a layer, and of those that it is foretold from."""
    num_layers = min(recipe.predictor.layers_ahead + 1, len(config.moe_layers))
    return num_layers * _observation_nbytes(recipe, config)


def _observation_nbytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes of a layer's plain input, bfloat16, and scores, float32; 0 if nothing is fitted."""
    if not predictor_nbytes(config, recipe.predictor.layers_ahead):
        return 0
    tokens = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    return tokens * (2 * config.hidden_size + 4 * config.num_experts)


def _calibrating_nbytes(recipe: Recipe, config: ModelConfig) -> int:
    """Bytes that gptq or awq takes for one expert, if every token reaches it; all in float32.

    Its n rows ``[n, D]``, plain and weighted; of ``[n, I]`` gate, up, product and weighted product.

    gptq, of a weight ``[N, M]`` (gate_proj on top of up_proj, then down_proj): at first the Hessian
    ``[M, M]``, a copy, one in activation order and a factor, with the weight, a copy and one in
    that order; at last the Hessian and, while codes are packed, ten of the weight's size.

    awq: four of down_proj (original, copy, scaled, quantized), both rescaled projections, four
    outputs ``[n, D]`` (expected, found, difference, square) and the magnitudes ``[n, I]``.
    """
    if not recipe.draft.is_calibrated:
        return 0
    num_rows = recipe.calibration.num_sequences * recipe.calibration.sequence_length
    width, inner = config.hidden_size, config.moe_intermediate_size
    if recipe.draft.method == "gptq":
        shapes = ((2 * inner, width), (width, inner))
        work = max(max(4 * m * m + 3 * n * m, m * m + 10 * n * m) for n, m in shapes)
    else:
        work = 6 * width * inner + num_rows * (4 * width + inner)
    return 4 * (num_rows * (2 * width + 4 * inner) + work)


def _dense_weights(config: ModelConfig, layer: int | None) -> int:
    return sum(math.prod(shape) for shape in dense_shapes(config, layer).values())


def _largest_dense_matrix(config: ModelConfig) -> int:
    """Weights of it."""
    layers = (None, *range(config.num_hidden_layers))
    return max(
        math.prod(shape) for layer in layers for shape in dense_shapes(config, layer).values()
    )


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: free memory of the machine or of its control groups.

    Args:
        root: of the file system, for tests.
    """
    return min(_meminfo(root / "proc/meminfo"), *map(_group_room, _control_groups(root)))


def _control_groups(root: Path) -> list[Path]:
    """Folders of the memory groups that this process is in: its own and those around it.

    In a container the path that the kernel tells may be that of the host; what is mounted as the
    outermost folder is then the container's own group.
    """
    mounts = {"": root / "sys/fs/cgroup", "memory": root / "sys/fs/cgroup/memory"}  # version 2, 1
    groups = list(mounts.values())
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for name, mount in mounts.items():
            if name in controllers.split(","):
                group = mount / path.strip("/")
                groups += [group, *(outer for outer in group.parents if mount in outer.parents)]
    return groups


def _group_room(group: Path) -> int:
    """Bytes below a group's limit; pages of files do not count, they give way."""
    names = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    for limit, usage in names:
        try:
            room = int((group / limit).read_text()) - int((group / usage).read_text())
            lines = (group / "memory.stat").read_text().splitlines()
        except (OSError, ValueError):  # no such controller, or no limit ("max")
            continue
        fields = dict(line.split(" ", 1) for line in lines if " " in line)
        total = "total_" if "total_inactive_file" in fields else ""
        return room + sum(int(fields.get(f"{total}{k}_file", 0)) for k in ("inactive", "active"))
    return 2**63


def _meminfo(path: Path) -> int:
    try:
        lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63  # unknown: no bound


def check_memory(build_bytes: int) -> None:
    """Refuse a build that would not fit in memory."""
    available = available_memory()
    if build_bytes > available:
        raise CapacityError(
            f"the build needs up to {format_bytes(build_bytes)} of memory, "
            f"{format_bytes(available)} are available; take fewer or shorter calibration sequences"
        )
