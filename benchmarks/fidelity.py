"""Routing recall and acceptance of drafts by method and bit width, on texts the model writes.

    python benchmarks/fidelity.py artifacts/demo-moe recipes/demo/prompts.jsonl

Drafts are calibrated on the text that ships with ``specter_build``. For each prompt the target
writes two texts, greedily and at temperature 0.9. Target and draft are then run over the same
tokens, each with its own keys and values (see ``specter_build.profile_routing``), and compared at
every position behind the prompt. Prints a Markdown table, and one JSON object as the last line.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from specter_build.calibration import make_sequences, read_texts
from specter_build.checkpoint import Checkpoint
from specter_build.fidelity import one_hot, routing_recall
from specter_build.profile_routing import COMPUTE_DTYPE, LayerPass, LayerRunner
from specter_build.quantize_draft import ExpertInputs, check_method, quantize_layer
from specter_build.recipe import CalibrationRecipe, DraftRecipe
from specter_runtime.config import GenerationLimits, SamplingConfig
from specter_runtime.draft_engine import SelfDrafter
from specter_runtime.experts import ExpertKey, ExpertWeights, PackedExperts, ResidentExperts
from specter_runtime.governor import Governor, Lookahead
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.speculative_decoder import SpeculativeDecoder
from specter_runtime.tokenizer import Tokenizer

TEXTS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=0.9)}
METHODS = ("rtn", "gptq", "awq")


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One draft on one set of texts; means over layers and positions."""

    text: str
    method: str
    clip: str
    bits: int
    symmetric: bool
    recall: float
    worst_recall: float
    set_exact: float
    acceptance: float
    relative_error: float
    num_fallback_experts: int
    quantize_seconds: float


@dataclass(frozen=True, slots=True)
class Draft:
    """Stand-ins of all experts and what making them took."""

    recipe: DraftRecipe
    provider: PackedExperts
    relative_error: float
    num_fallback_experts: int
    seconds: float


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--length", default=256, show_default=True, help="Tokens of a text, prompt included.")
@click.option("--group-size", default=32, show_default=True)
@click.option("--bits", "widths", multiple=True, type=int, default=(4, 3, 2), show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice(METHODS), default=METHODS)
@click.option("--asymmetric", is_flag=True, help="Store zero points.")
@click.option("--calibration-sequences", default=32, show_default=True, help="Of 256 tokens each.")
def main(
    checkpoint: Path,
    prompts: Path,
    length: int,
    group_size: int,
    widths: tuple[int, ...],
    methods: tuple[str, ...],
    asymmetric: bool,
    calibration_sequences: int,
) -> None:
    """Measure and print."""
    opened = Checkpoint(checkpoint)
    tokenizer = Tokenizer(checkpoint)
    prompt_ids = [
        tokenizer.encode(json.loads(line)["prompt"]) for line in prompts.read_text().splitlines()
    ]
    experts = {
        ExpertKey(layer, expert): opened.expert(ExpertKey(layer, expert))
        for layer in opened.config.moe_layers
        for expert in range(opened.config.num_experts)
    }
    recipes = [
        DraftRecipe.model_validate(
            {
                "method": method,
                "bits": bits,
                "group_size": group_size,
                "symmetric": not asymmetric,
                "clip": clip,
            }
        )
        for bits in widths
        for method in methods
        for clip in ("none", "mse")
    ]
    for recipe in recipes:
        check_method(recipe, opened.config)
    results: list[Fidelity] = []
    with torch.inference_mode():
        passes = calibrate(opened, experts, tokenizer, calibration_sequences)
        texts = {
            name: write_texts(opened, experts, prompt_ids, length, sampling)
            for name, sampling in TEXTS.items()
        }
        written = torch.stack([torch.arange(length) >= len(ids) for ids in prompt_ids])
        for recipe in recipes:
            draft = make_draft(opened, experts, recipe, passes)
            rows = [measure(opened, experts, texts[t], written, t, draft) for t in TEXTS]
            click.echo(f"{describe(recipe)}: recall {rows[0].recall:.4f}", err=True)
            results += rows
    print_table(results)
    click.echo(json.dumps([asdict(result) for result in results]))


def calibrate(
    checkpoint: Checkpoint,
    experts: dict[ExpertKey, ExpertWeights],
    tokenizer: Tokenizer,
    num_sequences: int,
) -> list[LayerPass]:
    """The target's pass through each layer on the calibration text."""
    recipe = CalibrationRecipe(num_sequences=num_sequences, sequence_length=256, seed=0)
    texts = read_texts(recipe, Path()).texts
    raw = json.loads((checkpoint.folder / "config.json").read_text())
    sequences = make_sequences(texts, tokenizer, recipe, raw.get("eos_token_id"))
    return run_layers(checkpoint, sequences, ResidentExperts(experts), lambda last: None)


def run_layers(
    checkpoint: Checkpoint,
    token_ids: torch.Tensor,  # [N, T]
    provider: ResidentExperts | PackedExperts,
    on_last: Callable[[torch.Tensor], None],
) -> list[LayerPass]:
    """One stream through all layers; ``on_last`` is given the final hidden states."""
    config = checkpoint.config
    runner = LayerRunner(config, checkpoint.family.bundle_names(), token_ids.shape[1])
    hidden = runner.embed(token_ids, checkpoint.dense_tensors(None))
    passes = []
    for index in range(config.num_hidden_layers):
        layer = runner.bind_layer(index, checkpoint.dense_tensors(index))
        passes.append(runner.run(layer, hidden, provider))
        hidden = passes[-1].hidden
    on_last(hidden)
    return passes


