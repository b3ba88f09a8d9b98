"""Why a value cannot be saved, or cannot be recomputed: one small function a rule.

A rule looks at a node and the facts about its graph and returns the reason, a noun phrase shown to the user unchanged,
or None. The first rule that objects wins, so the order runs from the most to the least informative reason.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils.checkpoint import CheckpointPolicy

from recompile.registry import facts_about
from recompile.torch_private import SEED_DRAWS
from recompile.work import argument_of

CASTS = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
COLLECTIVE_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d", "c10d_functional", "symm_mem")
PYTORCH_NAMESPACES = (
    "aten",
    "prims",
    "prim",
    "inductor_prims",
    "quantized",
    "quantized_decomposed",
    "_quantized",
    "mkldnn",
)


@dataclass(frozen=True)
class LegalityFacts:
    """What the rules need to know beyond the node itself."""

    owner: dict[fx.Node, fx.Node]  # the node that first owned the storage behind a value
    reads_overwritten: dict[fx.Node, fx.Node]  # a reader of storage -> the later forward node that overwrites it
    forward: frozenset[fx.Node] = frozenset()  # what forward runs whatever is saved
    static_inputs: frozenset[fx.Node] = frozenset()  # parameters and buffers


Rule = Callable[[fx.Node, LegalityFacts], str | None]


def source_line(node: fx.Node) -> str:
    """``file:line`` of the user's code that made the node, or "" where the tracer kept none."""
    trace = node.meta.get("stack_trace") or ""
    frames = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    if not frames:
        return ""
    path, _, rest = frames[-1].removeprefix('File "').partition('", line ')
    return f"{path}:{rest.split(',')[0]}"


def policy_of(node: fx.Node) -> CheckpointPolicy | None:
    """The user's wish from torch.utils.checkpoint, if the node carries one."""
    policy = node.meta.get("recompute")
    return policy if isinstance(policy, CheckpointPolicy) else None


