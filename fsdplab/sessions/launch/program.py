"""Runs a program in a rank's process, forked or new, as `python *program` would, and ends the process.

    python -m fsdplab.sessions.launch.program -m fsdplab.sessions.worker.training FOLDER      started by torchrun

For a program of the lab's own (`-m fsdplab...`) the working folder stands on the path behind Python's own library: a
learner's function finds the modules beside it, and a `random.py` among them is not imported by torch, which imports
much only when it needs it.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from fsdplab.common.pythons import imports_that_stay, run_of


def as_ranks_of_torchrun(program: Sequence[str], per_node: object, address: str) -> list[str]:
    """Return the last arguments of torchrun, by which each of a node's ranks runs `program` with this module, once."""
    python, *words = run_of("fsdplab.sessions.launch.program", *program)
    return [
        f"--nproc-per-node={per_node}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        f"--log-dir={os.devnull}",
        f"--local-addr={address}",
        "--no-python",
        python,
        "-u",
        *words,
    ]


def run_and_end(program: Sequence[str]) -> NoReturn:
    """Run the program and end this process with its exit code; no destructor and no exit handler runs."""
    try:
        run_program(program)
        code: object = 0
    except SystemExit as left:
        code = left.code
        if isinstance(code, str):  # sys.exit("why")
            print(code, file=sys.stderr)
    except BaseException:
        code = 1
        # a program that has set sys.excepthook (rank_process.py) writes its failure and ends there
        with suppress(OSError):  # its standard error is on a full disk
            sys.excepthook(*sys.exc_info())
    # as Python does: None is 0, a text is printed and is 1
    end_process(code if isinstance(code, int) else 0 if code is None else 1)


def print_into(*files: str | Path) -> None:
    """Let standard output and standard error end in these files; descriptors, not sys.stdout: C++ prints too."""
    for descriptor, path in enumerate(files, start=1):
        # appending: two processes of a rank do not write over each other
        file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)


def end_process(code: int) -> NoReturn:
    """End this process at once, with all that it printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):  # on a full disk, what is left in its buffer is lost
            stream.flush()
    os._exit(code)


def run_program(program: Sequence[str]) -> None:
    """Do what `python *program` does: `-m fsdplab.sessions.worker.training FOLDER`, or `script.py ARGUMENTS`."""
    if program[0] != "-m":
        sys.argv = list(program)
        sys.path.insert(0, os.path.dirname(os.path.abspath(program[0])))
        runpy.run_path(program[0], run_name="__main__")
        return
    name, *arguments = sys.argv = list(program[1:])
    if name.startswith("fsdplab.sessions."):
        with imports_that_stay():
            module = importlib.import_module(name)
        sys.path[:] = _behind_the_library()
        module.main(*arguments)
        return
    sys.path[:] = _behind_the_library() if name.startswith("fsdplab.") else [*_working_folder(), *sys.path]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _behind_the_library() -> list[str]:
    """sys.path with Python's own library first, then the working folder, then all other packages."""
    library = os.path.dirname(os.__file__)
    first = [each for each in sys.path if each in (library, os.path.join(library, "lib-dynload"))]
    return [*first, *_working_folder(), *(each for each in sys.path if each not in first)]


def _working_folder() -> list[str]:
    """Return the working folder; none where it was deleted."""
    with suppress(FileNotFoundError):
        return [os.getcwd()]
    return []


if __name__ == "__main__":
    run_and_end(sys.argv[1:])
