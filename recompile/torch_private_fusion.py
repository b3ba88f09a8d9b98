"""Which of the fusions that Inductor would make it may make of our programs: none that keeps memory waiting.

Inductor keeps nodes that merely read the same value apart when they stand far from each other, because fusing them
lengthens lives ("Nodes are too far away"), but not a producer and its reader. Where one weight is used twice, the bias
gradient of the one use is added to that of the other: fused with that add, the first sum waits until the second can be
made, and what it sums up stays in memory through all that lies between. For four blocks traversed twice the peak was
three times what the order of the graph needs.

Likewise a sum of a few elements is computed anew in every reader, and what it sums up, a multiple of it, waits for the
last of them: for the gradient of a position bias that all layers of a T5 share, until the end of backward. With such a
sum in a graph none is unrolled in it.

And a product and a sum become one call (``addmm``) in the sum's place, however late that is. Where the embedding
and the output layer share their weight, the gradient of the logits would be kept through the whole of backward for it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx as fx
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.fx_passes import post_grad
from torch._inductor.virtualized import V
from torch._ops import OpOverload

from recompile.joint import Kind
from recompile.sizes import AT_HINTS
from recompile.work import kind_of, num_elements


def with_short_lives(inner_compile: Callable[..., Any], asked: Mapping[str, Any]) -> Callable[..., Any]:
    """The compilation of one graph, forward's or backward's, without fusions that keep memory waiting.

    ``asked``: Inductor's options that somebody chose; they count.
    """

    @functools.wraps(inner_compile)
    def compiled(graph: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        with short_lives(graph), inductor_config.patch(dict(asked)):
            return inner_compile(graph, *args, **kwargs)

    return compiled


@contextmanager
def short_lives(graph: fx.GraphModule) -> Iterator[None]:
    """What Inductor makes of the graph in the block has no fusion that keeps memory waiting."""
    prefer_unfused = post_grad.should_prefer_unfused_addmm

    def is_unfused(match: Any) -> bool:
        return prefer_unfused(match) or keeps_factors_waiting(match)

    with (
        V.set_choices_handler(choices()),
        mock.patch.object(post_grad, "should_prefer_unfused_addmm", is_unfused),
        inductor_config.patch({UNROLLED: FEWEST_SUMMED} if keeps_summands_waiting(graph) else {}),
    ):
        yield


def choices() -> InductorChoices:
    """The user's choices (``inductor_choices_class``) or Inductor's, less fusions that keep memory waiting."""
    make = inductor_config.inductor_choices_class or InductorChoices
    return _short_lived(type(make()))()


# Nodes between a producer and its reader from which on waiting counts: a third of a transformer block's backward.
# Inductor takes 64 for nodes that merely share a read, more than a whole block.
LONGEST_WAIT = 16
# Inductor's option: sums of fewer elements are unrolled. Two: none is (of one element there is nothing to sum).
UNROLLED, FEWEST_SUMMED = "unroll_reductions_threshold", 2


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
    """Whether a producer that runs with a reader well behind it holds up more bytes than are made so much later.

    Held up is what it and all that must follow it read, where nobody reads that any more when the reader runs.
    """
    if reader.max_order - producer.min_order <= LONGEST_WAIT or may_run_at_once(scheduler, producer, reader):
        return False
    late = [producer, *must_follow(scheduler, producer, reader)]
    made = {dep.name: dep for node in late for dep in node.read_writes.writes}
    waiting = {dep.name: dep for node in late for dep in node.read_writes.reads if dep.name not in made}
    held_bytes = 0
    for name, dep in waiting.items():
        buffer = scheduler.name_to_buf.get(name)
        if buffer is not None and all(getattr(u.node, "max_order", math.inf) < reader.min_order for u in buffer.users):
            held_bytes += scheduler.dep_size_hint(dep)
    return held_bytes > sum(map(scheduler.dep_size_hint, made.values()))


def must_follow(scheduler: Any, producer: Any, reader: Any) -> list[Any]:
    """What stands between a producer and its reader and needs the producer: made one, they run before all of it."""
    names = producer.get_operation_names()
    return [
        node
        for node in scheduler.nodes
        if producer.max_order < node.min_order < reader.min_order and not names.isdisjoint(node.ancestors)
    ]


def may_run_at_once(scheduler: Any, producer: Any, reader: Any) -> bool:
    """Whether the reader, however late it stands, needs nothing made after the producer, and makes no more than that.

    Both then run in the producer's place, where Inductor puts what it fuses unless something is missing: the update of
    a batch norm's running statistics, which stands at the end of forward, with the kernel that makes the statistics.
    """
    own = producer.get_operation_names() | reader.get_operation_names()
    awaited = (scheduler.name_to_node[name] for name in reader.ancestors if name not in own)
    if any(node.max_order > producer.max_order for node in awaited):
        return False
    return written_bytes(scheduler, reader) <= written_bytes(scheduler, producer)


def written_bytes(scheduler: Any, node: Any) -> int:
    return sum(scheduler.dep_size_hint(dep) for dep in node.read_writes.writes)


def keeps_summands_waiting(graph: fx.GraphModule) -> bool:
    """Whether Inductor would compute a sum anew in a reader well behind it."""
    place = {node: position for position, node in enumerate(graph.graph.nodes)}
    limit = getattr(inductor_config, UNROLLED)
    return any(
        FEWEST_SUMMED <= num_summed(node) < limit and last_read(node, place) - place[node] > LONGEST_WAIT
        for node in place
        if kind_of(node) is Kind.REDUCTION
    )


def num_summed(node: fx.Node) -> int:
    """Elements that go into each element of a reduction's result; 1 for one of several results, a variance or a mean,
    which Inductor does not unroll.
    """
    source = node.all_input_nodes[0].meta["val"]
    if not all(isinstance(val, torch.Tensor) for val in (source, node.meta["val"])):
        return 1
    return num_elements(source) // max(1, num_elements(node.meta["val"]))


def keeps_factors_waiting(match: Any) -> bool:
    """Whether a product moved to the sum that it goes into, well behind it, keeps more bytes than its result has.

    ``match``: of ``mm`` and ``add``, as Inductor's pattern has it.
    """
    total = match.output_node()
    product = next(node for node in match.nodes if node is not total)
    place = {node: position for position, node in enumerate(total.graph.nodes)}
    if place[total] - place[product] <= LONGEST_WAIT:
        return False
    waiting = [  # what forward's caller passed in, parameters above all, is there anyway
        factor
        for factor in {base_of(argument) for argument in match.args}
        if not factor.name.startswith("primals") and last_read(factor, place, but_for=product) < place[total]
    ]
    return sum(map(num_bytes, waiting)) > num_bytes(product)


def base_of(node: fx.Node) -> fx.Node:
    """What a transposed or reshaped factor is a view of."""
    while node.op == "call_function" and isinstance(node.target, OpOverload) and node.target.is_view:
        node = node.args[0]
    return node


def last_read(node: fx.Node, place: Mapping[fx.Node, int], but_for: fx.Node | None = None) -> int:
    """The place of the last op that reads a value, through views or not, ``but_for`` one."""
    found, pending = -1, list(node.users)
    while pending:
        user = pending.pop()
        if user is not but_for:
            is_view = isinstance(user.target, OpOverload) and user.target.is_view
            found = max(found, -1 if is_view else place[user])
            pending += user.users if is_view else ()
    return found


def num_bytes(node: fx.Node) -> int:
    val = node.meta["val"]
    return math.prod(AT_HINTS.shape(val)) * val.dtype.itemsize
