"""The run record: the interface between running a model and analysing the run.

Sessions write records; figures, widgets, reports and notebooks read them and nothing else, so a run recorded on another
machine opens here exactly as a fresh one does.
"""

from fsdplab.common.names import CATEGORIES

from .comparison import FORMAT, comparison_json, drift_sentence, matches_reference
from .record import RunRecord
from .spread import Race, Spread, is_below, race
from .summary import Summary, core_sentence, known
from .tables import CAUSES, LANES, PARTS_OF_EXPOSED, TABLES, RecordError

__all__ = [
    "CATEGORIES",
    "CAUSES",
    "FORMAT",
    "LANES",
    "PARTS_OF_EXPOSED",
    "TABLES",
    "Race",
    "RecordError",
    "RunRecord",
    "Spread",
    "Summary",
    "comparison_json",
    "core_sentence",
    "is_below",
    "known",
    "drift_sentence",
    "matches_reference",
    "race",
]
