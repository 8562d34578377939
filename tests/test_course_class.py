"""What a class needs: tracks that fit their time, handouts, slides, progress, and a look at each machine."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from nbconvert import SlidesExporter

from fsdplab.cli import doctor
from fsdplab.common.pythons import run_of, with_this_checkout
from fsdplab.sessions.capabilities import Capability
from fsdplab.sessions.room import Room, measure_room
from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring import progress, tracks
from fsdplab.teaching.authoring.course import edition_of, read
from fsdplab.teaching.authoring.course_run import NotebookRun
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.workspace import Workspace
from fsdplab.teaching.site.handouts import handouts
from tests.test_cli_ends import files_of_at_most

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "notebooks"


@pytest.fixture(scope="module")
def found():
    return tracks.costs(SOURCES)


# --- timings and tracks


def test_the_tracks_fit_with_their_machine_time(found):
    for track in tracks.TRACKS:
        assert set(track.lessons) <= set(found)
        assert all(found[name].seconds is not None for name in track.lessons), "timed by a run"
        assert tracks.minutes_of(track, found) <= track.at_most, tracks.line_of(track, found)


def test_readme_names_the_tracks(found):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for track, words in zip(tracks.TRACKS, ("With half a day: ", "With a day: "), strict=True):
        named = re.search(rf"{words}([\d, ]+\d)", text).group(1).split(", ")
        assert named == list(track.lessons), track.name


def test_what_a_run_took_is_written_and_read(tmp_path, capsys):
    runs = [NotebookRun("00_a.ipynb", "teacher", 31.2, None), NotebookRun("00_a.ipynb", "learner", 44.0, "cell 3")]
    (tmp_path / "00_a.ipynb").write_text("{}")
    tracks.write_times(tmp_path / "times.csv", runs, tmp_path)
    assert (tmp_path / "times.csv").read_text().splitlines()[1:] == [
        "00_a.ipynb,teacher,31,2,ended", "00_a.ipynb,learner,44,2,failed",
    ]  # fmt: skip
    assert tracks.seconds_of(tmp_path / "times.csv") == {"00_a.ipynb": 44.0}
    assert main(["tracks"]) == 0
    said = capsys.readouterr().out
    assert "half a day: 00, 01, 02, 05" in said and "of at most 3:15" in said and "TOO LONG" not in said


def test_a_track_that_is_too_long_is_called_so():
    slow = {"00": tracks.Cost("00_a.ipynb", 190, 600.0, 1)}
    assert tracks.line_of(tracks.Track("half", ("00",), 195, {}), slow) == "half: 00: 3:20 of at most 3:15 TOO LONG"


@pytest.mark.parametrize("content", ["", "a,b\n1,2\n", "notebook,seconds\n00_a.ipynb,soon\n", None])
def test_a_file_that_holds_no_times_is_refused(tmp_path, capsys, content):
    if content is not None:
        (tmp_path / "times.csv").write_text(content)
    assert main(["tracks", "--times", str(tmp_path / "times.csv")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("fsdplab: ") and "times.csv" in err


def test_every_notebook_is_small(found):
    assert max(each.nbytes for each in found.values()) < 300_000


# --- a class


def test_progress_of_a_class(tmp_path, monkeypatch, capsys):
    ada, bob = (Workspace(tmp_path / name / "course-learner" / "my_fsdp") for name in ("ada", "bob"))
    passed = "def hello_ranks(): ...\n"
    ada.save("00.hello_ranks", passed)
    ada.note_pass("00.hello_ranks", passed)
    ada.write("predictions.json", {"00.peak": prediction(300, 345), "01.sent": prediction(5, 50)})
    for _ in range(4):
        bob.note_failure("05.shard")
    assert main(["progress", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["learner", "00", "01", "05"], "a prediction begins a notebook"
    assert re.match(r"ada\s+1/1\s+0/1\s+0/5\s+2 made, 1 of 2 near", lines[1])
    assert re.search(r"bob.*none\s+05\.shard \(4\)", lines[2])
    assert re.match(r"all done\s+1\s+0\s+0\s+of 2", lines[3])
    ada.save("00.hello_ranks", passed + "# changed\n")
    (first, *_) = [progress.learner(*each, {"00": ["00.hello_ranks"]}) for each in progress.workspaces_in([tmp_path])]
    assert first.passed == {"00": 0}, "what was changed has to be checked again"


def test_a_folder_without_learners_is_refused(tmp_path, capsys):
    assert main(["progress", str(tmp_path)]) == 2
    assert "no my_fsdp lies below" in capsys.readouterr().err
    assert main(["progress", str(tmp_path / "missing")]) == 2
    assert "missing is no folder" in capsys.readouterr().err


def test_a_learner_without_progress_is_listed_as_not_begun(tmp_path, capsys):
    ada = Workspace(tmp_path / "ada" / "my_fsdp")
    ada.write("predictions.json", {"00.peak": prediction(300, 345)})
    (tmp_path / "bob").mkdir()
    Workspace(tmp_path / "dora" / "my_fsdp").note_failure("05.shard")
    Workspace(tmp_path / "cleo" / "my_fsdp").path.mkdir(parents=True)
    assert main(["progress", *(str(tmp_path / name) for name in ("ada", "bob", "cleo", "dora"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["learner", "00", "predictions"], "a prediction begins a notebook"
    assert re.match(r"ada\s+0/1\s+1 made, 1 of 1 near", lines[1]), "predictions count"
    assert [line.split() for line in lines[2:4]] == [["bob", "0/1", "not", "begun"], ["cleo", "0/1", "not", "begun"]]
    assert "not begun" not in lines[4] and lines[-1].endswith("of 4"), "one failed check is a beginning"


def test_a_learner_has_the_name_of_the_folder_above_the_edition_from_wherever_it_is_seen(tmp_path, monkeypatch):
    work = tmp_path / "ada" / "course-learner"
    Workspace(work / "my_fsdp").open()
    (tmp_path / "link").symlink_to("ada")
    for folder, name in ((tmp_path, "ada"), (tmp_path / "ada", "ada"), (work, "ada"), (tmp_path / "link", "link")):
        assert [seen for seen, _ in progress.workspaces_in([folder])] == [name], folder
        monkeypatch.chdir(folder)
    monkeypatch.chdir(work)
    assert [seen for seen, _ in progress.workspaces_in([Path()])] == ["ada"]


@pytest.mark.parametrize(
    "file,content,words",
    [
        ("progress.json", b'{"00.hello', "is damaged"),
        ("progress.json", b'{"00.hello_ranks": true}', "holds a bool for '00.hello_ranks'"),
        ("predictions.json", b"[]", "holds a list"),
        ("predictions.json", b'{"00.peak": {"by_learner": true}}', "holds odd values"),
        ("00.hello_ranks.py", b"# gr\xfcn", "is not UTF-8"),
    ],
)
def test_a_damaged_folder_does_not_hide_those_of_the_others(tmp_path, capsys, file, content, words):
    for name in ("ada", "bob"):
        workspace = Workspace(tmp_path / name / "my_fsdp")
        workspace.save("00.hello_ranks", "def hello_ranks(): ...\n")
        workspace.note_pass("00.hello_ranks", "def hello_ranks(): ...\n")
    (tmp_path / "bob" / "my_fsdp" / file).write_bytes(content)
    assert main(["progress", str(tmp_path)]) == 0
    _, ada, bob, everybody = capsys.readouterr().out.splitlines()
    assert re.match(r"ada\s+1/1", ada) and re.match(r"all done\s+1\s+of 2", everybody)
    assert re.match(r"bob\s+cannot be read: ", bob) and words in bob


def test_predictions_of_an_older_format_are_nobodys(tmp_path, capsys):
    older = {"00.peak": {"unit": "MB", "predicted": 300, "measured": 345}}
    Workspace(tmp_path / "ada" / "my_fsdp").write("predictions.json", older)
    assert main(["progress", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["ada", "none"]


def prediction(predicted, measured):
    """As a learner's folder holds it."""
    return {"unit": "MB", "predicted": predicted, "measured": measured, "by_learner": True, "origin": "measured"}


