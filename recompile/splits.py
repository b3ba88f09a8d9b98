"""How many kernels Inductor makes of a reduction on a GPU: one with few results is split to keep the device busy.

A model of ``Reduction.num_splits`` in torch/_inductor/ir.py and ``reduction_split_factor`` in choices.py (torch 2.13):
each result is reduced in parts by a first kernel, and the parts by a second, each of which may be split again.
"""

from __future__ import annotations

from recompile.chip import CHIPS, Chip
from recompile.dataflow import Dataflow
from recompile.hardware import Hardware
from recompile.inlining import LONGEST_ROW_ON_GPU, FusionFacts
from recompile.joint import Kind
from recompile.work import name_of, words

WELFORD = words("native_batch_norm native_group_norm std std_mean var var_mean")  # reduced by Welford's algorithm
# All from ``reduction_split_factor``, elements unless said otherwise.
WARP_THREADS = 32
BLOCK_THREADS = 8 * WARP_THREADS
LEAST_PER_THREAD, MOST_PER_THREAD = 32, 512
ROWS_PER_THREAD = 4  # values of a column that a thread reduces at once
COLUMNS_PER_BLOCK = 128
LONGEST_UNSPLIT_ROW = 8192
LONGEST_UNSPLIT_ROW_FROM_BLACKWELL = 524288
BLACKWELL = (10, 0)  # compute capability
CLOSE_DIVISOR, CLOSE_DIVISOR_OF_COLUMN, CLOSE_LARGE_DIVISOR = 30, 20, 50  # an even split that near is preferred


def more_kernels(flow: Dataflow, facts: FusionFacts, hardware: Hardware) -> dict[int, int]:
    """Per reduction that Inductor splits on a GPU the kernels that it takes beside the first."""
    if facts.longest_row != LONGEST_ROW_ON_GPU:
        return {}
    chip = CHIPS.get(hardware.name, CHIPS["h100"])
    found = {}
    for i, shape in enumerate(facts.shape):
        if flow.is_op[i] and flow.kind[i] is Kind.REDUCTION and shape.inner > 1:
            is_welford = name_of(flow.nodes[i].target) in WELFORD
            found[i] = num_kernels(shape.outer, shape.inner, shape.reduces_rows, is_welford, chip) - 1
    return {i: more for i, more in found.items() if more}


def num_kernels(num_results: int, per_result: int, is_row: bool, is_welford: bool, chip: Chip) -> int:
    """Kernels that reduce ``per_result`` elements to each of ``num_results``; the parts of Welford's may split too."""
    parts = num_parts(num_results, per_result, is_row, chip)
    if parts <= 1:
        return 1
    first = num_kernels(num_results * parts, -(-per_result // parts), is_row, is_welford, chip)
    return first + (num_kernels(num_results, parts, is_row, is_welford, chip) if is_welford else 1)


def num_parts(num_results: int, per_result: int, is_row: bool, chip: Chip) -> int:
    """Into how many parts each result is split; 1: it is not."""
    if num_results == 1:
        return _row_parts(num_results, per_result, chip)
    if per_result <= LEAST_PER_THREAD or num_results >= 2 * WARP_THREADS * chip.num_multiprocessors:
        return 1
    return (_row_parts if is_row else _column_parts)(num_results, per_result, chip)


def _row_parts(num_results: int, per_result: int, chip: Chip) -> int:
    longest = LONGEST_UNSPLIT_ROW_FROM_BLACKWELL if chip.capability >= BLACKWELL else LONGEST_UNSPLIT_ROW
    if num_results >= 2 * chip.num_multiprocessors or per_result <= longest:
        return 1
    blocks = chip.num_multiprocessors * chip.max_threads_per_multiprocessor // (2 * BLOCK_THREADS)
    blocks = -(-blocks // num_results)
    size = _part_size(num_results, per_result, BLOCK_THREADS * blocks, CLOSE_DIVISOR, chip)
    return -(-per_result // (size * BLOCK_THREADS))


def _column_parts(num_results: int, per_result: int, chip: Chip) -> int:
    blocks = chip.num_multiprocessors * chip.max_threads_per_multiprocessor // BLOCK_THREADS
    blocks = -(-blocks // -(-num_results // COLUMNS_PER_BLOCK))
    size = _part_size(num_results, per_result, ROWS_PER_THREAD * blocks, CLOSE_DIVISOR_OF_COLUMN, chip)
    return -(-per_result // (size * ROWS_PER_THREAD))


def _part_size(num_results: int, per_result: int, num_threads: int, near: int, chip: Chip) -> int:
    """Elements that one thread reduces, when so many work on one result."""
    num_elements = num_results * per_result
    threads_per_device = chip.num_multiprocessors * chip.max_threads_per_multiprocessor
    if num_elements <= LEAST_PER_THREAD * threads_per_device:
        return LEAST_PER_THREAD
    if num_elements >= MOST_PER_THREAD * threads_per_device:
        even = closest_divisor(per_result, MOST_PER_THREAD)
        return even if abs(even - MOST_PER_THREAD) < CLOSE_LARGE_DIVISOR else MOST_PER_THREAD
    size = -(-per_result // num_threads)
    even = closest_divisor(per_result, size)
    return max(even, LEAST_PER_THREAD) if abs(even - size) < near else size


def closest_divisor(number: int, wanted: int) -> int:
    """The divisor of a number that is closest to what is wanted, the smaller of two."""
    return min((d for d in range(1, 2 * wanted + 1) if number % d == 0), key=lambda d: abs(d - wanted))
