"""``specter-run`` and ``specter-bench``: parse, call, print. No logic.

Text streams on stdout, everything else goes to stderr. Exit codes: 0 done, 2 bad input, 130 Ctrl-C.

Called by: the shell.  Next: session, measure_hardware.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from specter_runtime.errors import SpecterError
from specter_runtime.torch_environment import set_torch_environment
from specter_runtime.units import format_bytes, parse_bytes

if TYPE_CHECKING:  # torch is imported only when a command runs: --help answers at once
    from specter_runtime.config import SamplingConfig
    from specter_runtime.session import Session

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130


class ByteSize(click.ParamType[int]):
    """``4GiB``, ``500 MB`` or a plain number of bytes."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Parse; GB is 10**9, GiB is 2**30."""
        try:
            return parse_bytes(value)
        except ValueError as exc:
            self.fail(str(exc))


class FiniteRange(click.FloatRange):
    """A range that NaN and infinity are not in."""

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Parse and check."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number")
        return number


class DraftTokens(click.ParamType["int | None"]):
    """A number of tokens, or ``auto``."""

    name = "integer|auto"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | None:
        """Parse; ``auto`` is None."""
        if value in (None, "auto"):
            return None
        try:
            number = int(value)
        except ValueError:
            number = -1
        if not 0 <= number <= 64:
            self.fail(f"{value!r} is neither 'auto' nor a number from 0 to 64")
        return number


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to continue.")
@click.option(
    "--prompt-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="File with the text to continue.",
)
@click.option("--chat", is_flag=True, help="Converse on the terminal, with the chat template.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@click.option("--memory-budget", type=ByteSize(), help="Fast memory, e.g. 4GiB.")
@click.option(
    "--num-draft-tokens",
    type=DraftTokens(),
    default="auto",
    help="Tokens drafted a window; auto: what proves fastest.",
)
@click.option("--max-context", type=click.IntRange(1), help="Tokens of KV cache.")
@click.option("--device", type=click.Choice(["cpu"]), default="cpu", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float16", "float32"]),
    help="Precision of computation.",
)
@click.option("--temperature", type=FiniteRange(0), default=0.0, help="0 is greedy.")
@click.option("--top-k", type=click.IntRange(0), default=0, help="0 is off.")
@click.option("--top-p", type=FiniteRange(0, 1, min_open=True), default=1.0, help="1 is off.")
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0)
@click.option("--io-threads", type=click.IntRange(1, 64), default=2, show_default=True)
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads of computation.")
@click.option("--prefetch/--no-prefetch", default=True, help="Move experts ahead of verification.")
@click.option(
    "--predictor",
    type=click.Choice(["fitted", "router", "none"]),
    help="What moves experts ahead where nothing is drafted. Default: the plan's.",
)
@click.option(
    "--draft-stop/--no-draft-stop", default=True, help="End drafts where they cease to pay."
)
@click.option(
    "--governor/--no-governor", default=True, help="Let measured time decide what is left open."
)
@click.option("--verify", is_flag=True, help="Compare all hashes before decoding.")
@click.option("--stats", is_flag=True, help="Print measurements on stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def run(
    bundle: Path,
    prompt: str | None,
    prompt_file: Path | None,
    chat: bool,
    max_new_tokens: int,
    memory_budget: int | None,
    num_draft_tokens: int | None,
    max_context: int | None,
    device: str,
    dtype: Any,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int,
    io_threads: int,
    threads: int | None,
    prefetch: bool,
    predictor: Any,
    draft_stop: bool,
    governor: bool,
    verify: bool,
    stats: bool,
    as_json: bool,
) -> None:
    """Continue a prompt with the model in BUNDLE.

    What is not given is taken from the bundle's plan.
    """
    if sum((prompt is not None, prompt_file is not None, chat)) != 1:
        raise click.UsageError("give exactly one of --prompt, --prompt-file and --chat")
    if chat and (stats or as_json):
        raise click.UsageError("--chat does not go with --stats or --json")
    from specter_runtime.config import RuntimeConfig, SamplingConfig
    from specter_runtime.session import Session

    config = RuntimeConfig(
        memory_budget_bytes=memory_budget,
        num_draft_tokens=num_draft_tokens,
        dtype=dtype,
        max_context_tokens=max_context,
        num_io_threads=io_threads,
        num_threads=threads,
        prefetch=prefetch,
        predictor=predictor,
        governor=governor,
        draft_stop=draft_stop,
        verify_hashes=verify,
    )
    sampling = SamplingConfig(temperature, top_k, top_p, seed)
    with Session.open(bundle, config) as session:
        if chat:
            _converse(session, max_new_tokens, sampling)
            return
        text = prompt if prompt_file is None else _read_text(prompt_file)
        prompt_ids = session.tokenizer.encode(text or "")
        pieces = _stream(session, prompt_ids, max_new_tokens, sampling)
        if stats:
            click.echo(_describe(session.to_dict()), err=True)
        if as_json:
            result = {"prompt": text, "text": "".join(pieces), "device": device}
            click.echo(json.dumps(result | dict(session.to_dict()), ensure_ascii=False))


