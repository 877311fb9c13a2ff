"""What changed between two calibration reports, and what of it is more than noise. Pure.

Figures that are means over calibration sequences vary with the sequences that were drawn. A wild
bootstrap over sequences says how far: a replicate keeps or turns the sign of each sequence's
deviation from the mean (Wu, "Jackknife, bootstrap and other resampling methods in regression
analysis", 1986; signs as in Davidson and Flachaire, "The wild bootstrap, tamed at last", 2008). Its
change is divided by the standard error of that same replicate, so that the tails are Student's
rather than the normal ones where sequences are few. Reports on the same sequences are compared
sequence by sequence; else the two samples are independent.

Many figures are looked at together: at 1 % each, one of seventy would pass for a change in every
second comparison. Hence one factor for all of them, the 99.9 % quantile, over replicates, of the
largest ratio among the figures (single-step max T of Westfall and Young, "Resampling-based multiple
testing", 1993): intervals of that many standard errors hold all at once with a chance of 99.9 %,
however figures depend on each other.

Called by: cli.  Next: read_report.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specter_build.read_report import FIGURES, NEITHER, Figure, Kind, Report, kind_of
from specter_runtime.errors import name_list

LEVEL = 0.001
"""Chance of marking anything when reports differ by the draw of their sequences alone."""
NUM_REPLICATES = 20_000
SEED = 0
MIN_SEQUENCES = 12
"""Signs that make all deviations alike, 2 in 2**12, have to be rarer than the level."""
RESOLUTION = 1e-6
"""Figures by sequence are rounded to it."""
CHUNK = 2**21
"""Signs that are drawn at a time."""

Array = NDArray[np.float64]


class Verdict(StrEnum):
    """What a change is; the order is that of the table."""

    REGRESSION = "regression"
    IMPROVEMENT = "improvement"
    CHANGED = "changed"
    """Real, or of unknown size beside the noise, but neither better nor worse."""
    NOISE = "noise"
    SAME = "same"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in both reports.

    Attributes:
        figure: its path.
        margin: half width of the interval of the change; None: there is none.
    """

    figure: str
    a: float
    b: float
    margin: float | None
    verdict: Verdict

    @property
    def change(self) -> float:
        """From A to B."""
        return self.b - self.a

    @property
    def relative_change(self) -> float:
        """Of A; infinite from zero."""
        if self.change == 0:
            return 0.0
        return self.change / abs(self.a) if self.a else float(np.copysign(np.inf, self.change))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures that both reports have.

    Attributes:
        a, b: the files.
        rows: by verdict, then the most important first.
        notes: what differs between the reports beside the figures, and what follows from it.
    """

    a: str
    b: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def having(self, *verdicts: Verdict) -> list[Row]:
        """The rows with one of these verdicts."""
        return [row for row in self.rows if row.verdict in verdicts]


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two reports, and in what they agree."""

    a: Report
    b: Report

    @property
    def has_same_structure(self) -> bool:
        return self.a.structure == self.b.structure

    @property
    def has_same_model(self) -> bool:
        """Version 1 does not say; there, the structure has to do."""
        is_known = self.a.model is not None and self.b.model is not None
        return self.a.model == self.b.model if is_known else self.has_same_structure

    @property
    def has_same_text(self) -> bool:
        """Files and length of a sequence: draws of sequences are then draws of one kind."""
        a, b = self.a.calibration, self.b.calibration
        return (a.sha256, a.sequence_length) == (b.sha256, b.sequence_length)

    @property
    def has_same_tokens(self) -> bool:
        """Sequence for sequence; version 1 does not have their hash, but where they are from."""
        a, b = self.a.calibration, self.b.calibration
        if a.tokens_sha256 is not None and b.tokens_sha256 is not None:
            return (a.tokens_sha256, a.num_sequences) == (b.tokens_sha256, b.num_sequences)
        drawn = [(x.sha256, x.num_sequences, x.sequence_length, x.seed) for x in (a, b)]
        return drawn[0] == drawn[1] and self.has_same_model

    @property
    def has_same_plan(self) -> bool:
        """Budget, number of draft tokens, way to run; version 1 does not have the latter two."""
        return self.a.chosen == self.b.chosen and all(
            self.a.figures.get(path) == self.b.figures.get(path) is not None
            for path in ("memory.budget_bytes", "plan.num_draft_tokens")
        )

    @property
    def has_same_hardware(self) -> bool:
        return self.a.hardware == self.b.hardware

    @property
    def has_intervals(self) -> bool:
        """Both have figures by sequence, and of enough sequences."""
        enough = (r.calibration.num_sequences >= MIN_SEQUENCES for r in (self.a, self.b))
        return bool(self.a.samples) and bool(self.b.samples) and all(enough)

    def is_comparable(self, path: str) -> bool:
        """Whether a figure means the same in both."""
        kind = kind_of(path).kind
        by_structure = path.startswith(("layers.", "windows.")) or path == "recall.set_exact"
        if by_structure and not self.has_same_structure:
            return False
        if path == "plan.seconds_per_token" and not self.has_same_hardware:
            return False
        return kind is not Kind.SAMPLE or self.has_same_tokens

    def is_judged(self, figure: Figure) -> bool:
        """Whether a change of a comparable figure is the draft's or the builder's doing."""
        return {
            Kind.MEAN: self.has_intervals and self.has_same_text,
            Kind.SAMPLE: False,
            Kind.EXACT: self.has_same_model,
            Kind.PLAN: self.has_same_model and self.has_same_plan,
        }[figure.kind]


