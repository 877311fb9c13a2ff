"""One routed layer: route, fetch experts, sum.

The routing is returned beside the output: it is what the draft is for. Experts arrive in whatever
order the provider has them; their outputs are summed in ascending expert order in float32, so
neither cache state nor arrival order changes a bit.

Called by: model.  Next: experts.ExpertProvider.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from specter_runtime.config import RoutingConfig
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
    tensors: Mapping[str, torch.Tensor],
    routing: RoutingConfig,
    num_experts_per_tok: int,
    layer: int,
) -> Routing:
    """Choose each token's experts; everything in float32, whatever the model's dtype.

    Rounded to bfloat16, router logits and correction biases would tie.

    Args:
        hidden: the router's input.
        tensors: ``router`` ``[E, D]``, and ``router_bias``, ``correction_bias`` where there are.
        routing: how scores become choices and weights.
        num_experts_per_tok: experts chosen for a token.
        layer: for the record.
    """
    logits = functional.linear(
        hidden.to(torch.float32), tensors["router"], tensors.get("router_bias")
    )  # [T, E]
    if routing.scoring == "sparsemixer":
        selected, weights = _sparsemixer(logits, num_experts_per_tok, routing.jitter_eps)
    elif routing.scoring == "softmax_topk":
        chosen, selected = logits.topk(num_experts_per_tok, dim=-1)
        weights = chosen.softmax(dim=-1)
    else:
        scores = logits.softmax(dim=-1) if routing.scoring == "softmax" else logits.sigmoid()
        choice = scores
        if "correction_bias" in tensors:  # decides who is chosen, not how much they count
            choice = choice + tensors["correction_bias"].flatten()
        choice = _within_groups(choice, routing)
        selected = choice.topk(num_experts_per_tok, dim=-1).indices  # [T, K]
        weights = scores.gather(-1, selected)
    if routing.norm_topk_prob:
        weights = weights / weights.sum(dim=-1, keepdim=True).clamp(min=routing.norm_min)
    if routing.routed_scaling_factor != 1.0:
        weights = weights * routing.routed_scaling_factor
    return Routing(layer, selected, weights)


def _within_groups(choice: torch.Tensor, routing: RoutingConfig) -> torch.Tensor:
    """Rule out the experts of all but the best ``topk_group`` groups: ``[T, E]``.

    Source: arXiv 2405.04434, section 2.2.2 (best expert), arXiv 2412.19437, section 2.1.2 (sum of
    the best two).
    """
    if routing.topk_group >= routing.n_group:
        return choice
    grouped = choice.view(choice.shape[0], routing.n_group, -1)  # [T, groups, E / groups]
    best = grouped.topk(1 if routing.group_score == "max" else 2, dim=-1).values.sum(-1)
    kept = best.topk(routing.topk_group, dim=-1).indices
    open_groups = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, kept, True)
    return grouped.masked_fill(~open_groups.unsqueeze(-1), float("-inf")).view_as(choice)


def _sparsemixer(
    logits: torch.Tensor, num_experts_per_tok: int, jitter_eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights ``[T, K]``, one after another; each against its near competitors only.

    A chosen expert's weight is its softmax share among the experts whose logit lies within
    ``2 jitter_eps`` of the best, relative to the larger magnitude; experts chosen before are out.
    Source: arXiv 2409.12136 (at inference: no sampling).
    """
    selected, weights = [], []
    remaining = logits
    for _ in range(num_experts_per_tok):
        best, index = remaining.max(dim=-1, keepdim=True)
        scale = torch.maximum(logits.abs(), best)
        far = (best - logits) / scale > 2 * jitter_eps
        near = remaining.masked_fill(far, float("-inf"))
        selected.append(index)
        weights.append(near.softmax(dim=-1).gather(-1, index))
        remaining = remaining.scatter(-1, index, float("-inf"))
    return torch.cat(selected, dim=-1), torch.cat(weights, dim=-1)


def mix_experts(
    blocks: Sequence[torch.Tensor],  # each [T, D]
    routings: Sequence[Routing],  # one a block
    provider: ExpertProvider,
    swiglu_limit: float | None = None,
) -> list[torch.Tensor]:
    """Weighted sum of each row's experts, block by block; an expert is fetched once for all blocks.

    Experts that the provider leaves out are skipped, and a row's other weights are scaled so that
    their sum stays what it was.
    """
    layer = routings[0].layer
    wanted = sorted({expert for routing in routings for expert in routing.expert_ids()})
    sums = [_BlockSum(block, routing) for block, routing in zip(blocks, routings, strict=True)]
    served: set[int] = set()
    for expert, stored in provider.experts(layer, wanted):
        served.add(expert)
        weights = stored.to(blocks[0].dtype)
        for block_sum in sums:
            block_sum.add(expert, weights, swiglu_limit)
    return [block_sum.total(served) for block_sum in sums]


class _BlockSum:
    """Sums one block's expert outputs in ascending expert order, whatever order they come in.

    An output is added, and dropped, as soon as all before it have been; only those that came too
    early are held.
    """

    def __init__(self, hidden: torch.Tensor, routing: Routing) -> None:
        self._hidden = hidden
        self._routing = routing
        self._order = routing.expert_ids()
        self._num_added = 0
        self._early: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # rows, weighted output
        self._sum = torch.zeros(hidden.shape, dtype=torch.float32)

    def add(self, expert: int, weights: ExpertWeights, swiglu_limit: float | None) -> None:
        """Compute ``expert`` for the rows of this block that chose it."""
        if expert not in self._order:
            return
        rows, ranks = torch.where(self._routing.selected_experts == expert)
        output = swiglu(
            self._hidden[rows],
            weights.gate_proj,
            weights.up_proj,
            weights.down_proj,
            weights.biases,
            swiglu_limit,
        )
        shares = self._routing.routing_weights[rows, ranks].unsqueeze(-1)
        self._early[expert] = (rows, shares * output.to(torch.float32))
        while self._num_added < len(self._order) and self._order[self._num_added] in self._early:
            self._add_early(self._order[self._num_added])

    def _add_early(self, expert: int) -> None:
        rows, weighted = self._early.pop(expert)
        self._sum[rows] += weighted
        self._num_added += 1

    def total(self, served: set[int]) -> torch.Tensor:
        """The weighted sum ``[T, D]``; rows with left-out experts are scaled up."""
        for expert in sorted(self._early):
            self._add_early(expert)
        if served.issuperset(self._order):
            return self._sum.to(self._hidden.dtype)
        return (self._sum * left_out_scale(self._routing, served)).to(self._hidden.dtype)


def left_out_scale(routing: Routing, served: set[int]) -> torch.Tensor:
    """Factor ``[T, 1]`` that makes up for the weight of left-out experts.

    A row none of whose experts is served gets 0: the layer then adds nothing to it.
    """
    kept = torch.isin(routing.selected_experts, torch.tensor(sorted(served), dtype=torch.int64))
    remaining = (routing.routing_weights * kept).sum(-1, keepdim=True)
    scale = routing.routing_weights.sum(-1, keepdim=True) / remaining
    return torch.where(remaining > 0, scale, torch.zeros_like(scale))
