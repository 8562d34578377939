"""Runs fsdplab's commands on many machines that are not there, and writes the table of what happened.

    python -m tests.fake_cuda.matrix --table tests/fake_cuda/RESULTS.md PYTHON [PYTHON ...]

Each PYTHON is an environment with another torch with CUDA. The commands on machines of all kinds are thinned: every
pair of command, GPUs, capability, memory and torch occurs, not every combination. What goes wrong on purpose (a driver
too old, a rank that is killed, ...) is run with the first PYTHON.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.fake_cuda.all_pairs import all_pairs
from tests.fake_cuda.machine import Done, Machine, run

COMMANDS = ("run", "compare", "%%ranks")
GPUS, CAPABILITIES, MEMORIES_GB = (1, 2, 4), (75, 80, 90), (15, 24, 80)
LIMIT_S = 420
_TINY = ("--model", "gpt-tiny", "--steps", "2")
_SLOW = {"COPY_US": 3000, "COPY_DELAY_US": 3000, "KERNEL_DELAY_US": 300, "SEED": 1}
# what torch warns of is no message of fsdplab's
_ALONE = {"PYTHONWARNINGS": "ignore", "PATH": ""}


@dataclass(frozen=True)
class Judged:
    """Whether it went as it should, and what was looked at: `Judged(True, "kernels in 2 traces")`.

    `ok` is None for what this machine is too small to run.
    """

    ok: bool | None
    saw: str


Judge = Callable[[Done, Path], Judged]


@dataclass(frozen=True)
class Case:
    """A command on a machine; `{}` in it is a new folder, `{python}` the environment's. `judge` sees how it ended and
    what is in the folder. The stand-in keeps what is written to GPUs in `host_gb` of the host's memory.
    """

    name: str
    machine: Machine
    command: tuple[str, ...]
    judge: Judge
    limit_s: float = LIMIT_S
    host_gb: float = 0.0


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    python: str
    case: Case
    judged: Judged

    def cells(self) -> list[str]:
        verdict = {True: "as it should", False: "**not as it should**", None: "not run"}[self.judged.ok]
        return [self.case.name, str(self.case.machine), self.python, verdict, self.judged.saw]


# ---- judging


def last_line(done: Done) -> str:
    """The last line that says something, short."""
    lines = [line.strip() for line in done.output.splitlines() if line.strip()]
    return (lines[-1] if lines else "no output").replace("|", "/")[:200]


def ended_well(done: Done, folder: Path) -> Judged:
    if done.too_long:
        return Judged(False, f"did not end within its limit; last line: {last_line(done)}")
    return Judged(done.returncode == 0, "status 0" if done.returncode == 0 else message_of(done))


def has_kernels(done: Done, folder: Path) -> Judged:
    """It ended well, and each rank's trace holds kernels of computing and of NCCL (or of copies through the host)."""
    ended = ended_well(done, folder)
    if not ended.ok:
        return ended
    counts = [_kernels(path) for path in sorted(folder.rglob("rank*.pt.trace.json.gz"))]
    saw = f"kernels in {sum(count > 0 for count in counts)} of {len(counts)} traces"
    return Judged(bool(counts) and all(counts), saw)


def _kernels(trace: Path) -> int:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event.get("cat") == "kernel" for event in events)


_HEADLINE = re.compile(r"^gpt\S+, \d+ ranks|^ready for|^not for")


def message_of(done: Done) -> str:
    """The line that says what went wrong: the first that is neither the headline nor a traceback."""
    before = done.output.split("Traceback (most recent call last)")[0]
    lines = [line.strip() for line in before.splitlines() if line.strip() and not _HEADLINE.search(line.strip())]
    return (lines[0] if lines else f"only a traceback: {last_line(done)}").replace("|", "/")[:240]


def says(*words: str) -> Judge:
    """It ends badly within its limit, and its message has these words."""

    def judge(done: Done, folder: Path) -> Judged:
        if done.too_long:
            return Judged(False, f"did not end within its limit; last line: {last_line(done)}")
        message = message_of(done)
        found = all(re.search(word, message, re.I) for word in words) and not message.startswith("only a traceback")
        return Judged(found and done.returncode != 0, message)

    return judge


def mentions(*words: str) -> Judge:
    """It ends well and its output has these words."""

    def judge(done: Done, folder: Path) -> Judged:
        ended = ended_well(done, folder)
        lines = "\n".join(line for line in done.output.splitlines() if not _HEADLINE.search(line.strip()))
        found = all(re.search(word, lines, re.I) for word in words)
        return (
            ended
            if not ended.ok
            else Judged(found, f"{'says' if found else 'does not say'} {', '.join(words)}".replace("|", " or "))
        )

    return judge


def losses_equal(done: Done, folder: Path) -> Judged:
    """The first case of `train.py` is the twin on the CPU; all others have its losses to 1e-6."""
    ended = ended_well(done, folder)
    if not ended.ok:
        return ended
    twin, *others = json.loads((folder / "losses.json").read_text())
    failed = [str(one) for one in others if isinstance(one, str)]
    if failed:
        return Judged(False, failed[0][:240])
    worst = max(abs(a - b) / abs(b) for losses in others for a, b in zip(losses, twin))
    equal = worst < 1e-6 and all(len(losses) == len(twin) for losses in others)
    return Judged(equal, f"losses differ from the CPU twin's by {worst:.0e} at most")


