"""What the lab keeps and what its page does alone: runs that come back, the live curve, rules without a kernel, large
type.
"""

from __future__ import annotations

import json
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdplab.figures import style
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.records import RunRecord
from fsdplab.sessions import RunSpec
from fsdplab.widgets import kept_runs
from fsdplab.widgets.at_once import GONE, RULES, WAITING, script
from fsdplab.widgets.at_once import style as style_sheet
from fsdplab.widgets.choices import Choices, check
from fsdplab.widgets.controls import PRESENTED
from fsdplab.widgets.lab_state import Batch, Curve, LabState
from fsdplab.widgets.live_curve import picture_of
from fsdplab.widgets.running import ANOTHER_RUNS, Runner
from fsdplab.widgets.stills import Still
from fsdplab.widgets.strategy_lab import StrategyLab
from fsdplab.widgets.tabs import FAULT, TABS

pytestmark = pytest.mark.quick
FIXED = {"device": "cpu", "sequence_length": 32}
TINY: dict[str, Any] = {"model": "gpt-tiny", "steps": 2, "strategies": ("full_shard",)}


def write_batch(folder: Path, batch: str, *strategies: str) -> None:
    """A batch as a lab leaves it: a record a run, and beside them what a cancelled run left."""
    for number, strategy in enumerate(strategies):
        spec = RunSpec(strategy=strategy, model="gpt-tiny", **FIXED).as_dict()
        RunRecord(folder / batch / f"{number}-{strategy}-lab", spec=spec, environment={}).save()
    (folder / batch / f"{len(strategies)}-zero1-lab" / "ranks").mkdir(parents=True)


# ---- runs that come back


