"""Results on disk, one JSON file each: what is there for the same key is not made again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx


@dataclass(frozen=True)
class Store:
    """A folder of results. A file's name begins with what a person looks for and ends with the key."""

    folder: Path

    def path(self, name: str, key: str) -> Path:
        return self.folder / f"{name}-{key}.json"

    def load(self, name: str, key: str) -> dict[str, Any] | None:
        """The result, or None where there is none or an interrupted one."""
        try:
            return json.loads(self.path(name, key).read_text())
        except (FileNotFoundError, ValueError):
            return None

    def write(self, name: str, key: str, result: dict[str, Any]) -> dict[str, Any]:
        """Keep a result, whole or not at all, with the versions and the machine that it is from; returns it so.

        A result that was kept before stays what it is from.
        """
        record = {"made_with": environment(), **result}
        self.folder.mkdir(parents=True, exist_ok=True)
        unfinished = self.path(name, key).with_suffix(f".{os.getpid()}.tmp")
        unfinished.write_text(json.dumps(record, indent=1) + "\n")
        os.replace(unfinished, self.path(name, key))
        return record


def environment() -> dict[str, Any]:
    return {
        "torch": torch.__version__, "python": platform.python_version(), "machine": machine(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def machine() -> str:
    """The processor, as Linux calls it, else its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def fingerprint(*parts: Any) -> str:
    """A short hash of texts and plain values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:16]


def text_of(module: fx.GraphModule) -> str:
    """A graph with the sizes, strides and dtypes of its values: equal texts compile to equal programs."""
    return "\n".join(
        f"{node.name} {node.target} {node.args} {node.kwargs} {value_text(node)}" for node in module.graph.nodes
    )


def value_text(node: fx.Node) -> str:
    val = node.meta.get("val")
    return f"{val.dtype} {tuple(val.shape)} {val.stride()}" if isinstance(val, torch.Tensor) else str(val)


def sources(*files: Path) -> str:
    """The texts of source files, for keys of results that depend on them: the same wherever the files lie."""
    return "".join(sorted(file.read_text() for file in files))
