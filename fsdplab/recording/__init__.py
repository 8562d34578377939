"""Recording a training job that was not written for the lab: its steps, its memory by category, its traces.

`fsdplab record --out DIR -- COMMAND` (launch.py) starts the job with a folder on PYTHONPATH that hooks what takes steps
(hooks.py); each process that takes one is a rank and records itself (rank.py); the parts become a RunRecord
(assemble.py), which everything that opens a run opens. `Recorder` is the same by hand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdplab.common.lazy import names_of

if TYPE_CHECKING:
    from fsdplab.recording.assemble import open_record as open_record
    from fsdplab.recording.by_hand import Recorder as Recorder
    from fsdplab.recording.callbacks import lightning_callback as lightning_callback
    from fsdplab.recording.callbacks import trainer_callback as trainer_callback

_MODULES = {
    "Recorder": "by_hand",
    "open_record": "assemble",
    "trainer_callback": "callbacks",
    "lightning_callback": "callbacks",
}

__all__ = [*_MODULES]

__getattr__, __dir__ = names_of(__name__, {name: f"fsdplab.recording.{module}" for name, module in _MODULES.items()})
