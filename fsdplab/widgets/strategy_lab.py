"""The strategy lab: the instrument, the runs that it measures, and their details.

What the instrument's page asks for goes to the LabState, and what `answers.View` says comes back.

The page is `instrument.js`. Between both is plain data in traits: `asked` and `pressed` are the page's, `answer` and
`progress` the kernel's. Each change of the page has a number, which the answer repeats: an answer to an older one does
not move a control back that the reader has moved on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import DisplayHandle, display

from fsdplab.common.words import plural
from fsdplab.figures import lab
from fsdplab.figures.lab.answers import Look, view_of
from fsdplab.figures.lab.asked import as_asked, bandwidth_of, moved
from fsdplab.figures.lab.beside_job import job_words
from fsdplab.figures.lab.choices import NO_LINK, PRESETS, RANKS
from fsdplab.figures.lab.messages import AnswerTo, Progress
from fsdplab.figures.lab.offers import offers_of
from fsdplab.recording.assemble import open_record
from fsdplab.records import RunRecord
from fsdplab.sessions.stopped import RanksStopped, stopped_after

from .details import PRESENTED, Details
from .lab_state import Batch, LabState
from .running import Runner
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
    shown = traitlets.Bool(False).tag(sync=True)  # a cell has just displayed it; the page scrolls to it once
    width = traitlets.Int(0).tag(sync=True)
    scale = traitlets.Float(1.0).tag(sync=True)

    def __init__(self, state: LabState, measure: Callable[[], object]) -> None:
        self._state, self._measure = state, measure
        self.look = Look(*PRESETS[state.choices.preset].sides)
        # the question that `answer` belongs to
        self._answered: tuple[object, ...] = ()
        super().__init__(offers=offers_of(state.fixed))
        self.refresh()
        # the first answer was given without a question; from here on the page asks
        self.observe(self._was_asked, names="asked")
        self.observe(self._was_pressed, names="pressed")
        state.subscribe(self.refresh)

    def refresh(self) -> None:
        """Answer what is asked now, unless that was answered before, and show how the runs go on."""
        state, look, number = self._state, self.look, int(self.asked.get("n", 0))
        # all that an answer depends on: each new record may change what is drawn as measured
        question = (state.choices, look, len(state.records), number)
        # only the progress of a run has changed
        if question == self._answered:
            self.progress = self._progress()
            return
        self._answered = question
        view = view_of(state.choices, look, state.fixed)
        answer_to = AnswerTo(
            n=number,
            asked=as_asked(look, state.choices),
            link=bandwidth_of(state.choices),
            job=job_words(state.job, state.records) if state.job else "",
        )
        self.answer = {**view.answer(state.records), **answer_to}
        self.progress = self._progress()
        self.marks = view.marks()  # last, as they take longer than all else
        self.more = view.more()

    def _progress(self) -> Progress:
        state = self._state
        return Progress(
            busy=state.busy,
            cancels=state.status == "running",
            share=1.0 if state.status == "done" else state.share,
            message=state.message,
            alarm=state.status == "failed",
            what=f"Measure {plural(len(state.request.specs), 'run')}",
        )

    def _was_asked(self, change: Mapping[str, Any]) -> None:
        """The page has moved a control: keep how A and B are looked at, then choose what differs."""
        changes, self.look = moved(change["new"], self._state.choices, self.look)
        # the state calls `refresh` after a change; without one only the look is new
        if changes:
            self._state.choose(**changes)
        else:
            self.refresh()

    def _was_pressed(self, change: Mapping[str, Any]) -> None:
        pressed = change["new"].get("what")
        if pressed == "measure":
            self._measure()
        elif pressed == "cancel":
            self._state.cancel()
        else:
            self.refresh()


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
        # `StrategyLab(work)` is `StrategyLab(model=work)`
        if fixed is not None and not isinstance(fixed, Mapping):
            fixed, choices = None, {"model": fixed, **choices}
        recorded = None
        if job is not None:
            recorded = open_record(job)
            # what the caller has chosen wins over what suits the job
            choices = {**choices_beside(recorded, choices), **choices}
        self.state = LabState(fixed, **choices)
        if self.state.request.errors:
            raise ValueError("; ".join(self.state.request.errors.values()))
        self.runner = Runner(self.state, directory)
        if recorded is not None:
            # a batch of its own in the menus, beside those of the lab
            self.state.job = recorded
            self.state.offer([Batch(self.state.next_number, (), [recorded], "your job")])
        # the folded tables below the lab, one for each cell that has displayed it
        self._stills: list[DisplayHandle] = []
        self._kept = kept(None)
        self._presented = False
        self.instrument = Instrument(self.state, self.runner.start)
        self.details = Details(self.state, export_to, self._keep)
        self.state.subscribe(self.details.refresh)
        self.instrument.observe(lambda _: self._show_stills(), names="answer")
        self.instrument.observe(lambda _: self._resize(), names="width")
        self.widget = ipywidgets.VBox([self.instrument, self.details.widget])
        self.widget.add_class("fsdplab-lab")

    @property
    def records(self) -> list[RunRecord]:
        """The records of the batch that is shown, for the cells that follow."""
        batch = self.details.batch
        if batch is None:
            return []
        return batch.rows

    def run(self, timeout: float | None = None) -> list[RunRecord]:
        """Press Measure, wait, and return the records, for unattended notebooks; where runs were started before, wait for
        them. RuntimeError says why there are no records; an interrupt of the cell cancels the runs.
        """
        began = time.monotonic()
        try:
            started = self.state.busy or self.runner.start()
            ended = started and self.runner.wait(timeout)
        except KeyboardInterrupt:
            self.state.cancel()
            self.runner.wait(ENDING_S)
            outcome = "the ranks are being ended" if self.state.busy else "the ranks have ended"
            raise RanksStopped(stopped_after(began, outcome)) from None
        if not ended or self.state.status == "failed":
            raise RuntimeError(self.state.message)
        return self.records

    def present(self, on: bool = True) -> None:
        """For a projector: larger type in the instrument, table and figures; `present(False)` ends it."""
        self._presented = on
        if on:
            self.widget.add_class("fsdplab-present")
            self.instrument.scale = PRESENTED
        else:
            self.widget.remove_class("fsdplab-present")
            self.instrument.scale = 1.0
        self._resize()

    def _ipython_display_(self) -> None:
        self.instrument.shown = True
        # without words: a saved notebook shows the folded table that follows, as it keeps no widgets
        display({**self.widget._repr_mimebundle_(), "text/plain": ""}, raw=True)
        self._kept = kept(self.details.batch)
        saved = still(self._kept, self.instrument.answer)
        # with an id, so that the table can follow the lab
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
    preset = PRESETS.get(given.get("preset", "laptop"))
    if preset is None or preset.gpu:
        return {}
    choices = {"link": NO_LINK}
    # a job on more ranks than run here leaves the preset's number
    if job.spec["world_size"] in RANKS:
        choices["ranks"] = job.spec["world_size"]
    return choices
