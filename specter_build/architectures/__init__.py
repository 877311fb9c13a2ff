"""Model families as data: which config fields they have, what their tensors are called.

One file a family; a file holds one ``Architecture`` and no code. ``read_config`` turns a foreign
``config.json`` into the runtime's ``ModelConfig``: fields are read by name with a type, a field
that changes the result and is not supported is refused by name and value, an unknown ``model_type``
is refused with the list of known ones.

To add a family: add a file like the others, list it in ``ARCHITECTURES``, and add it to the
families in ``tests/specter_build/test_families.py``, which compares logits with transformers.

Called by: checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from specter_build.architectures.deepseek_v2 import DEEPSEEK_V2
from specter_build.architectures.deepseek_v3 import DEEPSEEK_V3
from specter_build.architectures.ernie4_5_moe import ERNIE4_5_MOE
from specter_build.architectures.family import Architecture, Field
from specter_build.architectures.glm4_moe import GLM4_MOE
from specter_build.architectures.gpt_oss import GPT_OSS
from specter_build.architectures.granitemoe import GRANITEMOE
from specter_build.architectures.hunyuan_v1_moe import HUNYUAN_V1_MOE
from specter_build.architectures.minimax_m2 import MINIMAX_M2
from specter_build.architectures.mixtral import MIXTRAL
from specter_build.architectures.olmoe import OLMOE
from specter_build.architectures.phimoe import PHIMOE
from specter_build.architectures.quantization import StoredQuantization, read_quantization
from specter_build.architectures.qwen2_moe import QWEN2_MOE
from specter_build.architectures.qwen3_moe import QWEN3_MOE
from specter_build.architectures.rope import attention_mscale, rope_frequencies
from specter_runtime.config import LatentConfig, ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.errors import CheckpointError

Value = TypeVar("Value")

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "StoredQuantization",
    "find_architecture",
    "read_config",
    "read_quantization",
]

ARCHITECTURES = {
    family.model_type: family
    for family in (
        DEEPSEEK_V2,
        DEEPSEEK_V3,
        ERNIE4_5_MOE,
        GLM4_MOE,
        GPT_OSS,
        GRANITEMOE,
        HUNYUAN_V1_MOE,
        MINIMAX_M2,
        MIXTRAL,
        OLMOE,
        PHIMOE,
        QWEN2_MOE,
        QWEN3_MOE,
    )
}


def find_architecture(raw: Mapping[str, Any], where: str) -> Architecture:
    """The family of a ``config.json``.

    Raises:
        CheckpointError: the ``model_type`` is unknown.
    """
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CheckpointError(
            f"{where}: model_type {model_type!r} is not supported; known families are {known}"
        )
    return ARCHITECTURES[model_type]


def read_config(raw: Mapping[str, Any], where: str) -> ModelConfig:
    """The runtime's view of a ``config.json``.

    Raises:
        CheckpointError: naming ``where`` and every field that is missing, of the wrong type,
            inconsistent or not supported.
    """
    family = find_architecture(raw, where)
    values: dict[str, Any] = dict(family.constants)
    problems = [
        f"{key} is {raw[key]!r}; only {' or '.join(map(repr, accepted))} is supported"
        for key, accepted in family.supported.items()
        if key in raw and raw[key] not in accepted
    ]
    for field in family.fields:
        problem = _read_field(field, raw, values)
        if problem:
            problems.append(problem)
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    for field in family.fields:
        if field.times is not None and values[field.name]:
            values[field.name] *= values[field.times]
    values["model_type"] = family.model_type
    _check_sizes(values, where)
    _derive_heads(values)
    try:
        values["dense_layers"] = _dense_layers(raw, values["num_hidden_layers"])
        if values.get("sliding_window") is not None:
            values["sliding_layers"] = _sliding_layers(raw, values["num_hidden_layers"], family)
        _derive_rope(family, raw, values)
        quantization = read_quantization(raw, family)
    except KeyError as exc:
        raise CheckpointError(f"{where}: rope parameter {exc} is missing") from exc
    except (TypeError, ValueError) as exc:
        raise CheckpointError(f"{where}: {exc}") from exc
    if quantization is not None:
        values["fp8_block_size"] = quantization.block_size
    config = _assemble(values)
    _check_consistency(config, where)
    return config


def _check_sizes(values: Mapping[str, Any], where: str) -> None:
    """Counts and widths are positive, before anything is divided by them."""
    names = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "max_position_embeddings",
    )
    problems = [
        f"{name} is {values[name]}, must be positive"
        for name in names
        if values.get(name) is not None and values[name] < 1
    ]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")


def _read_field(field: Field, raw: Mapping[str, Any], values: dict[str, Any]) -> str | None:
    """Put a field into ``values``; returns what is wrong with it."""
    present = [raw[key] for key in field.keys if key in raw]
    found = next((value for value in present if value is not None), None)
    if found is None and not (present and field.optional):
        found = field.default
    if found is None and not field.optional:
        return f"{' or '.join(field.keys)} is missing"
    if isinstance(found, list) and len(set(map(repr, found))) == 1:
        found = found[0]  # one value a layer, all the same
    if found is not None and not _has_type(found, field.type):
        return f"{field.keys[0]} is {found!r}, expected {field.type.__name__}"
    values[field.name] = field.type(found) if found is not None else None
    return None


def _has_type(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _derive_heads(values: dict[str, Any]) -> None:
    """Head counts and widths that a config may leave out."""
    num_heads = values["num_attention_heads"]
    values["num_key_value_heads"] = values["num_key_value_heads"] or num_heads
    if "latent.kv_lora_rank" in values:
        values["head_dim"] = values["latent.qk_nope_head_dim"] + values["latent.qk_rope_head_dim"]
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // max(num_heads, 1)
    if isinstance(values.get("qk_norm"), bool):
        values["qk_norm"] = "head" if values["qk_norm"] else "none"


def _dense_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers without routed experts, by any of the ways in which families say so."""
    listed = _get(raw, "mlp_only_layers", list, [])
    if not all(type(layer) is int for layer in listed):
        raise ValueError(f"mlp_only_layers is {listed!r}, expected layer indices")
    step = _get(raw, "decoder_sparse_step", int, 1)
    interval = _get(raw, "moe_layer_interval", int, 1)
    if step < 1 or interval < 1:
        raise ValueError(f"decoder_sparse_step and moe_layer_interval are {step} and {interval}")
    first_routed = max(
        _get(raw, "first_k_dense_replace", int, 0), _get(raw, "moe_layer_start_index", int, 0)
    )
    last_routed = _get(raw, "moe_layer_end_index", int, -1)
    last_routed = num_layers - 1 if last_routed == -1 else last_routed
    return tuple(
        i
        for i in range(num_layers)
        if i in listed
        or (i + 1) % step
        or (i + 1) % interval
        or not first_routed <= i <= last_routed
    )


