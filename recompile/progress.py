"""Word of long computations to whoever asked for it (``verbose=True``): nobody does, and it costs nothing."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listener: contextvars.ContextVar[Callable[[str], None] | None] = contextvars.ContextVar("listener", default=None)


@contextmanager
def told_to(listener: Callable[[str], None] | None) -> Iterator[None]:
    """Hands what is told in the block to ``listener``; None: to nobody."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def tell(message: str) -> None:
    """Say how far a computation is, in a few words."""
    listener = _listener.get()
    if listener is not None:
        listener(message)
