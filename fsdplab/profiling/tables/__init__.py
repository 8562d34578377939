"""Tables that engineers know from HTA and TraceLens, each one function from traces to rows and a sentence."""

from fsdplab.profiling.tables.bandwidth import bandwidths_by_size, idle_time
from fsdplab.profiling.tables.critical_path import critical_path
from fsdplab.profiling.tables.difference import difference, difference_by_module, difference_of_steps
from fsdplab.profiling.tables.of_record import TablesOf, tables_of_pair, tables_of_record
from fsdplab.profiling.tables.operators import launches, operators
from fsdplab.profiling.tables.rates import DevicePeak, achieved, copies, roofline
from fsdplab.profiling.tables.table import Column, Table

__all__ = [
    "Column",
    "DevicePeak",
    "Table",
    "TablesOf",
    "achieved",
    "bandwidths_by_size",
    "copies",
    "critical_path",
    "difference",
    "difference_by_module",
    "difference_of_steps",
    "idle_time",
    "launches",
    "operators",
    "roofline",
    "tables_of_pair",
    "tables_of_record",
]
