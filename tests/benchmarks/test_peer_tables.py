"""From measurements to rows and tables."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import peer_tables
from benchmarks.peer_tables import Reference

GB = 10**9


def run(
    arm: str,
    cap: int | None,
    repeat: int,
    seconds: tuple[float, float],
    tokens: tuple[list[int], list[int]] = ([1, 2, 3], [4, 5, 6]),
    engine: str = "specter",
) -> dict[str, Any]:
    """A measurement that loads 100 MB a token, busy for half of the time."""
    sets: dict[str, Any] = {}
    for name, tpot, found in zip(("chat", "code"), seconds, tokens, strict=True):
        sets[name] = {"tokens": found, "tpot_seconds": tpot, "bytes_per_token": 1e8}
        if engine == "specter":
            sets[name] |= {
                "stall_seconds_per_token": tpot / 4,
                "link_busy_seconds_per_token": tpot / 2,
            }
    return {
        "arm": arm,
        "engine": engine,
        "cap_bytes": cap,
        "repeat": repeat,
        "sets": sets,
        "peak_bytes": GB + repeat,
        "limit_hits": repeat,
    }


REFERENCE = Reference(
    tokens={"chat": [1, 2, 3], "code": [4, 5, 6]},
    compute_seconds={"specter": {"chat": 0.1, "code": 0.4}},
    link_bytes_per_second=0.5e9,
)


def test_row_is_the_median_of_repeats_and_the_mean_of_sets() -> None:
    runs = [
        run("a", GB, 0, (0.3, 0.5)),
        run("a", GB, 1, (0.5, 0.7)),
        run("a", GB, 2, (0.4, 0.4), ([1, 2, 3], [4, 5, 9])),
    ]
    row = peer_tables.make_row(runs, REFERENCE)
    assert row.mean is not None
    assert row.mean.tpot_seconds == pytest.approx(0.4)
    assert row.mean.spread == pytest.approx(0.5)  # of means 0.4, 0.6, 0.4
    assert row.sets["chat"].tpot_seconds == 0.4
    assert row.sets["chat"].spread == pytest.approx(0.5)
    assert row.mean.link_busy_share == pytest.approx(0.5)
    assert row.mean.stall_seconds_per_token == pytest.approx(0.1)
    # chat: the link's 0.2 s bind; code: computing's 0.4 s
    assert row.sets["chat"].floor_seconds == pytest.approx(0.2)
    assert row.sets["code"].floor_seconds == pytest.approx(0.4)
    assert row.sets["chat"].distance == pytest.approx(2)
    assert row.mean.floor_seconds == pytest.approx(0.3)
    assert (row.peak_bytes, row.limit_hits, row.num_repeats) == (GB + 2, 2, 3)
    assert len(row.outputs["chat"].tokens_sha256) == 1
    assert len(row.outputs["code"].tokens_sha256) == 2
    assert (row.outputs["code"].num_equal, row.is_equal) == (2, False)


def test_floor_is_the_larger_bound_that_is_known() -> None:
    assert peer_tables.floor_seconds(0.1, 1e9, 5e9) == pytest.approx(0.2)
    assert peer_tables.floor_seconds(0.3, 1e9, 5e9) == 0.3
    assert peer_tables.floor_seconds(None, 1e9, 5e9) == pytest.approx(0.2)
    assert peer_tables.floor_seconds(0.1, 1e9, None) == 0.1
    assert peer_tables.floor_seconds(None, 1e9, None) is None


def test_reference_is_taken_from_runs_without_a_cap() -> None:
    runs = [
        run("specter", GB, 0, (9, 9), ([7], [7])),
        run("specter", None, 0, (0.1, 0.3)),
        run("specter", None, 1, (0.3, 0.3)),
        run("llama.cpp", None, 0, (0.05, 0.06), engine="llama.cpp"),
    ]
    reference = peer_tables.make_reference(runs, [1e8, 2e8])
    assert reference.tokens == REFERENCE.tokens
    assert reference.compute_seconds["specter"]["chat"] == pytest.approx(0.2)
    assert reference.compute_seconds["llama.cpp"] == {"chat": 0.05, "code": 0.06}
    # 100 MB in the 0.1 s that the fastest run kept the link busy beat what was probed
    assert reference.link_bytes_per_second == pytest.approx(1e9)


def test_shorter_outputs_are_compared_as_far_as_they_go() -> None:
    assert peer_tables.num_equal_leading([1, 2], [1, 2, 3]) == 2
    assert peer_tables.num_equal_leading([1, 3, 3], [1, 2, 3]) == 1
    assert peer_tables.num_equal_leading([], [1]) == 0


def test_rows_go_from_no_cap_to_the_largest_cap_in_the_arms_order() -> None:
    runs = [
        run("b", 2 * GB, 0, (1, 1)),
        run("a", 2 * GB, 0, (1, 1)),
        run("b", None, 0, (1, 1)),
        run("b", GB, 0, (1, 1)),
    ]
    rows = peer_tables.make_rows(runs, ["a", "b"], REFERENCE)
    found = [(row.cap_bytes, row.arm) for row in rows]
    assert found == [(None, "b"), (GB, "b"), (2 * GB, "a"), (2 * GB, "b")]


def test_table_names_ratios_failures_and_what_is_not_known() -> None:
    slow = peer_tables.make_row([run("slow", GB, 0, (1, 3), engine="other")], REFERENCE)
    fast = peer_tables.make_row([run("fast", GB, 0, (0.4, 0.6))], REFERENCE)
    failed = {**run("failed", GB, 0, (1, 1)), "failure": "out of memory"}
    broken = peer_tables.make_row([failed], REFERENCE)
    head, _, *lines = peer_tables.table([slow, fast, broken], {"slow": slow, "gone": None})
    names = [name.strip() for name in head.strip("|").split("|")]
    cells = [
        dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        for line in lines
    ]
    assert [row["arm"] for row in cells] == ["slow", "fast", "failed"]
    assert [row["x slow"] for row in cells] == ["1.00", "4.00", "-"]
    assert [row["x gone"] for row in cells] == ["-"] * 3
    assert [row["chat ms"] for row in cells] == ["1000", "400", "-"]
    assert [row["mean ms"] for row in cells] == ["2000", "500", "out of memory"]
    assert [row["link busy"] for row in cells] == ["-", "50%", "-"]
    assert [row["equal tokens"] for row in cells] == ["3/3", "3/3", "-"]
    assert fast.to_dict()["distances"]["chat"] == pytest.approx(2)
    assert broken.to_dict()["failure"] == "out of memory"
