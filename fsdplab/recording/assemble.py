"""The record of a recorded job, from what its ranks left: for the launcher at its end, and for whoever opens the folder
of a job whose launcher is gone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdplab.common.errors import UserError
from fsdplab.recording.settings import Settings
from fsdplab.records import RunRecord, Summary
from fsdplab.sessions.launch.mailbox import Mailbox, read_lines
from fsdplab.sessions.summary import measured
from fsdplab.sessions.trace_tables import communication, profile_of, tables_of

SETTINGS_FILE = "spec.json"
NOTHING = "no rank took an optimizer step: nothing was recorded"


class NothingRecorded(UserError, RuntimeError):
    """A job of which nothing was recorded."""


def open_record(folder: str | Path) -> RunRecord:
    """The record in a folder, which is made first where ranks have left the parts of one."""
    place = Path(folder)
    if not (place / "run.json").exists() and (place / "ranks" / SETTINGS_FILE).exists():
        return assemble(place)
    return RunRecord.load(place)


def assemble(folder: Path, exit_code: int | None = None) -> RunRecord:
    """Make the record of what ranks left in `folder`, and save it; NothingRecorded where no rank took a step.

    `exit_code`: the job's, None where it is not known.
    """
    mailbox = Mailbox(folder / "ranks")
    settings = Settings(**json.loads((mailbox.folder / SETTINGS_FILE).read_text()))
    abouts = _parts(mailbox, "about")
    if not abouts:
        raise NothingRecorded(NOTHING)
    rows = [row for rank in abouts for row in read_lines(mailbox.of(rank, "steps"))]
    # the later one where there are two: the first step's end came later than it seemed
    steps = [*{(row["rank"], row["step"]): row for row in rows}.values()]
    memory, results = _parts(mailbox, "memory"), _parts(mailbox, "result")
    ledger = [row for rank in abouts for row in read_lines(mailbox.of(rank, "ledger"))]
    tables = tables_of(sorted(results), mailbox, ledger, folder, settings.first)
    whole = len(results) > 0
    return RunRecord(
        folder,
        spec=_spec(settings, abouts, results),
        environment=next(iter(_parts(mailbox, "environment").values()), {"device": _any(abouts)["device"]}),
        status="finished" if whole or exit_code == 0 else "failed",
        failure=None if whole or exit_code == 0 else {"message": f"the job ended with exit code {exit_code}"},
        summary=_summary(settings, abouts, results, steps, memory, tables),
        provenance=dict.fromkeys(("losses", "step_time_s", "peak_memory_bytes", "exposed_s"), "measured"),
        tables={
            "steps": steps,
            "ledger": ledger,
            "memory": [row for peak in memory.values() for row in peak["rows"]],
            "life": [row for result in results.values() for row in result["life"]],
            **tables,
        },
    ).save()


def _parts(mailbox: Mailbox, kind: str) -> dict[int, dict[str, Any]]:
    """What ranks wrote of one kind, by rank."""
    paths = {
        int(path.name.partition(".")[0].removeprefix("rank")): path for path in mailbox.folder.glob(f"rank*.{kind}")
    }
    return {rank: lines[0] for rank, path in sorted(paths.items()) if (lines := read_lines(path))}


def _any(parts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    return next(iter(parts.values()), {})


def _spec(settings: Settings, abouts: Mapping[int, Any], results: Mapping[int, Any]) -> dict[str, Any]:
    known = _any(results).get("spec") or {"engine": "plain", "strategy": "no_shard"}
    return {**known, "world_size": _any(abouts)["world_size"], "job": settings.job}


def _summary(
    settings: Settings, abouts: Mapping[int, Any], results: Mapping[int, Any], steps: list[dict[str, Any]],
    memory: Mapping[int, Any], tables: dict[str, list[dict[str, Any]]],
) -> Summary:  # fmt: skip
    found, world_size = measured(_untouched(settings, steps), memory), _any(abouts)["world_size"]
    profiled = [result["profiled_s"] for result in results.values()]
    return replace(
        found,
        losses=measured(steps, {}).losses,
        profile=profile_of(settings.end - settings.first if results else 0, profiled, found, tables),
        comm=communication(tables, world_size, None, None),
    )


def _untouched(settings: Settings, steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps in which nothing was measured but their time."""
    return [row for row in steps if not settings.memory_step(0) <= row["step"] < settings.end]
