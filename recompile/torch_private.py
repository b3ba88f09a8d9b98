"""PyTorch's private modules, imported here and in the files ``torch_private_*`` alone. Everything is a thin name for
something private, so that a new torch release is their work only. Written against torch 2.11 to 2.14.
"""

from __future__ import annotations

import inspect
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch._dynamo
import torch._inductor.config as inductor_config
import torch.fx as fx
import torch.fx.traceback
from torch._dynamo.exc import ShortenTraceback
from torch._functorch import partitioners
from torch._functorch._aot_autograd import autograd_cache
from torch._functorch._aot_autograd import utils as aot_utils
from torch._functorch.compile_utils import fx_graph_cse
from torch._inductor import inductor_prims
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx.experimental.symbolic_shapes import StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy
from torch.utils.checkpoint import CheckpointPolicy

from recompile.versions import check_torch

check_torch(torch.__version__)

__all__ = ["CustomPartitionerFn", "ShortenTraceback", "cache_dir", "fx_graph_cse"]

# Inductor draws seeds once and makes random numbers as pure functions of them.
SEED_DRAWS = (inductor_prims.seeds, inductor_prims.seed)
RANDOM_FROM_SEED = (inductor_prims.random, inductor_prims.randint)
SEEDS = inductor_prims.seeds  # all seeds of a program in one tensor

must_be_in_forward = partitioners._must_be_in_forward
must_be_in_backward = partitioners._must_be_in_backward


def is_tangent(node: fx.Node) -> bool:
    """A placeholder of backward: the gradient of a forward output, or a seed drawn for backward alone."""
    return aot_utils._is_tangent(node) or aot_utils._is_bwd_seed_offset(node)


def is_symbol(node: fx.Node) -> bool:
    """Whether the node's value is a symbolic size, float or bool rather than a tensor."""
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))


def is_assertion_symbol(node: fx.Node) -> bool:
    """A SymBool that only run-time assertions read: forward checks it, backward must not be handed it."""
    return (
        isinstance(node.meta.get("val"), torch.SymBool)
        and len(node.users) > 0
        and all(user.target is torch.ops.aten._assert_scalar.default for user in node.users)
    )


def region_budgets(graph: fx.Graph) -> list[float]:
    """The values of ``torch.autograd.graph.region_activation_memory_budget`` around a graph's nodes, ascending."""
    read = getattr(torch.fx.traceback, "_get_memory_budget_annotation", None)
    if read is None:
        return []
    return sorted({budget for node in graph.nodes if (budget := read(node)) is not None})


def is_opaque(node: fx.Node) -> bool:
    """Whether the node's value is a script or opaque object, which has no size that anyone could state."""
    check = getattr(partitioners, "is_opaque_node", None)
    return bool(check(node)) if check else False


def storage_key(val: torch.Tensor) -> int | None:
    """An identity of the storage behind a fake tensor; equal for views of one base. None where it has no storage."""
    return val.untyped_storage()._cdata if torch._C._has_storage(val) else None


def split_joint_graph(
    joint: fx.GraphModule, saved: list[fx.Node], num_fwd_outputs: int, static_inputs: list[fx.Node]
) -> tuple[fx.GraphModule, fx.GraphModule, int]:
    """Forward and backward modules for a list of saved nodes, in the calling convention AOTAutograd expects.

    The third value is the number of sizes among forward's outputs; these come last.
    """
    symbols = [node for node in saved if is_symbol(node) and not is_assertion_symbol(node)]
    opaque = [node for node in saved if is_opaque(node)]
    values = [node for node in saved if not is_symbol(node) and node not in opaque]
    optional = {"saved_opaque_nodes": opaque, "static_lifetime_input_nodes": static_inputs}
    accepted = inspect.signature(partitioners._extract_fwd_bwd_modules).parameters
    forward, backward = partitioners._extract_fwd_bwd_modules(
        joint,
        values,
        saved_sym_nodes=symbols,
        num_fwd_outputs=num_fwd_outputs,
        **{name: value for name, value in optional.items() if name in accepted},
    )
    return forward, backward, len(symbols)  # the call has added the symbols that sizes of saved values mention


def replay_with_saved_state(
    joint: fx.GraphModule,
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    random_ops: list[fx.Node],
    num_symbols: int,
) -> None:
    """Functionalize the random state of ops that run in both graphs, in place; joint nodes are marked meanwhile."""
    marks = {node: node.meta.get("recompute") for node in joint.graph.nodes}
    for node in marks:
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE if node in random_ops else None
    partitioners.functionalize_rng_ops(joint, forward, backward, num_symbols)
    for node, mark in marks.items():
        node.meta["recompute"] = mark


