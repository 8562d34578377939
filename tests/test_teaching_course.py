"""Editions: what the build keeps and drops, which sources it refuses, and the course's own notebooks,
run to their end.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell

from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring import course, course_run
from fsdplab.teaching.authoring.course import CourseError, build_course, check_sources, read
from fsdplab.teaching.core import course_state, registry
from fsdplab.teaching.core.cell_runs import run_exercise
from fsdplab.teaching.core.registry import find
from tests import learner_edition

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
COLUMNS = 104  # of a code cell in a window of 1,280 px, the list of files open
START = new_code_cell('from fsdplab import teaching\nteaching.start(edition="teacher")')
HELLO = find("00.hello_ranks")


def tagged(cell, *tags):
    cell.metadata["tags"] = list(tags)
    return cell


def exercise_cells():
    """A stub and its solution, as `read` makes them of the cell below."""
    return [
        tagged(new_raw_cell(f"%%exercise 00.hello_ranks\n{HELLO.stub}"), "stub"),
        tagged(new_code_cell(f"%%exercise 00.hello_ranks\n{HELLO.reference}"), "solution"),
    ]


def exercise_cell():
    """The cell of an exercise as a source has it."""
    return new_code_cell("%%exercise 00.hello_ranks\n# The stub and the solution stand in its file")


def source(folder: Path, *cells, name="05_mine.ipynb") -> Path:
    """A folder with one source notebook."""
    folder.mkdir(exist_ok=True)
    nbformat.write(new_notebook(cells=list(cells)), folder / name)
    return folder


def texts(path: Path) -> list[tuple[str, str]]:
    return [(cell.cell_type, cell.source) for cell in read(path).cells]


@pytest.fixture
def good(tmp_path) -> Path:
    noisy = new_code_cell("print(1)", outputs=[new_output("stream", text="1\n")], execution_count=3)
    remark = tagged(new_markdown_cell("Ask the room."), "teacher")
    return source(tmp_path / "src", START, exercise_cell(), remark, tagged(noisy, "nbval-ignore-output"))


def test_each_notebook_ends_with_a_link_to_the_next():
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))
    last = [read(path).cells[-1].source for path in paths]
    for source_of_link, following in zip(last, paths[1:]):
        title = read(following).cells[0].source.splitlines()[0].removeprefix("# ")
        assert source_of_link == f"Next: [{title}]({following.name})"
    assert "Next:" not in last[-1]


def test_the_learner_edition_keeps_stubs_and_drops_solutions(good, tmp_path):
    (good / "text.txt").write_text("a teacher's own text")
    (good / "conftest.py").write_text("")
    built = build_course(good, tmp_path / "out", "learner")
    assert texts(built.notebooks[0]) == [
        (
            "code",
            START.source.replace("teacher", "learner", 2)
            .replace("import learner", "import teaching")
            .replace("learner.start", "teaching.start"),
        ),
        ("code", f"%%exercise 00.hello_ranks\n{HELLO.stub.rstrip()}"),
        ("code", "print(1)"),
    ]
    notebook = read(built.notebooks[0])
    assert notebook.metadata["fsdplab"] == {"edition": "learner"}
    assert all(cell.outputs == [] and cell.execution_count is None for cell in notebook.cells)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["05_mine.ipynb", "text.txt"]


def test_the_teacher_edition_keeps_solutions_and_drops_stubs(good, tmp_path):
    built = build_course(good, tmp_path / "out", "teacher")
    assert [text for _, text in texts(built.notebooks[0])] == [
        START.source,
        f"%%exercise 00.hello_ranks\n{HELLO.reference.rstrip()}",
        "Ask the room.",
        "print(1)",
    ]


def test_a_build_never_overwrites_a_learners_work(good, tmp_path):
    build_course(good, tmp_path / "out")
    with pytest.raises(CourseError, match="already holds 05_mine.ipynb"):
        build_course(good, tmp_path / "out")
    with pytest.raises(CourseError, match="already holds"):
        build_course(good, good)


@pytest.mark.parametrize(
    "cells,complaint",
    [
        ([START, tagged(new_code_cell("1"), "soluton")], r"05_mine.ipynb, cell 2: unknown tag 'soluton'"),
        ([START, tagged(new_code_cell("1"), "solution", "teacher")], "cell 2: has the tags solution, teacher"),
        ([START, exercise_cells()[0]], "cell 2: a stub without its solution"),
        (
            [START, exercise_cells()[0], new_markdown_cell("x"), exercise_cells()[1]],
            "cell 2: a stub without its solution",
        ),
        ([START, tagged(new_code_cell("answer(...)"), "stub"), exercise_cells()[1]], "cell 2: a stub is a raw cell"),
        ([START, new_code_cell("%%exercise 00.helo\n# in its file")], "cell 2: there is no exercise '00.helo'"),
        ([START, new_code_cell("%%exercise 00.helo\nx = 1")], "cell 2: there is no exercise '00.helo'"),
        ([START, new_code_cell("%%exercise\nx = 1")], "cell 2: '%%exercise' is not an exercise id"),
        (exercise_cells(), 'expected one start cell with edition="teacher", found 0'),
        ([START, new_code_cell(START.source), *exercise_cells()], "found 2"),
    ],
)
def test_bad_sources_are_refused_by_notebook_and_cell(tmp_path, cells, complaint):
    folder = source(tmp_path / "src", *(nbformat.from_dict(cell) for cell in cells))
    with pytest.raises(CourseError, match=complaint):
        build_course(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_exercises_cell_becomes_its_stub_and_its_solution(tmp_path):
    stub, solution = read(source(tmp_path / "src", exercise_cell()) / "05_mine.ipynb").cells
    assert (stub.cell_type, course.tags_of(stub), stub.source) == (
        "raw", ("stub",), f"%%exercise 00.hello_ranks\n{HELLO.stub.rstrip()}"
    )  # fmt: skip
    assert (solution.cell_type, course.tags_of(solution), solution.source) == (
        "code", ("solution",), f"%%exercise 00.hello_ranks\n{HELLO.reference.rstrip()}"
    )  # fmt: skip
    assert stub.id != solution.id


def test_a_cell_of_comments_stands_for_the_reference_in_the_teacher_edition_only(tmp_path, capsys):
    namespace = {}
    course_state.open_course("teacher", tmp_path / "my_fsdp")
    run_exercise("00.hello_ranks", "# in its file\n", namespace)
    assert course_state.current().workspace.source_of("00.hello_ranks").strip() == HELLO.reference.strip()
    course_state.open_course("learner", tmp_path / "other")
    with pytest.raises(Exception, match="the cell must define hello_ranks"):
        run_exercise("00.hello_ranks", "# in its file\n", {})
    course_state._open.clear()


OWN = '''"""Twice as much

