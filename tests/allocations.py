"""How much memory tensors take."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_allocated_bytes(work: Callable[[], object]) -> int:
    """The most that torch's CPU allocator held at once for ``work``, kernels' scratch included."""
    work()  # what is allocated once (thread pools, kernels' caches) is not counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    assert peak > 0
    return peak