def thread_generators(forward: fx.GraphModule, backward: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Pass graph-safe random state through higher-order ops as PyTorch's partitioners do (a no-op where there is
    none).
    """
    thread = getattr(partitioners, "thread_graphsafe_rng_from_hops", None)
    if thread is None:
        return forward, backward
    return thread(forward, is_backward=False), thread(backward, is_backward=True)


# Sizes


@dataclass(frozen=True, eq=False)
class SizeSymbol:
    """A symbol that sizes are made of. ``hint`` is None where only the data tell."""

    name: str
    symbol: Any  # sympy's
    hint: int | None  # the number at the first trace, or the one that mark_dynamic(hint_override=) gave
    upper_bound: int | None  # known from guards and checks; None: unbounded
    declared_max: int | None  # promised by the user: torch._dynamo.mark_dynamic(max=)
    example: torch.SymInt  # a size that is this symbol, for guards; of another size where there is none


def size_symbols(sizes: Iterable[torch.SymInt]) -> list[SizeSymbol]:
    """The symbols in sizes, in the order in which they turn up."""
    found: dict[Any, torch.SymInt] = {}
    for size in sizes:
        for symbol in sorted(getattr(size.node.expr, "free_symbols", ()), key=str):
            if symbol not in found or size.node.expr == symbol:
                found[symbol] = size
    return [_size_symbol(symbol, size) for symbol, size in found.items()]


def _size_symbol(symbol: Any, size: torch.SymInt) -> SizeSymbol:
    env = size.node.shape_env
    hint = env.backed_var_to_val.get(symbol)
    return SizeSymbol(
        name=str(symbol),
        symbol=symbol,
        hint=int(hint) if _is_integer(hint) else None,
        upper_bound=_upper_bound(env, symbol),
        declared_max=_declared_maxima(env).get(symbol),
        example=size,
    )


def evaluated(size: torch.SymInt, values: Mapping[Any, int], assumed: int, numbers: dict[Any, int]) -> int:
    """A size with numbers for its symbols: at most ``values``, else the hint, else ``assumed`` or the upper bound.

    ``numbers`` keeps results by expression.
    """
    expression, env = size.node.expr, size.node.shape_env
    if expression not in numbers:
        taken = {symbol: values.get(symbol, _default(env, symbol, assumed)) for symbol in expression.free_symbols}
        result = expression.xreplace({symbol: sympy.Integer(number) for symbol, number in taken.items()})
        number = int(result) if _is_integer(result) else assumed
        lower = {symbol: min(env.var_to_range[symbol].lower, taken[symbol]) for symbol in taken if symbol in values}
        ranges = {symbol: ValueRanges(lower.get(symbol, taken[symbol]), taken[symbol]) for symbol in taken}
        upper = bound_sympy(expression, ranges).upper if lower else number
        numbers[expression] = max(number, int(upper)) if _is_integer(upper) else number
    return numbers[expression]


def _default(env: Any, symbol: Any, assumed: int) -> int:
    hint = env.backed_var_to_val.get(symbol)
    if _is_integer(hint):
        return int(hint)
    upper = _upper_bound(env, symbol)
    return assumed if upper is None else min(assumed, upper)


def _is_integer(number: Any) -> bool:
    return isinstance(number, int | sympy.Integer)  # a nested tensor's ragged size has a singleton for a hint


def _upper_bound(env: Any, symbol: Any) -> int | None:
    known = env.var_to_range.get(symbol)
    return int(known.upper) if known is not None and _is_integer(known.upper) else None


def _declared_maxima(env: Any) -> dict[Any, int]:
    """By symbol the largest size that the user promised to ``torch._dynamo.mark_dynamic``."""
    maxima: dict[Any, int] = {}
    for tracked in env.tracked_fakes or ():
        constraints = getattr(tracked.symbolic_context, "constraint_sizes", None) or ()
        for size, constraint in zip(getattr(tracked.fake, "shape", ()), constraints, strict=False):
            upper = constraint.vr.upper if isinstance(constraint, StrictMinMaxConstraint) else None
            if _is_integer(upper) and isinstance(size, torch.SymInt):
                maxima[size.node.expr] = min(int(upper), maxima.get(size.node.expr, int(upper)))
    return maxima


def guard_at_most(symbol: SizeSymbol, limit: int) -> None:
    """Let compiled code serve sizes up to this one only: for a larger one Dynamo and the caches compile again."""
    env = symbol.example.node.shape_env
    bool(env.create_symintnode(symbol.symbol, hint=symbol.hint) <= limit)


def upper_bounds(inputs: Iterable[Any]) -> tuple[str, ...]:
    """The largest values that the guards so far allow to a graph's symbolic inputs: ``s77<=64``."""
    return tuple(
        f"{symbol.name}<={symbol.upper_bound}"
        for symbol in size_symbols(value for value in inputs if isinstance(value, torch.SymInt))
    )


# Inductor


