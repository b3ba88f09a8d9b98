"""What a node of a joint graph is and what one run of it costs: its kind, FLOP and bytes, from shapes alone.

For ops as AOTAutograd leaves them after Inductor's decompositions. Nothing is run and no size is specialised: a
symbolic size counts at its hint, or at the number that ``sizes`` has for it. ``kind_of`` says what Inductor makes of an
op; ``work_of``, what that costs.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from recompile.joint import Kind, Work
from recompile.registry import facts_about
from recompile.sizes import AT_HINTS, Sizes

aten = torch.ops.aten


def words(text: str) -> frozenset[str]:
    """The words of a text, for tables of op names."""
    return frozenset(text.split())


# Operations per output element of what Inductor makes pointwise code of; one tagged pointwise but not listed counts 1.
# To one digit, in instructions at the full rate. NVIDIA's CUDA programming guide gives the special function unit (1/x,
# 1/sqrt(x), 2**x, log2) an eighth to a quarter of it: 8. exp, erf or tanh are one or two of those and a polynomial: 20.
# Philox 4x32-10 is ten rounds of ten instructions, and Inductor's code keeps one of its four numbers: 100. Only that
# can outweigh the traffic of an op by itself: an H100 does 20 float32 FLOP per byte, so 160 hide behind 8 bytes.
FLOP_PER_ELEMENT = {
    name: flop
    for flop, names in {
        0: """
            _to_copy _unsafe_index _unsafe_masked_index arange as_strided_copy as_strided_scatter broadcast_tensors cat
            clone constant_pad_nd convert_element_type copy copy_strided device_put diagonal_scatter embedding empty
            empty_like empty_permuted empty_strided expand_copy fill flip full full_like gather index index_select
            inductor_force_stride_order inductor_lookup_seed iota lift_fresh_copy new_empty new_empty_strided new_full
            new_ones new_zeros ones ones_like permute_copy repeat rev roll scalar_tensor select_copy select_scatter
            slice_copy slice_scatter squeeze_copy stack unfold_copy unsqueeze_copy upsample_nearest1d upsample_nearest2d
            upsample_nearest3d view_copy zero zeros zeros_like""",
        1: """
            __and__ __lshift__ __or__ __rshift__ __xor__ _adaptive_avg_pool2d _low_memory_max_pool_offsets_to_indices
            _low_memory_max_pool_with_offsets _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d abs add avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward
            bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min copysign eq floor fmax fmin
            ge gt isfinite isinf isnan le leaky_relu leaky_relu_backward logical_and logical_not logical_or
            logical_xor lt masked_fill max_pool2d_with_indices_backward maximum minimum mul ne neg relu round rsub
            shift_left shift_right_arithmetic sign signbit sub threshold_backward tril triu trunc
            upsample_nearest2d_backward where""",
        2: "addcmul fma lerp square",
        8: "addcdiv div floor_divide fmod hypot reciprocal remainder rsqrt sqrt sqrt_backward true_divide",
        20: """
            acos acosh asin asinh atan atan2 atanh bessel_i0 bessel_i1 bessel_j0 bessel_j1 bucketize cbrt cos cosh elu
            elu_backward erf erf_inv erfc erfcx erfinv exp exp2 expm1 gelu gelu_backward glu i0 ldexp lgamma log log10
            log1p log2 log_sigmoid_forward logaddexp logit mish ndtri nextafter pow sigmoid sigmoid_backward silu
            silu_backward sin sinc sinh softplus softplus_backward special_bessel_j0 special_bessel_j1
            special_bessel_y0 special_bessel_y1 special_erf special_erfcx special_i1 special_modified_bessel_i0
            special_modified_bessel_i1 spherical_bessel_j0 tan tanh tanh_backward xlogy zeta""",
        100: "inductor_randint inductor_random",
    }.items()
    for name in names.split()
}
# Random ops that stay ops, under Inductor's fallback_random: library calls, at the price of the numbers they draw.
DRAWS = words("bernoulli native_dropout normal rand rand_like randint randint_like randn randn_like uniform")
FLOP_PER_DRAW = FLOP_PER_ELEMENT["inductor_random"]

# Operations per input element of what Inductor makes reductions and scans of; those not listed with a number count 1.
REDUCTIONS = words("""
    _fused_rms_norm _log_softmax _log_softmax_backward_data _softmax _softmax_backward_data all amax amin aminmax any
    argmax argmin count_nonzero cummax cummin cumprod cumsum linalg_vector_norm logcumsumexp logsumexp max
    max_pool2d_with_indices max_pool3d_with_indices mean min nansum native_batch_norm native_batch_norm_backward
    native_group_norm native_group_norm_backward native_layer_norm native_layer_norm_backward norm
    prepare_softmax_online prod std std_mean sum var var_mean xor_sum
    """)
FLOP_PER_REDUCED = dict.fromkeys(
    ("_log_softmax", "_softmax", "logcumsumexp", "logsumexp", "prepare_softmax_online"), FLOP_PER_ELEMENT["exp"]
)

# Tagged pointwise, but Inductor calls a library (``fallbacks`` in torch/_inductor/lowering.py).
LIBRARY_CALLS = words("""
    angle digamma gcd igamma igammac polygamma polar special_airy_ai special_chebyshev_polynomial_t
    special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
    special_hermite_polynomial_h special_hermite_polynomial_he special_i0e special_i1e special_laguerre_polynomial_l
    special_legendre_polynomial_p special_log_ndtr special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_spherical_bessel_j0 special_zeta
    """)

# Ops whose traffic is not "read every input, write every output".
GATHERS = words("_unsafe_index _unsafe_masked_index embedding gather index index_select inductor_lookup_seed take")
OVERWRITES_A_PART = words("as_strided_scatter diagonal_scatter select_scatter slice_scatter")
OVERWRITES_ALL = words("copy copy_ fill fill_ zero zero_")
EMPTY = words("empty empty_like empty_permuted empty_strided new_empty new_empty_strided")
WINDOWED = words("_adaptive_avg_pool2d _low_memory_max_pool_with_offsets avg_pool2d avg_pool3d")  # reads all its input
# Of one argument they want the sizes alone; by its place.
SIZED = dict.fromkeys(words("full_like new_full new_ones new_zeros ones_like zeros_like"), 0) | dict.fromkeys(
    words("avg_pool2d_backward avg_pool3d_backward"), 1
)
MOVES_BETWEEN_DEVICES = words("_to_copy copy copy_ device_put")
METADATA_READERS = words("_assert_tensor_metadata dim size sym_numel sym_size sym_storage_offset sym_stride")

# Ops without a formula in torch's registry -> the op whose formula and leading arguments they share.
SAME_FORMULA = {
    aten._int_mm: aten.mm,
    aten._addmm_activation: aten.addmm,
    aten.addbmm: aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: aten._scaled_dot_product_flash_attention_backward,
}

NO_WORK = Work(0, 0, 0)


# Sizes


def tensors_in(val: Any) -> Iterator[torch.Tensor]:
    """The tensors of a value, in order: itself, or those in a list, tuple or dict."""
    if isinstance(val, torch.Tensor):
        yield val
    elif isinstance(val, list | tuple | dict):
        for item in val.values() if isinstance(val, dict) else val:
            yield from tensors_in(item)


def num_elements(val: Any, sizes: Sizes = AT_HINTS) -> int:
    """Elements as the op sees them, an expanded dimension counted in full."""
    return sum(math.prod(sizes.shape(tensor)) for tensor in tensors_in(val))


def bytes_of(val: Any, sizes: Sizes = AT_HINTS) -> int:
    """Bytes of memory that reading the value touches: an expanded dimension counts once, a non-tensor nothing."""
    return sum(_touched_bytes(tensor, sizes) for tensor in tensors_in(val))


def storage_bytes_of(val: Any, sizes: Sizes = AT_HINTS) -> int:
    """Bytes of the whole storages behind the value, which it keeps alive; what several tensors share counts once."""
    storages = {}
    for tensor in tensors_in(val):
        storages[_storage_key(tensor) or id(tensor)] = _storage_bytes(tensor, sizes)
    return sum(storages.values())


def _touched_bytes(tensor: torch.Tensor, sizes: Sizes) -> int:
    if tensor.layout is not torch.strided:
        return _storage_bytes(tensor, sizes)
    strides = [sizes.number(stride) for stride in tensor.stride()]
    touched = math.prod(size for size, stride in zip(sizes.shape(tensor), strides, strict=True) if stride or not size)
    return min(touched * tensor.dtype.itemsize, _storage_bytes(tensor, sizes))


def _storage_bytes(tensor: torch.Tensor, sizes: Sizes) -> int:
    if tensor.layout is not torch.strided:
        return math.prod(sizes.shape(tensor)) * tensor.dtype.itemsize  # sparse: an upper bound, as if dense
    return sizes.number(tensor.untyped_storage().nbytes())


def _storage_key(tensor: torch.Tensor) -> int | None:
    """An identity of the storage behind a tensor, or None where it has none."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


