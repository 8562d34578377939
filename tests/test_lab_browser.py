"""`fsdplab lab` in a real browser: JupyterLab comes up on the learner edition and a notebook opens in it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, Queue

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
            if found := re.search(r"http://127\.0\.0\.1:\d+/lab\?token=\w+", seen[-1]):
                return found.group()
    except Empty:
        raise AssertionError(f"JupyterLab printed no address within {within_s:.0f} s:\n{''.join(seen)}") from None


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """A running `fsdplab lab`, ended with everything it started."""
    server = subprocess.Popen(
        [sys.executable, "-m", "fsdplab", "lab", "--no-browser", "--port", "0"],
        cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "JUPYTER_CONFIG_DIR": str(tmp_path / "config")},
    )  # fmt: skip
    try:
        yield address_of(server, within_s=60)
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@needs_chromium
def test_fsdplab_lab_opens_the_learner_edition(lab: str, tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    assert sorted(path.name for path in (tmp_path / "course-learner").glob("*.ipynb"))[0] == "00_setup_and_tour.ipynb"
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(lab.replace("/lab?", "/lab/tree/00_setup_and_tour.ipynb?"))
        page.wait_for_selector(".jp-Notebook .jp-MarkdownOutput h1", timeout=60_000)
        assert "Setup and tour" in page.inner_text(".jp-Notebook")
        page.screenshot(path=str(tmp_path / "lab.png"))
        browser.close()
    assert (tmp_path / "lab.png").stat().st_size > 20_000
