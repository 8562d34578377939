"""Notebook 05, the second part: give memory back (`reshard`) and stand guard over what has none (`guarded`)."""

from __future__ import annotations

from pathlib import Path

import torch

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference

DRIVERS = str(Path(__file__).with_name("drivers.py"))

_RESHARD_STUB = '''\
import torch


def reshard(whole):
    """Give the memory behind `whole` back; its shape, and all that looks at the same storage, stay."""
    ...  # one line
'''

_RESHARD = '''\
import torch


def reshard(whole):
    """Give the memory behind `whole` back; its shape, and all that looks at the same storage, stay."""
    whole.untyped_storage().resize_(0)
'''


def _reshard_cases() -> list[Case]:
    wholes = {"floats [7, 2]": torch.arange(14.0).reshape(7, 2), "doubles [5]": torch.arange(5.0, dtype=torch.float64)}
    return [
        Case(
            name,
            ((whole,),) * 2,
            ({"bytes behind whole": 0, "bytes behind the alias": 0, "shape": list(whole.shape)},) * 2,
        )
        for name, whole in wholes.items()
    ]


def _explain_reshard(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    left, held = trial.returned["bytes behind whole"], trial.returned["bytes behind the alias"]
    if not left and held:
        return (
            None,
            (
                "`whole` got another storage; the old one lives on behind what autograd kept, so nothing is freed:"
                " empty the storage itself"
            ),
        )
    if not left:
        return None, "the shape is gone: `whole` must keep it, only the storage behind it is emptied"
    if trial.returned["shape"] != list(case.arguments[0][0].shape):
        return (
            None,
            (
                "`whole.resize_` changes the tensor's shape and frees nothing; it is the storage that must shrink:"
                " `whole.untyped_storage()`"
            ),
        )
    return (
        None,
        (
            "all bytes are still there: `del` and `whole = ...` concern the name only, zeros need as much memory as"
            " other numbers"
        ),
    )


_LINE = "whole.untyped_storage().resize_(0)"

reshard = Exercise(
    id="05.reshard",
    title="Drop the whole",
    statement="Write reshard(whole): the memory behind it is given back, its shape stays.",
    stub=_RESHARD_STUB,
    reference=_RESHARD,
    hints=(
        "You saw the call in the first cell of this notebook.",
        "A tensor is a shape over a storage, and a storage can be resized.",
        "`whole.untyped_storage()` is the storage; `.resize_(bytes)` changes how much memory it has.",
    ),
    cases=_reshard_cases,
    explain=_explain_reshard,
    world_size=2,
    time_limit=30.0,
    driver=(DRIVERS, "drive_reshard"),
    wrong=(
        Wrong("del", edited(_RESHARD, (_LINE, "del whole")), "concern the name only"),
        Wrong("zeros", edited(_RESHARD, (_LINE, "whole.zero_()")), "zeros need as much"),
        Wrong("another name", edited(_RESHARD, (_LINE, "whole = torch.empty(0)")), "concern the name only"),
        Wrong("resize the tensor", edited(_RESHARD, (_LINE, "whole.resize_(0)")), "frees nothing"),
        Wrong(
            "empty data", edited(_RESHARD, (_LINE, "whole.data = torch.empty(0, dtype=whole.dtype)")), "another storage"
        ),
        Wrong(
            "shape gone too",
            edited(_RESHARD, (_LINE, "whole.untyped_storage().resize_(0)\n    whole.resize_(0)")),
            "the shape is gone",
        ),
    ),
)


_GUARDED_STUB = '''\
import torch


def guarded(whole, name):
    """`whole` where its memory is there; else a RuntimeError with `name` and what to call first."""
    ...
'''

_GUARDED = '''\
import torch


def guarded(whole, name):
    """`whole` where its memory is there; else a RuntimeError with `name` and what to call first."""
    if whole.untyped_storage().nbytes() == 0:
        raise RuntimeError(f"{name} was resharded and holds no memory: call unshard before you use it")
    return whole
'''
_NAME = "blocks.3.weight"
_RAISED = {"raised": "RuntimeError", "names it": True, "says what to call": True}


def _guarded_cases() -> list[Case]:
    whole = torch.arange(6.0).reshape(3, 2)
    return [
        Case("gathered", ((whole.clone(), _NAME, False),) * 2, ({"returned": whole},) * 2),
        Case("all zeros, but gathered", ((torch.zeros(3), _NAME, False),) * 2, ({"returned": torch.zeros(3)},) * 2),
        Case("resharded", ((whole.clone(), _NAME, True),) * 2, (_RAISED,) * 2),
    ]


def _explain_guarded(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    got = trial.returned
    if case.arguments[0][2] and "raised" not in got:
        return (
            None,
            (
                "a tensor without memory passed the guard: its shape is unchanged, so numel, shape and nbytes say"
                " nothing; ask its storage"
            ),
        )
    if "raised" in got and not case.arguments[0][2]:
        return (
            None,
            (
                "the guard raised although the memory is there: what counts are the bytes of the storage, not what is"
                " in them"
            ),
        )
    if got.get("raised") not in (None, "RuntimeError"):
        return None, f"{got['raised']} was raised; the statement asks for a RuntimeError"
    if "raised" in got:
        return (
            None,
            "the message must help whoever reads it at three in the morning: it holds `name`, and the word unshard",
        )
    return None, "where the memory is there, return `whole` itself"


_TEST = "whole.untyped_storage().nbytes() == 0"
_MESSAGE = 'f"{name} was resharded and holds no memory: call unshard before you use it"'

guarded = Exercise(
    id="05.guarded",
    title="Use after reshard must raise",
    statement=(
        "Write guarded(whole, name): it returns `whole` where its memory is there, and raises a helpful RuntimeError"
        " where it is not."
    ),
    stub=_GUARDED_STUB,
    reference=_GUARDED,
    hints=(
        "What differs between a gathered and a dropped tensor? Not its shape.",
        "`whole.untyped_storage().nbytes()` counts the bytes behind it. Do not read the tensor, and do not print it.",
        'If that is 0, `raise RuntimeError(f"{name} ... unshard ...")`; else return `whole`.',
    ),
    cases=_guarded_cases,
    explain=_explain_guarded,
    world_size=2,
    time_limit=30.0,
    driver=(DRIVERS, "drive_guarded"),
    wrong=(
        Wrong(
            "no guard",
            edited(_GUARDED, (f"    if {_TEST}:\n        raise RuntimeError({_MESSAGE})\n", "")),
            "passed the guard",
        ),
        Wrong("numel", edited(_GUARDED, (_TEST, "whole.numel() == 0")), "passed the guard"),
        Wrong("nbytes of the tensor", edited(_GUARDED, (_TEST, "whole.nbytes == 0")), "passed the guard"),
        Wrong("zeros", edited(_GUARDED, (_TEST, f"{_TEST} or not whole.any()")), "although the memory is there"),
        Wrong("always", edited(_GUARDED, (_TEST, "True")), "although the memory is there"),
        Wrong("nameless", edited(_GUARDED, (_MESSAGE, '"call unshard first"')), "it holds `name`"),
        Wrong("helpless", edited(_GUARDED, (_MESSAGE, 'f"{name} is not there"')), "the word unshard"),
        Wrong("another error", edited(_GUARDED, ("raise RuntimeError", "raise ValueError")), "asks for a RuntimeError"),
        Wrong("returns nothing", edited(_GUARDED, ("    return whole\n", "")), "return `whole` itself"),
    ),
)

MEMORY_ITEMS = (reshard, guarded)
