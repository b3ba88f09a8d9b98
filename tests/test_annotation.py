"""Sides, storages, bytes, work and seconds of every node of small joint graphs, worked out by hand."""

import io

import networkx
import pytest

from recompile.annotation import annotate, inputs_to_snapshot, sides_of
from recompile.cost import dtype_of
from tests.notation import H100, annotated, joint

GELU_LIKE = """
    x = input 4x8
    w = param 8x8
    a = mm x w
    e = exp a
    c = cos a          # only backward reads it, and no tangent is in it
    t = tangent 4x8
    h = mul e c        # likewise
    g = mul t h
    gw = mm x' g
    z = zeros [4,8]    # a gradient that is a constant
    return e | z gw
"""


def facts(text, field):
    """``name=value`` for every node, inputs by their names in the graph."""
    graph = annotated(text)
    return " ".join(f"{node.name}={getattr(note, field)}" for node, note in graph.notes.items())


def sides(text):
    return " ".join(f"{node.name}={note.side.value}" for node, note in annotated(text).notes.items())


def storages(text):
    graph = annotated(text)
    ops = [(node, note) for node, note in graph.notes.items() if node.op == "call_function"]
    return " ".join(f"{node.name}:{graph.nodes[note.storage].name}" for node, note in ops)


# Sides


def test_what_only_backward_needs_runs_on_either_side_unless_a_tangent_reaches_it():
    assert sides(GELU_LIKE) == (
        "primals_1=forward primals_2=forward tangents_1=backward a=forward e=forward c=either h=either g=backward "
        "x_t=either gw=backward z=either"
    )


def test_a_write_belongs_to_forward_with_all_that_it_needs():
    text = "x = input 4\ny = input 4\nm = mul y 2\nw = copy_ x m\nt = tangent 4\ng = mul t m\nreturn y | g"
    assert sides(text) == (
        "primals_1=forward primals_2=forward tangents_1=backward m=forward w=forward g=backward"
    )  # fmt: skip


def test_a_write_that_is_marked_for_backward_belongs_there():
    built = joint("x = input 4\ny = input 4\nw = copy_ x y\nt = tangent 4\ng = mul t y\nreturn y | g")
    built.node["w"].meta["partitioner_tag"] = "must_be_in_backward"
    assert sides_of(built.module.graph, 1)[built.node["w"]].value == "backward"


def test_an_assertion_belongs_to_forward():
    text = "x = input 4\nn = aten._assert_tensor_metadata x None None torch.float32\nt = tangent 4\nreturn x | t"
    assert sides(text) == "primals_1=forward tangents_1=backward n=forward"


# Storages and bytes


def test_a_view_has_the_storage_of_its_base_and_keeps_all_of_it():
    text = """
        x = input 4x8
        a = exp x                # 4 x 8 x 4 bytes
        v = view a [32]
        r = select a 0 1         # one row of four
        s = split a 2            # two views
        h = getitem s 1
        p = permute x [1,0]
        c = clone r
        return c v h p |
    """
    assert storages(text) == "a:a v:a r:a s:a h:a p:primals_1 c:c"
    assert facts(text, "size_bytes") == "primals_1=128 a=128 v=128 r=128 s=128 h=128 p=128 c=32"


def test_the_elements_of_an_op_have_storages_of_their_own():
    text = "x = input 4x8\nv = var_mean.correction x [1] correction=0\nm = getitem v 0\nn = getitem v 1\nreturn m n |"
    assert storages(text) == "v:v m:m n:n"
    assert facts(text, "size_bytes") == "primals_1=128 v=32 m=16 n=16"  # 4 floats each


def test_what_a_write_returns_is_the_memory_it_wrote_to():
    assert storages("x = input 4\ny = exp x\nw = copy_ x y\nreturn w |") == "y:y w:primals_1"


def test_a_view_belongs_to_what_it_looks_at_even_where_a_graph_pass_left_the_old_storage():
    built = joint("x = input 4x8\na = exp x\nb = sin x\nv = view a [32]\nreturn v b |")
    built.node["v"].replace_input_with(built.node["a"], built.node["b"])  # its fake tensor still lies in a
    notes = annotate(built.module, 2, H100).notes
    assert notes[built.node["v"]].storage == notes[built.node["b"]].storage != notes[built.node["a"]].storage


def test_an_expanded_view_keeps_its_small_base():
    text = "x = input 1x8\ne = expand x [1000,8]\nm = mul e 2\nreturn m |"
    assert facts(text, "size_bytes") == "primals_1=32 e=32 m=32000"


def test_symbolic_sizes_count_at_their_hints_and_a_size_itself_takes_no_bytes():
    text = "x = input s4x8\nn = sym_size.int x 0\na = exp x\nv = view a [n,4,2]\nreturn v n |"
    assert facts(text, "size_bytes") == "primals_1=128 n=0 a=128 v=128"
    assert storages(text) == "n:n a:a v:a"


# Work and seconds on planner-h100: 700 TFLOP/s (67 for float64), 3 TB/s, 2 us a kernel


