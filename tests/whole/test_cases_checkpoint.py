"""Checkpointing by the user inside the compiled function is obeyed (CASES 13), contradictions are named (CASES 24)."""

import functools
import inspect

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from recompile import records

from .every_plan import SHARES, assert_alike, check, quick, report_of, trained  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

ROWS, WIDTH = 4, 8
MM = torch.ops.aten.mm.default
ADDMM = torch.ops.aten.addmm.default
PRODUCTS = (MM, ADDMM)


class Regions(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.first, self.second, self.last = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.body = body

    def inner(self, x):
        return self.second(self.first(x).sin()).cos()

    def forward(self, x):
        return self.last(self.body(self, x)).sigmoid()


def plain(model, x):
    return checkpoint(model.inner, x, use_reentrant=False)


def nested(model, x):
    return checkpoint(functools.partial(nested_inner, model), x, use_reentrant=False)


def nested_inner(model, x):
    return checkpoint(model.inner, x, use_reentrant=False).exp()


def twice(model, x):
    return plain(model, plain(model, x))


def with_dropout(model, x):
    return checkpoint(functools.partial(dropped, model), x, use_reentrant=False)


def dropped(model, x):
    return F.dropout(model.inner(x), 0.4).exp()


def without_preserved_state(model, x):
    return checkpoint(model.inner, x, use_reentrant=False, preserve_rng_state=False)


def regions(body):
    return Regions(body), (torch.randn(ROWS, WIDTH),)


@pytest.mark.parametrize("body", [plain, nested, twice, without_preserved_state])
def test_checkpointed_regions_have_eagers_gradients(body):
    """CASES 13: eager does not checkpoint here, for the reference is the same arithmetic without regions."""
    check(lambda: regions(body))


@pytest.mark.parametrize("fallback_random", [False, True])
def test_dropout_in_a_checkpointed_region_keeps_its_mask(fallback_random):
    """CASES 13 and 2."""
    check(lambda: regions(with_dropout), like_eager=fallback_random, fallback_random=fallback_random)


def calls_of(graph, budget, planner="mincut"):
    return graph.replay(partitioner(budget, planner)).partition.backward_calls


def test_a_region_is_computed_again_in_backward_without_a_budget_and_its_result_is_kept():
    """CASES 13: of the region nothing is saved but its result; nor is what only backward computes from its values."""
    (graph,) = check(lambda: regions(plain)).graphs
    assert calls_of(graph, None)["aten.mm.default"] == 5 + 2  # three gradients of weights, two of inputs; two rebuilt
    assert [row.name for row in report_of(graph, None).saved if row.kind != "input"] == ["cos", "sigmoid"]


def test_nothing_outside_of_a_region_is_computed_again_without_a_budget():
    """CASES 13: the sigmoid after the region is saved, being an output."""
    (graph,) = check(lambda: regions(plain), num_steps=1).graphs
    assert calls_of(graph, None)["aten.sigmoid.default"] == 0


@pytest.mark.parametrize("share", SHARES)
def test_reentrant_checkpointing_is_right_or_refused(share):
    """CASES 13: use_reentrant=True is no region of the compiled graph."""

    def body(model, x):
        return checkpoint(model.inner, x, use_reentrant=True)

    def case():
        model, (x,) = regions(body)
        return model, (x.requires_grad_(),)  # without one, eager drops the gradients of the region's parameters

    try:
        result = trained(case, functools.partial(torch.compile, backend=interpreted(partitioner(share))))
    except torch._dynamo.exc.TorchDynamoException as error:
        assert "reentrant" in str(error)
    else:
        assert_alike(result, trained(case), 1e-5)


# Policies are functions of this module: a closure would break the graph


def must_save_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def must_recompute_products(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE if op in PRODUCTS else CheckpointPolicy.PREFER_SAVE


def must_recompute_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_RECOMPUTE


def must_save_all(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE


def prefer_save(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_SAVE


def prefer_recompute(ctx, op, *args, **kwargs):
    return CheckpointPolicy.PREFER_RECOMPUTE


POLICIES = [
    must_save_products, must_recompute_products, must_recompute_all, must_save_all, prefer_save, prefer_recompute,
]  # fmt: skip


def selected(policy, model, x):
    context = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(model.inner, x, use_reentrant=False, context_fn=context)


def traced_with(policy):
    (graph,) = check(lambda: regions(functools.partial(selected, policy))).graphs
    return graph


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_policies_have_eagers_gradients(policy):
    """CASES 13: every policy under every plan."""
    traced_with(policy)


PLANS = [*((share, "mincut") for share in SHARES), (None, "full"), (None, "stock")]


def test_what_must_be_saved_is_never_computed_again():
    """CASES 13: at every budget backward has the five products of the gradients, and no more."""
    graph = traced_with(must_save_products)
    assert {calls_of(graph, *plan)["aten.mm.default"] for plan in PLANS} == {5}


def test_what_must_be_recomputed_is_never_saved():
    """CASES 13: at every budget, without one too."""
    graph = traced_with(must_recompute_products)
    assert {calls_of(graph, *plan)["aten.mm.default"] for plan in [*PLANS, (None, "save_all")]} == {5 + 2}


def test_a_preference_to_save_yields_to_a_budget():
    """CASES 13: prefer-* are hints."""
    (graph,) = check(lambda: (Regions(three_times), (torch.randn(16 * ROWS, WIDTH),)), num_steps=1).graphs
    assert calls_of(graph, None)["aten.mm.default"] == 2 * 7 - 1
    assert report_of(graph, 0.0).saved_bytes < report_of(graph, None, "save_all").saved_bytes


def three_times(model, x):
    for _ in range(3):
        x = selected(prefer_save, model, x)
    return x


def test_a_region_budget_of_pytorchs_own_goes_before_the_option():
    """CASES 13: torch.autograd.graph.region_activation_memory_budget is the graph's budget, as a share."""
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        pytest.skip("this torch has no region budgets")

    def spanned(model, x):
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return model(x)

    torch.manual_seed(0)
    model, (x,) = Regions(Regions.inner), (torch.randn(ROWS, WIDTH),)
    with records.recording() as graphs:
        torch.compile(spanned, backend=interpreted(partitioner(None)))(model, x).sum().backward()
    assert [graph.budget for graph in graphs] == ["0.0"]


class Contradicted(nn.Module):
    """A region that may be neither saved nor computed again."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        y = self.linear(x)
        z = F.dropout(y, 0.5)
        return z.sin().exp()

    def forward(self, x):
        context = functools.partial(create_selective_checkpoint_contexts, must_recompute_all)
        return checkpoint(self.inner, x, use_reentrant=False, context_fn=context)


@pytest.mark.parametrize("share", SHARES)
def test_contradictory_policies_name_both_nodes_both_lines_and_the_way_out(share, contradiction):
    """CASES 24: an opaque op that must not run twice, in a region whose values must all be recomputed."""
    model, op = contradiction
    with pytest.raises(Exception, match=r"must be recomputed|MUST_RECOMPUTE") as caught:
        torch.compile(model, backend=interpreted(partitioner(share)))(torch.randn(ROWS, WIDTH)).sum().backward()
    text = str(caught.value)
    lines, first = inspect.getsourcelines(type(model).inner)
    assert op in text and "custom op" in text
    assert f"{__file__}:{first + next(i for i, line in enumerate(lines) if 'stateful' in line)}" in text
    assert "checkpoint policy" in text or "register_op" in text


class Stateful(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def inner(self, x):
        y = self.linear(x).tanh()
        y = torch.ops.recompile_checkpoint.stateful(y)
        return y.sin().exp()

    forward = Contradicted.forward


@pytest.fixture(scope="module")
def contradiction():
    @torch.library.custom_op("recompile_checkpoint::stateful", mutates_args=())
    def stateful(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    stateful.register_fake(torch.empty_like)
    stateful.register_autograd(lambda ctx, tangent: tangent * 2)
    return Stateful(), "stateful"


def test_dropout_in_a_region_that_must_be_recomputed_is_no_contradiction():
    """CASES 24 and 2: its draw can be repeated."""
    check(lambda: (Contradicted(), (torch.randn(ROWS, WIDTH),)), fallback_random=True)
