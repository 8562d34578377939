"""Sliders over a pure function: move a number, see the resulting figure or table.

`Explorer` is the state, without widgets; `explore` shows sliders for it. The figure or table is an output of its own,
so that a page without widgets keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fsdplab.figures.outlook import OutlookTable, outlook_of
from fsdplab.sessions.spec import RunSpec, SpecError

from .display import Note, present_live, present_widget, shown

if TYPE_CHECKING:
    import ipywidgets

Axis = Sequence[Any]


@dataclass
class Explorer:
    """A function and the present values of its arguments; `axes` lists the values that each may take."""

    view: Callable[..., Any]
    axes: Mapping[str, Axis]
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # every axis begins at its first value; `set` refuses a start that its axis does not have
        start = self.values
        self.values = {name: axis[0] for name, axis in self.axes.items()}
        for name, value in start.items():
            self.set(name, value)

    def set(self, name: str, value: Any) -> None:
        """Move one slider; ValueError where the axis has no such value."""
        if value not in self.axes.get(name, ()):
            possible = ", ".join(map(str, self.axes.get(name, ["nothing: no such slider"])))
            raise ValueError(f"{name} can be {possible}; got {value!r}")
        self.values[name] = value

    def render(self) -> Any:
        """Return the function's result for the present values; a figure in the forms that a page can show."""
        return shown(self.view(**self.values))


def explore(view: Callable[..., Any], start: Mapping[str, Any] | None = None, **axes: Axis) -> None:
    """Show sliders and what `view` gives: `explore(moved, ranks=[2, 4, 8], megabytes=[1, 10, 100])`.

    `view` returns a figure, or something with `_repr_html_` (a `Table`); `start` sets where the sliders begin, else the
    first values.
    """
    explorer = Explorer(view, axes, dict(start or {}))
    below = present_widget(lambda: sliders(explorer, lambda: update(explorer.render())))
    # shown below the sliders, whose moves call `update`
    update = present_live(explorer.render(), below)
    if below:
        below.on_resize(lambda: update(explorer.render()))


def predicted_runs(
    strategies: Sequence[str] = ("no_shard", "full_shard"), **fixed: Any
) -> Callable[..., OutlookTable | Note]:
    """Return a view for `explore` of what runs will take; nothing is started.

    `explore(predicted_runs(model="gpt-20m"), world_size=[2, 4, 8], prefetch=[0, 1, 2])`: axes are fields of `RunSpec`.
    """

    def moved(**fields: Any) -> OutlookTable | Note:
        try:
            # the sliders' values win over fixed ones
            specs = [RunSpec(**{**fixed, **fields, "strategy": strategy}) for strategy in strategies]
        except SpecError as error:
            return Note((str(error),))
        return OutlookTable(outlook_of(specs))

    return moved


def sliders(explorer: Explorer, moved: Callable[[], None]) -> ipywidgets.VBox:
    """Return one slider an axis; `moved` is called after each move."""
    import ipywidgets

    def take(name: str, value: Any) -> None:
        explorer.set(name, value)
        moved()

    def slider(name: str, axis: Axis) -> ipywidgets.SelectionSlider:
        options = []
        for value in axis:
            # (label, value): 1,000,000 is shown, 1000000 is what the view gets
            label = f"{value:,}" if isinstance(value, int) else str(value)
            options.append((label, value))
        made = ipywidgets.SelectionSlider(
            options=options,
            value=explorer.values[name],
            description=name.replace("_", " "),
            style={"description_width": "12em"},
            layout={"width": "32em"},
        )
        made.observe(lambda change: take(name, change["new"]), names="value")
        return made

    return ipywidgets.VBox([slider(name, axis) for name, axis in explorer.axes.items()])
