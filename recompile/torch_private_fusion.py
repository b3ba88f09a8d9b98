"""Which of the fusions that Inductor would make it may make of our programs.

Inductor keeps nodes that merely read the same value apart when they stand far from each other, because fusing them
lengthens lives ("Nodes are too far away"), but not a producer and its reader. Where one weight is used twice, the bias
gradient of the one use is added to that of the other: fused with that add, the first sum waits until the second can be
made, and what it sums up stays in memory through all that lies between. For four blocks traversed twice the peak was
three times what the order of the graph needs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.virtualized import V


def with_short_lives(inner_compile: Callable[..., Any]) -> Callable[..., Any]:
    """The compilation of one graph, forward's or backward's, without fusions that keep memory waiting."""

    @functools.wraps(inner_compile)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        with V.set_choices_handler(choices()):
            return inner_compile(*args, **kwargs)

    return compiled


def choices() -> InductorChoices:
    """The user's choices (``inductor_choices_class``) or Inductor's, less fusions that keep memory waiting."""
    make = inductor_config.inductor_choices_class or InductorChoices
    return _short_lived(type(make()))()


# Nodes between a producer and its reader from which on waiting counts: a third of a transformer block's backward.
# Inductor takes 64 for nodes that merely share a read, more than a whole block.
LONGEST_WAIT = 16


@functools.cache
def _short_lived(base: type[InductorChoices]) -> type[InductorChoices]:
    class ShortLives(base):
        @staticmethod
        def can_fuse_vertical(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
            return base.can_fuse_vertical(scheduler, node1, node2, shared_data_score) and not keeps_memory_waiting(
                scheduler, node1, node2
            )

    return ShortLives


def keeps_memory_waiting(scheduler: Any, producer: Any, reader: Any) -> bool:
    """Whether a producer well before its reader holds up more bytes, which nobody reads that late, than it makes."""
    if reader.max_order - producer.min_order <= LONGEST_WAIT:
        return False
    freed_bytes = 0
    for dep in producer.read_writes.reads:
        buffer = scheduler.name_to_buf.get(dep.name)
        if buffer is not None and all(getattr(u.node, "max_order", math.inf) < reader.min_order for u in buffer.users):
            freed_bytes += scheduler.dep_size_hint(dep)
    return freed_bytes > sum(scheduler.dep_size_hint(dep) for dep in producer.read_writes.writes)
