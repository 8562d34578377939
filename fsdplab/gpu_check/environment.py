"""The part that says what the check ran on: GPU, driver, torch, NCCL, commit, and a digest of the source where git is
silent.

It is a part like the others, so that a driver that crashes or hangs is reported and the runner lives on.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from fsdplab.sessions.worker.environment import capture_environment

from .part import Sheet, part_parser, run_part
from .runner import CHECKOUT

OUTSIDE = ("pytest", "triton", "cuda", "plotly", "IPython", "ipywidgets", "pandas", "typer")


def flat(environment: dict[str, Any], commit: str) -> dict[str, Any]:
    """The captured environment as one flat row."""
    gpu = environment["gpus"][0] if environment["gpus"] else {}
    return {
        "gpu": gpu.get("name"),
        "gpus": len(environment["gpus"]),
        "gpu_memory_bytes": gpu.get("memory_bytes"),
        "driver": gpu.get("driver") or driver_of(Path("/proc/driver/nvidia/version")),
        **environment["versions"],
        "cuda": torch.version.cuda,
        "nccl": environment["backend"].removeprefix("nccl ") if environment["backend"].startswith("nccl") else None,
        "commit": commit or environment["commit"],
        "source_sha256": source_digest(CHECKOUT / "fsdplab"),
        "platform": environment["platform"],
        "cpu": environment["cpu"]["model"],
        "cores": environment["cpu"]["count"],
        "memory_bytes": environment["cpu"]["memory_bytes"],
        "variables": " ".join(f"{name}={value}" for name, value in environment["variables"].items()) or None,
        "packages": " ".join(f"{name}={version(name)}" for name in OUTSIDE),
    }


def driver_of(file: Path) -> str | None:
    """The driver's version from the kernel's own file, for machines without nvidia-smi: `... Kernel Module  580.159.03
    ...` gives 580.159.03.
    """
    found = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", file.read_text(errors="replace")) if file.is_file() else None
    return found[1] if found else None


def source_digest(package: Path) -> str:
    """The first 16 hex digits of a hash over names and texts of all Python files: which code this was, even without
    git.
    """
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def version(name: str) -> str:
    """A package's version, `no` where it is not there, `yes` where it does not say."""
    if importlib.util.find_spec(name) is None:
        return "no"
    try:
        return importlib.metadata.version({"cuda": "cuda-bindings"}.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        return "yes"


def driver_at_work(device: torch.device) -> dict[str, Any]:
    """What only a GPU can say of itself: capability, multiprocessors, free memory (None on CPU)."""
    names = ("capability", "multiprocessors", "free_memory_bytes", "compute_mode")
    if device.type != "cuda":
        return dict.fromkeys(names)
    found = torch.cuda.get_device_properties(device)
    values = (
        f"{found.major}.{found.minor}",
        found.multi_processor_count,
        torch.cuda.mem_get_info(device)[0],
        getattr(found, "compute_mode", None),
    )
    return {name: value if isinstance(value, (int, str)) else None for name, value in zip(names, values, strict=True)}


def main(arguments: list[str] | None = None) -> int:
    """The part with its one flag more."""
    parser = part_parser("environment")
    parser.add_argument("--commit", default="", help="the commit of this code, where git cannot be asked")
    asked = parser.parse_args(arguments)

    def work(sheet: Sheet, device: torch.device) -> None:
        row = {**flat(capture_environment(device.type), asked.commit), **driver_at_work(device)}
        sheet.row(**row)
        sheet.check("one sum on the device", float(torch.ones(8, device=device).sum()) == 8.0, "8 ones summed", "8")
        limit = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
        sheet.check("CUDA_DEVICE_MAX_CONNECTIONS leaves room for overlap", limit != "1", limit or "not set", "not 1")

    return run_part("environment", work, asked)


if __name__ == "__main__":
    sys.exit(main())
