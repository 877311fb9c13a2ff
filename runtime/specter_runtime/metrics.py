"""What a run did, in counters: plain records, no printing.

A *hit* is counted at demand, not at prefetch; a *late hit* is an expert that was already being read
when it was demanded; a *miss* had not been begun. A *stall* is time in which the computation waited
for an expert. ``link_busy_seconds`` is the time in which at least one read was under way.

Called by: expert_cache, speculative_decoder, session, cli.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class CacheStats:
    """Counters of the expert cache. Guarded by the cache's lock."""

    hits: int = 0
    late_hits: int = 0
    misses: int = 0
    loads: int = 0
    loaded_bytes: int = 0
    prefetch_loads: int = 0
    useful_prefetches: int = 0
    failed_prefetches: int = 0
    overdue_loads: int = 0
    stall_seconds: float = 0.0
    link_busy_seconds: float = 0.0

    def copy(self) -> CacheStats:
        """A snapshot."""
        return CacheStats(**{f.name: getattr(self, f.name) for f in fields(self)})

    def plus(self, other: CacheStats) -> CacheStats:
        """The sums of both."""
        return CacheStats(
            **{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self)}
        )

    def since(self, earlier: CacheStats) -> CacheStats:
        """The counts between ``earlier`` and now."""
        return CacheStats(
            **{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)}
        )


@dataclass(slots=True)
class DecodeStats:
    """One generation. Times are seconds of a monotonic clock.

    Attributes:
        committed_seconds: when each new token was committed, relative to the start of the prompt;
            tokens of one verification share a time.
        num_drafted: tokens that the draft proposed.
        num_accepted: those that the target confirmed.
        num_windows: target passes after the prompt.
        windows_by_lookahead: the same by the way in which they ran (``governor.Lookahead``).
    """

    num_prompt_tokens: int = 0
    committed_seconds: list[float] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_windows: int = 0
    windows_by_lookahead: Counter[str] = field(default_factory=Counter)
    draft_seconds: float = 0.0
    cache: CacheStats = field(default_factory=CacheStats)

    @property
    def num_new_tokens(self) -> int:
        """Committed tokens, the first one included."""
        return len(self.committed_seconds)

    @property
    def ttft_seconds(self) -> float | None:
        """Time to first token."""
        return self.committed_seconds[0] if self.committed_seconds else None

    @property
    def tpot_seconds(self) -> float | None:
        """(time of the last committed token - time of the first) / (n - 1)."""
        return time_per_output_token(self.committed_seconds)

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Committed tokens per target pass after the prompt, bonus or recovered token included."""
        return (self.num_new_tokens - 1) / self.num_windows if self.num_windows else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes that crossed the link after the first token, per token committed since."""
        if self.num_new_tokens < 2:
            return None
        return self.cache.loaded_bytes / (self.num_new_tokens - 1)

    @property
    def link_busy_share(self) -> float | None:
        """Share of decoding time in which at least one read was under way."""
        if self.num_new_tokens < 2:
            return None
        decode_seconds = self.committed_seconds[-1] - self.committed_seconds[0]
        return self.cache.link_busy_seconds / decode_seconds if decode_seconds > 0 else None

    def to_dict(self) -> dict[str, object]:
        """All of it for JSON; the cache's counters cover decoding, not the prompt."""
        cache = {f.name: getattr(self.cache, f.name) for f in fields(self.cache)}
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": self.num_new_tokens,
            "ttft_seconds": self.ttft_seconds,
            "tpot_seconds": self.tpot_seconds,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "num_windows": self.num_windows,
            "windows_by_lookahead": dict(self.windows_by_lookahead),
            "draft_seconds": self.draft_seconds,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "bytes_per_token": self.bytes_per_token,
            "link_busy_share": self.link_busy_share,
            **cache,
        }


def time_per_output_token(committed_seconds: Sequence[float]) -> float | None:
    """TPOT of tokens committed at these times; None for fewer than two."""
    if len(committed_seconds) < 2:
        return None
    return (committed_seconds[-1] - committed_seconds[0]) / (len(committed_seconds) - 1)
