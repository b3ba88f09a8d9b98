"""The summary of ``make peaks`` from its records: what holds for each model, and the runs behind it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.aims_text import table
from benchmarks.verdicts import (
    PREDICTION_SLACK,
    is_exceeded,
    is_no_worse,
    is_well_predicted,
    prediction_error,
    rises,
    yes,
)

MIB = 2**20
Run = dict[str, Any]


def summary(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: one line a model, then its runs."""
    parts = ["# Peaks\n\nMade by `make peaks`. MiB over what is allocated when forward starts; FLOP beyond those of "
             "the step that computes everything once."]  # fmt: skip
    parts.append(table(MODEL_NAMES, [model_row(record) for record in records]))
    for record in records:
        parts.append(f"## {record['model']}")
        if "error" in record:
            parts.append(record["error"])
            continue
        parts.append(table(RUN_NAMES, [run_row(record, run) for run in [*record["shares"], *record["bytes"]]]))
        parts.append(table(PEER_NAMES, [peer_row(record, peer) for peer in record["peers"]]))
    return "\n\n".join(parts) + "\n"


# What holds for one model


def is_monotone(record: dict[str, Any]) -> bool | None:
    """Whether the measured peak never rises as the share falls; None while runs are missing."""
    peaks = [run.get("measured_bytes") for run in record["shares"]]
    return None if None in peaks else not rises(peaks)


def exceeded(record: dict[str, Any]) -> list[Run]:
    """Runs whose measured peak lies above their budget in bytes, the allocator's slack allowed."""
    runs = [run for run in [*record["bytes"], *record["rivals"]] if "measured_bytes" in run]
    return [run for run in runs if is_exceeded(run["measured_bytes"], run["budget"])]


def is_refused(record: dict[str, Any]) -> bool:
    """Whether the budget below the floor was refused, and the refusal names the floor."""
    return "key" not in record["below"] and record["below"]["floor_bytes"] == record["floor_bytes"]


def distinct(record: dict[str, Any]) -> list[Run]:
    """Our measured plans, each once."""
    runs = [run for run in [*record["shares"], *record["bytes"], *record["rivals"]] if "measured_bytes" in run]
    return list({run["key"]: run for run in runs}.values())


def extra_flop(record: dict[str, Any], run: Run) -> int:
    """FLOP of a run's two graphs beyond those of the joint graph, which computes everything once."""
    return run["flop"] - record["shares"][0]["total_flop"]


def rival_of(record: dict[str, Any], peer: Run) -> Run | None:
    """Our answer to the peak that a peer was measured at as budget, a refusal too; None where it was not asked."""
    return next((run for run in record["rivals"] if run["budget"] == peer["measured_bytes"]), None)


def verdicts_on(record: dict[str, Any], peer: Run) -> dict[str, bool | None]:
    """``at_peak``: ours for its peak is there, has no higher peak and no more FLOP. ``lower``: some plan of ours has a
    lower peak at no more FLOP. ``fewer``: some plan of ours has fewer FLOP at no higher peak. None where it was not
    measured.
    """
    if "measured_bytes" not in peer:
        return {"at_peak": None, "lower": None, "fewer": None}
    theirs = peer["measured_bytes"], peer["flop"]
    ours = [(run["measured_bytes"], run["flop"]) for run in distinct(record)]
    rival = rival_of(record, peer)
    at_peak = None
    if rival is not None and "measured_bytes" in rival:
        at_peak = is_no_worse((rival["measured_bytes"], rival["flop"]), theirs)
    elif rival is not None and "key" not in rival:
        at_peak = False  # the budget was refused
    return {
        "at_peak": at_peak,
        "lower": any(peak < theirs[0] and flop <= theirs[1] for peak, flop in ours),
        "fewer": any(peak <= theirs[0] and flop < theirs[1] for peak, flop in ours),
    }


def of_all(verdicts: Iterable[bool | None]) -> str:
    """How many hold, of those that could be told."""
    known = [verdict for verdict in verdicts if verdict is not None]
    return f"{sum(known)} of {len(known)}"


# Tables