Write twice(x): twice x.

1. A nudge.
2. A pointer.
3. `2 * x`.
"""


def twice(x):
    """Twice x."""
    ### BEGIN SOLUTION
    return 2 * x
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "a number", 3
'''


@pytest.mark.timeout(300)
def test_exercises_beside_own_notebooks_are_built_along_and_run(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_registered", {})
    folder = source(
        tmp_path / "src",
        START,
        new_code_cell("%%exercise 78.twice\n# in its file"),
        new_code_cell('teaching.check("78.twice")'),
    )
    (folder / "exercises" / "78").mkdir(parents=True)
    (folder / "exercises" / "78" / "twice.py").write_text(OWN)
    assert [run.failure for run in course_run.run_course(folder)] == [None, None]
    out = tmp_path / "learners"
    build_course(folder, out, "learner")
    assert (out / "exercises" / "78" / "twice.py").read_text() == OWN
    assert "    ..." in read(out / "05_mine.ipynb").cells[1].source
    (alone,) = course_run.run_course(out)
    assert (alone.edition, alone.failure) == ("as it is", None)


def test_what_is_no_course_is_refused(good, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(CourseError, match="holds no notebook"):
        build_course(tmp_path / "empty", tmp_path / "out")
    with pytest.raises(CourseError, match="unknown edition 'student'"):
        build_course(good, tmp_path / "out", "student")
    for text in (
        "not json",
        "[]",
        '{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [{"cell_type": "poem"}]}',
    ):
        (good / "06_broken.ipynb").write_text(text)
        with pytest.raises(CourseError, match="06_broken.ipynb is not a valid notebook"):
            build_course(good, tmp_path / "out")


def test_sources_hold_no_outputs_and_no_widget_state(good):
    assert check_sources(good) == ["05_mine.ipynb, cell 5: holds outputs; clear all outputs before saving a source"]
    notebook = read(good / "05_mine.ipynb")
    notebook.metadata["widgets"] = {}
    notebook.cells[0].source += "\n#" + "x" * course.MOST_BYTES
    nbformat.write(notebook, good / "05_mine.ipynb")
    assert [
        word in " ".join(check_sources(good)) for word in ("a source stays under 300,000", "saved widget state")
    ] == [True, True]


def test_a_folder_of_notebooks_is_run_to_its_end(tmp_path, capsys):
    folder = source(
        tmp_path / "own", new_code_cell("import pathlib\npathlib.Path('seen').write_text('x')"), name="01_fine.ipynb"
    )
    source(folder, new_code_cell("1"), new_code_cell("\nx = 1 / 0\n"), new_code_cell("2"), name="02_fails.ipynb")
    fine, fails = course_run.run_course(folder)
    assert (fine.failure, fine.edition, (folder / "seen").exists()) == (None, "as it is", True)
    assert fails.failure == "cell 2 (x = 1 / 0): ZeroDivisionError: division by zero"
    assert "02_fails.ipynb (as it is): FAILED" in str(fails)


def test_sources_are_run_in_both_editions(tmp_path):
    answers = [
        tagged(new_raw_cell('teaching.answer("02.cards", ...)'), "stub"),
        tagged(new_code_cell('teaching.answer("02.cards", 2)'), "solution"),
    ]
    teacher, learner = course_run.run_course(source(tmp_path / "src", START, *answers))
    assert (teacher.edition, learner.edition) == ("teacher", "learner")
    assert "CheckFailed" in teacher.failure and "that holds the bf16 parameters only" in teacher.failure
    assert learner.failure is None
    ((_, alone, _, complaint),) = course_run._editions(tmp_path / "src", ("learner",))
    assert (alone, complaint) == ("learner", None)
    assert not (tmp_path / "src" / "my_fsdp").exists(), "a test run keeps the learner's folder out of the way"


def test_a_source_that_cannot_be_built_fails_its_run(tmp_path):
    folder = source(tmp_path / "src", START, tagged(new_code_cell("1"), "solution", "oops"))
    assert ["unknown tag 'oops'" in run.failure for run in course_run.run_course(folder)] == [True, True]


def test_the_command_line_builds_and_tests(good, tmp_path, capsys, monkeypatch):
    assert main(["build", "--source", str(good), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "out" / "05_mine.ipynb")
    assert main(["build", "--source", str(good), "--out", str(tmp_path / "out")]) == 2
    assert "already holds" in capsys.readouterr().err
    own = source(tmp_path / "own", new_code_cell("1 / 0"), name="own.ipynb")
    assert main(["test", str(own)]) == 1
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert main(["test", str(tmp_path / "nowhere")]) == 2
    with pytest.raises(SystemExit):
        main(["build", "--edition", "student"])


# --- the course's own notebooks (plain `pytest` runs the teacher edition under nbval)


def test_the_courses_sources_are_in_order():
    assert check_sources(NOTEBOOKS) == []


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), ids=lambda path: path.name)
def test_cells_are_short_and_say_what_is_taught(path):
    notebook = read(path)
    written = [
        cell.source.splitlines()
        for cell in notebook.cells
        if cell.cell_type == "code" and not cell.source.startswith("%%exercise")  # which holds a file's solution
    ]
    lengths = sorted(sum(bool(line.strip()) for line in lines) for lines in written)
    assert statistics.median(lengths) <= 5 and lengths[int(0.9 * len(lengths)) - 1] <= 12 and lengths[-1] <= 25
    assert max(len(line) for lines in written for line in lines) <= 110
    assert any("What was real here" in cell.source for cell in notebook.cells)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("[0-9][0-9]_*.ipynb")), ids=lambda path: path.name)
def test_no_line_of_code_is_cut_on_a_small_screen(path):
    """How many columns fit is measured in tests/test_code_width_browser.py."""
    cells = [*read(path).cells, *course.edition_of(read(path), "learner").cells]
    lines = [
        line
        for cell in cells
        if cell.cell_type == "code" and "solution" not in course.tags_of(cell)
        for line in cell.source.splitlines()
    ]
    assert [line for line in lines if len(line) > COLUMNS] == []


@pytest.mark.timeout(300)
def test_a_learner_edition_runs_to_its_end_in_a_kernel_of_its_own(tmp_path):
    """Of one lesson, as `fsdplab course test` does it; notebooks/conftest.py runs what differs in every lesson."""
    notebook = course.edition_of(read(NOTEBOOKS / "05_one_sharded_unit.ipynb"), "learner")
    run = course_run.run_notebook("05_one_sharded_unit.ipynb", "learner", notebook, tmp_path, tmp_path / "my_fsdp")
    assert run.failure is None, run.failure
    printed = "".join(
        str(output.get("data", output))
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
    )
    assert "still the stub" in printed and "Not answered yet: click an answer" in printed


def test_a_kernels_start_prints_nothing_but_its_errors_are_printed(tmp_path, monkeypatch, capfd):
    """Also where the system's temporary folder has a name too long for a socket."""
    deep = tmp_path / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr(course_run.tempfile, "gettempdir", lambda: str(deep))
    asks = "import os\nfrom ipykernel.connect import get_connection_info\n"
    asks += "assert get_connection_info(unpack=True)['transport'] == 'ipc', 'nobody else can listen to a kernel'\n"
    asks += "os.system('echo an error of the kernel itself >&2')\n"
    asks += "os.system('echo \"[IPKernelApp] ERROR | KeyboardInterrupt caught in kernel.\" >&2')"
    run = course_run.run_notebook("a", "as it is", new_notebook(cells=[new_code_cell(asks)]), tmp_path, tmp_path / "f")
    assert run.failure is None and capfd.readouterr() == ("", "an error of the kernel itself\n")


