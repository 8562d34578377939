"""What the lab keeps: runs that come back, presses while a cell runs, large type."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdplab.figures import style
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.lab.choices import Choices, check
from fsdplab.records import RunRecord
from fsdplab.records.summary import Summary
from fsdplab.sessions import RunSpec, Watcher
from fsdplab.widgets import running
from fsdplab.widgets.lab_state import Batch, LabState
from fsdplab.widgets.running import ANOTHER_RUNS, WAITING, Runner
from fsdplab.widgets.strategy_lab import StrategyLab
from fsdplab.widgets.tabs import FAULT, TABS, kept, still

pytestmark = pytest.mark.quick
FIXED = {"device": "cpu", "sequence_length": 32}
TINY: dict[str, Any] = {"model": "gpt-tiny", "steps": 2, "strategies": ("full_shard",)}


def write_batch(folder: Path, batch: str, *strategies: str) -> None:
    """A batch as a lab leaves it: a record a run, and beside them what a cancelled run left."""
    for number, strategy in enumerate(strategies):
        spec = RunSpec(strategy=strategy, model="gpt-tiny", **FIXED).as_dict()
        RunRecord(folder / batch / f"{number}-{strategy}-lab", spec=spec, environment={}).save()
    (folder / batch / f"{len(strategies)}-zero1-lab" / "ranks").mkdir(parents=True)


def test_times_without_cores_are_marked_as_such_beside_the_bars() -> None:
    state = LabState(FIXED, **TINY)
    (spec,) = state.begin()
    state.recorded(RunRecord("unsaved", spec=spec.as_dict(), status="finished", summary=Summary(cpu_share=0.4)))
    state.ended()
    assert (
        "done: 1 record of 1 run kept. Ranks had a core for 40 % of their step: the measured times are" in state.message
    )


# ---- runs that come back


def test_runs_of_an_earlier_kernel_come_back_with_their_names(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-2-slow link", "no_shard", "full_shard")
    write_batch(tmp_path, "batch-10", "zero2")
    write_batch(tmp_path, "batch-11")
    (tmp_path / "notes").mkdir()
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    titles = [title for title, _ in lab.details.batch_menu.options]
    assert titles[0] == "2: slow link, gpt-tiny, 2 ranks, fp32, prefetch 1, 2 runs" and titles[1].startswith(
        "10: gpt-t"
    )
    assert [each.spec["strategy"] for each in lab.state.batches[0].records] == ["no_shard", "full_shard"]
    assert (
        lab.state.message == "ready to measure 1 run; 2 batches of earlier runs below"
        and lab.records[0].spec["strategy"] == "zero2"
    )
    lab.state.begin()
    assert lab.state.batches[-1].number == 11 and running.new_folder(tmp_path, 11).name == "batch-12"
    lab.state.ended()
    assert lab.state.message.startswith("done: 0 records of 1 run kept")


def test_a_damaged_record_and_older_batches_are_left_where_they_are_and_said(tmp_path: Path) -> None:
    for number in range(1, running.MOST_BACK + 3):
        write_batch(tmp_path, f"batch-{number}", "zero2")
    (tmp_path / "batch-14" / "0-zero2-lab" / "run.json").write_text("{")
    state = LabState(FIXED, **TINY)
    Runner(state, tmp_path)
    assert [batch.number for batch in state.batches] == list(range(3, 14))
    assert f"2 older ones stay in {tmp_path}; 1 record in {tmp_path} could not be read: {tmp_path}" in state.message


@pytest.mark.parametrize("lost", ["model", "precision", "prefetch", "link", "emulate", "as_model"])
def test_a_record_without_a_setting_is_offered(tmp_path: Path, lost: str) -> None:
    write_batch(tmp_path, "batch-1", "zero2")
    file = tmp_path / "batch-1" / "0-zero2-lab" / "run.json"
    content = json.loads(file.read_text())
    content["spec"] = {**content["spec"], "emulate": "8xH100", "model": 3}
    del content["spec"][lost]
    file.write_text(json.dumps(content))
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    assert lab.details.batch_menu.options[0][0].startswith("1: ") and "2 ranks" in lab.details.batch_menu.options[0][0]


def test_a_record_of_a_newer_version_is_named_with_the_reason(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-1", "zero2")
    file = tmp_path / "batch-1" / "0-zero2-lab" / "run.json"
    file.write_text(file.read_text().replace("run record 2", "run record 9"))
    message = StrategyLab(FIXED, directory=tmp_path, **TINY).state.message
    assert f"could not be read: {file} has the format 'fsdplab run record 9'" in message


def test_folders_that_may_not_be_read_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_batch(tmp_path, "batch-1", "zero2")
    write_batch(tmp_path, "batch-2", "zero2")
    closed, listed = tmp_path / "batch-1", Path.iterdir

    def iterdir(folder: Path) -> Iterator[Path]:
        if folder == closed:
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    assert (
        len(lab.details.batch_menu.options) == 1
        and f"could not be read: {closed}: Permission denied" in lab.state.message
    )
    closed = tmp_path
    assert f"earlier runs in {tmp_path} could not be read (Permission denied)" in running.kept_in(tmp_path)[1]
    too_long = StrategyLab(FIXED, directory=tmp_path / ("x" * 300), **TINY)
    assert "File name too long" in too_long.state.message
    with pytest.raises(RuntimeError, match=r"no run can be kept in .*give StrategyLab\(directory=...\) another folder"):
        too_long.run(60)


def test_a_folder_that_somebody_else_moved_is_said(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3-<b>", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    assert lab.details.name.value == "<b>"
    (tmp_path / "batch-3-<b>").rename(tmp_path / "gone")
    lab.details.name.value = "mine"
    said = lab.details.exported.outputs[0]["data"]["text/html"]
    assert "could not be renamed (No such file or directory)" in said and "<b>" not in said
    lab.details.widget.selected_index = 0
    for number, tab in enumerate(TABS):
        lab.details.tabs.selected_index = number
        assert FAULT not in str(lab.details.outputs[tab].outputs), "records are read at the start, not when a tab opens"


def test_a_name_is_the_folders_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    lab.details.name.value = "before  prefetch"
    (record,) = lab.records
    assert record.path == tmp_path / "batch-3-before prefetch" / "0-zero2-lab" and RunRecord.load(record.path) == record
    assert lab.details.batch_menu.options[0][0].startswith("3: before prefetch, gpt-tiny")
    lab.details.name.value = "../elsewhere"
    said = lab.details.exported.outputs[0]["data"]["text/html"]
    assert (
        "expected at most 60 letters" in said and record.path.is_dir() and not (tmp_path.parent / "elsewhere").exists()
    )
    assert running.kept_in(tmp_path)[0][0].name == "before prefetch"


def test_a_batch_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    lab.state.begin()
    lab.state.batches[-1].records, lab.state.batches[-1].folder = lab.records, tmp_path / "batch-4"
    lab.details.refresh()
    lab.details.name.value = "renamed"
    assert "the batch is running" in lab.details.exported.outputs[0]["data"]["text/html"]
    assert lab.state.batches[-1].folder == tmp_path / "batch-4" and (tmp_path / "batch-3").is_dir()


def test_a_cancelled_batch_without_a_record_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    runner = Runner(LabState(FIXED, **TINY), tmp_path)

    def cancelled(specs: Any, *, directory: Path, watcher: Watcher) -> None:
        (directory / "0-full_shard-lab").mkdir()
        runner.state.cancel()
        watcher.look()

    monkeypatch.setattr(running, "compare", cancelled)
    assert runner.start() and runner.wait(60) and runner.state.status == "cancelled"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_while_its_runs_go_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def compare(specs: Any, *, directory: Path, **_: Any) -> None:
        directory.rename(tmp_path / "elsewhere")
        (directory / "0-full_shard-lab" / "run.json").read_text()

    monkeypatch.setattr(running, "compare", compare)
    runner = Runner(LabState(FIXED, **TINY), tmp_path / "runs")
    assert runner.start() and runner.wait(60) and runner.state.status == "failed"
    assert f"No such file or directory: '{tmp_path / 'runs' / 'batch-1'}" in runner.state.message


def test_thirty_kept_batches_are_not_all_read(tmp_path: Path) -> None:
    for number in range(1, 31):
        (tmp_path / f"batch-{number}").mkdir()
    write_batch(tmp_path, "batch-31-<script>", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, export_to=tmp_path, **TINY)
    assert "19 older ones stay in" in lab.state.message and lab.details.name.value == "<script>"
    saved = still(kept(lab.state.batch), {})["text/html"]
    assert "<script>" not in saved and "&lt;script&gt;" in saved
    assert lab.details.export() is not None


def test_a_press_of_cancel_at_once_after_run_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel may come before the thread of the run has begun."""

    compared: list[Any] = []
    monkeypatch.setattr(running, "compare", lambda *args, **named: compared.append(args))
    state = LabState(FIXED, **TINY)
    runner = Runner(state, tmp_path)
    state.subscribe(lambda: state.status == "running" and runner.state.cancel())
    assert runner.start() and runner.wait(60) and state.status == "cancelled"
    assert compared == [] and list(tmp_path.iterdir()) == []


