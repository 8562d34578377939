"""The run record: the interface between running a model and analysing the run.

Sessions write records; figures, widgets, reports and notebooks read them and nothing else, so a run recorded on another
machine opens here exactly as a fresh one does.
"""

from fsdplab.common.names import CATEGORIES

from .comparison import FORMAT, comparison_json, losses_of, matches_reference
from .drift import drift_sentence
from .record import RunRecord
from .tables import CAUSES, LANES, PARTS_OF_EXPOSED, TABLES, RecordError

__all__ = [
    "CATEGORIES",
    "CAUSES",
    "FORMAT",
    "LANES",
    "PARTS_OF_EXPOSED",
    "TABLES",
    "RecordError",
    "RunRecord",
    "comparison_json",
    "drift_sentence",
    "losses_of",
    "matches_reference",
]
