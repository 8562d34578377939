"""A machine with GPUs that are not there: its settings, and commands that run on it."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_cuda.build import build

ROOT = Path(__file__).parents[2]
TOO_LONG = 124  # the exit status of a command that was killed at its limit, as that of `timeout`


@dataclass(frozen=True)
class Machine:
    """What the driver says it found: `Machine(gpus=2, capability=75, memory_gb=15)` is a machine with two T4s.

    `settings` are the other variables of README.md without their prefix: `{"IPC": "refused", "SEED": 3}`.
    """

    gpus: int = 1
    capability: int = 90
    memory_gb: float = 80.0
    settings: Mapping[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        said = "".join(f", {name}={value}" for name, value in self.settings.items())
        return f"{self.gpus} GPU, {self.capability / 10}, {self.memory_gb:g} GB{said}"

    def environment(self, python: Path, session: str) -> dict[str, str]:
        """The variables of a child that runs under the stand-in."""
        library = build(python)
        chosen: dict[str, object] = {
            "GPUS": self.gpus, "CAPABILITY": self.capability, "MEMORY_MB": round(self.memory_gb * 1024),
            "SESSION": session, **self.settings,
        }  # fmt: skip
        own = {f"FAKE_CUDA_{name}": str(value) for name, value in chosen.items()}
        loaded = {"LD_PRELOAD": f"{library}/libcuda.so.1", "LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)}
        return {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED} | loaded | own


_NOT_INHERITED = ("VIRTUAL_ENV", "PYTHONHOME", "CUDA_VISIBLE_DEVICES")


@dataclass(frozen=True)
class Done:
    """How a command ended; `output` is empty where it was not captured."""

    returncode: int
    output: str = ""

    @property
    def too_long(self) -> bool:
        return self.returncode == TOO_LONG


def run(
    machine: Machine,
    command: Sequence[str],
    python: Path,
    limit_s: float,
    capture: bool = False,
    cwd: Path = ROOT,
    variables: Mapping[str, str] | None = None,
) -> Done:
    """Run a command on the machine; after `limit_s` seconds it is killed with all that it started."""
    words = [str(python) if command[0] in ("python", "python3") else command[0], *command[1:]]
    with tempfile.TemporaryDirectory(prefix="fake_cuda-") as session:
        environment = machine.environment(python, session) | (variables or {})
        stream = subprocess.PIPE if capture else None
        process = subprocess.Popen(
            words, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=stream, text=True,
            stderr=subprocess.STDOUT if capture else None, start_new_session=True,
        )  # fmt: skip
        try:
            output, _ = process.communicate(timeout=limit_s)
            return Done(process.returncode, output or "")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return Done(TOO_LONG, output or "")
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
