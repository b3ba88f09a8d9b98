"""@recompile.remat on a class, an instance and a function: compiled, and otherwise what it was before.

Models of matmuls alone go through Inductor in a fraction of a second: there is no C++ to compile.
"""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import recompile

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Plain(nn.Module):
    """Two matmuls, and a third one in training."""

    def __init__(self, width: int = 64, *, scale: float = 1.0):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, width, bias=False), nn.Linear(width, 8, bias=False)
        self.last = nn.Linear(8, 8, bias=False)
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, x):
        x = self.down(self.up(x))
        return self.last(x) if self.training else x


@recompile.remat
class Bare(Plain):
    pass


@recompile.remat(memory_budget=0.0, planner="full")
class WithOptions(Plain):
    pass


@recompile.remat(memory_budget=0.5)
class OwnInit(nn.Module):
    """Its own docstring."""

    def __init__(self, width: int = 64, *, scale: float = 1.0):
        super().__init__()
        self.inner = Plain(width, scale=scale)

    def forward(self, x):
        return self.inner(x)


class Derived(WithOptions):
    def __init__(self, width: int = 64):
        super().__init__(width)
        self.more = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.more(super().forward(x))


@recompile.remat(memory_budget=0.25)
class DerivedWithOptions(WithOptions):
    pass


@recompile.remat
def apply_bare(x, up, down):
    """Applies two matrices."""
    return x @ up @ down


@recompile.remat(memory_budget=0.0)
def apply_with_options(x, up, down):
    return x @ up @ down


CLASSES = [Bare, WithOptions, OwnInit, Derived, DerivedWithOptions]
MAKERS = {
    "bare class": (Bare, "None"),
    "class with options": (WithOptions, "0.0"),
    "subclass of a decorated class": (Derived, "0.0"),
    "decorated subclass of a decorated class": (DerivedWithOptions, "0.25"),
    "bare instance": (lambda: recompile.remat(Plain()), "None"),
    "instance with options": (lambda: recompile.remat(memory_budget=0.0)(Plain()), "0.0"),
    "instance in one call": (lambda: recompile.remat(Plain(), memory_budget=0.0), "0.0"),
}


def batch(rows=32):
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(rows))


def step(forward, x):
    out = forward(x)
    (out * out.detach()).sum().backward()
    return out


def uncompiled(module):
    """A twin that runs eagerly: the same weights, called past what nn.Module.compile installs."""
    twin = copy.deepcopy(module)
    twin.zero_grad()
    return twin, twin._call_impl


def assert_trains_like_eager(module, x):
    module.zero_grad()
    twin, forward = uncompiled(module)
    torch.testing.assert_close(step(module, x), step(forward, x))
    for (name, parameter), expected in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, msg=name)


def budgets_of(compiled):
    return [graph.budget for graph in recompile.explain(compiled).graphs]


# It compiles, and computes the same


@pytest.mark.parametrize(("make", "budget"), MAKERS.values(), ids=MAKERS)
def test_a_decorated_module_trains_like_eager_under_its_options(make, budget, partitioner_calls, empty_cache):
    module = make()
    assert_trains_like_eager(module, batch())
    assert [str(call) for call in partitioner_calls] == [budget]
    assert budgets_of(module) == [budget]


@pytest.mark.parametrize(("function", "budget"), [(apply_bare, "None"), (apply_with_options, "0.0")])
def test_a_decorated_function_trains_like_eager_under_its_options(function, budget, handed_to_inductor):
    def leaves():
        return [torch.randn(size, generator=torch.Generator().manual_seed(0)).requires_grad_() for size in sizes]

    sizes = [(32, 8), (8, 64), (64, 8)]
    ours, expected = leaves(), leaves()
    out = function(*ours)
    torch.testing.assert_close(out, expected[0] @ expected[1] @ expected[2])
    out.sum().backward()
    (expected[0] @ expected[1] @ expected[2]).sum().backward()
    torch.testing.assert_close([leaf.grad for leaf in ours], [leaf.grad for leaf in expected])
    assert budgets_of(function)[-1] == budget