def compile_with_inductor(
    model: fx.GraphModule,
    inputs: list[Any],
    config_patches: dict[str, Any],
    partitioner: CustomPartitionerFn | None,
    emitted: Any = None,
) -> Any:
    """Inductor's own entry, with options for this compilation and, for training, a partitioner.

    ``emitted`` (a ``torch_private_emitted.Emitted``) takes the programs of both halves; backward is compiled at once
    then, where AOTAutograd would wait for the first call of it.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if partitioner is None:
        return compile_fx(model, inputs, config_patches=dict(config_patches))
    from recompile.torch_private_emitted import recording
    from recompile.torch_private_fusion import with_short_lives
    from recompile.torch_private_order import with_planned_order

    inner = with_planned_order(with_short_lives(compile_fx_inner, config_patches))
    patches = {**config_patches, "custom_partitioner_fn": partitioner}
    if emitted is None:
        return compile_fx(model, inputs, inner_compile=inner, config_patches=patches)
    with functorch_config.patch(force_non_lazy_backward_lowering=True):
        return compile_fx(model, inputs, inner_compile=recording(inner, emitted), config_patches=patches)


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """Inductor's options behind a ``mode=`` name. Raises RuntimeError for an unknown name."""
    import torch._inductor as inductor

    return dict(inductor.list_mode_options(mode))


def inductor_mode_names() -> list[str]:
    import torch._inductor as inductor

    return list(inductor.list_mode_options())


def inductor_option_names() -> frozenset[str]:
    return frozenset(inductor_config.get_config_copy())


def inductor_option_type(name: str) -> Any:
    return inductor_config.get_type(name)


@contextmanager
def recorded_cache_keys() -> Iterator[list[str]]:
    """Collects the keys under which AOTAutograd looks up compiled code while the block runs; none where it does not.

    torch computes a key from the traced program, its inputs, every setting and the partitioner's ``uuid``. Dynamo
    compiles under a lock, so one block runs at a time.
    """
    compute, keys = autograd_cache.autograd_cache_key, []

    def record(*args: Any, **kwargs: Any) -> tuple[str, list[str]]:
        key, lines = compute(*args, **kwargs)
        keys.append(key)
        return key, lines

    autograd_cache.autograd_cache_key = record
    try:
        yield keys
    finally:
        autograd_cache.autograd_cache_key = compute


def num_cached_codes_loaded() -> int:
    """How many graphs this process took from AOTAutograd's cache so far."""
    return torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"]


def record_dir() -> pathlib.Path:
    """Where decisions are stored beside Inductor's own cache, so that clearing one clears the other."""
    return pathlib.Path(cache_dir()) / "recompile"


# Dynamo


@dataclass(frozen=True)
class Compilation:
    """What Dynamo is compiling: the torch.compile wrapper that asked, the code object, and Dynamo's id for it."""

    wrapper: Any | None
    code: Any | None
    compile_id: str


def compilation_at_hand() -> Compilation:
    """Inside a backend call, whom it serves; all empty when the backend was called directly."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:
        return Compilation(None, None, "")
    compile_id = str(torch._guards.CompileContext.current_compile_id())
    return Compilation(innermost_backend(output.compiler_fn), output.root_tx.f_code, compile_id)


def innermost_backend(backend: Any) -> Any:
    """Strip Dynamo's own wrappers off a backend callable."""
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def backends_of(compiled: Any) -> list[tuple[Any, Any]]:
    """What compiled a thing that torch.compile returned: pairs of innermost backend and code object of the original.

    A module compiled in place gives one pair for itself and each submodule that is compiled, in place or not.
    """
    from torch._dynamo.eval_frame import OptimizeContext, OptimizedModule

    if isinstance(compiled, OptimizedModule):
        return [(innermost_backend(compiled.dynamo_ctx.callback), original_code(compiled))]
    if isinstance(compiled, torch.nn.Module):
        parts = list(compiled.modules())
        calls = [part if isinstance(part, OptimizedModule) else part._compiled_call_impl for part in parts]
        return [pair for call in calls if call is not None for pair in backends_of(call)]
    cells = getattr(compiled, "__closure__", None) or ()
    contexts = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, OptimizeContext)]
    return [(innermost_backend(context.callback), original_code(compiled)) for context in contexts]


def original_code(compiled: Any) -> Any | None:
    """The code object of the function or forward method that was compiled, where it can be found."""
    target = getattr(compiled, "_torchdynamo_orig_callable", getattr(compiled, "_orig_mod", compiled))
    module = target if isinstance(target, torch.nn.Module) else getattr(target, "__self__", None)
    if isinstance(module, torch.nn.Module):
        target = module.forward
    return getattr(inspect.unwrap(target), "__code__", None)


def compilations_of(code: Any) -> list[tuple[Any, str]]:
    """What Dynamo holds compiled for a code object: the backend that made it and the compilation's id.

    Empty after ``torch._dynamo.reset()``.
    """
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    entries = _debug_get_cache_entry_list(code) if code is not None else []
    return [(innermost_backend(entry.backend), str(entry.compile_id)) for entry in entries]
