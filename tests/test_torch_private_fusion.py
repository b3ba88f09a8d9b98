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
