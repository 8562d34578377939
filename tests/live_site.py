"""What tests of the pages that run Python in the browser share: Pyodide's files, a small site, and a host of it."""

from __future__ import annotations

import os
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

PYODIDE = os.environ.get("FSDPLAB_PYODIDE")
needs_pyodide = pytest.mark.skipif(
    PYODIDE is None, reason="FSDPLAB_PYODIDE names no folder of Pyodide's files; .ci/run takes them from npm"
)


def small_course(folder: Path) -> Path:
    """The folder with one notebook, which needed no run."""
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 01 Small things\n\nNothing.")]), folder / "01_small.ipynb")
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
