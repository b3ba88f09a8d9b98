"""Random numbers: backward uses forward's, draws none, and leaves the generator as eager does."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from .every_plan import SHARES, check, quick, reasons_not_to_recompute  # noqa: F401
from .interpret import interpreted, partitioner

pytestmark = pytest.mark.usefixtures("quick")

BATCH, LENGTH, WIDTH = 2, 6, 8
both_random_modes = pytest.mark.parametrize("fallback_random", [False, True], ids=["seeds", "fallback_random"])


def dropout(h):
    return F.dropout(h, 0.5)


def rand_like(h):
    return h * torch.rand_like(h)


def normal_noise(h):
    return h + torch.randn_like(h) * h.sin()


def bernoulli(h):
    return h * torch.bernoulli(torch.full_like(h, 0.3))


def bernoulli_of_activations(h):
    return h * torch.bernoulli(h.detach().sigmoid())


def rrelu(h):
    return F.rrelu(h, training=True)


def channel_dropout(h):
    return F.dropout1d(h, 0.5)


def image_dropout(h):
    return F.dropout2d(h.unsqueeze(2), 0.5).squeeze(2)


def alpha_dropout(h):
    return F.alpha_dropout(h, 0.3, training=True)


def feature_alpha_dropout(h):
    return F.feature_alpha_dropout(h, 0.3, training=True)


def random_integers(h):
    return h * torch.randint_like(h, 1, 5)


def random_rows(h):
    return h[:, torch.randint(0, LENGTH, (LENGTH,))]


def permuted(h):
    return h[torch.rand(BATCH).argsort()]


def sampled(h):
    index = torch.multinomial(h.detach().softmax(-1).flatten(0, 1), 3)
    return h * torch.zeros(BATCH * LENGTH, WIDTH).scatter(1, index, 1.0).view_as(h)


def gumbel(h):
    return h * F.gumbel_softmax(h, tau=0.5)


def drop_path(h):
    return h / 0.8 * (torch.rand(BATCH, 1, 1) < 0.8)


RANDOM = [
    dropout, rand_like, normal_noise, bernoulli, bernoulli_of_activations, rrelu, channel_dropout, image_dropout,
    alpha_dropout, feature_alpha_dropout, random_integers, random_rows, permuted, sampled, gumbel, drop_path,
]  # fmt: skip


class Noisy(nn.Module):
    """The same random function twice, with something to recompute before, between and after."""

    def __init__(self, function):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x):
        h = self.function(F.gelu(self.first(x)))
        return self.function(self.second(h).sin()).exp()


def noisy(function):
    return Noisy(function), (torch.randn(BATCH, LENGTH, WIDTH),)


@pytest.mark.parametrize("function", RANDOM)
def test_eagers_random_numbers_give_eagers_gradients(function):
    """CASES 2 with fallback_random: every kind of random op, against eager and between plans. The generator too
    is left as eager leaves it: what the program draws next is the same. torch 2.11 decomposes rrelu into draws of its
    own, whoever splits the graph."""
    like_eager = function is not rrelu or torch.__version__ >= "2.12"
    check(lambda: noisy(function), fallback_random=True, like_eager=like_eager)


@pytest.mark.parametrize("function", RANDOM)
def test_inductors_random_numbers_are_the_same_under_every_plan(function):
    """CASES 2 without fallback_random: every kind of random op, to the last bit."""
    check(lambda: noisy(function), like_eager=False, num_steps=1)


class MaskShown(nn.Module):
    """The last op is random and linear in the bias before it, so the bias's gradient shows backward's numbers."""

    def __init__(self, function):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(BATCH, LENGTH, WIDTH))
        self.function = function

    def forward(self, x):
        return self.function(self.function(self.first(x)).sin() + self.last)


@both_random_modes
@pytest.mark.parametrize("function", [dropout, bernoulli, channel_dropout, image_dropout])
def test_the_gradient_is_zero_where_the_output_is(function, fallback_random):
    """CASES 2: the mask that backward uses is the mask that forward used, whatever else agrees with itself."""
    for budget in SHARES:
        torch._dynamo.reset()
        model = MaskShown(function)
        backend = interpreted(partitioner(budget), fallback_random)
        output = torch.compile(model, backend=backend)(torch.randn(BATCH, LENGTH, WIDTH))
        state = torch.get_rng_state()
        output.sum().backward()
        assert 0 < (output == 0).sum() < output.numel()
        assert torch.equal(output == 0, model.last.grad == 0), budget
        assert torch.equal(state, torch.get_rng_state()), f"backward drew random numbers at {budget}"


def test_seeds_are_drawn_once_in_forward_and_never_in_backward():
    """CASES 2: inductor_seeds at every budget."""
    (graph,) = check(lambda: noisy(dropout), like_eager=False).graphs
    for budget in SHARES:
        partition = graph.replay(partitioner(budget)).partition
        assert partition.forward_calls["prims.inductor_seeds.default"] == 1
        assert partition.backward_calls["prims.inductor_seeds.default"] == 0


class Attention(nn.Module):
    def __init__(self, p, causal=True, mask=None):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)
        self.p, self.causal, self.mask = p, causal, mask

    def forward(self, x):
        q, k, v = self.project(x).view(BATCH, LENGTH, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, self.mask, self.p, self.causal)
        return y.transpose(1, 2).flatten(2).sin()


def attention(p, **options):
    return Attention(p, **options), (torch.randn(BATCH, LENGTH, WIDTH),)


def test_attention_without_dropout_is_right_and_may_be_recomputed():
    """CASES 3: its tag says random; its dropout_p says it is not."""
    (graph,) = check(lambda: attention(0.0)).graphs
    assert reasons_not_to_recompute(graph, "scaled_dot_product") == {None}
    attend = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert graph.replay(partitioner(None, "full")).partition.backward_calls[attend] == 1


def test_attention_with_a_mask_is_right():
    """CASES 3: a mask in the place of the causal one."""
    check(lambda: attention(0.0, causal=False, mask=torch.tril(torch.ones(LENGTH, LENGTH, dtype=torch.bool))))


def test_attention_with_dropout_uses_eagers_random_numbers():
    """CASES 3, with fallback_random."""
    check(lambda: attention(0.3), fallback_random=True)


def test_attention_with_dropout_uses_inductors_random_numbers_once():
    """CASES 3, with Inductor's random numbers."""
    check(lambda: attention(0.3), like_eager=False)
