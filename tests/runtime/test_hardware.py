"""Profiles are strict: a rate that is misspelt would be taken for one that is not there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specter_runtime.errors import SpecterError
from specter_runtime.hardware import Hardware, load_hardware, parse_hardware, shipped

FULL = asdict(load_hardware("rtx-4090"))


@pytest.mark.parametrize("name", shipped())
def test_each_profile_that_ships_can_be_read_and_written(name: str) -> None:
    hardware = load_hardware(name)
    assert parse_hardware(hardware.to_json(), name) == hardware


def test_profile_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(FULL | {"num_readers": 7}))
    assert load_hardware(str(path)) == Hardware(**FULL | {"num_readers": 7})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link": 1.0}, r"here: unknown 'link'; the keys"),
        ({"name": 3}, r"here: name: expected text, found 3"),
        (
            {"link_bytes_per_second": 0},
            r"link_bytes_per_second: expected a number above 0, found 0",
        ),
        ({"link_bytes_per_second": "1"}, r"expected a number above 0, found '1'"),
        ({"num_readers": 1.5}, r"num_readers: expected a whole number above 0, found 1.5"),
        ({"num_readers": True}, r"num_readers: expected a whole number above 0, found True"),
        ({"link_latency_seconds": -1}, r"expected a number of at least 0, found -1"),
        ({"stop_overhead_seconds": float("nan")}, r"a number of at least 0, found nan"),
        ({"computing_while_reading": 1.5}, r"expected a number above 0, at most 1, found 1.5"),
    ],
)
def test_wrong_value_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecterError, match=message):
        parse_hardware(json.dumps(FULL | change), "here")


@pytest.mark.parametrize("key", sorted(FULL))
def test_missing_key_is_named(key: str) -> None:
    text = json.dumps({name: value for name, value in FULL.items() if name != key})
    with pytest.raises(SpecterError, match=f"here: missing '{key}'"):
        parse_hardware(text, "here")


@pytest.mark.parametrize("text", ["", "[1]", "{", "[" * 100_000])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(SpecterError, match="here: "):
        parse_hardware(text, "here")


def test_unknown_name_lists_those_that_ship() -> None:
    with pytest.raises(SpecterError, match=r"rtx-5: no such file.*a100-40gb.*rtx-4090"):
        load_hardware("rtx-5")
