"""The cost of a run, by arithmetic: traffic, memory and time."""

from .hardware import HardwareError
from .model_files import model_named
from .models import MODELS, ModelError, ModelShape
from .plan_spec import PlanError, PlanSpec
from .planner import Plan, plan
from .traffic import Traffic, UnitShapes, step_traffic

__all__ = [
    "MODELS",
    "HardwareError",
    "ModelError",
    "ModelShape",
    "Plan",
    "PlanError",
    "PlanSpec",
    "Traffic",
    "UnitShapes",
    "model_named",
    "plan",
    "step_traffic",
]
