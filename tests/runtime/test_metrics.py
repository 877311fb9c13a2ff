"""Counters: the definitions, by hand on small numbers."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from specter_runtime.metrics import CacheStats, DecodeStats, time_per_output_token


def run(committed_seconds: list[float], **values: int) -> DecodeStats:
    cache_names = {field.name for field in fields(CacheStats)}
    cache = {name: value for name, value in values.items() if name in cache_names}
    own = {name: value for name, value in values.items() if name not in cache_names}
    return DecodeStats(committed_seconds=committed_seconds, cache=CacheStats(**cache), **own)


def test_tpot_is_the_time_between_first_and_last_token_by_the_tokens_after_the_first() -> None:
    """Powers of 2, so that the quotient is exact."""
    assert time_per_output_token([8.0, 8.5, 8.5, 9.0, 10.0]) == 0.5
    assert run([8.0, 8.5, 8.5, 9.0, 10.0]).tpot_seconds == 0.5


@pytest.mark.parametrize("committed_seconds", [[], [3.0]])
def test_tpot_of_fewer_than_two_tokens_is_none(committed_seconds: list[float]) -> None:
    assert time_per_output_token(committed_seconds) is None


def test_ttft_is_the_time_of_the_first_token() -> None:
    assert run([2.0, 7.0]).ttft_seconds == 2.0
    assert run([]).ttft_seconds is None


def test_acceptance_rate_is_accepted_by_drafted() -> None:
    assert run([], num_drafted=8, num_accepted=6).acceptance_rate == 0.75


def test_acceptance_length_is_committed_tokens_by_target_passes_after_the_prompt() -> None:
    """The first of 9 tokens comes with the prompt; 8 came in 4 passes."""
    assert run([1.0] * 9, num_windows=4).mean_acceptance_length == 2.0


def test_bytes_per_token_count_tokens_after_the_first() -> None:
    assert run([0.0, 1.0, 2.0, 3.0, 4.0], loaded_bytes=1000).bytes_per_token == 250


def test_link_busy_share_is_of_the_time_after_the_first_token() -> None:
    stats = run([3.0, 4.0, 7.0])
    stats.cache.link_busy_seconds = 1.0
    assert stats.link_busy_share == 0.25


@pytest.mark.parametrize("committed_seconds", [[], [1.0], [1.0, 1.0]])
def test_a_run_of_nothing_has_no_rates(committed_seconds: list[float]) -> None:
    stats = run(committed_seconds)
    assert stats.acceptance_rate is None
    assert stats.mean_acceptance_length is None
    assert stats.link_busy_share is None
    json.dumps(stats.to_dict(), allow_nan=False)


def test_since_subtracts_every_counter_and_copy_is_a_snapshot() -> None:
    names = [field.name for field in fields(CacheStats)]
    before = CacheStats(**{name: i for i, name in enumerate(names)})
    snapshot = before.copy()
    for i, name in enumerate(names):
        setattr(before, name, 3 * i + 1)
    difference = before.since(snapshot)
    assert [getattr(difference, name) for name in names] == [2 * i + 1 for i in range(len(names))]


def test_the_report_has_every_counter() -> None:
    report = run([1.0, 2.0], num_prompt_tokens=5, hits=3, misses=2).to_dict()
    assert {field.name for field in fields(CacheStats)} < report.keys()
    assert (report["num_prompt_tokens"], report["num_new_tokens"]) == (5, 2)
    assert (report["hits"], report["misses"], report["tpot_seconds"]) == (3, 2, 1.0)