# --- only what differs runs again


@pytest.fixture
def shell(tmp_path, monkeypatch):
    """A shell as a kernel has one, and a learner's folder."""
    monkeypatch.setenv("FSDPLAB_HOME", str(tmp_path / "teacher" / "my_fsdp"))
    yield InteractiveShell.instance()
    InteractiveShell.clear_instance()
    course_state._open.clear()


def learner_edition_of(shell, folder: Path, *cells) -> list[str]:
    """The first lines of the cells that ran again after the teacher edition of these."""
    path = source(folder / "src", START, *cells) / "05_mine.ipynb"
    learner_edition.watch(shell)
    for cell in read(path).cells:
        if cell.cell_type == "code":
            shell.run_cell(cell.source).raise_error()
    own = folder / "learner" / "my_fsdp"
    shell.run_cell(
        f"from tests import learner_edition; ran = learner_edition.run_learner_edition({str(path)!r}, {str(own)!r})"
    ).raise_error()
    return shell.user_ns["ran"]


UNSOLVED = [exercise_cell(), new_code_cell('teaching.check("00.hello_ranks")')]
UNANSWERED = [
    tagged(new_raw_cell('teaching.answer("01.busbw", ...)'), "stub"),
    tagged(new_code_cell('right = 0.8 * 1.5\nteaching.answer("01.busbw", right)'), "solution"),
]


