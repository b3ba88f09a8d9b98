"""Quantities for people and back: GiB is 2**30 bytes, GB is 1e9."""

from __future__ import annotations

import re
from fractions import Fraction

BYTES_PER_UNIT = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(text: str) -> int:
    """``"1.5GiB"`` or ``"800MB"`` as bytes, rounded down. Raises ValueError that says what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*((?:[kmgt]i?)?b)\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(
            f"{text!r} is not an amount of memory; write a number and one of B, KB, MB, GB, TB, KiB, MiB, GiB, TiB"
        )
    return int(Fraction(match[1]) * BYTES_PER_UNIT[match[2].upper()])


def format_bytes(count: int) -> str:
    """Bytes in the largest binary unit that keeps the number at or above 1."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count} B"


def format_seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"


def format_flop(flop: int) -> str:
    for unit, size in (("PFLOP", 10**15), ("TFLOP", 10**12), ("GFLOP", 10**9), ("MFLOP", 10**6), ("kFLOP", 10**3)):
        if flop >= size:
            return f"{flop / size:.2f} {unit}"
    return f"{flop} FLOP"
