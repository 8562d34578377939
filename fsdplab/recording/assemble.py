"""Makes the record of a recorded job from what its ranks left: for the launcher at its end, and for whoever opens the
folder of a job whose launcher is gone.
"""

from __future__ import annotations

import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.common.files import is_locked
from fsdplab.common.processes import name_of
from fsdplab.common.words import plural
from fsdplab.profiling.traces.skew import sent_per_step
from fsdplab.recording.replicas import compared
from fsdplab.recording.settings import COLUMNS, FILE, Settings
from fsdplab.recording.untrained import untrained_everywhere
from fsdplab.records import RecordError, RunRecord, Summary
from fsdplab.records.folder import is_written
from fsdplab.records.summary import Comm
from fsdplab.sessions.launch.mailbox import Mailbox, read_lines
from fsdplab.sessions.summary import communication, mean_losses, measured, profile_of
from fsdplab.sessions.trace_tables import tables_of

_NAMED = 8  # of the ranks that are missing
NOTHING = "no rank took an optimizer step: nothing was recorded"
Row = dict[str, Any]


class NothingRecorded(UserError, RuntimeError):
    """A job of which nothing was recorded."""


def open_record(folder: str | Path) -> RunRecord:
    """Open the record in a folder; it is made first where ranks have left the parts of one.

    RecordError as `RunRecord.load`, and while ranks still record; NothingRecorded where no rank has taken a step.
    """
    place = Path(folder)
    if not has_parts(place):
        return RunRecord.load(place)
    busy = _recording(place)
    if busy:
        raise RecordError(f"{plural(len(busy), 'rank')} of the job still record into {place}; open it when they have")
    return assemble(place)


def wait_for_ranks(folder: Path, within_s: float = 60.0) -> None:
    """Wait until no rank records into `folder` any more: those of other nodes may end after this node's."""
    deadline = time.monotonic() + within_s
    while _recording(folder) and time.monotonic() < deadline:
        time.sleep(0.1)


def _recording(folder: Path) -> list[int]:
    """Return the ranks that still record into `folder`."""
    files = sorted((folder / "ranks").glob("rank*.steps"))
    return [int(path.name[4:-6]) for path in files if is_locked(path)]


def has_parts(folder: Path) -> bool:
    """Return whether ranks have left something in `folder` of which no record has been made yet."""
    return not (folder / "run.json").exists() and Settings.in_file(folder / "ranks" / FILE) is not None


def assemble(folder: Path, exit_code: int | None = None, asked_by: int | None = None) -> RunRecord:
    """Make the record of what ranks left in `folder`, and save it; NothingRecorded where no rank took a step.

    `exit_code`: the job's, None where it is not known; `asked_by`: the signal by which it was asked to end. A job that
    ended badly after its measured steps is finished.
    """
    mailbox = Mailbox(folder / "ranks")
    settings = Settings.read((mailbox.folder / FILE).read_text())
    abouts = mailbox.reports("about")
    if not abouts:
        raise NothingRecorded(NOTHING if asked_by is None else _interrupted_early(asked_by, settings))
    # the rows of steps; what a rank did in them besides training becomes rows of another table
    steps = _steps(mailbox, abouts)
    activities = _activities(steps)
    _leave_out_evaluations(steps, activities)
    memory, results = mailbox.reports("memory"), mailbox.reports("result")
    tables = tables_of(sorted(results), mailbox, [], folder, settings.first)
    # what no rank has said: a job that ended before its model was looked at
    spec = {"engine": "plain", "strategy": "no_shard", **_any(mailbox.reports("subject"))}
    spec |= {"world_size": _any(abouts)["world_size"], "job": settings.job}
    environment = _any(mailbox.reports("environment")) or {"device": _any(abouts)["device"]}
    # with results the measured steps are whole, whatever came after
    failed = not results and exit_code not in (None, 0)
    summary = _summary(settings, spec, results, steps, memory, tables)
    notes = [*_missing(abouts), *_of_ranks(mailbox, abouts), *_unseen(settings, summary, spec, steps, tables)]
    ended = _how_it_ended(exit_code, asked_by)
    if ended:
        notes.append(ended)
    memory_rows, life = [], []
    for peak in memory.values():
        memory_rows += peak["rows"]
    for result in results.values():
        life += result["life"]
    record = RunRecord(
        folder,
        spec=spec,
        environment={**environment, "observed": _observed(results)},
        status="failed" if failed else "finished",
        failure={"message": ended} if failed else None,
        summary=replace(summary, notes=tuple(notes)),
        provenance=dict.fromkeys(("losses", "step_time_s", "peak_memory_bytes", "exposed_s"), "measured"),
        tables={
            "steps": steps,
            "memory": memory_rows,
            "life": life,
            **tables,
            "activities": [*activities, *tables["activities"]],
        },
    ).save()
    _tidy(mailbox)
    return record


