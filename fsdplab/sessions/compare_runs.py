"""Compares several specs, each on fresh ranks, so that no run inherits memory or caches of another.

The runs warm up one after the other, each with the machine to itself, and then wait side by side. Their timed steps
take turns, one step of one run at a time, so that a machine that becomes slower slows all runs alike. Profiled steps
come last, one run after the other. Where runs cannot wait side by side (too little memory, GPUs) they
run one after the other, and the first is run again last: how far its step time has drifted says what the others' are
worth.

A failed run is a result too: it is recorded, and the others go on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fsdplab.common.machine import free_memory
from fsdplab.common.names import SAVES_MOST
from fsdplab.common.sizes import size
from fsdplab.records import RunRecord, known
from fsdplab.records.summary import Link
from fsdplab.sessions.first_run import predict_from_the_first
from fsdplab.sessions.launch.failure_report import Failure, RanksFailed, StarterLost
from fsdplab.sessions.launch.stacks import PACKAGE
from fsdplab.sessions.launch.turns import fifos_in
from fsdplab.sessions.run_and_record import WORKER, StartedRun, end_runs, run
from fsdplab.sessions.spec import RunSpec, SpecError, WorkloadPart
from fsdplab.sessions.spec.pairs import least_bytes
from fsdplab.sessions.spec.rules import check_ranks_run_here, check_same
from fsdplab.sessions.spec.run_spec import specs_for
from fsdplab.sessions.stopped import stops_in_one_line
from fsdplab.sessions.watcher import Watcher

SAME = (*(each.name for each in fields(WorkloadPart)), "world_size")

_IN_TURNS = (
    "Each run warms up alone and then waits; their timed steps take turns, and a run's row is complete at the end."
)
_FREE_WHERE_UNKNOWN = 4_000_000_000  # bytes: three or four small runs


@stops_in_one_line
def compare(
    specs: Sequence[RunSpec] | Any,
    *,
    directory: str | Path | None = None,
    watcher: Watcher | None = None,
    program: Sequence[str] = WORKER,
    **settings: Any,
) -> list[RunRecord]:
    """Run several specs of the same model and data; their records, in the order of the specs.

    In place of specs a model may be given (a `Workload`, a file, a preset's name), with `settings` of a RunSpec. It is
    trained under five strategies (or `strategies`), and by the unsharded twin, whose record comes last.

    Records are written below `directory`, one folder each: `0-no_shard-lab`, `1-full_shard-lab`, ...
    `watcher` is told of runs that start, wait, step and end; without it, the reason of a failure is printed. `program`
    is what each rank executes. Specs of different work raise SpecError before anything runs; where the first two runs
    of a model of one's own fail alike before they have trained a step, that is raised as `run` does.
    """
    specs = specs_for(specs, settings)
    if not specs:
        raise SpecError("there is nothing to compare; give at least one RunSpec")
    check_ranks_run_here()
    check_same("runs to compare", specs, SAME)
    watcher = watcher or Watcher()
    specs = _on_one_network(specs, watcher)
    comparison = _Comparison(specs, Path(directory) if directory is not None else None, watcher, program)
    try:
        return comparison.run_all()
    finally:
        end_runs(comparison.started)


def folders_of(specs: Sequence[RunSpec], directory: Path) -> list[Path]:
    """Return where `compare` records each run: `directory/0-no_shard-lab`, ..."""
    return [directory / f"{number}-{spec.strategy}-{spec.engine}" for number, spec in enumerate(specs)]


class _Comparison:
    """The runs of one comparison, by their numbers: started, and recorded when they have ended."""

    def __init__(
        self, specs: Sequence[RunSpec], directory: Path | None, watcher: Watcher, program: Sequence[str]
    ) -> None:
        self._specs, self._directory, self._watcher, self._program = specs, directory, watcher, program
        self._records: dict[int, RunRecord] = {}
        self._errors: dict[int, str | None] = {}  # of runs that failed in or before their first step
        self._lost: set[int] = set()  # runs whose starter was lost, which are run again, once
        self.started: list[StartedRun] = []

    def run_all(self) -> list[RunRecord]:
        waiting, why_not = self._start_side_by_side()
        if not why_not:
            self._take_turns(waiting)
        # their profiled steps, one run after the other
        for number, started in waiting.items():
            self._finish(number, started)
        # not started so far, or their starter was lost: each runs alone from its beginning
        while missing := [number for number in range(len(self._specs)) if number not in self._records]:
            self._finish(missing[0], self._start(missing[0]))
        if why_not:
            self._run_the_first_again()
        records = [self._records[number] for number in range(len(self._specs))]
        # a first run of a model of one's own says how long the others' steps take
        predict_from_the_first(list(zip(self._specs, records)))
        return records

    def _start_side_by_side(self) -> tuple[dict[int, StartedRun], str]:
        """Start one run after the other; those that wait for their turn, and why further ones cannot, or ""."""
        waiting: dict[int, StartedRun] = {}
        memory, why_not = SpareMemory(), why_no_turns(self._specs, self._directory)
        for number, spec in enumerate(self._specs):
            why_not = why_not or memory.why_not(spec)
            if why_not:
                again = ", and the first is run again last" if _are_timed(self._specs) else ""
                self._note(f"The runs go one after the other{again}: {why_not}.")
                break
            run = self._start(number, in_turns=True)
            if self._waits(number, run, run.ready):
                if not waiting:
                    self._note(_IN_TURNS)
                waiting[number] = run
                memory.take(run)
                self._watcher.ready(run.so_far())
        return waiting, why_not

    def _take_turns(self, waiting: dict[int, StartedRun]) -> None:
        """Let the runs take their timed steps in turn; one that ends meanwhile leaves the others going on."""
        rota = Rota()
        # a run leaves the round when it has taken its timed steps, or ended
        while due := [number for number, run in waiting.items() if rota.turns[number] < run.spec.steps]:
            number = rota.next(due)
            if not self._waits(number, waiting[number], waiting[number].step):
                # it has ended, and `_waits` has recorded it
                del waiting[number]

    def _waits(self, number: int, run: StartedRun, act: Callable[[], bool]) -> bool:
        """Return whether a run waits for its turn after `act`; if it has ended instead it is recorded."""
        try:
            if act():
                return True
        except RanksFailed as failed:
            self._keep_failed(number, failed)
        else:
            self._finish(number, run)
        return False

    def _finish(self, number: int, run: StartedRun) -> None:
        try:
            self._keep(number, run.finish())
        except RanksFailed as failed:
            self._keep_failed(number, failed)

    def _keep_failed(self, number: int, failed: RanksFailed) -> None:
        # nothing of the run itself failed, so it gets a second try; a second loss is recorded as a failure
        if isinstance(failed, StarterLost) and number not in self._lost:
            self._lost.add(number)
            self._note(f"{failed.report.message} {self._specs[number].strategy} is run again, after the others.")
        else:
            self._keep(number, failed.record)
            self._end_if_all_would_fail(number, failed)

    def _end_if_all_would_fail(self, number: int, failed: RanksFailed) -> None:
        """Raise the failure of a model of one's own where the first two runs failed alike before their first step's
        end: all others would too.
        """
        self._errors[number] = failed.report.error if _is_the_models(failed.report) else None
        # with two runs none is left that raising could spare
        alike = self._errors.get(0) is not None and self._errors.get(0) == self._errors.get(1)
        if alike and self._specs[number].own_model and len(self._specs) > 2:
            raise failed

    def _keep(self, number: int, record: RunRecord | None) -> None:
        assert record is not None  # RanksFailed of a started run has one
        self._records[number] = record
        self._watcher.ended(record)

    def _start(self, number: int, in_turns: bool = False) -> StartedRun:
        spec, folder = self._specs[number], None
        if self._directory is not None:
            folder = folders_of(self._specs, self._directory)[number]
        self._watcher.started(spec)
        started = StartedRun(spec, folder, self._watcher, self._program, in_turns)
        self.started.append(started)
        return started

    def _run_the_first_again(self) -> None:
        """Time the first run that finished once more, and note it in its record."""
        finished = [number for number, record in sorted(self._records.items()) if record.status == "finished"]
        if not _are_timed([self._specs[number] for number in finished]):
            return
        # the twin's step time is compared with none, so its drift says nothing
        first = next(number for number in finished if self._specs[number].engine != "twin")
        # only its timed steps count
        spec = replace(self._specs[first], memory=False, card=None, profile=0)
        again = StartedRun(spec, None, _OnlyLooks(self._watcher), self._program)
        self.started.append(again)
        try:
            seconds = again.finish().summary.step_time_s.median
        except RanksFailed:
            return
        record = self._records[first]
        record.summary = replace(record.summary, again_s=seconds)
        record.save()

    def _note(self, sentence: str) -> None:
        if len(self._specs) > 1:
            self._watcher.note(sentence)


class _OnlyLooks(Watcher):
    """Lets another watcher look while a run goes on whose steps are not reported."""

    def __init__(self, watcher: Watcher) -> None:
        self.look = watcher.look  # type: ignore[method-assign]


def _is_the_models(report: Failure) -> bool:
    """Return whether a run failed in its first step, not in an engine, which would be its traceback's last frame."""
    # a failure of the model ends in its own file; where the last frame lies in this package, an engine has failed
    frames = [line for line in (report.traceback or "").splitlines() if line.lstrip().startswith("File ")]
    return not report.step and not (frames and f'"{PACKAGE}' in frames[-1])


def _are_timed(specs: Sequence[RunSpec]) -> bool:
    """Return whether the step times of several runs are compared; the twin is a reference for losses alone."""
    return sum(spec.engine != "twin" for spec in specs) > 1


class Rota:
    """Whose turn it is: each run once a round, never twice in succession, and not always after the same one.

    >>> rota = Rota()
    >>> [rota.next([0, 1, 2]) for _ in range(6)]
    [0, 1, 2, 0, 2, 1]
    """

    def __init__(self) -> None:
        self.turns = Counter[int]()
        self._followed = Counter[tuple[int | None, int]]()
        self._last: int | None = None

    def next(self, runs: Collection[int]) -> int:
        """Return the next of `runs`: of those with the fewest turns, the one that has followed the last one least
        often.
        """
        fewest = min(self.turns[run] for run in runs)
        due = [run for run in runs if self.turns[run] == fewest]
        others = [run for run in due if run != self._last] or due
        chosen = min(others, key=lambda run: self._followed[self._last, run])
        self.turns[chosen] += 1
        self._followed[self._last, chosen] += 1
        self._last = chosen
        return chosen


class SpareMemory:
    """Whether the machine's free memory allows another run beside those that wait.

    A run needs `least_bytes` of its spec, times the most by which a run that waits exceeds that. Twice as much must be
    free, for profiled steps take more, one run at a time.
    """

    def __init__(self) -> None:
        self._predicted = 0  # bytes of the runs that wait
        self._excess = 1.0

    def why_not(self, spec: RunSpec) -> str:
        """Return why a run of this spec cannot be started beside those that wait; "" where it can."""
        # a run of at least 300 MB, beside one that holds 1.5 times its least: 2 * 1.5 * 300 = 900 MB
        known, needed = free_memory(), int(2 * self._excess * least_bytes(spec))
        free = _FREE_WHERE_UNKNOWN - self._predicted if known is None else known
        return "" if free >= needed else f"{size(free)} of memory are free, and a further run may need {size(needed)}"

    def take(self, run: StartedRun) -> None:
        """This run waits, and holds what it holds."""
        least = least_bytes(run.spec)
        self._predicted += least
        # what a run really holds beyond its least, such as activations, is expected of further ones too
        self._excess = max(self._excess, run.resident_bytes() / least)


def why_no_turns(specs: Sequence[RunSpec], directory: Path | None) -> str:
    """Return why runs of these specs cannot take turns, whatever memory there is; "" where they can."""
    if len(specs) < 2:
        return "there is one run"
    if any(spec.device_type == "cuda" for spec in specs):
        return "they use a GPU"
    if directory is not None and not fifos_in(directory):
        return f"the file system of {directory} has no FIFOs"
    return ""


def _on_one_network(specs: Sequence[RunSpec], watcher: Watcher) -> list[RunSpec]:
    """Choose the wind tunnel's link once, by a short run of full sharding, so that all runs meet the same one."""
    open_ended = [spec for spec in specs if spec.emulate and not spec.link and spec.world_size > 1]
    if not open_ended:
        return list(specs)
    # the target's ratio is about full sharding, so the link is calibrated on that
    trial = replace(
        open_ended[0],
        steps=1,
        profile=0,
        memory=False,
        engine="lab",
        strategy=SAVES_MOST[0],
        card=None,
        shard_size=None,
        link_across=None,
        prefetch=1,
    )
    link = link_text(run(trial, watcher=_OnlyLooks(watcher)).summary.link)
    return [replace(spec, link=link) if spec in open_ended else spec for spec in specs]


def link_text(link: Link | None) -> str:
    """Return a record's link in the form of a spec: `358.736589MB/s,4.870254us`."""
    found = known(link)
    # so many digits that the parsed link is the same to a part in a million
    return f"{known(found.bytes_per_s) / 1e6:.6f}MB/s,{known(found.latency_s) * 1e6:.6f}us"
