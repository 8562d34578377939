"""Compiles blocks: each transformer block's forward becomes one graph, whatever engine shards it afterwards.

The class of a block is replaced by a subclass whose `forward` is compiled. Engines hang their hooks on the module, so
gathering, dropping and recomputing stay outside of the graph, and parameters keep their names (`torch.compile(block)`
puts `_orig_mod.` into them). One compiled function serves all blocks of a class: parameters are inputs of the graph.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch import nn

from .errors import ModelError


def compile_blocks(model: nn.Module, backend: str = "inductor") -> nn.Module:
    """Have every module of `model.blocks` compiled at its first forward; returns `model`. Call it before the model is
    sharded.

    Raises `ModelError` for a model without blocks. A graph break is an error at that first forward: a block is one
    graph.
    """
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise ModelError(
            f"{type(model).__name__} has no blocks to compile; expected a ModuleList called blocks with at least one"
            " module"
        )
    compile_modules(blocks, backend)
    return model


def compile_modules(modules: Iterable[nn.Module], backend: str = "inductor") -> None:
    """Have each of these modules compiled at its first forward, as `compile_blocks` does for blocks."""
    for module in modules:
        # the same object with the same parameters, and another `forward`
        module.__class__ = _compiled(module.__class__, backend)


@cache
def _compiled(kind: type[nn.Module], backend: str) -> type[nn.Module]:
    """Return a subclass of `kind`, one a class and backend, so that all its instances share one cache of graphs."""
    # fullgraph: a break inside of a block would be an error, not a second graph
    forward = torch.compile(kind.forward, backend=backend, fullgraph=True)
    return type(f"Compiled{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def missing_compiler(device_type: str) -> str | None:
    """Return what `torch.compile` lacks here for `device_type`; None where nothing is known to be missing."""
    if device_type == "cpu":
        # on a CPU inductor writes C++, on a GPU triton
        found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
        return None if found else "a C++ compiler (g++)"
    if importlib.util.find_spec("triton") is None:
        return "triton"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or shutil.which("cc")):
        return "a C compiler (gcc), which triton calls"
    headers = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    return None if headers.is_file() else "Python's headers (python3-dev), against which triton compiles"
