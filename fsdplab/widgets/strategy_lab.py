"""The strategy lab: the instrument, the runs that it measures, and their details.

The state is in `state`, runs are in `runner`, what is drawn in `instrument` and `details`; this file joins them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ipywidgets
from IPython.display import DisplayHandle, display

from fsdplab.recording.assemble import open_record
from fsdplab.records import RunRecord

from .details import PRESENTED, Details
from .instrument import Instrument
from .jobs import choices_beside
from .lab_state import Batch, LabState
from .running import Runner
from .tabs import still

_PRESSED = {"measure": "start", "cancel": "cancel"}  # methods of the runner


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
        self._presented = False
        self.instrument = Instrument(self.state, lambda what: getattr(self.runner, _PRESSED[what])())
        self.details = Details(self.state, export_to, self._show_still)
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
        try:
            ended = (self.state.busy or self.runner.start()) and self.runner.wait(timeout)
        except KeyboardInterrupt:
            self.runner.cancel()
            raise
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
        saved = still(self.details.batch, self.instrument.answer)
        self._stills.append(display(saved, raw=True, display_id=True))

    def _resize(self) -> None:
        self.details.sized(self._presented, self.instrument.width)

    def _show_still(self, batch: Batch | None) -> None:
        for each in self._stills:
            each.update(still(batch, self.instrument.answer), raw=True)
