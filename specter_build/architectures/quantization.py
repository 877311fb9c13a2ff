"""How a checkpoint says that it stores matrices in 8 or 4 bits: ``quantization_config``.

Called by: read_config, checkpoint, estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from specter_build.architectures.family import Architecture

_WITHOUT_EFFECT = (
    "quant_method",
    "dequantize",
    "modules_to_not_convert",  # the tensors themselves show what is quantized
    "ignored_layers",
    "modules_to_convert",
)
_FP8_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "fmt": ("e4m3", "float8_e4m3fn", None),
    "weight_per_tensor": (False, None),
    "act_per_tensor": (False, None),
    "activation_scheme": ("dynamic", None),
    "scale_fmt": ("float", "ue8m0", None),  # scales are powers of two, or not: they are read
}


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """A checkpoint's own quantization.

    Attributes:
        method: ``fp8`` (e4m3 with block scales) or ``mxfp4``.
        block_size: rows and columns of an fp8 block; None for mxfp4.
    """

    method: Literal["fp8", "mxfp4"]
    block_size: tuple[int, int] | None = None


def read_quantization(raw: Mapping[str, Any], family: Architecture) -> StoredQuantization | None:
    """The checkpoint's own quantization; None if its weights are plain floats.

    Raises:
        ValueError: it is one that is not supported; names key and value.
    """
    given = raw.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(f"quantization_config is {given!r:.80}, expected an object")
    method = given.get("quant_method")
    if method == "mxfp4" and any(layout.mxfp4 for layout in family.fused):
        _refuse_others(given, {})
        return StoredQuantization("mxfp4")
    if method == "fp8":
        size = given.get("weight_block_size")
        _refuse_others(given, {**_FP8_SUPPORTED, "weight_block_size": (size,)})
        kinds = [type(n) for n in size] if isinstance(size, list) else []
        if not isinstance(size, list) or kinds != [int, int] or min(size) < 1:
            raise ValueError(
                f"quantization_config.weight_block_size is {size!r}; fp8 is supported with scales "
                "for blocks of [rows, columns]"
            )
        return StoredQuantization("fp8", (size[0], size[1]))
    raise ValueError(
        f"quantization_config.quant_method {method!r} is not supported for {family.model_type}: "
        "a target must have the model's own weights (bfloat16, float16, float32, fp8 with block "
        "scales; mxfp4 of gpt_oss), not another tool's approximation of them. A compressed-tensors "
        "W4A16 checkpoint can be the draft: name the original as 'model' and this one as "
        "'draft.from'"
    )


def _refuse_others(given: Mapping[str, Any], supported: Mapping[str, tuple[Any, ...]]) -> None:
    for key, value in given.items():
        if key not in _WITHOUT_EFFECT and value not in supported.get(key, (None,)):
            raise ValueError(f"quantization_config.{key} is {value!r:.80}, which is not supported")
