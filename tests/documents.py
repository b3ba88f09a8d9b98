"""Runs the Python blocks of a Markdown file one after the other, as a reader would in one session."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """The blocks of a file, each with the line on which it begins."""
    text = path.read_text(encoding="utf-8")
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in BLOCK.finditer(text)]


def run_blocks(path: Path) -> dict[str, object]:
    """Execute all blocks in one namespace, which is returned. Errors and stack traces show the document's own lines."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for line, block in python_blocks(path):
        exec(compile("\n" * (line - 1) + block, str(path), "exec"), namespace)
    return namespace