# ---- cases


def commands_on_machines(pythons: Sequence[str]) -> Iterable[tuple[str, Case]]:
    """The thinned matrix."""
    for what, gpus, capability, memory, python in all_pairs([COMMANDS, GPUS, CAPABILITIES, MEMORIES_GB, pythons]):
        yield python, _command_on(what, Machine(gpus, capability, memory))


def _command_on(what: str, machine: Machine) -> Case:
    ranks = str(max(2, machine.gpus))
    fsdplab = ("python", "-m", "fsdplab")
    if what == "run":
        command = (*fsdplab, "run", "full_shard", *_TINY, "-n", ranks, "--device", "cuda", "--out", "{}/record")
        return Case(what, machine, command, has_kernels)
    if what == "compare":
        command = (*fsdplab, "compare", *_TINY, "-n", ranks, "--device", "cuda", "--keep", "{}/kept")
        return Case(what, machine, command, has_kernels)
    return Case(what, machine, ("python", "-c", _CELL.format(ranks=ranks)), mentions(f"rank {int(ranks) - 1} reduced"))


_CELL = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "fsdplab.teaching")
shell.run_cell_magic("ranks", "{ranks}", '''
import torch
import torch.distributed as dist
device = "cuda" if dist.get_backend() == "nccl" else "cpu"
total = torch.ones(1, device=device)
dist.all_reduce(total)
print("rank", rank, "reduced on", device, total.item())
''')
"""


def one_of_each() -> Iterable[Case]:
    """What has a path of its own on GPUs, each once: another optimizer, models and jobs of one's own."""
    fsdplab, two = ("python", "-m", "fsdplab"), Machine(gpus=2)
    cuda = ("--steps", "2", "--device", "cuda")
    muon = (*fsdplab, "run", "full_shard", *cuda, "--model", "gpt-tiny", "--optimizer", "muon", "--out", "{}/record")
    yield Case("run, Muon", two, muon, has_kernels)
    mine = (*fsdplab, "compare", *cuda, "--model", "tests/own_models/mine.py", "--keep", "{}/kept")
    yield Case("compare, a model of one's own", two, mine, has_kernels)
    convolutions = (*fsdplab, "run", "full_shard", *cuda, "--model", "tests/own_models/generator.py")
    yield Case("run, convolutions and batch normalization", two, (*convolutions, "--out", "{}/record"), has_kernels)
    job = ("{python}", "-m", "torch.distributed.run", "--nproc-per-node", "2", "tests/jobs/fsdp2_loop.py")
    recorded = (*fsdplab, "record", "--steps", "3:5", "--out", "{}/record", "--", *job, "--steps", "8")
    yield Case("record, FSDP2 under torchrun", two, recorded, has_kernels)
    on_cpu = (*fsdplab, "run", "full_shard", *_TINY, "--device", "cpu", "--out", "{}/record")
    yield Case("run on the CPU, exclusive GPUs", _with(COMPUTE_MODE="exclusive"), on_cpu, ended_well)


def what_goes_wrong() -> Iterable[Case]:
    """Faults: each must end in a message within its limit."""
    fsdplab = ("python", "-m", "fsdplab")
    train = (*fsdplab, "run", "full_shard", *_TINY, "--device", "cuda", "--out", "{}/record")
    two = Machine(gpus=2)
    yield Case("doctor", two, (*fsdplab, "doctor"), mentions("GPUs +yes +2: NVIDIA"))
    yield Case(
        "doctor, IPC refused", _with(IPC="refused"), (*fsdplab, "doctor"), mentions("CUDA IPC +no", "operation not")
    )
    yield Case("doctor, old driver", _with(DRIVER=11040), (*fsdplab, "doctor"), mentions("GPUs +no", "driver"))
    yield Case("doctor, no kernels", Machine(2, 60, 16), (*fsdplab, "doctor"), mentions("capability|kernel"))
    yield Case("run, IPC refused", _with(IPC="refused"), train, has_kernels)
    yield Case("run, old driver", _with(DRIVER=11040), train, says("driver"))
    yield Case("run, no kernels", Machine(2, 60, 16), train, says("kernel|capability"))
    yield Case("run, a GPU each, exclusive", _with(COMPUTE_MODE="exclusive"), train, has_kernels)
    exclusive = Machine(1, settings={"COMPUTE_MODE": "exclusive"})
    yield Case("run, one GPU for two, exclusive", exclusive, train, says("exclusive|busy"))
    larger = (*train, "--model", "gpt2", "--batch-size", "1", "--sequence-length", "16")
    yield Case("run, rank 1 out of memory", _with(TAKEN_MB="0,81480"), larger, says("rank 1", "memory"))
    for fault, words in (("killed", "SIGKILL|killed|signal 9"), ("raises", "the slices do not fit")):
        command = ("python", "-m", "tests.fake_cuda.faulty_rank", fault)
        yield Case(f"run, rank 1 {fault}", two, command, says("rank 1", words), 180)
    cases = json.dumps(_offloaded())
    command = ("python", "-m", "tests.fake_cuda.train", cases, "{}/losses.json")
    slow = Machine(gpus=2, settings=_SLOW)
    yield Case("offload, delayed copies, with numbers", slow, command, losses_equal)
    yield Case("five strategies with numbers", two, (*command[:3], json.dumps(_strategies()), command[4]), losses_equal)