def _get(raw: Mapping[str, Any], key: str, kind: type[Value], default: Value) -> Value:
    """A value of this type; the default if it is absent or null.

    Raises:
        ValueError: it is of another type; names key and value.
    """
    value = raw.get(key)
    if value is None:
        return default
    if not _has_type(value, kind):
        raise ValueError(f"{key} is {value!r}, expected {kind.__name__}")
    return kind(value)  # type: ignore[call-arg]  # a float may be written as an integer


def _sliding_layers(
    raw: Mapping[str, Any], num_layers: int, family: Architecture
) -> tuple[int, ...]:
    """Layers that see a window only."""
    kinds = _get(raw, "layer_types", list, [])
    if not kinds and family.alternating_windows:
        kinds = (["sliding_attention", "full_attention"] * num_layers)[:num_layers]
    if kinds and len(kinds) != num_layers:
        raise ValueError(f"layer_types has {len(kinds)} entries, expected {num_layers}")
    return tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")


def _derive_rope(family: Architecture, raw: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Rotary frequencies and the attention scaling that goes with them."""
    parameters = {
        "rope_theta": _get(raw, "rope_theta", float, family.default_rope_theta),
        "partial_rotary_factor": _get(
            raw, "partial_rotary_factor", float, family.default_partial_rotary_factor
        ),
        "original_max_position_embeddings": raw.get("original_max_position_embeddings"),
        **_get(raw, "rope_parameters", dict, {}),
        **_get(raw, "rope_scaling", dict, {}),  # where both stand, transformers takes this one
    }
    theta = _get(parameters, "rope_theta", float, family.default_rope_theta)
    if theta <= 0:
        raise ValueError(f"rope_theta is {theta!r}, must be positive")
    factor = _get(parameters, "partial_rotary_factor", float, 1.0)
    width = values.get("latent.qk_rope_head_dim") or int(values["head_dim"] * factor)
    width = _get(raw, "rotary_dim", int, width)
    if not 0 < width <= values["head_dim"] or width % 2:
        raise ValueError(
            f"partial_rotary_factor {factor} of head_dim {values['head_dim']} gives {width} "
            "rotated dimensions, expected an even number"
        )
    frequencies, attention_factor, longest = rope_frequencies(
        parameters, width, values["max_position_embeddings"]
    )
    mscale = attention_mscale(parameters) if "latent.kv_lora_rank" in values else 1.0
    values["max_position_embeddings"] = longest
    interleaved = _get(raw, "rope_interleave", bool, family.rope_interleaved)
    values["rope"] = RopeConfig(frequencies, attention_factor, interleaved)
    default_scaling = values["head_dim"] ** -0.5
    values["attention_scaling"] = values.get("attention_scaling", default_scaling) * mscale**2


def _assemble(values: Mapping[str, Any]) -> ModelConfig:
    """Dotted names go into the records within the record."""
    top = {name: value for name, value in values.items() if "." not in name}
    parts: dict[str, dict[str, Any]] = {"routing": {}, "latent": {}}
    for name, value in values.items():
        if "." in name:
            part, _, field = name.partition(".")
            parts[part][field] = value
    latent = LatentConfig(**parts["latent"]) if parts["latent"] else None
    return ModelConfig(**top, routing=RoutingConfig(**parts["routing"]), latent=latent)


def _check_consistency(config: ModelConfig, where: str) -> None:
    c, problems = config, []
    if c.num_attention_heads % c.num_key_value_heads:
        problems.append(
            f"num_attention_heads {c.num_attention_heads} is no multiple of "
            f"num_key_value_heads {c.num_key_value_heads}"
        )
    if c.num_experts_per_tok > c.num_experts:
        problems.append(f"num_experts_per_tok {c.num_experts_per_tok} > {c.num_experts} experts")
    if not c.moe_layers:
        problems.append("there is no layer with routed experts")
    if c.dense_layers and not c.intermediate_size:
        problems.append("intermediate_size is missing, dense layers need it")
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
