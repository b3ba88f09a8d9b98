"""Every reason not to save or not to recompute, with a node that has it and a near one that has not."""

import operator

import pytest
import torch
import torch.fx as fx

from recompile import registry
from recompile.annotation import annotate
from recompile.rules import NO_RECOMPUTE, LegalityFacts, first_reason, is_random, source_line, written_arguments
from tests.notation import H100, annotated, joint

RANDOM = "random numbers that only backward reads: forward draws them, in the order of the program"
SEEDS = "random seeds: drawn again they would differ"
WRITE = "a write to memory that exists: running it twice would write twice"


@pytest.fixture
def library():
    """Custom ops; gone after the test."""
    with torch.library._scoped_library("notation", "FRAGMENT") as scoped:
        scoped.define("mix(Tensor x) -> Tensor")
        scoped.impl("mix", lambda x: torch.empty_like(x), "Meta")
        scoped.define("pair(Tensor x) -> (Tensor, Tensor)")
        scoped.impl("pair", lambda x: (torch.empty_like(x), torch.empty_like(x)), "Meta")
        scoped.define("check(Tensor x) -> ()")
        scoped.impl("check", lambda x: None, "Meta")
        scoped.define("fill(Tensor x, Tensor(a!) y, Tensor(b!)[] z) -> ()")
        scoped.impl("fill", lambda x, y, z: None, "Meta")
        yield scoped


def note_of(text, name="n", returned="{} |"):
    """The annotation of a node; forward returns it unless told otherwise."""
    graph = annotated(f"x = input 4x8\n{text}\nreturn {returned.format(name)}")
    return next(note for node, note in graph.notes.items() if node.name == name)


def cannot_recompute(text, name="n", returned="{} |"):
    return note_of(text, name, returned).cannot_recompute


def cannot_save(text, name="n"):
    return note_of(text, name).cannot_save


# Cannot be recomputed


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("n = rand_like x", True),
        ("n = bernoulli x", True),
        ("n = native_dropout x 0.5 True", True),
        ("n = rrelu_with_noise_functional x x 0.1 0.3 True", True),
        ("n = prims.inductor_seeds 2 cpu", True),
        ("n = prims.inductor_seed cpu", True),
        ("s = prims.inductor_seeds 2 cpu\nn = prims.inductor_lookup_seed s 0", False),
        ("s = input - int64\nn = prims.inductor_random [4,8] s 'rand'", False),
        ("s = input - int64\nn = prims.inductor_randint 0 9 [4,8] s", False),
        ("n = exp x", False),
        ("n = mm x x'", False),
        # attention is random only with dropout, whatever its tag says
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_flash_attention q q q 0.1", True),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_flash_attention q q q dropout_p=0.1", True),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_flash_attention q q q 0.0", False),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_flash_attention q q q", False),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_efficient_attention q q q None True 0.5", True),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_efficient_attention q q q None True dropout_p=0.0", False),
        ("q = input 1x2x16x8\nn = aten._scaled_dot_product_flash_attention_for_cpu q q q 0.0", False),
    ],
)
def test_what_draws_from_a_generator_is_random_and_what_is_made_from_a_seed_is_not(text, expected):
    assert is_random(joint(f"x = input 4x8\n{text}\nreturn n |").node["n"]) is expected


def test_seeds_are_never_drawn_again_but_masks_are_made_from_them_again():
    text = "s = prims.inductor_seeds 2 cpu\nk = prims.inductor_lookup_seed s 0\nn = prims.inductor_random [4] k 'rand'"
    for returned in ("{} |", "x | {}"):
        assert [cannot_recompute(text, name, returned) for name in "skn"] == [SEEDS, None, None]


def test_a_draw_of_forward_can_be_replayed_and_one_that_only_backward_reads_is_made_by_forward():
    text = "p = native_dropout x 0.5 True\nn = getitem p 1"
    assert [cannot_recompute(text, name) for name in "pn"] == [None, None]
    assert [cannot_recompute(text, name, "x | n") for name in "pn"] == [RANDOM, RANDOM]
    assert cannot_recompute("n = exp x", "n", "x | n") is None


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no distributed package")
def test_a_collective_is_not_run_again():
    import torch.distributed._functional_collectives  # noqa: F401  registers what the ops do to fake tensors

    text = "c = _c10d_functional.all_reduce x 'sum' 'group'\nn = _c10d_functional.wait_tensor c\nm = exp n"
    reason = "a collective: every rank would have to run it again"
    assert [cannot_recompute(text, name) for name in "cnm"] == [reason, reason, None]


