"""Notebooks for Colab: a badge, a cell that installs the wheel where the lab is missing, links that lead somewhere.

Colab itself is not reached from here; a Python without the package stands for its machine.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import nbformat
import pytest

from fsdplab.teaching.__main__ import main
from fsdplab.teaching.authoring.colab import BADGE, INSTALL_CELL, Published
from fsdplab.teaching.authoring.course import CourseError
from tests.test_installed import wheel  # noqa: F401  a fixture

ROOT = Path(__file__).parents[1]
FOLDER = "ada/lab/tree/main/my course"
WHEEL = "https://example.org/fsdplab-0.2.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """The notebooks as they are published, by file name."""
    folder = tmp_path_factory.mktemp("colab") / "course"
    assert (
        main(["build", "--out", str(folder), "--colab", FOLDER.replace(" ", "%20"), "--wheel", WHEEL, "--quiet"]) == 0
    )
    return {path.name: nbformat.read(path, 4) for path in sorted(folder.glob("*.ipynb"))}


@pytest.mark.quick
def test_each_notebook_has_a_badge_that_opens_it_and_a_cell_that_installs(opened):
    assert len(opened) == len(list((ROOT / "notebooks").glob("*.ipynb")))
    for name, notebook in opened.items():
        nbformat.validate(notebook)
        title, _, badge = notebook.cells[0].source.split("\n")[:3]
        assert title.startswith(f"# {name[:2]} "), "pages and decks read the title there"
        image, address = re.fullmatch(r"\[!\[Open in Colab\]\((.+)\)\]\((.+)\)", badge).groups()
        assert image == BADGE
        assert unquote(address).endswith(f".google.com/github/ada/lab/blob/main/my course/{name}")
        code = [cell for cell in notebook.cells if cell.cell_type == "code"]
        assert code[0].id == INSTALL_CELL and f"fsdplab[notebook] @ {WHEEL}" in code[0].source
        assert "teaching.start" in "".join(cell.source for cell in code[1:4])


@pytest.mark.quick
def test_no_link_leads_to_a_file_that_colab_does_not_have(opened):
    texts = [cell.source for notebook in opened.values() for cell in notebook.cells if cell.cell_type == "markdown"]
    links = re.findall(r"\]\(([^)\s]+)", "\n".join(texts))
    assert [link for link in links if not link.startswith(("https://", "#", "attachment:", "data:"))] == []
    entry = "https://github.com/ada/lab/blob/main/my%20course/GLOSSARY.md#"
    assert any(link.startswith(entry) for link in links), "terms lead to their entry of the glossary"


@pytest.mark.quick
@pytest.mark.parametrize(
    ("folder", "wheel", "says"),
    [
        ("ada/lab", WHEEL, "expected a folder on GitHub, OWNER/REPO/blob/BRANCH/FOLDER"),
        ("https://gitlab.com/ada/lab/blob/main/x", WHEEL, "expected a folder on GitHub"),
        ("ada/lab/blob/", WHEEL, "expected a folder on GitHub"),
        (FOLDER, "fsdplab.whl", "expected the address of a wheel"),
        (FOLDER, "https://example.org/fsdplab.zip", "expected the address of a wheel"),
        (FOLDER, 'https://example.org/a" b.whl', "expected the address of a wheel"),
        (FOLDER, "https://example.org/{x}.whl", "expected the address of a wheel"),
        (FOLDER, "https://[x/fsdplab-1-py3-none-any.whl", "expected the address of a wheel"),
        (FOLDER, "https://example.org/foo-1-py3-none-any.whl", "expected the address of a wheel"),
        (FOLDER, WHEEL.replace("example.org", "github.com/o/r/blob/main"), "expected the address of a wheel"),
    ],
)
def test_other_addresses_are_refused(folder, wheel, says):  # noqa: F811
    with pytest.raises(CourseError, match=re.escape(says)):
        Published.at(folder.replace(" ", "%20"), wheel)


@pytest.mark.quick
def test_one_address_without_the_other_is_refused_and_writes_nothing(tmp_path, capsys):
    assert main(["build", "--out", str(tmp_path / "out"), "--wheel", WHEEL]) == 2
    assert "--colab and --wheel go together" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_notebook_runs_where_nothing_but_jupyter_and_torch_is_installed(wheel, tmp_path):  # noqa: F811
    """A Python that has this environment's packages but not fsdplab; the wheel comes over HTTP, as it would there."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(wheel.parent)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_port}/{wheel.name}"
        flags = [
            "--out",
            str(tmp_path / "course"),
            "--colab",
            "ada/lab/blob/main/course",
            "--wheel",
            address,
            "--quiet",
        ]
        assert main(["build", "--edition", "teacher", *flags]) == 0
        python = _python_without_the_lab(tmp_path / "machine")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FSDPLAB"))}
        without_index = {"PIP_NO_INDEX": "1", "PIP_NO_DEPS": "1"}
        empty = tmp_path / "empty"
        empty.mkdir()
        shutil.copy2(tmp_path / "course" / "08_reading_a_trace.ipynb", empty)
        done = subprocess.run(
            [python, "-m", "nbconvert", "--to", "notebook", "--execute", "--inplace", "08_reading_a_trace.ipynb"],
            cwd=empty,
            env={**inherited, **without_index},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
    finally:
        server.shutdown()
        server.server_close()
    asked = [python, "-c", "import fsdplab; print(fsdplab.__file__)"]
    used = subprocess.run(asked, cwd=empty, capture_output=True, text=True)
    assert used.stdout.startswith(str(tmp_path / "machine")), "the wheel was installed, and is what ran"


def _python_without_the_lab(folder: Path) -> str:
    """The interpreter of an environment with this one's packages: fsdplab's own line for its clone is not followed."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = str(folder / "bin" / "python")
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    missing = subprocess.run([python, "-c", "import fsdplab"], cwd=folder, capture_output=True, text=True)
    assert "No module named 'fsdplab'" in missing.stderr
    return python
