"""Starts the ranks of one spec (`run`), follows them, and records what they did.

Every run is recorded: a finished one, one that ran out of an emulated card, and a failed one with its report and steps.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole
from fsdplab.common.processes import resident_bytes
from fsdplab.common.temporary import temporary_folder
from fsdplab.records import RunRecord
from fsdplab.records.folder import MODEL_SOURCE, claim_folder, is_written, release_folder
from fsdplab.sessions.launch.failure_report import RanksFailed
from fsdplab.sessions.launch.launcher import RunningRanks, end_ranks, once_more
from fsdplab.sessions.launch.mailbox import Mailbox, Tail, read_heartbeats, read_lines
from fsdplab.sessions.launch.turns import STEP, TO_THE_END
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.spec.run_spec import spec_for
from fsdplab.sessions.stopped import stops_in_one_line
from fsdplab.sessions.summary import summarise
from fsdplab.sessions.trace_tables import tables_of
from fsdplab.sessions.watcher import Watcher
from fsdplab.workloads.own.sources import FILE, kind_of, name_of, source_of

WORKER = ("-m", "fsdplab.sessions.worker.training")
# told of every run of this process, whoever starts it: `follower(spec, step, total, loss)`, step 0 when its ranks start
followers: list[Callable[[RunSpec, int, int, float], None]] = []


@stops_in_one_line
def run(
    spec: RunSpec | Any,
    *,
    directory: str | Path | None = None,
    watcher: Watcher | None = None,
    program: Sequence[str] = WORKER,
    **settings: Any,
) -> RunRecord:
    """Run one spec on real ranks and return its record, written into `directory`.

    In place of a spec a model may be given (a `Workload`, a file, a preset's name) with `settings` of a RunSpec.

    Without a directory the record is in a temporary folder that is deleted when Python ends. One that holds an earlier
    record gets this one instead; one with other files and no record raises RecordError. `watcher` is told of each of
    rank 0's steps, and its `look` is called about twenty times a second. A rank that dies, raises, hangs or diverges,
    or a run longer than `spec.time_limit`, raises RanksFailed; its `.record` is the record of the failed run. `program`
    is what each rank executes, for workers other than the lab's own.
    """
    spec = spec_for(spec, settings)

    def attempt() -> RunRecord:
        started = StartedRun(spec, directory, watcher or Watcher(), program)
        try:
            return started.finish()
        finally:
            end_runs([started])

    return once_more(attempt)


class StartedRun:
    """One run from the start of its ranks to its record; `end_runs` ends its ranks.

    With `in_turns` its ranks wait before each timed step and before the profiled ones: `ready` returns True when all of
    them wait for the first time, `step` lets them take one step, `finish` lets them go on to their end.
    """

    def __init__(
        self,
        spec: RunSpec,
        directory: str | Path | None,
        watcher: Watcher,
        program: Sequence[str],
        in_turns: bool = False,
    ) -> None:
        self.spec = spec
        check_code(spec)
        self._source = None
        if spec.own_model:
            self._source = source_of(spec.model).text  # as it was when the run began
        self.folder = claim_folder(Path(directory) if directory is not None else temporary_folder("run"))
        self._took_turns = False
        try:
            self.mailbox = Mailbox(self.folder.absolute() / "ranks")  # ranks start in another folder
            self.mailbox.folder.mkdir(exist_ok=True)
            write_whole(self.mailbox.folder / "spec.json", json.dumps(reachable(spec)))
            self._ranks = RunningRanks.start(
                [*program, str(self.mailbox.folder)],
                self.mailbox,
                spec.processes,
                spec.time_limit,
                spec.start,
                _Follower(self.mailbox, spec, watcher).look,
                in_turns=in_turns,
            )
        except BaseException:  # a full disk, an interrupt: the folder is another run's then
            release_folder(self.folder)
            raise

    def ready(self) -> bool:
        """Watch the run until all its ranks wait for their turn; False where it has ended instead. RanksFailed as
        `run`.
        """
        return self._watch(to_the_end=False)

    def step(self) -> bool:
        """Let the run take one timed step, and watch it as `ready` does."""
        assert self._ranks.turns is not None  # a run that was started with in_turns
        self._took_turns = True
        self._ranks.turns.tell(STEP)
        return self._watch(to_the_end=False)

    def finish(self) -> RunRecord:
        """Let the run go on to its end, and return its saved record. RanksFailed as `run`."""
        if self._ranks.turns is not None:
            # ranks that wait for a turn take all remaining steps, the profiled ones too
            self._ranks.turns.tell(TO_THE_END)
        self._watch(to_the_end=True)
        end_ranks([self._ranks])
        record = self._saved(None)
        _tidy(self.mailbox)
        release_folder(self.folder)
        return record

    def resident_bytes(self) -> int:
        """Return the memory that its ranks hold now, as far as the system says."""
        heartbeats = read_heartbeats(self.mailbox, self.spec.processes).values()
        return sum(resident_bytes(heartbeat.pid) or 0 for heartbeat in heartbeats)

    def so_far(self) -> RunRecord:
        """Return what is known of a run that waits: memory, bytes sent, losses, prediction. Nothing is saved."""
        return self._record(None)

    def _watch(self, to_the_end: bool) -> bool:
        try:
            return self._ranks.watch(to_the_end)
        except RanksFailed as failed:
            end_ranks([self._ranks])
            failed.record = self._saved(failed)
            release_folder(self.folder)  # a run whose starter was lost is tried once more in the same folder
            raise

    def _saved(self, failed: RanksFailed | None) -> RunRecord:
        record = self._record(failed).save()
        if self._source is not None:
            write_whole(self.folder / MODEL_SOURCE, self._source)
        return record

    def _record(self, failed: RanksFailed | None) -> RunRecord:
        record = _record(self.folder, self.spec, self.mailbox, failed)
        record.summary = replace(record.summary, in_turns=self._took_turns)
        return record


def end_runs(runs: Sequence[StartedRun]) -> None:
    """End the ranks of several runs, in the time of one, and release their folders; no rank is left after it."""
    end_ranks([run._ranks for run in runs])
    for run in runs:
        release_folder(run.folder)


class _Follower:
    """Reports rank 0's steps as they appear in its file, of which each look reads only what is new."""

    def __init__(self, mailbox: Mailbox, spec: RunSpec, watcher: Watcher) -> None:
        self._steps = Tail(mailbox.of(0, "steps"))
        self._spec, self._watcher = spec, watcher
        self._reported = 0  # steps
        self._tell_followers(math.nan)

    def look(self) -> None:
        """Let the watcher look, then report the steps that have ended since the last look."""
        self._watcher.look()
        for line in self._steps.lines():
            self._reported += 1
            row = json.loads(line)
            self._watcher.stepped(self._spec, row)
            self._tell_followers(row["loss"])
            self._watcher.progressed(self._spec, self._reported, self._spec.total_steps, row["loss"])

    def _tell_followers(self, loss: float) -> None:
        for follower in followers:
            follower(self._spec, self._reported, self._spec.total_steps, loss)


def reachable(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as ranks read it, which start in another folder and see the GPUs only where they run on them."""
    settings = spec.as_dict()
    # `auto` is decided by the caller, so that all ranks run on the same
    settings["device"] = spec.device_type
    settings["text"] = _absolute(spec.text) if spec.text else None
    if spec.own_model:
        settings["model"] = _absolute(spec.model)
    return settings


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().resolve())


def _portable(spec: RunSpec) -> dict[str, Any]:
    """Return the spec as a record keeps it: text and model by their names only, since a path identifies a machine."""
    settings = spec.as_dict()
    settings["text"] = Path(spec.text).name if spec.text else None
    settings["model"] = name_of(spec.model)
    return settings


def check_code(spec: RunSpec) -> None:
    """Raise ModelError, before any rank starts, where a user's own file cannot be imported or lacks its functions."""
    if kind_of(spec.model) == FILE:
        from fsdplab.workloads.own.reading import workload_in  # which imports torch

        workload_in(Path(spec.model))


def _record(folder: Path, spec: RunSpec, mailbox: Mailbox, failed: RanksFailed | None) -> RunRecord:
    ranks = range(spec.processes)
    steps, ledger, memory_rows, life = [], [], [], []
    for rank in ranks:
        steps += read_lines(mailbox.of(rank, "steps"))
        ledger += read_lines(mailbox.of(rank, "ledger"))
    # a rank that failed has left no result, and the record has the rows of its steps
    results = [*mailbox.reports("result").values()]
    for result in results:
        life += result["life"]
    memory = mailbox.reports("memory")
    for peak in memory.values():
        memory_rows += peak["rows"]
    trace_tables = {}
    if spec.profile:
        # the number of the first step under the profiler: profiled steps are last
        first = spec.untimed + spec.steps
        trace_tables = tables_of(ranks, mailbox, ledger, folder, first, spec.as_dict())
    summary = summarise(spec, steps, ledger, memory, _samples(mailbox), results, trace_tables)
    provenance = _provenance(spec)
    if summary.steady.step_time_s:
        provenance["steady"] = "simulated"
    return RunRecord(
        folder,
        spec=_portable(spec),
        environment=_environment(spec, mailbox),
        status="failed" if failed else "finished",
        failure=failed.report.as_dict() if failed else None,
        summary=summary,
        provenance=provenance,
        tables={"steps": steps, "ledger": ledger, "memory": memory_rows, "life": life, **trace_tables},
    )


def _samples(mailbox: Mailbox) -> int | None:
    """Sum the samples of all ranks in their first step; None for a model that reads tokens."""
    by_rank = [workload["samples"] for workload in mailbox.reports("workload").values()]
    if not by_rank or None in by_rank:
        return None
    return sum(by_rank)


def _environment(spec: RunSpec, mailbox: Mailbox) -> dict[str, Any]:
    """Return the environment of rank 0; this process's if the ranks did not get that far."""
    environment = mailbox.reports("environment").get(0)
    if environment is None:
        from fsdplab.sessions.worker.environment import capture_environment  # which imports torch

        environment = capture_environment(spec.device_type)
    workload = mailbox.reports("workload").get(0)
    if workload:
        environment = environment | {"workload": workload}
    return environment


def _provenance(spec: RunSpec) -> dict[str, str]:
    """Say of each quantity of the record whether it was measured, emulated or simulated."""
    measured = ["losses", "step_time_s"]
    if spec.memory:
        measured.append("peak_memory_bytes")
    measured.append("ledger")
    others = {"formula_bytes_per_step": "simulated"}
    if spec.card is not None:
        others["card"] = "emulated"
    # CPU ranks have one memory: which of it is beside the card is bookkeeping
    if spec.offload != "none" and spec.device_type == "cpu":
        others["host_memory_beside_the_card"] = "emulated"
    if spec.linked and spec.engine != "twin":
        others |= {"link": "emulated", "exposed_s": "emulated"}
    elif spec.engine != "twin":
        measured.append("exposed_s")
    if spec.shares_a_gpu:  # the processes take turns on it
        others |= {"ranks_on_one_gpu": "emulated", "step_time_s": "emulated", "exposed_s": "emulated"}
    return {**dict.fromkeys(measured, "measured"), **others}


def _tidy(mailbox: Mailbox) -> None:
    """Keep only the ranks' output in the mailbox; the rest is in the record."""
    for path in mailbox.folder.iterdir():
        if not is_written(path.relative_to(mailbox.folder.parent)):
            continue  # nothing of a run's: it stays
        is_output = path.suffix in (".out", ".err") and path.stat().st_size
        if not is_output:
            path.unlink()
    if not any(mailbox.folder.iterdir()):
        mailbox.folder.rmdir()
