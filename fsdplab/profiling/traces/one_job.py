"""Which files are the traces of one job, and of which ranks.

An engineer gives a folder, or files whose `distributedInfo` is missing because an older profiler wrote them. Then the
names tell the ranks, or an option does. What is not one job (two runs mixed, a rank twice, a rank whose trace was cut
short) would give figures of nothing, so it is refused.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from fsdplab.common.rows import grouped
from fsdplab.common.words import plural
from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis
from fsdplab.profiling.traces.skew import clocks_explain

_ENDINGS = (".json", ".json.gz")
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_CLOCKS_NS = 1_000_000_000  # clocks of several machines differ by less
_SMALL = 1_000_000  # bytes of a file that is looked into before it is taken for a trace
_CUT_SHORT = 0.5  # part of the collectives of the other ranks below which a trace without step ranges was cut short


# ---- files


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, in the order of the numbers in their names; [] where it holds none. Small JSON files of
    another kind (settings, results) may lie beside them; a damaged trace is kept, so that reading it says so.
    """
    traces = []
    for path in folder.iterdir():
        if path.name.endswith(_ENDINGS) and path.is_file() and not _is_other_json(path):
            traces.append(path)
    return sorted(traces, key=_by_numbers)


def _by_numbers(path: Path) -> list[int | str]:
    """A key by which `rank10` comes behind `rank9`: text and numbers in turn."""
    key: list[int | str] = []
    for part in re.split(r"(\d+)", path.name):
        key.append(int(part) if part.isdecimal() else part)  # "²" is a digit, and no number
    return key


def _is_other_json(path: Path) -> bool:
    """Whether it is whole JSON, small and no trace: settings have no list of events."""
    if path.suffix != ".json" or not 0 < path.stat().st_size <= _SMALL:
        return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if isinstance(content, list):  # a trace's other form: nothing but its events
        return not any(isinstance(entry, dict) and "ph" in entry for entry in content)
    return isinstance(content, dict) and "traceEvents" not in content


def ranks_by_name(paths: Sequence[Path]) -> list[int | None]:
    """The rank in each file's name; None where the names do not tell.

    `rank3.json` is rank 3. Of names that differ in one number only, that number is the rank if they count from 0.

    >>> ranks_by_name([Path("run_7_0.json"), Path("run_7_1.json")])
    [0, 1]
    """
    # every name says it
    named = [_RANK.search(path.name) for path in paths]
    if all(named):
        return [int(match.group(1)) for match in named if match]

    # or they are alike but for one number: of run_7_0 and run_7_1 the second column of (7, 0) and (7, 1)
    unknown: list[int | None] = [None] * len(paths)
    patterns = {_NUMBER.sub("#", path.name) for path in paths}
    if len(paths) < 2 or len(patterns) > 1:
        return unknown
    numbers = [_NUMBER.findall(path.name) for path in paths]
    differing = [column for column in zip(*numbers) if len(set(column)) > 1]
    if len(differing) != 1:
        return unknown
    ranks = [int(number) for number in differing[0]]
    if sorted(ranks) != list(range(len(paths))):  # a time or a process number
        return unknown
    return list(ranks)


# ---- one job


