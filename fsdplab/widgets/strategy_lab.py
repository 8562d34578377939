"""The view of the strategy lab: controls, Run and Cancel, and the tabs of results.

The state is in `state`, runs are in `runner`; this file only lays out and redraws. A tab is filled when opened and
emptied when left: plotly measures the area that it draws into, and a hidden one has no size.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets
from IPython.display import DisplayHandle, display

from fsdplab.figures import comparison_page, findings_of
from fsdplab.figures.outlook import outlook_html
from fsdplab.figures.style import PAGE, enlarged, on_page
from fsdplab.records import RunRecord

from .at_once import WAITING, script, style
from .controls import Controls
from .kept_runs import rename
from .lab_state import Batch, LabState
from .live_curve import picture_of
from .running import Runner
from .running_cells import RunningCells, this_shell
from .stills import Still, outputs
from .tabs import OF_ONE_RUN, TABS, note, pieces

PRESENTED, WIDE = 1.35, 1.2  # how much larger type in figures is on a projector, and on a wide page
WIDER = 1500 / 1100  # the least width of a wide page over the usual one
_BAR = {"running": "info", "cancelling": "warning", "cancelled": "warning", "failed": "danger", "done": "success"}

Wanted = tuple[tuple[int, int] | None, int | None]  # a batch's number and count of records, and the run picked


@dataclass
class _Shown:
    """The tab that is filled and its runs, and what was drawn for it and others before."""

    runs: tuple[int, int] | None = None
    filled: tuple[str, Wanted] | None = None
    drawn: dict[tuple[str, Wanted], tuple[dict[str, Any], ...]] = field(default_factory=dict)


class StrategyLab:
    """Controls, Run, Cancel and tabs over a LabState: `StrategyLab(model="gpt-tiny", ranks=2)`; display it in a
    notebook.

    Choices are the fields of `Choices`; `fixed` are further fields of each RunSpec (`{"sequence_length": 32}`). Records
    go below `directory` (None: `lab-runs/` in the working folder) and come back in the next kernel, pages of Export
    into `export_to`. ValueError says which choice is wrong.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any] | None = None,
        *,
        directory: str | Path | None = None,
        export_to: str | Path = ".",
        **choices: Any,
    ) -> None:
        self.state = LabState(fixed, **choices)
        if self.state.request.errors:
            raise ValueError("; ".join(self.state.request.errors.values()))
        self.runner = Runner(self.state, directory)
        self._export_to = Path(export_to)
        self._stills: list[DisplayHandle] = []
        self._shown = _Shown()
        self._listed: list[tuple[int, int, str]] | None = None
        self._drawing = threading.RLock()
        self._offering = False
        self._presenting = False
        self._presses = 0
        self._cells = RunningCells(this_shell())
        self.controls = Controls(self.state)
        self._make_widgets()
        self.state.subscribe(self._refresh)
        self._refresh()

    @property
    def records(self) -> list[RunRecord]:
        """The records of the batch that is shown, for the cells that follow."""
        batch = self._batch
        return batch.rows if batch else []

    def run(self, timeout: float | None = None) -> list[RunRecord]:
        """Press Run, wait, and return the records, for unattended notebooks. RuntimeError says why there are none; an
        interrupt of the cell cancels the runs.
        """
        try:
            ended = self.runner.start() and self.runner.wait(timeout)
        except KeyboardInterrupt:
            self.runner.cancel()
            raise
        if not ended or self.state.status == "failed":
            raise RuntimeError(self.state.message)
        return self.records

    def present(self, on: bool = True) -> None:
        """For a projector: larger type in controls, table and figures, and fewer controls; `present(False)` ends it."""
        self._presenting = on
        (self.widget.add_class if on else self.widget.remove_class)("fsdplab-present")
        self.controls.present(on)
        for rest in (self.name, self.export_button):
            rest.layout.display = "none" if on else ""
        self._redraw()

    def _ipython_display_(self) -> None:
        display({**self.widget._repr_mimebundle_(), "text/plain": ""}, raw=True)
        self._stills.append(display(Still(self.state.batch), display_id=True))

    # ---- widgets

    def _make_widgets(self) -> None:
        self.run_button = _button("Run", "success", lambda _: self._answer(self._start))
        self.cancel_button = _button("Cancel", "", lambda _: self._answer(self._cancel))
        for button in (self.run_button, self.cancel_button):
            button.add_class("fsdplab-answers")
        self.export_button = _button("Export HTML", "", lambda _: self.export())
        self.bar = ipywidgets.FloatProgress(min=0, max=1, layout={"width": "220px"})
        self.message = ipywidgets.HTML(layout={"flex": "1 1 300px"})
        self.outlook = ipywidgets.HTML()
        self.outlook.add_class("fsdplab-said")
        self.live = ipywidgets.HTML()
        self.live.add_class("fsdplab-said")
        self.shown = ipywidgets.Text(layout={"display": "none"})  # what the page shows at a press, see lab.js
        self.shown.add_class("fsdplab-shown")
        self.wide = ipywidgets.Text(layout={"display": "none"})  # "wide" where the page has much width, see lab.js
        self.wide.add_class("fsdplab-wide")
        self.wide.observe(lambda _: self._redraw(), names="value")
        self.at_once = ipywidgets.Output(layout={"display": "none"})
        self.at_once.outputs = (_script(),)
        self.exported = ipywidgets.Output()
        self.batch_menu = ipywidgets.Dropdown(
            description="Batch", layout={"flex": "2 1 360px"}, style={"description_width": "initial"}
        )
        self.run_menu = ipywidgets.Dropdown(
            description="Run", layout={"flex": "1 1 240px"}, style={"description_width": "initial"}
        )
        self.name = ipywidgets.Text(
            description="Name",
            placeholder="of batch and folder",
            continuous_update=False,
            layout={"flex": "1 1 240px"},
            style={"description_width": "initial"},
        )
        self.name.observe(self._named, names="value")
        self.outputs = {name: ipywidgets.Output(layout={"min_height": "120px"}) for name in TABS}
        self.tabs = ipywidgets.Tab([*self.outputs.values()], titles=tuple(TABS))
        for menu in (self.batch_menu, self.run_menu, self.name):
            menu.add_class("fsdplab-menu")
        for menu in (self.batch_menu, self.run_menu):
            menu.observe(self._picked, names="value")
        self.tabs.observe(self._picked, names="selected_index")
        self.widget = self._layout()

    def _layout(self) -> ipywidgets.VBox:
        row = {"align_items": "center", "flex_flow": "row wrap"}
        buttons = ipywidgets.HBox(
            [self.run_button, self.cancel_button, self.bar, self.message], layout={**row, "margin": "8px 0 0 0"}
        )
        self.menus = ipywidgets.HBox(
            [self.batch_menu, self.run_menu, self.name, self.export_button], layout={**row, "margin": "4px 0"}
        )
        parts = [self.controls.box, self.outlook, buttons, self.live, self.menus, self.exported, self.tabs]
        box = ipywidgets.VBox(
            [ipywidgets.HTML(style(), layout={"display": "none"}), self.at_once, self.shown, self.wide, *parts]
        )
        box.add_class("fsdplab-lab")
        return box

    # ---- from the state to the page

    def _refresh(self) -> None:
        state = self.state
        self.controls.refresh()
        waiting = self._cells.waiting
        self.run_button.disabled = state.busy or waiting
        self.cancel_button.disabled = state.status != "running" and not waiting
        self.bar.value = 1.0 if state.status == "done" else state.progress.share
        self.bar.bar_style = _BAR.get(state.status, "")
        alarm = (
            " style='color:var(--fsdplab-bad, #c01f25)'"
            if state.status == "failed" or (state.status == "idle" and state.last_error)
            else ""
        )
        self.message.value = (  # the number makes each answer to a press a new line, which the script waits for
            f"<div class='fsdplab-message' role='status' data-press='{self._presses}'{alarm}>"
            f"{escape(WAITING if waiting else state.message)}</div>"
        )
        self.live.value = picture_of(state.curves)
        self.outlook.value = outlook_html(state.outlook)
        self._list_batches()
        self._draw()

    @property
    def _batch(self) -> Batch | None:
        """The batch that the menu names, else the latest."""
        return (
            next((batch for batch in self.state.offered if batch.number == self.batch_menu.value), None)
            or self.state.batch
        )

    @property
    def _scale(self) -> tuple[float, float]:
        """How many times the usual type and the usual width figures have."""
        type_size = (PRESENTED if self._presenting else 1) * (WIDE if self.wide.value else 1)
        return type_size, WIDER if self.wide.value else 1

    def _redraw(self) -> None:
        """Draw the open tab again, as nothing was drawn before in this size."""
        with self._drawing:
            self._shown = _Shown(self._shown.runs)
        self._refresh()

    def _answer(self, press: Callable[[], object]) -> None:
        """A button was pressed: do it, and show that it was heard, also where nothing changed."""
        self._presses += 1
        if self.shown.value and not self.state.busy:
            self.controls.take_shown(json.loads(self.shown.value))
        press()
        self._refresh()

    def _start(self) -> None:
        """Start the runs, after the cells that the kernel runs now."""
        if self._cells.busy_elsewhere and not self.state.request.errors:
            self._cells.after(self._start_waiting)
        else:
            self.runner.start()

    def _start_waiting(self) -> None:
        self.runner.start()
        self._refresh()

    def _cancel(self) -> None:
        self._cells.forget()
        self.runner.cancel()

    def _list_batches(self) -> None:
        """Offer the batches that have records; when one gets a record, show it."""
        offered = self.state.offered
        listed = [(batch.number, len(batch.records), batch.name) for batch in offered]
        self.menus.layout.display = "" if offered else "none"
        if listed == self._listed:
            return
        latest, renamed = (
            self.state.batch,
            self._listed is not None and [*map(_what, self._listed)] == [*map(_what, listed)],
        )
        shown = self.batch_menu.value if renamed else latest.number if offered and latest else None
        self._listed = listed
        self._offer(self.batch_menu, [(batch.title, batch.number) for batch in offered], shown)

    def _list_runs(self, batch: Batch | None) -> None:
        options = [(run.label, place) for place, run in enumerate(batch.views)] if batch else []
        if list(self.run_menu.options) != options:
            self._offer(self.run_menu, options, options[-1][1] if options else None)

    def _offer(self, menu: ipywidgets.Dropdown, options: list[tuple[str, int]], value: int | None) -> None:
        """Set a menu's options without drawing for intermediate values."""
        self._offering = True
        menu.options = options
        menu.value = value
        self._offering = False

    def _named(self, change: Mapping[str, Any]) -> None:
        """Give the batch that is shown its name, and its folder with it."""
        batch = self._batch
        if self._offering or batch is None or change["new"] == batch.name:
            return
        try:
            if self.state.busy and batch is self.state.batches[-1]:
                raise ValueError("the batch is running; its folder can be renamed when it has ended")
            rename(batch, change["new"])
            said = f"kept in <code>{escape(str(batch.folder))}</code>" if batch.folder else ""
        except ValueError as wrong:
            said = f"<span style='color:var(--fsdplab-bad, #c01f25)'>{escape(str(wrong))}</span>"
        except OSError as error:
            words = f"{batch.folder} could not be renamed ({error.strerror})"
            said = f"<span style='color:var(--fsdplab-bad, #c01f25)'>{escape(words)}</span>"
        self.exported.outputs = tuple(outputs(f"<div style='font-size:15px'>{said}</div>")) if said else ()
        self._list_batches()

    def _picked(self, _: Mapping[str, Any]) -> None:
        if not self._offering:
            self._draw()

    def _draw(self) -> None:
        """Fill the open tab, unless it already shows this; two threads may call it at once."""
        with self._drawing:
            tab, batch = list(TABS)[self.tabs.selected_index or 0], self._batch
            shown = (batch.number, len(batch.records)) if batch else None
            if self._shown.runs != shown:
                self._shown = _Shown(shown)
                self._list_runs(batch)
                self._offering, self.name.value, self._offering = True, batch.name if batch else "", False
                self.name.disabled = not (batch and batch.number)
                for still in self._stills:
                    still.update(Still(batch))
            self.run_menu.layout.display = "" if tab in OF_ONE_RUN else "none"
            self._fill(tab, (shown, self.run_menu.value if tab in OF_ONE_RUN else None))

    def _fill(self, tab: str, wanted: Wanted) -> None:
        """Fill the tab, from what was drawn before or now, and empty the others."""
        if self._shown.filled == (tab, wanted):
            return
        for name, place in self.outputs.items():
            place.outputs = tuple(outputs(note("drawing …"))) if name == tab else ()
        if (tab, wanted) not in self._shown.drawn:
            scale, wider = self._scale
            with on_page(PAGE * wider / scale):
                shown = pieces(tab, self._batch, self.run_menu.value or 0)
            if scale != 1:
                shown = [piece if isinstance(piece, str) else enlarged(piece, scale) for piece in shown]
            self._shown.drawn[tab, wanted] = tuple(output for piece in shown for output in outputs(piece))
        self.outputs[tab].outputs = self._shown.drawn[tab, wanted]
        self._shown.filled = (tab, wanted)

    # ---- export

    def export(self) -> Path | None:
        """Write the page of the batch that is shown and say where it is; None where there is nothing to write."""
        batch = self._batch
        if batch is None:
            return None
        path = self._export_to / f"strategy-lab-{batch.number}.html"
        written = None
        try:
            path.write_text(comparison_page(batch.comparison, batch.rows, findings_of(batch.rows)), encoding="utf-8")
            words = f"written: <a href='{escape(str(path))}' target='_blank'>{escape(str(path.resolve()))}</a>"
            written = path
        except OSError as error:
            words = escape(
                f"{path} could not be written ({error.strerror}); give StrategyLab(export_to=...) a folder that can"
            )
        self.exported.outputs = tuple(outputs(f"<div style='font-size:15px'>{words}</div>"))
        return written


def _button(words: str, style: str, pressed: Callable[[ipywidgets.Button], object]) -> ipywidgets.Button:
    button = ipywidgets.Button(description=words, button_style=style, layout={"width": "auto", "min_width": "110px"})
    button.add_class("fsdplab-press")
    button.on_click(pressed)
    return button


def _what(listed: tuple[int, int, str]) -> tuple[int, int]:
    """A line of the menu without its name."""
    return listed[:2]


def _script() -> dict[str, Any]:
    """The script as an output: JupyterLab runs it when the lab appears."""
    return {"output_type": "display_data", "data": {"application/javascript": script()}, "metadata": {}}
