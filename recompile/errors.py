"""Errors that reach the user. They pass through Dynamo unwrapped, so ``except`` catches them as documented."""

from __future__ import annotations

from recompile.torch_private import ShortenTraceback


class OptionError(ShortenTraceback, ValueError):
    """An option that is unknown or has a value that is not accepted; the text names it and what is accepted."""

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)


class BudgetError(ShortenTraceback, RuntimeError):
    """No plan keeps the step's peak inside the budget. ``floor_bytes`` is the smallest peak that was found."""

    def __init__(self, message: str, floor_bytes: int):
        super().__init__(message, first_useful_frame=None)
        self.floor_bytes = floor_bytes


class PlanError(ShortenTraceback, RuntimeError):
    """A graph that cannot be split: a value that backward needs can be neither saved nor recomputed."""

    def __init__(self, message: str):
        super().__init__(message, first_useful_frame=None)
