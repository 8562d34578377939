"""Records a training job that was not written for the lab: its steps, its memory by category, its traces.

`fsdplab record --out DIR -- COMMAND` (launch.py) starts the job with a folder on PYTHONPATH that hooks what takes steps
(hooks.py); each process that takes one is a rank and records itself (rank.py); the parts become a RunRecord
(assemble.py), which everything that opens a run opens. `Recorder` is the same by hand.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
