"""``recompile.watch``: predicted beside measured peaks of the first steps, and what to set when memory runs out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from recompile.api import explain
from recompile.measurement import target_device
from recompile.meter import NUM_STEPS, Meter, StepPeak, add_advice, table, warning_text
from recompile.report.explanation import Explanation


def watch(
    compiled: Callable[..., Any], *, steps: int = NUM_STEPS, device: str | torch.device | None = None,
    show: bool = True,
) -> Watch:  # fmt: skip
    """Watch the training steps of what ``torch.compile(..., backend="recompile")`` or ``recompile.remat`` returned.

        with recompile.watch(compiled) as compiled:
            for batch in loader:
                compiled(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

    A step goes from a call to the end of its backward. The first one, which compiles, is left out, then ``steps`` are
    measured (the same way as ``recompile.measure``; on CUDA this resets ``max_memory_allocated``, and on the CPU these
    steps are slower), then a table is printed unless ``show`` is off, and a RuntimeWarning says which memory_budget
    to try where the prediction was under. From then on calls pass through. An out-of-memory error that leaves the
    block, or a call, has a note that says what to set.

    Inside the block a module that is compiled is watched whoever calls it (a Trainer, say); of a function the calls of
    what ``as`` gives count. Without ``with`` it stands for what is compiled, ``compiled = recompile.watch(compiled)``.
    On leaving the block all is as before. ``device``: whose memory counts, by default as for ``recompile.measure``.
    Raises TypeError for what is not compiled by this backend, ValueError for a bad ``steps`` or ``device``.
    """
    explain(compiled)  # raises TypeError for what is not ours
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise ValueError(f"steps={steps!r} must be a whole number, 0 or more")
    return Watch(compiled, steps, target_device(device), show)


class Watch:
    """What ``watch`` returns: called in place of what is compiled, whose attributes it has; ``str()`` is the table."""

    def __init__(self, compiled: Callable[..., Any], num_steps: int, device: torch.device, show: bool):
        self._compiled = compiled
        self._show = show
        self._meter = Meter(self.explanation, device, num_steps, self._report)
        self._restore: Callable[[], None] | None = None

    @property
    def steps(self) -> tuple[StepPeak, ...]:
        """The steps measured so far: ``.predicted_bytes``, ``.measured_bytes``, ``.seconds``, ``.excess``."""
        self._meter.settle()
        return tuple(self._meter.steps)

    def explanation(self) -> Explanation:
        """What ``recompile.explain`` says about the compiled thing now."""
        restore = self._restore
        if restore is None:
            return explain(self._compiled)
        restore()
        try:
            return explain(self._compiled)
        finally:
            self._install()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._restore is not None:
            return self._compiled(*args, **kwargs)  # which comes back here
        return self._call(self._compiled, *args, **kwargs)

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return self._meter.call(function, args, kwargs)
        except BaseException as error:
            add_advice(error, self._meter)
            raise

    def __enter__(self) -> Watch:
        if self._restore is None:
            self._install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._meter.settle()
        if self._restore is not None:
            self._restore()
            self._restore = None
        if error is not None:
            add_advice(error, self._meter)
        elif not self._meter.is_done and self._meter.steps:
            self._report(self._meter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_compiled"], name)

    def __str__(self) -> str:
        return table(self.steps)

    def _report(self, meter: Meter) -> None:
        if self._show:
            print(table(meter.steps))
        text = warning_text(meter.steps, meter.explanation())
        if text:
            warnings.warn(text, RuntimeWarning, stacklevel=3)

    def _install(self) -> None:
        """Have calls of a module come here: of what ``nn.Module.compile`` made of it, else of its forward."""
        if not isinstance(self._compiled, torch.nn.Module):
            return
        is_in_place = getattr(self._compiled, "_compiled_call_impl", None) is not None
        name = "_compiled_call_impl" if is_in_place else "forward"
        before, was_own = getattr(self._compiled, name), name in self._compiled.__dict__

        def watched(*args: Any, **kwargs: Any) -> Any:
            return self._call(before, *args, **kwargs)

        def restore() -> None:
            self._compiled.__dict__.pop(name, None)
            if was_own:
                self._compiled.__dict__[name] = before

        self._compiled.__dict__[name] = watched
        self._restore = restore
