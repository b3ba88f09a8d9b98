"""Which Pythons and torches recompile works with, and why every other one is refused.

tools/set_up.py runs this file by its path, under any Python: standard library only, and the syntax of Python 3.8.
"""

from __future__ import annotations

import re
import sys

LEAST_PYTHON = (3, 11)
FIRST_PYTHON_TOO_NEW = (3, 14)
LEAST_TORCH = (2, 11)


def dotted(release: tuple[int, ...]) -> str:
    """(2, 11) -> "2.11"."""
    return ".".join(str(number) for number in release)


def parse_release(version: str) -> tuple[int, ...] | None:
    """Major and minor of a version: "2.13.0+cpu" -> (2, 13), "2.14.0a0+git" -> (2, 14). None if it begins otherwise.

    What follows them is not looked at, so a nightly build of 2.11 counts as 2.11.
    """
    found = re.match(r"(\d+)\.(\d+)", version)
    return tuple(int(number) for number in found.groups()) if found else None


def why_torch_is_refused(version: str) -> str | None:
    """The reason if it is too old, or if its version cannot be read; None if it will do."""
    release = parse_release(version)
    if release is not None and release >= LEAST_TORCH:
        return None
    return f"recompile needs torch {dotted(LEAST_TORCH)} or newer, not torch {version or 'of an unknown version'}"


def why_python_is_refused(version: tuple[int, ...]) -> str | None:
    """The reason if it is too old or too new; None if it will do."""
    if LEAST_PYTHON <= version[:2] < FIRST_PYTHON_TOO_NEW:
        return None
    bounds = f"{dotted(LEAST_PYTHON)} or newer and below {dotted(FIRST_PYTHON_TOO_NEW)}"
    return f"recompile needs Python {bounds}, not Python {dotted(version[:3])}"


def check_torch(version: str) -> None:
    """Raise ImportError, with what to install, if torch is too old."""
    reason = why_torch_is_refused(version)
    if reason is not None:
        raise ImportError(f"{reason}: install one with `pip install 'torch>={dotted(LEAST_TORCH)}'`.")


def check_python(version: tuple[int, ...] = tuple(sys.version_info[:3])) -> None:
    """Raise ImportError, with what to install, if this Python is not one that recompile works with."""
    reason = why_python_is_refused(version)
    if reason is not None:
        raise ImportError(f"{reason}: install Python {dotted(LEAST_PYTHON)} and use that.")