MODEL_NAMES = (
    "model", "plans", "monotone", "bytes kept", "refused below the floor", "floor reached", "predicted within 2 %",
    "most too low", "most too high", "as planned", "ours at a peer's peak: no higher, no more FLOP",
    "lower at no more FLOP", "fewer FLOP at no higher peak",
)  # fmt: skip


def model_row(record: dict[str, Any]) -> list[str]:
    if "error" in record:
        return [record["model"], record["error"], *["-"] * (len(MODEL_NAMES) - 2)]
    runs, over = distinct(record), exceeded(record)
    errors = [prediction_error(run["predicted_bytes"], run["measured_bytes"]) for run in runs]
    well = [is_well_predicted(run["predicted_bytes"], run["measured_bytes"]) for run in runs]
    verdicts = [verdicts_on(record, peer) for peer in record["peers"]]
    at_floor = record["bytes"][0].get("measured_bytes")
    return [
        record["model"], str(len(runs)), yes(is_monotone(record)), yes(not over), yes(is_refused(record)),
        yes(None if at_floor is None else not is_exceeded(at_floor, record["floor_bytes"])), of_all(well),
        f"{min(errors):+.1%}" if errors else "-", f"{max(errors):+.1%}" if errors else "-",
        yes(all(run["as_planned"] is not False for run in runs)),
        *(of_all(verdict[name] for verdict in verdicts) for name in ("at_peak", "lower", "fewer")),
    ]  # fmt: skip


RUN_NAMES = (
    "budget", "predicted MiB", "measured MiB", "error", "extra GFLOP", "predicted ms", "measured ms", "compile s",
    "plan",
)  # fmt: skip


def run_row(record: dict[str, Any], run: Run) -> list[str]:
    asked = f"{run['budget']:g}" if isinstance(run["budget"], float) else f"{mib(run['budget'])} MiB"
    if "measured_bytes" not in run:
        return [asked, mib(run["predicted_bytes"]) if "key" in run else "refused", run.get("error", "-"), *["-"] * 6]
    error = prediction_error(run["predicted_bytes"], run["measured_bytes"])
    marked = f"{error:+.1%}" if abs(error) <= PREDICTION_SLACK else f"**{error:+.1%}**"
    over = isinstance(run["budget"], int) and is_exceeded(run["measured_bytes"], run["budget"])
    return [
        asked, mib(run["predicted_bytes"]), mib(run["measured_bytes"]) + (" **over**" if over else ""), marked,
        gflop(extra_flop(record, run)), f"{run['predicted_seconds'] * 1e3:.1f}", f"{run['measured_seconds'] * 1e3:.0f}",
        f"{run['compile_seconds']:.0f}", run["key"][:6],
    ]  # fmt: skip


PEER_NAMES = (
    "peer", "measured MiB", "extra GFLOP", "ms", "ours for its peak: MiB", "extra GFLOP", "ms", "no worse",
    "some plan lower at no more FLOP", "some plan with fewer FLOP",
)  # fmt: skip


def peer_row(record: dict[str, Any], peer: Run) -> list[str]:
    name = peer["method"] if peer["budget"] is None else f"{peer['method']} {peer['budget']:g}"
    if "measured_bytes" not in peer:
        return [name, peer.get("error", "-"), *["-"] * 8]
    rival, found = rival_of(record, peer), verdicts_on(record, peer)
    ours = ["refused" if rival is not None and "key" not in rival else "-", "-", "-"]
    if rival is not None and "measured_bytes" in rival:
        extra = gflop(extra_flop(record, rival))
        ours = [mib(rival["measured_bytes"]), extra, f"{rival['measured_seconds'] * 1e3:.0f}"]
    return [
        name, mib(peer["measured_bytes"]), gflop(extra_flop(record, peer)), f"{peer['measured_seconds'] * 1e3:.0f}",
        *ours, yes(found["at_peak"]), yes(found["lower"]), yes(found["fewer"]),
    ]  # fmt: skip


def mib(num_bytes: float) -> str:
    return f"{num_bytes / MIB:.1f}"


def gflop(flop: float) -> str:
    return f"{flop / 1e9:.3f}"
