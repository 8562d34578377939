"""The cost of a run, by arithmetic: traffic, memory and time."""

from .hardware import HardwareError
from .plan_spec import PlanError, PlanSpec
from .planner import Plan, plan
from .traffic import Traffic, UnitShapes, step_traffic

__all__ = ["HardwareError", "Plan", "PlanError", "PlanSpec", "Traffic", "UnitShapes", "plan", "step_traffic"]
