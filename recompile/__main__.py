"""``python -m recompile``: plan a training step for a GPU from the command line. Nothing runs, no weight is allocated.

    python -m recompile plan package.module:factory --batch 8x2048 --hardware h100 --memory-budget 60GiB
    python -m recompile plan package.module:factory --batch 8x2048 --hardware h100 --html report.html
    python -m recompile frontier package.module:factory --batch 8x2048 --hardware h100 --plot frontier.png
    python -m recompile max-batch package.module:factory --batch ?x2048 --hardware h100
    python -m recompile graph package.module:factory --batch 8x2048 --hardware h100 --out gpt.json.gz
    python -m recompile hardware

The factory is called with the numbers of ``--batch``, under ``torch.device("meta")``, and returns the model and its
arguments: ``(model, batch)`` with the batch a tensor, a tuple or a dict of keyword arguments. One that takes no numbers
returns the model alone, and the batch is int64 tokens of the shape ``--batch``. Results go to stdout, progress to
stderr. Exit codes: 0 done, 2 bad arguments, 3 it cannot fit (the smallest peak is on stderr and in the JSON).
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

DOES_NOT_FIT = 3
UNKNOWN = "?"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. argparse exits with 2 itself."""
    parser = build_parser()
    asked = parser.parse_args(arguments)
    from recompile.errors import BudgetError, OptionError

    try:
        result, text = asked.run(asked)
    except BudgetError as error:
        print(error, file=sys.stderr)
        if getattr(asked, "json", False):
            print(json.dumps({"fits": False, "floor_bytes": error.floor_bytes, "error": str(error)}))
        return DOES_NOT_FIT
    except (OptionError, CommandError) as error:
        parser.error(str(error))
    print(json.dumps(result, indent=2) if asked.json else text)
    return 0


class CommandError(Exception):
    """What was asked for makes no sense; the text says why."""


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recompile", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(required=True, metavar="command")
    plan = command(commands, "plan", run_plan, "what one training step needs, and what is kept and recomputed")
    plan.add_argument("--memory-budget", type=budget, help="bytes (60GiB), a share (0.3), or nothing: the fastest plan")
    plan.add_argument("--planner", default="mincut", help="mincut, stock, save_all or full")
    plan.add_argument("--no-program", action="store_true", help="leave out Inductor's program for the GPU")
    plan.add_argument("--html", metavar="FILE", help="write a report for a browser as well, one file")
    plan.add_argument("--plot", metavar="FILE", help="write a picture of memory over the step (png, svg, pdf) as well")
    frontier = command(commands, "frontier", run_frontier, "the whole trade-off between peak and time")
    frontier.add_argument("--plot", metavar="FILE", help="write a picture (png, svg, pdf) as well")
    fit = command(commands, "max-batch", run_max_batch, "the largest size that fits; mark it ? in --batch")
    fit.add_argument("--memory", help="of the GPU, such as 80GB; by default what the hardware has")
    fit.add_argument("--planner", default="mincut", help="mincut, stock, save_all or full")
    graph = command(commands, "graph", run_graph, "save the joint graph, for JointGraph.load and planners of one's own")
    graph.add_argument("--out", required=True, metavar="FILE", help="where to: JSON, gzipped if it ends in .gz")
    hardware = commands.add_parser("hardware", help="the GPUs known by name, or this machine's own figures")
    hardware.add_argument("--calibrate", action="store_true", help="measure this machine's device and keep the figures")
    hardware.add_argument("--json", action="store_true", help="print JSON")
    hardware.set_defaults(run=run_hardware)
    return parser


def command(commands: Any, name: str, run: Callable, text: str) -> argparse.ArgumentParser:
    """A subcommand that traces a model."""
    parser = commands.add_parser(name, help=text)
    parser.add_argument("factory", help="package.module:function that makes the model, and its batch")
    parser.add_argument("--batch", default="", help="numbers for the factory, such as 8x2048")
    parser.add_argument("--hardware", required=True, help="a name (see the command hardware) or a JSON file")
    parser.add_argument("--optimizer", default="adamw", help="adamw, sgd, sgd-momentum, none, or bytes per byte")
    parser.add_argument("--autocast", choices=("bfloat16", "float16"), help="torch.autocast around the model's call")
    parser.add_argument("--loss-attribute", metavar="NAME", help="train on this attribute of the result, such as loss")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def budget(text: str) -> float | str:
    """A share as float, anything else as the backend takes it."""
    try:
        return float(text)
    except ValueError:
        return text


# Commands: each returns plain values for JSON, and a text