def test_generated_code_of_a_decorated_class_trains_like_eager():
    @recompile.remat(memory_budget=0.0)
    class Gelu(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x):
            return self.down(torch.nn.functional.gelu(self.up(x)))

    assert_trains_like_eager(Gelu(), batch())


def test_a_decorated_method_is_explained_where_it_is_looked_up(handed_to_inductor):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        @recompile.remat(memory_budget=0.0)
        def twice(self, x):
            return self.layer(self.layer(x))

        def forward(self, x):
            return self.twice(x)

    module = Holder()
    step(module, batch())
    assert budgets_of(module.twice) == budgets_of(Holder.twice) == ["0.0"]


def test_before_its_first_call_an_instance_shows_nothing_of_code_that_dynamo_dropped(handed_to_inductor):
    earlier = Bare()
    step(earlier, batch())
    torch._dynamo.reset()
    assert recompile.explain(Bare()).graphs == ()


def test_train_and_eval_compile_each_mode_once_and_compute_the_same_as_eager(handed_to_inductor):
    module = Bare()
    for training in (True, False, True, False):
        assert module.train(training) is module
        _, eager = uncompiled(module)
        torch.testing.assert_close(module(batch()), eager(batch()))
    assert len(handed_to_inductor) == 2
    assert len(recompile.explain(module).graphs) == 2


def test_no_grad_goes_to_plain_inductor(handed_to_inductor):
    module = recompile.remat(Plain(), memory_budget=0.125)
    with torch.no_grad():
        module(batch())
    assert handed_to_inductor == [({}, None)]
    assert recompile.explain(module).graphs == ()


def test_dynamic_is_torch_compiles_own(handed_to_inductor):
    module = recompile.remat(Plain(), dynamic=True, memory_budget=0.0)
    for rows in (32, 5, 16):
        assert_trains_like_eager(module, batch(rows))
    assert counters["stats"]["unique_graphs"] == 1


def test_fullgraph_is_torch_compiles_own():
    @recompile.remat(fullgraph=True)
    def breaks(x):
        torch._dynamo.graph_break()
        return x @ x

    with pytest.raises(torch._dynamo.exc.Unsupported):
        breaks(torch.ones(4, 4, requires_grad=True))


# It stays what it was


def test_a_class_and_an_instance_come_back_as_themselves():
    class Local(Plain):
        pass

    module = Plain()
    assert recompile.remat(Local) is Local
    assert recompile.remat(memory_budget=0.5)(Local) is Local
    assert recompile.remat(module) is module
    assert recompile.remat(memory_budget=0.5)(module) is module


@pytest.mark.parametrize("cls", [Bare, WithOptions, OwnInit])
def test_a_class_keeps_its_name_signature_and_docstring(cls):
    assert inspect.signature(cls.__init__) == inspect.signature(Plain.__init__)
    assert inspect.signature(cls) == inspect.signature(Plain)
    assert cls.__module__ == __name__
    assert cls.__qualname__ in ("Bare", "WithOptions", "OwnInit")
    assert OwnInit.__doc__ == "Its own docstring."


def test_a_function_keeps_its_name_signature_and_docstring():
    assert apply_bare.__name__ == "apply_bare"
    assert apply_bare.__doc__ == "Applies two matrices."
    assert list(inspect.signature(apply_bare).parameters) == ["x", "up", "down"]


@pytest.mark.parametrize(("make", "budget"), MAKERS.values(), ids=MAKERS)
def test_state_dict_keys_and_isinstance_stay_before_and_after_the_first_call(handed_to_inductor, make, budget):
    module = make()
    keys = [*Plain().state_dict(), *(["more.weight"] if isinstance(module, Derived) else [])]
    assert list(module.state_dict()) == keys
    step(module, batch())
    assert list(module.state_dict()) == keys
    assert [name for name, _ in module.named_modules()] == ["", "up", "down", "last", *(["more"] * (len(keys) > 4))]
    assert isinstance(module, Plain)
    assert isinstance(module, nn.Module)


