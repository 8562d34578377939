"""A job with a fault in it on live ranks, and the fault's name from what was seen, without knowing what was injected.

Each rule looks at one kind of evidence and gives a sentence, or nothing. The first sentence is the verdict: the rules
stand in the order in which causes hide one another (a job whose ranks make other calls has no loss to compare). Where
the lab has the check already, the rule calls it: the late rank is found by `profiling.late_rank`, the twin is that of
every comparison, the card is that of a run's record.
"""

from __future__ import annotations

import gzip
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fsdplab.common.sizes import size
from fsdplab.profiling.late_rank import late_rank
from fsdplab.records import RunRecord, known
from fsdplab.sessions import RanksFailed, call_on_ranks
from fsdplab.teaching.core.waiting import doing

# ---- the faults

JOB = Path(__file__).with_name("job.py")
Row = dict[str, Any]


@dataclass(frozen=True)
class Fault:
    """In the job, `injected` stands for `line`; both are empty for the job as it is."""

    name: str
    line: str = ""
    injected: str = ""

    def source(self) -> str:
        """The job with the fault in it. ValueError where `line` does not stand in the job exactly once."""
        text = JOB.read_text(encoding="utf-8")
        if not self.line:
            return text
        if text.count(self.line) != 1:
            raise ValueError(f"{self.name}: {self.line!r} stands {text.count(self.line)} times in {JOB.name}, not once")
        return text.replace(self.line, self.injected)


_FORWARD, _BEGINS = "x = unit.forward(x, unit.whole).detach()\n", "    inputs = []\n"
_REDUCE, _STEP = "reversed(units):\n        unit.reduce()", "    optimizer.step()\n"
_BRANCH = "    if loss.item() > 1.01:\n        dist.all_reduce(loss.detach())\n"
FAULTS = {
    name: Fault(name, line, injected)
    for name, line, injected in (
        ("none", "", ""),
        ("missing wait", "        self.work.wait()\n", ""),
        ("wrong divisor", "(self.sum / self.ranks)", "self.sum"),
        ("no reshard", f"{_FORWARD}        unit.reshard()\n", _FORWARD),
        ("one slow rank", _BEGINS, f"{_BEGINS}    __import__('time').sleep(0.06 * (rank == 1))\n"),
        ("mismatched order", f"for unit in {_REDUCE}", f"for unit in units if rank else {_REDUCE}"),
        ("diverging branch", _STEP, _BRANCH + _STEP),
        ("bf16 masters", ".clone().to(torch.float32)", ".clone().to(torch.bfloat16)"),
        ("NaN on one rank", _BEGINS, f"{_BEGINS}    x[0] /= 0.0 if (step, rank) == (3, 1) else 1.0\n"),
        ("unsynchronised seeds", "torch.manual_seed(0)", "torch.manual_seed(rank)"),
    )
}


# ---- what was seen, and its names

_LOW = ("bfloat16", "float16")
_MORE = 1.01  # by which a figure may exceed another that it should equal


