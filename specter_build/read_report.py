"""A calibration report, read strictly: its figures by path, and what they were measured on.

``FIGURES`` is the one table of what reports are compared by. A figure is called by its path in
``report.json``; layers go by their number, entries of a predictor by layers ahead.

Called by: cli.  Next: compare_reports.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from specter_runtime.errors import BundleError
from specter_runtime.manifest import parse_record, read_json

REPORT_FILE = "report.json"
VERSIONS = (1, 2)
"""Of reports that are read. Version 1 says nothing of single sequences, model or plan."""

Unit = Literal["", "count", "bytes", "seconds"]
HIGHER, LOWER, NEITHER = 1, -1, 0
"""Which change of a figure is better."""


class Kind(Enum):
    """What a figure is made of, and thus what a change of it means."""

    MEAN = auto()
    """A mean over calibration sequences: how far it varies is known."""
    SAMPLE = auto()
    """Of the calibration set, but no such mean: how far it varies is not known."""
    EXACT = auto()
    """Counted, not measured."""
    PLAN = auto()
    """Counted; follows from the budget and the number of draft tokens."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One kind of figure.

    Attributes:
        path: in the report; a star is any key.
        better: the change that is better.
        kind: what it is made of.
        unit: how it is printed.
        since: version of the report that first had it.
    """

    path: str
    better: int
    kind: Kind
    unit: Unit = ""
    since: int = 1


FIGURES = (
    Figure("acceptance.expected_length.*", HIGHER, Kind.MEAN),
    Figure("acceptance.rate", HIGHER, Kind.MEAN),
    Figure("acceptance.sampled_rate", HIGHER, Kind.MEAN),
    Figure("recall.mean", HIGHER, Kind.MEAN),
    Figure("recall.worst", HIGHER, Kind.MEAN),
    Figure("recall.weighted", HIGHER, Kind.MEAN),
    Figure("recall.set_exact", HIGHER, Kind.MEAN),
    Figure("windows.*.recall", HIGHER, Kind.MEAN),
    Figure("layers.*.recall", HIGHER, Kind.MEAN),
    # What follows from means that vary is not exact either.
    Figure("plan.seconds_per_token", LOWER, Kind.SAMPLE, "seconds", since=2),
    Figure("plan.num_draft_tokens", NEITHER, Kind.EXACT, "count", since=2),
    Figure("memory.num_slots", HIGHER, Kind.PLAN, "count"),
    Figure("sizes.draft_bytes", LOWER, Kind.EXACT, "bytes"),
    Figure("sizes.shard_bytes", LOWER, Kind.EXACT, "bytes"),
    Figure("sizes.dense_bytes", LOWER, Kind.EXACT, "bytes"),
    Figure("memory.slot_bytes", LOWER, Kind.PLAN, "bytes"),
    Figure("memory.dense_bytes", LOWER, Kind.PLAN, "bytes"),
    Figure("memory.predictor_bytes", LOWER, Kind.PLAN, "bytes"),
    Figure("memory.kv_cache_bytes", LOWER, Kind.PLAN, "bytes"),
    Figure("memory.buffer_bytes", LOWER, Kind.PLAN, "bytes"),
    Figure("memory.budget_bytes", NEITHER, Kind.EXACT, "bytes"),
    Figure("predictor.recall.*", HIGHER, Kind.SAMPLE),
    # Comparable between drafts of one method only: gptq's is larger than rtn's, its recall better.
    Figure("relative_quantization_error", NEITHER, Kind.EXACT),
    # Of the target and the text alone:
    Figure("windows.*.union", NEITHER, Kind.MEAN),
    Figure("normalized_entropy", NEITHER, Kind.SAMPLE),
    Figure("num_experts_never_reached", NEITHER, Kind.SAMPLE, "count"),
)
"""The most important first."""

LARGEST = 1e100
"""Of any figure; squares of it are finite."""
DERIVED = ("bits_per_weight", "num_experts_by_bits", "fallback_experts")
"""Keys of the report's draft that are no settings."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a report was measured on: its own section, key for key."""

    sources: tuple[str, ...]
    sha256: str
    tokens_sha256: str | None
    num_sequences: int
    sequence_length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Model:
    """Which checkpoint, by its files."""

    name: str
    sha256: str


@dataclass(frozen=True, slots=True)
class Structure:
    """What is known of a model by its report alone."""

    model_type: str
    routed_layers: tuple[str, ...]
    num_experts: int
    num_experts_per_tok: int


@dataclass(frozen=True, slots=True)
class Report:
    """A report.

    Attributes:
        where: the file.
        model: None in version 1.
        draft: settings of the draft.
        hardware: what the plan assumed; None in version 1.
        chosen: the way to run that was planned; None where the report does not say.
        figures: path -> value, the most important first.
        samples: path of a mean -> its values by sequence, float64 ``[N]``; empty in version 1.
    """

    where: str
    version: int
    model: Model | None
    structure: Structure
    calibration: Calibration
    draft: Mapping[str, Any]
    hardware: Mapping[str, Any] | None
    chosen: str | None
    figures: Mapping[str, float]
    samples: Mapping[str, NDArray[np.float64]] = field(repr=False)


def kind_of(path: str) -> Figure:
    """The kind of figure that a path is of."""
    return next(figure for figure in FIGURES if _matches(path, figure.path))


def _matches(path: str, template: str) -> bool:
    parts, pattern = path.split("."), template.split(".")
    same = (star in ("*", part) for part, star in zip(parts, pattern, strict=False))
    return len(parts) == len(pattern) and all(same)


def read_report(path: Path) -> Report:
    """Read the report of a bundle's folder, or a report's own file.

    Raises:
        BundleError: it cannot be read or is no report; names the file and the key.
    """
    file = path / REPORT_FILE if path.is_dir() else path
    return parse_report(read_json(file), str(file))


