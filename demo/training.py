"""One configuration at a time: build the model, compile it, train it, measure one step of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from demo.text import VOCABULARY_SIZE
from recompile.api import explain
from recompile.measurement import Measurement, measure

LEARNING_RATE = 5e-4  # At 1e-3 rounding alone moves the losses of this model by 1e-4 and more within 30 steps.
SEED = 0
NUM_MEASUREMENTS = 3


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Small enough for two cores, and long enough that attention fills the memory: its scores are
    `batch_size * num_heads * sequence_length ** 2` numbers a layer, 16 times as many as the layer's input."""

    num_layers: int = 6
    width: int = 128
    num_heads: int = 8
    sequence_length: int = 256
    batch_size: int = 2


@dataclass(frozen=True, slots=True)
class Configuration:
    """How the model is run: `backend` None is eager mode; `memory_budget` is recompile's option."""

    name: str
    backend: str | None
    memory_budget: float | str | None = None


@dataclass(slots=True)
class Run:
    """A configuration's model and what came of it. The first loss is that of the untrained model."""

    configuration: Configuration
    model: torch.nn.Module
    forward: Callable[..., Any]
    compile_seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    measurement: Measurement | None = None
    step_seconds: list[float] = field(default_factory=list)

    @property
    def median_step_seconds(self) -> float | None:
        return statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def explanation(self) -> Any:
        """What recompile says of its plan; None for eager mode and plain Inductor."""
        return explain(self.forward) if self.configuration.backend == "recompile" else None


def build_model(size: ModelSize, dropout: float) -> GPT2LMHeadModel:
    """GPT-2 with random initial weights, the same at every call."""
    torch.manual_seed(SEED)
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=size.sequence_length,
        n_embd=size.width,
        n_layer=size.num_layers,
        n_head=size.num_heads,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
        attn_implementation="eager",
    )
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # transformers finds none for GPT-2 and logs that, which breaks the graph in two.
    return model.train()


def start_run(configuration: Configuration, size: ModelSize, dropout: float) -> Run:
    model = build_model(size, dropout)
    forward: Callable[..., Any] = model
    if configuration.backend == "recompile":
        options = {"memory_budget": configuration.memory_budget}
        forward = torch.compile(model, backend="recompile", options=options, fullgraph=True)
    elif configuration.backend is not None:
        forward = torch.compile(model, backend=configuration.backend, fullgraph=True)
    return Run(configuration, model, forward)


def forward_and_backward(run: Run, tokens: torch.Tensor) -> torch.Tensor:
    """The loss of one batch, with its gradients. Only the loss is kept of what the model returns: the logits beside it
    would stay in memory during backward."""
    loss = run.forward(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def train(run: Run, batches: torch.Tensor, on_step: Callable[[], None]) -> None:
    """One optimizer step for every batch; the first call of the forward compiles."""
    torch.manual_seed(SEED)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=LEARNING_RATE)
    for tokens in batches:
        started = time.perf_counter()
        run.losses.append(forward_and_backward(run, tokens).item())
        if len(run.losses) == 1:
            run.compile_seconds = time.perf_counter() - started
        optimizer.step()
        optimizer.zero_grad()
        on_step()


def measure_step(run: Run, tokens: torch.Tensor) -> None:
    """The memory of one forward and backward, after training and so after compilation; gradients are part of it.
    Of some measurements the one with the highest peak is kept, and of those the fastest."""
    measurements = []
    for _ in range(NUM_MEASUREMENTS):
        run.model.zero_grad()
        measurements.append(measure(forward_and_backward, run, tokens))
    run.model.zero_grad()
    run.measurement = max(measurements, key=lambda measurement: (measurement.peak_bytes, -measurement.seconds))


def time_steps(runs: list[Run], tokens: torch.Tensor, num_rounds: int, on_step: Callable[[], None]) -> None:
    """Seconds of one forward and backward, all configurations in turn, so that a busy machine slows down all alike."""
    for _ in range(num_rounds):
        for run in runs:
            started = time.perf_counter()
            forward_and_backward(run, tokens)
            run.step_seconds.append(time.perf_counter() - started)
            run.model.zero_grad()
            on_step()