def test_two_labs_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    begun, go_on = threading.Event(), threading.Event()

    def compare(*_: Any, **__: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(running, "compare", compare)
    first, second, third = (Runner(LabState(FIXED, **TINY), tmp_path) for _ in range(3))
    said, waits = [], threading.Event()
    second.state.subscribe(lambda: said.append(second.state.message) or ANOTHER_RUNS in said and waits.set())
    assert first.start() and begun.wait(60)
    assert second.start() and third.start() and third.state.cancel() and third.wait(60)
    assert third.state.status == "cancelled" and waits.wait(60) and not first.wait(0) and not second.wait(0)
    go_on.set()
    assert first.wait(60) and second.wait(60) and (first.state.status, second.state.status) == ("done", "done")


def test_an_interrupted_cell_cancels_its_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    cancelled: list[bool] = []

    def wait(timeout: float | None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(lab.runner, "start", lambda: True)
    monkeypatch.setattr(lab.runner, "wait", wait)
    monkeypatch.setattr(lab.state, "cancel", lambda: cancelled.append(True))
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert cancelled == [True]


# ---- presses


def test_a_lab_without_its_kernel_says_so_in_one_line() -> None:
    sheet = StrategyLab(FIXED, **TINY).instrument._css
    assert "content: \"this lab's kernel has ended" in sheet
    assert ".jupyter-widgets-disconnected::before { content: none; }" in sheet


def press(lab: StrategyLab, what: str) -> None:
    """A press of a button of the instrument, as the page tells it."""
    lab.instrument.pressed = {"n": lab.instrument.pressed.get("n", 0) + 1, "what": what}


def test_a_press_takes_along_what_the_page_asks_for() -> None:
    """A busy kernel gets a press and the change that was made before it in one message."""
    lab = StrategyLab(FIXED, **TINY)
    lab.instrument.set_state({"asked": {"n": 1, "choices": {"card": "a lot"}}, "pressed": {"n": 1, "what": "measure"}})
    assert "nothing was started: card is 'a lot'" in lab.state.message
    assert lab.instrument.progress["message"] == lab.state.message and "card" in lab.instrument.answer["errors"]


class Shell:
    """IPython's shell as far as the lab knows it."""

    def __init__(self) -> None:
        self.events, self.calls = self, {}

    def register(self, event: str, call: Any) -> None:
        self.calls[event] = call


def elsewhere(act: Any) -> None:
    """Do it on another thread, as a subshell of the kernel does."""
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    """A kernel that runs the cell which makes the lab, and in which runs take no time."""

    shell = Shell()
    monkeypatch.setattr(running, "this_shell", lambda: shell)
    monkeypatch.setattr(running, "compare", lambda *_, **__: None)
    return shell


def test_a_press_while_a_cell_runs_starts_when_the_cells_have_ended(tmp_path: Path, shell: Shell) -> None:
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    said, waits = [], threading.Event()
    lab.state.subscribe(lambda: said.append(lab.instrument.progress["message"]) or WAITING in said and waits.set())
    elsewhere(lambda: press(lab, "measure"))
    assert waits.wait(60) and lab.instrument.progress["cancels"]
    press(lab, "cancel")
    assert lab.runner.wait(60) and lab.state.status == "cancelled"

    said.clear()
    waits.clear()
    elsewhere(lambda: press(lab, "measure"))
    shell.calls["post_run_cell"]()
    assert lab.runner._cells.busy, "Run All is about to begin the next cell"
    shell.calls["pre_run_cell"]()
    assert waits.wait(60) and lab.state.message == WAITING
    shell.calls["post_run_cell"]()
    lab.runner._thread.join(60)
    assert lab.state.status == "done"


def test_a_cell_that_waits_for_runs_does_not_hold_them_up(tmp_path: Path, shell: Shell) -> None:
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    elsewhere(lambda: press(lab, "measure"))
    assert lab.run(60) == [] and lab.state.status == "done", "they were pressed before"
    assert lab.run(60) == [] and len(lab.state.batches) == 2, "and run() in a cell starts at once"


# ---- large type


def test_figures_are_larger_on_a_wide_page_and_on_a_projector(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import details

    scales: list[float] = []
    figure = style.titled(go.Figure(go.Bar(x=[1], y=["a"], orientation="h")), "title", "Measured", "alt")
    monkeypatch.setattr(details, "pieces", lambda *_: ["words", figure])
    monkeypatch.setattr(details, "enlarged", lambda figure, scale: scales.append(round(scale, 3)) or figure)
    lab = StrategyLab(FIXED, **TINY)
    lab.details.widget.selected_index = 0
    lab.instrument.width = 1600
    lab.present()
    assert "fsdplab-present" in lab.widget._dom_classes and lab.instrument.scale == details.PRESENTED
    lab.instrument.width = 800
    lab.present(False)
    assert scales == [1.2, 1.62, 1.35] and lab.instrument.scale == 1


def test_an_enlarged_figure_has_all_its_pixels_times_the_scale() -> None:
    bar = go.Bar(x=[1], y=["a"], marker=dict(line_width=1))
    with style.on_page(style.PAGE / 1.5):
        figure = style.titled(go.Figure(bar), ("many words " * 9).strip(), "Measured " * 16, "alt", height=300)
    large = style.enlarged(figure, 1.5)
    assert large.layout.template.layout.font.size == 1.5 * figure.layout.template.layout.font.size
    lines = figure.layout.title.text.removeprefix("<b>").removesuffix("</b>").split("<br>")
    assert max(map(len, lines)) <= 74 / 1.5 and " ".join(lines) == ("many words " * 9).strip()
    assert large.layout.title.text == figure.layout.title.text
    assert large.layout.height == pytest.approx(1.5 * figure.layout.height)
    assert large.layout.margin.t == pytest.approx(1.5 * figure.layout.margin.t)
    assert (
        large.layout.legend.y == figure.layout.legend.y and style.alt_text(large) == "alt" and large.data[0].x == (1,)
    )
    assert figure.layout.title.subtitle.font.size == 15, "the figure itself is unchanged"


def test_figures_are_drawn_for_the_page_that_they_are_shown_on() -> None:
    parts = [Part("compute", "#6b7380", [90.0]), Part("exposed", "#e01f3d", [7.0])]
    draw = lambda: stacked_bars({"a run": "105 ms · 0 % hidden"}, parts, "ms", number=lambda ms: f"{ms:.0f} ms")  # noqa: E731
    usual = draw()
    with style.on_page(style.PAGE / 1.8):
        narrow = draw()
    assert narrow.layout.xaxis.range[1] > 1.1 * usual.layout.xaxis.range[1], "the words at the end need a larger share"
    assert [bar.text for bar in usual.data] == [("90 ms",), ("7 ms",)]
    assert [bar.text for bar in narrow.data] == [("90 ms",), ("",)], "what is too long for its bar goes"
    assert draw().layout.xaxis.range == usual.layout.xaxis.range


def test_names_of_a_batch_stay_with_it() -> None:
    batch = Batch(4, check(Choices(**TINY), FIXED).specs)
    running.rename(batch, " a  b ")
    assert batch.title.startswith("4: a b, gpt-tiny")