def test_a_write_is_not_run_again():
    assert [cannot_recompute(f"y = exp x\nn = {op} x y") for op in ("copy_", "add_", "copy", "add")] == [
        WRITE, WRITE, None, None
    ]  # fmt: skip


def test_an_op_without_result_is_run_once_for_its_effect(library):
    assert cannot_recompute("n = notation.check x") == "an op without result, run for its effect"
    assert cannot_recompute("n = exp x") is None


def test_a_custom_op_is_not_run_again_for_it_may_hide_state(library):
    reason = "a custom op (notation::{}) that may hide state; see recompile.register_op"
    mix, pair = reason.format("mix"), reason.format("pair")
    assert cannot_recompute("n = notation.mix x") == mix
    assert cannot_recompute("p = notation.pair x\nn = getitem p 1") == pair
    assert cannot_recompute("m = notation.mix x\nn = exp m") is None
    assert cannot_recompute("n = prims.convert_element_type x torch.bfloat16") is None


def test_a_custom_op_may_be_run_again_when_its_author_says_so(library, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    registry.register_op("notation::mix", recompute=True)
    assert cannot_recompute("n = notation.mix x") is None
    registry.register_op("notation::mix", flop=10)  # the last statement holds
    assert cannot_recompute("n = notation.mix x") is not None
    assert note_of("n = notation.mix x").work.flop == 10


def notes_of_higher_order_ops():
    """Annotations of a higher-order op, an element of its result, and an op with an ordered effect."""
    graph = fx.Graph()
    x = graph.placeholder("primals_1")
    both = graph.call_function(torch.ops.higher_order.invoke_subgraph, (None, "body", x))
    element = graph.call_function(operator.getitem, (both, 0))
    effect = graph.call_function(torch.ops.higher_order.with_effects, (None, torch.ops.aten.sin.default, x))
    graph.output((element, effect))
    for node in (x, element):
        node.meta["val"] = torch.empty(4, 8, device="meta")
    both.meta["val"] = effect.meta["val"] = (torch.empty(4, 8, device="meta"),)
    notes = annotate(fx.GraphModule({}, graph), 2, H100).notes
    return [notes[node].cannot_recompute for node in (both, element, effect)]


def test_a_higher_order_op_is_not_run_again_for_its_body_is_not_looked_into():
    unknown = "a higher-order op (invoke_subgraph) whose body is not looked into"
    assert notes_of_higher_order_ops() == [unknown, unknown, "an op with an ordered side effect"]


def test_what_decides_a_size_by_data_is_not_run_again_but_what_has_that_size_may_be():
    text = "i = nonzero x\nu = sym_size.int i 0\nf = full [u] 1.0\ne = exp f"
    reason = "a size that depends on the data: it is read once, in forward"
    assert [cannot_recompute(text, name) for name in "iue"] == [reason, None, None]


def test_an_input_cannot_be_computed_at_all():
    assert cannot_recompute("n = exp x", "primals_1", "n |") == "an input of the graph"


def test_a_user_s_must_save_is_obeyed_and_his_preferences_are_hints():
    policies = ("must_save", "prefer_save", "prefer_recompute", "must_recompute")
    reason = "marked MUST_SAVE by the user's checkpoint policy"
    assert [cannot_recompute(f"n = exp x !{policy}") for policy in policies] == [reason, None, None, None]


# A read of what forward overwrites later


OVERWRITTEN = "a read of memory that w at model.py:9 overwrites later in forward"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n = exp x\ny = sin x\nw = copy_ x y @model.py:9", OVERWRITTEN),
        ("v = view x [32]\nn = exp v\ny = sin x\nw = copy_ x y @model.py:9", OVERWRITTEN),
        ("s = split x 4 1\nv = getitem s 1\nn = exp v\ny = sin x\nw = copy_ x y @model.py:9", OVERWRITTEN),
        ("y = sin x\nn = exp y\nw = copy_ x y @model.py:9", None),  # reads what was computed from it
        ("y = sin x\nw = copy_ x y @model.py:9\nn = exp w", None),  # reads the new content, which stays
        ("z = input 4x8\nn = exp z\ny = sin x\nw = copy_ x y @model.py:9", None),  # other memory
    ],
)
def test_what_reads_memory_that_is_overwritten_later_is_not_run_again(text, reason):
    assert cannot_recompute(text) == reason


