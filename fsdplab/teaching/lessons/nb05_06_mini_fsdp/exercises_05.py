"""Notebook 05: one layer, sharded by hand: cut it (`shard`), gather it (`unshard`), give its memory back (`reshard`),
stand guard over what has none (`guarded`). `exercises_05_reduce.py` has the gradients and the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fsdplab.teaching.core.comm_log import to_one_rank_only
from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference, Feedback

from .drivers import END, FRESH, PASSES, REBOUND, RUNTIME_ERROR, passes, raises
from .exercises_05_reduce import REDUCE_ITEMS

DRIVERS = str(Path(__file__).with_name("drivers.py"))
_RANKS = 3
_WHOLES = {  # rows over 3 ranks: 3 + 3 + 1, 2 + 2 + 0, and 2 + 2 + 2
    "floats [7, 2]: 3, 3 and 1 rows": 1 + torch.arange(14.0).reshape(7, 2),
    "whole numbers [4]: 2, 2 and no rows": 10 + torch.arange(4),
    "doubles [6, 1]: 2 rows each": 0.5 + torch.arange(6.0, dtype=torch.float64).reshape(6, 1),
}


def padded_slices(whole: torch.Tensor, n: int) -> list[torch.Tensor]:
    """Every rank's slice as torch.chunk cuts it, padded with zero rows: what `shard` must give."""
    c = -(-len(whole) // n)
    padded = torch.cat([whole, whole.new_zeros(n * c - len(whole), *whole.shape[1:])])
    return [piece.clone() for piece in padded.split(c)]


_SHARD_STUB = '''\
import torch


def shard(whole, rank, n):
    """`rank`'s rows of `whole` [rows, ...], then zero rows up to c = ceil(rows / n): [c, ...], a copy."""
    c = -(-len(whole) // n)  # rounds up
    ...
'''

_SHARD = '''\
import torch


def shard(whole, rank, n):
    """`rank`'s rows of `whole` [rows, ...], then zero rows up to c = ceil(rows / n): [c, ...], a copy."""
    c = -(-len(whole) // n)  # rounds up
    mine = whole.new_zeros(c, *whole.shape[1:])
    rows = whole[rank * c : (rank + 1) * c]
    mine[: len(rows)] = rows
    return mine
'''


def _shard_cases() -> list[Case]:
    return [_shard_case(name, whole) for name, whole in _WHOLES.items()]


def _shard_case(name: str, whole: torch.Tensor) -> Case:
    expected = tuple({"slice": mine, "bytes behind it": mine.nbytes} for mine in padded_slices(whole, _RANKS))
    return Case(name, tuple((whole, rank, _RANKS) for rank in range(_RANKS)), expected)


def _explain_shard(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    whole, mine = case.arguments[0][0], trial.returned["slice"]
    if "bytes" in difference.tensor:
        return (
            None,
            (
                "this is a view: the whole tensor stays in memory behind it, and nothing is saved; copy the rows into"
                " memory of their own"
            ),
        )
    if not isinstance(mine, torch.Tensor):
        return None, "return the slice, a tensor"
    if difference.problem == "shape":
        return None, _wrong_shape(whole, mine)
    rows = whole[trial.rank * len(mine) : (trial.rank + 1) * len(mine)]
    filler = mine.new_zeros(len(mine) - len(rows), *whole.shape[1:])
    if torch.equal(mine, torch.cat([filler, rows])):
        return (
            None,
            "the padding stands before the rows; it belongs after them, so that the slices joined end in padding",
        )
    if torch.equal(mine[: len(rows)], rows):
        return (
            None,
            "this rank's rows are right, but the rows that pad them are not zeros (rows repeated, or memory that was"
            " never cleared?): start from `new_zeros`, and write only as many rows as there are",
        )
    if trial.rank and torch.equal(mine, padded_slices(whole, _RANKS)[0]):
        return None, "every rank keeps the first rows; rank r begins at row r * c"
    if torch.equal(mine[: len(whole[trial.rank :: _RANKS])], whole[trial.rank :: _RANKS]):
        return None, "rows are dealt out like cards; a rank keeps c rows that follow each other, from r * c on"
    return None, "these are not the rows r * c to (r + 1) * c, followed by zeros"


def _wrong_shape(whole: torch.Tensor, mine: torch.Tensor) -> str:
    if mine.shape[1:] != whole.shape[1:]:
        return "only dimension 0 is cut; the others stay as they are"
    if len(mine) < -(-len(whole) // _RANKS):
        return (
            "a slice is shorter than c: all ranks send equally many rows, so the short slices are padded with zero rows"
            " (c rounds up)"
        )
    return "a slice is longer than c = ceil(rows / n) rows"


_ROWS = "rows = whole[rank * c : (rank + 1) * c]"
_BODY = _SHARD.partition("# rounds up\n")[2]

shard = Exercise(
    id="05.shard",
    title="Keep one slice",
    statement=(
        "Write shard(whole, rank, n): the rows that torch.chunk would give to `rank`, padded with zero rows to c ="
        " ceil(rows / n)."
    ),
    stub=_SHARD_STUB,
    reference=_SHARD,
    hints=(
        (
            "All slices are equally long, or the ranks could not exchange them in one call. So what does the last rank"
            " do, which has fewer rows?"
        ),
        (
            "Make c zero rows like `whole` (`whole.new_zeros(c, *whole.shape[1:])`) and write this rank's rows into the"
            " first of them. A slice that goes past the end is just shorter, or empty."
        ),
        "`rows = whole[rank * c : (rank + 1) * c]`, then `mine[: len(rows)] = rows`, and return `mine`.",
    ),
    cases=_shard_cases,
    explain=_explain_shard,
    world_size=_RANKS,
    pure=True,
    driver=(DRIVERS, "drive_shard"),
    wrong=(
        Wrong(
            "a view",
            edited(
                _SHARD,
                (
                    _BODY,
                    (
                        "    padded = torch.cat([whole, whole.new_zeros(n * c - len(whole), *whole.shape[1:])])\n   "
                        " return padded[rank * c : (rank + 1) * c]\n"
                    ),
                ),
            ),
            "a view",
        ),
        Wrong("rounds down", edited(_SHARD, ("-(-len(whole) // n)", "len(whole) // n")), "shorter than c"),
        Wrong(
            "no padding",
            edited(_SHARD, (_BODY, "    return whole[rank * c : (rank + 1) * c].clone()\n")),
            "padded with zero rows",
        ),
        Wrong(
            "balanced",
            edited(_SHARD, (_BODY, "    return torch.tensor_split(whole, n)[rank].clone()\n")),
            "padded with zero rows",
        ),
        Wrong(
            "padding first", edited(_SHARD, ("mine[: len(rows)]", "mine[c - len(rows) :]")), "stands before the rows"
        ),
        Wrong(
            "rows repeated",
            edited(
                _SHARD,
                (
                    "    mine[: len(rows)] = rows\n",
                    "    index = torch.arange(rank * c, (rank + 1) * c).clamp(max=len(whole) - 1)\n    mine ="
                    " whole[index]\n",
                ),
            ),
            "are not zeros",
        ),
        Wrong(
            "memory that was never cleared",
            edited(_SHARD, ("whole.new_zeros(c, *whole.shape[1:])", "whole.new_full((c, *whole.shape[1:]), 7)")),
            "are not zeros",
        ),
        Wrong("always the first rows", edited(_SHARD, (_ROWS, "rows = whole[:c]")), "every rank keeps the first rows"),
        Wrong("dealt out", edited(_SHARD, (_ROWS, "rows = whole[rank::n]")), "like cards"),
        Wrong("the whole", edited(_SHARD, (_BODY, "    return whole.clone()\n")), "longer than c"),
        Wrong("flattened", edited(_SHARD, ("return mine", "return mine.flatten()[:c]")), "only dimension 0"),
        Wrong("default dtype", edited(_SHARD, ("whole.new_zeros(c,", "torch.zeros(c,")), "default dtype"),
        Wrong("returns nothing", edited(_SHARD, ("    return mine\n", "")), "return the slice"),
        Wrong(
            "chunk and index",
            edited(_SHARD, (_BODY, "    return torch.chunk(whole, n)[rank].clone()\n")),
            "fewer pieces than ranks",
            ends="raises",
        ),
    ),
)


_UNSHARD_STUB = '''\
import torch
import torch.distributed as dist


def unshard(mine, whole):
    """Fill `whole` [rows, ...], which has a shape and no memory, from every rank's `mine` [c, ...]."""
    n = dist.get_world_size()
    ...  # gather n slices of c rows: n * c rows, which may be more than `whole` has
    whole.untyped_storage().resize_(whole.nbytes)  # memory again, with nothing useful in it
    ...
'''

_UNSHARD = '''\
import torch
import torch.distributed as dist


def unshard(mine, whole):
    """Fill `whole` [rows, ...], which has a shape and no memory, from every rank's `mine` [c, ...]."""
    n = dist.get_world_size()
    padded = mine.new_empty(n * len(mine), *mine.shape[1:])
    dist.all_gather(list(padded.chunk(n)), mine)
    whole.untyped_storage().resize_(whole.nbytes)  # memory again, with nothing useful in it
    whole.copy_(padded[: len(whole)])
'''


def _unshard_cases() -> list[Case]:
    return [
        Case(
            name,
            tuple((mine, len(whole)) for mine in padded_slices(whole, _RANKS)),
            ({"whole": whole, "alias": whole[1:]},) * _RANKS,
        )
        for name, whole in _WHOLES.items()
    ]


def _explain_unshard(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    whole, alias = trial.returned["whole"], trial.returned["alias"]
    if only := to_one_rank_only(trial.calls):
        return None, only
    if REBOUND in trial.printed and not isinstance(alias, str):
        return (
            None,
            (
                "`whole = ...` gives the name to another tensor, and the one that was handed in is not filled: write"
                " into its memory, `whole.copy_(...)`"
            ),
        )
    if isinstance(whole, str):
        return (
            None,
            (
                "`whole` itself is still empty: fill the tensor that was handed in (`whole.copy_(...)`); `whole = ...`"
                " only gives the name to another one"
            ),
        )
    if isinstance(alias, str):
        return (
            None,
            (
                "`whole` looks at new memory now, while what autograd kept looks at the old, empty storage: resize that"
                " storage and copy into it"
            ),
        )
    if not whole.any() or (whole.view(torch.uint8) == FRESH).all():
        return (
            None,
            "`whole` has memory, but nothing was copied into it after the resize: what is copied before is lost",
        )
    own = case.arguments[trial.rank][0]
    if not torch.equal(whole[: len(own)], case.expected[0]["whole"][: len(own)]):
        return None, "the first rows are not those of rank 0: join the slices in rank order, 0 first"
    return (
        None,
        (
            "rows are missing or misplaced: join n slices of c rows in rank order, then take the first `len(whole)`"
            " rows, which leaves the padding out"
        ),
    )


def _unshard_rules(case: Case, trials: Sequence[Trial]) -> Feedback | None:
    """Right values, with no more bytes than one all-gather moves."""
    for trial in trials:
        mine = case.arguments[trial.rank][0]
        moved = [call for call in trial.calls if call.kind not in ("barrier", "recv")]
        wasteful = next((call.kind for call in moved if call.kind in ("all_reduce", "reduce", "reduce_scatter")), None)
        if wasteful:
            cause = "sums are not needed to collect rows, and an all_reduce moves twice the bytes: use all_gather"
            return Feedback(
                "The values are right, but rows were added up instead of gathered.",
                "one all_gather",
                wasteful,
                cause,
                trial.rank,
            )
        gathered = sum(call.nbytes for call in moved if call.kind == "all_gather")
        if gathered > _RANKS * mine.nbytes:
            cause = "it was gathered more than once, or more than the slices: one all_gather brings everything"
            return Feedback(
                "The values are right, but too much was gathered.",
                f"{_RANKS * mine.nbytes} bytes",
                f"{gathered} bytes",
                cause,
                trial.rank,
            )
    return None


_GATHER = "dist.all_gather(list(padded.chunk(n)), mine)"
_RESIZE = "    whole.untyped_storage().resize_(whole.nbytes)  # memory again, with nothing useful in it\n"
_COPY = "whole.copy_(padded[: len(whole)])"

unshard = Exercise(
    id="05.unshard",
    title="Gather the whole",
    statement="Write unshard(mine, whole): give `whole` its memory back and fill it from the slices of all ranks.",
    stub=_UNSHARD_STUB,
    reference=_UNSHARD,
    hints=(
        "The ranks hold the rows in order, rank 0 the first ones. Which rows of the joined slices are padding?",
        (
            "Gather into a tensor of n * c rows: `dist.all_gather(pieces, mine)` fills a list of n tensors, and"
            " `list(padded.chunk(n))` is such a list, of views. Then copy its first `len(whole)` rows into `whole`, in"
            " place."
        ),
        (
            "`padded = mine.new_empty(n * len(mine), *mine.shape[1:])`, `dist.all_gather(list(padded.chunk(n)), mine)`,"
            " and at the end `whole.copy_(padded[: len(whole)])`."
        ),
    ),
    cases=_unshard_cases,
    explain=_explain_unshard,
    rules=_unshard_rules,
    hung="some rank does not take part: every rank calls all_gather, also one whose slice is all padding",
    world_size=_RANKS,
    time_limit=30.0,
    driver=(DRIVERS, "drive_unshard"),
    wrong=(
        Wrong(
            "another name",
            edited(_UNSHARD, (_RESIZE, ""), (_COPY, "whole = padded[: len(whole)].clone()\n    return whole")),
            "gives the name to another",
        ),
        Wrong(
            "another name, after the resize",
            edited(
                _UNSHARD,
                (
                    "padded = mine.new_empty(n * len(mine), *mine.shape[1:])",
                    "pieces = [mine.clone() for _ in range(n)]",
                ),
                ("list(padded.chunk(n))", "pieces"),
                (_COPY, "whole = torch.cat(pieces)[: len(whole)]"),
            ),
            "gives the name to another",
        ),
        Wrong(
            "copied before the resize", edited(_UNSHARD, (_COPY, "pass")), "nothing was copied into it after the resize"
        ),
        Wrong(
            "new storage",
            edited(_UNSHARD, (_RESIZE, ""), (_COPY, "whole.data = padded[: len(whole)].clone()")),
            "the old, empty storage",
        ),
        Wrong(
            "no gather",
            edited(_UNSHARD, (f"    {_GATHER}\n", "    padded.zero_()\n    padded[: len(mine)] = mine\n")),
            "missing or misplaced",
        ),
        Wrong(
            "backwards",
            edited(_UNSHARD, ("list(padded.chunk(n))", "list(padded.chunk(n))[::-1]")),
            "rank order, 0 first",
        ),
        Wrong("last rows", edited(_UNSHARD, ("padded[: len(whole)]", "padded[len(padded) - len(whole) :]")), "0 first"),
        Wrong(
            "half a copy",
            edited(_UNSHARD, (_COPY, "whole.zero_()\n    whole[: len(mine)] = padded[: len(mine)]")),
            "missing or misplaced",
        ),
        Wrong("nothing copied", edited(_UNSHARD, (_COPY, "whole.zero_()")), "nothing was copied into it"),
        Wrong(
            "a sum",
            edited(
                _UNSHARD,
                (
                    _GATHER,
                    "padded.zero_()\n    padded.chunk(n)[dist.get_rank()].copy_(mine)\n    dist.all_reduce(padded)",
                ),
            ),
            "not needed to collect rows",
        ),
        Wrong(
            "gathered on rank 0",
            edited(
                _UNSHARD, (_GATHER, "dist.gather(mine, list(padded.chunk(n)) if dist.get_rank() == 0 else None, dst=0)")
            ),
            "on one rank only",
        ),
        Wrong("twice", edited(_UNSHARD, (_GATHER, f"{_GATHER}\n    {_GATHER}")), "more than once"),
        Wrong(
            "shorter than padded",
            edited(_UNSHARD, (_COPY, "whole.copy_(padded)")),
            "padding that was not left out",
            ends="raises",
        ),
    ),
)

# --- memory given back

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
    if left < case.arguments[0][0].nbytes:
        return None, f"{left} bytes of the storage are still there: resize it to 0"
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
        Wrong("not to nothing", edited(_RESHARD, (_LINE, "whole.untyped_storage().resize_(1)")), "resize it to 0"),
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


def _guarded_cases() -> list[Case]:
    whole = torch.arange(6.0).reshape(3, 2)
    return [
        Case("gathered", ((whole.clone(), _NAME, False),) * 2, (passes(whole, itself=True),) * 2),
        Case("all zeros, but gathered", ((torch.zeros(3), _NAME, False),) * 2, (passes(torch.zeros(3), True),) * 2),
        Case("resharded", ((whole.clone(), _NAME, True),) * 2, (raises(RUNTIME_ERROR, True, True),) * 2),
    ]


def _explain_guarded(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    dropped, end = case.arguments[0][2], trial.returned[END]
    if dropped and end == PASSES:
        return None, (
            "a tensor without memory passed the guard: its shape is unchanged, so numel, shape and nbytes say nothing;"
            " ask its storage"
        )
    if end != PASSES and not dropped:
        return None, (
            "the guard raised although the memory is there: what counts are the bytes of the storage, not what is in"
            " them"
        )
    if dropped and end != RUNTIME_ERROR:
        return None, f"it {end}; the statement asks for a RuntimeError"
    if dropped:
        return None, "the message must say what to do: it holds `name`, and the word unshard"
    return None, "where the memory is there, return `whole` itself: nothing is printed, copied or changed"


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
        Wrong("a copy", edited(_GUARDED, ("return whole", "return whole.clone()")), "return `whole` itself"),
    ),
)

ITEMS = (shard, unshard, reshard, guarded, *REDUCE_ITEMS)
