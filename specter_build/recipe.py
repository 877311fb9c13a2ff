"""One recipe file: YAML, strict.

Unknown keys, wrong types and values out of range are errors that name the file, the key path and,
for a misspelt key, the nearest known one. Relative paths are relative to the recipe's folder.

Called by: cli, pipeline.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from specter_runtime.config import DType, ModelConfig, RuntimeConfig
from specter_runtime.errors import RecipeError
from specter_runtime.hardware import Hardware
from specter_runtime.units import parse_bytes


def _byte_size(value: object) -> int:
    if isinstance(value, str) or type(value) is int:
        return parse_bytes(value)
    raise ValueError(f"{value!r} is not a size; write e.g. 4GiB, 500MB or a number of bytes")


Bytes = Annotated[int, BeforeValidator(_byte_size), Field(gt=0)]
AWQ_MIN_TOKENS = 32
"""Means over so many rows are known to about a fifth of the spread of a row."""


class _Section(BaseModel):
    """Strict and frozen; no value is converted from another type."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, serialize_by_alias=True
    )


def _whole(value: Any) -> Any:
    """Refuse what only equals a whole number: 4.0, or true for 1."""
    if type(value) is not int:
        raise ValueError("must be a whole number")
    return value


class BitsOverride(_Section):
    """Experts whose stand-ins have a width of their own.

    Attributes:
        layers: decoder layers, counted from 0, or ``all`` routed ones.
        experts: experts of each of these layers, counted from 0, or ``all``.
        bits: their width; 0: no stand-in, the draft leaves the expert out unless it is cached.
    """

    layers: Literal["all"] | Annotated[list[int], Field(min_length=1)]
    experts: Literal["all"] | Annotated[list[int], Field(min_length=1)]
    bits: Annotated[Literal[0, 2, 3, 4, 8], BeforeValidator(_whole)]


class BitsTable(_Section):
    """Widths by expert.

    Attributes:
        default: of every expert that no override names.
        overrides: no two may name the same expert.
    """

    default: Annotated[Literal[0, 2, 3, 4, 8], BeforeValidator(_whole)]
    overrides: list[BitsOverride] = Field(min_length=1)


_TABLE, _NUMBER = "<table>", "<number>"
"""Tags of the two forms of ``bits``; they stand in pydantic's key paths and are no keys."""

Bits = Annotated[
    Annotated[Literal[0, 2, 3, 4, 8], BeforeValidator(_whole), Tag(_NUMBER)]
    | Annotated[BitsTable, Tag(_TABLE)],
    Discriminator(lambda value: _TABLE if isinstance(value, dict | BitsTable) else _NUMBER),
]


