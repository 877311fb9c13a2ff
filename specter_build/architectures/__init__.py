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
from typing import Any

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
from specter_build.architectures.qwen2_moe import QWEN2_MOE
from specter_build.architectures.qwen3_moe import QWEN3_MOE
from specter_build.architectures.rope import attention_mscale, rope_frequencies
from specter_runtime.config import LatentConfig, ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.errors import CheckpointError

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "read_config"]

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
    if model_type not in ARCHITECTURES:
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
    _derive_heads(values)
    values["dense_layers"] = _dense_layers(raw, values["num_hidden_layers"])
    if values.get("sliding_window") is not None:
        values["sliding_layers"] = _sliding_layers(raw, values["num_hidden_layers"], family)
    _derive_rope(family, raw, values, where)
    config = _assemble(values)
    _check_consistency(config, where)
    return config


def _read_field(field: Field, raw: Mapping[str, Any], values: dict[str, Any]) -> str | None:
    """Put a field into ``values``; returns what is wrong with it."""
    found = next((raw[key] for key in field.keys if raw.get(key) is not None), field.default)
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
    listed = set(raw.get("mlp_only_layers") or [])
    step = raw.get("decoder_sparse_step") or 1
    first_routed = raw.get("first_k_dense_replace") or raw.get("moe_layer_start_index") or 0
    interval = raw.get("moe_layer_interval") or 1
    last_routed = raw.get("moe_layer_end_index", -1)
    last_routed = num_layers - 1 if last_routed in (-1, None) else last_routed
    return tuple(
        i
        for i in range(num_layers)
        if i in listed
        or (i + 1) % step
        or (i + 1) % interval
        or not first_routed <= i <= last_routed
    )


def _sliding_layers(
    raw: Mapping[str, Any], num_layers: int, family: Architecture
) -> tuple[int, ...]:
    """Layers that see a window only."""
    kinds = raw.get("layer_types")
    if kinds is None and family.alternating_windows:
        kinds = ["sliding_attention", "full_attention"] * num_layers
    return tuple(i for i in range(num_layers) if kinds and kinds[i] == "sliding_attention")


def _derive_rope(
    family: Architecture, raw: Mapping[str, Any], values: dict[str, Any], where: str
) -> None:
    """Rotary frequencies and the attention scaling that goes with them."""
    parameters = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    parameters.setdefault("rope_theta", raw.get("rope_theta") or family.default_rope_theta)
    parameters.setdefault(
        "original_max_position_embeddings", raw.get("original_max_position_embeddings")
    )
    factor = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    factor = family.default_partial_rotary_factor if factor is None else factor
    width = values.get("latent.qk_rope_head_dim") or int(values["head_dim"] * factor)
    if raw.get("rotary_dim") is not None:
        width = int(raw["rotary_dim"])
    max_positions = values["max_position_embeddings"]
    try:
        frequencies, attention_factor, max_positions = rope_frequencies(
            parameters, width, max_positions
        )
        mscale = attention_mscale(parameters) if "latent.kv_lora_rank" in values else 1.0
    except (KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{where}: rope_parameters: {exc}") from exc
    values["max_position_embeddings"] = max_positions
    interleaved = raw.get("rope_interleave", family.rope_interleaved)
    values["rope"] = RopeConfig(frequencies, attention_factor, bool(interleaved))
    default_scaling = max(values["head_dim"], 1) ** -0.5
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
    c = config
    sizes = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.hidden_size,
        "num_hidden_layers": c.num_hidden_layers,
        "num_attention_heads": c.num_attention_heads,
        "num_key_value_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "moe_intermediate_size": c.moe_intermediate_size,
        "num_experts": c.num_experts,
        "num_experts_per_tok": c.num_experts_per_tok,
        "max_position_embeddings": c.max_position_embeddings,
    }
    problems = [f"{name} is {size}, must be positive" for name, size in sizes.items() if size < 1]
    if not problems and c.num_attention_heads % c.num_key_value_heads:
        problems.append(
            f"num_attention_heads {c.num_attention_heads} is no multiple of "
            f"num_key_value_heads {c.num_key_value_heads}"
        )
    if c.head_dim % 2:
        problems.append(f"head_dim {c.head_dim} is odd")
    if c.num_experts_per_tok > c.num_experts:
        problems.append(f"num_experts_per_tok {c.num_experts_per_tok} > {c.num_experts} experts")
    if not c.moe_layers:
        problems.append("there is no layer with routed experts")
    if c.dense_layers and not c.intermediate_size:
        problems.append("intermediate_size is missing, dense layers need it")
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
