"""``specter-build``, ``specter-compare`` and ``specter-simulate``: parse, call, print. No logic.

Exit codes: 0 built, up to date or compared, 1 what ``--fail-if`` names has happened, 2 bad input,
130 Ctrl-C. Of a build, everything but the bundle's path goes to stderr.

Called by: the shell.  Next: pipeline, compare_reports, sweep.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from specter_runtime.cli import ByteSize, guarded
from specter_runtime.errors import SpecterError
from specter_runtime.units import format_bytes

EXIT_CHECK_FAILED = 1

if TYPE_CHECKING:  # pydantic and torch are imported only when a command runs
    from specter_build.recipe import Recipe
    from specter_runtime.hardware import Hardware
    from specter_runtime.simulated_bundle import SimulatedBundle


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("recipe", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The bundle's folder.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key.")
@click.option("--dry-run", is_flag=True, help="Check everything and print sizes; write nothing.")
def build_command(
    recipe: Path, out: Path | None, overrides: tuple[str, ...], dry_run: bool
) -> None:
    """Build the bundle that RECIPE describes.

    Does nothing if the bundle is there already and nothing has changed.
    """
    try:
        from specter_build.pipeline import build
        from specter_build.recipe import load_recipe
        from specter_build.report import describe
    except ModuleNotFoundError as exc:
        raise SpecterError(
            f"{exc.name} is not installed; specter-build needs: pip install 'specter-moe[build]'"
        ) from exc
    logging.getLogger("specter_build").setLevel(logging.INFO)
    if out is not None:
        overrides = (*overrides, f"output={json.dumps(str(out.absolute()))}")
    loaded = load_recipe(recipe, overrides)
    folder = recipe.absolute().parent
    if dry_run:
        _print_estimate(loaded, folder)
        return
    result = build(loaded, folder, _progress_bar() if sys.stderr.isatty() else _no_bar)
    click.echo(describe(result.report, result.plan.num_draft_tokens, result.timings), err=True)
    if not result.was_built:
        click.echo("up to date, nothing to do", err=True)
    click.echo(result.destination)


def _no_bar(done: int, total: int) -> None:
    """In CI a log line a layer says enough."""


def _progress_bar() -> Callable[[int, int], None]:
    """A bar over layers with the time left, for a terminal."""
    logging.getLogger("specter_build").setLevel(logging.WARNING)
    bar: list[Any] = []

    def on_layer(done: int, total: int) -> None:
        if not bar:
            bar.append(click.progressbar(length=total, label="layers", file=sys.stderr))
            bar[0].update(done)
        else:
            bar[0].update(done - bar[0].pos)
        if done == total:
            bar[0].render_finish()

    return on_layer


def _print_estimate(recipe: Recipe, folder: Path) -> None:
    """What a build would take; nothing is written."""
    from specter_build.estimate import available_memory, estimate
    from specter_build.open_inputs import check_disk, model_folder_for_estimate
    from specter_build.write_bundle import existing_digest

    sizes = estimate(recipe, model_folder_for_estimate(recipe, folder))
    destination = (folder / recipe.output).resolve()
    existing_digest(destination)
    check_disk(sizes, destination)
    config = sizes.config
    widths = sorted({width for row in recipe.draft.widths(config) for width in row})
    lines = [
        f"model        {config.model_type}: {config.num_hidden_layers} layers, "
        f"{config.num_experts} experts, top-{config.num_experts_per_tok}, "
        f"{sizes.expert_numbers.dtype}"
        + ("" if sizes.has_weights else " (no weights here: sizes from config.json alone)"),
        f"draft        {recipe.draft.method}, {'/'.join(map(str, widths))} bits in groups of "
        f"{recipe.draft.group_size}",
        f"bundle       {format_bytes(sizes.bundle_bytes)} at {destination}",
        f"build        up to {format_bytes(sizes.build_bytes)} of memory "
        f"({format_bytes(available_memory())} available)",
    ]
    for num_draft_tokens, memory in sizes.memory.items():
        per_layer = memory.num_slots / len(config.moe_layers)
        lines.append(
            f"run          {num_draft_tokens} draft tokens in {format_bytes(memory.budget_bytes)}: "
            f"{memory.num_slots} slots of {format_bytes(memory.slot_bytes)} ({per_layer:.1f} a "
            f"layer), dense {format_bytes(memory.dense_bytes)}, draft "
            f"{format_bytes(memory.draft_bytes)}, predictor "
            f"{format_bytes(memory.predictor_bytes)}, KV cache "
            f"{format_bytes(memory.kv_cache_bytes)}, buffers {format_bytes(memory.buffer_bytes)}"
        )
    click.echo("\n".join(lines), err=True)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("a", type=click.Path(exists=True, path_type=Path))
@click.argument("b", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--fail-if",
    "expressions",
    multiple=True,
    metavar="EXPR",
    help="Exit with 1 if the change B - A is so: 'recall.mean<-0.01', 'sizes.draft_bytes>+5%', or "
    "'regression'. May be given several times.",
)
@click.option("--markdown", "form", flag_value="markdown", help="Print a comment's text.")
@click.option("--json", "form", flag_value="json", help="Print one JSON object.")
@click.option("--html", "page", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE")
def compare_command(
    a: Path, b: Path, expressions: tuple[str, ...], form: str | None, page: Path | None
) -> int:
    """What changed from A to B, bundles or report.json files."""
    from specter_build.check_expressions import check, parse_condition
    from specter_build.compare_reports import compare
    from specter_build.read_report import read_report
    from specter_build.show_comparison import to_html, to_markdown, to_record, to_text
    from specter_runtime.whole_file import write_whole

    conditions = [parse_condition(expression) for expression in expressions]
    comparison = compare(read_report(a), read_report(b))
    found = {condition.text: check(condition, comparison) for condition in conditions}
    fired = {text: what for text, what in found.items() if what is not None}
    if page is not None:
        write_whole(page, to_html(comparison, fired))
    if form == "json":
        click.echo(json.dumps(to_record(comparison, fired), allow_nan=False))
    elif form == "markdown":
        click.echo(to_markdown(comparison, fired))
    else:
        click.echo(to_text(comparison))
    for text, what in fired.items():
        click.echo(f"failed: {text} ({what})", err=True)
    return EXIT_CHECK_FAILED if fired else 0


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument(
    "bundles", metavar="BUNDLE...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--hardware", required=True, help="A profile's file, or the name of one that ships.")
@click.option(
    "--memory-budget", "budgets", type=ByteSize(), multiple=True, help="Fast memory; repeatable."
)
@click.option(
    "--num-draft-tokens",
    "numbers",
    type=click.IntRange(0, 64),
    multiple=True,
    default=(2,),
    show_default=True,
    help="Of the policy that drafts; repeatable for a sweep.",
)
@click.option(
    "--sweep",
    "sweeps",
    is_flag=True,
    help="Specter alone, over all budgets, numbers of draft tokens, links and bundles.",
)
@click.option(
    "--link",
    "links",
    type=ByteSize(),
    multiple=True,
    help="Bytes a second, for a sweep; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write a sweep's charts.",
)
def simulate_command(
    bundles: tuple[Path, ...],
    hardware: str,
    budgets: tuple[int, ...],
    numbers: tuple[int, ...],
    sweeps: bool,
    links: tuple[int, ...],
    as_json: bool,
    page: Path | None,
) -> None:
    """Tell what a token of a BUNDLE would take on other hardware, policy by policy.

    Replays the routes that calibration recorded. Without a budget, the plan's is taken.
    """
    from specter_runtime.hardware import load_hardware
    from specter_runtime.simulated_bundle import SimulatedBundle
    from specter_runtime.whole_file import check_writable

    is_plain = len(bundles) == len(numbers) == 1 and not links and page is None
    if not sweeps and not is_plain:
        raise click.UsageError(
            "several bundles, several --num-draft-tokens, --link and --html go with --sweep"
        )
    if page is not None:
        check_writable(page)
    profile = load_hardware(hardware)
    opened = {path.resolve().name: SimulatedBundle(path) for path in bundles}
    if len(opened) < len(bundles):
        raise click.UsageError("the bundles' folders must have names that tell them apart")
    planned = max(bundle.planned_budget_bytes for bundle in opened.values())
    if sweeps:
        _sweep(opened, profile, budgets or (planned,), links, numbers, as_json=as_json, page=page)
        return
    (bundle,), (number,) = opened.values(), numbers
    tables = {}
    for budget in budgets or (planned,):
        rows = bundle.table(profile, budget, number)
        tables[str(budget)] = rows
        click.echo(f"{format_bytes(budget)} on {profile.name}\n")
        click.echo(_columns(rows) + "\n")
    if as_json:
        click.echo(json.dumps({"hardware": profile.name, "by_budget": tables}))


def _sweep(
    bundles: Mapping[str, SimulatedBundle],
    hardware: Hardware,
    budgets: Sequence[int],
    links: Sequence[int],
    numbers: Sequence[int],
    *,
    as_json: bool,
    page: Path | None,
) -> None:
    from specter_build.sweep import Point, sweep, to_page, to_records, to_row
    from specter_runtime.whole_file import write_whole

    with click.progressbar(
        length=len(bundles) * len(budgets) * max(1, len(links)) * len(numbers),
        label="simulating",
        file=sys.stderr,
        hidden=not sys.stderr.isatty(),
    ) as bar:

        def advance(_: Point) -> None:
            bar.update(1)

        points = sweep(bundles, hardware, budgets, links, numbers, advance)
    click.echo(_columns([to_row(point) for point in points]))
    if page is not None:
        write_whole(page, to_page(points, hardware))
    if as_json:
        click.echo(json.dumps({"hardware": hardware.name, "points": to_records(points)}))


def _columns(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as aligned columns."""
    lines = [list(rows[0]), *([str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            [line[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)]
        )
        for line in lines
    )


def main_build() -> NoReturn:
    """Entry point of ``specter-build``."""
    guarded(build_command)


def main_compare() -> NoReturn:
    """Entry point of ``specter-compare``."""
    guarded(compare_command)


def main_simulate() -> NoReturn:
    """Entry point of ``specter-simulate``."""
    guarded(simulate_command)