def _with(**settings: object) -> Machine:
    return Machine(gpus=2, settings=settings)


_RUN = {"model": "gpt-tiny", "steps": 2, "profile": 0, "device": "cuda"}
_TWIN = {"spec": {**_RUN, "engine": "twin", "device": "cpu"}}


def _offloaded() -> list[dict[str, object]]:
    return [_TWIN, {"spec": {**_RUN, "offload": "cpu"}}, {"spec": {**_RUN, "offload": "cpu", "prefetch": 2}}]


def _strategies() -> list[dict[str, object]]:
    names = ("no_shard", "zero1", "zero2", "shard_grad_op", "full_shard")
    return [_TWIN, *({"spec": {**_RUN, "strategy": name}} for name in names)]


# ---- the table


@dataclass
class Table:
    """The rows so far, written after each, so that a table that was cut short is still one."""

    path: Path
    versions: dict[str, str]
    only: str = ""
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(" | ".join(row.cells()), flush=True)
        self.path.write_text(self.text())

    def text(self) -> str:
        good, small = (sum(row.judged.ok is verdict for row in self.rows) for verdict in (True, None))
        head = ["what", "machine", "torch", "went", "seen"]
        lines = [" | ".join(cells) for cells in (head, ["---"] * len(head), *(row.cells() for row in self.rows))]
        versions = "\n".join(f"- {name}: {text}" for name, text in self.versions.items())
        only = f"\nOnly the cases whose names match `{self.only}` were asked for.\n" if self.only else ""
        table = "\n".join(f"| {line} |" for line in lines)
        left = f" {small} were not run: this machine has too little memory." if small else ""
        return _TEXT.format(good=good, all=len(self.rows), left=left, versions=versions, only=only, table=table)


_TEXT = """# What ran on GPUs that were not there

Written by `.ci/cuda`. {good} of {all} went as they should.{left}
Nothing here ran on a GPU: see README.md for what is real.

{versions}

Commands on machines (`run`, `compare`, `%%ranks`) are thinned: every pair of command, number of GPUs,
capability, memory and torch occurs, not every combination. One GPU is shared by two ranks; else each rank has its own.
{only}
Not judged: times; numbers, except where a line says so (kernels compute nothing); Triton and `torch.compile`; other
versions of torch than those above.

{table}
"""


def versions_of(python: Path) -> tuple[str, str]:
    """`("2.14.1", "CUDA 13.0, NCCL 2.30.7, Python 3.11")` of an environment."""
    code = "import torch; print(torch.__version__.split('+')[0], torch.version.cuda, torch.cuda.nccl.version())"
    done = run(Machine(), ("python", "-c", code), python, 120, capture=True)
    if done.returncode:
        raise SystemExit(f"{python} cannot import torch under the stand-in:\n{done.output}")
    torch, cuda, nccl = done.output.strip().splitlines()[-1].split(" ", 2)
    version = subprocess.run([python, "-V"], capture_output=True, text=True, check=True).stdout.strip()
    return torch, f"CUDA {cuda}, NCCL {'.'.join(re.findall('[0-9]+', nccl))}, {version}"


def judge(python: Path, case: Case) -> Judged:
    """Run a case and look at it; one that would fill the host's memory is not run, since the system ends processes
    then, and not only its own.
    """
    if (free := _free_gb()) < case.host_gb:
        return Judged(None, f"it needs {case.host_gb:.0f} GB of the host's memory, of which {free:.0f} GB are free")
    with tempfile.TemporaryDirectory(prefix="matrix-") as folder:
        command = [word.replace("{}", folder).replace("{python}", str(python)) for word in case.command]
        done = run(case.machine, command, python, case.limit_s, capture=True, variables=_ALONE | {"HOME": folder})
        return case.judge(done, Path(folder))


def _free_gb() -> float:
    """GB of the host's memory that processes can still take."""
    found = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) / 1e6 if found else float("inf")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pythons", nargs="+", type=Path)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--only", default="", help="a regular expression that the names of cases match")
    said = parser.parse_args()
    known = {version: (python, text) for python in said.pythons for version, text in [versions_of(python)]}
    table = Table(said.table, {f"torch {version}": text for version, (_, text) in known.items()}, said.only)
    cases = list(commands_on_machines(list(known)))
    cases += [(next(iter(known)), case) for case in (*one_of_each(), *what_goes_wrong())]
    for version, case in cases:
        if re.search(said.only, case.name):
            table.add(Row(version, case, judge(known[version][0], case)))
    return 1 if any(row.judged.ok is False for row in table.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