# Kinds


def kind_of(node: fx.Node) -> Kind:
    """How Inductor executes the node.

    An element picked out of a multi-output op has that op's kind. Anything unknown is EXTERN: it fuses with nothing.
    ``prims.inductor_random`` is POINTWISE, yet Inductor always stores its result. The kind is about the op alone:
    whether a pointwise value is stored depends on its readers, and a ``cat`` copied piece by piece is POINTWISE too.
    So is pooling, though for windows of more than 25 elements Inductor turns to a reduction or a library.
    """
    if node.op in ("placeholder", "get_attr"):
        return Kind.INPUT
    if node.op == "output":
        return Kind.OUTPUT
    makes_tensors = any(True for _ in tensors_in(node.meta.get("val")))
    if node.target is operator.getitem:
        return kind_of(node.args[0]) if makes_tensors else Kind.VALUE
    if not makes_tensors and not _reads_tensor_data(node):
        return Kind.VALUE
    if not isinstance(node.target, OpOverload):
        return Kind.EXTERN
    kind = kind_of_op(node.target)
    if kind is not Kind.VIEW and _is_an_undeclared_view(node):
        return Kind.VIEW
    return Kind.EXTERN if kind in (Kind.POINTWISE, Kind.REDUCTION) and _needs_library(node) else kind


