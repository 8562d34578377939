"""What a run will cost, by arithmetic: traffic now; memory and time build on it."""

from .traffic import Traffic, UnitShapes, step_traffic

__all__ = ["Traffic", "UnitShapes", "step_traffic"]
