"""One file of PyTorch's own FSDP2 tests on CPU ranks, with PyTorch's `fully_shard` or with the lab's in its place.

Run by `against_pytorch.py`: `python upstream_tests.py FILE ENGINE LIMIT_S PATTERN [TEST ...]` writes a line of JSON a
test. The files ask for GPUs; here a rank is a process on CPU with gloo. What is changed for that is changed before the
file is imported, and alike for both engines. Each test runs in a process group of its own, which is killed at its end.
"""

from __future__ import annotations

import importlib
import io
import json
import multiprocessing as mp
import os
import re
import signal
import sys
import unittest
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

RANKS = 4  # as many "devices" as the tests find
STOCK = "stock"
PACKAGES = (
    "torch.distributed.fsdp",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
)


def pretend_devices() -> None:
    """Answer the questions for accelerators with CPU ranks, and start ranks by fork, so that torch is imported once."""
    torch.set_num_threads(1)  # also: a process that has computed on several threads cannot be forked
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: 1024  # type: ignore[assignment]
    torch.cpu.device_count = lambda: RANKS
    torch.cpu.current_device = lambda: None  # type: ignore[assignment,return-value]  # no index: torch.device("cpu")
    torch.Tensor.pin_memory = lambda tensor, *_: tensor  # type: ignore[assignment]
    begin = DistributedDataParallel.__init__

    def begin_without_ids(self: Any, module: Any, device_ids: Any = None, *rest: Any, **options: Any) -> None:
        begin(self, module, None, *rest, **options)

    DistributedDataParallel.__init__ = begin_without_ids  # type: ignore[method-assign]
    torch.multiprocessing.get_context = lambda method=None: mp.get_context("fork")
    torch.multiprocessing.set_start_method = lambda *_, **__: None

    from torch.testing._internal import common_device_type, common_distributed, common_utils

    def runs_anyway(ranks: int, **_: Any) -> Callable[[Any], Any]:
        def noted(test: Any) -> Any:
            test.ranks = ranks
            return test

        return noted

    def for_cpu(kind: type, scope: dict[str, Any], *_: Any, **__: Any) -> None:
        instantiate(kind, scope, only_for="cpu")

    common_distributed.skip_if_lt_x_gpu = runs_anyway
    instantiate = common_device_type.instantiate_device_type_tests
    common_device_type.instantiate_device_type_tests = for_cpu

    from torch.testing._internal import common_fsdp  # its classes are made of what has been changed above

    common_fsdp.DEVICE_COUNT = RANKS
    if hasattr(common_utils, "_cpu_sleep"):
        torch.cpu._sleep = common_utils._cpu_sleep  # type: ignore[attr-defined]


def at_most_ranks(module: ModuleType) -> None:
    """As on a machine of `RANKS` GPUs, or as many as a test asks for: some start eight ranks where there is no GPU."""
    from torch.testing._internal.common_fsdp import FSDPTest

    def capped(wanted: property) -> property:
        def world_size(test: Any) -> int:
            asked = getattr(getattr(type(test), test._testMethodName), "ranks", 0)
            return min(max(RANKS, asked), wanted.__get__(test))

        return property(world_size)

    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, FSDPTest) and "world_size" in vars(kind):
            kind.world_size = capped(vars(kind)["world_size"])  # type: ignore[method-assign,assignment]


def put_in_place(transport: str) -> None:
    """The lab's engine under every public name of PyTorch's, its collectives over one transport."""
    import fsdplab.engine as lab

    def fully_shard(module: Any, **options: Any) -> Any:
        # Ranks that are threads have a process group of their own, which only the transport "auto" goes over.
        over = transport if dist.is_initialized() and dist.get_backend() == "gloo" else "auto"
        return lab.fully_shard(module, transport=over, **options)

    fully_shard.state = lab.fully_shard.state  # type: ignore[attr-defined]
    ours = {name: getattr(lab, name) for name in lab.__all__} | {"fully_shard": fully_shard}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in ours.keys() & set(dir(module)):
            setattr(module, name, ours[name])


def tests_in(module: ModuleType) -> Iterator[str]:
    """`Class.test` of every test that the file defines."""
    loader = unittest.TestLoader()
    for name, kind in vars(module).items():
        if isinstance(kind, type) and issubclass(kind, unittest.TestCase) and kind.__module__ == module.__name__:
            yield from (f"{name}.{test}" for test in loader.getTestCaseNames(kind))


def verdict_of(module: ModuleType, test: str) -> dict[str, str]:
    """Run one test here; its verdict, and for what did not pass the report of unittest."""
    kind, name = test.split(".")
    stream = io.StringIO()
    suite = unittest.TestSuite([getattr(module, kind)(name)])
    result = unittest.TextTestRunner(stream=stream, verbosity=0).run(suite)
    if result.skipped:
        return {"verdict": "skipped", "report": result.skipped[0][1]}
    if bad := result.failures or result.errors:
        return {"verdict": "timed out" if "terminated or timed out" in bad[0][1] else "failed", "report": bad[0][1]}
    return {"verdict": "passed" if result.wasSuccessful() else "failed", "report": stream.getvalue()}


def alone(module: ModuleType, test: str, limit_s: float) -> dict[str, str]:
    """Run one test in a process group of its own for at most `limit_s` seconds."""
    here, there = mp.Pipe(duplex=False)

    def run(sends: Connection) -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        sends.send(verdict_of(module, test))

    process = mp.get_context("fork").Process(target=run, args=(there,))
    process.start()
    there.close()
    try:
        if not here.poll(limit_s):
            return {"verdict": "timed out", "report": f"no end after {limit_s:.0f} s"}
        return here.recv()
    except EOFError:
        process.join()
        return {"verdict": "died", "report": f"exit code {process.exitcode}"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # ranks may outlive the process that started them
        process.join()


def main(file: Path, engine: str, limit_s: float, only: str, wanted: Sequence[str]) -> None:
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the tests print is not the answer
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))

    def say(answer: dict[str, Any]) -> None:
        print(json.dumps(answer), file=lines, flush=True)

    os.environ["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(int(limit_s))  # else PyTorch's tests give up after 300 s
    if engine != STOCK:
        put_in_place(engine)
    pretend_devices()
    sys.path.insert(0, str(file.parent))
    module = importlib.import_module(file.stem)
    at_most_ranks(module)
    tests = list(wanted) or [test for test in tests_in(module) if re.search(only, f"{file.stem}.{test}")]
    say({"tests": len(tests)})
    for test in tests:
        say({"test": test} | alone(module, test, limit_s))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4], sys.argv[5:])