def test_a_read_between_two_writes_names_the_later_one():
    text = "y = sin x\nv = copy_ x y\nn = exp v\nz = cos y\nw = copy_ x z"
    assert cannot_recompute(text) == "a read of memory that w overwrites later in forward"


# Cannot be saved


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("n = exp x", None),
        ("n = var_mean.correction x [1] correction=0", "several outputs: each is saved on its own"),
        ("v = var_mean.correction x [1] correction=0\nn = getitem v 0", None),
        ("n = aten._assert_tensor_metadata x None None torch.float32", "a NoneType, which autograd cannot carry"),
        ("n = to_sparse x 2", "a tensor of layout torch.sparse_coo"),
        ("n = view x [32]", "a view of primals_1, which is kept in its place"),
        ("a = exp x\nn = select a 0 1", "a view of a, which is kept in its place"),
        ("a = exp x\ns = split a 4 1\nn = getitem s 1", "a view of a, which is kept in its place"),
        ("a = exp x\nn = clone a", None),
        ("n = exp x !must_recompute", "marked MUST_RECOMPUTE by the user's checkpoint policy"),
        ("n = exp x !prefer_recompute", None),
        ("y = input s4x8\nn = sym_size.int y 0", None),
    ],
)
def test_what_cannot_be_handed_over_says_why(text, reason):
    assert cannot_save(text) == reason


def test_a_value_inside_a_checkpointed_region_is_not_saved_but_what_leaves_it_may_be():
    built = joint("""
        x = input 4x8
        a = sin x !prefer_recompute
        b = exp a !prefer_recompute
        r = prims.inductor_seed cpu !prefer_recompute
        c = cos b
        d = mul c 2 !prefer_recompute        # another region
        e = mul a d
        return e r |
    """)
    for name, region in (("a", 1), ("b", 1), ("r", 1), ("d", 2)):
        built.node[name].meta["ac_graph_id"] = region
    notes = annotate(built.module, 2, H100).notes
    inside = "inside a torch.utils.checkpoint region, which is computed again in backward"
    # e reads a too, from outside; c reads b from outside; r must be saved
    assert [notes[built.node[name]].cannot_save for name in "abrcde"] == [None] * 6
    built.node["e"].replace_input_with(built.node["a"], built.node["c"])
    notes = annotate(built.module, 2, H100).notes
    assert [notes[built.node[name]].cannot_save for name in "abrcde"] == [inside] + [None] * 5


# What rules look at


def test_the_source_line_is_the_innermost_one_of_the_user():
    node = joint("x = input 4\nn = exp x\nreturn n |").node["n"]
    assert source_line(node) == ""
    node.meta["stack_trace"] = '  File "train.py", line 3, in <module>\n    m(x)\n  File "m.py", line 7, in f\n    y'
    assert source_line(node) == "m.py:7"


def test_the_written_arguments_are_those_of_the_schema_lists_included(library):
    graph = joint("x = input 4\ny = input 4\nz = input 4\nn = notation.fill x y [z]\nreturn | None").node
    assert written_arguments(graph["n"]) == [graph["y"], graph["z"]]
    assert written_arguments(joint("x = input 4\nn = add x x\nreturn n |").node["n"]) == []


def test_the_first_rule_that_objects_wins():
    nodes = joint("x = input 4\ns = prims.inductor_seed cpu !must_save\nreturn s |").node
    facts = LegalityFacts({node: node for node in nodes.values()}, {})
    assert first_reason(NO_RECOMPUTE, nodes["s"], facts) == SEEDS
