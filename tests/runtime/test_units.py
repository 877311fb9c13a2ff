"""Sizes from people and for people."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specter_runtime.units import format_bytes, parse_bytes

UNIT_BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("0", 0),
        ("123", 123),
        (123, 123),
        ("4GiB", 4 * 2**30),
        ("4GB", 4 * 10**9),
        ("4G", 4 * 10**9),
        ("4Gi", 4 * 2**30),
        ("500 MB", 500 * 10**6),
        ("500mib", 500 * 2**20),
        ("1.5KiB", 1536),
        ("2k", 2000),
        ("  7 B ", 7),
    ],
)
def test_gb_is_decimal_and_gib_is_binary(text: str | int, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize(
    "text",
    ["", "GiB", "-1", "1e9", "4 GiB/s", "1.2.3", "4XB", "inf", "nan", "1,5GB", "True", "٤GB"],
)
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a size; write e\.g\. 4GiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@settings(deadline=None)
@given(st.integers(0, 2**80))
@example(2**53 + 1)
def test_a_whole_number_of_bytes_is_taken_exactly(nbytes: int) -> None:
    assert parse_bytes(nbytes) == parse_bytes(str(nbytes)) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (26 * 2**20, "26.0 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (3000 * 2**30, "3000.00 GiB"),
    ],
)
def test_sizes_are_printed_in_binary_units(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@settings(deadline=None)
@given(st.integers(0, 2**50))
def test_a_printed_size_reads_back_to_half_a_digit(nbytes: int) -> None:
    text = format_bytes(nbytes)
    number, unit = text.split()
    half_digit = 0.5 * 10.0 ** -len(number.partition(".")[2]) * UNIT_BYTES[unit]
    assert abs(parse_bytes(text) - nbytes) <= half_digit + 1  # + 1: whole bytes