def test_runs_of_an_earlier_kernel_come_back_with_their_names(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-2-slow link", "no_shard", "full_shard")
    write_batch(tmp_path, "batch-10", "zero2")
    write_batch(tmp_path, "batch-11")
    (tmp_path / "notes").mkdir()
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    titles = [title for title, _ in lab.batch_menu.options]
    assert titles[0] == "2: slow link, gpt-tiny, 2 ranks, fp32, prefetch 1, 2 runs" and titles[1].startswith(
        "10: gpt-t"
    )
    assert [each.spec["strategy"] for each in lab.state.batches[0].records] == ["no_shard", "full_shard"]
    assert (
        lab.state.message == "ready: 1 run; 2 batches of earlier runs below"
        and lab.records[0].spec["strategy"] == "zero2"
    )
    lab.state.begin()
    assert lab.state.batches[-1].number == 11 and kept_runs.new_folder(tmp_path, 11).name == "batch-12"
    lab.state.ended()
    assert lab.state.message.startswith("done: 0 records of 1 run kept")


def test_a_damaged_record_and_older_batches_are_left_where_they_are_and_said(tmp_path: Path) -> None:
    for number in range(1, kept_runs.MOST_BACK + 3):
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
    assert lab.batch_menu.options[0][0].startswith("1: ") and "2 ranks" in lab.batch_menu.options[0][0]


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
    assert len(lab.batch_menu.options) == 1 and f"could not be read: {closed}: Permission denied" in lab.state.message
    closed = tmp_path
    assert f"earlier runs in {tmp_path} could not be read (Permission denied)" in kept_runs.kept_in(tmp_path).left
    too_long = StrategyLab(FIXED, directory=tmp_path / ("x" * 300), **TINY)
    assert "File name too long" in too_long.state.message
    with pytest.raises(RuntimeError, match=r"no run can be kept in .*give StrategyLab\(directory=...\) another folder"):
        too_long.run(60)


def test_a_folder_that_somebody_else_moved_is_said(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3-<b>", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    assert lab.name.value == "<b>"
    (tmp_path / "batch-3-<b>").rename(tmp_path / "gone")
    lab.name.value = "mine"
    said = lab.exported.outputs[0]["data"]["text/html"]
    assert "could not be renamed (No such file or directory)" in said and "<b>" not in said
    for number, tab in enumerate(TABS):
        lab.tabs.selected_index = number
        assert FAULT not in str(lab.outputs[tab].outputs), "records are read at the start, not when a tab opens"


def test_a_name_is_the_folders_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    lab.name.value = "before  prefetch"
    (record,) = lab.records
    assert record.path == tmp_path / "batch-3-before prefetch" / "0-zero2-lab" and RunRecord.load(record.path) == record
    assert lab.batch_menu.options[0][0].startswith("3: before prefetch, gpt-tiny")
    lab.name.value = "../elsewhere"
    said = lab.exported.outputs[0]["data"]["text/html"]
    assert (
        "expected at most 60 letters" in said and record.path.is_dir() and not (tmp_path.parent / "elsewhere").exists()
    )
    assert kept_runs.kept_in(tmp_path).batches[0].name == "before prefetch"


def test_a_batch_that_runs_keeps_its_folder(tmp_path: Path) -> None:
    write_batch(tmp_path, "batch-3", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, **TINY)
    lab.state.begin()
    lab.state.batches[-1].records, lab.state.batches[-1].folder = lab.records, tmp_path / "batch-4"
    lab._refresh()
    lab.name.value = "renamed"
    assert "the batch is running" in lab.exported.outputs[0]["data"]["text/html"]
    assert lab.state.batches[-1].folder == tmp_path / "batch-4" and (tmp_path / "batch-3").is_dir()


def test_a_cancelled_batch_without_a_record_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import running

    runner = Runner(LabState(FIXED, **TINY), tmp_path)

    def cancelled(specs: Any, *, directory: Path, on_look: Any, **_: Any) -> None:
        (directory / "0-full_shard-lab").mkdir()
        runner.cancel()
        on_look()

    monkeypatch.setattr(running, "compare", cancelled)
    assert runner.start() and runner.wait(60) and runner.state.status == "cancelled"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_goes_while_its_runs_go_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import running

    def compare(specs: Any, *, directory: Path, **_: Any) -> None:
        directory.rename(tmp_path / "elsewhere")
        (directory / "0-full_shard-lab" / "run.json").read_text()

    monkeypatch.setattr(running, "compare", compare)
    runner = Runner(LabState(FIXED, **TINY), tmp_path / "runs")
    assert runner.start() and runner.wait(60) and runner.state.status == "failed"
    assert f"{tmp_path / 'runs' / 'batch-1'} was moved or deleted while its runs went on" in runner.state.message


def test_thirty_kept_batches_are_not_all_read(tmp_path: Path) -> None:
    for number in range(1, 31):
        (tmp_path / f"batch-{number}").mkdir()
    write_batch(tmp_path, "batch-31-<script>", "zero2")
    lab = StrategyLab(FIXED, directory=tmp_path, export_to=tmp_path, **TINY)
    assert "19 older ones stay in" in lab.message.value and lab.name.value == "<script>"
    still = Still(lab.state.batch)._repr_mimebundle_()["text/html"]
    assert "<script>" not in still and "&lt;script&gt;" in still
    assert lab.export() is not None


def test_a_press_of_cancel_at_once_after_run_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancel may come before the thread of the run has begun."""
    from fsdplab.widgets import running

    compared: list[Any] = []
    monkeypatch.setattr(running, "compare", lambda *args, **named: compared.append(args))
    state = LabState(FIXED, **TINY)
    runner = Runner(state, tmp_path)
    state.subscribe(lambda: state.progress.runs and state.status == "running" and runner.cancel())
    assert runner.start() and runner.wait(60) and state.status == "cancelled"
    assert compared == [] and list(tmp_path.iterdir()) == []


def test_two_labs_run_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import running

    begun, go_on = threading.Event(), threading.Event()

    def compare(*_: Any, **__: Any) -> None:
        begun.set()
        assert go_on.wait(60)

    monkeypatch.setattr(running, "compare", compare)
    first, second, third = (Runner(LabState(FIXED, **TINY), tmp_path) for _ in range(3))
    said, waits = [], threading.Event()
    second.state.subscribe(lambda: said.append(second.state.message) or ANOTHER_RUNS in said and waits.set())
    assert first.start() and begun.wait(60)
    assert second.start() and third.start() and third.cancel() and third.wait(60)
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
    monkeypatch.setattr(lab.runner, "cancel", lambda: cancelled.append(True))
    with pytest.raises(KeyboardInterrupt):
        lab.run()
    assert cancelled == [True]


# ---- the live curve


def test_the_curve_has_a_line_a_run_with_its_first_and_last_value() -> None:
    (spec,) = check(Choices(**TINY), FIXED).specs
    runs = [
        Curve(replace(spec, strategy="no_shard"), [5.7, 5.2, 4.5], [0.2, 0.1]),
        Curve(spec, [5.7, float("nan")], []),
        Curve(spec),
    ]
    page = picture_of(runs)
    charts = [ET.fromstring(each) for each in re.findall(r"<svg.*?</svg>", page)]
    assert len(charts) == 2 and [len(chart.findall("circle")) for chart in charts] == [2, 1]
    words = ["".join(node.text or "" for node in chart.iter("text")) for chart in charts]
    assert words == ["4.505.70loss, 3 steps", "100 ms200 msstep, 2 timed"], words
    for chart in charts:
        for node in chart.iter("circle"):
            assert 0 < float(node.get("cx", 0)) < 520 and 0 < float(node.get("cy", 0)) < 150
    assert "no_shard" in page and "measured" in page and "nan" not in page
    assert picture_of([Curve(spec)]) == "" and picture_of([Curve(spec, [float("nan")])]) == ""


def test_a_state_keeps_the_curve_of_each_run_of_the_batch() -> None:
    state = LabState(FIXED, **TINY)
    state.begin()
    state.started(0)
    state.stepped(0, 1, 6, 5.7)
    state.stepped(0, 2, 6, 5.6, 0.1)
    assert [(curve.losses, curve.seconds) for curve in state.curves] == [([5.7, 5.6], [0.1])]
    state.ended()
    state.begin()
    assert state.curves == []


# ---- rules of the page


TRIED = {
    "steps": ["1", "200", "0", "201", "-3", "2.5", ""],
    "card": ["", "none", "300MB", "1.5 GB", "2GiB", "4096", "1_000kb", "a lot", "-3", "300 M/s", "GB"],
    "custom_link": ["200mbit", "1.5gbit", "800MB/s,50us", "nvlink4", "NVLink 4", "IB NDR", "10GbE", "fast", "", "eth3"],
    "tunnel": ["8xH100", "64 x A100", "H100", "0xH100", ""],
}


@pytest.mark.parametrize("name", RULES)
def test_what_the_page_refuses_the_kernel_refuses_with_the_same_words(name: str) -> None:
    rule, refused = RULES[name], []
    link = {"custom_link": "custom", "tunnel": "wind tunnel"}.get(name, "none")
    for typed in TRIED[name]:
        value = int(typed) if re.fullmatch(r"-?\d+", typed) and name == "steps" else typed
        errors = check(Choices(**{**TINY, "link": link, name: value}), FIXED).errors
        right = re.fullmatch(rule.form, typed, re.IGNORECASE) is not None
        inside = rule.least is None or right and rule.least <= float(typed) <= rule.most
        if not (right and inside):
            refused.append(typed)
            got = str(value) if isinstance(value, int) else repr(typed)
            assert name in errors and (name == "custom_link" or errors[name] == rule.words.format(got=got)), typed
    assert 1 < len(refused) < len(TRIED[name])


def test_the_script_is_called_with_the_rules() -> None:
    code = script()
    told = json.loads(code[code.rindex("})(") + 3 : -1])
    assert set(told["rules"]) == set(RULES) and told["waiting"] == WAITING and code.startswith("(function atOnce(told)")
    lab = StrategyLab(FIXED, **TINY)
    assert lab.at_once.outputs[0]["data"] == {"application/javascript": code}
    assert {f"fsdplab-of-{name}" for name in RULES} <= {
        each for cell in lab.controls._cells.values() for each in cell._dom_classes
    }


def test_a_lab_without_its_kernel_says_so_in_one_line() -> None:
    told = json.loads(script()[script().rindex("})(") + 3 : -1])
    assert told["gone"] == GONE and f'--fsdplab-gone: "{GONE}"' in style_sheet()
    assert ".jupyter-widgets-disconnected::before { content: none; }" in style_sheet()


def test_a_press_takes_along_what_the_page_shows() -> None:
    """A busy kernel gets a press before the change that was made before it."""
    lab = StrategyLab(FIXED, **TINY)
    lab.state.choose(steps=0)
    shown = {"model": "gpt-tiny", "steps": "3", "ranks": "4", "card": "a lot", "strategies": ["zero1"], "batch": "1"}
    lab.shown.value = json.dumps(shown)
    lab.run_button.click()
    choices = lab.state.choices
    assert (choices.steps, choices.ranks, choices.strategies) == (3, 4, ("zero1",))
    assert "nothing was started: card is 'a lot'" in lab.state.message and "data-press='1'" in lab.message.value
    lab.shown.value = json.dumps({"steps": "", "link": "no such link"})
    lab.run_button.click()
    assert lab.state.choices.steps == 3 and "data-press='2'" in lab.message.value


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


def test_a_press_while_a_cell_runs_starts_when_the_cells_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import strategy_lab

    shell, started = Shell(), threading.Event()
    monkeypatch.setattr(strategy_lab, "this_shell", lambda: shell)
    lab = StrategyLab(FIXED, **TINY)
    monkeypatch.setattr(lab.runner, "start", started.set)
    elsewhere(lab.run_button.click)
    assert WAITING in lab.message.value and lab.run_button.disabled and not lab.cancel_button.disabled
    lab.cancel_button.click()
    assert WAITING not in lab.message.value and not lab.run_button.disabled and not started.is_set()

    elsewhere(lab.run_button.click)
    shell.calls["post_run_cell"]()
    shell.calls["pre_run_cell"]()
    lab._cells._do()
    assert not started.is_set() and lab._cells.waiting, "Run All has begun the next cell"
    shell.calls["post_run_cell"]()
    assert started.wait(60)

    started.clear()
    lab.run_button.click()
    assert started.is_set(), "a press that comes between cells, or from a cell, starts at once"


# ---- large type


def test_a_presented_lab_has_few_controls_and_those_with_errors() -> None:
    lab = StrategyLab(FIXED, **TINY)
    lab.present()
    seen = {name for name, cell in lab.controls._cells.items() if cell.layout.display != "none"}
    assert seen == {"model", "ranks", "card", "link", "strategies"} < set(PRESENTED)
    assert "fsdplab-present" in lab.widget._dom_classes
    lab.state.choose(steps=0)
    assert lab.controls._cells["steps"].layout.display == ""
    lab.present(False)
    assert lab.controls._cells["units"].layout.display == "" and "fsdplab-present" not in lab.widget._dom_classes


def test_figures_are_larger_on_a_wide_page_and_on_a_projector(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdplab.widgets import strategy_lab

    scales: list[float] = []
    figure = style.titled(go.Figure(go.Bar(x=[1], y=["a"], orientation="h")), "title", "Measured", "alt")
    monkeypatch.setattr(strategy_lab, "pieces", lambda *_: ["words", figure])
    monkeypatch.setattr(strategy_lab, "enlarged", lambda figure, scale: scales.append(round(scale, 3)) or figure)
    lab = StrategyLab(FIXED, **TINY)
    lab.wide.value = "wide"
    lab.present()
    lab.wide.value = ""
    lab.present(False)
    assert scales == [1.2, 1.62, 1.35]


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
    kept_runs.rename(batch, " a  b ")
    assert batch.title.startswith("4: a b, gpt-tiny")