@functools.cache
def kind_of_op(op: OpOverload) -> Kind:
    """What Inductor makes of an op whose arguments are dense real tensors on one device."""
    name = name_of(op)
    if any(result.alias_info is not None and not result.alias_info.is_write for result in op._schema.returns):
        return Kind.VIEW
    is_seeded = torch.Tag.nondeterministic_seeded in op.tags
    if op.namespace not in ("aten", "prims") or is_seeded or name in LIBRARY_CALLS:
        return Kind.EXTERN
    is_tagged = torch.Tag.pointwise in op.tags
    if name in REDUCTIONS and not is_tagged:  # aten.max.other is tagged, aten.max.dim is not
        return Kind.REDUCTION
    return Kind.POINTWISE if is_tagged or name.removesuffix("_") in FLOP_PER_ELEMENT else Kind.EXTERN


def name_of(target: Any) -> str:
    """The op's name without namespace and overload: "add" for aten.add.Tensor; "" for what is not an op overload."""
    return target._opname if isinstance(target, OpOverload) else ""


def reduced_dims(node: fx.Node, rank: int) -> list[int]:
    """The dimensions of its first argument, of ``rank``, that a reduction goes over: all if it names none."""
    dims = argument_of(node, "dim")
    dims = [dims] if isinstance(dims, int) else dims
    if not isinstance(dims, list | tuple) or not dims:
        return list(range(rank))
    return sorted({dim % rank for dim in dims}) if rank else []  # a scalar's dimension may be named 0 or -1


def argument_of(node: fx.Node, *names: str) -> Any:
    """What a call of an op gives for its argument of one of these names, or else its default; None if it has none."""
    if isinstance(node.target, OpOverload):
        for position, known in enumerate(node.target._schema.arguments):
            if known.name in names:
                given = position < len(node.args)
                return node.args[position] if given else node.kwargs.get(known.name, known.default_value)
    return None


def _reads_tensor_data(node: fx.Node) -> bool:
    """Whether the node looks at the elements of a tensor, and not only at its sizes."""
    if name_of(node.target) in METADATA_READERS:
        return False
    return any(True for argument in node.all_input_nodes for _ in tensors_in(argument.meta.get("val")))


def _is_an_undeclared_view(node: fx.Node) -> bool:
    """Whether a functional PyTorch op returns its argument's storage though its schema does not say so."""
    op, val = node.target, node.meta.get("val")
    if op is aten._unsafe_view.default:
        return True
    if op.namespace not in ("aten", "prims") or op._schema.is_mutable or not isinstance(val, torch.Tensor):
        return False
    key = _storage_key(val)
    arguments = (tensor for argument in node.all_input_nodes for tensor in tensors_in(argument.meta.get("val")))
    return key is not None and any(_storage_key(argument) == key for argument in arguments)


def _needs_library(node: fx.Node) -> bool:
    """Whether arguments keep Inductor from generating code: complex or sparse tensors, or a copy between devices."""
    made = list(tensors_in(node.meta.get("val")))
    read = [tensor for argument in node.all_input_nodes for tensor in tensors_in(argument.meta.get("val"))]
    if any(tensor.is_complex() or tensor.layout is not torch.strided for tensor in made + read):
        return True
    devices = {tensor.device for tensor in made + read}
    return name_of(node.target) in MOVES_BETWEEN_DEVICES and len(devices) > 1


# Work