class DraftRecipe(_Section):
    """How the routed experts are quantized.

    Attributes:
        method: ``rtn``: round to nearest; ``gptq``: rounding errors are made up for by the weights
            not yet rounded (arXiv 2210.17323); ``awq``: channels between up and down projection
            are rescaled by what flows through them (arXiv 2306.00978); ``given``: by whoever made
            the checkpoint at ``from``. gptq and awq need llm-compressor.
        bits: width of every expert's stand-in: one number, or a table by expert. 0 makes none: the
            draft then consists of the experts that are cached.
        group_size: weights of a row that share a scale.
        symmetric: whether zero points are left out.
        clip: ``mse``: each group's range is shrunk to where its squared error is least. Smaller
            errors, but also smaller weights: on the demo checkpoint routing recall gets worse.
        min_tokens: experts that fewer calibration tokens reach are quantized by ``rtn``, and are
            named in the report; None: see ``required_tokens``.
        source: ``from`` in the file: folder of a compressed-tensors W4A16 checkpoint of the same
            model; ``bits``, ``group_size`` and ``symmetric`` say what it must be.
    """

    method: Literal["rtn", "gptq", "awq", "given"] = "rtn"
    bits: Bits
    group_size: int = Field(ge=8, le=1024)
    symmetric: bool = True
    clip: Literal["none", "mse"] = "none"
    min_tokens: int | None = Field(default=None, ge=1)
    source: str | None = Field(default=None, alias="from")

    @property
    def is_calibrated(self) -> bool:
        """Whether the method looks at what reaches the experts."""
        return self.method in ("gptq", "awq")

    def required_tokens(self, moe_intermediate_size: int) -> int:
        """Calibration tokens that must reach an expert; with fewer it is rounded to nearest.

        gptq fits M x M products of down_proj's M inputs. What is fitted to n rows has a variance of
        about M / (n - M) on rows of the same kind: it does harm up to n = 2 M. Measured on the demo
        checkpoint (M = 128, error on rows left out, relative to rtn): 1.3 with 64 tokens, 1.2 with
        128, 0.9 with 256, 0.6 with 512, at any width. awq only takes means of channels.
        """
        default = 2 * moe_intermediate_size if self.method == "gptq" else AWQ_MIN_TOKENS
        return default if self.min_tokens is None else self.min_tokens

    @model_validator(mode="after")
    def _has_no_idle_option(self) -> DraftRecipe:
        if self.min_tokens is not None and not self.is_calibrated:
            raise ValueError(
                f"min_tokens has no effect on {self.method}, which needs no calibration tokens"
            )
        if (self.method == "given") != (self.source is not None):
            raise ValueError("method: given and from: belong together")
        if self.method == "given" and (self.bits != 4 or self.clip != "none"):
            raise ValueError("a given draft has bits: 4, and clip has no effect on it")
        if self.bits == 0 and (self.is_calibrated or self.clip != "none"):
            raise ValueError("with bits: 0 nothing is quantized: method and clip have no effect")
        return self

    def widths(self, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
        """Bit width of each expert by routed layer (ascending); 0 = no stand-in.

        Raises:
            RecipeError: an override names what the model does not have, an expert that another one
                names as well, or changes nothing.
        """
        if isinstance(self.bits, int):
            return ((self.bits,) * config.num_experts,) * len(config.moe_layers)
        return _expand(self.bits, config)


class CalibrationRecipe(_Section):
    """Which text the routing is profiled on.

    Attributes:
        files: ``.txt`` or ``.jsonl`` (objects with a ``text``); empty: the text that ships.
        num_sequences: sequences drawn from it.
        sequence_length: tokens of each.
        seed: of the draw.
    """

    files: list[str] = []
    num_sequences: int = Field(ge=1, le=100_000)
    sequence_length: int = Field(ge=2, le=1_000_000)
    seed: int = Field(ge=0)


class PredictorRecipe(_Section):
    """What foretells experts where nothing is drafted: a linear map a layer, fitted to the routing.

    Attributes:
        layers_ahead: routed layers behind a layer that it speaks of; 0: no predictor.
    """

    layers_ahead: int = Field(default=2, ge=0, le=4)


class PlanRecipe(_Section):
    """What the placement is planned for.

    Attributes:
        memory_budget: fast memory for everything resident, e.g. ``4GiB``.
        max_context_tokens: room in the KV cache.
        num_draft_tokens: tokens drafted per window; ``auto`` lets the planner choose.
        dtype: precision of computation; ``auto`` is the checkpoint's.
    """

    memory_budget: Bytes
    max_context_tokens: int = Field(default=4096, ge=2)
    num_draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    dtype: Literal["auto"] | DType = "auto"


class HardwareRecipe(_Section):
    """What the planner assumes of the machine, in few words; a profile says it in full.

    Attributes:
        link_bytes_per_second: slow tier to fast tier (reads of an expert's size).
        link_latency_seconds: added to every read.
        memory_bytes_per_second: rate at which weights are read and multiplied.
        pass_overhead_seconds: added to every pass of target or draft.
    """

    link_bytes_per_second: float = Field(gt=0)
    link_latency_seconds: float = Field(default=0.0, ge=0)
    memory_bytes_per_second: float = Field(gt=0)
    pass_overhead_seconds: float = Field(default=0.0, ge=0)

    def profile(self) -> Hardware:
        """A profile in which the rest is as it comes: as many multiply-adds a second as bytes."""
        return Hardware(
            name="recipe",
            link_bytes_per_second=self.link_bytes_per_second,
            link_latency_seconds=self.link_latency_seconds,
            num_readers=RuntimeConfig().num_io_threads,
            memory_bytes_per_second=self.memory_bytes_per_second,
            packed_bytes_per_second=self.memory_bytes_per_second,
            multiplies_per_second=self.memory_bytes_per_second,
            pass_overhead_seconds=self.pass_overhead_seconds,
            layer_overhead_seconds=0.0,
            row_layer_overhead_seconds=0.0,
            stop_overhead_seconds=0.0,
            full_stop_overhead_seconds=0.0,
        )


_RATES, _PROFILE = "rates", "profile"
"""Tags of the two forms of ``hardware``, likewise."""

HardwareChoice = Annotated[
    Annotated[HardwareRecipe, Tag(_RATES)] | Annotated[str, Tag(_PROFILE)],
    Discriminator(lambda value: _PROFILE if isinstance(value, str) else _RATES),
]


class Recipe(_Section):
    """A whole recipe.

    Attributes:
        model: a checkpoint's folder, or a hub id such as ``org/name``.
        revision: of the hub id.
        output: the bundle's folder.
        hardware: the machine to plan for: rates, the name of a profile that ships, or a profile's
            file.
        shard_encoding: ``packed`` keeps bfloat16 experts losslessly in 12 bits a weight, on disk
            and in slots; ``raw`` as the checkpoint has them; ``auto`` packs what can be packed.
    """

    model: str
    revision: str | None = None
    output: str
    shard_encoding: Literal["auto", "raw", "packed"] = "auto"
    draft: DraftRecipe
    calibration: CalibrationRecipe
    predictor: PredictorRecipe = PredictorRecipe()
    plan: PlanRecipe
    hardware: HardwareChoice

    def settings(self) -> dict[str, Any]:
        """Everything that shapes a bundle, and nothing of where files lie on this machine."""
        content = self.model_dump(mode="json", exclude={"output", "model", "revision"})
        content["calibration"]["files"] = [Path(name).name for name in self.calibration.files]
        if self.draft.source is not None:
            content["draft"]["from"] = Path(self.draft.source).name
        return content

    def digest(self) -> str:
        """SHA-256 of the settings."""
        return hashlib.sha256(json.dumps(self.settings(), sort_keys=True).encode()).hexdigest()


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read and check a recipe.

    Args:
        path: the YAML file.
        overrides: ``key.path=value`` items, values in YAML.

    Raises:
        RecipeError: naming the file and every key that is wrong.
    """
    try:
        raw = yaml.load(path.read_text("utf-8"), Loader=_UniqueKeyLoader)  # a SafeLoader
    except OSError as exc:
        raise RecipeError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (yaml.YAMLError, ValueError, TypeError) as exc:
        raise RecipeError(f"{path}: not valid YAML: {exc}") from exc
    if not isinstance(raw, dict):
        raise RecipeError(f"{path}: expected a mapping of keys, found {type(raw).__name__}")
    for override in overrides:
        _apply_override(raw, override)
    try:
        return Recipe.model_validate(raw)
    except ValidationError as exc:
        problems = "\n".join(f"  {_problem(dict(item))}" for item in exc.errors())
        raise RecipeError(f"{path}: the recipe is wrong:\n{problems}") from exc


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML's last-one-wins for a repeated key would drop a setting silently."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """As the base class, but refuses a repeated key by line."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key_node.value!r} stands twice", key_node.start_mark
                )
            seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise RecipeError(f"--set {override}: expected key=value")
    *parents, last = key.split(".")
    section = raw
    for parent in parents:
        section = section.setdefault(parent, {})
        if not isinstance(section, dict):
            raise RecipeError(f"--set {override}: {parent!r} is not a section")
    try:
        section[last] = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, TypeError) as exc:
        raise RecipeError(f"--set {override}: value is not valid YAML: {exc}") from exc