def _how_it_ended(exit_code: int | None, asked_by: int | None) -> str:
    """Say how a job ended that did not end well; "" for one that did."""
    if not exit_code:
        return ""
    if asked_by is not None:
        return f"the job was interrupted by {_asked(asked_by)}, and ended with exit code {exit_code}"
    return f"the job ended with exit code {exit_code}"


def _interrupted_early(asked_by: int, settings: Settings) -> str:
    """Say that a job was interrupted before there was anything to record, and what to do."""
    return (
        f"the job {settings.job} was interrupted by {_asked(asked_by)} before it had finished its first optimizer step,"
        f" so nothing was recorded; run it again and leave it until step {settings.end - 1} is done, or run it without"
        " `fsdplab record` to see where it was"
    )


def _asked(number: int) -> str:
    """Name the signal that asks a job to end, as its user would."""
    return "Ctrl-C" if number == signal.SIGINT else name_of(number)


def _steps(mailbox: Mailbox, ranks: Iterable[int]) -> list[Row]:
    """Read the rows of all steps, in the order of `ranks`."""
    by_step: dict[tuple[int, int], Row] = {}
    for rank in ranks:
        for line in read_lines(mailbox.of(rank, "steps")):
            row: Row = {"rank": rank, **dict(zip(COLUMNS, line)), "core_wait_s": None}
            # the later one where there are two: the first step's end came later than it seemed
            by_step[rank, row["step"]] = row
    return [*by_step.values()]


def _activities(steps: Sequence[Row]) -> list[Row]:
    """Take what ranks did besides training out of the rows of their steps: a row a rank, step and name."""
    rows = []
    for step in steps:
        activities = step.pop("activities", None) or {}
        for name, (count, took_ns, nbytes) in activities.items():
            where = {"rank": step["rank"], "step": step["step"], "name": name}
            rows.append({**where, "count": count, "took_ns": took_ns, "nbytes": nbytes})
    return rows


def _leave_out_evaluations(steps: Sequence[Row], activities: Sequence[Row]) -> None:
    """Do not time a step that holds an evaluation, unless most do: then their times are those without it."""
    evaluated = {(row["rank"], row["step"]) for row in activities if row["name"] == "evaluation"}
    # most steps hold one: without them hardly a step would be timed
    if 2 * len(evaluated) > len(steps):
        return
    for row in steps:
        if (row["rank"], row["step"]) in evaluated:
            row["step_time_s"] = row["loading_s"] = None


def _observed(results: Mapping[int, Row]) -> Row:
    """Return how the job is set up, as its first rank says, and for how long the ranks lacked a core in the profiled
    steps.
    """
    mean_waits = {}
    for rank, result in results.items():
        waits = [wait for wait in result["core_wait_s"] if wait is not None]
        if waits:
            mean_waits[str(rank)] = statistics.fmean(waits)
    observed: Row = _any(results).get("observed", {})
    return observed | {
        "cores": _cores_of_a_node(results),
        "core_wait_s": mean_waits,
        **_batches(results),
        **_interpreter(results),
        **compared(result["copies"] for result in results.values()),
        **untrained_everywhere([result["untrained"] for result in results.values()]),
    }


