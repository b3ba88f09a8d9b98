"""Watching steps: predicted beside measured peaks, what to try next, and what an out-of-memory error says.

Models of matmuls alone go through Inductor in a fraction of a second: there is no C++ to compile.
"""

import logging

import pytest
import torch
from torch import nn

import recompile
import recompile.units
from recompile.meter import StepPeak, budget_text, out_of_memory_text, warning_text
from recompile.report.explanation import Explanation
from tests.notation import CHAIN, annotated

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
MIB, GIB = 2**20, 2**30
HIDDEN_BYTES = 256 * 1024 * 4


class Block(nn.Module):
    """Dynamo compiles no module of torch's own in place."""

    def __init__(self, *sizes):
        super().__init__()
        self.linear = nn.Linear(*sizes, bias=False)

    def forward(self, x):
        return self.linear(x)


class Matmuls(nn.Module):
    """Backward reads what the first makes, HIDDEN_BYTES."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(64, 1024), Block(1024, 64)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def model_of_matmuls():
    torch.manual_seed(0)
    return Matmuls()


def batch():
    return torch.randn(256, 64)


def train(forward, steps, model):
    for _ in range(steps):
        forward(batch()).sum().backward()
        model.zero_grad()


def compiled_function(model, **options):
    return torch.compile(lambda x: model(x), backend="recompile", options=options)


def test_the_steps_after_the_first_are_measured_beside_the_prediction(capsys):
    model = model_of_matmuls()
    with recompile.watch(compiled_function(model)) as step:
        train(step, 5, model)
    assert [peak.number for peak in step.steps] == [2, 3]
    for peak in step.steps:
        assert peak.predicted_bytes > HIDDEN_BYTES
        assert abs(peak.excess) < 0.05
    head, titles, *rows = capsys.readouterr().out.splitlines()
    assert head == "recompile: peak over what is allocated when forward starts"
    assert titles.split() == ["step", "predicted", "measured", "difference"]
    assert [row.split()[0] for row in rows] == ["2", "3"] and rows == str(step).splitlines()[2:]


def test_a_step_ends_with_its_backward_and_not_with_the_optimizers(capsys):
    model = model_of_matmuls()
    step, held = recompile.watch(compiled_function(model), show=False), []
    for _ in range(4):
        step(batch()).sum().backward()
        held.append(torch.empty(64 * MIB, dtype=torch.uint8))  # an optimizer's, between two steps
        model.zero_grad()
    assert max(peak.measured_bytes for peak in step.steps) < 8 * MIB
    assert len(step.steps) == 2 and not capsys.readouterr().out


def test_evaluation_and_forwards_without_backward_are_no_steps():
    model = model_of_matmuls()
    with recompile.watch(compiled_function(model), steps=1) as step:
        train(step, 1, model)
        with torch.no_grad():
            step(batch())
        step(batch())
        assert step.steps == ()
        train(step, 2, model)
    assert [peak.number for peak in step.steps] == [4]


def test_gradients_are_those_of_a_step_that_nobody_watches():
    model, x = model_of_matmuls(), batch()
    compiled = compiled_function(model)
    with recompile.watch(compiled, show=False) as step:
        for _ in range(3):
            model.zero_grad()
            step(x).square().sum().backward()
    watched = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    compiled(x).square().sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(watched, model.parameters(), strict=True))


@pytest.mark.parametrize("in_place", [True, False])
def test_a_module_is_watched_whoever_calls_it_and_untouched_afterwards(in_place):
    model = model_of_matmuls()
    compiled = model if in_place else torch.compile(model, backend="recompile")
    if in_place:
        model.compile(backend="recompile")
    before = dict(compiled.__dict__)
    with recompile.watch(compiled, show=False) as step:
        train(compiled, 3, model)
    assert len(step.steps) == 2
    assert compiled.__dict__.keys() == before.keys()
    assert all(compiled.__dict__[key] is value for key, value in before.items())


def test_a_module_of_compiled_blocks_is_watched_as_one():
    model = model_of_matmuls()
    for block in model.blocks:
        block.compile(backend="recompile")
    with recompile.watch(model, show=False) as step:
        train(model, 3, model)
    assert len(step.explanation().graphs) == 2 and len(step.steps) == 2
    assert "forward" not in model.__dict__


def test_blocks_that_torch_compile_replaced_are_explained_through_their_model():
    model = model_of_matmuls()
    model.blocks[0] = torch.compile(model.blocks[0], backend="recompile")
    train(model, 1, model)
    assert len(recompile.explain(model).graphs) == 1


def test_what_is_not_watched_is_called_directly(monkeypatch):
    """No cost when off: neither verbose nor watch, so no meter is made, and the compiled code is Inductor's own."""
    made = []
    monkeypatch.setattr("recompile.meter.Meter.__init__", lambda self, *args, **kwargs: made.append(self))
    compiled = []
    monkeypatch.setattr(
        "recompile.backend.compile_with_inductor", lambda *args: compiled.append(object()) or compiled[-1]
    )
    from recompile.backend import recompile as backend

    graph = torch.fx.symbolic_trace(lambda x: x.exp())
    assert backend(graph, [torch.ones(2, requires_grad=True)]) is compiled[0]
    assert not made


