"""Wrong input of every kind to every flag, and damaged records, traces and notebooks to every command that reads them.

The flags are those of the command line itself, so a new one is tried too. Each request is refused before a rank starts:
what is tried is one flag, and another flag is wrong for certain. Whatever is given, a command ends with exit code 0, or
with one line. The seeds are fixed; `python -m tests.test_cli_fuzz 5000` tries more.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import json
import os
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from fsdplab import cli
from fsdplab.cli.app import app
from fsdplab.common.names import CATEGORIES
from fsdplab.records import LANES, TABLES, RunRecord, Summary
from fsdplab.records.tables import IDLE_PARTS
from fsdplab.teaching.__main__ import parser as course_parser

VALUES = (
    "", " ", "-", "--", "-1", "0", "1", "7", "1.5", "1e400", "nan", "inf", "-inf", "NaN", "9" * 20, "9" * 400,
    "-" + "9" * 400,
    "1_000", "0x10", "²", "１２", "٣", "½", "[/b]", "[bold", "[/]", "x" * 5000, "a/" * 3000, "/dev/null/path",
    "/dev/null", "/dev/zero",
    ".", "..", "~", "a,b", ",", ",,,", "a=b", "%s%n{}", "{0}", "\n", "\t", "\u202e", "日本", "\udcff", "None",
    "true", "[]", "{}",
    "1GB", "-1GB", "1e3MB", "200mbit", "200mbit,", ",50us", "eth10,nan", "8xH100", "0xH100", "-3xH100",
    "99999999999xH100",
    "lab", "zero2,zero2", "full_shard", "torch-fsdp2", "gpt2", "llama-3.1-405b", "cuda", "twin",
)  # fmt: skip
FILE, MISSING = "FILE", "/dev/null/folder/file"
# Nobody can make a folder below /dev/null, and the working folder lies in another: nothing is written outside of that.
# by command: a flag that is refused after all others were read, and another for when that flag itself is tried
GUARDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "compare": (("--keep", FILE), ("--seed", "-1")),
    "run": (("--out", FILE), ("--seed", "-1")),
    "bench": (("--json", MISSING), ("--rounds", "0")),
    "record": (("--out", FILE), ("--steps", "no")),
    "lab": (("--notebooks", MISSING), ("--edition", "pupil")),
    "calibrate": (("--json", MISSING), ("--seconds", "0")),
    "course tracks": (("--times", MISSING), ("--source", MISSING)),
    "course leaderboard": ((MISSING,), ("--out", MISSING)),
    "course progress": ((MISSING,), (MISSING,)),
    "course handouts": (("--source", MISSING), (MISSING,)),
    "course build": (("--source", MISSING), ("--edition", "pupil")),
    "course test": ((MISSING,), ("--edition", "pupil")),
    "course site": (("--source", MISSING), (MISSING,)),
    "course slides": (("--source", MISSING), (MISSING,)),
    "gpu-check": (("--out", FILE), ("--device", "mars")),
}


def commands() -> dict[str, Any]:
    """Every command of the command line: `"course build"` -> its parameters."""

    def below(command: Any, name: str) -> Iterator[tuple[str, Any]]:
        inner = getattr(command, "commands", None)
        if inner is None:
            yield name, command.params
        for each, other in (inner or {}).items():
            yield from below(other, f"{name} {each}".strip())

    found = dict(below(typer.main.get_command(app), ""))
    inner = next(each for each in course_parser()._actions if isinstance(each, argparse._SubParsersAction)).choices
    handed_on = {f"course {name}": parser for name, parser in inner.items()}
    found.pop("course")
    return found | {name: [own(action) for action in parser._actions] for name, parser in handed_on.items()}


def own(action: argparse.Action) -> SimpleNamespace:
    """A flag of argparse's, with the names that those of the other commands have."""
    kind = "option" if action.option_strings else "argument"
    return SimpleNamespace(opts=action.option_strings, param_type_name=kind, is_flag=action.nargs == 0)


