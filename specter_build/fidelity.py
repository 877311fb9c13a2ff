"""How well the draft's routing predicts the target's: pure functions of recorded routes.

Routes of one layer are int64 ``[N, T, K]``: N sequences of T tokens, K experts each.

Called by: report, plan_placement.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

WINDOWS = (1, 2, 4, 8, 16)
"""Window lengths, in tokens, for which the report gives recall and union size."""


def one_hot(routes: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Bool ``[N, T, E]``: which experts each token uses."""
    hot = torch.zeros(*routes.shape[:2], num_experts, dtype=torch.bool)
    return hot.scatter_(-1, routes, torch.ones((), dtype=torch.bool).expand(routes.shape))


def routing_recall(
    target: torch.Tensor,  # [N, T, E] bool
    draft: torch.Tensor,  # [N, T, E] bool
) -> torch.Tensor:
    """|draft's top-k and target's top-k| / k at each position: float32 ``[N, T]``."""
    return (target & draft).sum(-1) / target.sum(-1)


def weighted_recall(
    routes: torch.Tensor,  # [N, T, K]
    routing_weights: torch.Tensor,  # [N, T, K]
    draft: torch.Tensor,  # [N, T, E] bool
) -> torch.Tensor:
    """Share of the target's routing weight that lies on experts the draft chose too: ``[N, T]``."""
    found = draft.gather(-1, routes)
    return (routing_weights * found).sum(-1) / routing_weights.sum(-1)


def window_union(
    hot: torch.Tensor,  # [N, T, E] bool
    window: int,
) -> torch.Tensor:
    """Experts used anywhere in each window of that many tokens, without overlap: ``[N, W, E]``."""
    num_sequences, length, num_experts = hot.shape
    whole = length // window * window
    return hot[:, :whole].view(num_sequences, -1, window, num_experts).any(2)


def window_recall(
    target: torch.Tensor,  # [N, T, E] bool
    draft: torch.Tensor,  # [N, T, E] bool
    window: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Recall of the target's union by the draft's, and the size of the target's union.

    Both are means over a sequence's windows: float32 ``[N]``.
    """
    target_union, draft_union = window_union(target, window), window_union(draft, window)
    recall = (target_union & draft_union).sum(-1) / target_union.sum(-1)
    return recall.mean(-1), target_union.sum(-1).to(torch.float32).mean(-1)


def acceptance_by_position(
    agrees: torch.Tensor,  # [N, T] bool
    num_positions: int,
) -> list[float]:
    """Chance that the first 1, 2, ... drafted tokens are all accepted, over all starting points."""
    chances = []
    for run in range(1, num_positions + 1):
        if run > agrees.shape[1]:
            break
        runs = agrees.unfold(1, run, 1).all(-1)  # [N, T - run + 1]
        chances.append(float(runs.to(torch.float32).mean()))
    return chances


def expected_acceptance_length(by_position: Sequence[float], num_draft_tokens: int) -> float:
    """Committed tokens per target pass: 1 (recovered or bonus) + sum of the acceptance chances.

    Source: arXiv 2211.17192, equation 1, with measured instead of constant chances.
    """
    return 1.0 + sum(by_position[:num_draft_tokens])


def usage_counts(hot: torch.Tensor) -> torch.Tensor:
    """How many tokens used each expert: int64 ``[E]``."""
    return hot.sum((0, 1))


def normalized_entropy(counts: torch.Tensor) -> float:
    """Entropy of the experts' usage relative to uniform usage: 1 is uniform, 0 a single expert."""
    shares = counts.to(torch.float64) / counts.sum()
    entropy = -(shares * shares.clamp(min=1e-300).log()).sum()
    return float(entropy / torch.log(torch.tensor(float(len(counts)), dtype=torch.float64)))


def lru_hit_curve(
    routes: torch.Tensor, num_experts: int, num_warm_up_tokens: int = 0
) -> list[float]:
    """Hit rate of a layer's own LRU cache with 1, 2, ..., E slots, started empty per sequence.

    A sequence's first tokens may fill the caches without being counted.

    By stack distance (Mattson et al., "Evaluation techniques for storage hierarchies", 1970): an
    access hits every capacity above the number of distinct experts used since the last use of it.
    """
    hits_at = [0] * (num_experts + 1)  # by stack distance; the last entry: never used before
    for sequence in routes.tolist():
        stack: list[int] = []  # most recently used first
        for i, token in enumerate(sequence):
            for expert in token:
                distance = num_experts
                if expert in stack:
                    distance = stack.index(expert)
                    del stack[distance]
                hits_at[distance] += i >= num_warm_up_tokens
                stack.insert(0, expert)
    total = sum(hits_at)
    curve, hits = [], 0
    for distance in range(num_experts):
        hits += hits_at[distance]
        curve.append(hits / total)
    return curve