def of_one_job(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """The analyses of one job, and sentences on what was chosen of the files: of the cycles of a profiler's schedule
    the last one, and the steps that all ranks have.

    Raises TraceError where the traces are not of one job: each rank once, the same job, the same time.
    """
    analyses, chosen = _of_last_cycle(analyses)
    _check_ranks(analyses)
    _check_sizes(analyses)
    _check_devices(analyses)
    _check_times(analyses)
    analyses, without = _of_common_steps(analyses)
    _check_whole(analyses)
    return analyses, [*chosen, *without]


def _of_last_cycle(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """Keep the last trace of each rank, where each process left one a cycle of its schedule (`repeat=2`)."""
    by_rank = grouped(analyses, lambda analysis: analysis.rank)
    traces_a_rank = {len(traces) for traces in by_rank.values()}
    if traces_a_rank == {1} or len(traces_a_rank) > 1:
        return list(analyses), []
    if not all(map(_are_cycles, by_rank.values())):  # then a rank is there twice, which is refused later
        return list(analyses), []
    last = [max(traces, key=_span) for traces in by_rank.values()]
    steps = _listed({step.step for step in last[0].steps})
    cycles = traces_a_rank.pop()
    sentence = f"each rank left {cycles} traces, one a cycle of its profiler's schedule: the last, steps {steps},"
    return last, [f"{sentence} is shown"]


def _are_cycles(analyses: Sequence[TraceAnalysis]) -> bool:
    """Whether these traces of one rank are of one process, one after the other."""
    if len({analysis.process for analysis in analyses}) != 1:
        return False
    spans = sorted(map(_span, analyses))
    return all(end <= next_start for (_, end), (next_start, _) in pairwise(spans))


def _span(analysis: TraceAnalysis) -> tuple[int, int]:
    """When the first step of a trace begins, and its last one ends, by its own clock."""
    # the first row of a timeline is the whole step
    first_row = analysis.steps[0].timeline[0]
    last_row = analysis.steps[-1].timeline[0]
    return first_row["start_ns"], last_row["end_ns"]


def _check_ranks(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError where two traces are of one rank."""
    seen: dict[int, Path] = {}
    for analysis in analyses:
        if analysis.rank in seen:
            raise TraceError(
                f"{seen[analysis.rank]} and {analysis.path} are both of rank {analysis.rank}; give the traces of one"
                " run, one a rank; where the files do not name their ranks, --ranks 0,1,... does, in the files' order."
            )
        seen[analysis.rank] = analysis.path


def _check_sizes(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError where traces are of jobs of several sizes, or of a rank that its job does not have."""
    with_size = [analysis for analysis in analyses if analysis.world_size is not None]
    for analysis in with_size:
        if analysis.world_size != with_size[0].world_size:
            first = f"{with_size[0].path} is of a job of {with_size[0].world_size} ranks"
            raise _mixed(f"{first}, {analysis.path} of one of {analysis.world_size}", "")
        if analysis.rank >= (analysis.world_size or 0):
            raise TraceError(
                f"{analysis.path} is of rank {analysis.rank} of {analysis.world_size}, which cannot be; expected a rank"
                f" below {analysis.world_size}: give its right number with --ranks."
            )


def _check_devices(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError where some traces are of GPUs and some of CPUs."""
    devices = ["a GPU" if analysis.device == "cuda" else "a CPU" for analysis in analyses]
    for analysis, device in zip(analyses, devices):
        if device != devices[0]:
            both = f"{analyses[0].path} is of {devices[0]}, {analysis.path} of {device}"
            raise _mixed(both, ", all profiled alike")


def _check_times(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError for traces that share no instant on one clock: they are of two runs (or of two parts of one)."""
    spans = [_span(analysis) for analysis in analyses]
    # the rank that begins last, beside the one that ends first
    latest = max(range(len(spans)), key=lambda index: spans[index][0])
    earliest = min(range(len(spans)), key=lambda index: spans[index][1])
    apart = spans[latest][0] - spans[earliest][1]
    longest = max(end - start for start, end in spans)
    # clocks may be wrong by more than that: then collectives that end together tell that it is one run
    if apart > max(_CLOCKS_NS, longest) and not clocks_explain(analyses):
        late = f"{analyses[latest].path} begins {apart / 1e9:.3g} s after {analyses[earliest].path} has ended"
        raise _mixed(f"{late}, so these ranks never met")


def _of_common_steps(analyses: Sequence[TraceAnalysis]) -> tuple[list[TraceAnalysis], list[str]]:
    """Keep the steps that all ranks have: a rank that ended early lacks some."""
    # ranks 0 to 2 with the steps 3 to 5 and rank 3 with 3 to 4: usual are 3 to 5, common 3 to 4
    steps: dict[int, set[int]] = {}
    for analysis in analyses:
        steps[analysis.rank] = {step.step for step in analysis.steps}
    [(usual, _)] = Counter(map(frozenset, steps.values())).most_common(1)
    common = set(usual).intersection(*steps.values())
    if not common:
        other = next(analysis for analysis in analyses if steps[analysis.rank] != usual)
        own = _listed(steps[other.rank])
        raise _mixed(f"{other.path} holds the steps {own}, another rank's trace {_listed(usual)}")
    if all(of_rank == common for of_rank in steps.values()):
        return list(analyses), []

    kept = []
    for analysis in analyses:
        with_common = tuple(step for step in analysis.steps if step.step in common)
        kept.append(replace(analysis, steps=with_common))
    fewest = min(steps, key=lambda rank: len(steps[rank]))
    both = f"rank {fewest}'s {_listed(steps[fewest])}, another's {_listed(usual)}"
    shown = f"the {plural(len(common), 'step')} that all of them hold, {_listed(common)}, are shown"
    return kept, [f"the ranks' traces hold different steps ({both}): {shown}"]


def _check_whole(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError for a trace that was cut short. Without step ranges only the number of collectives tells; stages of a
    pipeline send differently often.
    """
    if any(len(analysis.steps) > 1 for analysis in analyses):
        return
    counts = []
    for analysis in analyses:
        counts.append(sum(row["kind"] != "send_recv" for row in analysis.rows("collectives")))
    most = max(counts)
    for analysis, count in zip(analyses, counts):
        if count < _CUT_SHORT * most:
            raise TraceError(
                f"{analysis.path} shows {count} collectives, another rank's trace {most}: it was cut short, or"
                " is of another run; export it again."
            )


def _mixed(what: str, alike: str = ", taken at the same steps") -> TraceError:
    """The error for traces of two runs."""
    return TraceError(f"two runs are mixed: {what}; give the traces of one run{alike}.")


def _listed(steps: AbstractSet[int]) -> str:
    """Steps in words: `7`, or `7 to 9 (3)`."""
    ordered = sorted(steps)
    if len(ordered) == 1:
        return str(ordered[0])
    return f"{ordered[0]} to {ordered[-1]} ({len(ordered)})"