# --- files that cannot be written or read


@pytest.mark.parametrize(
    "command",
    [
        ["build", "--out", "FILE"],
        ["build", "--out", "FILE/below"],
        ["handouts", "FILE/below"],
        ["handouts", "FOLDER"],
        ["test", "--times", "FOLDER"],
        ["tracks", "--times", "FOLDER"],
        ["leaderboard", "CLASS", "--out", "FOLDER"],
    ],
)
def test_a_wrong_place_is_one_line_before_anything_runs(tmp_path, capsys, command):
    places = {"FILE": tmp_path / "file", "FOLDER": tmp_path / "folder", "CLASS": tmp_path / "class"}
    places["FILE"].write_text("")
    places["FOLDER"].mkdir()
    (tmp_path / "class").mkdir()
    (tmp_path / "class" / "ada.py").write_text("")
    words = []
    for word in command:
        place, slash, rest = word.partition("/")
        words.append(f"{places.get(place, place)}{slash}{rest}")
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith(f"fsdplab: {tmp_path}")


def test_a_full_disk_leaves_no_part_of_an_edition(tmp_path, capsys):
    with files_of_at_most(18_000):
        assert main(["build", "--out", str(tmp_path / "out")]) == 2
    assert "File too large; give a writable place with free space" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.ipynb")), "a part of them would pass for a learner's course"
    assert main(["build", "--quiet", "--out", str(tmp_path / "out")]) == 0