@dataclass(frozen=True)
class Seen:
    """What was seen of a job: for each rank what `watch` returned ({} where it was ended), and its calls in order.

    `ended`: why the lab's launcher ended the ranks, or "". `seconds`: from the start of the ranks to their end.
    """

    ranks: list[Row]
    calls: list[list[Row]]
    ended: str = ""
    seconds: float = 0.0

    @property
    def stopped(self) -> str:
        """Why the job did not come to its end, or ""."""
        return self.ended or next((each["stopped"] for each in self.ranks if each.get("stopped")), "")

    def save(self, path: Path) -> None:
        """Write everything as compressed JSON."""
        path.write_bytes(gzip.compress(json.dumps(asdict(self)).encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Seen:
        """What `save` wrote."""
        return cls(**json.loads(gzip.decompress(path.read_bytes())))


@dataclass(frozen=True)
class Report:
    """One finding: the fault's name, a sentence with figures, and which part of the lab found it."""

    name: str
    says: str
    by: str


def reports(seen: Seen) -> list[Report]:
    """All that the rules find, the likeliest cause first; nothing for a sound job."""
    found = [rule(seen) for rule in (_unlike_calls, _not_finite, _seeds, _unwaited, _divisor, _masters, _held, _late)]
    return [each for each in found if each is not None]


def of_record(record: RunRecord) -> Report | None:
    """The report of a run that exceeds its emulated card."""
    card, peak = record.summary.card, record.summary.peak_memory_bytes
    if card is None or not card.exceeded:
        return None
    parts = sorted(peak.split.items(), key=lambda part: -part[1])[:2]
    most = " and ".join(f"{name.replace('_', ' ')} ({size(int(nbytes))})" for name, nbytes in parts)
    says = (
        f"The peak of {size(int(known(peak.total)))} is over the card of {size(int(known(card.bytes)))}; most: {most}."
    )
    return Report("out of memory", says, "the record of the run")


# ---- the calls


def place_of_difference(calls: Sequence[Sequence[Row]]) -> int | None:
    """The first place at which two ranks make calls that do not fit together; None where there is none."""
    for place in range(min(map(len, calls))):
        if len({(each[place]["kind"], each[place]["nbytes"]) for each in calls}) > 1:
            return place
    return None


def _unlike_calls(seen: Seen) -> Report | None:
    place = place_of_difference(seen.calls)
    if place is None:
        return None
    there = [each[place] for each in seen.calls]
    told = "; ".join(
        f"rank {rank} calls {call['kind']} of {size(call['nbytes'])} (line {call['line']})"
        for rank, call in enumerate(there)
    )
    says = f"Call {place + 1} of the job, in step {there[0]['step']}: {told}."
    for rank, call in enumerate(there):
        elsewhere = {each["line"] for other, own in enumerate(seen.calls) if other != rank for each in own}
        if call["line"] not in elsewhere:
            says += f" Line {call['line']} was reached by rank {rank} alone."
            return Report("diverging branch", says, "the order of calls")
    return Report("mismatched order", f"{says} Both come from the same lines, in another order.", "the order of calls")


def _not_finite(seen: Seen) -> Report | None:
    bad = [
        (call["number"], rank, call)
        for rank, own in enumerate(seen.calls)
        for call in own
        if call["kind"] != "all_gather" and not call["finite"]
    ]
    if not bad:
        return None
    number, rank, call = min(bad, key=lambda each: each[:2])
    alone = sum(each[0] == number for each in bad) == 1
    others = "; the other ranks' are finite until this sum" if alone else " as on other ranks"
    says = (
        f"What rank {rank} gives to the {call['kind']} of {size(call['nbytes'])} in step {call['step']} is not"
        f" finite{others}. After it, nothing is finite on any rank."
    )
    return Report("NaN on one rank", says, "the values that are sent")


def _seeds(seen: Seen) -> Report | None:
    began = [each["began"] for each in seen.ranks if each]
    unit = next((number for number, sums in enumerate(zip(*began)) if len(set(sums)) > 1), None)
    if unit is None:
        return None
    sums = ", ".join(f"{own[unit]:.3f} on rank {rank}" for rank, own in enumerate(began))
    says = f"The ranks began with different weights: those of unit {unit} sum to {sums}."
    return Report("unsynchronised seeds", says, "the weights before the first step")


def _unwaited(seen: Seen) -> Report | None:
    if seen.stopped:
        return None
    left = [call for own in seen.calls for call in own if "done" not in call]
    if not left:
        return None
    every = sum(call["kind"] == left[0]["kind"] for own in seen.calls for call in own)
    says = (
        f"{len(left)} of {every} {left[0]['kind']} calls were begun (line {left[0]['line']}) and never waited for: what"
        " is read in place of the result is whatever the buffer held."
    )
    return Report("missing wait", says, "the order of calls")


# ---- beside the twin


def _divisor(seen: Seen) -> Report | None:
    pairs = [pair for each in seen.ranks for pair in each.get("ratios", ())]
    if not pairs or max(off for _, off in pairs) > 1e-3:
        return None
    factors = [factor for factor, _ in pairs]
    if not (min(factors) > 0 and max(factors) < _MORE * min(factors)) or abs(factors[0] - 1) < 1e-3:
        return None
    ranks = len(seen.ranks)
    why = f"a sum over {ranks} ranks that was not divided" if abs(factors[0] - ranks) < 1e-3 else "a wrong divisor"
    says = f"The first gradients are {factors[0]:.4g} times the twin's in every unit: {why}."
    return Report("wrong divisor", says, "the twin")


def _masters(seen: Seen) -> Report | None:
    low = {each["dtype"] for each in seen.ranks if each} & set(_LOW)
    if not low:
        return None
    still = max(part for each in seen.ranks if each for part in each["still"])
    says = (
        f"The optimizer updates {low.pop()} parameters: in a step, up to {still:.0%} of those with a gradient did not"
        " move, because the update is less than half of their last bit."
    )
    return Report("bf16 masters", says, "what the optimizer holds")


def _held(seen: Seen) -> Report | None:
    for rank, each in enumerate(seen.ranks):
        if each and each["held"] > _MORE * max(each["units"]):
            says = (
                f"Rank {rank} holds {size(each['held'])} of unsharded parameters at once, and its largest unit is"
                f" {size(max(each['units']))}: units are not resharded after their forward."
            )
            return Report("no reshard", says, "the bytes held")
    return None


def drift(seen: Seen) -> float | None:
    """The largest relative difference of a step's mean loss from the twin's; None where no step has losses of all
    ranks, infinite where one is not finite.
    """
    steps = list(zip(*(each.get("losses", ()) for each in seen.ranks)))
    if not steps:
        return None
    pairs = zip(map(fmean, steps), seen.ranks[0]["twin_losses"])
    return max(abs(ours - twins) / twins if math.isfinite(ours) else math.inf for ours, twins in pairs)


# ---- times


def arrivals(seen: Seen) -> dict[tuple[int, str, str, str, int], dict[int, int]]:
    """When each rank issued each call, as `late_rank` takes it."""
    found: dict[tuple[int, str, str, str, int], dict[int, int]] = defaultdict(dict)
    for rank, own in enumerate(seen.calls):
        for step in sorted({call["step"] for call in own}):
            for place, call in enumerate(call for call in own if call["step"] == step):
                found[step, str(place), "step", call["kind"], 0][rank] = call["issued"]
    return found


def _late(seen: Seen) -> Report | None:
    if seen.stopped:
        return None
    begins = sorted({call["step"]: call["issued"] for call in reversed(seen.calls[0])}.values())
    step_ns = (begins[-1] - begins[0]) / (len(begins) - 1)
    late = late_rank(arrivals(seen), step_ns)
    if late is None:
        return None
    says = (
        f"Rank {late.rank} comes late beyond chance (p = {late.p_value:.2g}): its delays make a step"
        f" {late.a_step_ns / 1e6:.0f} of {step_ns / 1e6:.0f} ms longer."
    )
    return Report("one slow rank", says, "the late rank")


# ---- on live ranks

STEPS = 10


def inject(name: str = "none", ranks: int = 2, steps: int = STEPS) -> Seen:
    """The job on live ranks with a fault in it, watched. KeyError for a name that is none of `names()`."""
    with tempfile.TemporaryDirectory() as folder, doing(f"the job on {ranks} ranks: {name}"):
        job, began, ended = Path(folder) / "job.py", time.monotonic(), ""
        job.write_text(FAULTS[name].source(), encoding="utf-8")
        payload = {"source": str(job), "folder": folder, "steps": steps}
        values: Sequence[Row] = [{}] * ranks
        try:
            on_ranks = Path(__file__).with_name("on_ranks.py")
            values = call_on_ranks(on_ranks, "watch", world_size=ranks, payload=payload, time_limit=60.0)
        except RanksFailed as error:
            ended = error.report.message.splitlines()[0]
        calls = [_calls(Path(folder) / f"calls{rank}") for rank in range(ranks)]
        return Seen(list(values), calls, ended, round(time.monotonic() - began, 1))


def _calls(path: Path) -> list[Row]:
    """A rank's calls by number: a line when one is issued, and another when its result is there."""
    found: dict[int, Row] = {}
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for each in text.splitlines(keepends=True):
        if each.endswith("\n"):  # a rank that was ended may have written half of its last line
            row = json.loads(each)
            found.setdefault(row["number"], {}).update(row)
    return list(found.values())
