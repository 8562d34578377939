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
def no_collections() -> Iterator[None]:
    """For large imports: what a module makes stays, and looking for garbage in it takes a sixth of torch's import."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def with_this_checkout(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which a new Python finds this very package, also where it is not installed."""
    checkout = str(Path(__file__).resolve().parents[2])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, [checkout, environment.get("PYTHONPATH")]))}
