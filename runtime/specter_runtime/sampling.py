"""From logits to probabilities to a token: pure, the random number is an argument.

Called by: speculative_decoder, draft_engine.
"""

from __future__ import annotations

import torch

from specter_runtime.config import SamplingConfig


def probabilities(
    logits: torch.Tensor,  # [T, V]
    sampling: SamplingConfig,
) -> torch.Tensor:
    """Float64 probabilities ``[T, V]`` after temperature, top-k and top-p, in this order.

    Ties at the edge of top-k are kept. Top-p keeps the smallest set of most probable tokens whose
    sum reaches ``top_p`` (arXiv 1904.09751, section 3.1). The order is that of transformers.
    """
    return torch.stack([_row_probabilities(row, sampling) for row in logits])


def _row_probabilities(logits: torch.Tensor, sampling: SamplingConfig) -> torch.Tensor:
    """One row ``[V]`` at a time: sorting takes several times the memory of the logits."""
    wide = logits.to(torch.float64)
    scaled = (wide - wide.max()) / sampling.temperature  # at most 0: no temperature overflows
    if 0 < sampling.top_k < len(scaled):
        edge = scaled.topk(sampling.top_k).values[-1]
        scaled = scaled.masked_fill(scaled < edge, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = scaled.sort(descending=True, stable=True)
        ordered_probs = ordered.softmax(dim=-1)
        mass_before = ordered_probs.cumsum(dim=-1) - ordered_probs
        drop = mass_before >= sampling.top_p  # the most probable token has 0 before it
        drop[0] = False
        scaled = scaled.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))
    return scaled.softmax(dim=-1)


def draw(
    probs: torch.Tensor,  # [V]
    uniform: float,
) -> int:
    """The token at which the cumulative distribution passes ``uniform`` in [0, 1).

    ``probs`` need not sum to 1. A token of probability 0 is never drawn.
    """
    cumulative = probs.cumsum(dim=-1)
    index = int(torch.searchsorted(cumulative, uniform * float(cumulative[-1]), right=True))
    last_possible = int(torch.nonzero(probs)[-1])
    return min(index, last_possible)