def _batches(results: Mapping[int, Row]) -> Row:
    """Count the profiled steps in which all of these ranks had the same batch, and how many batches these were."""
    by_step: dict[str, list[int]] = defaultdict(list)
    for result in results.values():
        for step, checksum in result["batches"].items():
            by_step[step].append(checksum)
    of_all = [set(checksums) for checksums in by_step.values() if len(checksums) == len(results)]
    same = [min(checksums) for checksums in of_all if len(checksums) == 1]
    return {
        "ranks_with_batches": len(results),
        "steps_with_batches": len(of_all),
        "steps_with_equal_batches": len(same),
        "equal_batches": len(set(same)),
    }


def _interpreter(results: Mapping[int, Row]) -> Row:
    """Return the rank whose loop waits longest for Python's interpreter, for how long it does in three of four steps,
    and the thread beside it that runs longest.
    """
    longest: Row = {}
    for rank, result in results.items():
        waits, busiest = sorted(result["interpreter"]["waits_s"]), result["interpreter"]["busiest"]
        if not waits or not busiest:
            continue
        wait_s = waits[len(waits) // 4]
        if wait_s > longest.get("interpreter_wait_s", 0.0):
            name, thread_s = busiest[0]
            longest = {"interpreter_wait_s": wait_s, "thread": name, "thread_s": thread_s, "thread_rank": rank}
    return longest


def _cores_of_a_node(results: Mapping[int, Row]) -> int:
    """Count the cores that the ranks of the first node may use together: each may be bound to some of its own."""
    numbers: set[int] = set()
    first = min(results, default=0)
    for rank, result in results.items():
        observed = result.get("observed", {})
        ranks = observed.get("ranks_of_a_node") or 1
        if rank // ranks == first // ranks:
            numbers.update(observed.get("core_numbers", ()))
    return len(numbers)


def _summary(
    settings: Settings,
    spec: Row,
    results: Mapping[int, Row],
    steps: list[Row],
    memory: Mapping[int, Row],
    tables: dict[str, list[Row]],
) -> Summary:
    """Summarise the job. Times are those of the steps in which nothing else was measured, with their loading."""
    # from the step whose memory was measured to the end of the profiled ones, nothing is timed
    first = min((peak["rows"][0]["step"] for peak in memory.values()), default=settings.first)
    undisturbed = [row for row in steps if not first <= row["step"] < settings.end]
    timed = measured([_with_loading(row) for row in undisturbed], memory)
    losses: tuple[float | None, ...] = ()
    if _tells_loss(steps):
        losses = mean_losses(steps)
    profiled_steps = settings.end - settings.first if results else 0
    profiled_s = [result["profiled_s"] for result in results.values()]
    shares = [result["cpu_share"] for result in results.values() if result["cpu_share"] is not None]
    return replace(
        timed,
        losses=losses,
        tokens_per_s=_tokens_per_s(steps, timed),
        cpu_share=min(shares, default=None),
        profile=profile_of(profiled_steps, profiled_s, timed, tables),
        comm=communication(tables, spec["world_size"], _sent(results), None),
    )


def _with_loading(row: Row) -> Row:
    """Return a row of the table `steps` whose time is that of the whole step."""
    training_s = row["step_time_s"]
    if training_s is None:
        return row
    # 180 ms of training after 20 ms of loading: a step of 200 ms
    return row | {"step_time_s": training_s + (row["loading_s"] or 0.0)}


def _sent(results: Mapping[int, Row]) -> Comm | None:
    """Return what the rank that sends most sends in a step; None of engines that do not say so themselves."""
    by_rank = [result["sent"] for result in results.values() if result.get("sent")]
    if not by_rank:
        return None
    # [(96, 3), (120, 3)] -> 120, 3
    nbytes, collectives = map(max, zip(*by_rank))
    return Comm(nbytes, collectives)


def _tells_loss(steps: Sequence[Row]) -> bool:
    return any(row["loss"] is not None for row in steps)


def _tokens_per_s(steps: Sequence[Row], timed: Summary) -> float | None:
    """Return the tokens of a step of all ranks over the median step; None where the job did not tell them."""
    by_step: dict[int, int] = defaultdict(int)
    for row in steps:
        by_step[row["step"]] += row["tokens"] or 0
    # of all ranks in a step; the median, as the last step may be cut off
    tokens = statistics.median(by_step.values())
    step_s = timed.step_time_s.median
    if not tokens or not step_s:
        return None
    return tokens / step_s


# ---- what could not be seen


def _missing(abouts: Mapping[int, Row]) -> Iterator[str]:
    """Name the ranks of which nothing is here: those of another node, whose folder is another one."""
    ranks = _any(abouts)["world_size"]
    missing = [rank for rank in range(ranks) if rank not in abouts]
    if not missing:
        return
    noun = "rank" if len(missing) == 1 else "ranks"
    listed = ", ".join(map(str, missing[:_NAMED]))
    if len(missing) > _NAMED:
        listed += " and others"
    yield (
        f"{noun} {listed} of {ranks} left nothing in this folder: give their"
        " nodes the environment of `fsdplab record --print-env`, and a folder that all nodes see, or copy what they"
        " left into this one before the record is made"
    )


def _of_ranks(mailbox: Mailbox, abouts: Mapping[int, Row]) -> Iterator[str]:
    """Yield the sentences that ranks have noted, each with those that noted it."""
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in abouts:
        for row in read_lines(mailbox.of(rank, "notes")):
            ranks_of[row["words"]].append(rank)
    for sentence, ranks in ranks_of.items():
        whose = f"rank {', '.join(map(str, ranks))}"
        if len(ranks) == len(abouts) > 1:
            whose = "every rank"
        yield f"{whose}: {sentence}"


def _unseen(
    settings: Settings, summary: Summary, spec: Row, steps: Sequence[Row], tables: Mapping[str, Sequence[Row]]
) -> Iterator[str]:
    """Say what this record lacks, and why."""
    taken = 1 + max((row["step"] for row in steps), default=-1)
    if taken < settings.end:
        yield (
            f"the job took {plural(taken, 'step')}, and its steps {settings.first} to {settings.end - 1} were to be"
            f" profiled: {_earlier(taken)}"
        )
    collectives = tables.get("collectives", ())
    unsaid = {row["kind"] for row in collectives if row["logical_bytes"] is None}
    if unsaid:
        sent = summary.comm.bytes_per_step
        counted, _ = sent_per_step(collectives, spec["world_size"])
        kinds = ", ".join(sorted(unsaid))
        if sent is None:
            yield f"the traces do not tell the bytes of {kinds}, so the bytes sent are not known"
        elif sent == counted:  # else the engine has counted them itself
            yield f"the traces do not tell the bytes of {kinds}, so the bytes sent are without them"
    if summary.profile and summary.profile.source and spec["engine"] in ("torch-ddp", *_WITHOUT_UNITS):
        yield "the traces of this engine name no units, so time and bytes are of the whole model"
    if _tells_loss(steps) and not any(row["tokens"] for row in steps):
        yield "the loss is the sum of what backward was called of in a step, and tokens are not known"


_WITHOUT_UNITS = ("deepspeed-1", "deepspeed-2", "deepspeed-3")


def _earlier(taken: int) -> str:
    if taken < 5:
        return "give it at least 5 steps"
    # a job of 12 steps: 6:7
    first = max(4, taken // 2)
    return f"record it again with --steps {first}:{first + 1}"


# ---- the ranks' files


def _any(parts: Mapping[int, Row]) -> Row:
    return next(iter(parts.values()), {})


def _tidy(mailbox: Mailbox) -> None:
    """Remove the parts, which are in the record now."""
    for path in mailbox.folder.iterdir():
        if is_written(path.relative_to(mailbox.folder.parent)):
            path.unlink()
    with suppress(OSError):  # what somebody else has put there stays
        mailbox.folder.rmdir()
