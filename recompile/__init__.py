"""recompile: activation rematerialisation for torch.compile under a budget on peak memory.

``torch.compile(model, backend="recompile", options={"memory_budget": "12GiB"})`` needs no import of this package.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "Budget": "recompile.joint",
    "BudgetError": "recompile.errors",
    "Choice": "recompile.joint",
    "Fit": "recompile.fit",
    "Footprint": "recompile.footprint",
    "Frontier": "recompile.tradeoff",
    "Hardware": "recompile.hardware",
    "JointGraph": "recompile.joint",
    "Plan": "recompile.joint",
    "OptionError": "recompile.errors",
    "PlanError": "recompile.errors",
    "Explanation": "recompile.report.explanation",
    "Measurement": "recompile.measurement",
    "annotate": "recompile.annotation",
    "explain": "recompile.api",
    "frontier": "recompile.ahead",
    "joint_graph": "recompile.ahead",
    "max_batch": "recompile.fit",
    "measure": "recompile.measurement",
    "plan": "recompile.ahead",
    "register_op": "recompile.registry",
    "remat": "recompile.api",
    "watch": "recompile.watching",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'recompile' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