@pytest.mark.parametrize(
    ("text", "flop", "read_bytes", "write_bytes", "seconds"),
    [
        # 64 x 128 by 128 x 32: 2 x 64 x 128 x 32 FLOP; (8192 + 4096) and 2048 elements of 2 bytes; memory decides
        ("a = input 64x128 bfloat16\nb = input 128x32 bfloat16\nn = mm a b", 524288, 24576, 4096, 28672 / 3e12 + 2e-6),
        # 4096 cubed: arithmetic decides, 196 us against 34
        ("a = input 4096x4096 bfloat16\nn = mm a a", 2 * 4096**3, 2**25, 2**25, 2 * 4096**3 / 700e12 + 2e-6),
        # float64 has a rate of its own, 32 us against 5.6
        ("a = input 1024x1024 float64\nn = mm a a", 2**31, 2**23, 2**23, 2**31 / 67e12 + 2e-6),
        # one operation an element, two reads and a write of 4 bytes
        ("a = input 1024x1024\nb = input 1024x1024\nn = add a b", 2**20, 2**23, 2**22, 3 * 2**22 / 3e12 + 2e-6),
        ("a = input 1024x1024\nn = exp a", 20 * 2**20, 2**22, 2**22, 2 * 2**22 / 3e12 + 2e-6),
        ("a = input 1024x1024\nn = view a [1048576]", 0, 0, 0, 0.0),
        ("a = input s64x4\nn = sym_size.int a 0", 0, 0, 0, 0.0),
    ],
)
def test_work_and_seconds_of_one_op(text, flop, read_bytes, write_bytes, seconds):
    graph = annotated(f"{text}\nreturn n |")
    note = graph.notes[graph.nodes[-1]]
    assert (note.work.flop, note.work.read_bytes, note.work.write_bytes) == (flop, read_bytes, write_bytes)
    assert note.seconds == pytest.approx(seconds, rel=1e-12)
    moved = read_bytes + write_bytes
    assert note.work.intensity == pytest.approx(flop / moved if moved else 0.0)


def test_the_rate_is_that_of_the_first_floating_input_not_of_an_index():
    nodes = joint("i = input 4 int64\nw = param 9x8 bfloat16\nn = embedding w i\nm = gt.Scalar w 0\nreturn n m |").node
    assert str(dtype_of(nodes["n"])) == str(dtype_of(nodes["m"])) == "torch.bfloat16"
    assert str(dtype_of(joint("i = input 4 int64\nn = add i i\nreturn n |").node["n"])) == "torch.float32"


# Inputs that forward overwrites


@pytest.mark.parametrize(
    ("forward", "backward", "snapshots"),
    [
        ("e = exp x\ny = sin x\nw = copy_ x y", "g = mul t e", "x"),  # e could only be rebuilt from the old content
        ("v = view x [4]\ne = exp v\ny = sin x\nw = copy_ x y", "g = mul t e", "x"),
        ("e = exp x\ny = sin x\nw = copy_ x y", "g = mul t x", "x"),
        ("e = exp x\ny = sin x\nw = copy_ x y", "g = mul t u", ""),  # backward needs nothing of it
        ("e = exp u\nw = copy_ x e", "g = mul t e", ""),  # written, never read
        ("e = exp u\ny = sin x\nw = copy_ x y", "g = mul t e", ""),  # read by forward alone
        ("e = exp x", "g = mul t e", ""),  # nothing is written
    ],
)
def test_inputs_that_backward_needs_as_they_were_are_found(forward, backward, snapshots):
    built = joint(f"x = input 4\nu = input 4\n{forward}\nt = tangent 4\n{backward}\nreturn e | g")
    names = {node: name for name, node in built.node.items()}
    assert " ".join(names[node] for node in inputs_to_snapshot(built.module.graph, 1)) == snapshots


# The annotated graph as a value


def test_the_graph_is_read_and_never_changed():
    built = joint(GELU_LIKE)
    before = str(built.module.graph), [dict(node.meta) for node in built.module.graph.nodes]
    annotate(built.module, 1, H100, built.params)
    assert (str(built.module.graph), [dict(node.meta) for node in built.module.graph.nodes]) == before


def test_outputs_are_listed_once_each_and_parameters_are_known():
    graph = annotated("x = input 4\nw = param 4\na = mul x w\nt = tangent 4\ng = mul t w\nreturn a a w None | g None g")
    assert " ".join(node.name for node in graph.fwd_outputs) == "a primals_2"
    assert " ".join(node.name for node in graph.bwd_outputs) == "g"
    assert " ".join(node.name for node in graph.static_inputs) == "primals_2"


def test_networkx_gets_the_edges_and_every_fact_as_plain_values():
    graph = annotated(GELU_LIKE).to_networkx()
    assert isinstance(graph, networkx.DiGraph)
    assert sorted(graph.predecessors("gw")) == ["g", "x_t"]
    expected = {
        "op": "aten.mm.default", "shape": "4x8", "dtype": "float32", "side": "forward", "kind": "extern",
        "storage": "a", "size_bytes": 128, "flop": 512, "read_bytes": 128 + 256, "write_bytes": 128, "intensity": 1.0,
        "cannot_save": "", "cannot_recompute": "", "source": "", "module": "", "decision": "", "reason": "",
        "again_seconds": 0.0, "code": "", "role": "",
    }  # fmt: skip
    attributes = dict(graph.nodes["a"])
    assert attributes.pop("seconds") == pytest.approx(512 / 3e12 + 2e-6)
    assert attributes == expected
    assert graph.nodes["x_t"]["cannot_save"] == "a view of primals_1, which is kept in its place"
    networkx.write_graphml(graph, io.BytesIO())  # which takes plain values only


def test_the_table_has_a_row_for_every_node_with_its_reasons():
    lines = annotated(GELU_LIKE).to_table().splitlines()
    titles = "node op shape dtype side storage bytes FLOP moved FLOP/B seconds cannot be saved cannot be recomputed"
    assert " ".join(lines[0].split()) == titles
    rows = {line.split()[0]: " ".join(line.split()) for line in lines[1:]}
    assert len(rows) == len(annotated(GELU_LIKE).nodes) == 11
    assert rows["e"] == "e aten.exp.default 4x8 float32 forward e 128 640 256 2.50 2.0 us"
    assert rows["tangents_1"].endswith("an input of the graph")
    assert rows["x_t"].endswith("a view of primals_1, which is kept in its place")
