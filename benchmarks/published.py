"""Published figures of other systems, and what the simulator makes of the same setting.

    python -m benchmarks.published

Models are known by their shapes, routes by what is published of them (``synthetic_routes``, fitted
once for each model), machines by the profiles that ship. Nothing is fitted to a row. What a source
does not say is assumed alike for all rows: links at the rate of their kind as others measured it,
a quantized draft that finds 97.7 % of the target's experts and 95 % of its tokens, drafts of 4.125
bits a weight. Prints how well the routes fit, a table, for each row that is off by more than 15 %
which unknown is to blame, and JSON as the last line.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import click
import torch

from specter_build.synthetic_routes import (
    RoutingModel,
    RoutingStatistics,
    choose,
    fit,
    measure,
)
from specter_runtime.experts import ExpertKey
from specter_runtime.hardware import Hardware, load_hardware
from specter_runtime.simulator import Policy, Routes, Shape, Simulated, simulate

TOLERANCE = 0.15
NUM_PROMPT_TOKENS, NUM_TOKENS, NUM_TEXTS = 64, 192, 2
DRAFT_BITS = 4.125
RECALL, ACCEPTANCE = 0.977, 0.95
NUM_UNION_TOKENS, NUM_UNION_LAYERS = 400, 8


@dataclass(frozen=True, slots=True)
class Model:
    """A model as its public configuration has it.

    Attributes:
        num_dense_layers: of the layers, those without routed experts.
        attention_weights: of a layer.
        shared_size: intermediate size of what every token uses beside its routed experts.
        published: of its routing.
    """

    num_layers: int
    num_dense_layers: int
    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    attention_weights: int
    shared_size: int
    vocab_size: int
    published: RoutingStatistics

    @property
    def expert_weights(self) -> int:
        """Of a routed expert."""
        return 3 * self.hidden_size * self.moe_intermediate_size

    def shape(self, bits: float, *, drafts: bool) -> Shape:
        """For the simulator, with experts of so many bits a weight; the rest is bfloat16."""
        layer = self.attention_weights + 3 * self.hidden_size * self.shared_size
        nbytes = int(self.expert_weights * bits / 8)
        return Shape(
            moe_layers=tuple(range(self.num_dense_layers, self.num_layers)),
            num_experts=self.num_experts,
            dense_bytes=(2 * layer,) * self.num_layers,
            common_bytes=2 * self.vocab_size * self.hidden_size,
            shard_bytes=nbytes,
            slot_bytes=nbytes,
            is_packed=False,
            stand_in_bytes=int(self.expert_weights * DRAFT_BITS / 8) if drafts else 0,
            expert_num_weights=self.expert_weights,
        )


# Shapes: the models' public configurations. Routing: hit rates of LRU caches from MoE-SpeQ
# (arXiv 2511.14102, table 3) for DeepSeek-V2-Lite, of the hottest experts from Fiddler (2402.07033)
# for Mixtral, experts kept from one token to the next from the notes of BigMoeOnEdge for Qwen. For
# Phi and DeepSeek-MoE nothing is published: uniform.
MODELS = {
    "Mixtral-8x7B": Model(
        32,
        0,
        4096,
        14336,
        8,
        2,
        41_900_000,
        0,
        32_000,
        RoutingStatistics(hottest_hits={56 / 256: 0.252, 125 / 256: 0.53}),
    ),
    "Phi-3.5-MoE": Model(32, 0, 4096, 6400, 16, 2, 41_900_000, 0, 32_064, RoutingStatistics()),
    "Qwen1.5-MoE": Model(
        24, 0, 2048, 1408, 60, 4, 16_800_000, 5632, 151_936, RoutingStatistics(repeated=0.40)
    ),
    "DeepSeek-V2-Lite": Model(
        27,
        1,
        2048,
        1408,
        64,
        6,
        13_800_000,
        2816,
        102_400,
        RoutingStatistics({6: 0.292, 16: 0.509, 22: 0.611, 32: 0.766, 48: 0.958}),
    ),
    "DeepSeek-MoE-16B": Model(
        28, 1, 2048, 1408, 64, 6, 16_800_000, 2816, 102_400, RoutingStatistics()
    ),
    "Qwen3-30B-A3B": Model(
        48, 0, 2048, 768, 128, 8, 18_900_000, 0, 151_936, RoutingStatistics(repeated=0.40)
    ),
}


@cache
def routing(name: str) -> tuple[RoutingModel, float]:
    """How a model routes, and how far that is from what is published."""
    model = MODELS[name]
    return fit(model.num_experts, model.num_experts_per_tok, model.published)


@cache
def texts(name: str) -> tuple[Routes, ...]:
    """Texts with a draft."""
    model, (router, _) = MODELS[name], routing(name)
    num_layers = model.num_layers - model.num_dense_layers
    return tuple(
        router.routes(
            NUM_TOKENS,
            NUM_PROMPT_TOKENS,
            num_layers,
            recall=RECALL,
            acceptance=ACCEPTANCE,
            seed=seed,
        )
        for seed in range(NUM_TEXTS)
    )


def run(
    name: str, hardware: Hardware, policy: Policy, slots_a_layer: float, bits: float = 16.0
) -> Simulated:
    """Decode a model's texts."""
    model, routes = MODELS[name], texts(name)
    layers = range(model.num_dense_layers, model.num_layers)
    shape = model.shape(bits, drafts=policy.num_draft_tokens > 0)
    counts = sum(
        torch.nn.functional.one_hot(text.selected, model.num_experts).sum((0, 2)) for text in routes
    )
    order = torch.as_tensor(counts).flatten().argsort(descending=True, stable=True).tolist()
    hottest = [ExpertKey(layers[i // model.num_experts], i % model.num_experts) for i in order]
    num_slots = max(model.num_experts_per_tok, round(slots_a_layer * len(layers)))
    return simulate(shape, hardware, policy, num_slots, routes, hottest)


A100, RTX_4090 = load_hardware("a100-40gb"), load_hardware("rtx-4090")
A6000 = replace(load_hardware("rtx-3090"), name="RTX A6000, PCIe 4.0 x16")
A5000 = replace(load_hardware("rtx-3090"), name="RTX A5000, PCIe 4.0 x16")
T4 = replace(
    A100,
    name="Tesla T4, PCIe 3.0 x16",
    link_bytes_per_second=12e9,
    memory_bytes_per_second=240e9,
    packed_bytes_per_second=240e9,
    multiplies_per_second=30e12,
)
FLASH = replace(RTX_4090, name="flash, 4 GB/s", link_bytes_per_second=4e9)
LRU = Policy(eviction="lru", overlap=False)
EARLY = Policy(eviction="lru", foresight="router", recall=(0.84,))


def speculative(num_draft_tokens: int, *, prefetches: bool = True) -> Policy:
    """As MoE-SpeQ decodes: a quantized copy drafts, its routes are fetched ahead."""
    return Policy(
        num_draft_tokens,
        is_governed=False,
        eviction="lru",
        foresight="draft" if prefetches else "none",
        draft_stop=False,
    )


def milliseconds(
    name: str, hardware: Hardware, policy: Policy, slots: float, bits: float = 16.0
) -> float:
    """TPOT."""
    return run(name, hardware, policy, slots, bits).tpot_seconds * 1e3


def pass_ratio(name: str, hardware: Hardware, num_rows: int, slots: float) -> float:
    """Time of a pass of so many rows, experts on demand, to that of a pass of one."""
    rows = replace(speculative(num_rows - 1, prefetches=False), overlap=False)
    many, one = run(name, hardware, rows, slots), run(name, hardware, LRU, slots)
    passes = many.compute_seconds + many.stall_seconds + many.overhead_seconds
    return passes * many.mean_acceptance_length / one.tpot_seconds


def union(num_experts: int, num_chosen: int, repeated: float | None, num_tokens: int) -> float:
    """Experts of a layer that a window uses, of a model of which only ``repeated`` is known."""
    router, _ = fit(num_experts, num_chosen, RoutingStatistics(repeated=repeated))
    selected = choose(router.logits(NUM_UNION_TOKENS, NUM_UNION_LAYERS, seed=0), num_chosen)
    wanted = RoutingStatistics(unions={num_tokens: 0.0})
    return measure(selected, num_experts, wanted).unions[num_tokens]


def gain(name: str, hardware: Hardware, policy: Policy, slots: float) -> float:
    """How many times faster than reading on demand."""
    return milliseconds(name, hardware, LRU, slots) / milliseconds(name, hardware, policy, slots)


@dataclass(frozen=True, slots=True)
class Row:
    """A published figure.

    Attributes:
        source: where it is from.
        what: the setting.
        unit: of the figure.
        published: the figure.
        simulate: the same.
        unknown: what is to blame where it is off.
    """

    source: str
    what: str
    unit: str
    published: float
    simulate: Callable[[], float]
    unknown: str = ""


PAGEABLE = "the link of a framework that does not pin its memory, some 10 GB/s"
SPEQ = "MoE-SpeQ, arXiv 2511.14102"
ROWS = (
    Row(
        SPEQ,
        "MoE-SpeQ, Phi, A100, K = 16, 2 slots a layer",
        "ms a token",
        163.1,
        lambda: milliseconds("Phi-3.5-MoE", A100, speculative(16), 2),
        "the share of drafted tokens accepted, and how far real unions are below uniform ones",
    ),
    Row(
        SPEQ,
        "Mixtral-Offloading, Phi, A100, 2 slots a layer",
        "ms a token",
        536.7,
        lambda: milliseconds("Phi-3.5-MoE", A100, EARLY, 2),
        PAGEABLE,
    ),
    Row(
        SPEQ,
        "Mixtral-Offloading, Phi, A100, 6 slots a layer (the same memory)",
        "ms a token",
        351.8,
        lambda: milliseconds("Phi-3.5-MoE", A100, EARLY, 6.1),
        PAGEABLE,
    ),
    Row(
        SPEQ,
        "gain of Mixtral-Offloading by those 4 slots",
        "ratio",
        351.8 / 536.7,
        lambda: (
            milliseconds("Phi-3.5-MoE", A100, EARLY, 6.1)
            / milliseconds("Phi-3.5-MoE", A100, EARLY, 2)
        ),
        "how Phi routes: nothing is published, uniform is assumed",
    ),
    Row(
        SPEQ,
        "MoE-SpeQ, Qwen1.5-MoE, A100, K = 8, 15 slots a layer",
        "ms a token",
        74.1,
        lambda: milliseconds("Qwen1.5-MoE", A100, speculative(8), 15.5),
        "time of the framework's own between kernels",
    ),
    Row(
        SPEQ,
        "Mixtral-Offloading, Qwen1.5-MoE, A100, 15 slots a layer",
        "ms a token",
        185.0,
        lambda: milliseconds("Qwen1.5-MoE", A100, EARLY, 15.5),
        PAGEABLE,
    ),
    Row(
        SPEQ,
        "MoE-SpeQ, DeepSeek-V2-Lite, A100, K = 16, 16 slots a layer",
        "ms a token",
        1e3 / 13.02,
        lambda: milliseconds("DeepSeek-V2-Lite", A100, speculative(16), 16),
        "time of the framework's own between kernels",
    ),
    Row(
        SPEQ,
        "the same without prefetch",
        "ratio",
        13.02 / 12.37,
        lambda: (
            milliseconds("DeepSeek-V2-Lite", A100, speculative(16, prefetches=False), 16)
            / milliseconds("DeepSeek-V2-Lite", A100, speculative(16), 16)
        ),
        "what else their run without prefetch still does ahead",
    ),
    Row(
        "ProMoE, arXiv 2410.22134",
        "LRU on half of DeepSeek-MoE-16B, RTX 4090",
        "ms a token",
        67.9,
        lambda: milliseconds("DeepSeek-MoE-16B", RTX_4090, LRU, 32),
        "how DeepSeek-MoE routes: nothing is published, uniform is assumed",
    ),
    Row(
        "ProMoE, arXiv 2410.22134",
        "of it, waiting for experts",
        "ms a token",
        58.1,
        lambda: run("DeepSeek-MoE-16B", RTX_4090, LRU, 32).stall_seconds * 1e3,
        "how DeepSeek-MoE routes: nothing is published, uniform is assumed",
    ),
    Row(
        "MoE-Infinity, arXiv 2401.14361",
        "MoE-Infinity, DeepSeek-V2-Lite, RTX A5000, 18 GB of experts",
        "ms a token",
        155.0,
        lambda: milliseconds("DeepSeek-V2-Lite", A5000, LRU, 40),
        "time of the framework's own: 104 of its 155 ms are not spent waiting",
    ),
    Row(
        "MoE-Infinity, arXiv 2401.14361",
        "of it, waiting for experts",
        "ms a token",
        51.0,
        lambda: run("DeepSeek-V2-Lite", A5000, LRU, 40).stall_seconds * 1e3,
        "its prompts are switched at every request: caches are colder than in one long text",
    ),
    Row(
        "Mixtral-Offloading, arXiv 2312.17238",
        "LRU of 4 experts a layer and next gate, T4, 2 bits",
        "ms a token",
        1e3 / 2.092,
        lambda: milliseconds("Mixtral-8x7B", T4, EARLY, 4, 2.6),
        "dequantizing 2-bit weights, which took most of their time",
    ),
    Row(
        "DraftExpert, arXiv 2607.24434",
        "verifying 5 rows, DeepSeek-V2-Lite, from flash: passes of one row",
        "ratio",
        3.10,
        lambda: pass_ratio("DeepSeek-V2-Lite", FLASH, 5, 6),
        "the slots of their cache: a token's experts are assumed",
    ),
    Row(
        "DraftExpert, arXiv 2607.24434",
        "the same from host memory, RTX 4090",
        "ratio",
        2.35,
        lambda: pass_ratio("DeepSeek-V2-Lite", RTX_4090, 5, 6),
        "time of the framework's own: it takes 457 ms for a token whose experts cross in 112",
    ),
    Row(
        "Cascade, arXiv 2506.20675",
        "verifying 8 rows, Mixtral, all resident: passes of one row",
        "ratio",
        2.65,
        lambda: pass_ratio("Mixtral-8x7B", RTX_4090, 8, 8),
        "batched kernels' own cost of a row",
    ),
    Row(
        "Speculating Experts, arXiv 2603.19289",
        "share of the time in transfers, Qwen3-30B on demand, RTX A6000",
        "share",
        0.86,
        lambda: _transfer_share("Qwen3-30B-A3B", A6000, 8),
        "their kernels' time",
    ),
    Row(
        "Speculating Experts, arXiv 2603.19289",
        "gain by the next layer's experts, Qwen3-30B, RTX A6000",
        "ratio",
        1.115,
        lambda: gain("Qwen3-30B-A3B", A6000, replace(EARLY, recall=(0.886,)), 8),
        "their kernels' time",
    ),
    Row(
        "ProMoE, arXiv 2410.22134",
        "gain by a learned predictor over LRU, DeepSeek-MoE-16B, RTX 4090",
        "ratio",
        1.31,
        lambda: gain(
            "DeepSeek-MoE-16B",
            RTX_4090,
            Policy(eviction="lru", foresight="fitted", recall=(0.847, 0.847)),
            32,
        ),
        "here a predictor is asked only where a read is waited for, theirs at every layer",
    ),
    Row(
        "EcoSpec, arXiv 2607.12696",
        "experts that 4 tokens use, DeepSeek-V3.1",
        "experts",
        31.4,
        lambda: union(256, 8, None, 4),
    ),
    Row(
        "EcoSpec, arXiv 2607.12696",
        "experts that 4 tokens use, Qwen3-235B, of which 40 % are the token's before",
        "experts",
        23.7,
        lambda: union(128, 8, 0.40, 4),
        "verified tokens are a tree's, not a text's",
    ),
    Row(
        "EcoSpec, arXiv 2607.12696",
        "experts that 4 tokens use, GPT-OSS-120B, of which 18 % are the token's before",
        "experts",
        11.6,
        lambda: union(128, 4, 0.18, 4),
        "verified tokens are a tree's, not a text's",
    ),
    Row(
        "MoE-Spec, arXiv 2602.16052",
        "experts that 127 tokens use, OLMoE, of which nothing else is known",
        "experts",
        54.0,
        lambda: union(64, 8, None, 127),
        "how OLMoE routes: uniform is assumed",
    ),
)


def _transfer_share(name: str, hardware: Hardware, slots: float) -> float:
    found = run(name, hardware, LRU, slots)
    return found.stall_seconds / found.tpot_seconds


@click.command()
def main() -> None:
    """Simulate and print."""
    click.echo("| model | published of its routing | logits that stay | correlation | misfit |")
    click.echo("|---" * 5 + "|")
    for name, model in MODELS.items():
        router, misfit = routing(name)
        click.echo(
            f"| {name} | {_known(model.published)} | {router.fixed_share:.2f} "
            f"| {router.correlation:.2f} | {misfit:.3f} |"
        )
    click.echo("\n| source | setting | published | simulated | ratio | to blame |")
    click.echo("|---" * 6 + "|")
    records: list[Mapping[str, Any]] = []
    for row in ROWS:
        found = row.simulate()
        ratio = found / row.published
        is_near = abs(ratio - 1) <= TOLERANCE
        click.echo(
            f"| {row.source} | {row.what} | {row.published:.3g} {row.unit} | {found:.3g} "
            f"| {ratio:.2f} | {'' if is_near else row.unknown} |"
        )
        records.append(
            {"source": row.source, "what": row.what, "published": row.published, "simulated": found}
        )
    num_near = sum(abs(r["simulated"] / r["published"] - 1) <= TOLERANCE for r in records)
    click.echo(f"\n{num_near} of {len(ROWS)} within {TOLERANCE:.0%}")
    click.echo(json.dumps({"rows": records}))


def _known(published: RoutingStatistics) -> str:
    """What is published, in words."""
    names = {
        "LRU hit rates": published.lru_hits,
        "unions": published.unions,
        "repeated experts": published.repeated,
        "hits of the hottest": published.hottest_hits,
    }
    return ", ".join(name for name, value in names.items() if value) or "nothing: uniform"


if __name__ == "__main__":
    main()