def flags_of(parameters: Any) -> list[str | None]:
    """The flags that take a value; None for an argument."""
    return [
        parameter.opts[0] if parameter.param_type_name == "option" else None
        for parameter in parameters
        if not getattr(parameter, "is_flag", False)
    ]


def requests(chance: random.Random, count: int) -> Iterator[list[str]]:
    """Command lines with one or two wrong values; every flag of every command in turn."""
    known = [(name, flag) for name, parameters in commands().items() for flag in flags_of(parameters)]
    for number in range(count):
        name, flag = known[number % len(known)]
        tried = [flag, *([chance.choice([each for of, each in known if of == name])] if chance.random() < 0.3 else [])]
        given = [word for each in tried for word in given_as(each, chance.choice(VALUES))]
        first, second = GUARDS.get(name, ((), ()))
        guard = second if first and (first[0] in tried or (len(first) == 1 and None in tried)) else first
        yield [*name.split(), *given, *guard]


def given_as(flag: str | None, value: str) -> list[str]:
    return [value] if flag is None else [f"{flag}={value}"] if flag.startswith("--") else [flag, value]


# ---- what a command does


def in_this_process(module: str, arguments: list[str], instead: object = None) -> int:
    """The course runs in a process of its own: here, its very entry point."""
    assert module == "fsdplab.teaching"
    from fsdplab.teaching.__main__ import main

    return main(list(arguments))


def lines_of(arguments: list[str]) -> int:
    """A course's sources have a line for each fault."""
    return 8 if arguments[0] == "course" else 1


def outcome(arguments: list[str]) -> str | None:
    """What is wrong with how a command ended; None where nothing is."""
    out, err = io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main(arguments)
    except SystemExit as left:
        said = err.getvalue()
        if left.code == 0:
            return f"wrote {said!r}" if "Traceback" in said else None
        one_line = 1 <= said.count("\n") <= lines_of(arguments) and said.endswith("\n") and "Traceback" not in said
        return None if left.code in (1, 2) and one_line else f"exit code {left.code}, {said[-600:]!r}"
    except BaseException:
        return traceback.format_exc()[-1500:]
    return "it did not exit"


def failures(tried: Iterator[tuple[str, list[str]]]) -> tuple[int, list[str]]:
    """How many were tried, and those that ended badly, each with how."""
    count, bad = 0, []
    for what, arguments in tried:
        count += 1
        if (wrong := outcome(arguments)) is not None:
            shown = " ".join(each if len(each) < 80 else f"{each[:40]}...({len(each)})" for each in arguments)
            bad.append(f"{what} | fsdplab {shown!r}\n{wrong}")
    return count, bad


