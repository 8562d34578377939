"""The strategy lab: the instrument, the runs that it measures, and their details.

What the instrument's page asks for goes to the LabState, and what `answers.View` says comes back.

The page is `instrument.js`. Between both is plain data in traits: `asked` and `pressed` are the page's, `answer` and
`progress` the kernel's. Each change of the page has a number, which the answer repeats: an answer to an older one does
not move a control back that the reader has moved on.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import DisplayHandle, display

from fsdplab.common.names import CATEGORY_ROWS
from fsdplab.common.words import plural
from fsdplab.figures import lab
from fsdplab.figures.lab.answers import Guess, Look, job_words, view_of
from fsdplab.figures.lab.choices import CONTROLS, NO_LINK, PRESETS, RANKS, TARGETS, TUNNEL, Choices, Fixed, models_of
from fsdplab.figures.style import LANE_COLOURS, STEP_COLOURS
from fsdplab.planning.links import LinkError, parse_link
from fsdplab.recording.assemble import open_record
from fsdplab.records import RunRecord
from fsdplab.sessions.spec import STRATEGIES
from fsdplab.sessions.stopped import RanksStopped, stopped_after
from fsdplab.workloads.own.sources import reads_text

from .details import PRESENTED, Details
from .lab_state import Batch, LabState
from .running import WAITING, Runner
from .tabs import kept, still

_SHOWN = Path(lab.__file__).parent
ENDING_S = 10.0  # that cancelled runs may take to end


class Instrument(anywidget.AnyWidget):
    """Controls, bars and timeline over a LabState; `measure()` is called when its button is pressed."""

    _esm = _SHOWN / "instrument.js"
    _css = _SHOWN / "instrument.css"
    offers = traitlets.Dict().tag(sync=True)
    asked = traitlets.Dict().tag(sync=True)
    pressed = traitlets.Dict().tag(sync=True)
    answer = traitlets.Dict().tag(sync=True)
    marks = traitlets.List().tag(sync=True)
    more = traitlets.Dict().tag(sync=True)
    progress = traitlets.Dict().tag(sync=True)
    width = traitlets.Int(0).tag(sync=True)
    scale = traitlets.Float(1.0).tag(sync=True)

    def __init__(self, state: LabState, measure: Callable[[], object]) -> None:
        self._state, self._measure = state, measure
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
        self._answered, view = wanted, view_of(state.choices, look, state.fixed)
        asked = {**asdict(look), "pinned": None, "choices": asdict(state.choices), "pin": look.pinned is not None}
        job = job_words(state.job, state.records) if state.job else ""
        self.answer = view.answer(state.records) | {
            "n": number, "asked": asked, "link": _rate_of(state.choices), "job": job,
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
        press = {"measure": self._measure, "cancel": self._state.cancel}.get(change["new"].get("what"), self.refresh)
        press()


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
                "choices": asdict(preset.choices), "models": models_of(name, fixed), "measured": not preset.gpu,
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


# ---- the lab


class StrategyLab:
    """An instrument to compare strategies, and the runs that it measures: `StrategyLab(preset="laptop")`; display it in
    a notebook. `StrategyLab(Workload(...))` and `StrategyLab(model="mine.py")` have a model of one's own in the list.

    Choices are the fields of `Choices`; `preset` names those to begin with. `fixed` are further fields of each RunSpec
    (`{"sequence_length": 32}`), or a Workload. Records go below `directory` (None: `lab-runs/` in the working folder)
    and come back in the next kernel, pages of Export into `export_to`. `job` is the folder of a recorded job
    (`fsdplab record`), which is shown beside the lab's runs; these then begin with as many ranks and without a link.
    ValueError says which choice is wrong.
    """

    def __init__(
        self,
        fixed: Mapping[str, Any] | Any = None,
        *,
        directory: str | Path | None = None,
        job: str | Path | None = None,
        export_to: str | Path = ".",
        **choices: Any,
    ) -> None:
        if fixed is not None and not isinstance(fixed, Mapping):
            fixed, choices = None, {"model": fixed, **choices}
        recorded = None if job is None else open_record(job)
        self.state = LabState(fixed, **{**(choices_beside(recorded, choices) if recorded else {}), **choices})
        if self.state.request.errors:
            raise ValueError("; ".join(self.state.request.errors.values()))
        self.runner = Runner(self.state, directory)
        if recorded is not None:
            self.state.job = recorded
            self.state.offer([Batch(self.state.next_number, (), [recorded], "your job")])
        self._stills: list[DisplayHandle] = []
        self._kept = kept(None)
        self._presented = False
        self.instrument = Instrument(self.state, self.runner.start)
        self.details = Details(self.state, export_to, self._keep)
        self.instrument.observe(lambda _: self._show_stills(), names="answer")
        self.state.subscribe(self.details.refresh)
        self.instrument.observe(lambda _: self._resize(), names="width")
        self.widget = ipywidgets.VBox([self.instrument, self.details.widget])
        self.widget.add_class("fsdplab-lab")

    @property
    def records(self) -> list[RunRecord]:
        """The records of the batch that is shown, for the cells that follow."""
        batch = self.details.batch
        return batch.rows if batch else []

    def run(self, timeout: float | None = None) -> list[RunRecord]:
        """Press Measure, wait, and return the records, for unattended notebooks; where runs were started before, wait for
        them. RuntimeError says why there are no records; an interrupt of the cell cancels the runs.
        """
        began = time.monotonic()
        try:
            ended = (self.state.busy or self.runner.start()) and self.runner.wait(timeout)
        except KeyboardInterrupt:
            self.state.cancel()
            self.runner.wait(ENDING_S)
            ranks = "the ranks are being ended" if self.state.busy else "the ranks have ended"
            raise RanksStopped(stopped_after(began, ranks)) from None
        if not ended or self.state.status == "failed":
            raise RuntimeError(self.state.message)
        return self.records

    def present(self, on: bool = True) -> None:
        """For a projector: larger type in the instrument, table and figures; `present(False)` ends it."""
        self._presented = on
        (self.widget.add_class if on else self.widget.remove_class)("fsdplab-present")
        self.instrument.scale = PRESENTED if on else 1.0
        self._resize()

    def _ipython_display_(self) -> None:
        display({**self.widget._repr_mimebundle_(), "text/plain": ""}, raw=True)
        self._kept = kept(self.details.batch)
        saved = still(self._kept, self.instrument.answer)
        self._stills.append(display(saved, raw=True, display_id=True))

    def _resize(self) -> None:
        self.details.sized(self._presented, self.instrument.width)

    def _keep(self, batch: Batch | None) -> None:
        """Draw what a saved notebook keeps of a batch, once for each batch, where the lab is shown."""
        if self._stills:
            self._kept = kept(batch)
            self._show_stills()

    def _show_stills(self) -> None:
        """Show the folded table below the lab as the lab stands now."""
        for place in self._stills:
            place.update(still(self._kept, self.instrument.answer), raw=True)


def choices_beside(job: RunRecord, given: Mapping[str, Any]) -> dict[str, Any]:
    """The choices under which runs can be compared with a job: its ranks, and no link; {} for GPUs that are planned."""
    preset, ranks = PRESETS.get(given.get("preset", "laptop")), job.spec["world_size"]
    if preset is None or preset.gpu:
        return {}
    return {"link": NO_LINK} | ({"ranks": ranks} if ranks in RANKS else {})
