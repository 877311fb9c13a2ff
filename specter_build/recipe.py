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
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from specter_runtime.config import DType
from specter_runtime.errors import RecipeError
from specter_runtime.units import parse_bytes

Bytes = Annotated[int, BeforeValidator(parse_bytes), Field(gt=0)]


class _Section(BaseModel):
    """Strict and frozen; no value is converted from another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class DraftRecipe(_Section):
    """How the routed experts are quantized.

    Attributes:
        method: ``rtn``: round to nearest.
        bits: width of every expert's stand-in.
        group_size: weights of a row that share a scale.
        symmetric: whether zero points are left out.
    """

    method: Literal["rtn"] = "rtn"
    bits: Literal[2, 3, 4, 8]
    group_size: int = Field(ge=8, le=1024)
    symmetric: bool = True


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


class PlanRecipe(_Section):
    """What the placement is planned for.

    Attributes:
        memory_budget: fast memory for everything resident, e.g. ``4GiB``.
        max_context_tokens: room in the KV cache.
        num_draft_tokens: tokens drafted per window; ``auto`` lets the planner choose.
        dtype: precision of computation; ``auto`` is the checkpoint's.
    """

    memory_budget: Bytes
    max_context_tokens: int = Field(default=4096, ge=1)
    num_draft_tokens: Literal["auto"] | Annotated[int, Field(ge=0, le=64)] = "auto"
    dtype: Literal["auto"] | DType = "auto"


class HardwareRecipe(_Section):
    """What the planner assumes of the machine.

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


class Recipe(_Section):
    """A whole recipe.

    Attributes:
        model: a checkpoint's folder, or a hub id such as ``org/name``.
        revision: of the hub id.
        output: the bundle's folder.
    """

    model: str
    revision: str | None = None
    output: str
    draft: DraftRecipe
    calibration: CalibrationRecipe
    plan: PlanRecipe
    hardware: HardwareRecipe

    def settings(self) -> dict[str, Any]:
        """Everything that shapes a bundle, and nothing of where files lie on this machine."""
        content = self.model_dump(mode="json", exclude={"output", "model", "revision"})
        content["calibration"]["files"] = [Path(name).name for name in self.calibration.files]
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
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
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
    except yaml.YAMLError as exc:
        raise RecipeError(f"--set {override}: value is not valid YAML: {exc}") from exc


def _problem(item: Mapping[str, Any]) -> str:
    """One pydantic error as a sentence with the key path."""
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = _known_keys(item["loc"][:-1])
        near = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
        return f"{path}: unknown key; {hint}"
    if item["type"] == "missing":
        return f"{path}: missing"
    return f"{path}: {item['msg']} (found {item['input']!r})"


def _known_keys(location: Sequence[Any]) -> list[str]:
    """Keys of the section at a key path."""
    section: type[BaseModel] = Recipe
    for part in location:
        annotation = section.model_fields[str(part)].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return list(section.model_fields)