def test_cells_run_again_where_the_edition_decides(shell, tmp_path):
    common = [
        new_code_cell("runs = ['slow']"),
        new_code_cell("def double(x):\n    return 2 * x"),
        new_code_cell("len(runs)"),
    ]
    changed = [
        new_code_cell("runs += [hello_ranks.__doc__]"),
        new_code_cell("shown = tuple(runs)"),
        new_code_cell("assert len(shown) == double(1)"),
    ]
    ran = learner_edition_of(shell, tmp_path, *common, *UNSOLVED, *changed, *UNANSWERED)
    assert ran[0] == "from fsdplab import teaching" and ran[1:3] == [
        "%%exercise 00.hello_ranks",
        'teaching.check("00.hello_ranks")',
    ]
    assert ran[3:] == [
        "runs += [hello_ranks.__doc__]",
        "shown = tuple(runs)",
        "assert len(shown) == double(1)",
        'teaching.answer("01.busbw", ...)',
    ]


def test_what_only_a_solution_defines_is_not_there(shell, tmp_path):
    with pytest.raises(
        AssertionError, match=r"learner edition, cell 5 \(right \* 2\): NameError: name 'right' is not defined"
    ):
        learner_edition_of(shell, tmp_path, *UNSOLVED, *UNANSWERED, new_code_cell("right * 2"))


def test_an_answer_is_a_cell_that_learners_do_not_have(shell, tmp_path):
    asked = [new_code_cell('teaching.ask("01.busbw")'), UNANSWERED[1]]
    with pytest.raises(AssertionError, match=r"cell 5 \(right \* 2\): NameError: name 'right' is not defined"):
        learner_edition_of(shell, tmp_path, *UNSOLVED, *asked, new_code_cell("right * 2"))


def test_stubs_that_say_nothing_are_noticed(shell, tmp_path):
    with pytest.raises(AssertionError, match="the stubs of .*05_mine.ipynb say nothing"):
        learner_edition_of(shell, tmp_path, *UNANSWERED)


def test_a_predicted_number_is_the_learners_too(shell, tmp_path):
    guess = [new_code_cell('peak = teaching.predict("05.mine", unit="MB")'), new_code_cell("peak.score(2)")]
    asks = new_code_cell("assert hello_ranks and teaching.calibration() is None")
    ran = learner_edition_of(shell, tmp_path, *guess, *UNSOLVED, asks, *UNANSWERED)
    assert "peak.score(2)" not in ran and (tmp_path / "learner" / "my_fsdp" / "predictions.json").exists()
