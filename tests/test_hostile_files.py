"""Other people's files and names at the command line: they steer no terminal, run in no spreadsheet, and end in time.

Whatever a record, a trace, a model, a text or a notebook holds or is (a device, a pipe, a huge file): a result or one
line. That nothing hangs is held by the tests' own time limit; what they may allocate, by a limit on the process.
"""

from __future__ import annotations

import csv
import errno
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from fsdplab.cli.errors import failed, refuse
from fsdplab.cli.render import SafeConsole
from fsdplab.common.files import check_is_file, read_file
from fsdplab.common.words import harmless
from fsdplab.profiling import TraceError, export_csv
from fsdplab.profiling.exports import traces_of
from fsdplab.profiling.traces.chrome import ChromeTrace, is_gzipped, without_collection
from fsdplab.records import RecordError, RunRecord
from fsdplab.records.folder import is_record
from fsdplab.records.summary import Traces
from fsdplab.teaching.authoring.course import CourseError, read
from fsdplab.workloads import ByteText, TextError
from fsdplab.workloads import text as texts
from tests.gpu_traces import GpuRank
from tests.test_cli import ended
from tests.test_cli_fuzz import sound_record

CLEAR, TITLE, BELL = "\x1b[2J\x1b[H", "\x1b]0;evil\x07", "\x9b31m"
TURNED = "\u202egnp.exe\u2066\u200f\u2028"
STEERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
ODD = f"unit{CLEAR}{TITLE}{BELL}{TURNED}\r\b end"
MEMORY = 2_000_000 * 1024  # address space of a command that must not read what it is given


# ---- terminals


def test_harmless_keeps_every_letter_and_no_sign_that_steers() -> None:
    assert harmless("plain, µs, 日本, \tab\n") == "plain, µs, 日本, \tab\n"
    assert harmless(ODD) == "unit[2J[H]0;evil31mgnp.exe end"
    assert all(harmless(chr(code)) == "" for code in range(0x80, 0xA0))


def shown(what: Any, terminal: bool, **how: Any) -> str:
    out = io.StringIO()
    colours = "standard" if terminal else None
    SafeConsole(file=out, force_terminal=terminal, width=60, color_system=colours).print(what, **how)
    return out.getvalue()


def table_of(cell: Any) -> Table:
    table = Table(ODD, "n")
    table.add_row(cell, "1")
    return table


@pytest.mark.parametrize("what", [ODD, Text(ODD), table_of(ODD), table_of(Text(ODD)), ["a list", ODD]], ids=type)
def test_nothing_that_rich_prints_steers_the_terminal(what: Any) -> None:
    assert not STEERS.search(shown(what, False)) and "end" in shown(what, False)


def test_richs_own_colours_stay_and_columns_stay_in_line() -> None:
    assert shown("[bold]x[/]", True) == "\x1b[1mx\x1b[0m\n"
    widths = {len(line) for line in shown(table_of(Text(ODD)), False).splitlines()}
    assert len(widths) == 1


