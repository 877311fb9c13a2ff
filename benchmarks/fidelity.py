"""Routing recall and acceptance of drafts at several bit widths, on texts the model writes itself.

    python benchmarks/fidelity.py artifacts/demo-moe recipes/demo/prompts.jsonl

For each prompt the target writes two texts, greedily and at temperature 0.9. Target and draft are
then run over the same tokens, each with its own keys and values (see
``specter_build.profile_routing``), and compared at every position behind the prompt. Prints a
Markdown table, and one JSON object as the last line.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from specter_build.checkpoint import Checkpoint
from specter_build.fidelity import one_hot, routing_recall
from specter_build.profile_routing import COMPUTE_DTYPE, LayerRunner
from specter_build.quantize_draft import quantize_layer
from specter_build.recipe import DraftRecipe
from specter_runtime.config import GenerationLimits, SamplingConfig
from specter_runtime.draft_engine import SelfDrafter
from specter_runtime.experts import ExpertKey, ExpertWeights, PackedExperts, ResidentExperts
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.speculative_decoder import SpeculativeDecoder
from specter_runtime.tokenizer import Tokenizer

TEXTS = {"greedy": SamplingConfig(), "sampled": SamplingConfig(temperature=0.9)}


@dataclass(frozen=True, slots=True)
class Fidelity:
    """One draft on one set of texts; means over layers and positions."""

    text: str
    bits: int
    symmetric: bool
    recall: float
    worst_recall: float
    set_exact: float
    acceptance: float


@click.command()
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--length", default=256, show_default=True, help="Tokens of a text, prompt included.")
@click.option("--group-size", default=32, show_default=True)
@click.option("--bits", "widths", multiple=True, type=int, default=(8, 4, 3, 2))
def main(
    checkpoint: Path, prompts: Path, length: int, group_size: int, widths: tuple[int, ...]
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
    results: list[Fidelity] = []
    with torch.inference_mode():
        for name, sampling in TEXTS.items():
            texts = write_texts(opened, experts, prompt_ids, length, sampling)
            written = torch.stack([torch.arange(length) >= len(ids) for ids in prompt_ids])
            for bits in widths:
                for symmetric in (True, False):
                    draft = DraftRecipe(bits=bits, group_size=group_size, symmetric=symmetric)
                    results.append(measure(opened, experts, texts, written, name, draft))
    print_table(results)
    click.echo(json.dumps([asdict(result) for result in results]))


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
        num_draft_tokens=0,
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
    draft_recipe: DraftRecipe,
) -> Fidelity:
    """Run both streams over the texts and compare routes and predictions."""
    config = checkpoint.config
    runner = LayerRunner(config, checkpoint.family.bundle_names(), texts.shape[1])
    common = checkpoint.dense_tensors(None)
    target = draft = runner.embed(texts, common)
    recalls = []
    for index in range(config.num_hidden_layers):
        layer = runner.bind_layer(index, checkpoint.dense_tensors(index))
        layer_experts = {key: weights for key, weights in experts.items() if key.layer == index}
        packed = quantize_layer(layer_experts, draft_recipe).packed
        target, target_routing = runner.run(layer, target, ResidentExperts(layer_experts))
        draft, draft_routing = runner.run(layer, draft, PackedExperts(packed, COMPUTE_DTYPE))
        if target_routing is not None and draft_routing is not None:
            shape = (*texts.shape, config.num_experts_per_tok)
            hot = (
                one_hot(routing.selected_experts.view(shape), config.num_experts)
                for routing in (target_routing, draft_routing)
            )
            recalls.append(routing_recall(*hot)[written])
    heads = runner.compare_heads(target, draft, common)
    by_layer = torch.stack(recalls)  # [L, positions]
    return Fidelity(
        text=name,
        bits=draft_recipe.bits,
        symmetric=draft_recipe.symmetric,
        recall=float(by_layer.mean()),
        worst_recall=float(by_layer.mean(1).min()),
        set_exact=float((by_layer == 1).to(torch.float32).mean()),
        acceptance=float(heads.agrees[written].to(torch.float32).mean()),
    )


def print_table(results: list[Fidelity]) -> None:
    """Rows are drafts; a figure is given for greedy / sampled text."""
    click.echo(
        "| bits | zero points | recall greedy / sampled | worst layer | set-exact | acceptance |"
    )
    click.echo("|---|---|---|---|---|---|")
    drafts = dict.fromkeys((result.bits, result.symmetric) for result in results)
    for bits, symmetric in drafts:
        rows = [r for r in results if (r.bits, r.symmetric) == (bits, symmetric)]
        figures = (
            " / ".join(f"{getattr(row, figure):.3f}" for row in rows)
            for figure in ("recall", "worst_recall", "set_exact", "acceptance")
        )
        click.echo(f"| {bits} | {'no' if symmetric else 'yes'} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
