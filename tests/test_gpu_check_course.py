"""The course as scripts: cells and magics in Python, packages that are not there left out by name, every other error a
failure.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fsdplab.gpu_check.cells import NotebookError, code_cells, marked_cells, script_of
from fsdplab.gpu_check.course import main, notebooks
from fsdplab.gpu_check.script import missing_package
from fsdplab.gpu_check.sheets import read_sheet
from fsdplab.gpu_check.tree import running

ROOT = Path(__file__).resolve().parents[1]
SOURCES = sorted((ROOT / "notebooks").glob("*.ipynb"))
# A module that is None in sys.modules cannot be imported, by ranks neither: what a machine with torch and numpy alone
# says.
ALONE = "import sys\n"
ALONE += (
    "for name in ('plotly', 'IPython', 'ipywidgets', 'anywidget', 'pandas', 'typer', 'rich', 'tqdm', 'nbformat'):\n   "
    " sys.modules[name] = None\n"
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """An environment in which Python finds torch and numpy, and none of the packages for figures, notebooks and the
    command line.
    """
    folder = tmp_path_factory.mktemp("alone")
    (folder / "sitecustomize.py").write_text(ALONE)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def notebook(path: Path, *cells: str) -> Path:
    listed = [
        {"cell_type": "code", "id": f"c{number}", "source": text.splitlines(keepends=True)}
        for number, text in enumerate(cells, 1)
    ]
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A lesson"]}, *listed]}))
    return path


def course(folder: Path, alone: dict[str, str], *flags: str, seconds: float = 150.0) -> dict:
    """The sheet of the course part, run without the outer packages."""
    command = [
        sys.executable,
        "-m",
        "fsdplab.gpu_check.course",
        "--device",
        "cpu",
        "--out",
        str(folder / "out"),
        "--seconds",
        str(seconds),
        *flags,
    ]
    done = subprocess.run(command, cwd=folder, env=alone, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return read_sheet(folder / "out" / "course.json", "course") | {"printed": done.stdout}


# ---- from cells to a script


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_every_notebook_is_a_script(path):
    script = script_of(path)
    ast.parse(script)
    marks = marked_cells(script)
    assert [(number, name) for _, number, name in marks] == [(cell.number, cell.id) for cell in code_cells(path)]
    assert not any(line.startswith(("%", "!")) for line in script.splitlines())


def test_magics_become_calls(tmp_path):
    path = notebook(
        tmp_path / "01_a.ipynb",
        "x = 1\nx",
        "%%ranks 3\nprint('a', rank)",
        "%%exercise 01.ring\ndef ring():\n    return 1",
        "!ls -l",
        "%ranks 3",
        "%%ranks[0,2]\nrank",
    )
    script = script_of(path)
    assert "\nmanage_ranks('3')\n" in script and "run_ranks('[0,2]', 'rank')" in script
    assert (
        "run_ranks('3', \"print('a', rank)\")" in script
        and "run_exercise('01.ring', 'def ring():\\n    return 1', globals())" in script
    )
    assert (
        "subprocess.run('ls -l', shell=True, check=True)" in script
        and "from fsdplab.teaching.core.cell_runs import manage_ranks, run_ranks" in script
    )


@pytest.mark.parametrize(
    "cell,words", [("%%bash\nls", "begins with %%bash"), ("x = 1\n%timeit x", "has the magic '%timeit x'")]
)
def test_a_magic_without_a_counterpart_is_refused(tmp_path, cell, words):
    with pytest.raises(NotebookError, match=words):
        script_of(notebook(tmp_path / "01_a.ipynb", cell))


def test_a_file_that_is_no_notebook_is_refused(tmp_path):
    (tmp_path / "01_a.ipynb").write_text("not JSON")
    with pytest.raises(NotebookError, match="01_a.ipynb is no notebook"):
        script_of(tmp_path / "01_a.ipynb")


def test_notebooks_are_chosen_by_number():
    assert list(notebooks(ROOT / "notebooks", ())) and not {"00", "16"} & set(notebooks(ROOT / "notebooks", ()))
    assert [path.name[:2] for path in notebooks(ROOT / "notebooks", ("03", "01")).values()] == ["01", "03"]
    with pytest.raises(ValueError, match="--notebooks has '99'; expected some of 00, 01"):
        notebooks(ROOT / "notebooks", ("99",))


def test_a_notebook_that_is_not_there_is_refused_in_one_line(tmp_path, capsys):
    assert main(["--device", "cpu", "--out", str(tmp_path), "--notebooks", "99"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_only_packages_from_outside_may_be_missing():
    assert missing_package(ModuleNotFoundError("", name="no_such_package.inner")) == "no_such_package"
    for name in ("fsdplab.no_such_room", "my_fsdp", "torch.no_such_module", None):
        assert missing_package(ModuleNotFoundError("", name=name)) is None


# ---- running them


def test_what_needs_a_missing_package_is_left_out_and_the_rest_runs(tmp_path, alone):
    first = (
        "from fsdplab.figures import step_time\nfrom fsdplab import RunSpec, teaching\nfrom fsdplab.teaching import"
        " ask, show\nteaching.start(edition='teacher')"
    )
    figures = "import plotly.graph_objects as go\nfigure = go.Figure()\nvalue = 7"
    rest = (
        "figure",
        "show(figure)",
        "value * 6",
        "from IPython.display import Code, display\nx = Code('a') + 1",
        "%%ranks 2\nprint('rank', rank)",
    )
    notebook(tmp_path / "01_a.ipynb", first, figures, *rest)
    found = course(tmp_path, alone, "--folder", str(tmp_path), "--notebooks", "01")
    (row,) = found["rows"]
    assert (row["status"], row["cells"], row["cells_ran"], row["of_these_in_part"], row["left_out"]) == (
        "ran",
        7,
        4,
        1,
        3,
    )
    assert row["needs"] == "IPython plotly" and row["error"] is None
    log = (tmp_path / "out" / "01" / "log.txt").read_text()
    assert "\n42\n" in log and "[rank 1] rank 1" in log and "(left out, needs plotly: figure)" in log
    expected = "every cell, or only packages missing"
    assert found["checks"][0] == {
        "name": "notebook 01 runs to its end",
        "passed": True,
        "got": "ran, 4 of 7 cells",
        "expected": expected,
    }


def test_an_error_is_a_failure_of_its_notebook_and_the_others_run(tmp_path, alone):
    notebook(tmp_path / "01_a.ipynb", "x = 1", "x / 0", "print('not reached')")
    notebook(tmp_path / "02_b.ipynb", "import fsdplab.no_such_room")
    notebook(tmp_path / "03_c.ipynb", "import os", "os._exit(3)")
    notebook(tmp_path / "04_d.ipynb", "%%bash\nls")
    notebook(tmp_path / "05_e.ipynb", "print('fine')")
    found = course(tmp_path, alone, "--folder", str(tmp_path), "--notebooks", "01,02,03,04,05")
    rows = {row["notebook"]: row for row in found["rows"]}
    assert {number: row["status"] for number, row in rows.items()} == {
        "01": "failed",
        "02": "failed",
        "03": "failed",
        "05": "ran",
    }
    assert rows["01"]["failed_cell"] == "3 c2" and rows["01"]["error"] == "ZeroDivisionError: division by zero"
    assert (
        "no_such_room" in rows["02"]["error"]
        and rows["03"]["failed_cell"] == "3 its process"
        and "code 3" in rows["03"]["error"]
    )
    assert "ZeroDivisionError" in found["printed"] and "not reached" not in found["printed"]
    assert {check["name"]: check["passed"] for check in found["checks"]} == {
        **{f"notebook {number} runs to its end": False for number in ("01", "02", "03")},
        "notebook 04 is a script": False, "notebook 05 runs to its end": True,
        "every notebook fitted into the limit": True,
    }  # fmt: skip


def test_what_the_limit_does_not_hold_is_ended_and_named(tmp_path, alone):
    notebook(
        tmp_path / "01_a.ipynb",
        "import os, pathlib\npathlib.Path('pid').write_text(str(os.getpid()))",
        "import threading\nthreading.Event().wait()",
    )
    found = course(tmp_path, alone, "--folder", str(tmp_path), "--notebooks", "01", seconds=15.0)
    (row,) = found["rows"]
    assert (row["status"], row["cells"], row["cells_ran"]) == ("did not fit", 2, 1)
    assert found["checks"] == [
        {"name": "every notebook fitted into the limit", "passed": False, "got": "not 01", "expected": "all of them"}
    ]
    assert not running(int((tmp_path / "out" / "01" / "pid").read_text()))


def test_what_was_never_started_is_named(tmp_path, alone):
    notebook(tmp_path / "01_a.ipynb", "1")
    found = course(tmp_path, alone, "--folder", str(tmp_path), "--notebooks", "01", seconds=1.0)
    assert [row["status"] for row in found["rows"]] == ["not started"] and found["checks"][0]["got"] == "not 01"


@pytest.mark.timeout(300)
def test_a_lesson_of_the_course_runs_where_only_torch_and_numpy_are(tmp_path, alone):
    """Lesson 08: a recorded trace, an exercise on ranks, questions, a comparison of real runs; only its figures need
    plotly.
    """
    found = course(tmp_path, alone, "--notebooks", "08")
    (row,) = found["rows"]
    assert row["status"] == "ran" and row["needs"] == "plotly" and row["runs_on_cpu"] == 3
    assert row["left_out"] <= 4 and row["cells_ran"] + row["left_out"] == row["cells"]
