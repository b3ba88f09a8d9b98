"""Real text as batches of byte tokens: no download, no tokeniser to train; the vocabulary is the 256 byte values."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

VOCABULARY_SIZE = 256
HELP_TOPICS = "pydoc_data.topics"


def load_text(path: Path | None) -> tuple[str, bytes]:
    """The text's name and bytes: of a file, or without one the English help topics that ship with CPython."""
    if path is not None:
        return path.name, path.read_bytes()
    topics = importlib.import_module(HELP_TOPICS).topics
    return HELP_TOPICS, "\n\n".join(topics[name].strip() for name in sorted(topics)).encode()


def cut_into_batches(text: bytes, num_batches: int, batch_size: int, sequence_length: int, seed: int) -> torch.Tensor:
    """Token windows drawn from all over the text, as an int64 tensor `[num_batches, batch_size, sequence_length]`.

    The text is cut into consecutive windows; they are dealt out in a shuffled order, and again in another order when
    all have been dealt. The same seed deals the same windows.
    """
    num_windows = len(text) // sequence_length
    if num_windows == 0:
        raise ValueError(
            f"the text has {len(text)} bytes, and one sequence takes {sequence_length}: take a longer text"
        )
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8)[: num_windows * sequence_length]
    windows = windows.view(num_windows, sequence_length).long()
    generator = torch.Generator().manual_seed(seed)
    num_needed = num_batches * batch_size
    num_rounds = -(-num_needed // num_windows)
    order = torch.cat([torch.randperm(num_windows, generator=generator) for _ in range(num_rounds)])[:num_needed]
    return windows[order].view(num_batches, batch_size, sequence_length)
