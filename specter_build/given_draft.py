"""A quantized checkpoint of the same model, taken as the draft as it is.

Read is what compressed-tensors calls ``pack-quantized`` with 4-bit groups (W4A16): a matrix
``NAME.weight`` is stored as ``NAME.weight_packed`` (int32, eight codes a word, first code lowest),
``NAME.weight_scale``, ``NAME.weight_shape`` and, if asymmetric, ``NAME.weight_zero_point`` (packed
along rows). Little-endian words are the bytes of ``PackedTensor``: codes are taken over unchanged.

Refused, by name: another model's config, other formats, widths, groups or symmetry than the recipe
says, codes in another order than the columns (``weight_g_idx``), scales that bfloat16 does not hold
exactly, and (in ``quantize_draft``) weights that are too far from the target's.

Called by: open_inputs, quantize_draft.  Next: checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specter_build.architectures import read_config
from specter_build.checkpoint import read_headers, read_json_object
from specter_build.quantizers import GridFormat
from specter_runtime.config import ModelConfig
from specter_runtime.errors import CheckpointError, name_list
from specter_runtime.experts import PROJECTIONS, ExpertKey, matrix_shapes
from specter_runtime.packed import PackedTensor, unpack_codes

BITS = 4
SUFFIX = ".weight"
MAX_RELATIVE_ERROR = 0.1
"""Of a matrix: squared error over squared weights. Four bits in groups leave about 0.01, gptq twice
that; weights of another model, or rescaled for norms that the target does not have, leave 1."""


class GivenDraft:
    """An opened quantized checkpoint.

    Attributes:
        files: config and weight files, for the record.
    """

    def __init__(
        self,
        folder: Path,
        config: ModelConfig,
        matrix_names: Callable[[ExpertKey], Mapping[str, str]],
        form: GridFormat,
    ) -> None:
        """Open and check everything but values.

        Args:
            folder: the checkpoint.
            config: of the target.
            matrix_names: role -> name of an expert's matrices in the target.
            form: what the recipe says of it.

        Raises:
            CheckpointError: naming the folder and what is wrong.
        """
        self._folder, self._form = folder, form
        self._matrix_names = matrix_names
        self._shapes = matrix_shapes(config)
        raw = read_json_object(folder / "config.json")
        _check_scheme(raw.pop("quantization_config", None), form, folder)
        same = replace(config, fp8_block_size=None)  # how numbers are stored may differ
        if read_config(raw, str(folder / "config.json")) != same:
            raise CheckpointError(
                f"{folder}: config.json describes another model than the target's"
            )
        headers = read_headers(folder)
        self.files = [folder / "config.json", *sorted(headers)]
        self._entries = {
            name: (path, entry)
            for path, header in headers.items()
            for name, entry in header.entries.items()
        }
        keys = (ExpertKey(i, e) for i in config.moe_layers for e in range(config.num_experts))
        problems = [problem for key in keys for problem in self._problems(key)]
        if problems:
            raise CheckpointError(f"{folder}: {name_list(problems)}")

    def parts(self, key: ExpertKey) -> dict[str, PackedTensor]:
        """An expert's matrices.

        Raises:
            ValueError: naming a matrix whose stored shape is another, or whose scales do not fit.
        """
        names = self._matrix_names(key)
        return {
            projection: self._part(names[projection].removesuffix(SUFFIX), projection)
            for projection in PROJECTIONS
        }

    def _part(self, stem: str, projection: str) -> PackedTensor:
        shape, form = self._shapes[projection], self._form
        if tuple(self._read(f"{stem}.weight_shape").tolist()) != shape:
            raise ValueError(f"{projection}: {stem}.weight_shape is not {list(shape)}")
        stored = self._read(f"{stem}.weight_scale")
        scales = stored.to(torch.bfloat16)
        if not torch.equal(scales.to(stored.dtype), stored):
            raise ValueError(
                f"{projection}: {stem}.weight_scale has scales that bfloat16 does not hold "
                "exactly; quantize again with scales in bfloat16"
            )
        zero_points = None
        if not form.symmetric:
            packed = self._read(f"{stem}.weight_zero_point").T.contiguous()  # [groups, N / 8]
            zero_points = unpack_codes(packed.view(torch.uint8), BITS, shape[0]).T.contiguous()
        codes = self._read(f"{stem}.weight_packed").contiguous().view(torch.uint8)
        return PackedTensor(codes, scales, zero_points, shape, BITS, form.group_size)

    def _read(self, name: str) -> torch.Tensor:
        with safe_open(self._entries[name][0], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor.clone()

    def _problems(self, key: ExpertKey) -> list[str]:
        """What is missing or has another shape than it must have, from headers alone."""
        problems = []
        names = self._matrix_names(key)
        for projection in PROJECTIONS:
            stem = names[projection].removesuffix(SUFFIX)
            for suffix, shape in self._stored_shapes(projection).items():
                entry = self._entries.get(f"{stem}.{suffix}")
                if entry is None:
                    problems.append(f"{stem}.{suffix} is missing")
                elif entry[1].shape != shape:
                    found = list(entry[1].shape)
                    problems.append(f"{stem}.{suffix} has shape {found}, expected {list(shape)}")
            if f"{stem}.weight_g_idx" in self._entries:
                problems.append(
                    f"{stem}.weight_g_idx: groups in activation order are not supported"
                )
        return problems

    def _stored_shapes(self, projection: str) -> dict[str, tuple[int, ...]]:
        num_rows, num_columns = self._shapes[projection]
        groups = -(-num_columns // self._form.group_size)
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (num_rows, -(-num_columns // 8)),
            "weight_scale": (num_rows, groups),
            "weight_shape": (2,),
        }
        if not self._form.symmetric:
            shapes["weight_zero_point"] = (-(-num_rows // 8), groups)
        return shapes


def _check_scheme(raw: Any, form: GridFormat, folder: Path) -> None:
    """The config's quantization section is what the recipe says."""
    if not isinstance(raw, Mapping) or raw.get("quant_method") != "compressed-tensors":
        raise CheckpointError(f"{folder}: config.json has no quantization by compressed-tensors")
    groups = raw.get("config_groups")
    if raw.get("format") != "pack-quantized" or not isinstance(groups, Mapping):
        raise CheckpointError(
            f"{folder}: quantization format {raw.get('format')!r}, expected 'pack-quantized'"
        )
    expected = {
        "num_bits": BITS,
        "type": "int",
        "strategy": "group",
        "group_size": form.group_size,
        "symmetric": form.symmetric,
    }
    problems = [
        f"{name}: {key} is {scheme.get(key)!r}, expected {value!r}"
        for name, group in groups.items()
        for scheme in [(group or {}).get("weights") or {}]
        for key, value in expected.items()
        if scheme.get(key) != value
    ]
    if problems:
        raise CheckpointError(f"{folder}: quantization_config: {name_list(problems)}")
