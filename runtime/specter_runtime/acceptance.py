"""Which drafted tokens stand, and which token follows: pure.

Words are vLLM's: *accepted* draft tokens, then either a *recovered* token (drawn where the first
draft token was rejected) or a *bonus* token (when all were accepted).

Called by: speculative_decoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specter_runtime.sampling import draw


@dataclass(frozen=True, slots=True)
class Acceptance:
    """The outcome of one verification: ``num_accepted`` draft tokens, then ``next_token_id``."""

    num_accepted: int
    next_token_id: int


def accept_greedy(
    draft_token_ids: Sequence[int],
    target_token_ids: Sequence[int],
) -> Acceptance:
    """Accept the longest prefix that equals the target's own argmax.

    Args:
        draft_token_ids: n drafted tokens.
        target_token_ids: the target's argmax after each of the n + 1 prefixes.
    """
    num_accepted = 0
    for drafted, target in zip(draft_token_ids, target_token_ids, strict=False):
        if drafted != target:
            break
        num_accepted += 1
    return Acceptance(num_accepted, target_token_ids[num_accepted])


def rejection_sample(
    draft_token_ids: Sequence[int],
    draft_probs: torch.Tensor,  # [n, V]
    target_probs: torch.Tensor,  # [n + 1, V]
    uniforms: Sequence[float],
) -> Acceptance:
    """Accept token x with probability min(1, target(x) / draft(x)), else recover from the excess.

    The committed tokens are distributed as the target's own, whatever the draft proposed, provided
    that each draft token was drawn from its row of ``draft_probs``.

    Args:
        draft_token_ids: n drafted tokens.
        draft_probs: the distributions they were drawn from.
        target_probs: the target's after each of the n + 1 prefixes.
        uniforms: n + 1 numbers in [0, 1): one for each acceptance, the last for the next token.

    Source: arXiv 2302.01318, algorithm 2; arXiv 2211.17192, algorithm 1. (They use the letters p
    and q the opposite way round, hence none here.)
    """
    for i, token in enumerate(draft_token_ids):
        # uniform < target / draft, without dividing: the draft's probability may be tiny
        if uniforms[i] * float(draft_probs[i, token]) >= float(target_probs[i, token]):
            excess = (target_probs[i] - draft_probs[i]).clamp(min=0)
            # In exact arithmetic a rejection implies an excess; rounding may leave none.
            source = excess if float(excess.sum()) > 0 else target_probs[i]
            return Acceptance(i, draw(source, uniforms[-1]))
    return Acceptance(len(draft_token_ids), draw(target_probs[-1], uniforms[-1]))