@pytest.mark.full("a process that writes handouts, 4 s")
def test_a_name_that_the_terminal_cannot_show_is_shown_in_part(tmp_path):
    done = subprocess.run(
        run_of("fsdplab.teaching", "handouts", str(tmp_path / "hän.html")),
        env=with_this_checkout({**os.environ, "PYTHONIOENCODING": "ascii"}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout == f"{tmp_path}/h?n.html: open it in a browser and print it\n"


def test_a_command_shows_its_own_examples_only(capsys):
    with pytest.raises(SystemExit):
        main(["tracks", "--help"])
    examples = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert examples == ["  fsdplab course tracks", "  fsdplab course tracks --times mine.csv"]


# --- handouts and slides


def test_handouts_hold_questions_pictures_and_tasks_and_no_solution(tmp_path, capsys):
    out = tmp_path / "handouts.html"
    assert main(["handouts", str(out)]) == 0
    page = out.read_text(encoding="utf-8")
    assert (
        page.count("<section>") == len(list(SOURCES.glob("*.ipynb")))
        and page.count("<img src='data:image/svg+xml") >= 17
    )
    assert "05.unshard" in page and "Write unshard(" in page
    assert not re.search(r"Shift|Enter\b|\bclick", page), "paper has no keys"
    assert "<script" not in page
    for exercise in ("05.unshard", "03.average_in_hook", "10.crossover"):
        lines = [line.strip() for line in registry.find(exercise).reference.splitlines() if len(line.strip()) > 45]
        assert not [line for line in lines if line in page and not line.startswith(('"', "def"))]


def test_a_notebook_becomes_slides_as_it_is():
    notebook = edition_of(read(next(SOURCES.glob("05_*.ipynb"))), "teacher")
    page, _ = SlidesExporter().from_notebook_node(notebook)
    headings = sum(cell.metadata["slideshow"]["slide_type"] == "slide" for cell in notebook.cells)
    assert headings >= 5 and page.count("<section>") > 2 * headings, "a slide a heading, text below it"


def test_handouts_of_notebooks_of_ones_own(tmp_path):
    shutil.copy(next(SOURCES.glob("00_*.ipynb")), tmp_path / "78_mine.ipynb")
    assert handouts(tmp_path).count("<section>") == 1


# --- a room


@pytest.fixture
def machine(monkeypatch):
    """`machine(gloo=False)`: what this machine has, and a tiny run that ends at once."""

    def has(status="finished", **absent):
        found = [
            Capability(name, absent.get(name, True), "4", "start the network") for name in
            ("gloo", "plotly", "pandas", "jupyterlab", "ipywidgets", "deepspeed", "GPUs", "cores", "memory", "torch",
             "bf16 on the CPU")
        ]  # fmt: skip
        monkeypatch.setattr(doctor, "capabilities", lambda: found)
        ended = SimpleNamespace(status=status, failure="rank 1 died")
        room = Room(cores=4, free_bytes=8 * 10**9, bytes_a_rank=500 * 10**6)
        monkeypatch.setattr(doctor, "measure_room", lambda: (ended, room))

    return has


def test_a_machine_that_is_ready_says_so_in_one_line(machine):
    machine(deepspeed=False, GPUs=False)
    answer = doctor.room_answer()
    assert answer.code == 0 and len(answer.parts) == 1 and answer.parts[0].label == "READY"
    assert "two ranks trained in" in answer.parts[0].text
    assert "carries 16 ranks at once: 500 MB a rank, 8.00 GB free; 4 of them with a core each" in answer.parts[0].text
    assert (answer.data["room"]["ranks_by_memory"], answer.data["room"]["learners"]) == (16, 6)


def test_a_room_whose_memory_is_unknown_or_too_small():
    unknown = Room(cores=8, free_bytes=None, bytes_a_rank=None)
    assert unknown.ranks_by_memory is None and unknown.learners is None
    assert unknown.sentence.startswith("carries 8 ranks with a core each") and "not known here" in unknown.sentence
    small = Room(cores=8, free_bytes=10**9, bytes_a_rank=600 * 10**6)
    assert small.learners == 0 and "1 of them with a core each" in small.sentence


@pytest.mark.full("each machine of a class runs it")
@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process is known on Linux")
def test_ranks_of_a_room_are_measured():
    record, room = measure_room()
    assert record.status == "finished"
    assert room.bytes_a_rank > record.summary.peak_memory_bytes.total, "and what torch itself takes"
    assert room.free_bytes > room.bytes_a_rank


@pytest.mark.parametrize(
    ("status", "absent", "says"),
    [
        ("finished", {"gloo": False}, "lacks gloo; do: start the network"),
        ("finished", {"pandas": False}, "lacks pandas; do: "),
        ("crashed", {}, "two ranks did not train: rank 1 died"),
    ],
)
def test_a_machine_that_is_not_says_what_to_do(machine, status, absent, says):
    machine(status, **absent)
    answer = doctor.room_answer()
    assert answer.code == 1 and says in answer.parts[0].text and answer.parts[0].label == "NOT READY"
    assert json.dumps(answer.data)