def test_weights_move_between_a_plain_and_a_decorated_module(handed_to_inductor):
    plain, module = Plain(), Bare()
    nn.init.ones_(plain.last.weight)
    module.load_state_dict(plain.state_dict())
    torch.testing.assert_close(module(batch()), plain(batch()))
    plain.load_state_dict(module.state_dict())


def test_the_base_of_a_decorated_class_is_left_alone(handed_to_inductor):
    step(Plain(), batch())
    assert handed_to_inductor == []
    with pytest.raises(TypeError):
        recompile.explain(Plain())


def test_hooks_run_once_a_call(handed_to_inductor):
    module, calls = Bare(), []
    module.register_forward_hook(lambda *_: calls.append("forward"))
    module.register_full_backward_hook(lambda *_: calls.append("backward"))
    step(module, batch().requires_grad_())
    assert sorted(calls) == ["backward", "forward"]


# Copies


@pytest.mark.parametrize("cls", CLASSES)
def test_a_class_is_pickled_by_its_name(cls):
    assert pickle.loads(pickle.dumps(cls)) is cls


COPIES = {"pickle": lambda module: pickle.loads(pickle.dumps(module)), "deepcopy": copy.deepcopy, "copy": copy.copy}


@pytest.mark.parametrize("make_copy", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("called", [False, True], ids=["before the first call", "after it"])
@pytest.mark.parametrize("cls", [Bare, WithOptions, Derived])
def test_a_copy_of_an_instance_of_a_decorated_class_compiles_for_itself(handed_to_inductor, cls, called, make_copy):
    module = cls()
    if called:
        step(module, batch())
    twin = make_copy(module)
    assert type(twin) is cls
    torch.testing.assert_close(twin.state_dict(), module.state_dict())
    assert_trains_like_eager(twin, batch())
    assert len(handed_to_inductor) == 1, "equal options and equal code: Dynamo compiles once for both"
    assert budgets_of(twin) == [str(handed_to_inductor[0][1].options.memory_budget)]


def test_a_copy_of_a_module_that_was_compiled_in_place_is_plain_as_nn_module_compile_has_it(handed_to_inductor):
    module = recompile.remat(Plain())
    step(module, batch())
    for make_copy in COPIES.values():
        twin = make_copy(module)
        twin(batch())
        with pytest.raises(TypeError, match="not compiled"):
            recompile.explain(twin)
    assert len(handed_to_inductor) == 1


# What is refused

BAD_OPTIONS = [
    {"memory_budget": 1.5}, {"planner": "fastest"}, {"hardware": "abacus"}, {"mode": "fastest"}, {"nonsense": 1},
    {"backend": "inductor"}, {"max_fusion_size": "64"},
]  # fmt: skip


@pytest.mark.parametrize("options", BAD_OPTIONS, ids=str)
def test_a_bad_option_is_refused_where_the_decorator_stands(options):
    [name] = options
    with pytest.raises(ValueError, match=name) as caught:
        recompile.remat(**options)
    assert type(caught.value) is recompile.OptionError
    with pytest.raises(recompile.OptionError, match=name):
        recompile.remat(Plain, **options)


@pytest.mark.parametrize("target", [3, "model", dict, object(), [nn.Linear]], ids=lambda target: type(target).__name__)
def test_anything_but_a_module_class_a_module_or_a_function_is_a_type_error(target):
    for decorator in (recompile.remat, recompile.remat(memory_budget=0.5)):
        with pytest.raises(TypeError, match=r"takes an nn\.Module class, an nn\.Module or a function"):
            decorator(target)


def test_explain_of_a_decorated_class_asks_for_an_instance():
    with pytest.raises(TypeError, match="instance"):
        recompile.explain(Bare)
