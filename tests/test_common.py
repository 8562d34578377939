"""What several folders share: names, whole files, near words, sizes, endings of processes, names loaded when used."""

from __future__ import annotations

import doctest
import errno
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import pytest

from fsdplab.common.files import try_folder, try_output, write_output, write_whole
from fsdplab.common.machine import output_of
from fsdplab.common.processes import gone, send, send_group, state
from fsdplab.common.pythons import without_package
from fsdplab.common.sizes import parse_size, seconds, size
from fsdplab.common.words import did_you_mean, near

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", ["files", "names", "words", "sizes", "processes", "lazy", "rows"])
def test_examples_in_docstrings_hold(name):
    assert doctest.testmod(import_module(f"fsdplab.common.{name}")).failed == 0


def test_it_imports_the_standard_library_only():
    modules = "files, lazy, names, processes, rows, sizes, words"
    code = f"import sys; before = set(sys.modules); from fsdplab.common import {modules}; print(*sys.modules - before)"
    code = code.replace("sys.modules - before", "(set(sys.modules) - before)")
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert {name.partition(".")[0] for name in loaded} <= {*sys.stdlib_module_names, "fsdplab"}


def test_every_table_has_the_strategies_of_the_engine():
    from fsdplab.common.names import STRATEGIES
    from fsdplab.engine import STRATEGIES as DONE
    from fsdplab.figures.style import STRATEGY_COLOURS
    from fsdplab.sessions.spec import ENGINES

    assert STRATEGIES == tuple(DONE) == ENGINES["twin"]
    assert (*STRATEGIES, "twin") == tuple(STRATEGY_COLOURS) and set(ENGINES["lab"]) == set(STRATEGIES)


def test_every_table_has_the_categories():
    from fsdplab import records
    from fsdplab.common.names import CATEGORIES
    from fsdplab.figures import CATEGORY_COLOURS
    from fsdplab.profiling.causes.memory import ways_to_lower

    assert CATEGORIES == records.CATEGORIES == tuple(CATEGORY_COLOURS)
    assert all(ways_to_lower({}, category) for category in CATEGORIES)


def test_a_file_is_replaced_as_a_whole(tmp_path: Path):
    path = tmp_path / "run.json"
    write_whole(path, "one\n")
    write_whole(path, b"\xff two")
    assert path.read_bytes() == b"\xff two" and os.listdir(tmp_path) == ["run.json"]


def test_what_could_not_be_written_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch):
    path = tmp_path / "run.json"
    write_whole(path, "one")

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "two")
    assert path.read_text() == "one" and os.listdir(tmp_path) == ["run.json"]


@pytest.mark.parametrize(
    "got,expected",
    [
        ("Full-Shard", "full_shard"),
        ("fullshard", "full_shard"),
        ("gpt 20m", "gpt-20m"),
        ("nvlnk4", "nvlink4"),
        ("ZERO1", "zero1"),
    ],
)
def test_near_words(got, expected):
    assert near(got, ["full_shard", "no_shard", "zero1", "gpt-20m", "nvlink4"])[0] == expected
    assert expected in did_you_mean(got, [expected, "something else"])


@pytest.mark.parametrize("got", ["", "xyzzy", None, 7])
def test_nothing_near_says_nothing(got):
    assert did_you_mean(got, ["full_shard", "zero1"]) == ""


@pytest.mark.parametrize(
    "text,nbytes", [("300MB", 300e6), ("1.5 gb", 1.5e9), ("2GiB", 2**31), ("7", 7), ("1_000kB", 1e6), (".5kb", 500)]
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "0", "0.2", "1e3", "nan", "inf", "3 parsecs", "1,5GB", "²", "9" * 400, "300MB."]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match="is no size; expected one such as 300MB"):
        parse_size(text)


