"""The cost of a run, by arithmetic: traffic, memory and time."""

from .traffic import Traffic, UnitShapes, step_traffic

__all__ = ["Traffic", "UnitShapes", "step_traffic"]