def _read_text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise SpecterError(f"{path}: not UTF-8 text: {exc}") from exc


def _stream(
    session: Session, prompt_ids: list[int], max_new_tokens: int, sampling: SamplingConfig
) -> list[str]:
    pieces = []
    for piece in session.stream(prompt_ids, max_new_tokens, sampling):
        click.echo(piece, nl=False)
        pieces.append(piece)
    click.echo()
    return pieces


def _converse(session: Session, max_new_tokens: int, sampling: SamplingConfig) -> None:
    """Read a line, answer it, until the input ends. An empty line is ignored."""
    session.tokenizer.check_chat_template()
    messages: list[dict[str, str]] = []
    while True:
        click.echo("> ", nl=False, err=True)
        try:
            line = sys.stdin.readline()
        except UnicodeDecodeError as exc:
            raise SpecterError(f"standard input is not UTF-8 text: {exc}") from exc
        if not line:
            return
        if not line.strip():
            continue
        messages.append({"role": "user", "content": line.strip()})
        prompt_ids = session.tokenizer.encode_chat(messages)
        answer = "".join(_stream(session, prompt_ids, max_new_tokens, sampling))
        messages.append({"role": "assistant", "content": answer})


def _describe(stats: Mapping[str, Any]) -> str:
    """The measurements of one generation, for people."""

    def number(name: str, scale: float = 1.0, digits: int = 1) -> str:
        value = stats[name]
        return "-" if value is None else f"{value * scale:.{digits}f}"

    memory = stats["memory"]
    per_token = stats["bytes_per_token"]
    kinds = ("dense_bytes", "draft_bytes", "predictor_bytes", "kv_cache_bytes", "buffer_bytes")
    parts = [f"{kind.removesuffix('_bytes')} {format_bytes(memory[kind])}" for kind in kinds]
    parts.append(f"{memory['num_slots']} slots of {format_bytes(memory['slot_bytes'])}")
    ways = (f"{way}: {count}" for way, count in stats["windows_by_lookahead"].items())
    lines = [
        f"tokens      {stats['num_prompt_tokens']} in, {stats['num_new_tokens']} out",
        f"TTFT        {number('ttft_seconds', 1e3)} ms",
        f"TPOT        {number('tpot_seconds', 1e3)} ms",
        f"acceptance  {number('acceptance_rate', 100)} % of {stats['num_drafted']} drafted, "
        f"{number('mean_acceptance_length', digits=2)} tokens a target pass",
        f"windows     {', '.join(ways) or '-'}",
        f"experts     {stats['hits']} hits, {stats['late_hits']} late hits, "
        f"{stats['misses']} misses; {stats['useful_prefetches']} of {stats['prefetch_loads']} "
        "prefetches used",
        f"link        {'-' if per_token is None else format_bytes(per_token)} a token, busy "
        f"{number('link_busy_share', 100)} % of the time, stalled {stats['stall_seconds']:.3f} s"
        f"{'' if stats['direct_io'] else ' (no direct I/O)'}",
        f"memory      {', '.join(parts)}; budget {format_bytes(memory['budget_bytes'])}",
    ]
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--measure-hardware",
    "profile",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where to write this machine's profile, for specter-simulate --hardware.",
)
@click.option("--name", help="What the profile calls the machine; the file's name if not given.")
@click.option(
    "--memory-budget", type=ByteSize(), help="In which a few tokens' experts are to be held."
)
@click.option("--threads", type=click.IntRange(min=1), help="Of all that computes.")
def bench_command(
    bundle: Path, profile: Path, name: str | None, memory_budget: int | None, threads: int | None
) -> None:
    """Measure this machine with the experts of BUNDLE.

    Takes half a minute, in which nothing else should run.
    """
    import torch

    from specter_runtime.measure_hardware import measure_hardware
    from specter_runtime.whole_file import check_writable, write_whole

    check_writable(profile)
    if threads is not None:
        torch.set_num_threads(threads)
    text = measure_hardware(bundle, name or profile.stem, memory_budget).to_json()
    write_whole(profile, text)
    click.echo(text, nl=False)


def guarded(command: click.Command) -> NoReturn:
    """Run a command; a ``SpecterError`` becomes a message and exit code 2, Ctrl-C becomes 130."""
    set_torch_environment()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        code = command.main(standalone_mode=False)
    except SpecterError as exc:
        click.echo(f"error: {exc}", err=True)
        code = EXIT_BAD_INPUT
    except click.ClickException as exc:
        exc.show()
        code = exc.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo(err=True)
        code = EXIT_INTERRUPTED
    except SystemExit:  # click's answer when the reader of stdout has gone, e.g. `| head`
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def main_run() -> NoReturn:
    """Entry point of ``specter-run``."""
    guarded(run)


def main_bench() -> NoReturn:
    """Entry point of ``specter-bench``."""
    guarded(bench_command)
