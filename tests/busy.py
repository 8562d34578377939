"""Every core of the machine kept busy: a context for tests, and `pytest notebooks --busy`.

What a lesson says about time must not depend on what else the machine computes. One process a core computes without
end. Each looks again and again whether the process that started it still lives, and ends when it does not, however
that process ended.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager

import pytest

# About a millisecond between two looks: soon after the end of what started it, and nearly all of the time it computes.
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): sum(range(50_000))"


@contextmanager
def busy_cores() -> Iterator[list[subprocess.Popen[bytes]]]:
    """One computing process for each core that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    command = [sys.executable, "-S", "-c", SPIN, str(os.getpid())]
    spinning: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(cores):
            spinning.append(subprocess.Popen(command, stdin=subprocess.DEVNULL))
        yield spinning
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--busy`."""
    parser.getgroup("fsdplab").addoption(
        "--busy",
        action="store_true",
        help="keep every core busy with a computing process while the notebooks run: what they claim must hold as well",
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    """Under `--busy`, from the first test to the last; with xdist the workers share the load of the process above."""
    is_worker = hasattr(session.config, "workerinput")
    if not session.config.getoption("busy") or session.config.option.collectonly or is_worker:
        return (yield)
    with busy_cores() as spinning:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter:
            reporter.write_line(f"busy: {len(spinning)} computing processes, one a core")
        return (yield)
