"""PyTorch's own FSDP2 tests with `torch.distributed.fsdp.fully_shard` and with the lab's in its place, as a table.

`python tests/against_pytorch.py FOLDER` takes every `test_fully_shard_*.py` of a folder, such as
`test/distributed/_composable/fsdp` in a checkout of PyTorch that fits the installed version, and runs each test on CPU
ranks: with PyTorch's engine, then with the lab's over gloo and over shared memory. Only what PyTorch's engine passes
counts. Each difference has a reason: a test that touches a private name of PyTorch's on the very line that fails says
so itself, the others are in `against_pytorch_reasons.csv`. The exit code is 1 if one has none.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

ROOT = Path(__file__).parent.parent
WORKER = Path(__file__).with_name("upstream_tests.py")
REASONS = Path(__file__).with_name("against_pytorch_reasons.csv")
STOCK, OURS = "stock", ("gloo", "shm")
NOT_COUNTED = "not counted"
UNEXPLAINED = "unexplained"
STAND_INS = (
    "State|Context|Group|Param|Runtime"  # what `fully_shard.state` of the lab shows of PyTorch's private objects
)
console = Console()


@dataclass(frozen=True)
class Outcome:
    """How one test ended with one engine: passed, failed, skipped, timed out, died, not imported."""

    test: str
    verdict: str
    report: str


@dataclass(frozen=True)
class Row:
    """A line of the table: a test, its verdicts, and for a difference its kind and the reason."""

    file: str
    test: str
    stock: str
    gloo: str
    shm: str
    kind: str
    reason: str


class Refused(Exception):
    """What cannot be done, in words."""


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    try:
        installed = _torch_version()
        files = _files_in(options.folder)
    except Refused as refused:
        console.print(f"against_pytorch: {refused}", style="red", markup=False)
        return 2
    console.print(f"The table is for torch {installed}; {len(files)} files", markup=False)
    if (other := _version_of(options.folder)) and other.split(".")[:2] != installed.split(".")[:2]:
        console.print(f"The folder is of torch {other}: what is new there fails on {installed}", markup=False)
    reasons = _reasons()
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        for file in files:
            rows += _rows_of(file, options, reasons, progress)
    table = options.table or (
        None if options.only else ROOT / "data" / f"against-torch-{installed.partition('+')[0]}.csv"
    )
    if table:
        _write(table, rows)
    return _summary(rows, table)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the files test_fully_shard_*.py are, or one")
    parser.add_argument("--only", default="", metavar="PATTERN", help="only tests of which FILE.CLASS.TEST matches")
    parser.add_argument("--limit", type=float, default=120, metavar="SECONDS", help="time for one test (default 120)")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="the CSV to write (default: data/against-torch-VERSION.csv)"
    )
    parser.add_argument("--reports", type=Path, metavar="FOLDER", help="where to keep what failing tests printed")
    return parser.parse_args(arguments)


def _torch_version() -> str:
    """The installed version, without importing it."""
    found = find_spec("torch")
    if found is None or found.origin is None:
        raise Refused("there is no torch")
    package, installed = Path(found.origin).parent, version("torch")
    if not (package / "distributed" / "fsdp" / "_fully_shard").is_dir():
        raise Refused(f"torch {installed} has no torch.distributed.fsdp.fully_shard: it came with 2.6")
    if not (package / "testing" / "_internal" / "common_fsdp.py").is_file() or find_spec("expecttest") is None:
        raise Refused("PyTorch's tests need torch.testing._internal and the package expecttest")
    return installed


def _files_in(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    if not folder.is_dir():
        raise Refused(f"there is no folder {folder}")
    files = sorted(folder.glob("test_fully_shard_*.py"))
    if not files:
        raise Refused(f"{folder} has no files test_fully_shard_*.py; in PyTorch: test/distributed/_composable/fsdp")
    return files


def _version_of(folder: Path) -> str | None:
    """The version of the checkout that the folder belongs to, if it is one."""
    for parent in folder.resolve().parents:
        if (said := parent / "version.txt").is_file() and (parent / "torch").is_dir():
            return said.read_text().strip()
    return None


def _rows_of(file: Path, options: argparse.Namespace, reasons: Mapping[str, Row], progress: Progress) -> list[Row]:
    task = progress.add_task(file.name, total=None)
    stock = _run(file, STOCK, options, (), progress, task)
    counted = [test for test, outcome in stock.items() if outcome.verdict == "passed"]
    found = {STOCK: stock} | {
        engine: _run(file, engine, options, counted, progress, task) if counted else {} for engine in OURS
    }
    progress.remove_task(task)
    return [
        _row(file, {engine: ended[test] for engine, ended in found.items() if test in ended}, reasons) for test in stock
    ]


def _run(
    file: Path, engine: str, options: argparse.Namespace, tests: Sequence[str], progress: Progress, task: TaskID
) -> dict[str, Outcome]:
    """Each test of a file with one engine; neither the worker nor its ranks outlive this."""
    ended: dict[str, Outcome] = {}
    imported = False
    progress.update(task, description=f"{file.name} {engine}", total=None, completed=0)
    with tempfile.TemporaryDirectory() as scratch:  # PyTorch's tests leave files where temporary files go
        for said in _answers(file, engine, options, tests, Path(scratch)):
            if "tests" in said:
                imported = True
                progress.update(task, total=said["tests"])
                continue
            ended[said["test"]] = outcome = Outcome(**said)
            progress.advance(task)
            if options.reports and outcome.verdict not in ("passed", "skipped"):
                options.reports.mkdir(parents=True, exist_ok=True)
                kept = options.reports / f"{file.stem}.{outcome.test}.{engine}.txt"
                kept.write_text(f"{outcome.verdict}\n{outcome.report}")
        printed = (Path(scratch) / "printed").read_text(errors="replace")
    for test in tests or ([] if imported else [""]):  # a worker that could not import the file has said nothing
        ended.setdefault(test, Outcome(test, "died" if imported else "not imported", printed))
    return ended


def _answers(
    file: Path, engine: str, options: argparse.Namespace, tests: Sequence[str], scratch: Path
) -> Iterator[dict[str, Any]]:
    """What the worker says, line by line."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (scratch / "printed").open("w") as printed:
        worker = subprocess.Popen(
            [sys.executable, WORKER, file, engine, str(options.limit), options.only, *tests],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=printed, text=True,
            env={**os.environ, "PYTHONPATH": paths, "TMPDIR": str(scratch)},
        )  # fmt: skip
    assert worker.stdout is not None
    try:
        yield from map(json.loads, worker.stdout)
    finally:
        worker.terminate()
        worker.wait()


