"""Fusions that Inductor is kept from making, seen in its program for a GPU that is not there."""

import pytest
import torch

pytest.importorskip("triton")

from recompile.gpu import dry_run
from tests.whole.models import TwoTraversals

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def test_gradients_of_a_first_use_do_not_wait_for_those_of_the_second():
    """Inductor by itself sums the bias gradients of both uses in one kernel, and all that the first sum reads waits."""
    with torch.device("meta"):
        model, x = TwoTraversals(64, num_blocks=4, dropout=0.0), torch.empty(1, 4096, 64)
    run = dry_run(model, (x,), memory_budget=0.0, hardware="h100")
    wide_bytes, program = 4096 * 256 * 4, run.program
    assert program.peak_bytes <= run.report.peak_bytes * 1.02
    assert program.peak_bytes < 8 * wide_bytes  # one block's working set and a narrow value per block, not eight blocks


class TiedOutput(torch.nn.Module):
    """An embedding whose weight is the output layer's too, and wide logits."""

    def __init__(self, num_words=4096, width=64, num_layers=6):
        super().__init__()
        self.words = torch.nn.Embedding(num_words, width)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(num_layers))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits = x @ self.words.weight.T
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_the_gradient_of_logits_does_not_wait_for_that_of_the_embedding():
    """Inductor by itself makes the tied weight's gradient in one call at the end, from the gradient of the logits."""
    with torch.device("meta"):
        model, tokens = TiedOutput(), torch.zeros(1, 1024, dtype=torch.int64)
    program = dry_run(model, (tokens,), memory_budget=0.0, hardware="h100").program
    logits_bytes = 1024 * 4096 * 4
    *_, last = [kernel for kernel in program.kernels if kernel.live_bytes > logits_bytes]
    named = [kernel.name for kernel in program.kernels]
    assert named.index(last.name) < len(named) / 2 and "extern_kernels.addmm" not in named[len(named) // 2 :]
