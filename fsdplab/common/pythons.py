"""New Pythons that run a module of ours, look for nothing in the caller's folder, and start as fast as they can.

`python -m module` puts the working folder first on the path, so a `random.py` of the user's would be imported in place
of Python's own by whatever the lab starts there. `python -P` (from Python 3.11 on) does not; this works on 3.10 too.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

# -c puts the working folder first, as an empty name
SAFE_PATH = "import sys; sys.path[:] = [each for each in sys.path if each]"
_RUN = f"{SAFE_PATH}; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"


def run_of(module: str, *arguments: str) -> list[str]:
    """The command that does what `python -m module ARGUMENTS` does, without the working folder on the path."""
    return [sys.executable, "-c", _RUN, module, *arguments]


@contextmanager
def imports_that_stay() -> Iterator[None]:
    """For the large imports of a process of the lab's own: nothing looks for garbage in them, now or ever.

    Looking while they are made takes a sixth of torch's import, and the first look afterwards half a second more. In
    ranks forked from it, a look would copy the pages that they share.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def without_package(name: str) -> Iterator[None]:
    """Imports inside go on as if `name`, which they try to import, were not installed; nothing changes afterwards."""
    hidden = name not in sys.modules
    if hidden:
        sys.modules[name] = None  # type: ignore[assignment]  # for this an import raises ImportError
    try:
        yield
    finally:
        if hidden:
            del sys.modules[name]


def with_this_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a new Python finds this very package, also where it is not installed."""
    checkout = str(Path(__file__).resolve().parents[2])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [checkout, environment.get("PYTHONPATH")]))}
