"""Writing a finished profile as a gzipped Chrome trace, in a tenth of the time that PyTorch's own export takes.

`export_chrome_trace("x.json.gz")` compresses line by line in Python, at the highest level: seconds a rank. At the
lowest level and as a whole it takes a fraction of a second; the file is somewhat larger, a tenth of its text.
"""

from __future__ import annotations

import gzip
import shutil
import tempfile
from pathlib import Path

import torch

_LEVEL = 1
_PIECE = 1 << 20  # so that a trace of a gigabyte needs no gigabyte of memory


def save_trace(profile: torch.profiler.profile, path: Path) -> None:
    """Write the trace of a stopped profile to `path` (.json.gz)."""
    # a temporary name, as torch has it: the trace holds the name under which it was first written, and that must not
    # name a user's folder
    with tempfile.NamedTemporaryFile(suffix=".json") as named:
        profile.export_chrome_trace(named.name)
        # opened now: the profiler puts a new file there
        with open(named.name, "rb") as plain, gzip.open(path, "wb", compresslevel=_LEVEL) as packed:
            shutil.copyfileobj(plain, packed, _PIECE)
