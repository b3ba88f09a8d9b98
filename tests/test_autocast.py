"""Autocast as CUDA has it, on the CPU."""

import pytest
import torch
import torch.nn.functional as F

from recompile.autocast import FLOAT32_ON_CUDA, autocast_of_gpu

X = torch.ones(4, 4, dtype=torch.bfloat16)


def dtypes():
    return [F.softmax(X, -1).dtype, F.layer_norm(X, (4,)).dtype, X.exp().dtype, (X @ X).dtype, F.gelu(X).dtype]


def test_ops_of_cudas_float32_list_run_in_float32_and_the_others_as_before():
    low, full = torch.bfloat16, torch.float32
    with torch.autocast("cpu", low):
        before = dtypes()
        with autocast_of_gpu():
            assert dtypes() == [full, full, full, low, low]
            assert X.sum(dtype=low).dtype == low
        assert dtypes() == before == [low] * 5
    with autocast_of_gpu():
        assert dtypes() == [low] * 5


def test_gradients_come_back_in_the_dtype_of_the_input():
    x = X.clone().requires_grad_()
    with autocast_of_gpu(), torch.autocast("cpu", torch.bfloat16):
        F.softmax(x, -1).square().sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_autocast_for_cuda_around_the_caller_counts(monkeypatch):
    """Without CUDA, torch.autocast("cuda") turns itself off with a warning; so it is told that there is some."""
    x = torch.ones(4, 4)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    with torch.autocast("cuda", torch.bfloat16), autocast_of_gpu():
        assert ((x @ x).dtype, x.softmax(-1).dtype) == (torch.bfloat16, torch.float32)
    assert not torch.is_autocast_enabled("cpu")


def test_an_error_inside_leaves_nothing_behind():
    with pytest.raises(ZeroDivisionError), torch.autocast("cpu", torch.bfloat16), autocast_of_gpu():
        raise ZeroDivisionError
    with torch.autocast("cpu", torch.bfloat16):
        assert dtypes() == [torch.bfloat16] * 5


def test_every_op_of_the_list_exists():
    for name in FLOAT32_ON_CUDA:
        packet, _, overload = name.partition(".")
        assert getattr(getattr(torch.ops.aten, packet), overload or "default")
