"""Random training functions under random plans. What they found is kept in test_fuzz_found.py."""

from __future__ import annotations

import itertools
import sys
import zlib

import pytest
import torch

from recompile import annotation, backend, rules

from .fuzz import NotComparable, check, fuzz
from .programs import LINES, Instruction, Program, example_inputs, numbers, rendered

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
LINES_AT_ONCE = 6
MANY_EXAMPLES, MANY_SEED = 2_000, 1


def program(*lines: str) -> Program:
    return Program("def forward(self, x, y, h):\n" + "".join(f"    {line}\n" for line in lines))


def test_random_programs_leave_the_same_bits_whatever_is_saved_and_whatever_is_recomputed():
    seen = fuzz(examples=100)
    assert seen["checked"] >= 80, seen


@pytest.mark.slow
def test_many_random_programs_leave_the_same_bits_whatever_is_saved_and_whatever_is_recomputed():
    seen = fuzz(MANY_EXAMPLES, MANY_SEED)
    assert seen["checked"] >= 0.8 * MANY_EXAMPLES, seen


@pytest.mark.parametrize("first", range(0, len(LINES), LINES_AT_ONCE))
def test_every_line_is_right_in_some_program(first):
    """The lines of a small random run are drawn unevenly; here each has its turn, in an order of its own."""
    lines = sorted(LINES, key=lambda line: zlib.crc32(line.encode()))[first : first + LINES_AT_ONCE]
    made = rendered([Instruction(line, 0, number % 3) for number, line in enumerate(lines)], range(8))
    for fallback_random in (False, True):
        try:
            check(made, fallback_random, first)
        except NotComparable as reason:
            pytest.skip(str(reason))


def test_every_line_can_be_part_of_a_program():
    start = [Instruction(f"{{o}} = {{a}}{text}", 0, 0) for text in (" > 0.3", ".argmax(-1)", ".t()")]
    fresh = [Instruction("{o} = 1 - {a}", number, 0) for number in range(4)]
    refused = []
    for line in LINES:
        choices = itertools.product(range(8), range(8))
        tried = (rendered([*start, *fresh, Instruction(line, *choice)], []) for choice in choices)
        if not any(len(made.source.splitlines()) > 2 + len([*start, *fresh]) for made in tried):
            refused.append(line)
    assert refused == []


def test_a_program_is_source_that_runs_eagerly_and_reads_like_it_was_written():
    made = rendered([
        Instruction("{o} = F.linear({a}, self.w, self.bias)", 0, 0), Instruction("{a}.relu_()", 0, 0),
        Instruction("self.stat.mul_(0.9)", 0, 0), Instruction("{o}, {p} = {a}.max(-1)", 0, 0),
    ], [1])  # fmt: skip
    assert made.source.splitlines() == [
        "def forward(self, x, y, h):",
        "    v0 = F.linear(y, self.w, self.bias)",
        "    v0.relu_()",
        "    self.stat.mul_(0.9)",
        "    v1, v2 = v0.max(-1)",
        "    return (v1, v2,)",
    ]
    values, indices = made.model()(*example_inputs(), numbers(4, 6))
    assert (values.shape, indices.dtype) == ((4,), torch.int64)


def test_a_program_that_eager_refuses_is_no_example():
    with pytest.raises(NotComparable, match="eager: one of the variables"):
        check(program("v0 = y.exp()", "v0.add_(1)", "return (v0,)"), True, 0)
    with pytest.raises(NotComparable, match="no output wants a gradient"):
        check(program("return (x.sin(),)"), True, 0)


# The checks see what they are for: each takes away what keeps plans right.

READ_THEN_OVERWRITTEN = program(
    "v0 = torch.exp(self.stat)", "v1 = torch.sin(v0 * y)", "self.stat.mul_(0.5)", "return (v1 * self.stat.clone(),)"
)
DROPOUT = program("v0 = F.dropout(torch.sin(y), 0.5)", "return (torch.exp(v0 * y),)")


@pytest.fixture
def without_rules(monkeypatch):
    monkeypatch.setattr(annotation, "NO_RECOMPUTE", (rules.is_input,))
    monkeypatch.setattr(backend, "inputs_to_snapshot", lambda graph, num_fwd_outputs: [])


@pytest.fixture
def without_replay(monkeypatch):
    monkeypatch.setattr(sys.modules["recompile.passes.split_joint"], "replay_random", lambda *_: 0)


@pytest.mark.parametrize("right", [READ_THEN_OVERWRITTEN, DROPOUT])
def test_a_program_that_is_right_passes(right):
    for fallback_random in (False, True):
        check(right, fallback_random, 0)


def test_a_buffer_read_after_it_was_overwritten_is_noticed(without_rules):
    with pytest.raises(AssertionError, match=r"unlike eager: gradient of y"):
        check(READ_THEN_OVERWRITTEN, True, 0)


def test_random_numbers_drawn_again_are_noticed(without_rules, without_replay):
    with pytest.raises(AssertionError, match=r"random plan \d: gradient 0 is not that of save_all"):
        for plan_seed in range(10):
            check(DROPOUT, False, plan_seed)


def test_a_generator_that_is_drawn_from_twice_is_noticed(without_replay):
    """The plan "full" keeps neither the mask nor dropout's result."""
    with pytest.raises(AssertionError, match=r"full at None: gradient 0 is not that of save_all"):
        check(DROPOUT, True, 0)
