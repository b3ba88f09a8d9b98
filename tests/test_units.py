"""Bytes, seconds and FLOP as people write and read them."""

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recompile.units import BYTES_PER_UNIT, format_bytes, format_flop, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("0B", 0),
        ("800MB", 800_000_000),
        ("1.5GiB", 3 * 2**29),
        ("12GiB", 12 * 2**30),
        ("2TiB", 2**41),
        ("3TB", 3 * 10**12),
        ("1KiB", 1024),
        ("1kb", 1000),
        (".5 gib", 2**29),
        ("2.GB", 2 * 10**9),
        ("  7 B ", 7),
        ("0.0015KB", 1),  # rounded down
        ("1.001KB", 1001),  # and not below what is written
        ("9007199254740993B", 2**53 + 1),
    ],
)
def test_an_amount_of_memory_is_read(text, count):
    assert parse_bytes(text) == count


NO_AMOUNTS = ("", "12", "GiB", "1.5", "-1GB", "1e9B", "1,5GB", "1 G", "1GiBs", "1.2.3MB", "5iB", "5 ib")


@pytest.mark.parametrize("text", NO_AMOUNTS)
def test_anything_else_is_refused_with_what_is_accepted(text):
    with pytest.raises(ValueError, match="is not an amount of memory; write a number and one of B, KB, MB, GB, TB, Ki"):
        parse_bytes(text)


@settings(max_examples=200, derandomize=True)
@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(BYTES_PER_UNIT)))
def test_reading_is_exact_and_rounds_down(number, unit):
    assert parse_bytes(f"{number}{unit}") == int(Fraction(number) * BYTES_PER_UNIT[unit])


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20, "1.00 MiB"),
        (5 * 2**30, "5.00 GiB"),
        (2**50, "1024.00 TiB"),
        (-2048, "-2.00 KiB"),
    ],
)
def test_bytes_are_shown_in_the_largest_binary_unit(count, text):
    assert format_bytes(count) == text


def test_seconds_are_shown_in_a_unit_that_fits():
    assert [format_seconds(s) for s in (2.5, 1.0, 0.0123, 1e-3, 2e-6, 0.0)] == [
        "2.50 s", "1.00 s", "12.30 ms", "1.00 ms", "2.0 us", "0.0 us"
    ]  # fmt: skip


def test_flop_are_shown_in_a_unit_that_fits():
    assert [format_flop(f) for f in (0, 999, 1000, 2_500_000, 10**9, 10**12, 3 * 10**15)] == [
        "0 FLOP", "999 FLOP", "1.00 kFLOP", "2.50 MFLOP", "1.00 GFLOP", "1.00 TFLOP", "3.00 PFLOP"
    ]  # fmt: skip
