"""Imports go one way: api, backend -> planner -> facts; passes know the data types only (DESIGN, section 2).

Every .py file is parsed, none is imported. An import counts wherever it stands: in a function, or for a type checker.
"""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCH_INTERNALS = ("torch._functorch", "torch._inductor", "torch._dynamo", "torch._subclasses", "triton")
PRIVATE_PARTS = ("", "_emitted", "_fakes", "_fusion", "_gpu", "_lowering", "_order", "_stock", "_trace")
MAY_USE_INTERNALS = tuple(f"recompile.torch_private{part}" for part in PRIVATE_PARTS)
FACT_FILES = (
    "annotation",
    "channels_last",
    "cost",
    "dataflow",
    "fusion",
    "hardware",
    "joint",
    "mincut",
    "occupancy",
    "registry",
    "replay",
    "rules",
    "timeline",
    "work",
)
PURE = ("recompile.mincut", "recompile.replay")
FACTS = tuple(f"recompile.{name}" for name in FACT_FILES)
DECISIONS_AND_ACTIONS = ("recompile.planner", "recompile.passes", "recompile.backend", "recompile.api")
ABOVE_PLANNERS = ("recompile.passes", "recompile.backend", "recompile.api")
PASSES_MAY_IMPORT = ("torch", "recompile.joint", "recompile.torch_private", "recompile.passes")


def is_within(name, *modules):
    """Whether a dotted name is one of the modules or lies in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def names_used(module, source):
    """The dotted names that a module imports, and the attributes of torch that it reads (`torch._dynamo.reset`)."""
    package = module.removesuffix(".__init__") if module.endswith(".__init__") else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield f"torch.{node.attr}"


def why_refused(module, name):
    """The rule that the use of a name breaks, as a noun phrase, or None."""
    module = module.removesuffix(".__init__")
    if is_within(name, *TORCH_INTERNALS) and module not in MAY_USE_INTERNALS:
        return "torch's internals outside torch_private"
    if is_within(module, *PURE) and is_within(name, "torch"):
        return "torch in a pure algorithm"
    if is_within(module, *FACTS) and is_within(name, *DECISIONS_AND_ACTIONS):
        return "a decision or an action in a facts module"
    if is_within(module, "recompile.planner") and is_within(name, *ABOVE_PLANNERS):
        return "what uses planners in a planner"
    if is_within(module, "recompile.passes") and not is_allowed_in_passes(name):
        return "more than torch and the data types in a pass"
    return None


def is_allowed_in_passes(name):
    return name.split(".")[0] in sys.stdlib_module_names or is_within(name, *PASSES_MAY_IMPORT)


def violations(sources):
    """Every use that breaks a rule, as text, for a dict from module name to source."""
    uses = [(module, name) for module, source in sources.items() for name in dict.fromkeys(names_used(module, source))]
    reasons = [(module, name, why_refused(module, name)) for module, name in uses]
    return [f"{module} uses {name}: {reason}" for module, name, reason in reasons if reason is not None]


def read_sources():
    files = [*sorted((ROOT / "recompile").rglob("*.py")), *sorted((ROOT / "passes").rglob("*.py"))]
    dotted = {file: ".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files}
    return {
        f"recompile.{module}" if module.startswith("passes.") else module: file.read_text(encoding="utf-8")
        for file, module in dotted.items()
    }


def test_no_module_uses_what_lies_above_it():
    assert violations(read_sources()) == []


def test_the_sources_that_are_read_are_those_of_both_packages():
    assert {"recompile.joint", "recompile.versions", "recompile.passes.__init__"} <= set(read_sources())


@pytest.mark.parametrize(
    ("module", "source", "refused"),
    [
        ("recompile.cost", "import torch._inductor.config", "torch._inductor.config"),
        ("recompile.cost", "from torch._subclasses import FakeTensor", "torch._subclasses.FakeTensor"),
        ("recompile.cost", "from torch import _dynamo", "torch._dynamo"),
        ("recompile.cost", "import torch\ndef f(): torch._functorch.config", "torch._functorch"),
        ("recompile.passes.drop_dead", "from torch._inductor import ir", "torch._inductor.ir"),
        ("recompile.report.text", "def f():\n  import torch._dynamo", "torch._dynamo"),
        ("recompile.gpu", "import triton", "triton"),
        ("recompile.mincut", "import torch", "torch"),
        ("recompile.replay", "import torch", "torch"),
        ("recompile.mincut", "def f():\n  from torch import fx", "torch.fx"),
        ("recompile.timeline", "from recompile.planner.mincut import plan", "recompile.planner.mincut.plan"),
        ("recompile.rules", "from recompile import api", "recompile.api"),
        ("recompile.joint", "from .backend import recompile", "recompile.backend.recompile"),
        ("recompile.planner.mincut", "from ..passes import split", "recompile.passes.split"),
        ("recompile.planner.__init__", "from .. import backend", "recompile.backend"),
        ("recompile.planner.stock", "import recompile.api", "recompile.api"),
        ("recompile.passes.split", "from recompile.planner import Plan", "recompile.planner.Plan"),
        ("recompile.passes.split", "import networkx as nx", "networkx"),
        ("recompile.passes.split", "from recompile import Plan", "recompile.Plan"),
        ("recompile.passes.__init__", "from ..cost import price", "recompile.cost.price"),
    ],
)
def test_each_use_of_what_lies_above_is_found(module, source, refused):
    (violation,) = violations({module: source})
    assert violation.startswith(f"{module} uses {refused}: ")


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("recompile.torch_private", "from torch._inductor import config\nimport torch._dynamo"),
        ("recompile.mincut", "import heapq\nimport numpy\nimport torchless"),
        ("recompile.cost", "import torch\nfrom recompile.joint import Work\nfrom .hardware import Hardware"),
        (
            "recompile.planner.stock",
            "from functorch.compile import x\nfrom recompile.timeline import y\nfrom . import z",
        ),
        ("recompile.passes.__init__", "from .split import split\nfrom recompile.passes import drop_dead"),
        ("recompile.passes.split", "import operator\nfrom torch import fx\nfrom recompile.joint import Side"),
        ("recompile.backend", "from recompile.passes import split\nfrom recompile.planner import plan"),
    ],
)
def test_a_use_of_what_lies_below_is_let_through(module, source):
    assert violations({module: source}) == []