def is_random(node: fx.Node) -> bool:
    """Whether the op draws from a generator. Attention is random only with a dropout probability above zero."""
    if node.target in SEED_DRAWS:
        return True
    if not isinstance(node.target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    return argument_of(node, "dropout_p", "dropout") != 0


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments an op writes to, by its schema; empty for a pure op."""
    if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else [value]
            written += [v for v in values if isinstance(v, fx.Node)]
    return written


# Cannot be recomputed


def is_input(node: fx.Node, facts: LegalityFacts) -> str | None:
    return "an input of the graph" if node.op == "placeholder" else None


def draws_random_numbers(node: fx.Node, facts: LegalityFacts) -> str | None:
    if not is_random(node):
        return None
    if node.target in SEED_DRAWS:
        return "random seeds: drawn again they would differ"
    if node in facts.forward:
        return None  # its draw can be repeated from the generator's state, see recompile.passes.replay_random
    return "random numbers that only backward reads: forward draws them, in the order of the program"


def communicates(node: fx.Node, facts: LegalityFacts) -> str | None:
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace in COLLECTIVE_NAMESPACES:
        return "a collective: every rank would have to run it again"
    return None


def writes_its_arguments(node: fx.Node, facts: LegalityFacts) -> str | None:
    if isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        return "a write to memory that exists: running it twice would write twice"
    return None


def has_effects(node: fx.Node, facts: LegalityFacts) -> str | None:
    target = node.target
    if isinstance(target, torch._ops.OpOverload) and not target._schema.returns:
        return "an op without result, run for its effect"
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() == "with_effects":
        return "an op with an ordered side effect"
    return None


def is_higher_order(node: fx.Node, facts: LegalityFacts) -> str | None:
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return f"a higher-order op ({node.target.name()}) whose body is not looked into"
    return None


def is_custom(node: fx.Node, facts: LegalityFacts) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload) or node.target.namespace in PYTORCH_NAMESPACES:
        return None
    known = facts_about(node.target)
    if known is not None and known.recompute:
        return None
    return (
        f"a custom op ({node.target.namespace}::{node.target._opname}) that may hide state; see recompile.register_op"
    )


def has_data_dependent_size(node: fx.Node, facts: LegalityFacts) -> str | None:
    val = node.meta.get("val")
    sized = torch.Tensor | torch.SymInt | list | tuple
    made_here = free_unbacked_symbols(val) if isinstance(val, sized) else set()
    for argument in node.all_input_nodes:
        known = argument.meta.get("val")
        if made_here and isinstance(known, sized):
            made_here = made_here - free_unbacked_symbols(known)
    if made_here:
        return "a size that depends on the data: it is read once, in forward"
    return None


def reads_what_is_overwritten(node: fx.Node, facts: LegalityFacts) -> str | None:
    writer = facts.reads_overwritten.get(node)
    if writer is None:
        return None
    line = source_line(writer)
    return f"a read of memory that {writer.name}{' at ' + line if line else ''} overwrites later in forward"


def is_pinned(node: fx.Node, facts: LegalityFacts) -> str | None:
    if policy_of(node) is CheckpointPolicy.MUST_SAVE and is_a_view(node, facts) is None:
        return "marked MUST_SAVE by the user's checkpoint policy"
    return None


def is_part_of(parent_rule: Rule) -> Rule:
    """The same rule for an element picked out of a multi-output op."""

    def rule(node: fx.Node, facts: LegalityFacts) -> str | None:
        while node.target is operator.getitem:
            node = node.args[0]
        return parent_rule(node, facts)

    return rule


NO_RECOMPUTE: tuple[Rule, ...] = (
    is_input,
    is_part_of(draws_random_numbers),
    is_part_of(communicates),
    is_part_of(has_effects),
    is_part_of(writes_its_arguments),
    is_part_of(is_higher_order),
    is_part_of(is_custom),
    has_data_dependent_size,
    reads_what_is_overwritten,
    is_pinned,
)


# Cannot be saved


def has_several_outputs(node: fx.Node, facts: LegalityFacts) -> str | None:
    if isinstance(node.meta.get("val"), list | tuple | dict):
        return "several outputs: each is saved on its own"
    return None


def is_not_a_value(node: fx.Node, facts: LegalityFacts) -> str | None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
        return None
    return None if isinstance(val, list | tuple | dict) else f"a {type(val).__name__}, which autograd cannot carry"


def is_sparse(node: fx.Node, facts: LegalityFacts) -> str | None:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.layout is not torch.strided:
        return f"a tensor of layout {val.layout}"
    return None


def is_a_view(node: fx.Node, facts: LegalityFacts) -> str | None:
    base = facts.owner[node]
    if base is node or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    return f"a view of {base.name}, which is kept in its place"


def is_marked_for_recomputation(node: fx.Node, facts: LegalityFacts) -> str | None:
    if policy_of(node) is CheckpointPolicy.MUST_RECOMPUTE:
        return "marked MUST_RECOMPUTE by the user's checkpoint policy"
    return None


def is_a_cast_of_a_parameter(node: fx.Node, facts: LegalityFacts) -> str | None:
    """Under autocast: the parameter is allocated anyway, so its copy in another dtype is made again, not kept."""
    if node.target not in CASTS or facts.owner[node.all_input_nodes[0]] not in facts.static_inputs:
        return None
    return f"a cast of {facts.owner[node.all_input_nodes[0]].name}, a parameter or buffer that is allocated anyway"


def is_inside_checkpointed_region(node: fx.Node, facts: LegalityFacts) -> str | None:
    """A value of a torch.utils.checkpoint region that forward reads nowhere outside of that region.

    The region's results stay free to be kept, as eager mode keeps them for whoever reads them.
    """
    region = node.meta.get("ac_graph_id")
    if region is None or policy_of(node) is not CheckpointPolicy.PREFER_RECOMPUTE:
        return None
    readers = [user for user in node.users if user in facts.forward]
    if readers and all(user.meta.get("ac_graph_id") == region for user in readers):
        return "inside a torch.utils.checkpoint region, which is computed again in backward"
    return None


# Wishes rather than limits: they hold for values that can be recomputed.
RATHER_NOT_SAVE: tuple[Rule, ...] = (is_inside_checkpointed_region, is_a_cast_of_a_parameter)
NO_SAVE: tuple[Rule, ...] = (has_several_outputs, is_not_a_value, is_sparse, is_a_view, is_marked_for_recomputation)


def first_reason(rules: tuple[Rule, ...], node: fx.Node, facts: LegalityFacts) -> str | None:
    """The reason of the first rule that objects to the node, or None."""
    return next((reason for rule in rules if (reason := rule(node, facts)) is not None), None)
