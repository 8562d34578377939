"""Looks up or tries the capabilities of this machine, and says which uses of fsdplab it is ready for."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType

from fsdplab import __version__
from fsdplab.common.errors import UserError
from fsdplab.common.machine import cores, memory_bytes, why_no_ranks
from fsdplab.common.places import how_to_install, shared_folder
from fsdplab.common.sizes import size

PACKAGES = ("numpy", "plotly", "pandas", "jupyterlab", "ipywidgets", "transformers", "deepspeed", "tensorboard")
NEEDED_FOR = {
    "plotly": "for figures, pages and the course",
    "pandas": "for the course",
    "jupyterlab": "for the course",
    "ipywidgets": "for the course",
    "transformers": "for programs of your own that train its models",
    "deepspeed": "for DeepSpeed beside our engine",
    "tensorboard": "to look at exported traces",
}
SEVERAL = "ranks on one GPU"
IPC = "CUDA IPC"
_NO_GPU = "use a machine with an NVIDIA GPU and a CUDA build of torch; recorded GPU runs open here"
_COURSE, _ON_CPU = "the course (lab, course)", "training on CPU ranks (compare, run, bench)"
NEEDED_IN_A_ROOM = (_COURSE, _ON_CPU)  # the uses without which a learner cannot follow
# a use, the capabilities that it needs, and the extra that installs them; without one their notes say what to do
_USES: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("plans and recorded runs (plan, report)", (), ""),
    (_ON_CPU, ("gloo",), ""),
    ("pages and figures (--html, --figure)", ("plotly",), "lab"),
    (_COURSE, ("jupyterlab", "ipywidgets", "plotly", "pandas"), "lab"),
    ("DeepSpeed beside our engine (--engines lab,deepspeed-3)", ("deepspeed",), "peers"),
    ("training on GPUs (gpu-check, --device cuda)", ("GPUs",), ""),
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@dataclass(frozen=True)
class Capability:
    """One capability: its name, whether it is present, its value, and a note."""

    name: str
    present: bool
    value: str
    note: str = ""


def capabilities() -> list[Capability]:
    """Return all capabilities, in the order of the table."""
    return [*_machine(), *_torch(), _browser(), *map(_package, PACKAGES)]


def _machine() -> list[Capability]:
    return [
        Capability("fsdplab", True, __version__),
        Capability("python", True, platform.python_version(), f"{platform.system()} {platform.machine()}"),
        _cores(),
        _memory(memory_bytes()),
        _system(),
    ]


def _cores() -> Capability:
    count = cores()
    note = "" if count > 1 else "two ranks share one core: step times say little"
    return Capability("cores", True, str(count), note)


def _memory(total: int) -> Capability:
    if not total:
        return Capability("memory", True, "unknown", "this system does not say")
    note = "" if total > 4e9 else "small: use --model gpt-tiny"
    return Capability("memory", True, size(total), note)


def _system() -> Capability:
    """Return whether this is Linux; else what goes a second way, and what there is not."""
    if sys.platform == "linux":
        return Capability("Linux's calls", True, "there")
    if why_no_ranks() is not None:
        return Capability("Linux's calls", False, "none", "plans and recorded runs only")
    instead = "torchrun for forks, gloo for shared memory, ps for /proc, a thread that ends orphans"
    lacks = "offload to files, waits for a core, resident memory"
    return Capability("Linux's calls", False, "none", f"second ways: {instead}; not here: {lacks}")


def _torch() -> list[Capability]:
    try:
        import torch
    except (ImportError, OSError, RuntimeError, ValueError) as error:  # a broken install, or a wrong TORCH_...
        raise UserError(
            f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        ) from error

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    refused = why_no_ranks()
    if refused:
        ranks = [Capability("gloo", False, "not used", refused)]
        ranks += [Capability(name, False, "none", refused) for name in ("rank starts", "CPU transport")]
    else:
        ranks = [_gloo(), _starts(), _transport()]
    return [Capability("torch", True, torch.__version__, build), *ranks, _bf16(), *_gpus(torch)]


def _gloo() -> Capability:
    """Form a group of one rank and reduce a tensor, which needs everything that a CPU run needs."""
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=20))
        ones = torch.ones(4)
        dist.all_reduce(ones)
        dist.destroy_process_group()
    except RuntimeError as error:
        return Capability(
            "gloo",
            False,
            "does not start",
            f"{' '.join(str(error).split())[:160]}; set GLOO_SOCKET_IFNAME to a working interface",
        )
    return Capability("gloo", True, "works", "starts CPU ranks, on one machine or several")


def _starts() -> Capability:
    """Find how ranks are started on this machine: a starter forks one on trial."""
    from fsdplab.sessions.launch import warm

    refused = warm.tried()
    if refused is not None:
        return Capability("rank starts", True, "torchrun", f"some seconds a run: {refused}")
    note = "forked in a tenth of a second; torchrun for several nodes, and to see what depends on each rank's hash seed"
    return Capability("rank starts", True, "warm", note)


def _transport() -> Capability:
    """Return the transport between the CPU ranks of this machine."""
    # the rule of engine/transport/shared_memory/arena.py, repeated: importing the engine takes as long as everything
    # else here
    if sys.platform != "linux" or platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return Capability("CPU transport", True, "gloo", "shared memory needs Linux on x86-64")
    return Capability("CPU transport", True, "shared memory", "between ranks of this machine; gloo between machines")


def _bf16() -> Capability:
    """Measure how long a product of matrices takes in bf16."""
    from fsdplab.sessions.bf16_speed import bf16_is_slow, bf16_slowdown

    value = f"{bf16_slowdown():.2g} times the time of fp32"
    if not bf16_is_slow():
        return Capability("bf16 on the CPU", True, value)
    note = "no instructions for it (AVX2 alone): bench takes smaller batches, lesson 13 recorded runs; use fp32"
    return Capability("bf16 on the CPU", False, value, note)


def _gpus(torch: ModuleType) -> list[Capability]:
    """Look at the GPUs, NCCL and CUDA IPC by processes of their own: this one never has a CUDA context."""
    from fsdplab.sessions.gpu_probes import ask
    from fsdplab.sessions.spec.gpus import driver_complaint, driver_cuda

    if torch.version.cuda is None:
        if driver_cuda() is None:
            return _without_gpus("none", _NO_GPU)
        return _without_gpus("none", driver_complaint(driver_cuda(), None))
    machine = ask("machine")
    gpus = machine.get("gpus", [])
    # the probe's own failure, what keeps torch from all GPUs, or the first GPU whose kernel failed
    blocked = machine.get("error") or machine["blocks"]
    for gpu in gpus:
        blocked = blocked or gpu["error"]
    if blocked:
        return _without_gpus("not usable", blocked)
    names = sorted({gpu["name"] for gpu in gpus})
    advice = list(machine["advice"])
    if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        advice.append("CUDA_DEVICE_MAX_CONNECTIONS=1 silently removes overlap: unset it")
    # "2.27.3" -> (2, 27, 3)
    nccl = tuple(map(int, machine["nccl"].split(".")))
    return [
        Capability("GPUs", True, f"{len(gpus)}: {', '.join(names)}", "; ".join(advice)),
        Capability("NCCL", True, machine["nccl"], "one rank a GPU"),
        _ipc(ask("ipc")),
        _several(nccl, exclusive=any(gpu["exclusive"] for gpu in gpus)),
    ]


def _without_gpus(value: str, lacking: str) -> list[Capability]:
    needs = "needs a GPU and a CUDA build of torch"
    others = [Capability(name, False, "none", needs) for name in ("NCCL", IPC, SEVERAL)]
    return [Capability("GPUs", False, value, lacking), *others]


def _ipc(probed: Mapping[str, str]) -> Capability:
    """Return whether a second process can open the memory of a GPU."""
    refused = probed.get("error") or probed["refused"]
    if refused:
        return Capability(IPC, False, "refused", f"{refused}; NCCL goes through host memory instead")
    return Capability(IPC, True, "works", "a second process reads a GPU's memory")


def _several(nccl: tuple[int, ...], exclusive: bool) -> Capability:
    """Return whether several ranks can share a GPU, and by what."""
    from fsdplab.sessions.spec.gpus import MULTI_RANK_NCCL

    if exclusive:
        return Capability(SEVERAL, False, "none", "the compute mode allows one process a GPU")
    value = "by NCCL" if nccl >= MULTI_RANK_NCCL else "by gloo, through host memory"
    return Capability(SEVERAL, True, value, "with --device cuda; emulated: ranks take turns on the GPU")


def _browser() -> Capability:
    note = "for the notebooks' browser tests only"
    for name in BROWSERS:
        path = shutil.which(name)
        if path:
            return Capability("browser", True, os.path.basename(path), note)
    return Capability("browser", False, "none", note)


def _package(name: str) -> Capability:
    try:
        return Capability(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Capability(name, False, "not installed", NEEDED_FOR.get(name, ""))


def reality(items: list[Capability]) -> Mapping[str, str]:
    """Say what a run on this machine measures, emulates and simulates."""
    by_name = {item.name: item for item in items}
    ranks = f"CPU processes over {by_name['CPU transport'].value}"
    emulated = "the card (--card): a run whose counted bytes exceed it goes on, and is marked as over the card"
    simulated = "nothing; what other machines measured is shown from their records"
    if by_name["GPUs"].present:
        ranks = f"one process a GPU over NCCL, or {ranks}"
        emulated += "; step times of several ranks on one GPU"
        simulated = "nothing"
    real = "nothing: no ranks run here"
    if by_name["rank starts"].present:
        real = f"ranks ({ranks}), training, losses, bytes sent, step times, memory of every rank"
    return {"real": real, "emulated": emulated, "simulated": simulated}


@dataclass(frozen=True)
class Readiness:
    """One use of fsdplab; what it lacks here ("" for nothing), and what to do then."""

    use: str
    lacks: str = ""
    remedy: str = ""


def readiness(present: Mapping[str, bool], notes: Mapping[str, str]) -> list[Readiness]:
    """Return each use with what it lacks: `present` and `notes` of the capabilities, by name."""
    verdict = []
    notebooks = shared_folder("notebooks")
    for use, needs, extra in _USES:
        lacks = [name for name in needs if not present[name]]
        remedy = ""
        if lacks:
            # without an extra the note of the first missing capability says what to do
            remedy = how_to_install(extra) if extra else notes[lacks[0]]
        elif use == _COURSE and not any(notebooks.glob("*.ipynb")):  # a copied package may lack them
            lacks = [f"notebooks in {notebooks}"]
            remedy = "install fsdplab again, from a wheel or a whole clone"
        verdict.append(Readiness(use, ", ".join(lacks), remedy))
    return verdict
