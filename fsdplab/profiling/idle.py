"""The finding on idle time: when neither computing nor communication ran for a large part of the steps, and why.

A trace's part "other" is split by cause (`profiling/traces/idle.py`). One cause is named, the largest that
something can be done about, with the seconds of a step that it costs. Where a GPU was idle for long and no such cause
is large, that is said too.
"""

from __future__ import annotations

from statistics import fmean

from fsdplab.profiling.step_summary import step_summary
from fsdplab.records import RunRecord

Cause = tuple[str, float, str, str, str]  # kind, seconds of a step, title, text, remedy
LARGE = 0.1  # part of a step below which idle time is usual
_WORTH_LISTING = 0.001  # part of a step below which a cause is not listed beside the largest

_WORDS = {  # column -> kind, why the device was idle, remedy
    "host_bound_ns": (
        "host_bound",
        "the host launched its next work too late",
        "Give the device more work a launch (larger batch, torch.compile, fused operators, CUDA graphs), and keep"
        " Python out of the step.",
    ),
    "data_loading_ns": (
        "data_loading",
        "the host was waiting for its DataLoader",
        "Load ahead: more workers (num_workers), a larger prefetch_factor, pin_memory=True; or prepare the data once"
        " before training.",
    ),
    "synchronisation_ns": (
        "synchronisation",
        "the host was blocked in a synchronising call, so nothing was queued",
        "Take .item(), .cpu() and print of tensors out of the step, or do them every hundredth step; copy with"
        " non_blocking=True.",
    ),
    "copies_ns": (
        "device_copies",
        "data was copied to or from the device, and nothing ran beside it",
        "Copy the next batch on a stream of its own while this one computes (pin_memory=True, non_blocking=True).",
    ),
    "kernel_gap_ns": (
        "kernel_gaps",
        "many short kernels followed each other, with a gap before each",
        "Fuse them: torch.compile, fused optimizers, CUDA graphs.",
    ),
}
_UNTOLD = (
    "idle",
    "the trace does not tell why: the next work's launch is not in it, or that work was queued and had to wait",
    "Profile with ProfilerActivity.CPU and ProfilerActivity.CUDA, so that launches are in the trace; where they are,"
    " look in Perfetto for what the queued work waited for: another stream, an event, a peer.",
)


def idle(record: RunRecord) -> Cause | None:
    """The largest known cause of idle time of the rank that represents the run; None where it is no tenth of a step, or
    the record says nothing of idle time.

    A step of 100 ms whose loader kept the device idle for 40: `("data_loading", 0.04, "the device is idle for 45 ms of
    100 ms a step: ...", ...)`.
    """
    worst = step_summary(record.table("breakdown"))
    rows = [row for row in record.table("idle") if worst is not None and row["rank"] == worst.rank]
    if worst is None or not rows:
        return None
    means = {name: fmean(row[name] for row in rows) for name in _WORDS}
    largest = max(means, key=lambda name: means[name])
    rest = worst.other_ns - sum(means.values())
    costs, (kind, why, remedy) = means[largest], _WORDS[largest]
    others = {_WORDS[name][0]: means[name] for name in means if name != largest} | {"other": rest}
    if costs < LARGE * worst.step_ns:
        if rest < LARGE * worst.step_ns or record.environment.get("device") != "cuda":
            return None
        costs, (kind, why, remedy) = rest, _UNTOLD
        others = {words[0]: means[name] for name, words in _WORDS.items()}
    title = f"nothing ran for {_ms(worst.other_ns)} of {_ms(worst.step_ns)} a step: for {_ms(costs)} {why}"
    told = {name: ns for name, ns in others.items() if ns >= _WORTH_LISTING * worst.step_ns}
    listed = [f"{name.replace('_', ' ')} {_ms(ns)}" for name, ns in told.items()]
    text = "Neither computing nor communication ran." + f" The rest of it: {', '.join(listed)}." * bool(listed)
    return kind, costs / 1e9, title, text, remedy


def _ms(ns: float) -> str:
    """As the other findings write it: never 1.01e+03 ms."""
    return f"{ns / 1e6:.3g} ms" if ns < 1e9 else f"{ns / 1e9:.3g} s"
