"""Errors that reach the user. They pass through Dynamo unwrapped, so ``except`` catches them as documented."""

from __future__ import annotations

from recompile.torch_private import ShortenTraceback


class _PlainError(ShortenTraceback):
    """Shows its own text alone: Dynamo appends advice on debugging Dynamo to what passes through it."""

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)
        self.message = message

    def __str__(self) -> str:
        return self.message


class OptionError(_PlainError, ValueError):
    """An option that is unknown or has a value that is not accepted; the text names it and what is accepted."""


class BudgetError(_PlainError, RuntimeError):
    """No plan keeps the step's peak inside the budget. ``floor_bytes`` is the smallest peak that was found."""

    def __init__(self, message: str, floor_bytes: int):
        super().__init__(message)
        self.floor_bytes = floor_bytes


class PlanError(_PlainError, RuntimeError):
    """A graph that cannot be split: a value that backward needs can be neither saved nor recomputed."""
