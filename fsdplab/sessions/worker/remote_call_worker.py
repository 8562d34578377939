"""The rank's side of `call_on_ranks`: load the function from its file, call it, return its value.

A learner's code is not reviewed, so values are sent in a form that `torch.load` reads without running code.

python -m fsdplab.sessions.worker.remote_call_worker FOLDER SOURCE FUNCTION DEVICE
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fsdplab.sessions.worker.rank_process import RankContext, backend_of_cells, rank_process

VALUES = "None, bool, int, float, str, plain tensors, and lists, tuples and dicts of them"
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


def main(folder: str, source: str, function_name: str, device: str) -> None:
    """Call the function on this rank, whose `device` is "cpu" or "any"."""
    backend = backend_of_cells(int(os.environ["WORLD_SIZE"])) if device == "any" else "gloo"
    with rank_process(folder, backend, device, keep_issued=True) as context:
        payload = torch.load(context.mailbox.folder / "payload", weights_only=True)
        function = getattr(_module(Path(source)), function_name)
        context.heartbeat.enter(function_name)
        value = _call(function, context, payload)
        unsupported = unsupported_type(value)
        if unsupported is not None:
            raise TypeError(
                f"{function_name} returned something of type {unsupported}, which cannot be sent; return {VALUES}"
            )
        torch.save({"value": value, "collectives": context.issued}, context.mailbox.of(context.rank, "result"))


def _module(source: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(source.stem, source)
    assert spec is not None and spec.loader is not None, f"{source} is no Python file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.stem] = module
    spec.loader.exec_module(module)
    return module


def _call(function: Callable[..., Any], context: RankContext, payload: Any) -> Any:
    if len(inspect.signature(function).parameters) == 1:
        return function(payload)
    return function(context.rank, context.world_size, payload)


def unsupported_type(value: object) -> str | None:
    """The name of the first type in a value that cannot be sent: `"DTensor"`; None when all can.

    Subclasses are unsupported: a DTensor cannot be read without its process group, a numpy number not without numpy.
    """
    if type(value) in _PLAIN:
        return None
    if type(value) is dict:
        return _first(*value.keys(), *value.values())
    if type(value) is list or type(value) is tuple:
        return _first(*value)
    return type(value).__name__


def _first(*values: object) -> str | None:
    return next(filter(None, map(unsupported_type, values)), None)


if __name__ == "__main__":
    main(*sys.argv[1:])
