"""Profiling: measured memory and time of one step; overlap, skew and exports from traces of any engine.

The names below load when they are first used: reading traces needs no torch, which takes two seconds to import.
"""

from fsdplab.common.lazy import names_of_stub

__all__, __getattr__, __dir__ = names_of_stub(__name__, __file__)