def parse_report(raw: Mapping[str, Any], where: str) -> Report:
    """Check the parts of a report that comparing needs.

    Raises:
        BundleError: naming ``where``, the key, what was expected and what was found.
    """
    version = raw.get("report_version")
    if type(version) is not int or version not in VERSIONS:
        raise BundleError(
            f"{where}: report_version is {version!r:.80}, expected "
            f"{' or '.join(map(str, VERSIONS))}; is this the report.json of a bundle?"
        )
    tree = _Tree(raw, where)
    tree.root = {**raw, "layers": tree.layers(), "predictor": {"recall": tree.predictor_recall()}}
    has_all = version >= 2
    tokens_sha256 = tree.text("calibration.tokens_sha256") if has_all else None
    calibration = {**tree.section("calibration"), "tokens_sha256": tokens_sha256}
    layers = tuple(tree.section("layers"))
    figures = {
        path: tree.number(path)
        for figure in FIGURES
        if figure.since <= version
        for path in tree.paths(figure.path)
    }
    report = Report(
        where=where,
        version=version,
        model=parse_record(Model, tree.section("model"), f"{where}: model") if has_all else None,
        structure=Structure(
            model_type=tree.text("model_type"),
            routed_layers=layers,
            num_experts=len(tree.items(f"layers.{layers[0]}.expert_counts")),
            num_experts_per_tok=round(tree.number("windows.1.union")),
        ),
        calibration=parse_record(Calibration, calibration, f"{where}: calibration"),
        draft={key: x for key, x in tree.section("draft").items() if key not in DERIVED},
        hardware=tree.section("plan.hardware") if has_all else None,
        chosen=tree.text("plan.chosen") if has_all and "chosen" in raw["plan"] else None,
        figures=figures,
        samples=tree.samples(figures) if has_all else {},
    )
    lengths = {len(values) for values in report.samples.values()}
    if lengths - {report.calibration.num_sequences}:
        raise BundleError(
            f"{where}: figures by sequence have {sorted(lengths)} entries, expected "
            f"{report.calibration.num_sequences} (calibration.num_sequences)"
        )
    return report


class _Tree:
    """A JSON object that is asked for by path; what is not as expected is an error with the path.

    Attributes:
        root: the object.
    """

    def __init__(self, root: Mapping[str, Any], where: str) -> None:
        self.root = root
        self._where = where

    def get(self, path: str) -> Any:
        """What a path leads to."""
        node: Any = self.root
        for key in path.split("."):
            if not isinstance(node, Mapping) or key not in node:
                raise BundleError(f"{self._where}: '{path}' is missing")
            node = node[key]
        return node

    def section(self, path: str) -> Mapping[str, Any]:
        """A non-empty object."""
        found = self.get(path)
        return found if found and isinstance(found, dict) else self._fail(path, "an object", found)

    def items(self, path: str) -> list[Any]:
        """A list."""
        found = self.get(path)
        return found if isinstance(found, list) else self._fail(path, "a list", found)

    def text(self, path: str) -> str:
        """A string."""
        found = self.get(path)
        return found if isinstance(found, str) else self._fail(path, "a string", found)

    def number(self, path: str) -> float:
        """A finite number."""
        return self._number(path, self.get(path))

    def paths(self, template: str) -> Iterator[str]:
        """The paths that a template stands for; numbers ascend."""
        before, star, after = template.partition("*")
        if not star:
            yield template
            return
        found = self.get(before.removesuffix("."))
        if not isinstance(found, dict):
            self._fail(before.removesuffix("."), "an object", found)
        for key in sorted(found, key=lambda key: (len(key), key)):
            if not re.fullmatch("[0-9]+", key):
                self._fail(before.removesuffix("."), "numbers as keys", key)
            yield f"{before}{key}{after}"

    def samples(self, figures: Mapping[str, float]) -> dict[str, NDArray[np.float64]]:
        """Means by sequence, of those figures that are means."""
        sequences = self.section("sequences")
        found = {}
        for path in figures:
            if kind_of(path).kind is not Kind.MEAN:
                continue
            layer = path.split(".")[1] if path.startswith("layers.") else None
            if path == "recall.worst":  # of the layer that comes out worst
                layer = f"{self.number('recall.worst_layer'):.0f}"
            if layer is None:
                name, values = f"sequences: {path}", sequences.get(path)
            else:
                name = f"layers.{layer}.recall_by_sequence"
                values = self.get(name)
            if not isinstance(values, list):
                self._fail(name, "a list", values)
            found[path] = np.array([self._number(name, x) for x in values], dtype=np.float64)
        return found

    def layers(self) -> dict[str, Any]:
        """The layers by number."""
        found: dict[str, Any] = {}
        for layer in self.items("layers") or [None]:
            number = layer.get("layer") if isinstance(layer, dict) else None
            if type(number) is not int or str(number) in found:
                self._fail("layers", "objects, each with a 'layer' of its own", layer)
            found[str(number)] = layer
        return found

    def predictor_recall(self) -> dict[str, Any]:
        """Recall of the predictor by layers ahead; empty where there is none."""
        return {str(j): x for j, x in enumerate(self.items("predictor.recall"), start=1)}

    def _number(self, path: str, found: Any) -> float:
        if type(found) in (int, float) and abs(found) <= LARGEST:  # NaN is not
            return float(found)
        return self._fail(path, f"a finite number of at most {LARGEST:.0e}", found)

    def _fail(self, path: str, expected: str, found: Any) -> NoReturn:
        shown = f"{found!r:.80}"
        raise BundleError(f"{self._where}: '{path}': expected {expected}, found {shown}")