def test_after_its_steps_a_watch_only_passes_calls_through(monkeypatch):
    model = model_of_matmuls()
    step = recompile.watch(compiled_function(model), steps=1, show=False)
    train(step, 3, model)
    assert len(step.steps) == 1
    monkeypatch.setattr("recompile.meter.start_recording", None)  # calling it would raise
    monkeypatch.setattr("recompile.meter.free_bytes", None)
    train(step, 2, model)


def test_a_watch_has_the_attributes_of_what_it_watches():
    compiled = torch.compile(model_of_matmuls(), backend="recompile")
    watched = recompile.watch(compiled)
    assert watched.state_dict().keys() == compiled.state_dict().keys()
    with pytest.raises(AttributeError):
        watched.nothing  # noqa: B018


def test_under_another_profiler_steps_are_not_measured_and_it_says_so():
    model = model_of_matmuls()
    step = recompile.watch(compiled_function(model))
    train(step, 1, model)
    with torch.profiler.profile(), pytest.warns(RuntimeWarning, match="steps cannot be measured: .*profiler"):
        train(step, 2, model)
    assert step.steps == ()


@pytest.mark.parametrize("steps", [-1, 1.5, True])
def test_a_bad_number_of_steps_is_refused(steps):
    with pytest.raises(ValueError, match=r"steps=.* must be a whole number"):
        recompile.watch(compiled_function(model_of_matmuls()), steps=steps)


def test_what_is_not_compiled_by_this_backend_is_refused():
    for other in (model_of_matmuls(), torch.compile(model_of_matmuls(), backend="eager"), 3):
        with pytest.raises(TypeError, match="recompile"):
            recompile.watch(other)


def test_verbose_logs_what_the_first_steps_needed(caplog):
    model = model_of_matmuls()
    with caplog.at_level(logging.WARNING, logger="recompile"):
        train(compiled_function(model, verbose=True), 5, model)
    predicted, measured = caplog.messages
    assert predicted.startswith("recompile: predicted peak ")
    assert [line.split()[0] for line in measured.splitlines()[2:]] == ["2", "3"]


# What to try next


def explanation_of(budget=None):
    """One graph: it peaks at 512 bytes, and no plan needs less than 384 by the bound."""
    return recompile.plan(annotated(CHAIN), memory_budget=budget)


def test_a_peak_over_the_budget_says_the_next_budget():
    text = warning_text([StepPeak(2, 512, 640, 0.1)], explanation_of(600))
    assert text.startswith("recompile: the step needed 640 B, more than memory_budget=600 B (512 B predicted).")
    assert text.endswith("To stay within 600 B, try memory_budget=480.")  # 600 * 512 / 640