def compare(a: Report, b: Report) -> Comparison:
    """Compare B with A: every figure that both have and that means the same in both."""
    pair = _Pair(a, b)
    paths = [p for p in a.figures if p in b.figures and pair.is_comparable(p)]
    margins = _margins(pair, paths) if pair.has_intervals else {}
    rows = [_row(pair, path, margins.get(path)) for path in paths]
    order, importance = list(Verdict), {id(figure): i for i, figure in enumerate(FIGURES)}
    rows.sort(
        key=lambda row: (
            order.index(row.verdict),
            importance[id(kind_of(row.figure))],
            -abs(row.change),
        )
    )
    return Comparison(a.where, b.where, tuple(rows), tuple(_notes(pair, paths)))


def _row(pair: _Pair, path: str, margin: float | None) -> Row:
    figure, a, b = kind_of(path), pair.a.figures[path], pair.b.figures[path]
    if a == b:
        verdict = Verdict.SAME
    elif margin is not None and abs(b - a) <= margin:
        verdict = Verdict.NOISE
    elif figure.better == NEITHER or not pair.is_judged(figure):
        verdict = Verdict.CHANGED
    else:
        is_better = (b - a) * figure.better > 0
        verdict = Verdict.IMPROVEMENT if is_better else Verdict.REGRESSION
    return Row(path, a, b, margin, verdict)


def _margins(pair: _Pair, paths: Sequence[str]) -> dict[str, float]:
    """Half width of the interval of each mean's change."""
    means = [path for path in paths if kind_of(path).kind is Kind.MEAN]
    a, b = (np.stack([r.samples[path] for path in means], axis=1) for r in (pair.a, pair.b))
    groups = [b - a] if pair.has_same_tokens else [a, b]
    # The change is that of the report's own figures, the mean of the samples is one of rounded
    # ones: at most half a unit of the last digit off in A, as much in B.
    return dict(zip(means, (simultaneous_margins(groups) + RESOLUTION).tolist(), strict=True))


