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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine; .ci/run installs Debian's")


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


@pytest.fixture
def jupyter_lab(tmp_path: Path) -> Iterator[str]:
    """The address of a running `fsdplab lab` on the learner edition, ended with everything it started."""
    server = subprocess.Popen(
        [sys.executable, "-m", "fsdplab", "lab", "--no-browser", "--port", "0"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "config")},
    )  # fmt: skip
    try:
        yield address_of(server, within_s=180)  # on a busy machine building the edition takes most of it
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@contextmanager
def run_in_lab(folder: Path, sources: Sequence[str], width: int = 1280) -> Iterator[Any]:
    """A browser's page on a notebook of these cells in a JupyterLab of its own, all of them set going."""
    from playwright.sync_api import sync_playwright

    cells = [
        {"cell_type": "code", "execution_count": None, "id": f"cell-{number}", "metadata": {}, "outputs": [],
         "source": source}
        for number, source in enumerate(sources)
    ]  # fmt: skip
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (folder / "cells.ipynb").write_text(json.dumps(notebook))
    settings = folder / "settings" / "@jupyterlab" / "notebook-extension"
    settings.mkdir(parents=True)
    (settings / "tracker.jupyterlab-settings").write_text(
        '{"windowingMode": "none"}'
    )  # else cells out of sight are not drawn
    server = subprocess.Popen(
        [sys.executable, "-m", "jupyterlab", "--no-browser", "--port=0", "--ip=127.0.0.1", "--allow-root",
         f"--LabApp.user_settings_dir={folder / 'settings'}"],
        cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "JUPYTER_CONFIG_DIR": str(folder / "config")},
    )  # fmt: skip
    try:
        address = address_of(server, within_s=120)
        with sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_page(viewport={"width": width, "height": 900})
            page.goto(address.replace("/lab?", "/lab/tree/cells.ipynb?"))
            page.get_by_text("(ipykernel) | Idle").wait_for(timeout=120_000)
            page.add_style_tag(content=".Toastify { display: none }")
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
            yield page
            browser.close()
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()
