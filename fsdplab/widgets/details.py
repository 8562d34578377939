"""The details of measured runs, below the instrument: a batch, its name, its page, and tabs of tables and figures.

A tab is filled when it is opened, and emptied when it is left: plotly measures the area that it draws into, and one
that is hidden has no size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from fsdplab.figures import comparison_page
from fsdplab.figures.style import PAGE, enlarged, on_page

from .lab_state import Batch, LabState
from .running import rename
from .tabs import OF_ONE_RUN, TABS, note, outputs, pieces

PRESENTED, WIDE = 1.35, 1.2  # how much larger type in figures is on a projector, and on a wide page
WIDE_PX, WIDER = 1500, 1500 / 1100  # the least width of a wide page, and that over the usual one
TITLE = "Details of the measured runs"
_BAD = "var(--fsdplab-bad, #c01f25)"
_NONE = Batch(0, ())  # no batch; all batches together have this number too, and no name


class Details:
    """Menus and tabs over the batches of a LabState; `.widget` is folded until it is opened.

    `shows(batch)` is called when another batch, or one with more records, is shown.
    """

    def __init__(self, state: LabState, export_to: str | Path, shows: Callable[[Batch | None], object]) -> None:
        self._state, self._export_to, self._shows = state, Path(export_to), shows
        self._listed: list[tuple[str, int, int]] = []  # title, number and count of records of each batch
        self._shown = (_NONE.number, 0)  # the latter two of the batch that is shown
        self._filled: object = None  # the tab that is filled, and with what
        self._drawn: dict[object, tuple[dict[str, Any], ...]] = {}  # what was drawn for the batch that is shown
        self._type_scale = self._width_scale = 1.0  # of the figures
        self._drawing = threading.RLock()
        self._setting = False  # values of widgets, which is no choice of the reader's
        self._make_widgets()
        self._observe_widgets()
        self.refresh()

    def _make_widgets(self) -> None:
        style = {"description_width": "initial"}
        narrow = {"flex": "1 1 240px"}
        self.batch_menu = ipywidgets.Dropdown(description="Batch", style=style, layout={"flex": "2 1 360px"})
        self.run_menu = ipywidgets.Dropdown(description="Run", style=style, layout=narrow)
        self.name = ipywidgets.Text(
            description="Name", placeholder="of batch and folder", continuous_update=False, style=style, layout=narrow
        )
        button = {"width": "auto", "min_width": "110px"}
        self.export_button = ipywidgets.Button(description="Export HTML", layout=button)
        self.exported = ipywidgets.Output()
        self.outputs = {name: ipywidgets.Output(layout={"min_height": "120px"}) for name in TABS}
        self.tabs = ipywidgets.Tab([*self.outputs.values()], titles=TABS)
        row = {"align_items": "center", "flex_flow": "row wrap", "margin": "4px 0"}
        self.menus = ipywidgets.HBox([self.batch_menu, self.run_menu, self.name, self.export_button], layout=row)
        inside = ipywidgets.VBox([self.menus, self.exported, self.tabs])
        self.widget = ipywidgets.Accordion([inside], titles=(TITLE,), selected_index=None)

    def _observe_widgets(self) -> None:
        for menu in (self.batch_menu, self.run_menu, self.name):
            menu.add_class("fsdplab-menu")
        self.export_button.add_class("fsdplab-press")
        self.export_button.on_click(lambda _: self.export())
        self.name.observe(self._named, names="value")
        self.batch_menu.observe(self._picked, names="value")
        self.run_menu.observe(self._picked, names="value")
        self.tabs.observe(self._picked, names="selected_index")
        self.widget.observe(self._picked, names="selected_index")

    def _picked(self, _: object) -> None:
        if not self._setting:
            self.refresh()

    def sized(self, presented: bool, pixels: int) -> None:
        """Draw for a projector, or for a page of this width."""
        self._type_scale = self._width_scale = 1.0
        if pixels >= WIDE_PX:
            self._type_scale, self._width_scale = WIDE, WIDER
        if presented:
            self._type_scale *= PRESENTED
        for widget in (self.name, self.export_button):
            _show(widget, not presented)
        self.refresh()

    @property
    def batch(self) -> Batch | None:
        """The batch that the menu names, else the latest."""
        for batch in self._state.offered:
            if batch.number == self.batch_menu.value:
                return batch
        return self._state.batch

    def refresh(self) -> None:
        """Offer the batches of the state, and fill the open tab; two threads may call it at once."""
        with self._drawing:
            self._setting = True
            self._list_batches()
            self._setting = False
            tab = TABS[self.tabs.selected_index or 0]
            _show(self.run_menu, tab in OF_ONE_RUN)
            if self.widget.selected_index is not None:  # it is unfolded
                self._fill(tab)

    def _list_batches(self) -> None:
        """Offer the batches that have records; when one gets a record, show it. Then what belongs to the one shown."""
        offered = self._state.offered
        _show(self.menus, bool(offered))
        _show(self.widget, bool(offered))
        listed = [(batch.title, batch.number, len(batch.records)) for batch in offered]
        if listed != self._listed:
            self._offer(listed)
        self._show_batch(self.batch or _NONE)

    def _show_batch(self, batch: Batch) -> None:
        """Write a batch's runs and its name into the menus, when the batch is another or has another record."""
        now = (batch.number, len(batch.records))
        if now == self._shown:
            return
        self._shown, self._drawn = now, {}
        runs = [(run.label, place) for place, run in enumerate(batch.views)]
        if [*self.run_menu.options] != runs:
            self.run_menu.options = runs
            self.run_menu.value = runs[-1][1] if runs else None
        self.name.value = batch.name
        self.name.disabled = batch.number == _NONE.number
        self._shows(self.batch)

    def _offer(self, listed: list[tuple[str, int, int]]) -> None:
        """Write the batches into their menu; it moves to the latest where a record came, not where one was renamed."""
        grew = [entry[1:] for entry in listed] != [entry[1:] for entry in self._listed]
        number = self.batch_menu.value
        if grew and self._state.batch:
            number = self._state.batch.number
        self.batch_menu.options = [(title, number) for title, number, _ in listed]
        self.batch_menu.value = number
        self._listed = listed

    def _fill(self, tab: str) -> None:
        """Fill the tab, from what was drawn before or now, and empty the others."""
        run = 0
        if tab in OF_ONE_RUN:
            run = self.run_menu.value or 0
        wanted = (self._shown, tab, run, self._type_scale, self._width_scale)
        if self._filled == wanted:
            return
        for place in self.outputs.values():
            place.outputs = ()
        if wanted not in self._drawn:
            self.outputs[tab].outputs = outputs([note("drawing …")])
            self._drawn[wanted] = self._draw(tab, run)
        self.outputs[tab].outputs = self._drawn[wanted]
        self._filled = wanted

    def _draw(self, tab: str, run: int) -> tuple[dict[str, Any], ...]:
        with on_page(PAGE * self._width_scale / self._type_scale):
            shown = pieces(tab, self.batch, run)
        if self._type_scale == 1:
            return outputs(shown)
        return outputs(piece if isinstance(piece, str) else enlarged(piece, self._type_scale) for piece in shown)

    # ---- the batch that is shown: its name, and its page

    def _named(self, change: Mapping[str, Any]) -> None:
        """Give the batch that is shown its name, and its folder with it."""
        batch, name = self.batch, change["new"]
        if self._setting or batch is None or name == batch.name:
            return
        try:
            if self._state.busy and batch is self._state.batches[-1]:
                raise ValueError("the batch is running; its folder can be renamed when it has ended")
            rename(batch, name)
            where = ""
            if batch.folder:
                where = f"kept in <code>{escape(str(batch.folder))}</code>"
            self._say(where)
        except ValueError as wrong:
            self._say(escape(str(wrong)), _BAD)
        except OSError as error:
            words = f"{batch.folder} could not be renamed ({error.strerror})"
            self._say(escape(words), _BAD)
        self.refresh()

    def export(self) -> Path | None:
        """Write the page of the batch that is shown and say where it is; None where there is nothing to write."""
        batch = self.batch
        if batch is None:
            return None
        path = self._export_to / f"strategy-lab-{batch.number}.html"
        try:
            path.write_text(comparison_page(batch.comparison, batch.rows), encoding="utf-8")
        except OSError as error:
            why = f"{path} could not be written ({error.strerror}); give StrategyLab(export_to=...) a folder that can"
            self._say(escape(why))
            return None
        self._say(f"written: <a href='{escape(str(path))}' target='_blank'>{escape(str(path.resolve()))}</a>")
        return path

    def _say(self, html: str, colour: str = "inherit") -> None:
        """One line below the menus, or none."""
        lines = []
        if html:
            lines.append(f"<div style='font-size:15px;color:{colour}'>{html}</div>")
        self.exported.outputs = outputs(lines)


def _show(widget: ipywidgets.DOMWidget, on: bool) -> None:
    widget.layout.display = "" if on else "none"