@contextlib.contextmanager
def place() -> Iterator[Path]:
    """An empty working folder with a FILE in it, and no other process for the course and the GPU check."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr("fsdplab.cli.lab.run_module", in_this_process)
        working = Path(folder) / "working"
        working.mkdir()
        os.chdir(working)
        Path(FILE).touch()
        outside = set(os.listdir("/"))
        try:
            yield working
        finally:
            os.chdir(before)
        assert set(os.listdir("/")) == outside


# ---- records


def sound_record(folder: Path) -> Path:
    """A small record with rows in every table."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in TABLES}
    for rank in (0, 1):
        for step in (0, 1, 2):
            where, start = {"rank": rank, "step": step}, 1_000_000_000 + 10_000_000 * step
            rows["steps"].append({**where, "loss": 5.0 - step, "step_time_s": 0.01, "tokens": 64})
            rows["ledger"].append(
                {
                    **where, "unit": "blocks.0", "phase": "forward", "kind": "all_gather", "logical_bytes": 800,
                    "wire_bytes": 400, "padding_bytes": 0, "dtype": "float32", "start_ns": start, "end_ns": start + 900,
                    "emulated": False, "waited_ns": 500,
                }
            )  # fmt: skip
        where = {"rank": rank, "step": 2}
        for point in range(4):
            used = dict.fromkeys(CATEGORIES, 1000 * point + 10)
            rows["memory"].append({**where, "step": 1, "time_ns": start + point * 100, **used, "is_peak": point == 3})
        for lane in LANES:
            span = {"start_ns": start, "end_ns": start + 5_000_000}
            rows["timeline"].append(
                {**where, "lane": lane, "unit": "blocks.0", "phase": "forward", "name": "x", **span, "emulated": False}
            )
        rows["breakdown"].append(
            {**where, "step_ns": 5_000_000, "compute_ns": 3_000_000, "compute_only_ns": 2_000_000,
             "overlapped_ns": 1_000_000, "exposed_ns": 1_500_000, "other_ns": 500_000}
        )  # fmt: skip
        rows["exposed"].append(
            {**where, "unit": "blocks.0", "phase": "forward", "kind": "all_gather", "communication_ns": 2_500_000,
             "exposed_ns": 1_500_000, "cause": "late_start"}
        )  # fmt: skip
        rows["idle"].append({**where, **dict.fromkeys(IDLE_PARTS, 80_000), "rest_ns": 100_000})
        for state in ("gathered", "sharded"):
            rows["life"].append({**where, "unit": "blocks.0", "state": state, "phase": "forward", "time_ns": start})
    summary = {
        "step_time_s": {"median": 0.01, "min": 0.009}, "tokens_per_s": 12800.0,
        "peak_memory_bytes": {"total": 24_080, "by_category": dict.fromkeys(CATEGORIES, 3010)},
        "memory_start_ns": {"0": start, "1": start}, "peak_by_rank": [24_080, 24_080],
        "resident_growth_by_rank": [9, 9],
        "comm": {"bytes_per_step": 400, "collectives_per_step": 1, "exposed_s": 0.0015, "overlap": 0.4},
        "formula_bytes_per_step": 400, "losses": [5.0, 4.0, 3.0], "card": {"bytes": 10**6, "exceeded": False},
        "link": {"name": "eth10", "bytes_per_s": 1.25e9, "latency_s": 1e-5, "queues": 1, "across": None, "as": None},
        "profile": {"steps": 1, "overhead": 0.1, "source": "trace"},
    }  # fmt: skip
    from fsdplab.sessions import RunSpec

    record = RunRecord(
        folder, spec=RunSpec(model="gpt-tiny", device="cpu").as_dict(), summary=Summary.from_dict(summary), tables=rows,
        environment={"versions": {"torch": "2.13"}, "device": "cpu", "cpu": {"model": "x", "count": 2}},
        provenance={"losses": "measured", "link": "emulated"},
    )  # fmt: skip
    return record.save().path


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


JUNK = (
    "null", "true", "false", "0", "-1", "7", "1e308", "-1e308", "1e400", "NaN", "Infinity", "9" * 400, "9" * 5000,
    '""', '"x"',
    '"[/b]"', '"[bold red"', json.dumps("x" * 200_000), '"\\ud800"', '"\\u0000"', '"\\n\\n"', "[]", "{}", "[1, 2]",
    '{"a": 1}',
    "[null]", "[[]]", '[{"a": []}]', deep(50), deep(100_000), '["x", 1]', '{"median": "x"}',
    '{"total": -5, "by_category": 3}',
)  # fmt: skip
_HOLE = "@@hole@@"


