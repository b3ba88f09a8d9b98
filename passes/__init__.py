"""Verbs: passes that change graphs. Analyses and plans come in as values; nothing here decides anything."""

from recompile.passes.place_recomputation import place_recomputation
from recompile.passes.replay_random import replay_random
from recompile.passes.snapshot_overwritten import snapshot_overwritten
from recompile.passes.split_joint import split_joint

__all__ = ["place_recomputation", "replay_random", "snapshot_overwritten", "split_joint"]
