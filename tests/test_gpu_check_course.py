"""The course on a GPU machine: notebooks chosen by number, run as `fsdplab course test` runs them, each with its end
told: it ran, it failed and where, it did not fit.
"""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook

from fsdplab.gpu_check.course import first_error, main, notebooks
from fsdplab.gpu_check.runner import read_sheet, running

ROOT = Path(__file__).resolve().parents[1]


def notebook(path: Path, *cells: str) -> None:
    nbformat.write(new_notebook(cells=[new_code_cell(text) for text in cells]), path)


def course(folder: Path, *flags: str, seconds: float = 150.0) -> dict:
    """The sheet of the course part, which does its work in this process."""
    own = ["--device", "cpu", "--out", str(folder / "out"), "--seconds", str(seconds), "--folder", str(folder)]
    assert main([*own, *flags]) == 0
    return read_sheet(folder / "out" / "course.json", "course")


def test_notebooks_are_chosen_by_number():
    assert list(notebooks(ROOT / "notebooks", ())) and not {"00", "16"} & set(notebooks(ROOT / "notebooks", ()))
    assert [path.name[:2] for path in notebooks(ROOT / "notebooks", ("03", "01")).values()] == ["01", "03"]
    with pytest.raises(ValueError, match="--notebooks has '99'; expected some of 00, 01"):
        notebooks(ROOT / "notebooks", ("99",))


def test_a_notebook_that_is_not_there_is_refused_in_one_line(tmp_path, capsys):
    assert main(["--device", "cpu", "--out", str(tmp_path), "--notebooks", "99"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "printed,error",
    [
        ("a.ipynb (teacher): FAILED\ncell 2 (x / 0): ValueError: no, 3 s\n", "cell 2 (x / 0): ValueError: no"),
        ("a.ipynb (teacher): FAILED\ncell 2 (f()): ValueError: one,\ntwo, 3 s\n", "cell 2 (f()): ValueError: one,"),
        ("warning\na.ipynb is not a valid notebook: no JSON\n", "a.ipynb is not a valid notebook: no JSON"),
        ("", "nothing was printed"),
    ],
)  # fmt: skip
def test_the_first_error_is_found_in_what_was_printed(tmp_path, printed, error):
    (tmp_path / "log.txt").write_text(printed)
    assert first_error(tmp_path / "log.txt") == error


def test_an_error_is_a_failure_of_its_notebook_and_the_others_run(tmp_path, capsys):
    notebook(tmp_path / "01_a.ipynb", "x = 1", "x / 0", "print('not reached')")
    notebook(tmp_path / "03_c.ipynb", "import os", "os._exit(3)")
    (tmp_path / "04_d.ipynb").write_text("no JSON")
    notebook(tmp_path / "05_e.ipynb", "print('fine')")
    found = course(tmp_path, "--notebooks", "01,03,04,05")
    rows = {row["notebook"]: row for row in found["rows"]}
    assert {number: row["status"] for number, row in rows.items()} == {
        "01": "failed", "03": "failed", "04": "failed", "05": "ran",
    }  # fmt: skip
    assert rows["01"]["error"] == "cell 2 (x / 0): ZeroDivisionError: division by zero"
    assert "Kernel died" in rows["03"]["error"] and "04_d.ipynb is not a valid notebook" in rows["04"]["error"]
    assert rows["05"]["error"] is None and rows["05"]["seconds"] > 0
    printed = capsys.readouterr().out
    assert "ZeroDivisionError" in printed and "not reached" not in printed
    assert {check["name"]: check["passed"] for check in found["checks"]} == {
        **{f"notebook {number} runs to its end": False for number in ("01", "03", "04")},
        "notebook 05 runs to its end": True,
        "every notebook fitted into the limit": True,
    }


def test_what_the_limit_does_not_hold_is_ended_and_named(tmp_path):
    notebook(
        tmp_path / "01_a.ipynb",
        "import os, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))",
        "import threading\nthreading.Event().wait()",
    )
    found = course(tmp_path, "--notebooks", "01", seconds=25.0)
    (row,) = found["rows"]
    assert row["status"] == "did not fit" and row["seconds"] > 10
    assert found["checks"] == [
        {"name": "every notebook fitted into the limit", "passed": False, "got": "not 01", "expected": "all of them"}
    ]
    assert not running(int((tmp_path / "out" / "01" / "pid").read_text()))


def test_what_was_never_started_is_named(tmp_path):
    notebook(tmp_path / "01_a.ipynb", "1")
    found = course(tmp_path, "--notebooks", "01", seconds=1.0)
    assert [row["status"] for row in found["rows"]] == ["not started"] and found["checks"][0]["got"] == "not 01"