def test_a_peak_over_the_prediction_says_what_keeps_it():
    assert "more than the prediction (512 B predicted)" in warning_text([StepPeak(2, 512, 520, 0.1)], explanation_of())
    assert "try memory_budget=504" in warning_text([StepPeak(2, 512, 520, 0.1)], explanation_of())


def test_where_no_smaller_plan_exists_it_says_so():
    text = warning_text([StepPeak(2, 512, 1024, 0.1)], explanation_of(600))
    assert text.endswith(". No plan needs less than 384 B: lower the batch size or the sequence length.")


def test_within_the_budget_or_the_margin_nothing_is_said():
    assert warning_text([StepPeak(2, 512, 590, 0.1)], explanation_of(600)) == ""
    assert warning_text([StepPeak(2, 512, 516, 0.1)], explanation_of()) == ""  # a margin of 1 % is 517
    assert warning_text([], explanation_of()) == ""


def test_a_watched_step_over_its_prediction_warns():
    model, kept = model_of_matmuls(), []

    def eager_too(x):
        y = compiled(x)
        kept.append(torch.empty(8 * MIB, dtype=torch.uint8))  # allocated beside what is compiled
        return y

    compiled = compiled_function(model)
    step = recompile.watch(compiled, show=False)
    step._compiled = eager_too  # what is called; what is explained stays
    step._meter.explanation = lambda: recompile.explain(compiled)
    with pytest.warns(RuntimeWarning, match=r'more than the prediction .* try memory_budget="|No plan needs less than'):
        train(step, 4, model)


# Out of memory


def test_an_out_of_memory_error_in_the_block_says_what_to_set(monkeypatch):
    monkeypatch.setattr("recompile.meter.free_bytes", lambda device: 10 * GIB)
    model = model_of_matmuls()
    with pytest.raises(torch.OutOfMemoryError) as error, recompile.watch(compiled_function(model), show=False) as step:
        train(step, 2, model)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    (note,) = error.value.__notes__
    assert note.startswith("recompile: out of memory in a step that was predicted to add")
    assert "10.00 GiB were free when it began" in note and "Try memory_budget=" in note
    assert "recompile.max_batch()" in note


def test_an_out_of_memory_error_in_a_call_has_one_note_and_others_have_none():
    class Fails(nn.Module):
        error = torch.OutOfMemoryError("CUDA out of memory.")

        def forward(self, x):
            raise self.error

    model = Fails()
    compiled = torch.compile(model, backend="recompile")
    for error, num_notes in ((model.error, 1), (ValueError("no"), 0), (RuntimeError(CPU_TEXT), 1)):
        watched = recompile.watch(compiled)
        watched._meter.call = lambda *_, error=error: raise_(error)
        with pytest.raises(type(error)), watched:
            watched(batch())
        assert len(getattr(error, "__notes__", ())) == num_notes
    assert "before anything was planned" in model.error.__notes__[0]


CPU_TEXT = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to ..."


def raise_(error):
    raise error


def test_what_is_advised_fits_into_what_was_free():
    explanation = explanation_of()  # between 384 and 512 bytes
    assert "Try memory_budget=475," in out_of_memory_text(explanation, 500)  # 95 %
    assert "Try memory_budget=448," in out_of_memory_text(explanation, 10_000)  # something else filled it: halfway
    assert "Try memory_budget=448," in out_of_memory_text(explanation, None)
    assert "Lower the batch size or the sequence length: recompile.max_batch()" in out_of_memory_text(explanation, 400)
    assert "before anything was planned" in out_of_memory_text(Explanation(()), 400)


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(1023, "1023"), (int(11.409 * GIB), '"11.40GiB"'), (3 * MIB // 2, '"1.50MiB"')]
)
def test_budgets_are_written_as_the_option_takes_them(num_bytes, text):
    assert budget_text(num_bytes) == text
    assert recompile.units.parse_bytes(f"{text.strip(chr(34))}{'' if 'B' in text else 'B'}") <= num_bytes
