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


class Details:
    """Menus and tabs over the batches of a LabState; `.widget` is folded until it is opened.

    `shows(batch)` is called when another batch, or one with more records, is shown.
    """

    def __init__(self, state: LabState, export_to: str | Path, shows: Callable[[Batch | None], object]) -> None:
        self._state, self._export_to, self._shows = state, Path(export_to), shows
        self._listed: list[tuple[str, int, int]] = []  # title, number and count of records of each batch
        self._shown: object = None  # the latter two of the batch that is shown
        self._filled: object = None  # the tab that is filled, and with what
        self._drawn: dict[object, tuple[dict[str, Any], ...]] = {}  # what was drawn for the batch that is shown
        self._scale = (1.0, 1.0)  # of type, and of the figures' width
        self._drawing = threading.RLock()
        self._setting = False  # values of widgets, which is no choice of the reader's
        self._make_widgets()
        self.refresh()

    def _make_widgets(self) -> None:
        of_words = {"style": {"description_width": "initial"}}
        self.batch_menu = ipywidgets.Dropdown(description="Batch", layout={"flex": "2 1 360px"}, **of_words)
        self.run_menu = ipywidgets.Dropdown(description="Run", layout={"flex": "1 1 240px"}, **of_words)
        self.name = ipywidgets.Text(
            description="Name", placeholder="of batch and folder", continuous_update=False,
            layout={"flex": "1 1 240px"}, **of_words,
        )  # fmt: skip
        self.export_button = ipywidgets.Button(
            description="Export HTML", layout={"width": "auto", "min_width": "110px"}
        )
        self.exported = ipywidgets.Output()
        self.outputs = {name: ipywidgets.Output(layout={"min_height": "120px"}) for name in TABS}
        self.tabs = ipywidgets.Tab([*self.outputs.values()], titles=TABS)
        menus = [self.batch_menu, self.run_menu, self.name]
        self.menus = ipywidgets.HBox(
            [*menus, self.export_button], layout={"align_items": "center", "flex_flow": "row wrap", "margin": "4px 0"}
        )
        inside = ipywidgets.VBox([self.menus, self.exported, self.tabs])
        self.widget = ipywidgets.Accordion([inside], titles=(TITLE,), selected_index=None)
        for menu in menus:
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
        self._scale = ((PRESENTED if presented else 1.0) * (WIDE if wide else 1.0), WIDER if wide else 1.0)
        for rest in (self.name, self.export_button):
            rest.layout.display = "none" if presented else ""
        self.refresh()

    @property
    def batch(self) -> Batch | None:
        """The batch that the menu names, else the latest."""
        named = [batch for batch in self._state.offered if batch.number == self.batch_menu.value]
        return named[0] if named else self._state.batch

    def refresh(self) -> None:
        """Offer the batches of the state, and fill the open tab; two threads may call it at once."""
        with self._drawing:
            self._setting = True
            self._list_batches()
            self._setting = False
            tab = TABS[self.tabs.selected_index or 0]
            self.run_menu.layout.display = "" if tab in OF_ONE_RUN else "none"
            if self.widget.selected_index is not None:
                self._fill(tab, self.run_menu.value or 0 if tab in OF_ONE_RUN else 0)

    def _list_batches(self) -> None:
        """Offer the batches that have records; when one gets a record, show it. Then what belongs to the one shown."""
        offered = self._state.offered
        self.menus.layout.display = self.widget.layout.display = "" if offered else "none"
        listed = [(batch.title, batch.number, len(batch.records)) for batch in offered]
        if listed != self._listed:
            grew = [each[1:] for each in listed] != [each[1:] for each in self._listed]
            latest = self._state.batch.number if self._state.batch else None
            shown = latest if grew else self.batch_menu.value
            self.batch_menu.options, self.batch_menu.value = [each[:2] for each in listed], shown
        self._listed, batch = listed, self.batch
        now = (batch.number, len(batch.records)) if batch else None
        if now == self._shown:
            return
        self._shown, self._drawn = now, {}
        runs = [(run.label, place) for place, run in enumerate(batch.views)] if batch else []
        if [*self.run_menu.options] != runs:
            self.run_menu.options, self.run_menu.value = runs, runs[-1][1] if runs else None
        self.name.value, self.name.disabled = batch.name if batch else "", not (batch and batch.number)
        self._shows(batch)

    def _fill(self, tab: str, run: int) -> None:
        """Fill the tab, from what was drawn before or now, and empty the others."""
        wanted = (self._shown, tab, run, self._scale)
        if self._filled == wanted:
            return
        for name, place in self.outputs.items():
            place.outputs = outputs([note("drawing …")] if name == tab else [])
        if wanted not in self._drawn:
            scale, wider = self._scale
            with on_page(PAGE * wider / scale):
                shown = pieces(tab, self.batch, run)
            large = [piece if isinstance(piece, str) or scale == 1 else enlarged(piece, scale) for piece in shown]
            self._drawn[wanted] = outputs(large)
        self.outputs[tab].outputs = self._drawn[wanted]
        self._filled = wanted

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
            self._say(f"kept in <code>{escape(str(batch.folder))}</code>" if batch.folder else "")
        except ValueError as wrong:
            self._say(escape(str(wrong)), "var(--fsdplab-bad, #c01f25)")
        except OSError as error:
            words = f"{batch.folder} could not be renamed ({error.strerror})"
            self._say(escape(words), "var(--fsdplab-bad, #c01f25)")
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
        line = f"<div style='font-size:15px;color:{colour}'>{html}</div>"
        self.exported.outputs = outputs([line] if html else [])
