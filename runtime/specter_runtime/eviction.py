"""Which resident expert gives way: pure, no slots, no clocks.

Belady's rule as far as the lookahead can see: an expert that the current window still needs has a
known next use (its layer: verification walks the layers in order), all others have none. Among
those without, the least recently used goes first.

Called by: expert_cache.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from specter_runtime.experts import ExpertKey


def choose_victim(
    oldest_first: Iterable[ExpertKey],
    pinned: Container[ExpertKey],
    next_use: Mapping[ExpertKey, int],
    needed_at: int,
) -> ExpertKey | None:
    """Choose the resident expert to evict for one that is needed at layer ``needed_at``.

    Args:
        oldest_first: resident experts, least recently used first.
        pinned: experts in use; never chosen.
        next_use: layer at which the current window uses an expert, as far as known.
        needed_at: when the incoming expert is needed; a demand passes -1.

    Returns:
        The least recently used expert without a known next use; failing that, the one whose next
        use is latest and later than ``needed_at``; failing that, None.
    """
    latest: ExpertKey | None = None
    latest_use = needed_at
    for key in oldest_first:
        if key in pinned:
            continue
        use = next_use.get(key)
        if use is None:
            return key
        if use > latest_use:
            latest, latest_use = key, use
    return latest
