"""The memory of a step of the lab's own engine between CPU ranks, played without a tensor: bytes that come and go.

A plan (memory.py) adds the activations of a block at a time. Here small models run in front of the reader, and what is
measured is exact: so every operator's allocations are played, beside the buffers that units take in both.
"""

from .step import LabRun, memory_of_step, unit_parameters

__all__ = ["LabRun", "memory_of_step", "unit_parameters"]