def run_plan(asked: argparse.Namespace) -> tuple[Any, Any]:
    import recompile

    model, batch = made(asked.factory, numbers_of(asked.batch))
    args, kwargs = arguments_of(batch)
    explanation = recompile.plan(
        model, *args, **kwargs, memory_budget=asked.memory_budget, planner=asked.planner,
        program=False if asked.no_program else None, **shared(asked),
    )  # fmt: skip
    if asked.html:
        explanation.to_html(asked.html)
        progress(f"wrote {asked.html}")
    if asked.plot:
        explanation.plot(asked.plot)
        progress(f"wrote {asked.plot}")
    return {"fits": True, **explanation.to_json()}, explanation


def run_frontier(asked: argparse.Namespace) -> tuple[Any, Any]:
    import recompile

    model, batch = made(asked.factory, numbers_of(asked.batch))
    args, kwargs = arguments_of(batch)
    settings = {key: value for key, value in shared(asked).items() if key != "optimizer"}
    frontier = recompile.frontier(model, *args, **kwargs, **settings)
    if asked.plot:
        frontier.plot(asked.plot)
        progress(f"wrote {asked.plot}")
    return frontier.to_json(), frontier


def run_max_batch(asked: argparse.Namespace) -> tuple[Any, Any]:
    import recompile

    words = asked.batch.split("x")
    if words.count(UNKNOWN) != 1:
        raise CommandError(f"--batch {asked.batch!r} must have one ? in the place of the size to find, such as ?x2048")

    def sizes(size: int) -> tuple[int, ...]:
        progress(f"trying {size}")
        return numbers_of("x".join(str(size) if word == UNKNOWN else word for word in words))

    model, _ = made(asked.factory, sizes(1))
    fit = recompile.max_batch(
        model, lambda size: made(asked.factory, sizes(size), model)[1], memory=asked.memory, planner=asked.planner,
        **shared(asked),
    )  # fmt: skip
    return {"fits": True, **fit.to_json()}, fit


def run_graph(asked: argparse.Namespace) -> tuple[Any, Any]:
    import recompile

    model, batch = made(asked.factory, numbers_of(asked.batch))
    args, kwargs = arguments_of(batch)
    settings = {key: value for key, value in shared(asked).items() if key != "optimizer"}
    joint = recompile.joint_graph(model, *args, **kwargs, **settings)
    joint.save(asked.out)
    result = {"path": asked.out, "num_nodes": len(joint.nodes)}
    return result, f"wrote {asked.out}: {len(joint.nodes)} nodes, priced for {joint.hardware.name}"


def run_hardware(asked: argparse.Namespace) -> tuple[Any, Any]:
    from recompile.hardware import calibrate, detect, named_hardware
    from recompile.report.text import hardware_table

    if asked.calibrate:
        measured = calibrate()
        return measured.to_json(), hardware_table([measured])
    known = [*named_hardware().values(), detect()]
    return [value.to_json() for value in known], hardware_table(known)


# What the arguments mean


def shared(asked: argparse.Namespace) -> dict[str, Any]:
    import torch

    name = asked.loss_attribute
    optimizer = budget(asked.optimizer)
    return {
        "hardware": asked.hardware,
        "optimizer": optimizer,
        "autocast": getattr(torch, asked.autocast) if asked.autocast else None,
        "loss": (lambda result: getattr(result, name)) if name else None,
    }


def numbers_of(text: str) -> tuple[int, ...]:
    """``8x2048`` as numbers."""
    try:
        return tuple(int(word) for word in text.split("x")) if text else ()
    except ValueError:
        raise CommandError(f"--batch {text!r} must be whole numbers with an x between them, such as 8x2048") from None


def arguments_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from recompile.fit import arguments_of

    return arguments_of(batch)


def made(factory: str, numbers: tuple[int, ...], model: Any = None) -> tuple[Any, Any]:
    """The model and its batch from ``package.module:function``, made on meta; the folder at hand is searched first.

    With ``model``, one that was made before, a factory that takes no numbers is not called again.
    """
    import torch

    module_name, colon, name = factory.partition(":")
    if not colon or not module_name or not name:
        raise CommandError(f"{factory!r} must be package.module:function")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name, None)
    except ModuleNotFoundError as error:
        raise CommandError(f"{factory!r}: {error}") from None
    finally:
        sys.path.pop(0)
    if not callable(function):
        raise CommandError(f"{factory!r}: module {module_name!r} has no function {name!r}")
    takes_numbers = bool(inspect.signature(function).parameters)
    progress(f"building {factory}")
    with torch.device("meta"):
        if takes_numbers:
            result = function(*numbers)
            if not (isinstance(result, tuple) and len(result) == 2):
                raise CommandError(f"{factory!r} must return (model, batch), not a {type(result).__name__}")
            return result
        if not numbers:
            raise CommandError("--batch is missing: the shape of the tokens, such as 8x2048")
        return model or function(), torch.empty(numbers, dtype=torch.int64)


def progress(text: str) -> None:
    print(f"recompile: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