def _row(file: Path, outcomes: Mapping[str, Outcome], reasons: Mapping[str, Row]) -> Row:
    stock = outcomes[STOCK]
    verdicts = {engine: outcomes[engine].verdict if engine in outcomes else "" for engine in OURS}
    kind, reason = _why(file, outcomes, reasons)
    return Row(file.name, stock.test, stock.verdict, verdicts["gloo"], verdicts["shm"], kind, reason)


def _why(file: Path, outcomes: Mapping[str, Outcome], reasons: Mapping[str, Row]) -> tuple[str, str]:
    """The kind of the difference and its reason; two empty strings where there is none."""
    stock = outcomes[STOCK]
    if stock.verdict == "skipped":
        return NOT_COUNTED, "skips itself on CPU"
    if stock.verdict != "passed":
        return NOT_COUNTED, f"PyTorch's engine cannot run it on CPU ranks: {stock.verdict}, {_error_in(stock.report)}"
    differing = [outcomes[engine] for engine in OURS if engine in outcomes and outcomes[engine].verdict != "passed"]
    if not differing:
        return "", ""
    if known := reasons.get(f"{file.stem}.{stock.test}"):
        return known.kind, known.reason
    if name := private_name(file, differing[0].report):
        return "private", f"reads {name}, a part of PyTorch's implementation"
    return UNEXPLAINED, _error_in(differing[0].report)


def _error_in(report: str) -> str:
    """The type of the error that a report ends with."""
    types = re.findall(r"^(?:\w+\.)*(\w+(?:Error|Exception|Exit|Interrupt))\b", report, re.MULTILINE)
    return types[-1] if types else report.strip().splitlines()[-1] if report.strip() else "no report"


def private_name(file: Path, report: str) -> str | None:
    """A private name of PyTorch's FSDP on the line of the test that failed, or what the lab's stand-in for it lacks."""
    if lacking := re.findall(rf"AttributeError: '(?:{STAND_INS})' object has no attribute '(\w+)'", report):
        return lacking[-1]
    lines = re.findall(rf'File ".*{re.escape(file.name)}", line (\d+)', report)
    if not lines:
        return None
    tree = ast.parse(file.read_text())
    imported = {
        name.asname or name.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and "fsdp._" in (node.module or "")
        for name in node.names
    }
    at = int(lines[-1])
    for node in ast.walk(tree):
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        if not first <= at <= last or isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.With, ast.For, ast.If)):
            continue
        if isinstance(node, ast.Attribute) and re.match("_[a-z]", node.attr) and not _of_somebody_else(node):
            return node.attr
        if isinstance(node, ast.Name) and node.id in imported:
            return node.id
    return None


def _of_somebody_else(node: ast.Attribute) -> bool:
    """Whether a private attribute is the test's own or DTensor's."""
    return isinstance(node.value, ast.Name) and node.value.id == "self" or node.attr in ("_local_tensor", "_spec")


def _reasons() -> dict[str, Row]:
    with REASONS.open(newline="") as lines:
        found = [
            Row(line["file"], line["test"], "", "", "", line["kind"], line["reason"]) for line in csv.DictReader(lines)
        ]
    return {f"{Path(row.file).stem}.{row.test}": row for row in found}


def _write(table: Path, rows: Sequence[Row]) -> None:
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Row)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, rows))


def _summary(rows: Sequence[Row], table: Path | None) -> int:
    counted = [row for row in rows if row.stock == "passed"]
    console.print(f"{len(rows)} tests, {len(counted)} of them pass with PyTorch's engine on CPU ranks", markup=False)
    for engine in OURS:
        passed = sum(getattr(row, engine) == "passed" for row in counted)
        console.print(f"  the lab's over {engine}: {passed} of {len(counted)} pass", markup=False)
    for kind, number in Counter(row.kind for row in counted if row.kind).most_common():
        console.print(f"  {number} differ: {kind}", markup=False)
    for row in counted:
        if row.kind == UNEXPLAINED:
            console.print(
                f"  no reason for {row.file} {row.test}: gloo {row.gloo}, shm {row.shm}, {row.reason}", markup=False
            )
    if table:
        console.print(f"Written: {table}", markup=False)
    return int(any(row.kind == UNEXPLAINED for row in counted))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the worker and its ranks are ended on the way out
    sys.exit(main())
