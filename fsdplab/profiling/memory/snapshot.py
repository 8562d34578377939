"""The snapshot that PyTorch's own memory viewer opens (pytorch.org/memory_viz): every allocation of a step with the
lines that made it.

Only the CUDA allocator keeps such a history. A snapshot is a pickle; gzipped in the record, where a step's is a few
hundred kilobytes.
"""

from __future__ import annotations

import gzip
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

MOST_EVENTS = 20_000  # of the newest: a step of a model with a few hundred parameters has some thousands


@contextmanager
def memory_snapshot(path: Path | None, device: torch.device) -> Iterator[None]:
    """Record the block's allocations on `device` and write them to `path` (.pickle.gz); does nothing on CPU, or where
    `path` is None.

    What was allocated before is in the snapshot too, without its lines. A block that raises leaves no file.
    """
    if path is None or device.type != "cuda":
        yield
        return
    torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS, stacks="python", device=device)
    try:
        yield
        snapshot = torch.cuda.memory._snapshot(device)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None, device=device)
    write_snapshot(snapshot, path)


def write_snapshot(snapshot: Any, path: Path) -> None:
    """Write what `torch.cuda.memory._snapshot()` returned, gzipped. Names of files, which identify a machine, are cut
    in place: `/home/me/fsdplab/engine/core/unit.py` is `fsdplab/engine/core/unit.py`; of others three parts stay.
    """
    waiting = [snapshot]
    while waiting:
        thing = waiting.pop()
        if isinstance(thing, dict) and isinstance(name := thing.get("filename"), str):
            ours = re.fullmatch(r"(?:.*/)?(fsdplab/.*)", name)
            thing["filename"] = ours[1] if ours else "/".join(name.split("/")[-3:])
        values = thing.values() if isinstance(thing, dict) else thing
        waiting += [value for value in values if isinstance(value, (dict, list))]
    with gzip.open(path, "wb") as file:
        pickle.dump(snapshot, file)
