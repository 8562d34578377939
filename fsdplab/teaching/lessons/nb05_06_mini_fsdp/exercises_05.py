"""Notebook 05: one layer, sharded by hand. Here `shard` and `unshard`; nb05_memory and nb05_reduce hold the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from fsdplab.teaching.core.exercise import Case, Exercise, Trial, Wrong, edited
from fsdplab.teaching.core.findings import Difference, Finding

from .exercises_05_reduce import REDUCE_ITEMS
from .memory_05 import MEMORY_ITEMS

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
    return Case(name, ((whole,),) * _RANKS, expected)


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
    if torch.equal(mine[len(mine) - len(rows) :], rows) and len(rows) < len(mine):
        return (
            None,
            "the padding stands before the rows; it belongs after them, so that the slices joined end in padding",
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
    time_limit=30.0,
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
        Wrong("always the first rows", edited(_SHARD, (_ROWS, "rows = whole[:c]")), "every rank keeps the first rows"),
        Wrong("dealt out", edited(_SHARD, (_ROWS, "rows = whole[rank::n]")), "like cards"),
        Wrong("the whole", edited(_SHARD, (_BODY, "    return whole.clone()\n")), "longer than c"),
        Wrong("flattened", edited(_SHARD, ("return mine", "return mine.flatten()[:c]")), "only dimension 0"),
        Wrong("default dtype", edited(_SHARD, ("whole.new_zeros(c,", "torch.zeros(c,")), "default dtype"),
        Wrong("returns nothing", edited(_SHARD, ("    return mine\n", "")), "return the slice"),
        Wrong(
            "chunk and index",
            edited(_SHARD, (_BODY, "    return torch.chunk(whole, n)[rank].clone()\n")),
            "read the last line",
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
    if torch.equal(whole, torch.zeros_like(whole)) or not whole.any():
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


def _unshard_rules(case: Case, trials: Sequence[Trial]) -> Finding | None:
    """Right values, with no more bytes than one all-gather moves."""
    for trial in trials:
        mine = case.arguments[trial.rank][0]
        moved = [call for call in trial.calls if call.kind not in ("barrier", "recv")]
        wasteful = next((call.kind for call in moved if call.kind in ("all_reduce", "reduce", "reduce_scatter")), None)
        if wasteful:
            cause = "sums are not needed to collect rows, and an all_reduce moves twice the bytes: use all_gather"
            return Finding(
                "The values are right, but rows were added up instead of gathered.",
                "one all_gather",
                wasteful,
                cause,
                trial.rank,
            )
        gathered = sum(call.nbytes for call in moved if call.kind == "all_gather")
        if gathered > _RANKS * mine.nbytes:
            cause = "it was gathered more than once, or more than the slices: one all_gather brings everything"
            return Finding(
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
            "new storage",
            edited(_UNSHARD, (_RESIZE, ""), (_COPY, "whole.data = padded[: len(whole)].clone()")),
            "the old, empty storage",
        ),
        Wrong(
            "no gather",
            edited(_UNSHARD, (f"    {_GATHER}\n", "    padded[: len(mine)] = mine\n")),
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
        Wrong("twice", edited(_UNSHARD, (_GATHER, f"{_GATHER}\n    {_GATHER}")), "more than once"),
        Wrong(
            "shorter than padded", edited(_UNSHARD, (_COPY, "whole.copy_(padded)")), "read the last line", ends="raises"
        ),
    ),
)

ITEMS = (shard, unshard, *MEMORY_ITEMS, *REDUCE_ITEMS)
