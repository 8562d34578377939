"""How commands end when the machine does not play along: full disks, poor terminals, no network, and signals."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from fsdplab.cli.terminal import Ended, signals_as_exceptions
from fsdplab.common.files import is_full, try_folder, try_output, write_output, write_whole
from fsdplab.common.processes import descendants
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.records import RunRecord, Spread, Summary
from fsdplab.sessions.launch.mailbox import Mailbox
from tests.leftovers import processes_of, until
from tests.test_cli import TINY, ended, heeds_hangups

SUMMARY = Summary(step_time_s=Spread.of([0.4, 0.5, 0.6]), tokens_per_s=9.0, losses=(5.0,))
SPEC = {"strategy": "full_shard", "engine": "lab", "world_size": 2}
dev_full = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return RunRecord(tmp_path / "record", spec=SPEC, summary=SUMMARY).save().path


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """As `ulimit -f` does; ranks inherit it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        run_of("fsdplab", *arguments), env=with_this_checkout({**os.environ, **environment}), capture_output=True
    )


# ---- full disks


@pytest.mark.quick
def test_a_file_that_cannot_be_written_whole_is_named_and_stays_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    with files_of_at_most(1000), pytest.raises(OSError) as raised:
        write_whole(path, "x" * 5000)
    assert is_full(raised.value) and raised.value.filename == str(path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


@pytest.mark.quick
def test_an_output_is_tried_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    try_output(tmp_path / "new")
    try_output(tmp_path / "old")
    try_folder(tmp_path / "a" / "b")
    try_output(Path("/dev/null"))
    with files_of_at_most(1000):
        for trial in (lambda: try_output(tmp_path / "new"), lambda: try_folder(tmp_path / "a" / "b")):
            with pytest.raises(OSError) as raised:
                trial()
            assert is_full(raised.value)
    for missing in (tmp_path / "no" / "file", tmp_path):
        with pytest.raises(OSError):
            try_output(missing)
    with pytest.raises(OSError):
        try_folder(tmp_path / "old" / "b")
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "before"


@pytest.mark.quick
def test_what_is_no_plain_file_is_written_into_and_a_link_is_followed(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_output(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text" and (tmp_path / "pipe").is_fifo()
    os.close(reader)
    (tmp_path / "target").write_text("before")
    (tmp_path / "link").symlink_to("target")
    write_output(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "target").read_text() == "after"


@dev_full
@pytest.mark.parametrize("flag", ["--json", "--html"])
def test_a_device_that_is_full_is_one_line(record: Path, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ended(["report", str(record), flag, "/dev/full"], capsys)
    assert code == 2 and err.startswith("fsdplab: /dev/full: No space left on device") and err.count("\n") == 1


@dev_full
def test_a_full_standard_output_is_one_line() -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            run_of("fsdplab", "--help"), env=with_this_checkout(os.environ), stdout=full, stderr=subprocess.PIPE
        )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1
    assert done.stderr.startswith(b"fsdplab: standard output: No space left on device")


def test_a_run_whose_files_grow_too_large_names_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gloo = ["--transport", "gloo", "--model", "gpt-tiny", "--sequence-length", "16", "--steps", "300"]
    with files_of_at_most(60_000):
        code, _, err = ended(["run", *gloo, "--profile", "0", "--out", str(tmp_path / "run")], capsys)
    assert code == 1 and err.count("\n") == 1 and "Traceback" not in err
    assert "File too large: '" in err and "rank" in err and "ulimit -f" in err
    assert processes_of(tmp_path) == []


def test_a_trace_that_grows_too_large_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with files_of_at_most(20_480):
        code, _, err = ended(["run", "--model", "gpt-tiny", "--steps", "1", "--out", str(tmp_path / "run")], capsys)
    assert code == 1 and err.count("\n") == 1 and "Traceback" not in err
    assert "the profiler did not write its trace" in err and "ulimit -f" in err
    assert processes_of(tmp_path) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["bench", "--json", "/no/such/b.json"],
        ["compare", "--keep", "/dev/null/records"],
        ["report", "--csv", "/dev/null/tables", "RECORD"],
        ["report", "--tensorboard", "/dev/null", "RECORD"],
        ["report", "--snapshot", "/dev/null/x", "RECORD"],
        ["report", "--perfetto", "/no/such/trace.json", "RECORD"],
    ],
    ids=" ".join,
)
def test_every_output_is_tried_before_anything_runs(
    record: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = ended([str(record) if each == "RECORD" else each for each in arguments], capsys)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "cannot be written" in err or "is a file" in err


# ---- poor terminals


@pytest.mark.parametrize(
    "environment",
    [{"PYTHONIOENCODING": "ascii"}, {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TERM": "dumb"}],
    ids=["encoding", "locale"],
)
def test_a_terminal_without_such_signs_gets_plain_ones(record: Path, environment: dict[str, str]) -> None:
    done = command("report", str(record), **environment)
    assert (done.returncode, done.stderr) == (0, b"") and b"500 ms" in done.stdout
    assert done.stdout.isascii() or "LC_ALL" in environment
    done = command("report", str(record) + "\udcff…", **environment)  # a name that is no text
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1 and b"does not exist" in done.stderr


# ---- no network


def test_no_loopback_is_one_line_before_a_rank_starts() -> None:
    code = "from fsdplab.sessions.launch.launcher import _check_loopback as check\ncheck()\n"
    apart = ["unshare", "-rn", sys.executable, "-c"]
    try:
        allowed = subprocess.run([*apart, "pass"], capture_output=True).returncode == 0
    except FileNotFoundError:
        allowed = False
    if not allowed:
        pytest.skip("no network namespace can be made here")
    done = subprocess.run([*apart, code], capture_output=True, text=True, env=with_this_checkout(os.environ))
    assert "SpecError: ranks meet at 127.0.0.1, which this machine does not reach" in done.stderr
    assert "ip link set lo up" in done.stderr
    assert subprocess.run([sys.executable, "-c", code], env=with_this_checkout(os.environ)).returncode == 0


# ---- signals


@pytest.mark.quick
def test_a_signal_is_raised_once_and_again_where_it_was_swallowed() -> None:
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with signals_as_exceptions(until_the_end=False) as signals:
        signals.look()
        with pytest.raises(Ended) as raised:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        assert raised.value.number == signals.number == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)  # while what was begun is cleaned up
        os.kill(os.getpid(), signal.SIGHUP)
        with pytest.raises(Ended) as again:
            signals.look()
        assert again.value.number == signal.SIGTERM
    assert handlers == [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_ended_leaves_nothing(tmp_path: Path, sent: signal.Signals) -> None:
    temporary, folder = tmp_path / "tmp", tmp_path / "run"
    temporary.mkdir()
    environment = with_this_checkout({**os.environ, "TMPDIR": str(temporary)})
    arguments = ["run", *TINY[:2], "--steps", "5000", "--sequence-length", "16", "--out", str(folder)]
    with subprocess.Popen(
        run_of("fsdplab", *arguments), env=environment, stdout=-1, stderr=-1, text=True, preexec_fn=heeds_hangups
    ) as process:
        until(Mailbox(folder / "ranks").of(0, "steps").exists, 90)
        process.send_signal(sent)  # to this process alone
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (128 + sent, "fsdplab: interrupted")
    assert list(temporary.glob("fsdplab-*")) == [] and processes_of(tmp_path) == []


_INTERRUPTED_IMPORT = """
import sys
class Interrupts:
    def find_spec(self, name, *_):
        if name == "fsdplab.cli.app":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupts())
from fsdplab.cli import main
main(["plan"])
"""


@pytest.mark.quick
def test_ctrl_c_while_the_command_line_is_imported_is_one_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _INTERRUPTED_IMPORT], env=with_this_checkout(os.environ), capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "fsdplab: interrupted\n")


@pytest.mark.skipif(sys.platform != "linux", reason="children are looked for in /proc")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_process_of_a_command_starts_is_one_line(sent: signal.Signals) -> None:
    with subprocess.Popen(
        run_of("fsdplab", "course", "tracks"), env=with_this_checkout(os.environ), stdout=-1, stderr=-1, text=True
    ) as process:
        until(lambda: descendants(process.pid), 60)
        process.send_signal(sent)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (128 + sent, "", "fsdplab: interrupted\n")


_WAITING = "import pathlib, time; pathlib.Path('begun').touch(); time.sleep(90)"


@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked for in /proc")
def test_a_signal_ends_a_run_of_notebooks_and_not_one_notebook(tmp_path: Path) -> None:
    for name in ("a", "b"):
        nbformat.write(new_notebook(cells=[new_code_cell(_WAITING)]), tmp_path / f"{name}.ipynb")
    environment = with_this_checkout({**os.environ, "TMPDIR": str(tmp_path)})
    with subprocess.Popen(
        run_of("fsdplab", "course", "test", str(tmp_path)), env=environment, stdout=-1, stderr=-1, text=True
    ) as process:
        until((tmp_path / "begun").exists, 90)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "fsdplab: interrupted\n")
    assert list(tmp_path.glob("fsdplab-*")) == [] and processes_of(tmp_path) == []


# ---- JupyterLab's port


@pytest.mark.parametrize("port", ["-1", "65536", "99999999999", "x"])
def test_an_impossible_port_is_refused(port: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ended(["lab", "--port", port], capsys)
    assert code == 2 and "--port" in err and err.count("\n") == 1


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        code, _, err = ended(["lab", "--edition", "teacher", "--port", str(other.getsockname()[1])], capsys)
    assert code == 2 and "cannot be used (Address already in use)" in err and err.count("\n") == 1


@pytest.mark.full("eight runs at once")
@pytest.mark.timeout(400)  # eight Pythons load torch
def test_eight_runs_at_once_in_one_folder_give_eight_records(tmp_path):
    flags = ["--model", "gpt-tiny", "--steps", "1", "--profile", "0", "-n", "1", "-q"]
    command = [sys.executable, "-m", "fsdplab", "run", "zero1", *flags]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    running = [subprocess.Popen(command, **pipes) for _ in range(8)]
    said = [(*process.communicate(), process.returncode) for process in running]
    assert [code for _, _, code in said] == [0] * 8, said
    records = [RunRecord.load(folder) for folder in (tmp_path / "runs").iterdir()]
    assert [record.status for record in records] == ["finished"] * 8
