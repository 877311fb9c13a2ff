"""``specter-build``: parses, calls the pipeline, prints. No logic.

Exit codes: 0 built or up to date, 2 bad input, 130 Ctrl-C. Everything but the bundle's path goes to
stderr.

Called by: the shell.  Next: pipeline.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import NoReturn

import click

from specter_runtime.cli import guarded
from specter_runtime.errors import SpecterError
from specter_runtime.units import format_bytes


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
        from specter_build.open_inputs import bundle_nbytes, check_disk, open_inputs
        from specter_build.pipeline import build
        from specter_build.recipe import load_recipe
    except ModuleNotFoundError as exc:
        raise SpecterError(
            f"{exc.name} is not installed; specter-build needs: pip install 'specter-moe[build]'"
        ) from exc
    from specter_build.report import describe

    logging.getLogger("specter_build").setLevel(logging.INFO)
    if out is not None:
        overrides = (*overrides, f"output={str(out.absolute())!r}")
    loaded = load_recipe(recipe, overrides)
    folder = recipe.absolute().parent
    if dry_run:
        inputs = open_inputs(loaded, folder)
        destination = (folder / loaded.output).resolve()
        check_disk(inputs, destination)
        click.echo(f"would write {format_bytes(bundle_nbytes(inputs))} to {destination}", err=True)
        for num_draft_tokens, memory in inputs.memory.items():
            click.echo(
                f"with {num_draft_tokens} draft tokens: {memory.num_slots} expert slots of "
                f"{format_bytes(memory.slot_bytes)}, dense {format_bytes(memory.dense_bytes)}, "
                f"draft {format_bytes(memory.draft_bytes)}, KV cache "
                f"{format_bytes(memory.kv_cache_bytes)}, buffers "
                f"{format_bytes(memory.buffer_bytes)}",
                err=True,
            )
        return
    result = build(loaded, folder)
    click.echo(describe(result.report, result.plan.num_draft_tokens, result.timings), err=True)
    if not result.was_built:
        click.echo("up to date, nothing to do", err=True)
    click.echo(result.destination)


def main_build() -> NoReturn:
    """Entry point of ``specter-build``."""
    guarded(build_command)
