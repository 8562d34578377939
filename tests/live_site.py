"""What tests of the pages that run Python in the browser share: Pyodide's files, a small site, and a host of it.

Fixtures are known to all tests (conftest.py), so what only the course needs is imported inside of them.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

PYODIDE = os.environ.get("FSDPLAB_PYODIDE")
needs_pyodide = pytest.mark.skipif(
    PYODIDE is None, reason="FSDPLAB_PYODIDE names no folder of Pyodide's files; .ci/run takes them from npm"
)


@pytest.fixture(scope="session")
def small_course(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one notebook, which needed no run."""
    import nbformat
    from nbformat.v4 import new_markdown_cell, new_notebook

    folder = tmp_path_factory.mktemp("executed")
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 01 Small things\n\nNothing.")]), folder / "01_small.ipynb")
    return folder


@pytest.fixture(scope="session")
def live_site(small_course: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of that course's site, whose pages find Pyodide's files beside them."""
    from fsdplab.teaching.site.build import build_site
    from fsdplab.teaching.site.live import pyodide

    folder = tmp_path_factory.mktemp("live") / "site"
    build_site(small_course, folder, live=pyodide(PYODIDE))
    return folder


@pytest.fixture
def empty_pyodide(tmp_path: Path) -> Path:
    """A folder with files of the names of Pyodide's, none of which can be run."""
    from fsdplab.teaching.site.live import NAMES

    folder = tmp_path / "pyodide"
    folder.mkdir()
    for name in NAMES[NAMES.index("pyodide.mjs") :]:
        (folder / name).write_bytes(b"\xff" + name.encode())
    return folder


class Host:
    """A static host of a folder, which can be taken away."""

    def __init__(self, folder: Path) -> None:
        quiet = type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(quiet, directory=str(folder)))
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.server.shutdown()
        self.server.server_close()
