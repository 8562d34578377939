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
        """Return the job with the fault in it. ValueError where `line` does not stand in the job exactly once."""
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
        """Return why the job did not come to its end, or ""."""
        if self.ended:
            return self.ended
        for rank in self.ranks:
            if rank.get("stopped"):
                return str(rank["stopped"])
        return ""

    def save(self, path: Path) -> None:
        """Write everything as compressed JSON."""
        path.write_bytes(gzip.compress(json.dumps(asdict(self)).encode(), mtime=0))

    @classmethod
    def load(cls, path: Path) -> Seen:
        """Read what `save` wrote."""
        return cls(**json.loads(gzip.decompress(path.read_bytes())))


@dataclass(frozen=True)
class Report:
    """One finding: the fault's name, a sentence with figures, and which part of the lab found it."""

    name: str
    says: str
    by: str


def reports(seen: Seen) -> list[Report]:
    """Return all that the rules find, the likeliest cause first; nothing for a sound job."""
    findings = []
    # in this order, since a cause hides those behind it: without equal calls there is no loss to compare
    for rule in (_unlike_calls, _not_finite, _seeds, _unwaited, _divisor, _masters, _held, _late):
        report = rule(seen)
        if report is not None:
            findings.append(report)
    return findings


def of_record(record: RunRecord) -> Report | None:
    """Return the report of a run that exceeds its emulated card."""
    card, peak = record.summary.card, record.summary.peak_memory_bytes
    if card is None or not card.exceeded:
        return None
    largest = sorted(peak.split.items(), key=lambda part: -part[1])[:2]
    most = " and ".join(f"{name.replace('_', ' ')} ({size(int(nbytes))})" for name, nbytes in largest)
    total, room = size(int(known(peak.total))), size(int(known(card.bytes)))
    says = f"The peak of {total} is over the card of {room}; most: {most}."
    return Report("out of memory", says, "the record of the run")


# ---- the calls


def place_of_difference(calls: Sequence[Sequence[Row]]) -> int | None:
    """Return the first place at which two ranks make calls that do not fit together; None where there is none."""
    # a rank that was ended has fewer calls, and what it lacks is no difference
    for place in range(min(map(len, calls))):
        different = {(of_rank[place]["kind"], of_rank[place]["nbytes"]) for of_rank in calls}
        if len(different) > 1:
            return place
    return None


def _unlike_calls(seen: Seen) -> Report | None:
    """Report calls that do not fit together, from a line that one rank alone reaches, or in another order."""
    place = place_of_difference(seen.calls)
    if place is None:
        return None
    at_place = [calls[place] for calls in seen.calls]
    listed = []
    for rank, call in enumerate(at_place):
        listed.append(f"rank {rank} calls {call['kind']} of {size(call['nbytes'])} (line {call['line']})")
    says = f"Call {place + 1} of the job, in step {at_place[0]['step']}: {'; '.join(listed)}."

    lines_of_rank = []
    for calls in seen.calls:
        lines_of_rank.append({call["line"] for call in calls})
    for rank, call in enumerate(at_place):
        line = call["line"]
        # a line from which no other rank ever called: a branch that this rank alone took
        others = lines_of_rank[:rank] + lines_of_rank[rank + 1 :]
        if not any(line in lines for lines in others):
            says = f"{says} Line {line} was reached by rank {rank} alone."
            return Report("diverging branch", says, "the order of calls")
    says = f"{says} Both come from the same lines, in another order."
    return Report("mismatched order", says, "the order of calls")


def _not_finite(seen: Seen) -> Report | None:
    """Report the first call to which a rank gives values that are not finite."""
    bad = []  # (the call's number, rank, the call)
    for rank, calls in enumerate(seen.calls):
        for call in calls:
            # an all-gather's input is parameters, which a sum of an earlier call has spoiled
            if call["kind"] != "all_gather" and not call["finite"]:
                bad.append((call["number"], rank, call))
    if not bad:
        return None
    # the first call, on the lowest rank
    number, rank, call = min(bad, key=lambda place: place[:2])
    others = " as on other ranks"
    if [place[0] for place in bad].count(number) == 1:
        others = "; the other ranks' are finite until this sum"
    says = (
        f"What rank {rank} gives to the {call['kind']} of {size(call['nbytes'])} in step {call['step']} is not"
        f" finite{others}. After it, nothing is finite on any rank."
    )
    return Report("NaN on one rank", says, "the values that are sent")


def _seeds(seen: Seen) -> Report | None:
    """Report the first unit with which the ranks began differently."""
    by_rank = [rank["began"] for rank in seen.ranks if rank]
    for unit, sums in enumerate(zip(*by_rank)):
        if len(set(sums)) > 1:
            listed = ", ".join(f"{value:.3f} on rank {rank}" for rank, value in enumerate(sums))
            says = f"The ranks began with different weights: those of unit {unit} sum to {listed}."
            return Report("unsynchronised seeds", says, "the weights before the first step")
    return None


