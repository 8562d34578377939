"""A real Chromium and a running JupyterLab, for tests in a browser."""

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