def make_draft(
    checkpoint: Checkpoint,
    experts: dict[ExpertKey, ExpertWeights],
    recipe: DraftRecipe,
    passes: Sequence[LayerPass],
) -> Draft:
    """Quantize all experts."""
    started = time.perf_counter()
    config, packed, layers = checkpoint.config, {}, []
    for layer, widths in zip(config.moe_layers, recipe.widths(config), strict=True):
        routing = passes[layer].routing
        assert routing is not None, "a routed layer gives a routing"
        inputs = ExpertInputs(passes[layer].mlp_input, routing, config.swiglu_limit)
        own = {key: weights for key, weights in experts.items() if key.layer == layer}
        layers.append(quantize_layer(own, recipe, widths, inputs))
        packed |= layers[-1].packed
    return Draft(
        recipe,
        PackedExperts(packed),
        sum(layer.relative_error for layer in layers) / len(layers),
        sum(len(layer.fallback_experts) for layer in layers),
        time.perf_counter() - started,
    )


def write_texts(
    checkpoint: Checkpoint,
    experts: dict[ExpertKey, ExpertWeights],
    prompt_ids: list[list[int]],
    length: int,
    sampling: SamplingConfig,
) -> torch.Tensor:
    """Token ids ``[N, length]``: the target's continuations, prompts included."""
    config = checkpoint.config
    tensors: dict[str, torch.Tensor] = {}
    for layer in (None, *range(config.num_hidden_layers)):
        tensors |= checkpoint.dense_tensors(layer)
    model = MoETransformer(config, tensors, checkpoint.family.bundle_names(), COMPUTE_DTYPE)
    provider = ResidentExperts(experts)
    decoder = SpeculativeDecoder(
        model,
        provider,
        SelfDrafter(model, provider, ()),
        prefetcher=None,
        kv_cache=KVCache(config, length, COMPUTE_DTYPE),
        governor=Governor([Lookahead(0)]),
        sampling=sampling,
    )
    texts = []
    for ids in prompt_ids:
        passes = decoder.generate(ids, GenerationLimits(length - len(ids)))
        texts.append([*ids, *(token for token_ids in passes for token in token_ids)])
    return torch.tensor(texts)


def measure(
    checkpoint: Checkpoint,
    experts: dict[ExpertKey, ExpertWeights],
    texts: torch.Tensor,
    written: torch.Tensor,  # [N, T] bool: not the prompt
    name: str,
    draft: Draft,
) -> Fidelity:
    """Run both streams over the texts and compare routes and predictions."""
    config = checkpoint.config
    last: list[torch.Tensor] = []
    target_passes = run_layers(checkpoint, texts, ResidentExperts(experts), last.append)
    draft_passes = run_layers(checkpoint, texts, draft.provider, last.append)
    recalls = []
    for pair in zip(target_passes, draft_passes, strict=True):
        target_routing, draft_routing = (layer_pass.routing for layer_pass in pair)
        if target_routing is not None and draft_routing is not None:
            shape = (*texts.shape, config.num_experts_per_tok)
            hot = (
                one_hot(routing.selected_experts.view(shape), config.num_experts)
                for routing in (target_routing, draft_routing)
            )
            recalls.append(routing_recall(*hot)[written])
    runner = LayerRunner(config, checkpoint.family.bundle_names(), texts.shape[1])
    heads = runner.compare_heads(last[0], last[1], checkpoint.dense_tensors(None))
    by_layer = torch.stack(recalls)  # [L, positions]
    assert isinstance(draft.recipe.bits, int), "one width for all"
    return Fidelity(
        text=name,
        method=draft.recipe.method,
        clip=draft.recipe.clip,
        bits=draft.recipe.bits,
        symmetric=draft.recipe.symmetric,
        recall=float(by_layer.mean()),
        worst_recall=float(by_layer.mean(1).min()),
        set_exact=float((by_layer == 1).to(torch.float32).mean()),
        acceptance=float(heads.agrees[written].to(torch.float32).mean()),
        relative_error=draft.relative_error,
        num_fallback_experts=draft.num_fallback_experts,
        quantize_seconds=draft.seconds,
    )


def describe(recipe: DraftRecipe) -> str:
    """Method, clipping and width."""
    return f"{recipe.method}, clip {recipe.clip}, {recipe.bits} bits"


def print_table(results: list[Fidelity]) -> None:
    """Rows are drafts; a figure is given for greedy / sampled text."""
    click.echo(
        "| bits | method | clip | recall greedy / sampled | worst layer | set-exact | acceptance "
        "| relative error |"
    )
    click.echo("|---|---|---|---|---|---|---|---|")
    drafts = dict.fromkeys((result.bits, result.method, result.clip) for result in results)
    for bits, method, clip in drafts:
        rows = [r for r in results if (r.bits, r.method, r.clip) == (bits, method, clip)]
        figures = (
            " / ".join(f"{getattr(row, figure):.4f}" for row in rows)
            for figure in ("recall", "worst_recall", "set_exact", "acceptance")
        )
        error = f"{rows[0].relative_error:.5f}"
        click.echo(f"| {bits} | {method} | {clip} | {' | '.join(figures)} | {error} |")


if __name__ == "__main__":
    main()
