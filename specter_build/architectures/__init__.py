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

from specter_build.architectures.family import Architecture
from specter_build.architectures.mixtral import MIXTRAL
from specter_build.architectures.olmoe import OLMOE
from specter_build.architectures.qwen3_moe import QWEN3_MOE
from specter_runtime.config import ModelConfig
from specter_runtime.errors import CheckpointError

__all__ = ["ARCHITECTURES", "Architecture", "find_architecture", "read_config"]

ARCHITECTURES = {family.model_type: family for family in (MIXTRAL, OLMOE, QWEN3_MOE)}


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
    values = dict(family.constants)
    problems: list[str] = []
    for field in family.fields:
        found = next((raw[key] for key in field.keys if raw.get(key) is not None), field.default)
        if found is None and not field.optional:
            problems.append(f"{' or '.join(field.keys)} is missing")
        elif found is not None and not _has_type(found, field.type):
            problems.append(f"{field.keys[0]} is {found!r}, expected {field.type.__name__}")
        else:
            values[field.name] = field.type(found) if found is not None else None
    rope_theta, rope_problems = _read_rope(raw)
    problems += rope_problems
    problems += [
        f"{key} is {raw[key]!r}; only {accepted!r} is supported"
        for key, accepted in family.supported.items()
        if key in raw and raw[key] not in accepted
    ]
    if problems:
        raise CheckpointError(f"{where}: {'; '.join(problems)}")
    values["model_type"] = family.model_type
    values["rope_theta"] = rope_theta or family.default_rope_theta
    values["num_key_value_heads"] = values["num_key_value_heads"] or values["num_attention_heads"]
    values["head_dim"] = (
        values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    )
    values["dense_layers"] = _dense_layers(raw, values["num_hidden_layers"])
    config = ModelConfig(**values)
    _check_consistency(config, where)
    return config


def _has_type(value: object, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _read_rope(raw: Mapping[str, Any]) -> tuple[float | None, list[str]]:
    """Base frequency and problems; both spellings (``rope_parameters``, ``rope_scaling``)."""
    parameters = raw.get("rope_parameters") or {}
    scaling = raw.get("rope_scaling") or {}
    problems = []
    for name, section in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            problems.append(f"{name}.rope_type is {kind!r}; only 'default' is supported")
        if section.get("partial_rotary_factor", 1.0) != 1.0:
            problems.append(f"{name}.partial_rotary_factor must be 1.0")
    return parameters.get("rope_theta", raw.get("rope_theta")), problems


def _dense_layers(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Layers without routed experts: ``mlp_only_layers`` and ``decoder_sparse_step``."""
    listed = set(raw.get("mlp_only_layers") or [])
    step = raw.get("decoder_sparse_step") or 1
    return tuple(i for i in range(num_layers) if i in listed or (i + 1) % step)


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
