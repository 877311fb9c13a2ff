"""One routed layer: route, fetch experts, sum.

The routing is returned beside the output: it is what the draft is for. Experts arrive in whatever
order the provider has them; their outputs are summed in ascending expert order in float32, so
neither cache state nor arrival order changes a bit.

Called by: model, row_pass.  Next: experts.ExpertProvider.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch

from specter_runtime import kernels
from specter_runtime.config import RoutingConfig
from specter_runtime.experts import ExpertProvider, ExpertWeights, Routing
from specter_runtime.layers import swiglu

LEFT_OUT = -1
"""In place of an expert that the provider did not have."""


def select_experts(
    logits: torch.Tensor,  # [T, E], float32
    tensors: Mapping[str, torch.Tensor],
    routing: RoutingConfig,
    num_experts_per_tok: int,
    layer: int,
) -> Routing:
    """Choose each token's experts; everything in float32, whatever the model's dtype.

    Rounded to bfloat16, router logits and correction biases would tie.

    Args:
        logits: the router's.
        tensors: ``correction_bias`` where there is one.
        routing: how scores become choices and weights.
        num_experts_per_tok: experts chosen for a token.
        layer: for the record.
    """
    probs = logits.softmax(dim=-1)
    if routing.scoring == "sparsemixer":
        selected, weights = _sparsemixer(logits, num_experts_per_tok, routing.jitter_eps)
    elif routing.scoring == "softmax_topk":
        chosen, selected = logits.topk(num_experts_per_tok, dim=-1)
        weights = chosen.softmax(dim=-1)
    else:
        scores = probs if routing.scoring == "softmax" else logits.sigmoid()
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
    return Routing(layer, selected, weights, probs)


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


def merge(routings: Sequence[Routing]) -> Routing:
    """The routing of all rows from those of blocks of one layer."""
    if len(routings) == 1:
        return routings[0]
    probs = [r.router_probs for r in routings if r.router_probs is not None]
    return Routing(
        routings[0].layer,
        torch.cat([r.selected_experts for r in routings]),
        torch.cat([r.routing_weights for r in routings]),
        torch.cat(probs) if len(probs) == len(routings) else None,
    )


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
    routing = merge(routings)
    selected, dtype = routing.selected_experts, blocks[0].dtype
    rows = blocks[0] if len(blocks) == 1 else torch.cat(tuple(blocks))
    sizes = [block.shape[0] for block in blocks]
    outputs = torch.empty(*selected.shape, rows.shape[1])  # float32, one a choice
    # Who computes must not depend on the blocks beside a row: of its own come so many at most.
    most = max(sizes)
    counts = None if most <= kernels.MAX_ROWS else selected.flatten().bincount().tolist()
    readable = rows if dtype in kernels.HIDDEN_DTYPES else rows.to(torch.float32)
    served: list[int] = []
    for batch in provider.experts(routing):
        native: list[tuple[int, kernels.NativeExpert]] = []
        for expert, stored in batch:
            served.append(expert)
            num_together = most if counts is None else counts[expert]
            form = kernels.prepare(stored) if kernels.serves(dtype, num_together) else stored
            if isinstance(form, kernels.NativeExpert):
                native.append((expert, form))
            else:
                _compute(stored.to(dtype), selected == expert, rows, sizes, outputs, swiglu_limit)
        kernels.compute_experts(native, readable, selected, outputs, swiglu_limit)
    if len(served) < len(routing.expert_ids()):
        is_served = torch.isin(selected, torch.tensor(served, dtype=torch.int64))
        present = selected.masked_fill(~is_served, LEFT_OUT)
        sums = combine(outputs, routing.routing_weights, present, torch.float32)
        mixed = (sums * left_out_scale(routing, served)).to(dtype)
    else:
        mixed = combine(outputs, routing.routing_weights, selected, dtype)
    return [mixed] if len(sizes) == 1 else list(torch.split(mixed, sizes))


def _compute(
    expert: ExpertWeights,
    is_chosen: torch.Tensor,  # [T, K]
    rows: torch.Tensor,  # [T, D]
    sizes: Sequence[int],
    outputs: torch.Tensor,  # [T, K, D]
    swiglu_limit: float | None,
) -> None:
    """An expert's outputs, by torch's operators: as many rows a call as the block has."""
    matrices = (expert.gate_proj, expert.up_proj, expert.down_proj)
    blocks = zip(*(torch.split(t, list(sizes)) for t in (is_chosen, rows, outputs)), strict=True)
    for chosen, own_rows, own_outputs in blocks:
        sources, ranks = chosen.nonzero(as_tuple=True)
        if len(sources):
            found = swiglu(own_rows[sources], *matrices, expert.biases, swiglu_limit)
            own_outputs[sources, ranks] = found.to(torch.float32)


def combine(
    outputs: torch.Tensor,  # [T, K, D]
    weights: torch.Tensor,  # [T, K]
    selected: torch.Tensor,  # [T, K]
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each row's weighted outputs, added up in ascending order of their experts: ``[T, D]``.

    Those whose expert is ``LEFT_OUT`` are skipped. Added in float32, rounded to ``dtype``.
    """
    if kernels.library() is not None and dtype in kernels.HIDDEN_DTYPES:
        return kernels.combine(outputs, weights.contiguous(), selected.contiguous(), dtype)
    order = selected.argsort(dim=-1)  # [T, K]
    is_left_out = selected.gather(-1, order) == LEFT_OUT
    shares = weights.gather(-1, order).masked_fill(is_left_out, 0.0)
    present = outputs.gather(1, order.unsqueeze(-1).expand_as(outputs))
    present = present.masked_fill(is_left_out.unsqueeze(-1), 0.0)
    total = torch.zeros(outputs.shape[0], outputs.shape[2])
    for k in range(order.shape[1]):
        total += shares[:, k : k + 1] * present[:, k]
    return total.to(dtype)


def left_out_scale(routing: Routing, served: Collection[int]) -> torch.Tensor:
    """Factor ``[T, 1]`` that makes up for the weight of left-out experts.

    A row none of whose experts is served gets 0: the layer then adds nothing to it.
    """
    kept = torch.isin(routing.selected_experts, torch.tensor(sorted(served), dtype=torch.int64))
    remaining = (routing.routing_weights * kept).sum(-1, keepdim=True)
    scale = routing.routing_weights.sum(-1, keepdim=True) / remaining
    return torch.where(remaining > 0, scale, torch.zeros_like(scale))
