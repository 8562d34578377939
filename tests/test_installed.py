"""A wheel holds all that commands and the course read: built, installed in a folder, and used far from the clone.

The installed copy is put before everything else on the path, with the other packages of this environment behind it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fsdplab import __version__
from fsdplab.common import places

pytestmark = pytest.mark.timeout(600)  # notebooks and builds on a machine that others use too
ROOT = Path(__file__).resolve().parents[1]
PARTS = ("fsdplab", "notebooks", "data", "pyproject.toml", "setup.py", "README.md", "LICENSE")
END = "=== end ==="
ONE_AFTER_THE_OTHER = f"""
import ast, sys
from fsdplab import cli
for arguments in ast.literal_eval(sys.argv[1]):
    try:
        cli.main(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
    print({END!r}, flush=True)
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    """What the command printed; the test fails with all of it where its exit status is not 0."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FSDPLAB"))}
    done = subprocess.run(
        command, cwd=cwd, env={**inherited, **environment}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def copied(source: Path, parts: tuple[str, ...] = PARTS) -> Path:
    """`source`, filled with what a build reads: the clone gets no build folder."""
    for part in parts:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, source / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / part, source / part)
    return source


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, built from a copy."""
    source, target = copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("wheel")
    (source / "notebooks" / "my_fsdp").mkdir(exist_ok=True)
    (source / "notebooks" / "my_fsdp" / "mine.md").write_text("somebody's work")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--wheel-dir", str(target), ".", cwd=source)
    return next(target.glob("fsdplab-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the wheel was installed in."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    run(*pip, "--target", str(site), str(wheel), cwd=site)
    return site


@pytest.fixture
def fsdplab(installed: Path, tmp_path: Path):
    """The installed command, run in an empty folder."""

    def command(*arguments: str) -> str:
        return run(sys.executable, "-m", "fsdplab", *arguments, cwd=tmp_path, PYTHONPATH=str(installed))

    return command


def test_a_wheel_holds_the_course_and_the_data_and_nobodys_work(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    within = f"fsdplab/{places.IN_A_WHEEL}/"
    held = {name.removeprefix(within) for name in names if name.startswith(within)}
    notebooks = {f"notebooks/{path.name}" for path in (ROOT / "notebooks").glob("*.ipynb")}
    data = {path.relative_to(ROOT).as_posix() for path in (ROOT / "data").rglob("*.*") if path.is_file()}
    assert len(notebooks) >= 13 and "data/published.csv" in data
    assert held == notebooks | data | {"notebooks/README.md", "notebooks/GLOSSARY.md"}
    assert not [name for name in names if name.startswith(("tests/", "notebooks/", "data/")) or "conftest" in name]
    assert wheel.stat().st_size < 5_000_000


def test_the_installed_copy_is_the_one_that_runs(installed, tmp_path):
    code = (
        "import fsdplab; from fsdplab.common import places as p;"
        " print(fsdplab.__file__, p.checkout(), p.how_to_install('lab'))"
    )
    said = run(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=str(installed))
    assert said.startswith(f"{installed}/fsdplab/__init__.py None pip install ")
    assert '"jupyterlab' in said and '"plotly' in said and "fsdplab[" not in said


def test_commands_work_where_there_is_no_clone(installed, tmp_path):
    """One process for all of them: each would import torch again."""
    traces = installed / "fsdplab" / places.IN_A_WHEEL / "data" / "traces-torch-2.1"
    commands = (
        ["--help"],
        ["plan", "--model", "gpt2", "--world-size", "8"],
        ["report", str(traces), "--html", "page.html"],
        ["doctor"],
    )
    said = run(sys.executable, "-c", ONE_AFTER_THE_OTHER, repr(commands), cwd=tmp_path, PYTHONPATH=str(installed))
    helped, planned, reported, checked = said.split(END)[:4]
    assert "compare" in helped and "at the peak" in planned
    assert "exposed" in reported and (tmp_path / "page.html").stat().st_size > 100_000
    assert "ready for: plans and recorded runs" in checked and "pip install -e" not in checked


def test_a_comparison_trains_where_there_is_no_clone(fsdplab):
    said = fsdplab("compare", "--strategies", "full_shard", "--model", "gpt-tiny", "--steps", "1", "--profile", "0")
    assert "Losses agree with the unsharded twin's." in said
    assert "a card of" not in said, "330 MB is the card of the default model, and says nothing of another"


def test_the_course_is_there_and_lesson_08_reads_its_trace(fsdplab, installed, tmp_path):
    built = fsdplab("course", "build").split()
    assert len(built) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    (tmp_path / "one").mkdir()
    source = installed / "fsdplab" / places.IN_A_WHEEL / "notebooks" / "08_reading_a_trace.ipynb"
    shutil.copy2(source, tmp_path / "one")
    assert "08_reading_a_trace.ipynb (learner): ran to its end" in fsdplab(
        "course", "test", "one", "--edition", "learner"
    )


# ---- a source distribution

MORE = ("tests", "docs", ".ci", ".github", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", ".gitignore")
CHECKED = ("tests/test_common.py", "tests/test_intervals.py", "tests/test_records.py")


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, built from a copy of the clone and unpacked."""
    source, target = copied(tmp_path_factory.mktemp("clone")), tmp_path_factory.mktemp("unpacked")
    copied(source, MORE)
    (source / "tests" / "__pycache__").mkdir()
    (source / "tests" / "__pycache__" / "x.pyc").touch()
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(target)!r})"
    run(sys.executable, "-c", build, cwd=source)
    shutil.unpack_archive(next(target.glob("fsdplab-*.tar.gz")), target, filter="data")
    return target / f"fsdplab-{__version__}"


def test_a_source_distribution_holds_what_a_clone_holds(unpacked):
    held = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode == 0:
        assert {name for name in listed.stdout.split("\n") if name and (ROOT / name).exists()} - held == set()
    assert {"tests/conftest.py", "docs/engine.md", "notebooks/conftest.py", "LICENSE"} <= held
    assert not [name for name in held if "__pycache__" in name or "my_fsdp" in name]
    said = (unpacked / "PKG-INFO").read_text(encoding="utf-8")
    assert "License-Expression: Apache-2.0\n" in said and f"\nVersion: {__version__}\n" in said


def test_its_tests_pass_where_it_is_installed(unpacked, tmp_path):
    """A few of the quick ones, against the copy that was installed from it."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run(*pip, "--target", str(tmp_path / "site"), ".", cwd=unpacked)
    shutil.copytree(unpacked / "tests", tmp_path / "tests")
    shutil.copy2(unpacked / "pyproject.toml", tmp_path)
    arguments = ["-q", "-n", "0", "-p", "no:cacheprovider", *CHECKED]
    said = run(sys.executable, "-m", "pytest", *arguments, cwd=tmp_path, PYTHONPATH=str(tmp_path / "site"))
    assert " passed" in said and "failed" not in said


# ---- in a clone


def test_an_editable_clone_works_in_the_folder_above_it(tmp_path):
    """Where Python finds a folder of the package's name first."""
    clone, site = tmp_path / "fsdplab", tmp_path / "site"
    clone.mkdir()
    copied(clone)
    build = f"from setuptools.build_meta import build_editable; build_editable({str(site)!r})"
    run(sys.executable, "-c", build, cwd=clone)
    zipfile.ZipFile(next(site.glob("*.whl"))).extractall(site)
    look = f"import site; site.addsitedir({str(site)!r}); import fsdplab; print(fsdplab.__file__, fsdplab.__version__)"
    said = run(sys.executable, "-S", "-c", look, cwd=tmp_path)  # -S: not the package that this environment has
    assert said.split() == [f"{clone}/fsdplab/__init__.py", __version__]


def test_advice_in_a_clone_installs_the_clone(monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    assert places.how_to_install("lab") == 'pip install -e ".[lab]"'
    monkeypatch.chdir(tmp_path)
    assert places.how_to_install("peers") == f'pip install -e "{ROOT}[peers]"'
    assert places.shared_folder("data") == ROOT / "data"


def test_somebodys_own_notebooks_are_not_taken_for_the_course(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "my experiments.ipynb").write_text("{}")
    assert places.course_folder() == ROOT / "notebooks"
    (tmp_path / "notebooks" / "01_of_a_course.ipynb").write_text("{}")
    assert places.course_folder() == tmp_path / "notebooks"


def test_no_message_sends_to_a_package_index_for_fsdplab():
    """`pip install fsdplab` may install something else: messages ask how_to_install, or give a wheel's address."""
    texts = [*(ROOT / "fsdplab").rglob("*.py"), *(ROOT / "notebooks").glob("*.ipynb"), *ROOT.glob("*.md")]
    named = re.compile(r"pip install (?:-\S+ )*[\\\"']*fsdplab(?!\[notebook\] @ )")
    assert [path.name for path in texts if named.search(path.read_text(encoding="utf-8"))] == []