def test_sizes_and_durations_are_written():
    assert [size(each) for each in (None, 0, 999, 1536, 300_000_000, 2.5e9)] == [
        "–", "0 B", "999 B", "1.54 kB", "300 MB", "2.50 GB"
    ]  # fmt: skip
    assert [seconds(each) for each in (None, 2.5e-5, 0.0153, 1.4)] == ["–", "25.0 µs", "15.3 ms", "1.40 s"]
    assert [seconds(each) for each in (-1.4, -0.0153)] == ["-1.40 s", "-15.3 ms"]
    assert [seconds(each) for each in (0, 1e-10, 1e-8)] == ["0", "0", "0.01 µs"], "never 0.00 µs"


def test_a_package_is_hidden_for_some_imports_only():
    sys.modules.pop("this", None)
    with without_package("this"), pytest.raises(ImportError, match="this"):
        import_module("this")
    with without_package("doctest"):
        assert import_module("doctest") is doctest, "what is imported already stays"
    assert "this" not in sys.modules and sys.modules["doctest"] is doctest


def test_commands_on_the_course_do_not_wait_for_what_no_notebook_needs():
    program = (
        "import sys, fsdplab.teaching.__main__ as _; print('nbformat' in sys.modules, 'rfc3987_syntax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == "True False\n", done.stderr


@pytest.mark.skipif(not Path("/proc").exists(), reason="only /proc tells a process that waits to be collected")
def test_a_process_that_ended_is_gone_before_it_is_collected():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    assert not gone(child.pid) and state(child.pid)[1] == os.getpid()
    send_group(child.pid, signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert gone(child.pid)
    child.wait()
    assert gone(child.pid) and state(child.pid) == ("", 0)
    send(child.pid, signal.SIGTERM), send_group(child.pid, signal.SIGTERM)  # nobody is there: nothing happens


def test_files_written_whole_have_temporary_names_of_their_own(tmp_path, monkeypatch):
    """A link in the place of the name that a process of this number would take is not followed, and two threads that
    write one file both succeed.
    """
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / f".run.json.{os.getpid()}.unfinished").symlink_to(mine)
    (tmp_path / f".fsdplab-{os.getpid()}.trial").symlink_to(mine)
    try_folder(tmp_path)
    write_whole(tmp_path / "run.json", "{}")
    assert mine.read_text() == "mine" and (tmp_path / "run.json").read_text() == "{}"
    assert (tmp_path / "run.json").stat().st_mode == mine.stat().st_mode

    moved, both = os.replace, threading.Barrier(2, timeout=20)

    def move_together(*names):
        both.wait()
        moved(*names)

    monkeypatch.setattr(os, "replace", move_together)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda text: write_whole(tmp_path / "shared", text), ("a" * 9, "b" * 9)))
    assert (tmp_path / "shared").read_text() in ("a" * 9, "b" * 9) and len(list(tmp_path.iterdir())) == 5


def test_a_command_that_cannot_be_run_prints_nothing(tmp_path, monkeypatch):
    """A file without the right to run, one that is no program, none at all, one that fails; bytes that are no text."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    for name, text, rights in (
        ("no-right", "", 0o644),
        ("no-program", "x", 0o755),
        ("fails", "#!/bin/sh\necho yes; exit 3\n", 0o755),
        ("prints", "#!/bin/sh\nprintf 'yes \\377'\n", 0o755),
    ):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(rights)
    assert [output_of(name) for name in ("no-right", "no-program", "fails", "absent")] == [""] * 4
    assert output_of("prints") == "yes \ufffd"


@pytest.mark.parametrize("attempt", [try_output, try_folder, lambda path: write_output(path, "a page")])
def test_links_that_lead_back_to_themselves_are_an_error_of_the_system(tmp_path, attempt):
    """Python's own is a RuntimeError before 3.13, which a command printed as a traceback."""
    (tmp_path / "one").symlink_to(tmp_path / "two")
    (tmp_path / "two").symlink_to(tmp_path / "one")
    with pytest.raises(OSError, match="Too many levels of symbolic links") as caught:
        attempt(tmp_path / "one")
    assert caught.value.filename == str(tmp_path / "one")
