"""Where records go: what a user keeps in a folder is never removed or overwritten, nor an earlier record unasked."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.cli.app import main
from fsdplab.records import RecordError, RunRecord
from fsdplab.records.folder import MARKER, claim_folder, claim_free_folder, is_record, release_folder
from fsdplab.sessions import RunSpec, run, run_and_record

pytestmark = pytest.mark.quick
TINY = RunSpec(model="gpt-tiny", steps=1, warmup=1, memory=False, device="cpu")
FLAGS = ["--model", "gpt-tiny", "--steps", "1", "--profile", "0"]


def tree(folder: Path) -> dict[str, str]:
    """Path -> content of all files below a folder."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes().hex() for path in folder.rglob("*") if path.is_file()
    }


def ended(arguments: list[str], capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize(
    "name", ["notes.txt", "ranks/mine.txt", "ranks/rank0.out", "steps.csv.gz", "traces/rank0.json"]
)
def test_a_folder_of_somebody_else_is_left_alone(tmp_path, name):
    """Also where its files have the names that a run uses."""
    mine = tmp_path / "data" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    before = tree(tmp_path)
    with pytest.raises(RecordError, match="holds other files .*; expected a new or empty folder"):
        run(TINY, directory=tmp_path / "data")
    assert tree(tmp_path) == before and not is_record(tmp_path / "data")


def test_a_record_is_replaced_and_notes_beside_it_stay(tmp_path):
    first = run(TINY, directory=tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    (tmp_path / "run" / "ranks").mkdir(exist_ok=True)
    (tmp_path / "run" / "ranks" / "thoughts.md").write_text("mine too")
    second = run(TINY, directory=tmp_path / "run")
    assert first.path == second.path and RunRecord.load(second.path).status == "finished"
    kept = tree(tmp_path / "run")
    assert kept["notes.txt"] == b"mine".hex() and kept["ranks/thoughts.md"] == b"mine too".hex()


def test_a_run_that_ended_in_the_middle_leaves_a_folder_that_can_be_used(tmp_path):
    claim_folder(tmp_path / "run")
    (tmp_path / "run" / "ranks").mkdir()
    (tmp_path / "run" / "ranks" / "rank0.steps").write_text("half a li")
    release_folder(tmp_path / "run")
    claim_folder(tmp_path / "run")
    assert tree(tmp_path / "run").keys() == {MARKER}
    claim_folder(tmp_path / "run", replace=False)  # nothing of a record is there


def test_a_run_that_could_not_begin_keeps_no_folder(tmp_path, monkeypatch):
    """A disk that is full when its spec, or the folder's marker, is written: the next run gets the folder."""

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for place, name in ((run_and_record, "write_whole"), (os, "pwrite"), (run_and_record.RunningRanks, "start")):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, full)
            with pytest.raises(OSError, match="No space left on device"):
                run(TINY, directory=tmp_path / "run")
        claim_folder(tmp_path / "run")
        release_folder(tmp_path / "run")


def test_a_run_without_an_end_is_no_record_and_no_job(tmp_path, capsys):
    """Ctrl-C, or one that goes on: `report` and `run` say so, though a recorded job has a file of the same name."""
    (tmp_path / "run" / "ranks").mkdir(parents=True)
    (tmp_path / "run" / "ranks" / "spec.json").write_text(json.dumps(TINY.as_dict()))
    (tmp_path / "run" / MARKER).touch()
    code, _, err = ended(["report", str(tmp_path / "run")], capsys)
    assert code == 2 and "run holds no run.json: its run was interrupted, or has not ended yet. Wait for" in err
    code, _, err = ended(["run", "zero1", *FLAGS, "--out", str(tmp_path / "run")], capsys)
    assert code == 2 and "run holds what a run without an end has left, which stays; give another folder" in err
    (tmp_path / "run" / "ranks" / "spec.json").write_text("")
    assert "holds no run.json" in ended(["report", str(tmp_path / "run")], capsys)[2]


def test_a_record_of_before_the_marker_is_one(tmp_path):
    run(TINY, directory=tmp_path)
    (tmp_path / MARKER).unlink()
    assert is_record(tmp_path)
    claim_folder(tmp_path)
    assert tree(tmp_path).keys() == {MARKER}


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "rank0.out").write_text("mine")
    claim_folder(tmp_path / "run")
    (tmp_path / "run" / "run.json").write_text("{}")
    (tmp_path / "run" / "ranks").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RecordError, match="is no folder of a record"):
        claim_folder(tmp_path / "run")
    assert (tmp_path / "elsewhere" / "rank0.out").read_text() == "mine"


def test_a_free_folder(tmp_path):
    assert claim_free_folder(tmp_path / "run") == tmp_path / "run"
    (tmp_path / "run-2").write_text("a file")
    (tmp_path / "run-3").mkdir()  # empty
    (tmp_path / "run-4").symlink_to(tmp_path / "run-3")
    assert claim_free_folder(tmp_path / "run") == tmp_path / "run-3"
    assert claim_free_folder(tmp_path / "run") == tmp_path / "run-5"


CLAIMS = """
import sys
from pathlib import Path
from fsdplab.records.folder import claim_folder, claim_free_folder
sys.stdin.readline()
print(claim_free_folder(Path("run")), flush=True)
sys.stdin.readline()
"""


def test_processes_that_claim_at_once_get_a_folder_each(tmp_path):
    """And nobody replaces the record of a run that goes on, asked to or not; when its process is killed, one may."""
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path, bufsize=1)
    claiming = [subprocess.Popen([sys.executable, "-c", CLAIMS], **pipes) for _ in range(8)]
    try:
        for process in claiming:
            process.stdin.write("go\n")
        got = [process.stdout.readline().strip() for process in claiming]
        assert sorted(got) == ["run", *(f"run-{number}" for number in range(2, 9))]
        with pytest.raises(RecordError, match="a run is writing into .*run; wait for its end, or give another folder"):
            claim_folder(tmp_path / "run")
    finally:
        for process in claiming:
            process.kill()
            process.communicate()
    claim_folder(tmp_path / "run", replace=False)


def test_a_run_of_this_process_is_not_replaced_either(tmp_path):
    (claim_folder(tmp_path / "run") / "run.json").write_text("{}")
    with pytest.raises(RecordError, match="a run is writing into"):
        claim_folder(tmp_path / "run")
    assert (tmp_path / "run" / "run.json").exists()


def test_the_command_asks_before_it_replaces(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for expected in ("runs/zero1-lab", "runs/zero1-lab-2"):
        code, out, _ = ended(["run", "zero1", *FLAGS, "-q"], capsys)
        assert code == 0 and f"recorded in {expected};" in out
    before = tree(tmp_path)
    code, _, err = ended(["run", "zero1", *FLAGS, "--out", "runs/zero1-lab"], capsys)
    stays = "holds an earlier record, which stays; give another folder, such as runs/zero1-lab-3"
    assert code == 2 and stays in err and "--force" not in err and tree(tmp_path) == before
    code, _, _ = ended(["run", "zero1", *FLAGS, "--out", "runs/zero1-lab", "--force", "-q"], capsys)
    assert code == 0 and tree(tmp_path) != before


def test_comparisons_ask_too(tmp_path, capsys):
    arguments = ["compare", "--strategies", "zero1", *FLAGS, "--keep", str(tmp_path / "kept"), "-q"]
    assert ended(arguments, capsys)[0] == 0
    before = tree(tmp_path)
    code, _, err = ended(arguments, capsys)
    assert code == 2 and "0-zero1-lab holds an earlier record" in err and tree(tmp_path) == before
    assert ended([*arguments, "--force"], capsys)[0] == 0
