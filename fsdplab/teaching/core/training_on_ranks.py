"""The half of lessons 08, 09 and 11 that runs on the ranks: drivers that call what the learner wrote, or train as they
chose.

A driver returns bytes, and seconds of the emulated link's clock; wall time is judged nowhere.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from fsdplab.engine import STRATEGIES, events
from fsdplab.profiling import MemoryRecorder, MemoryTimeline, TagLog
from fsdplab.sessions import RunSpec, SpecError
from fsdplab.sessions.engines import build
from fsdplab.sessions.fabric import Fabric
from fsdplab.workloads import ByteText

MEMORY_JOB = {"model": "gpt-20m", "batch_size": 2, "sequence_length": 64, "steps": 1, "device": "cpu"}
BLOCK_BYTES, ROOT_BYTES = 7_097_856, 1_182_720  # of gpt-20m in fp32: one block, and what no block holds
GATHERED_LIMIT = 2 * BLOCK_BYTES + ROOT_BYTES  # lesson 09: one copy less than with prefetch=2
PEAK_LIMIT = 206_000_000  # and no more in all than prefetch=2 holds
MEMORY_CHOICES = ("strategy", "prefetch", "units")

SHOOT_OUT_JOB = {
    "model": "gpt-20m",
    "batch_size": 2,
    "sequence_length": 64,
    "steps": 2,
    "link": "400MB/s",
    "device": "cpu",
}
CARD = 300_000_000  # bytes of lesson 11's emulated card
LINK_SECONDS = 0.225  # lesson 11: seconds a step on the link, as long as twice the parameters take
# part of a typical gather's passage that must pass under computing; of one that is issued when needed none does
HIDDEN_AT_LEAST = 0.2
SHOOT_OUT_CHOICES = ("strategy", "prefetch", "link_queues", "units")
LAST_STEPS = 3


def drive_account(
    account: Callable[..., Any], step: int, computing: Sequence[Any], communicating: Sequence[Any]
) -> Any:
    """The account with plain numbers where they are numbers of numpy or torch; a float that is whole counts as one."""
    got = account(step, list(computing), list(communicating))
    return {name: _plain(value) for name, value in got.items()} if isinstance(got, dict) else got


def _plain(value: Any) -> Any:
    number = value.item() if hasattr(value, "item") else value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def drive_holding(holding: Callable[..., Any], life: Sequence[dict[str, Any]], at: int) -> Any:
    """The units' names in order of the alphabet, whatever collection they came in; a unit named twice stays twice."""
    got = holding([dict(row) for row in life], at)
    is_many = isinstance(got, Iterable) and not isinstance(got, (str, bytes))
    return sorted(map(str, got)) if is_many else got


def drive_slim(slim: Callable[..., Any]) -> dict[str, Any]:
    """Two steps with the chosen settings: gathered bytes and all bytes at the measured peak,
    beyond what was asked for.
    """
    choices = slim()
    refused = complaint(choices, MEMORY_JOB, MEMORY_CHOICES)
    if refused:
        return {
            "choices": refused,
            "bytes over the limit of the whole peak": None,
            "gathered bytes too many": None,
            "gathers set out ahead": None,
        }
    spec = RunSpec(**{**MEMORY_JOB, **choices})
    peak = Training(spec).measured()
    held = ", ".join(
        f"{name.replace('_', ' ')} {nbytes / 1e6:.1f} MB" for name, nbytes in peak.peak.items() if nbytes > 1e5
    )
    print(f"{peak.peak_total / 1e6:.1f} MB: {held}")
    return {
        "choices": "",
        "bytes over the limit of the whole peak": max(0, peak.peak_total - PEAK_LIMIT),
        "gathered bytes too many": max(0, peak.peak["gathered_parameters"] - GATHERED_LIMIT),
        "gathers set out ahead": spec.prefetch > 0 and spec.units != "model",
    }