def places_in(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, each in inner:
        yield (*path, name)
        yield from places_in(each, (*path, name))


def with_junk(text: str, chance: random.Random) -> tuple[str, str]:
    """A JSON text with something else in one place, and what was done."""
    content = json.loads(text)
    path, junk = chance.choice(list(places_in(content))), chance.choice((*JUNK, "delete"))
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    if junk == "delete":
        del inner[path[-1]]
        return json.dumps(content), f"without {path}"
    inner[path[-1]] = _HOLE
    return json.dumps(content).replace(f'"{_HOLE}"', junk), f"{path} = {junk[:40]}"


CELLS = (
    "",
    "x",
    "-1",
    "nan",
    "inf",
    "1e400",
    "9" * 400,
    "9" * 5000,
    "x" * 200_000,
    "[/b]",
    "True",
    "²",
    "1.5",
    '"',
    "a\nb",
    "\x00",
)


def damaged_table(packed: bytes, chance: random.Random) -> tuple[bytes, str]:
    """A table with one cell, the header, or the whole file changed."""
    how = chance.choice(("cell", "cell", "cell", "cell", "cut", "bytes", "plain", "header", "empty", "row"))
    text = gzip.decompress(packed).decode()
    if how == "cut":
        return packed[: chance.randrange(len(packed))], "cut"
    if how == "bytes":
        at = chance.randrange(len(packed))
        return packed[:at] + bytes([chance.randrange(256)]) + packed[at + 1 :], "a byte"
    if how == "plain":
        return text.encode(), "not packed"
    if how == "empty":
        return gzip.compress(b""), "empty"
    rows = [line.split(",") for line in text.splitlines()]
    row = 0 if how == "header" or len(rows) == 1 else chance.randrange(1, len(rows))
    if how == "row":
        rows.pop(row)
        return gzip.compress("\n".join(map(",".join, rows)).encode()), "a row less"
    at, cell = chance.randrange(len(rows[row])), chance.choice(CELLS)
    rows[row][at] = cell
    return gzip.compress(("\n".join(map(",".join, rows)) + "\n").encode()), f"row {row}, cell {at} = {cell[:40]!r}"


def damaged_records(chance: random.Random, count: int, sound: Path) -> Iterator[tuple[str, list[str]]]:
    """A record with one thing wrong at a time, shown in the ways there are."""
    original = {path.name: path.read_bytes() for path in sound.iterdir()}
    ways = (
        [],
        ["-v"],
        ["--json", "-"],
        ["--csv", "tables"],
        ["--perfetto", "t.json"],
        ["--tensorboard", "tb"],
        ["--snapshot", "s"],
    )
    for number in range(count):
        target = "run.json" if number % 2 else chance.choice([name for name in original if name.endswith(".gz")])
        if target != "run.json":
            content, what = damaged_table(original[target], chance)
        elif chance.random() < 0.15:
            at = chance.randrange(len(original[target]))
            content, what = original[target][:at], "cut"
        else:
            changed, what = with_junk(original[target].decode(), chance)
            content = changed.encode(errors="surrogatepass")
        (sound / target).write_bytes(content)
        way = ["--html", "page.html"] if number % 10 == 3 else chance.choice(ways)
        yield f"{target}: {what}", ["report", str(sound), *way]
        (sound / target).write_bytes(original[target])


# ---- traces and notebooks

TRACE = {
    "schemaVersion": 1, "distributedInfo": {"backend": "gloo", "rank": 0, "world_size": 1},
    "baseTimeNanoseconds": 10**18,
    "traceEvents": [
        {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#0", "pid": 1, "tid": 1, "ts": 1.0, "dur": 900.0},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10.0, "dur": 100.0,
         "args": {"Sequence number": 1}},
        {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "pid": 1, "tid": 2, "ts": 50.0, "dur": 80.0,
         "args": {"Input Dims": [[4]], "Input type": ["float"]}},
        {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "pid": 1, "tid": 1, "ts": 60.0,
         "args": {"Bytes": 8, "Addr": 1}},
    ],
}  # fmt: skip
NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "id": "a", "metadata": {}, "source": ["# 00 A title\n"]},
        {"cell_type": "code", "id": "b", "metadata": {"tags": ["x"]}, "source": "1 + 1", "outputs": [],
         "execution_count": None},
    ],
    "metadata": {"kernelspec": {"name": "python3", "display_name": "Python 3"}}, "nbformat": 4, "nbformat_minor": 5,
}  # fmt: skip
OTHER_NOTEBOOKS = (
    "", "x", "null", "[]", "{}", "3", '"x"', deep(100_000), '{"nbformat": 3, "worksheets": []}',
    '{"nbformat": 99, "cells": []}',
    '{"nbformat": "4", "cells": []}', '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": {}}',
    "\ufeff{}", "\x00",
)  # fmt: skip