def simultaneous_margins(groups: Sequence[Array]) -> Array:
    """Half widths of intervals of all means' changes, which hold together: ``[F]``.

    Args:
        groups: samples ``[N, F]``, independent of each other: of N sequences, F figures each. The
            change is one group's mean or the difference of two.
    """
    deviations = [group - group.mean(0) for group in groups]
    error = np.sqrt(sum((x**2).sum(0) / len(x) / (len(x) - 1) for x in deviations))
    varies = np.any([np.ptp(group, 0) > RESOLUTION / 2 for group in groups], axis=0)
    margins: Array = np.zeros_like(error)
    if not varies.any():
        return margins
    rng = np.random.default_rng(SEED)
    rows = max(1, CHUNK // max(map(len, groups)))
    largest = [
        _largest_ratios(rng, [x[:, varies] for x in deviations], min(rows, NUM_REPLICATES - start))
        for start in range(0, NUM_REPLICATES, rows)
    ]
    factor = np.quantile(np.concatenate(largest), 1 - LEVEL, method="higher")
    margins[varies] = factor * error[varies]
    return margins


def _largest_ratios(rng: np.random.Generator, deviations: list[Array], num_draws: int) -> Array:
    """The largest |change| / standard error among the figures, by replicate: ``[R]``."""
    change = np.zeros((num_draws, deviations[0].shape[1]))
    variance = np.zeros_like(change)
    for x in deviations:
        signs = rng.integers(0, 2, (num_draws, len(x))) * 2.0 - 1.0
        mean = signs @ x / len(x)  # [R, F]
        change += mean
        variance += ((x**2).mean(0) - mean**2) / (len(x) - 1)
    with np.errstate(divide="ignore", invalid="ignore"):  # where signs make all alike: infinite
        ratios = np.abs(change) / np.sqrt(np.maximum(variance, 0.0))
    ratios[np.isnan(ratios)] = 0.0
    largest: Array = ratios.max(1)
    return largest


def _notes(pair: _Pair, paths: Sequence[str]) -> Iterator[str]:
    """What differs beside the figures, in sentences."""
    a, b = pair.a, pair.b
    if a.version != b.version or a.version == 1:
        yield (
            f"Report versions {a.version} and {b.version}: version 1 has no figures by sequence; "
            "recall and acceptance have no intervals, and their changes are not marked."
        )
    yield from _notes_on_models(pair)
    yield _note_on_calibration(pair)
    few = min(r.calibration.num_sequences for r in (a, b))
    if a.samples and b.samples and not pair.has_intervals:
        yield f"{few} sequences are too few for intervals: it takes {MIN_SEQUENCES}."
    if settings := _differences(a.draft, b.draft):
        yield f"Drafts differ: {settings}."
    if a.hardware is not None and b.hardware is not None and not pair.has_same_hardware:
        hardware = _differences(a.hardware, b.hardware)
        yield f"Planned for other hardware ({hardware}): seconds a token are not compared."
    if a.version == b.version and not pair.has_same_plan and a.hardware is not None:
        yield "Planned for another budget or another way to run: changes of memory not marked."
    if left_out := sorted((a.figures.keys() | b.figures.keys()) - set(paths)):
        yield f"Not compared: {name_list(left_out)}."


def _notes_on_models(pair: _Pair) -> Iterator[str]:
    a, b = pair.a.model, pair.b.model
    if not pair.has_same_model:
        names = (
            f"{model.name!r} ({model.sha256[:8]})" if model else report.structure.model_type
            for model, report in ((a, pair.a), (b, pair.b))
        )
        yield f"Different models, {' and '.join(names)}: changes of sizes are not marked."
        if not pair.has_same_structure:
            yield "Layers or experts differ in number: figures by layer and window are left out."
    elif a is None or b is None:
        yield "Version 1 does not say of which checkpoint it is: taken to be the same."


def _note_on_calibration(pair: _Pair) -> str:
    a, b = pair.a.calibration, pair.b.calibration
    shapes = [f"{x.num_sequences} sequences of {x.sequence_length} tokens" for x in (a, b)]
    if pair.has_same_tokens:
        return f"Calibrated on the same {shapes[0]}: compared sequence by sequence."
    if pair.has_same_text:
        return (
            f"Calibrated on two draws from the same text ({' and '.join(shapes)}): compared as "
            "independent samples."
        )
    return (
        f"Calibrated on different texts or lengths ({' and '.join(shapes)}): what changed may be "
        "the text; changes of recall and acceptance are not marked."
    )


def _differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Keys whose values differ, with both values."""
    keys = [key for key in sorted(a.keys() | b.keys()) if a.get(key) != b.get(key)]
    return "; ".join(f"{key} {json.dumps(a.get(key))} / {json.dumps(b.get(key))}" for key in keys)
