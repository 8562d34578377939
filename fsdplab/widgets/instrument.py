"""The instrument as a widget: what the page asks for goes to the LabState, and `answers.answer` comes back.

The page is `instrument.js`. Between both is plain data in traits: `asked` and `pressed` are the page's, `answer` and
`progress` the kernel's. Each change of the page has a number, which the answer repeats: an answer to an older one does
not move a control back that the reader has moved on.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.words import plural
from fsdplab.figures.style import LANE_COLOURS, STEP_COLOURS
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.sessions.spec import CHECKPOINTS, ENGINES, OPTIMIZERS, PRECISIONS, STRATEGIES, UNITS

from .answers import Guess, Look, answer, marks, shown_b
from .choices import PRESETS, SHARD_SIZES, TARGETS, TUNNEL, Choices, Fixed, models_of, own_model
from .copies import copies
from .jobs import job_words
from .lab_state import LabState
from .what_if import what_if

WAITING = "waiting for the kernel: it is running a cell, and does this when the cell has ended"
_HERE = Path(__file__).parent


class Instrument(anywidget.AnyWidget):
    """Controls, bars and timeline over a LabState; `press(what)` is called for "measure" and "cancel", and `waits()`
    says whether a press waits for the notebook's cells.
    """

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

    def __init__(
        self, state: LabState, press: Callable[[str], object], waits: Callable[[], bool] = lambda: False
    ) -> None:
        self._state, self._press, self._waits = state, press, waits
        self.look = Look(*PRESETS[state.choices.preset].sides)
        self._answered: tuple[object, ...] = ()
        self._marked: tuple[object, ...] = ()
        super().__init__(offers=_offers(state.fixed))
        self.refresh()
        self.observe(self._was_asked, names="asked")
        self.observe(self._was_pressed, names="pressed")
        state.subscribe(self.refresh)

    def refresh(self) -> None:
        """Answer what is asked now, unless that was answered before, and show how the runs go on."""
        state, number = self._state, int(self.asked.get("n", 0))
        records = [record for batch in state.batches for record in batch.records]
        wanted = (state.choices, self.look, len(records), number)
        if wanted != self._answered:
            self._answered = wanted
            asked = {"choices": _plain(state.choices), **_plain(self.look), "pin": self.look.pinned is not None}
            found = answer(state.choices, self.look, state.fixed, records)
            pinned = self.look.pinned is not None
            job = job_words(state.job, records) if state.job else ""
            more = {"asked": asked, "link": _rate_of(state.choices), "pinned": pinned, "job": job}
            self.answer = {**found, "n": number, **more}
        self.progress = self._progress()
        if wanted != self._marked:  # last, as they take longer than all else
            self._marked = wanted
            self.marks = marks(state.choices, self.look, state.fixed)
            self.more = more_of(state.choices, self.look, state.fixed)

    def _progress(self) -> dict[str, Any]:
        state, waits = self._state, self._waits()
        return {
            "busy": state.busy,
            "cancels": state.status == "running" or waits,
            "share": 1.0 if state.status == "done" else state.progress.share,
            "message": WAITING if waits else state.message,
            "alarm": state.status == "failed",
            "what": f"Measure {plural(len(state.request.specs), 'run')}",
        }

    def _was_asked(self, change: Mapping[str, Any]) -> None:
        """The page has moved a control: keep how A and B are looked at, then choose what differs."""
        asked, now = change["new"], self._state.choices
        self.look = look_of(asked, self.look, now)
        changes = changes_of(asked.get("choices", {}), now)
        if "preset" in changes:
            a, b = PRESETS[changes["preset"]].sides
            self.look = replace(self.look, a=a, b=b)
        self._state.choose(**changes) if changes else self.refresh()

    def _was_pressed(self, change: Mapping[str, Any]) -> None:
        if change["new"].get("what") in ("measure", "cancel"):
            self._press(change["new"]["what"])
        self.refresh()


def more_of(choices: Choices, look: Look, fixed: Fixed) -> dict[str, Any]:
    """What B would gain by other choices, and B as code; {} where neither is unfolded, or nothing is shown."""
    shown = shown_b(choices, look, fixed) if look.more else None
    if shown is None:
        return {}
    strategy, run = shown
    return {"b": strategy, "what_if": what_if(choices, strategy, fixed), "copies": copies(run)}


def changes_of(asked: Mapping[str, Any], now: Choices) -> dict[str, Any]:
    """The choices that the page wants otherwise; another preset brings its own for all.

    >>> changes_of({"prefetch": 2, "model": "gpt-20m", "colour": "red"}, Choices())
    {'prefetch': 2}
    """
    preset = PRESETS.get(asked.get("preset", ""))
    wanted = _plain(preset.choices) if preset and preset.choices.preset != now.preset else asked
    known = {each.name for each in fields(Choices)}
    took = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items() if name in known}
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
    own = own_model(fixed)
    deepspeed = importlib.util.find_spec("deepspeed") is not None
    kinds = {name.replace("_", "-"): colour for name, colour in LANE_COLOURS.items()}
    lanes = {"forward": "compute in forward", "backward": "compute in backward"}
    return {
        "presets": {
            name: {
                "choices": _plain(preset.choices), "link_words": preset.link_words, "links": preset.links,
                "tokens": preset.tokens, "sequences": preset.sequences, "ranks": preset.ranks,
                "models": models_of(name, fixed), "measured": preset.gpu is None, "strategies": STRATEGIES,
            }
            for name, preset in PRESETS.items()
        },
        "precisions": PRECISIONS, "units": UNITS, "checkpoints": CHECKPOINTS, "optimizers": OPTIMIZERS,
        "shard_sizes": SHARD_SIZES,
        "targets": TARGETS, "wind_tunnel": TUNNEL, "waiting": WAITING,
        "fixed": [*fixed],
        "own_batches": [own.name] if own and not own.reads_text else [],  # models whose batches no slider sets
        "engines": [name for name in ENGINES if deepspeed or not name.startswith("deepspeed")],
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
