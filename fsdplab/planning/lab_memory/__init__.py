"""The memory of a step of the lab's own engine between CPU ranks, played without a tensor: bytes that come and go.

memory.py is closed form, for any GPU and any size. Here small models run in front of the reader, and what is measured
is exact: so the step is played allocation by allocation, with the engine's own layouts and schedule.
"""

from .step import LabRun, memory_of_step, unit_parameters

__all__ = ["LabRun", "memory_of_step", "unit_parameters"]
