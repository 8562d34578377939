"""The instrument as a widget: what the page asks for goes to the LabState, and what `answers.View` says comes back.

The page is `instrument.js`. Between both is plain data in traits: `asked` and `pressed` are the page's, `answer` and
`progress` the kernel's. Each change of the page has a number, which the answer repeats: an answer to an older one does
not move a control back that the reader has moved on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.words import plural
from fsdplab.figures.style import LANE_COLOURS, STEP_COLOURS
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.sessions.spec import STRATEGIES
from fsdplab.workloads.own.sources import reads_text

from .answers import Guess, Look, view_of
from .choices import CONTROLS, PRESETS, TARGETS, TUNNEL, Choices, Fixed, models_of
from .jobs import job_words
from .lab_state import LabState
from .running import WAITING

_HERE = Path(__file__).parent


class Instrument(anywidget.AnyWidget):
    """Controls, bars and timeline over a LabState; `press(what)` is called for "measure" and "cancel"."""

    _esm = _HERE / "instrument.js"
    _css = _HERE / "instrument.css"
    offers = traitlets.Dict().tag(sync=True)
    asked = traitlets.Dict().tag(sync=True)
    pressed = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    marks = traitlets.List().tag(sync=True)
    more = traitlets.Dict().tag(sync=True)
    progress = traitlets.Dict().tag(sync=True)
    width = traitlets.Int(0).tag(sync=True)
    scale = traitlets.Float(1.0).tag(sync=True)

    def __init__(self, state: LabState, press: Callable[[str], object]) -> None:
        self._state, self._press = state, press
        self.look = Look(*PRESETS[state.choices.preset].sides)
        self._answered: tuple[object, ...] = ()
        super().__init__(offers=_offers(state.fixed))
        self.refresh()
        self.observe(self._was_asked, names="asked")
        self.observe(self._was_pressed, names="pressed")
        state.subscribe(self.refresh)

    def refresh(self) -> None:
        """Answer what is asked now, unless that was answered before, and show how the runs go on."""
        state, look, number = self._state, self.look, int(self.asked.get("n", 0))
        wanted = (state.choices, look, len(state.records), number)
        if wanted == self._answered:
            self.progress = self._progress()
            return
        self._answered, view, pinned = wanted, view_of(state.choices, look, state.fixed), look.pinned is not None
        self.answer = view.answer(state.records) | {
            "n": number, "asked": {**_plain(look), "choices": _plain(state.choices), "pin": pinned}, "pinned": pinned,
            "link": _rate_of(state.choices), "job": job_words(state.job, state.records) if state.job else "",
        }  # fmt: skip
        self.progress = self._progress()
        self.marks = view.marks()  # last, as they take longer than all else
        self.more = view.more()

    def _progress(self) -> dict[str, Any]:
        state = self._state
        return {
            "busy": state.busy,
            "cancels": state.status == "running",
            "share": 1.0 if state.status == "done" else state.share,
            "message": state.message,
            "alarm": state.status == "failed",
            "what": f"Measure {plural(len(state.request.specs), 'run')}",
        }

    def _was_asked(self, change: Mapping[str, Any]) -> None:
        """The page has moved a control: keep how A and B are looked at, then choose what differs."""
        asked, now = change["new"], self._state.choices
        self.look = look_of(asked, self.look, now)
        changes = changes_of(asked.get("choices", {}), now)
        if changes.get("preset") in PRESETS:
            a, b = PRESETS[changes["preset"]].sides
            self.look = replace(self.look, a=a, b=b)
        self._state.choose(**changes) if changes else self.refresh()

    def _was_pressed(self, change: Mapping[str, Any]) -> None:
        if change["new"].get("what") in ("measure", "cancel"):
            self._press(change["new"]["what"])
        self.refresh()


def changes_of(asked: Mapping[str, Any], now: Choices) -> dict[str, Any]:
    """The choices that the page wants otherwise; another preset brings its own for all.

    >>> changes_of({"prefetch": 2, "model": "gpt-20m", "colour": "red"}, Choices())
    {'prefetch': 2}
    """
    preset = PRESETS.get(asked.get("preset", now.preset))
    wanted = vars(preset.choices) if preset and preset.choices.preset != now.preset else asked
    known = {name: wanted[name] for name in CONTROLS if name in wanted}
    took = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items()}
    return {name: value for name, value in took.items() if value != getattr(now, name)}


def look_of(asked: Mapping[str, Any], before: Look, now: Choices) -> Look:
    """What the page looks at: strategies that do not exist are ignored, and Pin keeps the choices as they are now."""
    sides = {side: asked[side] for side in ("a", "b") if asked.get(side) in STRATEGIES}
    given = {name: value for name, value in dict(asked.get("guess") or {}).items() if name in Guess.__annotations__}
    pinned = (before.pinned or now) if asked.get("pin") else None
    return replace(before, **sides, pinned=pinned, guess=replace(Guess(), **given), more=bool(asked.get("more")))


def _plain(what: Choices | Look) -> dict[str, Any]:
    """As JSON has it."""
    content = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(what).items()}
    content.pop("pinned", None)
    return content


def _rate_of(choices: Choices) -> float | None:
    """Bytes per second of the link, for the slider; None without one."""
    try:
        return parse_link(choices.link).bytes_per_s
    except LinkError:
        return None


def _offers(fixed: Fixed) -> dict[str, Any]:
    """What can be chosen, and the colours: sent once."""
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    values = {name: [*row["values"]] for name, row in CONTROLS.items() if isinstance(row["values"], tuple)}
    values["engines"] = [name for name in values["engines"] if deepspeed or not name.startswith("deepspeed")]
    kinds = {name.replace("_", "-"): colour for name, colour in LANE_COLOURS.items()}
    lanes = {"forward": "compute in forward", "backward": "compute in backward"}
    return {
        "presets": {
            name: {
                **{each: getattr(preset, each) for each in ("link_words", "links", "tokens", "sequences", "ranks")},
                "choices": _plain(preset.choices), "models": models_of(name, fixed), "measured": not preset.gpu,
            }
            for name, preset in PRESETS.items()
        },
        "values": {**values, "as_model": TARGETS}, "wind_tunnel": TUNNEL, "waiting": WAITING,
        # whether a slider sets the length of sequences; models whose batches no slider sets
        "fixed": [*fixed], "own_batches": [] if reads_text(fixed.get("model", "gpt-20m")) else [models_of("laptop", fixed)[0]],
        "categories": {row.name: row.colour for row in CATEGORY_ROWS.values()},
        "step": [
            ["computing", STEP_COLOURS["compute only"]], ["hidden", STEP_COLOURS["overlapped"]],
            ["exposed", STEP_COLOURS["exposed"]], ["optimizer", LANE_COLOURS["optimizer"]],
        ],
        "kinds": [
            [name, LANE_COLOURS[lane]]
            for name, lane in {**lanes, "optimizer": "optimizer", "exposed": "exposed"}.items()
        ] + [[name, kinds[name]] for name in ("all-gather", "reduce-scatter", "all-reduce")],
        "lanes": kinds | {name: LANE_COLOURS[lane] for name, lane in lanes.items()},
    }  # fmt: skip
