"""The controls of the strategy lab: one widget a choice, its label above it and its error below it.

A change becomes `state.choose(...)`, and `refresh` shows the state on the controls.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

import ipywidgets

from fsdplab.planning.links import PRESETS as LINKS
from fsdplab.sessions.spec import CHECKPOINTS, ENGINES, PRECISIONS, STRATEGIES, UNITS

from .choices import (
    CUSTOM,
    LINK_CHOICES,
    MODELS,
    NO_LINK,
    PREFETCH,
    RANKS,
    SHARD_SIZES,
    TARGETS,
    TUNNEL,
    TUNNELS,
    Choices,
)
from .lab_state import LabState

# (choice, label, values): dropdowns; the texts and the chips are built below
_MENUS: tuple[tuple[str, str, Sequence[str | int]], ...] = (
    ("model", "Model", MODELS),
    ("ranks", "Ranks", RANKS),
    ("precision", "Precision", PRECISIONS),
    ("units", "Units", UNITS),
    ("prefetch", "Prefetch (units ahead)", PREFETCH),
    ("checkpoint", "Recompute activations", CHECKPOINTS),
)
_LINK_WORDS = {NO_LINK: "none", CUSTOM: "custom …", TUNNEL: "wind tunnel …"}
PRESENTED = ("model", "ranks", "card", "link", "custom_link", "tunnel", "as_model", "strategies")  # in present()
# A choice that depends on another: the control is hidden until then.
_ONLY_WITH: dict[str, Callable[[Choices], bool]] = {
    "custom_link": lambda choices: choices.link == CUSTOM,
    "tunnel": lambda choices: choices.link == TUNNEL,
    "as_model": lambda choices: choices.link == TUNNEL,
    "shard_size": lambda choices: "hybrid_shard" in choices.strategies,
}


class Controls:
    """All controls of one LabState: `.box` is the widget, `.widgets` the control of each choice by name."""

    def __init__(self, state: LabState) -> None:
        self._state = state
        self._few = False
        self._errors: dict[str, ipywidgets.HTML] = {}
        self._cells: dict[str, ipywidgets.VBox] = {}
        self.widgets: dict[str, ipywidgets.Widget] = {}
        self.chips: dict[str, dict[str, ipywidgets.ToggleButton]] = {}
        menus = [
            self._cell(name, _menu(title, [(str(value), value) for value in values])) for name, title, values in _MENUS
        ]
        steps = self._cell("steps", ipywidgets.IntText(description="Timed steps"))
        card = self._cell(
            "card",
            ipywidgets.Text(description="Card (emulated)", placeholder="none, or 300MB", continuous_update=False),
        )
        chips = [self._chips("strategies", "Strategies", STRATEGIES), self._chips("engines", "Engines", _engines())]
        self.box = ipywidgets.VBox([_grid([*menus, steps, card, *self._network()]), *chips])
        self.refresh()

    def refresh(self) -> None:
        """Write the state's choices, errors and status onto the controls."""
        choices = self._state.choices
        for name, widget in self.widgets.items():
            if widget.value != getattr(choices, name) and _offers(widget, getattr(choices, name)):
                widget.value = getattr(choices, name)
            widget.disabled = self._state.busy
        for name, group in self.chips.items():
            for value, chip in group.items():
                chip.value, chip.disabled = value in getattr(choices, name), self._state.busy
        for name, line in self._errors.items():
            words = self._state.request.errors.get(name, "")
            line.value = f"<div class='fsdplab-error' role='alert'>{escape(words)}</div>" if words else ""
        for name, needed in _ONLY_WITH.items():
            self._cells[name].layout.display = "" if needed(choices) else "none"
        for name, cell in self._cells.items():
            if self._few and name not in PRESENTED and name not in self._state.request.errors:
                cell.layout.display = "none"
            elif name not in _ONLY_WITH:
                cell.layout.display = ""

    def take_shown(self, shown: Mapping[str, Any]) -> None:
        """Choose what the page shows: a control's label or text by its name, the pressed chips as a list."""
        changes = {
            name: value
            for name, text in shown.items()
            if (value := self._value_of(name, text)) is not None and value != getattr(self._state.choices, name)
        }
        if changes:
            self._state.choose(**changes)

    def _value_of(self, name: str, text: Any) -> Any:
        """The value of what a control shows; None where it shows none."""
        if name in self.chips:
            return tuple(value for value in self.chips[name] if value in text)
        widget = self.widgets.get(name)
        if isinstance(widget, ipywidgets.Dropdown):
            return dict(widget.options).get(text)
        if isinstance(widget, ipywidgets.IntText):
            return int(text) if re.fullmatch(r"-?\d{1,9}", text) else None
        return text if widget is not None else None

    def present(self, few: bool) -> None:
        """Show only the controls that a talk moves, and those with an error."""
        self._few = few
        self.refresh()

    def _network(self) -> list[ipywidgets.Widget]:
        links = [
            (_LINK_WORDS.get(name) or f"{name}: {LINKS[name].words.partition(',')[0]}", name) for name in LINK_CHOICES
        ]
        return [
            self._cell("link", _menu("Link (emulated)", links)),
            self._cell(
                "custom_link",
                ipywidgets.Text(description="Bandwidth[, latency]", placeholder="10gbit,50us", continuous_update=False),
            ),
            self._cell(
                "tunnel",
                ipywidgets.Combobox(
                    description="Tunnel: cards", options=TUNNELS, ensure_option=False, continuous_update=False
                ),
            ),
            self._cell("as_model", _menu("Tunnel: their model", [(name, name) for name in TARGETS])),
            self._cell("shard_size", _menu("Ranks a shard group", [(str(size), size) for size in SHARD_SIZES])),
        ]

    def _cell(self, name: str, widget: ipywidgets.Widget) -> ipywidgets.VBox:
        """A control over the line for its error; a move goes to the state."""
        widget.value = getattr(self._state.choices, name)
        widget.observe(lambda change: self._state.choose(**{name: change["new"]}), names="value")
        widget.add_class("fsdplab-control")
        self.widgets[name], self._errors[name] = widget, ipywidgets.HTML()
        self._cells[name] = ipywidgets.VBox([widget, self._errors[name]], layout={"overflow": "hidden"})
        for name_of_class in ("fsdplab-cell", f"fsdplab-of-{name}"):
            self._cells[name].add_class(name_of_class)
        return self._cells[name]

    def _chips(self, name: str, title: str, values: Sequence[str]) -> ipywidgets.VBox:
        """A row of buttons that stay pressed, for a choice of several."""
        group = {value: ipywidgets.ToggleButton(description=value, layout={"width": "auto"}) for value in values}
        for value, chip in group.items():
            chip.value = value in getattr(self._state.choices, name)
            chip.observe(lambda _: self._take(name), names="value")
            chip.add_class("fsdplab-chip")
        self.chips[name], self._errors[name] = group, ipywidgets.HTML()
        label = ipywidgets.HTML(f"<div class='fsdplab-label'>{title}</div>", layout={"min_width": "90px"})
        row = ipywidgets.HBox([label, *group.values()], layout={"flex_flow": "row wrap", "align_items": "center"})
        self._cells[name] = ipywidgets.VBox([row, self._errors[name]])
        for name_of_class in ("fsdplab-cell", "fsdplab-chips", f"fsdplab-of-{name}"):
            self._cells[name].add_class(name_of_class)
        return self._cells[name]

    def _take(self, name: str) -> None:
        pressed = tuple(value for value, chip in self.chips[name].items() if chip.value)
        if set(pressed) != set(getattr(self._state.choices, name)):
            self._state.choose(**{name: pressed})


def _menu(title: str, options: Sequence[tuple[str, str | int]]) -> ipywidgets.Dropdown:
    return ipywidgets.Dropdown(description=title, options=options)


def _offers(widget: ipywidgets.Widget, value: str | int) -> bool:
    """Whether a control can show a value; a program's wrong choice appears only in the line below the control."""
    if isinstance(widget, ipywidgets.Dropdown):
        return value in [offered for _, offered in widget.options]
    return isinstance(value, int if isinstance(widget, ipywidgets.IntText) else str)


def _engines() -> list[str]:
    """The engines that this machine has."""
    there = importlib.util.find_spec("deepspeed") is not None
    return [name for name in ENGINES if there or not name.startswith("deepspeed")]


def _grid(cells: Sequence[ipywidgets.Widget]) -> ipywidgets.Box:
    grid = ipywidgets.Box(cells)
    grid.add_class("fsdplab-grid")
    return grid
