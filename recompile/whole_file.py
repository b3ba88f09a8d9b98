"""Writing a file that other processes may be reading."""

from __future__ import annotations

import os
import pathlib
import tempfile


def write_whole(path: pathlib.Path, text: str) -> None:
    """Write a text file, whole or not at all; its folder is made where there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(name, path)
