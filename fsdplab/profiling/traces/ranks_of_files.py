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
from pathlib import Path

from fsdplab.profiling.traces.chrome import TraceError
from fsdplab.profiling.traces.overlap import TraceAnalysis

_ENDINGS = (".json", ".json.gz")
_RANK = re.compile(r"(?:^|[^a-z])(?:rank|worker)[-_.=]?(\d{1,6})(?!\d)", re.IGNORECASE)
_NUMBER = re.compile(r"\d+")
_CLOCKS_NS = 1_000_000_000  # clocks of several machines differ by less
_SMALL = 1_000_000  # bytes of a file that is looked into before it is taken for a trace
_CUT_SHORT = 0.5  # part of the collectives of the other ranks below which a trace without step ranges was cut short


def traces_in(folder: Path) -> list[Path]:
    """The traces in a folder, in the order of the numbers in their names; [] where it holds none. Small JSON files of
    another kind (settings, results) may lie beside them; a damaged trace is kept, so that reading it says so.
    """
    found = [path for path in folder.iterdir() if path.name.endswith(_ENDINGS) and path.is_file()]
    found = [path for path in found if not _is_other_json(path)]
    parts = {path: re.split(r"(\d+)", path.name) for path in found}  # text and numbers in turn
    return sorted(found, key=lambda path: [int(part) if part.isdigit() else part for part in parts[path]])


def _is_other_json(path: Path) -> bool:
    """Whether it is whole JSON, small and no trace: settings have no list of events."""
    if path.suffix != ".json" or not 0 < path.stat().st_size <= _SMALL:
        return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    if isinstance(content, list):  # a trace's other form: nothing but its events
        return not any(isinstance(each, dict) and "ph" in each for each in content)
    return isinstance(content, dict) and "traceEvents" not in content


def ranks_by_name(paths: Sequence[Path]) -> list[int | None]:
    """The rank in each file's name; None where the names do not tell.

    `rank3.json` is rank 3. Of names that differ in one number only, that number is the rank if they count from 0.

    >>> ranks_by_name([Path("run_7_0.json"), Path("run_7_1.json")])
    [0, 1]
    """
    told = [_RANK.search(path.name) for path in paths]
    if all(told):
        return [int(match.group(1)) for match in told if match]
    numbers = [_NUMBER.findall(path.name) for path in paths]
    if len({_NUMBER.sub("#", path.name) for path in paths}) == 1 and len(paths) > 1:
        columns = [column for column in zip(*numbers) if len(set(column)) > 1]
        if len(columns) == 1 and sorted(map(int, columns[0])) == list(range(len(paths))):
            return [int(number) for number in columns[0]]
    return [None] * len(paths)


def check_one_job(analyses: Sequence[TraceAnalysis]) -> None:
    """TraceError where the traces are not of one job: each rank once, the same job, the same steps, the same time."""
    _check_ranks(analyses)
    _check_sizes(analyses)
    _check_times(analyses)
    _check_steps(analyses)
    _check_whole(analyses)


def _check_ranks(analyses: Sequence[TraceAnalysis]) -> None:
    seen: dict[int, Path] = {}
    for each in analyses:
        if each.rank in seen:
            raise TraceError(
                f"{seen[each.rank]} and {each.path} are both of rank {each.rank}; give the traces of one run, one a"
                " rank; where the files do not name their ranks, --ranks 0,1,... does, in the files' order."
            )
        seen[each.rank] = each.path


def _check_sizes(analyses: Sequence[TraceAnalysis]) -> None:
    told = [each for each in analyses if each.world_size is not None]
    for each in told:
        if each.world_size != told[0].world_size:
            job = f"a job of {told[0].world_size} ranks"
            raise _mixed(f"{told[0].path} is of {job}, {each.path} of one of {each.world_size}", "")
        if each.rank >= (each.world_size or 0):
            raise TraceError(
                f"{each.path} is of rank {each.rank} of {each.world_size}, which cannot be; expected a rank below"
                f" {each.world_size}: give its right number with --ranks."
            )
    devices = ["a GPU" if each.device == "cuda" else "a CPU" for each in analyses]
    for each, device in zip(analyses, devices):
        if device != devices[0]:
            both = f"{analyses[0].path} is of {devices[0]}, {each.path} of {device}"
            raise _mixed(both, ", all profiled alike")


def _check_times(analyses: Sequence[TraceAnalysis]) -> None:
    """Traces that share no instant, on one clock, are of two runs (or of two parts of one)."""
    ends = [(each.steps[0].timeline[0], each.steps[-1].timeline[0]) for each in analyses]
    spans = [(first["start_ns"], last["end_ns"]) for first, last in ends]
    latest = max(range(len(spans)), key=lambda index: spans[index][0])
    earliest = min(range(len(spans)), key=lambda index: spans[index][1])
    apart = spans[latest][0] - spans[earliest][1]
    if apart > max(_CLOCKS_NS, *(end - start for start, end in spans)):
        late = f"{analyses[latest].path} begins {apart / 1e9:.3g} s after {analyses[earliest].path} has ended"
        raise _mixed(f"{late}, so these ranks never met")


def _check_steps(analyses: Sequence[TraceAnalysis]) -> None:
    steps = {each.path: {step.step for step in each.steps} for each in analyses}
    usual = Counter(map(frozenset, steps.values())).most_common(1)[0][0]
    for path, own in steps.items():
        both = f"{path} holds the steps {_listed(own)}, another rank's trace {_listed(usual)}"
        if not own & usual:
            raise _mixed(both)
        if own != usual:
            raise TraceError(
                f"{both}: one of them was cut short, or was taken with another schedule; give traces of the same steps."
            )


def _mixed(what: str, alike: str = ", taken at the same steps") -> TraceError:
    return TraceError(f"two runs are mixed: {what}; give the traces of one run{alike}.")


def _listed(steps: set[int] | frozenset[int]) -> str:
    ordered = sorted(steps)
    return str(ordered[0]) if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]} ({len(ordered)})"


def _check_whole(analyses: Sequence[TraceAnalysis]) -> None:
    """Without step ranges only the number of collectives tells; stages of a pipeline send differently often."""
    if any(len(each.steps) > 1 for each in analyses):
        return
    counts = [sum(row["kind"] != "send_recv" for row in each.rows("collectives")) for each in analyses]
    for each, count in zip(analyses, counts):
        if count < _CUT_SHORT * max(counts):
            raise TraceError(
                f"{each.path} shows {count} collectives, another rank's trace {max(counts)}: it was cut short, or is of"
                " another run; export it again."
            )
