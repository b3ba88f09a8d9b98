"""Give backward a copy of inputs that forward overwrites, so that it never reads the new content for the old."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx

from recompile.torch_private import storage_key


def snapshot_overwritten(graph: fx.Graph, inputs: Sequence[fx.Node]) -> int:
    """Insert a clone of every placeholder in ``inputs`` and let all that reads it, views included, read the clone.

    Ops that write to the input keep their target; outputs that return the input itself keep it. Returns the number of
    clones. A clone that forward alone reads costs nothing: the compiler folds it into its readers.
    """
    last_placeholder = [node for node in graph.nodes if node.op == "placeholder"][-1]
    for source in inputs:
        readers = [user for user in source.users if user.op == "call_function" and not _writes_to(user, source)]
        with graph.inserting_after(last_placeholder):
            copy = graph.call_function(torch.ops.aten.clone.default, (source,))
        val = source.meta["val"]
        copy.meta = {key: source.meta[key] for key in ("stack_trace", "tensor_meta") if key in source.meta}
        with val.fake_mode:
            copy.meta["val"] = val.clone()
        for reader in readers:
            reader.replace_input_with(source, copy)
        _move_views(copy, storage_key(val))
    return len(inputs)


def _writes_to(user: fx.Node, source: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    return schema is not None and schema.is_mutable and bool(user.args) and user.args[0] is source


def _move_views(base: fx.Node, old_storage: int | None) -> None:
    """Views of the input are views of the copy now: evaluate them again on fake tensors."""
    pending = [base]
    while pending:
        node = pending.pop(0)
        for user in node.users:
            val = user.meta.get("val")
            if not isinstance(val, torch.Tensor) or storage_key(val) != old_storage or user.op != "call_function":
                continue
            args, kwargs = fx.map_arg((user.args, user.kwargs), lambda argument: argument.meta["val"])
            with base.meta["val"].fake_mode:
                user.meta["val"] = user.target(*args, **kwargs)
            pending.append(user)
