"""What this machine can do: `fsdplab doctor` looks up or tries each capability, and ends in a verdict."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import ModuleType

from rich.markup import escape
from rich.table import Table

from fsdplab import __version__
from fsdplab.cli.console import console_beside
from fsdplab.cli.errors import refuse
from fsdplab.cli.verdict import readiness, verdict_lines
from fsdplab.common.sizes import size
from fsdplab.records import FORMAT

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
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WORD = {True: "[green]yes[/]", False: "[yellow]no[/]"}


@dataclass(frozen=True)
class Capability:
    """One capability: its name, whether it is present, its value, and a note."""

    name: str
    present: bool
    value: str
    note: str = ""


def capabilities() -> list[Capability]:
    """All capabilities, in the order of the table."""
    return [*_machine(), *_torch(), _browser(), *_packages()]


def _machine() -> list[Capability]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return [
        Capability("fsdplab", True, __version__),
        Capability("python", True, platform.python_version(), f"{platform.system()} {platform.machine()}"),
        Capability("cores", True, str(cores), "" if cores > 1 else "two ranks share one core: step times say little"),
        Capability("memory", True, size(total), "" if total > 4e9 else "small: use --model gpt-tiny"),
    ]


def _torch() -> list[Capability]:
    try:
        import torch
    except (
        ImportError,
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # a broken install; or a TORCH_... of no such value
        refuse(f"torch cannot be imported: {type(error).__name__}: {' '.join(str(error).split())[:300]}")

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return [
        Capability("torch", True, torch.__version__, build),
        _gloo(),
        _starts(),
        _transport(),
        _gpus(torch),
        _nccl(torch),
        _several(torch),
    ]


def _gloo() -> Capability:
    """Form a group of one rank and reduce one number, which needs everything that a CPU run needs."""
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
    """How ranks are started on this machine."""
    from fsdplab.sessions.launch.warm import why_not

    if (refused := why_not()) is not None:
        return Capability("rank starts", True, "torchrun", f"some seconds a run: {refused}")
    return Capability("rank starts", True, "warm", "forked in a tenth of a second; torchrun for several nodes")


def _transport() -> Capability:
    """The transport between the CPU ranks of this machine."""
    # the rule of engine/transport/shared_memory/slots.py, repeated: importing the engine takes as long as everything
    # else here
    if platform.system() != "Linux" or platform.machine() != "x86_64" or not hasattr(os, "pidfd_open"):
        return Capability("CPU transport", True, "gloo", "shared memory needs Linux on x86-64")
    return Capability("CPU transport", True, "shared memory", "between ranks of this machine; gloo between machines")


def _gpus(torch: ModuleType) -> Capability:
    if not torch.cuda.is_available():
        return Capability("GPUs", False, "none", "CPU ranks run everything; GPU figures come from recorded runs")
    kinds = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    limit = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    warning = "CUDA_DEVICE_MAX_CONNECTIONS=1 silently removes overlap: unset it" if limit == "1" else ""
    return Capability("GPUs", True, f"{len(kinds)}: {', '.join(sorted(set(kinds)))}", warning)


def _nccl(torch: ModuleType) -> Capability:
    if not (torch.cuda.is_available() and torch.distributed.is_nccl_available()):
        return Capability("NCCL", False, "none", "needs a GPU and a CUDA build of torch")
    return Capability("NCCL", True, ".".join(map(str, torch.cuda.nccl.version())), "one rank a GPU")


def _several(torch: ModuleType) -> Capability:
    """The way to run several ranks on one GPU."""
    if not torch.cuda.is_available():  # before the imports, which take as long as everything else here
        return Capability(SEVERAL, False, "none", "needs a GPU")
    from fsdplab.sessions.spec.run_spec import MULTI_RANK_NCCL, nccl_version

    way = "NCCL" if nccl_version() >= MULTI_RANK_NCCL else "gloo through host memory"
    return Capability(SEVERAL, True, way, "with --device cuda; emulated: ranks take turns on the GPU")


def _browser() -> Capability:
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    return Capability(
        "browser", path is not None, os.path.basename(path) if path else "none", "for the notebooks' browser tests only"
    )


def _packages() -> list[Capability]:
    return [_package(name) for name in PACKAGES]


def _package(name: str) -> Capability:
    try:
        return Capability(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Capability(name, False, "not installed", NEEDED_FOR.get(name, ""))


def reality(found: list[Capability]) -> Mapping[str, str]:
    """What a run on this machine measures, emulates and simulates."""
    by_name = {item.name: item for item in found}
    gpus, on_cpu = by_name["GPUs"].present, f"CPU processes over {by_name['CPU transport'].value}"
    ranks = f"one process a GPU over NCCL, or {on_cpu}" if gpus else on_cpu
    return {
        "real": f"ranks ({ranks}), training, losses, bytes sent, step times, memory of every rank",
        "emulated": (
            "the card (--card): on CPU a run ends when its counted bytes exceed it"
            + ("; on GPUs the allocator enforces it; step times of several ranks on one GPU" if gpus else "")
        ),
        "simulated": "nothing" if gpus else "nothing; what other machines measured is shown from their records",
    }


def show_capabilities(as_json: bool) -> None:
    """Print the findings and the verdict as a table, or as JSON: `{"format": 1, "findings": [...], "real": ...,
    "emulated": ..., "simulated": ..., "verdict": [{"use": ..., "lacks": ..., "remedy": ...}, ...]}`.
    """
    found = capabilities()
    verdict = readiness({item.name: item.present for item in found}, {item.name: item.note for item in found})
    if as_json:
        said = {"findings": [asdict(item) for item in found], **reality(found)}
        print(json.dumps({"format": FORMAT, **said, "verdict": [asdict(each) for each in verdict]}, indent=1))
        return
    table = Table("", "there", "found", "note", box=None, pad_edge=False)
    for item in found:
        table.add_row(item.name, WORD[item.present], escape(item.value), escape(item.note))
    console = console_beside(None)
    console.print(table)
    for word, what in reality(found).items():
        console.print(f"\n[bold]{word}[/]: {what}", highlight=False)
    console.print()
    for line in verdict_lines(verdict):
        name, _, rest = line.partition(": ")
        has_command = name != "ready for"  # which a line break would spoil
        console.print(f"[bold]{name}[/]: {escape(rest)}", highlight=False, soft_wrap=has_command)
