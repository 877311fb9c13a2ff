"""One routed layer: route, fetch experts, sum.

The routing is returned beside the output: it is what the draft is for. Experts arrive in whatever
order the provider has them; their outputs are summed in ascending expert order in float32, so
neither cache state nor arrival order changes a bit.

Called by: model.  Next: experts.ExpertProvider.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from specter_runtime.experts import ExpertProvider, ExpertWeights
from specter_runtime.layers import swiglu


@dataclass(frozen=True, slots=True)
class Routing:
    """What a router chose for T tokens of one layer, most probable expert first.

    Attributes:
        layer: the decoder layer.
        selected_experts: int64 ``[T, K]``.
        routing_weights: float32 ``[T, K]``, renormalized where the family does so.
    """

    layer: int
    selected_experts: torch.Tensor
    routing_weights: torch.Tensor

    def expert_ids(self) -> list[int]:
        """The distinct experts, ascending."""
        return sorted(set(self.selected_experts.flatten().tolist()))


def route(
    hidden: torch.Tensor,  # [T, D]
    router: torch.Tensor,  # [E, D]
    num_experts_per_tok: int,
    norm_topk_prob: bool,
    layer: int,
) -> Routing:
    """Softmax over all experts in float32, then top-k, then renormalization if asked for.

    Softmax before top-k: Mixtral, OLMoE and Qwen3-MoE in transformers. Whatever the model's dtype,
    router logits are float32: rounded to bfloat16 they would tie.
    """
    logits = functional.linear(hidden.to(torch.float32), router)  # [T, E]
    probabilities = logits.softmax(dim=-1)
    weights, selected = probabilities.topk(num_experts_per_tok, dim=-1)  # [T, K]
    if norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return Routing(layer, selected, weights)


def mix_experts(
    blocks: Sequence[torch.Tensor],  # each [T, D]
    routings: Sequence[Routing],  # one a block
    provider: ExpertProvider,
) -> list[torch.Tensor]:
    """Weighted sum of each row's experts, block by block; an expert is fetched once for all blocks.

    Experts that the provider leaves out are skipped, and a row's other weights are scaled so that
    their sum stays what it was.
    """
    layer = routings[0].layer
    wanted = sorted({expert for routing in routings for expert in routing.expert_ids()})
    sums = [_BlockSum(block, routing) for block, routing in zip(blocks, routings, strict=True)]
    served: set[int] = set()
    for expert, weights in provider.experts(layer, wanted):
        served.add(expert)
        compute_weights = weights.to(blocks[0].dtype)
        for block_sum in sums:
            block_sum.add(expert, compute_weights)
    return [block_sum.total(served) for block_sum in sums]


class _BlockSum:
    """Collects one block's expert outputs and sums them in expert order."""

    def __init__(self, hidden: torch.Tensor, routing: Routing) -> None:
        self._hidden = hidden
        self._routing = routing
        self._expert_ids = frozenset(routing.expert_ids())
        self._outputs: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}

    def add(self, expert: int, weights: ExpertWeights) -> None:
        """Compute ``expert`` for the rows of this block that chose it."""
        if expert not in self._expert_ids:
            return
        rows, ranks = torch.where(self._routing.selected_experts == expert)
        output = swiglu(self._hidden[rows], weights.gate_proj, weights.up_proj, weights.down_proj)
        self._outputs[expert] = (rows, ranks, output)

    def total(self, served: set[int]) -> torch.Tensor:
        """The weighted sum ``[T, D]``."""
        routing_weights = self._routing.routing_weights
        if not self._expert_ids <= served:
            routing_weights = renormalize(self._routing, served)
        total = torch.zeros(self._hidden.shape, dtype=torch.float32)
        for expert in sorted(self._outputs):
            rows, ranks, output = self._outputs[expert]
            total[rows] += routing_weights[rows, ranks].unsqueeze(-1) * output.to(torch.float32)
        return total.to(self._hidden.dtype)


def renormalize(routing: Routing, served: set[int]) -> torch.Tensor:
    """Routing weights ``[T, K]`` with left-out experts at 0 and each row's sum kept.

    A row none of whose experts is served keeps zeros: the layer then adds nothing to it.
    """
    kept = torch.isin(routing.selected_experts, torch.tensor(sorted(served), dtype=torch.int64))
    weights = routing.routing_weights * kept
    remaining = weights.sum(-1, keepdim=True)
    scale = routing.routing_weights.sum(-1, keepdim=True) / remaining
    return torch.where(remaining > 0, weights * scale, torch.zeros_like(weights))
