"""The details of measured runs, below the instrument: a batch, its name, its page, and tabs of tables and figures.

A tab is filled when it is opened, and emptied when it is left: plotly measures the area that it draws into, and one
that is hidden has no size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import ipywidgets

from fsdplab.figures import comparison_page
from fsdplab.figures.style import PAGE, enlarged, on_page

from .lab_state import Batch, LabState
from .running import rename
from .tabs import OF_ONE_RUN, TABS, Piece, note, outputs, pieces

PRESENTED = 1.35  # how much larger type in figures is on a projector
WIDE = 1.2  # how much larger it is on a wide page
WIDE_PX = 1500  # the least width of a wide page
WIDER = WIDE_PX / 1100  # that width over the usual one
TITLE = "Details of the measured runs"
_BAD = "var(--fsdplab-bad, #c01f25)"
_NONE = Batch(0, ())  # no batch; all batches together have this number too, and no name


class _Entry(NamedTuple):
    """A batch as the menu offers it."""

    title: str
    number: int
    records: int  # how many it has


class Details:
    """Menus and tabs over the batches of a LabState; `.widget` is folded until it is opened.

    `shows(batch)` is called when another batch, or one with more records, is shown.
    """

    def __init__(self, state: LabState, export_to: str | Path, shows: Callable[[Batch | None], object]) -> None:
        self._state = state
        self._export_to = Path(export_to)
        self._shows = shows
        self._listed: list[_Entry] = []  # what the batch menu offers
        self._shown = (_NONE.number, 0)  # number and count of records of the batch that is shown
        self._filled: object = None  # the tab that is filled, and with what
        self._drawn: dict[object, tuple[dict[str, Any], ...]] = {}  # what was drawn for the batch that is shown
        self._type_scale = 1.0  # of the figures
        self._width_scale = 1.0
        self._drawing = threading.RLock()
        self._setting = False  # whether values of widgets are being set, which is no choice of the reader's
        self._make_menus()
        self._make_tabs()
        self._observe_widgets()
        self.refresh()

    def _make_menus(self) -> None:
        """Make the row above the tabs: which batch, which of its runs, the batch's name, and its page."""
        style = {"description_width": "initial"}
        narrow = {"flex": "1 1 240px"}
        wide = {"flex": "2 1 360px"}
        self.batch_menu = ipywidgets.Dropdown(description="Batch", style=style, layout=wide)
        self.run_menu = ipywidgets.Dropdown(description="Run", style=style, layout=narrow)
        self.name = ipywidgets.Text(
            description="Name",
            placeholder="of batch and folder",
            continuous_update=False,  # a folder is renamed once the name is complete, not with each letter
            style=style,
            layout=narrow,
        )
        button = {"width": "auto", "min_width": "110px"}
        self.export_button = ipywidgets.Button(description="Export HTML", layout=button)
        row = {"align_items": "center", "flex_flow": "row wrap", "margin": "4px 0"}
        shown = [self.batch_menu, self.run_menu, self.name, self.export_button]
        self.menus = ipywidgets.HBox(shown, layout=row)

    def _make_tabs(self) -> None:
        """Make the tabs, and the line above them that says where something was written."""
        self.exported = ipywidgets.Output()
        self.outputs: dict[str, ipywidgets.Output] = {}
        for tab in TABS:
            self.outputs[tab] = ipywidgets.Output(layout={"min_height": "120px"})
        self.tabs = ipywidgets.Tab([*self.outputs.values()], titles=TABS)
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
        wide = pixels >= WIDE_PX
        self._type_scale = WIDE if wide else 1.0
        self._width_scale = WIDER if wide else 1.0
        if presented:
            self._type_scale *= PRESENTED
        # an audience neither renames nor exports
        _show(self.name, not presented)
        _show(self.export_button, not presented)
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
            # setting a menu's options calls `_picked`, which must not begin anew
            self._setting = True
            self._list_batches()
            self._setting = False
            # the index is None where no tab is selected
            tab = TABS[self.tabs.selected_index or 0]
            _show(self.run_menu, tab in OF_ONE_RUN)
            if self.widget.selected_index is not None:  # it is unfolded
                self._fill(tab)

    def _list_batches(self) -> None:
        """Offer the batches that have records; when one gets a record, show it. Then what belongs to the one shown."""
        offered = self._state.offered
        _show(self.menus, bool(offered))
        _show(self.widget, bool(offered))
        listed = [_Entry(batch.title, batch.number, len(batch.records)) for batch in offered]
        if listed != self._listed:
            self._offer(listed)
        self._show_batch(self.batch or _NONE)

    def _show_batch(self, batch: Batch) -> None:
        """Write a batch's runs and its name into the menus, when the batch is another or has another record."""
        now = (batch.number, len(batch.records))  # it is drawn anew with each record
        if now == self._shown:
            return
        self._shown = now
        self._drawn = {}
        runs = [(run.label, place) for place, run in enumerate(batch.views)]
        # equal options are left, as new ones would move the menu
        if list(self.run_menu.options) != runs:
            self.run_menu.options = runs
            # no run can be chosen where there is none
            latest = None
            if runs:
                latest = len(runs) - 1
            self.run_menu.value = latest
        self.name.value = batch.name
        self.name.disabled = batch.number == _NONE.number
        self._shows(self.batch)

    def _offer(self, listed: list[_Entry]) -> None:
        """Write the batches into their menu; it moves to the latest where a record came, not where one was renamed."""
        number = self.batch_menu.value
        latest = self._state.batch
        # a batch or a record came: the menu moves to the latest
        if latest and _untitled(listed) != _untitled(self._listed):
            number = latest.number
        self.batch_menu.options = [(entry.title, entry.number) for entry in listed]
        # new options have set the menu to its first entry
        self.batch_menu.value = number
        self._listed = listed

    def _fill(self, tab: str) -> None:
        """Fill the tab, from what was drawn before or now, and empty the others."""
        run = 0
        if tab in OF_ONE_RUN:
            run = self.run_menu.value or 0
        # all that a tab's content depends on
        wanted = (self._shown, tab, run, self._type_scale, self._width_scale)
        if self._filled == wanted:
            return
        # a figure in a hidden tab would be drawn without a size
        for output in self.outputs.values():
            output.outputs = ()
        opened = self.outputs[tab]
        if wanted not in self._drawn:
            # the tab would look empty for as long as its figures take
            opened.outputs = outputs([note("drawing …")])
            self._drawn[wanted] = self._draw(tab, run)
        opened.outputs = self._drawn[wanted]
        self._filled = wanted

    def _draw(self, tab: str, run: int) -> tuple[dict[str, Any], ...]:
        # drawn for a page that is narrower by as much as the figures are enlarged afterwards
        page_width = PAGE * self._width_scale / self._type_scale
        with on_page(page_width):
            drawn = pieces(tab, self.batch, run)
        if self._type_scale == 1:
            return outputs(drawn)
        scaled: list[Piece] = []
        # HTML takes its size from the page's styles, figures have theirs in pixels
        for piece in drawn:
            if not isinstance(piece, str):
                piece = enlarged(piece, self._type_scale)
            scaled.append(piece)
        return outputs(scaled)

    # ---- the batch that is shown: its name, and its page

    def _named(self, change: Mapping[str, Any]) -> None:
        """Give the batch that is shown its name, and its folder with it."""
        batch = self.batch
        name = change["new"]
        # the menu has set the name, not the reader
        if self._setting or batch is None or name == batch.name:
            return
        try:
            if self._state.busy and batch is self._state.batches[-1]:
                raise ValueError("the batch is running; its folder can be renamed when it has ended")
            rename(batch, name)
            kept_where = ""
            if batch.folder:
                folder = escape(str(batch.folder))
                kept_where = f"kept in <code>{folder}</code>"
            self._say(kept_where)
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
            page = comparison_page(batch.comparison, batch.rows)
            path.write_text(page, encoding="utf-8")
        except OSError as error:
            why = f"{path} could not be written ({error.strerror}); give StrategyLab(export_to=...) a folder that can"
            self._say(escape(why))
            return None
        # the link as it was given, which the notebook's server finds; the words as the whole path
        link = escape(str(path))
        whole_path = escape(str(path.resolve()))
        self._say(f"written: <a href='{link}' target='_blank'>{whole_path}</a>")
        return path

    def _say(self, html: str, colour: str = "inherit") -> None:
        """One line below the menus, or none."""
        lines = []
        if html:
            lines.append(f"<div style='font-size:15px;color:{colour}'>{html}</div>")
        self.exported.outputs = outputs(lines)


def _untitled(listed: list[_Entry]) -> list[tuple[int, int]]:
    """Return number and count of records of each batch: all of an entry but what renaming changes."""
    return [(entry.number, entry.records) for entry in listed]


def _show(widget: ipywidgets.DOMWidget, on: bool) -> None:
    widget.layout.display = "" if on else "none"
