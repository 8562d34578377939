"""An interrupt of a cell that runs ranks ends in one line, without frames, and leaves no rank behind."""

from __future__ import annotations

import re
import sys

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from fsdplab.sessions.stopped import RanksStopped, stops_in_one_line

LINE = r"stopped after \d+ s; the ranks have ended"
RUN = """\
import os, signal
from fsdplab import RunSpec, run, teaching
from fsdplab.sessions.watcher import Watcher
teaching.start()

class Stops(Watcher):
    def progressed(self, spec, step, total, loss):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

run(RunSpec(model="gpt-tiny", strategy="full_shard", steps=100_000), watcher=Stops())
"""


def interrupted(kind: type[BaseException]) -> object:
    @stops_in_one_line
    def call() -> None:
        raise kind

    return call()


@pytest.mark.quick
def test_an_interrupt_is_one_line_and_stays_an_interrupt():
    with pytest.raises(KeyboardInterrupt) as caught:
        interrupted(KeyboardInterrupt)
    assert isinstance(caught.value, RanksStopped) and re.fullmatch(LINE, str(caught.value))
    assert caught.value._render_traceback_() == [str(caught.value)]


@pytest.mark.quick
@pytest.mark.parametrize("kind", [RanksStopped, type("Ended", (KeyboardInterrupt,), {}), ValueError])
def test_other_ends_pass_unchanged(kind):
    with pytest.raises(kind) as caught:
        interrupted(kind)
    assert type(caught.value) is kind


@pytest.mark.full("a kernel and ranks")
@pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc")
def test_a_run_that_is_stopped_in_a_notebook_shows_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("FSDPLAB_HOME", str(tmp_path))
    cell = nbformat.v4.new_code_cell(RUN)
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(CellExecutionError):
        NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [output for output in cell.outputs if output.output_type == "error"]
    assert len(shown) == 1 and re.fullmatch(LINE, "\n".join(shown[0].traceback)), shown
    assert "done in" not in str(cell.outputs)
