"""Builds the stand-in for NVIDIA's driver against the CUDA wheels of a Python environment.

The C++ files in `driver/` implement what torch calls and what matters here. Every other function of CUDA, cuBLAS,
cuDNN, NCCL, ... that torch's libraries import becomes a stub that returns success; the list is read from the wheels, so
that one source serves all versions of torch.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parent / "driver"
_OF_CUDA = re.compile(r"^(cuda|__cuda|cublas|cudnn|cusparse|cusolver|nccl|cupti|nvshmem|cu[A-Z])")
_REAL = re.compile(r"^cuFile|^cudnnGetVersion$")  # these libraries are loaded and work without a GPU
_MAKE_A_HANDLE = {"cudnnCreate", "cusparseCreate", "cusolverDnCreate", "cudnnCreateDropoutDescriptor"}
_IMPORTERS = (
    "libc10_cuda", "libtorch_cuda", "libtorch_python", "libtorch_cpu", "libtorch_cuda_linalg", "libtorch_nvshmem",
    "libcaffe2_nvrtc",
)  # fmt: skip
_SCRIPT = "import sysconfig; print(sysconfig.get_paths()['purelib'])"


class CannotBuild(Exception):
    """What is missing, in one sentence."""


@dataclass(frozen=True)
class Wheels:
    """The parts of a CUDA environment that the build reads."""

    python: Path
    torch: Path
    includes: tuple[Path, ...]

    @staticmethod
    def of(python: Path) -> Wheels:
        """Find them; a sentence says what is missing."""
        if not shutil.which("g++"):
            raise CannotBuild("there is no g++: install it (Debian: apt-get install g++)")
        site = Path(_output(str(python), "-c", _SCRIPT).strip())
        torch, nvidia = site / "torch", site / "nvidia"
        if not (torch / "lib" / "libtorch_cuda.so").exists():
            raise CannotBuild(f"{python} has no torch with CUDA: pip install torch (not from the CPU index)")
        return Wheels(python, torch, _includes(nvidia))

    @property
    def headers(self) -> str:
        """The text of CUPTI's and CUDA's headers that name versions."""
        found = [folder / name for folder in self.includes for name in ("cupti_activity.h", "cuda_runtime_api.h")]
        return "".join(path.read_text(errors="replace") for path in found if path.exists())

    @property
    def cuda_version(self) -> int:
        """13000 for CUDA 13.0."""
        return int(_found(r"#define CUDART_VERSION\s+(\d+)", self.headers))


def build(python: Path) -> Path:
    """The folder with the stand-in for `python`'s torch; it is built where this version is not yet there.

    It lies in the environment of `python`, so it goes with it. Raises `CannotBuild` with a sentence.
    """
    wheels = Wheels.of(python)
    key = hashlib.sha256(b"".join(path.read_bytes() for path in [Path(__file__), *sorted(SOURCES.iterdir())]))
    key.update((wheels.torch / "version.py").read_bytes())
    folder = wheels.torch.parents[3] / "fake_cuda" / key.hexdigest()[:12]
    if not folder.exists():
        folder.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
            _build_in(Path(unfinished), wheels)
            with suppress(OSError):  # another process was faster
                Path(unfinished, "libraries").rename(folder)
    return folder


def _build_in(scratch: Path, wheels: Wheels) -> None:
    """Leave the libraries in `scratch/libraries`."""
    flags = ["-std=c++17", "-O1", "-fPIC", "-w", *_records(wheels)]
    flags += [f"-I{path}" for path in wheels.includes]
    sources = [path for path in sorted(SOURCES.glob("*.cpp")) if path.name != "nvml.cpp"]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(lambda source: _compile(source, scratch, flags), sources))
    stubs = scratch / "stubs.cpp"
    stubs.write_text(_stubs(_imported(wheels) - _defined(objects)))
    objects.append(_compile(stubs, scratch, flags))
    (scratch / "libraries").mkdir()
    _shared("libnvidia-ml.so.1", scratch / "libraries", [_compile(SOURCES / "nvml.cpp", scratch, flags)])
    _shared("libcuda.so.1", scratch / "libraries", objects)


def _includes(nvidia: Path) -> tuple[Path, ...]:
    """The folders of headers; CUDA 13 has one for all (nvidia/cu13), CUDA 12 one a library."""
    folders = tuple(sorted(nvidia.glob("*/include")))
    for header, package in {"cuda.h": "nvidia-cuda-runtime", "crt/host_defines.h": "nvidia-cuda-crt==13.0.*"}.items():
        if not any((folder / header).exists() for folder in folders):
            raise CannotBuild(f"the header {header} is missing: pip install {package!r}")
    return folders


def _records(wheels: Wheels) -> list[str]:
    """The newest record structures of this CUPTI: those that torch's profiler was compiled for."""
    names = {"KERNEL_RECORD": "Kernel", "COPY_RECORD": "Memcpy", "FILL_RECORD": "Memset"}
    flags = [f"-DFAKE_CUDA_VERSION={wheels.cuda_version}"]
    for macro, name in names.items():
        numbers = re.findall(rf"}} CUpti_Activity{name}(\d+);", wheels.headers)
        flags.append(f"-D{macro}=CUpti_Activity{name}{max(map(int, numbers))}")
    return flags


def _compile(source: Path, folder: Path, flags: list[str]) -> Path:
    target = folder / f"{source.stem}.o"
    _output("g++", *flags, "-c", str(source), "-o", str(target))
    return target


def _shared(name: str, folder: Path, objects: list[Path]) -> None:
    target = str(folder / name)
    _output("g++", "-shared", "-o", target, f"-Wl,-soname,{name}", *map(str, objects), "-ldl", "-lpthread")


def _imported(wheels: Wheels) -> set[str]:
    libraries = [wheels.torch / "lib" / f"{name}.so" for name in _IMPORTERS]
    text = "".join(_output("nm", "-D", "--undefined-only", str(path)) for path in libraries if path.exists())
    names = {line.split()[-1].split("@")[0] for line in text.splitlines() if line.split()}
    return {name for name in names if _OF_CUDA.match(name) and not _REAL.match(name)}


def _defined(objects: list[Path]) -> set[str]:
    text = "".join(_output("nm", "--defined-only", str(path)) for path in objects)
    return {line.split()[-1] for line in text.splitlines() if len(line.split()) == 3}


def _stubs(names: set[str]) -> str:
    lines = ["#include <cstdio>", "#include <cstdlib>", 'extern "C" {']
    lines.append("int nvrtcVersion(int* major, int* minor) { return *major = 13, *minor = 0, 0; }")
    for name in sorted(names):
        handle = "void** made" if name in _MAKE_A_HANDLE else ""
        body = "*made = malloc(256); return 0;" if handle else "return 0;"
        lines.append(f"int {name}({handle}) {{ {body} }}")
    return "\n".join([*lines, "}", ""])


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    if match is None:
        raise CannotBuild(f"no header says {pattern!r}: are the CUDA wheels whole?")
    return match[1]


def _output(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotBuild(f"{' '.join(command[:2])} ... ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return done.stdout


if __name__ == "__main__":
    try:
        print(build(Path(sys.argv[1])))
    except CannotBuild as error:
        sys.exit(f"fake_cuda: {error}")
