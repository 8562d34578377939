"""The memory of a step of the lab's own engine, played without a tensor: bytes that come and go.

A plan (memory.py) adds the activations of a block at a time. Here small models run in front of the reader, and what is
measured is exact: so every operator's allocations are played, beside the buffers that units take in both. They come
from a recording of one micro-batch; for presets recordings are kept, which hold for all sizes.
"""

from .presets import LabRun, memory_of_step, unit_parameters
from .step import MicroBatch, StepChoices, peak_of_step, rest_and_peak

__all__ = [
    "LabRun", "MicroBatch", "StepChoices", "memory_of_step", "peak_of_step", "rest_and_peak", "unit_parameters",
]  # fmt: skip