def _expand(table: BitsTable, config: ModelConfig) -> tuple[tuple[int, ...], ...]:
    """The width of every expert; see ``DraftRecipe.widths``."""
    widths = {layer: [table.default] * config.num_experts for layer in config.moe_layers}
    named: dict[tuple[int, int], int] = {}
    for index, override in enumerate(table.overrides):
        where = f"draft.bits.overrides.{index}"
        if override.bits == table.default:
            raise RecipeError(f"{where}: {override.bits} bits are the default; it has no effect")
        routed = f"the routed layers are {_ranges(config.moe_layers)}"
        layers = _choose(override.layers, config.moe_layers, f"{where}.layers", routed)
        all_experts = range(config.num_experts)
        count = f"the model has {config.num_experts} experts a layer"
        for layer in layers:
            for expert in _choose(override.experts, all_experts, f"{where}.experts", count):
                if (layer, expert) in named:
                    raise RecipeError(
                        f"{where}: expert {expert} of layer {layer} is named by "
                        f"draft.bits.overrides.{named[layer, expert]} already"
                    )
                named[layer, expert] = index
                widths[layer][expert] = override.bits
    return tuple(tuple(row) for row in widths.values())


def _choose(
    chosen: Literal["all"] | list[int], known: Sequence[int], where: str, hint: str
) -> Sequence[int]:
    if chosen == "all":
        return known
    unknown = [number for number in chosen if number not in known]
    if unknown:
        raise RecipeError(f"{where}: {', '.join(map(str, unknown))} not found; {hint}")
    if len(set(chosen)) < len(chosen):
        raise RecipeError(f"{where}: a number stands twice: {chosen}")
    return chosen


def _ranges(numbers: Sequence[int]) -> str:
    """``0, 2..5`` for 0, 2, 3, 4, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}..{high}" for low, high in runs)


def _problem(item: Mapping[str, Any]) -> str:
    """One pydantic error as a sentence with the key path."""
    location = [part for part in item["loc"] if part not in (_TABLE, _NUMBER, _RATES, _PROFILE)]
    path = ".".join(str(part) for part in location)
    if item["type"] == "extra_forbidden":
        known = _known_keys(location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{path}: missing"
    return f"{path}: {item['msg']} (found {item['input']!r})"


def _known_keys(location: Sequence[Any]) -> list[str]:
    """Keys of the section at a key path."""
    section: type[BaseModel] = Recipe
    for part in location:
        if isinstance(part, str):  # numbers count the entries of a list
            section = _section_in(section.model_fields[part].annotation) or section
    return [field.alias or name for name, field in section.model_fields.items()]


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section that a field holds, alone, in a list or as one of several forms."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_section_in(part) for part in get_args(annotation))
    return next((section for section in found if section is not None), None)
