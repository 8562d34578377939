"""Finds the peak rates of a record's device, for the tables that compare achieved rates with them.

Of a GPU its data sheet says it; of a CPU the calibration of this machine, for a record that was made on it.
"""

from __future__ import annotations

from fsdplab.planning.hardware import gpu_of
from fsdplab.profiling.tables import DevicePeak
from fsdplab.records import RunRecord
from fsdplab.sessions.calibration import find_calibration

# bytes of an element, by which a calibration has its products
_FORMATS = {"4": "fp32", "2": "bf16"}


def peak_of(record: RunRecord) -> DevicePeak:
    """Operations and bytes a second of one rank's device; without figures where nobody knows them.

    A record on H200s: 989e12 operations, those of a dense product in bf16, and 4.8e12 bytes a second.
    """
    said = record.environment
    gpus = said.get("gpus") or [{}]
    if gpu := gpu_of(str(said.get("device_name") or gpus[0].get("name") or "")):
        return DevicePeak(gpu.peaks, gpu.hbm_bytes_per_s, f"{gpu.name}, dense, by number format: {gpu.source}")
    if said.get("device") != "cpu":
        return DevicePeak()
    found = find_calibration(record.spec["world_size"]).calibration
    if found is None or found.machine["cpu"] != (said.get("cpu") or {}).get("model"):
        return DevicePeak()
    fastest = {
        _FORMATS[item]: max(max(rate.forward, rate.backward) for rate in rates)
        for item, rates in found.rates.products.items()
        if item in _FORMATS
    }
    return DevicePeak(fastest, None, f"the fastest product of the calibration of {found.date}")