@pytest.mark.parametrize("end,code", [(refuse, 2), (failed, 1)])
def test_messages_and_reports_steer_nothing(end: Callable[[str], Any], code: int, capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        end(f"{ODD}: a message")
    said = capsys.readouterr().err
    assert left.value.code == code and not STEERS.search(said) and "a message" in said


def odd_record(folder: Path) -> Path:
    """A record whose every text would clear the screen."""
    record = RunRecord.load(sound_record(folder))
    record.spec |= {"strategy": ODD, "engine": f"engine{CLEAR}", "link": ODD}
    record.environment[ODD] = ODD
    for rows in record.tables.values():
        for row in rows:
            row |= {name: ODD.replace("\r", "") for name in ("unit", "name") if name in row}  # which no table can hold
    record.summary = replace(record.summary, traces=Traces(2, {}, notes=(ODD,)))
    record.status, record.failure = "failed", {"message": ODD, "traceback": f"{ODD}\n{ODD}"}
    (folder / "ranks").mkdir()
    (folder / "ranks" / "rank0.out").write_text(f"{ODD}\n", encoding="utf-8")
    return record.save().path


@pytest.mark.parametrize("way", [[], ["-v"], ["-q"], ["--json", "-"], ["--csv", "tables"], ["--html", "page.html"]])
def test_a_report_of_an_odd_record_steers_nothing(
    tmp_path: Path, way: list[str], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = ended(["report", str(odd_record(tmp_path / "record")), *way], capsys)
    assert code == 1 and not STEERS.search(out + err), out + err
    if "--json" in way:
        assert json.loads(out)["runs"][0]["strategy"] == ODD


@pytest.mark.parametrize("way", [[], ["--tables"], ["--html", "page.html"], ["--perfetto", "all.json"]])
def test_a_report_of_a_trace_of_odd_kernels_steers_nothing(
    tmp_path: Path, way: list[str], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    trace = GpuRank(0, 1).step(1, 0, 50).range(f"FSDP::pre_forward ({ODD})", 5, 30).kernel(10, 100, 200, name=ODD)
    content = trace.nccl("all_gather", 12, 150, 260).content()
    content["deviceProperties"] = [{"name": ODD}]
    path = tmp_path / f"trace{CLEAR}.json"
    path.write_text(json.dumps(content))
    code, out, err = ended(["report", str(path), *way], capsys)
    assert code == 0 and not STEERS.search(out + err), out + err


@pytest.mark.parametrize(
    "arguments",
    [
        ["report", f"nowhere{CLEAR}"], ["plan", "--model", f"./{ODD}/config.json"], ["run", ODD],
        ["run", "--text", ODD], ["compare", "--engines", ODD], [ODD],
        ["report", ODD, f"--{ODD}"],
    ],
)  # fmt: skip
def test_a_refusal_steers_nothing(arguments: list[str], capsys: Any) -> None:
    code, out, err = ended(arguments, capsys)
    assert code == 2 and not STEERS.search(out + err) and err.count("\n") == 1, err


def test_torch_that_cannot_be_imported_is_one_line_of_doctors() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab", "doctor"], env={**os.environ, "TORCH_LOGS": "no_such_log"},
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "no_such_log" in done.stderr, done.stderr


@pytest.mark.parametrize(
    "name,value",
    [("TERM", "\x1b[2J"), ("COLUMNS", "-5"), ("COLUMNS", "9" * 20), ("GLOO_SOCKET_IFNAME", f"no{CLEAR}"), ("HOME", "")],
)
def test_doctor_with_an_odd_environment(name: str, value: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fsdplab", "doctor"], env={**os.environ, name: value}, capture_output=True, timeout=100
    )
    assert done.returncode == 0 and b"\x1b" not in done.stdout and b"Traceback" not in done.stderr, done.stderr


# ---- spreadsheets

FORMULAS = ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\n=1", " =1", "＝1", '=HYPERLINK("http://x","a,b")', "'=1"]


def test_no_text_of_an_exported_table_is_a_formula(tmp_path: Path) -> None:
    """And each is read back as it was, by Python's csv and one word more; numbers below zero stay numbers."""
    record = RunRecord.load(sound_record(tmp_path / "record"))
    names = [*FORMULAS, "", "blocks.0", "it's", "aten::add_", "a - b"]
    row = record.table("timeline")[0] | {"start_ns": -5, "end_ns": 7}
    record.tables["timeline"] = [{**row, "unit": name, "name": name} for name in names]
    record.provenance = {"=1+1": "measured", "a,b": "emulated"}
    files = {file.name: file for file in export_csv(record, tmp_path / "out")}
    with files["timeline.csv"].open(newline="", encoding="utf-8") as file:
        read_back = list(csv.DictReader(file))
    assert [each["unit"].removeprefix("'") for each in read_back] == names
    assert all(each["unit"].startswith("'") for each in read_back[: len(FORMULAS)])
    assert [each["unit"] for each in read_back[len(FORMULAS) :]] == names[len(FORMULAS) :]
    assert {(each["start_ns"], each["end_ns"]) for each in read_back} == {("-5", "7")}
    with files["provenance.csv"].open(newline="", encoding="utf-8") as file:
        assert list(csv.reader(file)) == [["quantity", "origin"], ["'=1+1", "measured"], ["a,b", "emulated"]]
    assert export_csv(record, tmp_path / "out"), "its own files are replaced"


@pytest.mark.parametrize("name", ["\r=1+1", f"{CLEAR}=1", "\u202e=1", "\x00-1"])
def test_what_steers_a_terminal_is_not_exported_and_hides_no_formula(tmp_path: Path, name: str) -> None:
    row = RunRecord.load(sound_record(tmp_path / "record")).table("timeline")[0] | {"unit": name}
    (file, _) = export_csv(RunRecord(tmp_path, tables={"timeline": [row]}), tmp_path / "out")
    with file.open(newline="", encoding="utf-8") as opened:
        (read_back,) = csv.DictReader(opened)
    assert read_back["unit"] == (harmless(name) if name.startswith(CLEAR) else f"'{harmless(name)}")


# ---- what a foreign record names


def test_a_foreign_record_names_no_file_outside_of_its_folder(tmp_path: Path) -> None:
    secret = tmp_path / "secret.json"
    secret.write_text("{}")
    record = RunRecord.load(sound_record(tmp_path / "record"))
    record.summary = replace(record.summary, traces=Traces(1, {0: str(secret), 1: "../secret.json"}))
    assert set(traces_of(record).values()) == {tmp_path / "record" / "secret.json"}


def test_an_export_stays_in_its_folder_whatever_a_run_is_called(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    folders = []
    for number, name in enumerate(["../../evil", "/" * 50 + "evil", "x" * 3000, "a\nb", "\x00"]):
        record = RunRecord.load(sound_record(tmp_path / f"record{number}"))
        record.spec["strategy"] = name
        folders.append(str(record.save().path))
    code, _, err = ended(["report", *folders, "--csv", "out"], capsys)
    assert code == 0, err
    assert len(list((tmp_path / "work" / "out").iterdir())) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"work", *(Path(folder).name for folder in folders)}


@pytest.mark.parametrize(
    "field,value",
    [
        ("losses", [5.0, None]), ("losses", [None]), ("predicted", {"step_time_s": "soon"}), ("predicted", [1]),
        ("predicted", {"peak_memory_bytes": {"by_category": {"other": None}}}), ("traces", 3), ("traces", {}),
        ("traces", {"ranks": "x"}),
        ("traces", {"ranks": 1, "files": {"first": "a"}}), ("traces", {"ranks": 1, "files": {"0": 7}}),
        ("traces", {"ranks": 1, "notes": None}), ("traces", {"ranks": 1, "comm_patterns": [3]}),
        ("peak_memory_bytes", {"total": -5}), ("step_time_s", {"median": -1.0}), ("formula_bytes_per_step", -8),
        ("card", {"bytes": -5}), ("tokens_per_s", -1.0),
    ],
)  # fmt: skip
@pytest.mark.parametrize("way", [[], ["--html", "page.html"], ["--tables"]])
def test_a_record_with_an_odd_summary_is_a_result_or_one_line(
    tmp_path: Path, field: str, value: Any, way: list[str], capsys: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    content = json.loads((sound_record(tmp_path / "record") / "run.json").read_text())
    content["summary"][field] = value
    (tmp_path / "record" / "run.json").write_text(json.dumps(content))
    code, out, err = ended(["report", "record", *way], capsys)
    assert "Traceback" not in err and "-5 B" not in out
    readable = (
        field == "losses" or field == "predicted" and "peak_memory_bytes" in value
    )  # which may lack what nobody measured
    assert code == (2 if "--tables" in way else 0) if readable else (code, err.count("\n")) == (2, 1), err


# ---- devices, pipes, and files without end


@pytest.fixture
def endless(tmp_path: Path) -> dict[str, Path]:
    """A device, a pipe that nobody writes, a file of 10 GB that takes no space, and links to them."""
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(10 * 10**9)
    (tmp_path / "link").symlink_to("/dev/zero")
    return {"zero": Path("/dev/zero"), **{name: tmp_path / name for name in ("pipe", "sparse", "link")}}


KINDS = ["zero", "pipe", "sparse", "link"]


def ends(*requests: list[str]) -> list[tuple[int, str]]:
    """Exit code and stderr of each request, in one process with little memory: reading without end fails there."""
    program = (
        f"import resource; resource.setrlimit(resource.RLIMIT_DATA, ({MEMORY}, {MEMORY}))\n"
        "import contextlib, io, json, sys\nfrom fsdplab.cli import main\nended = []\n"
        "for request in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stderr(io.StringIO()) as err:\n"
        "        try:\n            main(request)\n        except SystemExit as left:\n            code = left.code\n"
        "    ended.append((code, err.getvalue()))\nprint(json.dumps(ended))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(requests)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=150,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_no_end_is_refused_in_one_line(endless: dict[str, Path], kind: str, tmp_path: Path) -> None:
    path = str(endless[kind])
    run = ["run", "--model", "gpt-tiny", "--out", str(tmp_path / "out"), "--text"]
    for code, said in ends(*([*way, path] for way in (["report"], ["plan", "step", "--model"], run))):
        assert code == 2 and said.count("\n") == 1 and path in said, said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_a_record_with_a_file_without_end_is_refused_in_one_line(
    endless: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    names = ["run.json", "steps.csv.gz"]
    for name in names:
        record = sound_record(tmp_path / f"of {name}")
        (record / name).unlink()
        (record / name).symlink_to(endless[kind])
    for name, (code, said) in zip(names, ends(*(["report", str(tmp_path / f"of {name}")] for name in names))):
        assert code == 2 and said.count("\n") == 1 and f"/{name}" in said, said


@pytest.mark.parametrize("kind", KINDS)
def test_readers_refuse_what_has_no_end(endless: dict[str, Path], kind: str, tmp_path: Path) -> None:
    """Each reader by itself; a pipe would hang, and a device fill the memory."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("run.json", "a.ipynb"):
        (folder / name).symlink_to(endless[kind])
    with pytest.raises(OSError):
        read_file(endless[kind], 1000)
    with pytest.raises(TextError, match="pipe or a device|more than 1,000,000,000 bytes"):
        ByteText.from_path(endless[kind])
    with pytest.raises(TraceError, match="pipe or a device|no Chrome trace"):
        list(ChromeTrace(endless[kind]))
    with pytest.raises(CourseError, match="not a valid notebook"):
        read(folder / "a.ipynb")
    assert not is_record(folder)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"x" * 1000)
    assert read_file(file, 1000) == b"x" * 1000
    with pytest.raises(OSError, match="more than 999 bytes") as refused:
        read_file(file, 999)
    assert refused.value.errno == errno.EOVERFLOW and refused.value.filename == str(file)
    if sys.platform == "linux":
        assert len(read_file(Path("/proc/self/status"), 10**6)) > 100, "its size is said to be 0"
    for other, reason in ((tmp_path, IsADirectoryError), (tmp_path / "b", FileNotFoundError)):
        with pytest.raises(reason):
            check_is_file(other)
    with pytest.raises(OSError, match="pipe or a device"):
        is_gzipped(Path("/dev/zero"))


def test_texts_of_every_kind(tmp_path: Path, monkeypatch: Any) -> None:
    """Bytes are tokens, so a binary file is a text; a folder's other files, pipes and dead links are passed over."""
    (tmp_path / "binary.txt").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "other.bin").write_bytes(b"no")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "zero.md").symlink_to("/dev/zero")
    (tmp_path / "round").symlink_to(tmp_path)
    (tmp_path / "dead.py").symlink_to(tmp_path / "nowhere")
    assert len(ByteText.from_path(tmp_path)) == len(ByteText.from_path(tmp_path / "binary.txt")) == 2560
    monkeypatch.setattr(texts, "MOST_BYTES", 2000)
    for path in (tmp_path, tmp_path / "binary.txt"):
        with pytest.raises(TextError, match="more than 2,000 bytes, and every rank holds all of it") as refused:
            ByteText.from_path(path)
        assert str(path) in str(refused.value)
    (tmp_path / "empty.txt").touch()
    with pytest.raises(TextError, match="got 0 bytes"):
        ByteText.from_path(tmp_path / "empty.txt")


def test_the_models_of_others_may_begin_with_a_byte_order_mark(tmp_path: Path, capsys: Any) -> None:
    config = {
        "model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2,
        "intermediate_size": 128, "vocab_size": 256,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    code, out, err = ended(["plan", "--model", str(tmp_path / "config.json"), "--world-size", "2"], capsys)
    assert code == 0 and "fits" in out, err


# ---- traces


def bomb(path: Path, head: bytes, unit: bytes, megabytes: int) -> Path:
    """A file of many megabytes; if its name says so, gzipped, which makes it a thousand times smaller."""
    block = unit * (1_000_000 // len(unit))
    with gzip.open(path, "wb", compresslevel=6) if path.suffix == ".gz" else path.open("wb") as file:
        file.write(head)
        for _ in range(megabytes):
            file.write(block)
    return path


EVENT = b'{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1, "dur": 2},\n'
HEAD = b'{"traceEvents": ['


@pytest.mark.parametrize(
    "head,unit,told",
    [
        (b"", b"\0", "no Chrome trace"), (b"", b" ", "blanks"), (HEAD, b" ", "blanks"), (HEAD, b",", "blanks"),
        (HEAD, EVENT, "unpacks to more than 100 times its size"), (HEAD[:-1], b"[", "nested too deeply"),
        (HEAD + b'"', b"x", "unpacks to more than 100 times its size"),
    ],
)  # fmt: skip
def test_a_gzip_file_that_unpacks_without_end_is_refused_early(
    tmp_path: Path, head: bytes, unit: bytes, told: str
) -> None:
    """It is known for one within less than a hundredth of what ten gigabytes would take."""
    path = bomb(tmp_path / "bomb.json.gz", head, unit, 60)
    unpacked = 0
    read = gzip.GzipFile.read

    def counted(self: gzip.GzipFile, size: int | None = -1) -> bytes:
        nonlocal unpacked
        piece = read(self, size)
        unpacked += len(piece)
        return piece

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TraceError, match=told) as refused:
        patch.setattr(gzip.GzipFile, "read", counted)
        list(ChromeTrace(path))
    assert unpacked < 40_000_000 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "head,unit,told",
    [
        (HEAD + b'"', b"x", "is no JSON"), (b'{"a": [', b"[],", "is no JSON"), (b'{"', b"x", "is no JSON"),
        (HEAD + b"],", b'"a":"' + b"x" * 1000 + b'",', "around its events"),
    ],
)  # fmt: skip
def test_a_file_of_one_long_value_is_refused(tmp_path: Path, head: bytes, unit: bytes, told: str) -> None:
    path = bomb(tmp_path / "long.json", head, unit, 40)
    with pytest.raises(TraceError, match=told) as refused, without_collection():
        list(ChromeTrace(path))
    assert len(str(refused.value)) < 400


def test_a_table_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    record = sound_record(tmp_path / "record")
    with gzip.open(record / "steps.csv.gz", "rb") as file:
        head = file.read()
    monkeypatch.setattr("fsdplab.records.tables._MOST_BYTES", 2_000_000)
    for unit, told in ((b"\n", "has 0 cells"), (head.splitlines()[-1] + b"\n", "more than 2,000,000 bytes")):
        bomb(record / "steps.csv.gz", head, unit, 1 if unit == b"\n" else 3)
        with pytest.raises(RecordError, match=told):
            RunRecord.load(record)


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path: Path, packed: bool, capsys: Any) -> None:
    content = GpuRank(0, 1).step(1, 0, 50).kernel(10, 100, 200).nccl("all_gather", 12, 150, 260).content()
    plain, marked = tmp_path / "plain.json", tmp_path / "marked.json"
    plain.write_text(json.dumps(content))
    written = json.dumps(content).encode("utf-8-sig")
    marked.write_bytes(gzip.compress(written) if packed else written)
    assert list(ChromeTrace(marked)) == list(ChromeTrace(plain)) and ended(["report", str(marked)], capsys)[0] == 0
