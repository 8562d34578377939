"""The values that the caller and its ranks may exchange: what `torch.load` reads without running code.

A learner's code is not reviewed, so its results are never unpickled freely.
"""

from __future__ import annotations

import torch

VALUES = "None, bool, int, float, str, plain tensors, and lists, tuples and dicts of them"
_PLAIN = (type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter)


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