def damaged_json(chance: random.Random, sound: dict[str, Any]) -> tuple[str, str]:
    text = json.dumps(sound)
    if chance.random() < 0.15:
        return text[: chance.randrange(len(text))], "cut"
    return with_junk(text, chance)


def damaged_traces(chance: random.Random, count: int) -> Iterator[tuple[str, list[str]]]:
    for number in range(count):
        text, what = damaged_json(chance, TRACE)
        name = ("trace.json", "trace.json.gz")[number % 2]
        data = text.encode(errors="surrogatepass")
        Path(name).write_bytes(gzip.compress(data) if number % 4 == 1 else data)
        yield f"trace: {what}", ["report", name]


def damaged_notebooks(chance: random.Random, count: int) -> Iterator[tuple[str, list[str]]]:
    folder = Path("nb")
    folder.mkdir(exist_ok=True)
    for number in range(count):
        if number < len(OTHER_NOTEBOOKS):
            text, what = OTHER_NOTEBOOKS[number], "another format"
        else:
            text, what = damaged_json(chance, NOTEBOOK)
        (folder / "00_tour.ipynb").write_bytes(text.encode(errors="surrogatepass"))
        yield f"notebook: {what}", ["course", "build", "--source", "nb", "--out", f"built-{number}"]


# ---- the tests: a part of what was tried by hand


def test_every_command_is_tried() -> None:
    found = commands()
    plans = {f"plan {name}" for name in ("step", "fit", "sweep", "simulate")}
    assert set(GUARDS) | {"report", "doctor"} | plans == set(found)
    assert sum(len(flags_of(parameters)) for parameters in found.values()) > 80


def test_wrong_values_of_every_flag_end_in_one_line() -> None:
    with place() as folder:
        record = str(sound_record(folder / "record"))
        tried = (
            (arguments[0], [arguments[0], record, *arguments[1:]] if arguments[0] == "report" else arguments)
            for arguments in requests(random.Random(21), 140)
        )
        count, bad = failures(tried)
    assert count == 140 and bad == [], "\n\n".join(bad)


def test_damaged_records_end_in_one_line() -> None:
    with place() as folder:
        count, bad = failures(damaged_records(random.Random(22), 100, sound_record(folder / "record")))
    assert count == 100 and bad == [], "\n\n".join(bad)


@pytest.mark.parametrize("damaged", [damaged_traces, damaged_notebooks])
def test_damaged_traces_and_notebooks_end_in_one_line(
    damaged: Callable[[random.Random, int], Iterator[tuple[str, list[str]]]],
) -> None:
    with place():
        count, bad = failures(damaged(random.Random(23), 40))
    assert count == 40 and bad == [], "\n\n".join(bad)


def main(count: int, seed: int) -> None:
    """Try `count` of each kind, and print what ended badly."""
    with place() as folder:
        record = sound_record(folder / "record")
        chance = random.Random(seed)
        kinds: dict[str, Iterator[tuple[str, list[str]]]] = {
            "flags": (
                (each[0], [each[0], str(record), *each[1:]] if each[0] == "report" else each)
                for each in requests(chance, count)
            ),
            "records": damaged_records(chance, count, record),
            "traces": damaged_traces(chance, count),
            "notebooks": damaged_notebooks(chance, count),
        }
        for kind, tried in kinds.items():
            done, bad = failures(tried)
            print("\n\n".join(bad).encode(errors="replace").decode())
            print(f"==== {kind}: tried {done}, failed {len(bad)}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
