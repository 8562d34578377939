"""The details of measured runs, below the instrument: a batch, its name, its page, and tabs of tables and figures.

A tab is filled when it is opened, and emptied when it is left or the details are folded: plotly measures the area that
it draws into, and a hidden one has no size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import ipywidgets

from fsdplab.figures import comparison_page
from fsdplab.figures.style import PAGE, enlarged, on_page

from .kept_runs import rename
from .lab_state import Batch, LabState
from .tabs import OF_ONE_RUN, TABS, note, outputs, pieces

PRESENTED, WIDE = 1.35, 1.2  # how much larger type in figures is on a projector, and on a wide page
WIDE_PX, WIDER = 1500, 1500 / 1100  # the least width of a wide page, and that over the usual one
TITLE = "Details of the measured runs"
_WRONG = "color:var(--fsdplab-bad, #c01f25)"

Wanted = tuple[tuple[int, int] | None, int | None]  # a batch's number and count of records, and the run picked


@dataclass
class _Shown:
    """The tab that is filled and its runs, and what was drawn for it and others before."""

    runs: tuple[int, int] | None = None
    filled: tuple[str, Wanted] | None = None
    drawn: dict[tuple[str, Wanted], tuple[dict[str, Any], ...]] = field(default_factory=dict)


class Details:
    """Menus and tabs over the batches of a LabState; `.widget` is folded until it is opened.

    `shows(batch)` is called when another batch, or one with more records, is shown.
    """

    def __init__(self, state: LabState, export_to: str | Path, shows: Callable[[Batch | None], object]) -> None:
        self._state, self._export_to, self._shows = state, Path(export_to), shows
        self._shown = _Shown()
        self._listed: list[tuple[int, int]] | None = None
        self._drawing = threading.RLock()
        self._offering = False
        self._scale = (1.0, 1.0)  # of type, and of the figures' width
        self._make_widgets()
        self.refresh()

    def _make_widgets(self) -> None:
        self.export_button = ipywidgets.Button(
            description="Export HTML", layout={"width": "auto", "min_width": "110px"}
        )
        self.export_button.on_click(lambda _: self.export())
        self.export_button.add_class("fsdplab-press")
        self.exported = ipywidgets.Output()
        of_words = {"style": {"description_width": "initial"}}
        self.batch_menu = ipywidgets.Dropdown(description="Batch", layout={"flex": "2 1 360px"}, **of_words)
        self.run_menu = ipywidgets.Dropdown(description="Run", layout={"flex": "1 1 240px"}, **of_words)
        self.name = ipywidgets.Text(
            description="Name", placeholder="of batch and folder", continuous_update=False,
            layout={"flex": "1 1 240px"}, **of_words,
        )  # fmt: skip
        self.name.observe(self._named, names="value")
        self.outputs = {name: ipywidgets.Output(layout={"min_height": "120px"}) for name in TABS}
        self.tabs = ipywidgets.Tab([*self.outputs.values()], titles=TABS)
        for menu in (self.batch_menu, self.run_menu, self.name):
            menu.add_class("fsdplab-menu")
        for menu in (self.batch_menu, self.run_menu):
            menu.observe(self._picked, names="value")
        self.tabs.observe(self._picked, names="selected_index")
        self.menus = ipywidgets.HBox(
            [self.batch_menu, self.run_menu, self.name, self.export_button],
            layout={"align_items": "center", "flex_flow": "row wrap", "margin": "4px 0"},
        )
        inside = ipywidgets.VBox([self.menus, self.exported, self.tabs])
        self.widget = ipywidgets.Accordion([inside], titles=(TITLE,), selected_index=None)
        self.widget.observe(self._picked, names="selected_index")

    def refresh(self) -> None:
        """Offer the batches of the state, and draw the open tab."""
        self._list_batches()
        self._draw()

    def sized(self, presented: bool, pixels: int) -> None:
        """Draw for a projector, or for a page of this width."""
        wide = pixels >= WIDE_PX
        scale = ((PRESENTED if presented else 1.0) * (WIDE if wide else 1.0), WIDER if wide else 1.0)
        for rest in (self.name, self.export_button):
            rest.layout.display = "none" if presented else ""
        if scale != self._scale:
            self._scale = scale
            with self._drawing:
                self._shown = _Shown(self._shown.runs)
            self._draw()

    @property
    def batch(self) -> Batch | None:
        """The batch that the menu names, else the latest."""
        return (
            next((batch for batch in self._state.offered if batch.number == self.batch_menu.value), None)
            or self._state.batch
        )

    def _list_batches(self) -> None:
        """Offer the batches that have records; when one gets a record, show it."""
        offered, latest = self._state.offered, self._state.batch
        self.menus.layout.display = "" if offered else "none"
        titles = [(batch.title, batch.number) for batch in offered]
        listed = [_counted(batch) for batch in offered]
        if titles != [*self.batch_menu.options] or listed != self._listed:
            shown = self.batch_menu.value if listed == self._listed else latest.number if latest else None
            self._listed = listed
            self._offer(self.batch_menu, titles, shown)

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
        batch = self.batch
        if self._offering or batch is None or change["new"] == batch.name:
            return
        try:
            if self._state.busy and batch is self._state.batches[-1]:
                raise ValueError("the batch is running; its folder can be renamed when it has ended")
            rename(batch, change["new"])
            self._say(f"kept in <code>{escape(str(batch.folder))}</code>" if batch.folder else "")
        except ValueError as wrong:
            self._say(f"<span style='{_WRONG}'>{escape(str(wrong))}</span>")
        except OSError as error:
            words = f"{batch.folder} could not be renamed ({error.strerror})"
            self._say(f"<span style='{_WRONG}'>{escape(words)}</span>")
        self._list_batches()

    def _say(self, html: str) -> None:
        """One line below the menus, or none."""
        self.exported.outputs = tuple(outputs(f"<div style='font-size:15px'>{html}</div>")) if html else ()

    def _picked(self, _: Mapping[str, Any]) -> None:
        if not self._offering:
            self._draw()

    def _draw(self) -> None:
        """Fill the open tab, unless it already shows this; two threads may call it at once."""
        with self._drawing:
            self.widget.layout.display = "" if self._state.offered else "none"
            tab, batch = TABS[self.tabs.selected_index or 0], self.batch
            shown = _counted(batch) if batch else None
            if self._shown.runs != shown:
                self._shown = _Shown(shown)
                self._list_runs(batch)
                self._offering, self.name.value, self._offering = True, batch.name if batch else "", False
                self.name.disabled = not (batch and batch.number)
                self._shows(batch)
            self.run_menu.layout.display = "" if tab in OF_ONE_RUN else "none"
            if self.widget.selected_index is not None:
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
                shown = pieces(tab, self.batch, self.run_menu.value or 0)
            if scale != 1:
                shown = [piece if isinstance(piece, str) else enlarged(piece, scale) for piece in shown]
            self._shown.drawn[tab, wanted] = tuple(output for piece in shown for output in outputs(piece))
        self.outputs[tab].outputs = self._shown.drawn[tab, wanted]
        self._shown.filled = (tab, wanted)

    # ---- export

    def export(self) -> Path | None:
        """Write the page of the batch that is shown and say where it is; None where there is nothing to write."""
        batch = self.batch
        if batch is None:
            return None
        path = self._export_to / f"strategy-lab-{batch.number}.html"
        written = None
        try:
            path.write_text(comparison_page(batch.comparison, batch.rows), encoding="utf-8")
            words = f"written: <a href='{escape(str(path))}' target='_blank'>{escape(str(path.resolve()))}</a>"
            written = path
        except OSError as error:
            words = escape(
                f"{path} could not be written ({error.strerror}); give StrategyLab(export_to=...) a folder that can"
            )
        self._say(words)
        return written


def _counted(batch: Batch) -> tuple[int, int]:
    """A batch's number and how many records it has."""
    return batch.number, len(batch.records)