def work_of(node: fx.Node, sizes: Sizes = AT_HINTS) -> Work:
    """FLOP and bytes of one run of the node by itself, nothing fused. Views, inputs, getitems and sizes are free.

    An op that nothing is known about costs the bytes of its inputs and outputs. A higher-order op counts likewise, its
    body not looked into. Attention counts as if it were not causal, as in torch's own formulas.
    """
    kind = kind_of(node)
    if kind in (Kind.INPUT, Kind.VIEW, Kind.VALUE, Kind.OUTPUT) or node.target is operator.getitem:
        return NO_WORK
    if name_of(node.target) in EMPTY:
        return NO_WORK
    return Work(_flop_of(node, kind, sizes), _read_bytes_of(node, sizes), bytes_of(node.meta.get("val"), sizes))


def _flop_of(node: fx.Node, kind: Kind, sizes: Sizes) -> int:
    formula = _flop_formula(node.target)
    if formula is not None:
        shape = functools.partial(_shape_argument, sizes=sizes)
        args, kwargs = map_aggregate(node.args, shape), map_aggregate(node.kwargs, shape)
        return int(formula(*args, **kwargs, out_val=map_aggregate(node.meta.get("val"), shape)))
    name = name_of(node.target).removesuffix("_")
    inputs = [num_elements(argument.meta.get("val"), sizes) for argument in node.all_input_nodes]
    if kind is Kind.REDUCTION:
        return FLOP_PER_REDUCED.get(name, 1) * max(inputs, default=0)
    num_made = num_elements(node.meta.get("val"), sizes)
    if kind is Kind.POINTWISE:
        num_steps = max([num_made, *inputs]) if name in WINDOWED else num_made
        return _flop_per_element(node, name) * num_steps
    return FLOP_PER_DRAW * num_made if name in DRAWS else 0


def _flop_per_element(node: fx.Node, name: str) -> int:
    """Operations per element, where a square or a cube is multiplications."""
    exponent = node.args[1] if name == "pow" and len(node.args) > 1 else None
    if isinstance(exponent, int | float) and exponent in (1, 2, 3, 4):
        return max(1, math.ceil(math.log2(exponent)))
    return FLOP_PER_ELEMENT.get(name, 1)


def _flop_formula(target: Any) -> Any | None:
    """torch's formula for the op, or for the op it shares one with; None where there is none."""
    if isinstance(target, OpOverload):
        packet = target.overloadpacket
        facts = facts_about(target)
        if facts is not None and facts.flop is not None:
            return _registered_formula(facts.flop)
        return flop_registry.get(SAME_FORMULA.get(packet, packet))
    return flop_registry.get(target) if isinstance(target, HigherOrderOperator) else None


def _registered_formula(flop: int | Callable[..., int]) -> Callable[..., int]:
    """A user's number or function in the form of torch's formulas, which also get the result's shape."""
    return lambda *args, out_val=None, **kwargs: flop(*args, **kwargs) if callable(flop) else flop


class _Shape(tuple):
    """A shape that also answers what some formulas ask of a tensor."""

    device = torch.device("meta")

    @property
    def shape(self) -> tuple[int, ...]:
        return self

    def size(self, dim: int) -> int:
        return self[dim]


def _shape_argument(argument: Any, sizes: Sizes) -> Any:
    """An argument for a FLOP formula: tensors become shapes, symbols become numbers."""
    if isinstance(argument, fx.Node):
        return map_aggregate(argument.meta.get("val"), functools.partial(_shape_argument, sizes=sizes))
    if isinstance(argument, torch.Tensor):
        return _Shape(sizes.shape(argument))
    return sizes.number(argument) if isinstance(argument, torch.SymInt) else argument


def looked_at(node: fx.Node) -> list[fx.Node]:
    """The arguments whose elements the op may look at, and not only at their sizes."""
    place = SIZED.get(name_of(node.target))
    if place is None or place >= len(node.args):
        return node.all_input_nodes
    elsewhere = (*node.args[:place], *node.args[place + 1 :], *node.kwargs.values())
    return [a for a in node.all_input_nodes if a is not node.args[place] or a in elsewhere]


def _read_bytes_of(node: fx.Node, sizes: Sizes) -> int:
    """Bytes that one run reads: every distinct tensor argument, except what the op does not look at."""
    name = name_of(node.target)
    made_bytes = bytes_of(node.meta.get("val"), sizes)
    if name.endswith("_like") or name.startswith("new_"):
        return 0
    if name in OVERWRITES_A_PART:
        return made_bytes
    skipped = node.args[0] if name in OVERWRITES_ALL | GATHERS and node.args else None
    read = sum(bytes_of(argument.meta.get("val"), sizes) for argument in looked_at(node) if argument is not skipped)
    if name in GATHERS and isinstance(skipped, fx.Node):
        read += min(made_bytes, bytes_of(skipped.meta.get("val"), sizes))  # the rows that are picked, not the table
    return read
