"""For all tests: an Inductor cache that no earlier run has filled, no pool of compiler processes, nominal hardware."""

import logging
import os
import shutil
import tempfile

import pytest

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
own_cache = None


def pytest_configure(config):
    """Environment variables, so that processes that tests start have them too; torch is not imported yet."""
    global own_cache
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    os.environ["RECOMPILE_HARDWARE_DIR"] = os.devnull  # whoever runs the tests may have calibrated the machine
    if CACHE_VARIABLE not in os.environ:
        own_cache = os.environ[CACHE_VARIABLE] = tempfile.mkdtemp(prefix="recompile-tests-")


def pytest_unconfigure(config):
    if own_cache is not None:
        shutil.rmtree(own_cache, ignore_errors=True)


@pytest.fixture
def fresh_dynamo():
    """No code of an earlier test is reused. Files that call torch.compile ask for it with ``pytestmark``."""
    import torch._dynamo

    logging.getLogger("torch.__trace").disabled = True  # pytest would show its thousands of empty lines
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture(scope="module")
def kept():
    """The report of a chain of which everything is kept."""
    from tests.test_report import report_of

    return report_of(planner="save_all")


@pytest.fixture(scope="module")
def rebuilt():
    """The report of the smallest plan of the same chain."""
    from tests.test_report import report_of

    return report_of(budget=0.0)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    """The folder of an Inductor cache of the test's own. Without C++ code in the model, filling it takes 0.2 s."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def partitioner_calls(monkeypatch):
    """The memory budgets for which the partitioner was asked to split a graph, in order."""
    from recompile.backend import Partitioner

    split, calls = Partitioner.__call__, []

    def recorded(self, *args, **kwargs):
        calls.append(self.options.memory_budget)
        return split(self, *args, **kwargs)

    monkeypatch.setattr(Partitioner, "__call__", recorded)
    return calls


@pytest.fixture
def handed_to_inductor(monkeypatch):
    """What the backend asked of Inductor: (settings, partitioner) a graph. Graphs are interpreted, no code is made."""
    from torch._inductor import config

    from .whole.interpret import interpreted

    asked = []

    def interpret(model, inputs, patches, partitioner, emitted=None):
        asked.append((patches, partitioner))
        with config.patch(patches):
            return interpreted(partitioner)(model, inputs)

    monkeypatch.setattr("recompile.backend.compile_with_inductor", interpret)
    return asked