def _unwaited(seen: Seen) -> Report | None:
    """Report calls whose results nobody waited for."""
    if seen.stopped:
        return None
    all_calls = [call for calls in seen.calls for call in calls]
    unwaited = [call for call in all_calls if "done" not in call]
    if not unwaited:
        return None
    kind, line = unwaited[0]["kind"], unwaited[0]["line"]
    of_kind = sum(call["kind"] == kind for call in all_calls)
    says = (
        f"{len(unwaited)} of {of_kind} {kind} calls were begun (line {line}) and never waited for: what"
        " is read in place of the result is whatever the buffer held."
    )
    return Report("missing wait", says, "the order of calls")


# ---- beside the twin


def _divisor(seen: Seen) -> Report | None:
    """Report first gradients that are one multiple of the twin's in every unit."""
    factors, remainders = [], []
    for rank in seen.ranks:
        for factor, remainder in rank.get("ratios", ()):
            factors.append(factor)
            remainders.append(remainder)
    # gradients that are no multiple of the twin's have another fault
    if not factors or max(remainders) > 1e-3:
        return None
    first = factors[0]
    # one factor in every unit and on every rank, such as 2 for a sum over 2 ranks
    is_one_factor = min(factors) > 0 and max(factors) < _MORE * min(factors)
    if not is_one_factor or abs(first - 1) < 1e-3:
        return None
    ranks = len(seen.ranks)
    why = "a wrong divisor"
    if abs(first - ranks) < 1e-3:
        why = f"a sum over {ranks} ranks that was not divided"
    says = f"The first gradients are {first:.4g} times the twin's in every unit: {why}."
    return Report("wrong divisor", says, "the twin")


def _masters(seen: Seen) -> Report | None:
    """Report an optimizer that updates parameters of 16 bits."""
    ended = [rank for rank in seen.ranks if rank]
    low = {rank["dtype"] for rank in ended} & set(_LOW)
    if not low:
        return None
    still = max(part for rank in ended for part in rank["still"])
    says = (
        f"The optimizer updates {low.pop()} parameters: in a step, up to {still:.0%} of those with a gradient did not"
        " move, because the update is less than half of their last bit."
    )
    return Report("bf16 masters", says, "what the optimizer holds")


def _held(seen: Seen) -> Report | None:
    """Report more unsharded parameters at once than the largest unit has."""
    for number, rank in enumerate(seen.ranks):
        if not rank:
            continue
        held, largest = rank["held"], max(rank["units"])
        if held > _MORE * largest:
            says = (
                f"Rank {number} holds {size(held)} of unsharded parameters at once, and its largest unit is"
                f" {size(largest)}: units are not resharded after their forward."
            )
            return Report("no reshard", says, "the bytes held")
    return None


def drift(seen: Seen) -> float | None:
    """Return the largest relative difference of a step's mean loss from the twin's.

    None where no step has losses of all ranks, infinite where one is not finite.
    """
    distances = []
    by_step = list(zip(*(rank.get("losses", ()) for rank in seen.ranks)))
    if not by_step:
        return None
    for losses, twin_loss in zip(by_step, seen.ranks[0]["twin_losses"]):
        mean = fmean(losses)
        # relative to the twin's loss; a NaN is infinitely far
        distances.append(abs(mean - twin_loss) / twin_loss if math.isfinite(mean) else math.inf)
    return max(distances)


# ---- times


def arrivals(seen: Seen) -> dict[tuple[int, str, str, str, int], dict[int, int]]:
    """Return when each rank issued each call, as `late_rank` takes it.

    A call is (step, its place in the step, "step", kind, 0); times are ns by rank.
    """
    issued: dict[tuple[int, str, str, str, int], dict[int, int]] = defaultdict(dict)
    for rank, calls in enumerate(seen.calls):
        by_step: dict[int, list[Row]] = defaultdict(list)
        for call in calls:
            by_step[call["step"]].append(call)
        for step in sorted(by_step):
            for place, call in enumerate(by_step[step]):
                key = (step, str(place), "step", call["kind"], 0)
                issued[key][rank] = call["issued"]
    return issued


def _late(seen: Seen) -> Report | None:
    """Report a rank that comes late beyond chance."""
    if seen.stopped:
        return None
    begins: dict[int, int] = {}  # step -> its first call on rank 0
    for call in seen.calls[0]:
        begins.setdefault(call["step"], call["issued"])
    times = sorted(begins.values())
    # the mean length of a step, from first call to first call
    step_ns = (times[-1] - times[0]) / (len(times) - 1)
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
    """Run the job on live ranks with a fault in it, watched. KeyError for a name that is none of `names()`."""
    with tempfile.TemporaryDirectory() as folder, doing(f"the job on {ranks} ranks: {name}"):
        job, ended = Path(folder) / "job.py", ""
        began = time.monotonic()
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
    """Return a rank's calls by number, from the file to which the watch wrote them.

    A call has a line when it is issued, and another when its result is there, which adds `done`.
    """
    if not path.exists():
        return []
    by_number: dict[int, Row] = {}
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):  # a rank that was ended may have written half of its last line
            row = json.loads(line)
            # the second line of a call adds `done` to the first
            by_number.setdefault(row["number"], {}).update(row)
    return list(by_number.values())
