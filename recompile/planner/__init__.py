"""Planners: one file a strategy, one signature, ``(JointGraph, Hardware, Budget) -> Plan``."""

from recompile.planner.exact import exact
from recompile.planner.full import full
from recompile.planner.mincut import mincut
from recompile.planner.save_all import save_all
from recompile.planner.stock import stock

BY_NAME = {"mincut": mincut, "stock": stock, "save_all": save_all, "full": full, "exact": exact}

__all__ = ["BY_NAME", "exact", "full", "mincut", "save_all", "stock"]
