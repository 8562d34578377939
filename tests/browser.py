"""A real Chromium and a running JupyterLab, for tests in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, Queue
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; .ci/run installs Debian's")


PATIENCE_MS = 120_000  # a busy machine takes minutes for what takes a second


def patient(page: Any) -> Any:
    """The page, which waits longer than playwright's 30 seconds before it gives up."""
    page.set_default_timeout(PATIENCE_MS)
    return page


def pixel(png: bytes) -> tuple[int, ...]:
    """Red, green and blue of the first pixel of a PNG without a palette."""
    data, at = b"", 8
    while at < len(png):
        length = int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 8] == b"IDAT":
            data += png[at + 8 : at + 8 + length]
        at += 12 + length
    return tuple(zlib.decompress(data)[1:4])


def address_of(server: subprocess.Popen[str], within_s: float) -> str:
    """The address, token included, that JupyterLab prints when it is ready."""
    lines: Queue[str] = Queue()
    threading.Thread(target=lambda: [lines.put(line) for line in server.stderr], daemon=True).start()
    seen = []
    try:
        while True:
            seen.append(lines.get(timeout=within_s))
            if found := re.search(r"(http://127\.0\.0\.1:\d+/lab)(?:/tree/[^?]+)?(\?token=\w+)", seen[-1]):
                return found[1] + found[2]
    except Empty:
        raise AssertionError(f"JupyterLab printed no address within {within_s:.0f} s:\n{''.join(seen)}") from None


@dataclass(frozen=True)
class Server:
    """A running JupyterLab: its address with the token, and the folder whose notebooks it shows."""

    address: str
    folder: Path

    def page_of(self, notebook: str) -> str:
        """The address of a notebook in its folder, without the tabs that an earlier test has left open."""
        return self.address.replace("/lab?", f"/lab/tree/{notebook}?reset&")

    def end_kernels(self) -> None:
        """End the kernels that a test has left running.

        The server answers 404 or 500 where a kernel ends by itself at that moment. What counts is that none is left.
        """
        deadline = time.monotonic() + 120
        while running := self._sessions():
            for session in running:
                address = self.address.replace("/lab?", f"/api/sessions/{session['id']}?")
                try:
                    urlopen(Request(address, method="DELETE"), timeout=60).close()
                except HTTPError as error:
                    assert time.monotonic() < deadline, f"the kernel of {session['path']} does not end: {error}"

    def _sessions(self) -> list[dict[str, Any]]:
        """The notebooks whose kernels run."""
        with urlopen(self.address.replace("/lab?", "/api/sessions?"), timeout=60) as answer:
            return json.load(answer)


@contextmanager
def served(command: Sequence[str], folder: Path, shows: Path, within_s: float) -> Iterator[Server]:
    """A JupyterLab in its own process group, ended with everything it started."""
    server = subprocess.Popen(
        [sys.executable, "-m", *command],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config")},
    )  # fmt: skip
    try:
        yield Server(address_of(server, within_s), shows)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@pytest.fixture(scope="session")
def course_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One `fsdplab lab` on the learner edition for all tests of a worker."""
    folder = tmp_path_factory.mktemp("lab")
    command = ("fsdplab", "lab", "--no-browser", "--port", "0")
    with served(command, folder, folder / "course-learner", within_s=180) as server:  # it builds the edition first
        yield server


@pytest.fixture
def course_lab(course_server: Server) -> Iterator[Server]:
    """The running `fsdplab lab`, without the kernels of earlier tests."""
    yield course_server
    course_server.end_kernels()


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One JupyterLab on an empty folder for all tests of a worker, in which cells out of sight are drawn too."""
    folder = tmp_path_factory.mktemp("jupyter")
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text('{"windowingMode": "none"}')
    command = ("jupyterlab", "--no-browser", "--port=0", "--ip=127.0.0.1", "--allow-root",
               f"--LabApp.user_settings_dir={folder / 'settings'}")  # fmt: skip
    with served(command, folder, folder, within_s=120) as server:
        yield server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One Chromium for the tests of a file. Its driver's event loop must not outlive the file: other tests have one."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    """The file's Chromium for one test: what it has opened is closed behind it."""
    yield chromium
    for context in chromium.contexts:
        context.close()


@dataclass(frozen=True)
class Cells:
    """Runs cells in a notebook of their own, in `folder`, where their kernel works."""

    server: Server
    chromium: Any
    folder: Path

    @contextmanager
    def open(self, sources: Sequence[str], width: int = 1280, height: int = 900) -> Iterator[Any]:
        """A browser's page on a notebook of these cells, none of which was run."""
        cells = [
            {"cell_type": "code", "execution_count": None, "id": f"cell-{number}", "metadata": {}, "outputs": [],
             "source": source}
            for number, source in enumerate(sources)
        ]  # fmt: skip
        kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
        (self.folder / "cells.ipynb").write_text(json.dumps(notebook))
        context = self.chromium.new_context(viewport={"width": width, "height": height})
        page = patient(context.new_page())
        page.goto(self.server.page_of(f"{self.folder.name}/cells.ipynb"))
        page.get_by_text("(ipykernel) | Idle").wait_for(timeout=120_000)
        page.add_style_tag(content=".Toastify { display: none }")
        yield page
        context.close()

    @contextmanager
    def run(self, sources: Sequence[str], width: int = 1280) -> Iterator[Any]:
        """A browser's page on a notebook of these cells, all of them set going."""
        with self.open(sources, width) as page:
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            yield page


@pytest.fixture
def lab_cells(plain_server: Server, chromium: Any, request: pytest.FixtureRequest) -> Iterator[Cells]:
    """`lab_cells.run(sources)` in the running JupyterLab, in a folder of the test's own."""
    folder = plain_server.folder / request.node.name
    folder.mkdir()
    yield Cells(plain_server, chromium, folder)
    plain_server.end_kernels()
