"""Rotary frequencies of every scaling that is supported: pure.

The runtime knows frequencies and one factor only; what a ``config.json`` says about scaling is
worked out here, once. Contexts are limited to what a scaling is exact for: a LongRoPE model decodes
up to its original length, since its factors beyond would depend on the length of the whole text.

Called by: architectures.read_config.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


def rope_frequencies(
    parameters: Mapping[str, Any], width: int, max_position_embeddings: int
) -> tuple[tuple[float, ...], float, int]:
    """Inverse frequencies (float32 values), attention factor, and the longest context.

    Args:
        parameters: ``rope_parameters`` of a config, with ``rope_theta``.
        width: rotated dimensions of a head; even.
        max_position_embeddings: of the config.

    Raises:
        KeyError: a parameter of the scaling is missing.
        ValueError: the scaling is unknown.
    """
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = float(parameters["rope_theta"])
    if parameters.get("alpha") and kind == "dynamic":  # Hunyuan: a fixed change of base
        theta *= float(parameters["alpha"]) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, dtype=torch.int64).to(torch.float32) / width
    plain = 1.0 / theta**exponents
    attention_factor, longest = 1.0, max_position_embeddings
    if kind in ("default", "dynamic"):  # dynamic NTK changes nothing within the trained length
        frequencies = plain
    elif kind == "linear":
        frequencies = plain / float(parameters["factor"])
    elif kind == "llama3":
        frequencies = _llama3(plain, parameters)
    elif kind == "yarn":
        frequencies, attention_factor = _yarn(parameters, theta, width, max_position_embeddings)
    elif kind == "longrope":
        frequencies, attention_factor, longest = _longrope(
            plain, parameters, max_position_embeddings
        )
    else:
        raise ValueError(
            f"rope_type is {kind!r}; supported are default, linear, dynamic, llama3, yarn, longrope"
        )
    return tuple(frequencies.tolist()), attention_factor, longest


def attention_mscale(parameters: Mapping[str, Any]) -> float:
    """DeepSeek's factor on queries and on keys: from ``mscale_all_dim`` under YaRN, else 1."""
    all_dims = parameters.get("mscale_all_dim")
    if not all_dims or parameters.get("rope_type", parameters.get("type")) in (None, "default"):
        return 1.0
    return _yarn_magnitude(float(parameters["factor"]), float(all_dims))


def _yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """1 + 0.1 mscale ln(factor). Source: arXiv 2309.00071, equation 22."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn(
    parameters: Mapping[str, Any], theta: float, width: int, max_position_embeddings: int
) -> tuple[torch.Tensor, float]:
    """Frequencies between interpolated and unchanged, by wavelength. Source: arXiv 2309.00071, 3.2.

    A pair that turns more than ``beta_fast`` times within the original context is left alone, one
    that turns less than ``beta_slow`` times is interpolated, those between are blended linearly in
    the index of the pair.
    """
    original = parameters["original_max_position_embeddings"] or max_position_embeddings
    factor = parameters.get("factor") or max_position_embeddings / original
    exponents = torch.arange(0, width, 2).to(torch.float32) / width
    wavelengths = theta**exponents

    def pair_with_turns(turns: float) -> float:
        return width * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low = pair_with_turns(float(parameters.get("beta_fast") or 32))
    high = pair_with_turns(float(parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    if low == high:
        high += 0.001
    blend = ((torch.arange(width // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - blend
    frequencies = (1.0 / (factor * wavelengths)) * (1 - kept) + (1.0 / wavelengths) * kept
    attention_factor = parameters.get("attention_factor")
    if attention_factor is None:
        mscale, all_dims = parameters.get("mscale"), parameters.get("mscale_all_dim")
        if mscale and all_dims:
            attention_factor = _yarn_magnitude(factor, mscale) / _yarn_magnitude(factor, all_dims)
        else:
            attention_factor = _yarn_magnitude(factor)
    return frequencies, float(attention_factor)


def _llama3(plain: torch.Tensor, parameters: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones left alone, those between are blended.

    Source: the Llama 3.1 reference, with its parameters.
    """
    factor, original = float(parameters["factor"]), parameters["original_max_position_embeddings"]
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    wavelengths = 2 * math.pi / plain
    blend = (original / wavelengths - low) / (high - low)
    blended = (1 - blend) * plain / factor + blend * plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, blended, scaled)


def _longrope(
    plain: torch.Tensor, parameters: Mapping[str, Any], max_position_embeddings: int
) -> tuple[torch.Tensor, float, int]:
    """The short factors of each pair, valid up to the original length. Source: arXiv 2402.13753."""
    original = parameters["original_max_position_embeddings"]
    if original is None:
        raise KeyError("original_max_position_embeddings")
    short = torch.tensor(parameters["short_factor"], dtype=torch.float32)
    if short.shape != plain.shape:
        raise ValueError(f"short_factor has {len(short)} entries, expected {len(plain)}")
    attention_factor = parameters.get("short_mscale", parameters.get("attention_factor"))
    if attention_factor is None:
        factor = parameters.get("factor") or max_position_embeddings / original
        attention_factor = (
            1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        )
    return plain / short, float(attention_factor), int(original)
