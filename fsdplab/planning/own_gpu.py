"""A GPU of one's own for a plan: a JSON file with the figures of its data sheet.

`{"name": "B300", "memory_gib": 268, "bf16_tflops": 2250, "hbm_tb_per_s": 8.0, "link": "nvlink5", "nic_gbit": 800}`;
`nic_gbit` is what the network cards of a node give each GPU. Only the name, the memory, its rate and the link are
needed: without `bf16_tflops` no time is predicted, without `nic_gbit` a plan is for one node.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fsdplab.common.files import read_file

from .hardware import Gpu, HardwareError, find_gpu
from .links import LinkError, parse_link

_NEEDED = ("name", "memory_gib", "hbm_tb_per_s", "link")
_KNOWN = (*_NEEDED, "bf16_tflops", "nic_gbit", "die", "measured_bf16_tflops")
_LARGEST_FILE = 10**5


def gpu_named(name: str) -> Gpu:
    """The GPU that a file describes whose name ends in `.json`, or else the one of the table; raises HardwareError."""
    return _read(Path(name)) if name.endswith(".json") else find_gpu(name)


def _read(path: Path) -> Gpu:
    try:
        row = json.loads(read_file(path, _LARGEST_FILE))
    except OSError as error:
        raise HardwareError(f"{path}: {error.strerror or error}; give a JSON file with a GPU's figures") from None
    except (ValueError, RecursionError) as error:
        raise HardwareError(f"{path} is no JSON ({str(error)[:60]}); expected a GPU's figures") from None
    keys = set(row) if isinstance(row, dict) else set()
    wrong = [*(key for key in _NEEDED if key not in keys), *sorted(map(str, keys - set(_KNOWN)))]
    if wrong:
        raise HardwareError(f"{path}: missing or unknown: {', '.join(wrong)[:80]}; expected {', '.join(_KNOWN)}")
    try:
        link = parse_link(row["link"])
    except LinkError as error:
        raise HardwareError(f"{path}: {error}") from None
    rates = {key: _number(path, row, key) for key in ("memory_gib", "hbm_tb_per_s", "bf16_tflops", "nic_gbit")}
    tflops, nic, measured = rates["bf16_tflops"], rates["nic_gbit"], _number(path, row, "measured_bf16_tflops")
    memory, hbm = rates["memory_gib"] or 0.0, rates["hbm_tb_per_s"] or 0.0
    return Gpu(
        str(row["name"])[:40], int(memory * 2**30), tflops and tflops * 1e12, hbm * 1e12, link, nic and nic * 1e9 / 8,
        str(path), str(row.get("die", "")), measured and measured * 1e12,
    )  # fmt: skip


def _number(path: Path, row: dict[str, Any], key: str) -> float | None:
    value = row.get(key)
    if value is None and key not in _NEEDED:
        return None
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < 1e9:
        raise HardwareError(f"{path}: {key} is {str(value)[:30]!r}; expected a number above 0")
    return float(value)