def drive_choose(choose: Callable[..., Any]) -> dict[str, Any]:
    """A few steps with the chosen settings behind the link: bytes beyond the card, time on the link, and whether
    gathers were hidden.
    """
    choices = choose()
    refused = complaint(choices, SHOOT_OUT_JOB, SHOOT_OUT_CHOICES)
    nothing = {"bytes over the card": None, "ms on the link too many": None, "gathers are hidden": None}
    if refused:
        return {"choices": refused, **nothing}
    training = Training(spec := RunSpec(**{**SHOOT_OUT_JOB, **choices}))
    # the others gather once, after the optimizer: no setting moves that
    gathers_units = STRATEGIES[spec.strategy].shard_parameters
    peak = training.measured()
    over, on_the_link, hidden = max(0, peak.peak_total - CARD), *training.clocked()
    print(
        f"peak {peak.peak_total / 1e6:.0f} MB, {1e3 * on_the_link:.0f} ms a step on the link, {hidden:.0%} of a typical"
        " gather hidden"
    )
    too_long = max(0, round(1e3 * (on_the_link - LINK_SECONDS)))
    return {
        "choices": "",
        "bytes over the card": over,
        "ms on the link too many": too_long,
        "gathers are hidden": hidden >= HIDDEN_AT_LEAST or not gathers_units,
    }


def complaint(choices: Any, job: dict[str, Any], names: Sequence[str]) -> str:
    """Why these choices cannot be run, or nothing."""
    if not isinstance(choices, dict):
        return f"expected a dict, got {type(choices).__name__}"
    foreign = [str(name) for name in choices if name not in names]
    if foreign:
        return f"{', '.join(foreign)} belongs to the job; you choose {', '.join(names)}"
    try:
        RunSpec(**{**job, **choices})
    except SpecError as error:
        return str(error)
    return ""


class Training:
    """One rank's training of a spec, behind its link: the memory of its second step, and the link's clock over further
    ones.
    """

    def __init__(self, spec: RunSpec) -> None:
        device, self.rank, self.ranks, self.spec = torch.device("cpu"), dist.get_rank(), dist.get_world_size(), spec
        heart = SimpleNamespace(enter=lambda *_: None)
        # Any: the part of a Place that a rig and a fabric read; nobody listens to this heart
        place: Any = SimpleNamespace(device=device, rank=self.rank, world_size=self.ranks, heart=heart)
        self._tags, self._text, self._done = TagLog(), ByteText.from_standard_library(), 0
        self._rig = build(spec, place)
        Fabric(spec, place).begin(self._rig.model)

    def _step(self, batch_size: int | None = None, sequence_length: int | None = None) -> list[events.Collective]:
        heard: list[events.Collective] = []
        quiet = events.subscribe(lambda event: heard.append(event) if isinstance(event, events.Collective) else None)
        shape = (batch_size or self.spec.batch_size, sequence_length or self.spec.sequence_length)
        batch = self._text.batch(self._done, self.rank, self.ranks, *shape)
        self._rig.train_step([[batch]])
        events.flush()
        quiet()
        self._done += 1
        return heard

    def measured(self) -> MemoryTimeline:
        """The memory of the second step, as a run's record has it.

        The first makes the optimizer's state and tells the engine the order of its units; a few tokens do that in a
        third of the time.
        """
        self._step(batch_size=1, sequence_length=8)
        with MemoryRecorder(
            model=self._rig.model,
            optimizer=self._rig.optimizer,
            engine="lab",
            device=torch.device("cpu"),
            tags=self._tags,
            ignore=[self._text.data],
        ) as recorder:
            self._step()
        self._tags.close()
        return recorder.timeline

    def clocked(self) -> tuple[float, float]:
        """(seconds a step on the link, hidden part of a typical gather's passage), the second agreed by all ranks.

        Typical is the median of all gathers of a few steps: on a busy machine some wait long for a rank that is not
        running.
        """
        steps = [self._step() for _ in range(LAST_STEPS)]
        on_the_link = statistics.median(map(passage_ns, steps)) / 1e9
        gathers = [hidden_part(each) for step in steps for each in step if each.kind == "all_gather"]
        typical = torch.tensor(statistics.median(gathers) if gathers else 1.0, dtype=torch.float64)
        dist.all_reduce(typical)
        return on_the_link, typical.item() / self.ranks


def passage_ns(collectives: Sequence[events.Collective]) -> int:
    """How long the link carried these: 5 and 4 ns are 9."""
    return sum(each.end_ns - each.start_ns for each in collectives)


def hidden_part(collective: events.Collective) -> float:
    """The part of its passage for which the host was not blocked: 10 ns of which it waited 4 are 0.6; waiting for a
    peer comes on top, so at least 0.
    """
    return max(0.0, 1 - (collective.waited_ns or 0) / passage_ns([collective]))
