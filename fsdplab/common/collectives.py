"""The collectives: a row each, with all that traces, tables and figures say of them.

A new collective, or a library whose kernels carry one, is a row here: readers of traces look for its spellings and its
kernels, tables take its bandwidth factor, figures its lane and its colour. Standard library only, so that every part of
the package can read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

OTHER_LANE = "other_communication"  # the lane of a timeline that all collectives without a lane of their own share


@dataclass(frozen=True)
class CollectiveRow:
    """A kind of collective.

    `spellings`: how names spell it, letters only; a name may spell several kinds, and the first row of the table wins.
    `family`: kinds of one family may stand for each other (gloo carries a reduce_scatter by an all_reduce).
    `passes`: from bytes / time to the bandwidth of the busiest link, in parts of (n-1)/n, as nccl-tests counts it; None
    where every byte crosses the link once, whatever n is.
    `ends_together`: no rank ends before all have begun, so its ends are one instant on all ranks.
    `given_by`: what the tensor that a rank gives holds: the "whole" message, or one of n "shards" of it.
    `kernels`: names of kernels of libraries that carry it, as regular expressions that ignore case.
    """

    name: str
    spellings: tuple[str, ...]
    family: str = ""
    passes: int | None = None
    ends_together: bool = False
    given_by: str = "whole"
    own_lane: bool = False
    colour: str = ""
    kernels: tuple[str, ...] = ()

    @property
    def lane(self) -> str:
        """The lane of a timeline that shows it."""
        return self.name if self.own_lane else OTHER_LANE


_SYMMETRIC = r"(multimem|symm_mem|two_shot|one_shot)\w*"  # torch's symmetric memory
_ROWS = (
    CollectiveRow(
        "all_gather",
        ("allgather",),
        family="gather",
        passes=1,
        ends_together=True,
        given_by="shards",
        own_lane=True,
        colour="#6cc4f0",
        kernels=(_SYMMETRIC + r"all_?gather", r"userbuffers_\w*_ag(?![a-z])"),
    ),
    CollectiveRow(
        "reduce_scatter",
        ("reducescatter",),
        family="reduction",
        passes=1,
        ends_together=True,
        own_lane=True,
        colour="#b84a0a",
        kernels=(_SYMMETRIC + r"reduce_?scatter", r"userbuffers_\w*_rs(?![a-z])"),
    ),
    CollectiveRow(
        "all_reduce",
        ("allreduce",),
        family="reduction",
        passes=2,
        ends_together=True,
        own_lane=True,
        colour="#0aa06c",
        kernels=(
            r"cross_device_reduce",  # vLLM, SGLang
            r"(one|two)_?shot_?all_?reduce|all_?reduce_?fusion|multimem_all_reduce|quick_?reduce|qr_all_reduce",
            r"userbuffers_\w*_sum_inplace",  # Transformer Engine
        ),
    ),
    CollectiveRow(
        "all_to_all",
        ("alltoall",),
        family="reduction",
        passes=1,
        ends_together=True,
        kernels=(
            r"deep_ep::|internode::|intranode::|internode_ll::",  # DeepEP: dispatch and combine of experts
            r"\bmori::|\bEp(Dispatch|Combine)(Intra|Inter)Node",  # MoRI
            r"\bpplx|\ba2a_(dispatch|combine)",  # pplx-kernels
            r"all_?to_?all_?v?dev",  # torch's symmetric memory
        ),
    ),
    CollectiveRow("broadcast", ("broadcast",)),
    CollectiveRow("send_recv", ("sendrecv", "send", "recv"), kernels=(r"userbuffers_(push|pull)(send|recv)",)),
    CollectiveRow(
        "barrier", ("barrier",), ends_together=True, kernels=(r"symm_mem\w*barrier|\b(put|wait)_signal_kernel",)
    ),
    CollectiveRow("gather", ("gather",), passes=1, given_by="shards"),
    CollectiveRow("scatter", ("scatter",), passes=1),
    CollectiveRow("reduce", ("reduce",)),
    CollectiveRow("peer_copy", ()),  # a copy engine carries bytes to another device
)
COLLECTIVE_ROWS = {row.name: row for row in _ROWS}
PAIRED, PEER_COPY = "send_recv", "peer_copy"
LANES_OF_COLLECTIVES = (*(row.name for row in _ROWS if row.own_lane), OTHER_LANE)
_UNKNOWN = CollectiveRow("", ())


def collective_row(kind: str) -> CollectiveRow:
    """Return the row of a kind; for a kind that no row names one without any property."""
    return COLLECTIVE_ROWS.get(kind, _UNKNOWN)


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """Find the collective that a name spells, of an operator, a kernel or a call's arguments; "" where it spells none.

    >>> kind_of("c10d::_allgather_base_"), kind_of("aten::mm")
    ('all_gather', '')
    """
    last_word = name.split("::")[-1].lower()
    letters = "".join(letter for letter in last_word if letter.isalpha())
    for row in _ROWS:
        if any(spelling in letters for spelling in row.spellings):
            return row.name
    return ""


def bus_factor(kind: str, ranks: int) -> float:
    """Return the factor from bytes/t to the bandwidth of the busiest link: `bus_factor("all_gather", 4)` is 0.75,
    all_reduce 1.5 (busbw in nccl-tests' doc/PERFORMANCE.md).
    """
    passes = collective_row(kind).passes
    if passes is None:
        return 1.0
    return passes * (ranks - 1) / ranks
