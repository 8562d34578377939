"""Which kernels of a GPU move bytes between ranks, told by their names.

NCCL and RCCL name the collective in the kernel or in its arguments. RCCL's generic kernel names nothing, so the host's
call around its launch tells (`collectives.py`). Libraries that move bytes with kernels of their own (expert dispatch,
one-shot all-reduces of inference engines, symmetric memory) are in a table of patterns, which a caller extends for
kernels that are in no table.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from fsdplab.profiling.traces.chrome import TraceError

KINDS = {  # in a name, letters only -> what the collective is; the order matters
    "reducescatter": "reduce_scatter", "allgather": "all_gather", "allreduce": "all_reduce", "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv", "send": "send_recv", "recv": "send_recv", "barrier": "barrier",
    "gather": "gather", "scatter": "scatter", "reduce": "reduce",
}  # fmt: skip
NAMED = "by name"  # of a pattern: the kernel's name says which collective it is
TABLE = (
    (r"nccl|rccl", NAMED),
    (r"deep_ep::|internode::|intranode::|internode_ll::", "all_to_all"),  # DeepEP: dispatch and combine of experts
    (r"cross_device_reduce", "all_reduce"),  # vLLM, SGLang
    (r"(one|two)_?shot_?all_?reduce|all_?reduce_?fusion|multimem_all_reduce|quick_?reduce|qr_all_reduce", "all_reduce"),
    (r"(multimem|symm_mem|two_shot|one_shot)\w*all_?gather", "all_gather"),
    (r"(multimem|symm_mem|two_shot|one_shot)\w*reduce_?scatter", "reduce_scatter"),
    (r"mscclpp?|nvshmem|rocshmem", NAMED),
)


def comm_pattern(text: str) -> tuple[re.Pattern[str], str]:
    """What is searched for in kernels' names, ignoring case, and the collective that it means, as an option gives them:
    `my_dispatch=all_to_all`, or `my_comm` where the kernels' names say the rest.

    Raises TraceError for what is no regular expression, or no collective.
    """
    expression, equals, kind = text.rpartition("=")
    if not equals:
        expression, kind = text, NAMED
    known = sorted(set(KINDS.values()))
    if kind != NAMED and kind not in known:
        raise TraceError(
            f"the pattern {text!r} names the collective {kind!r}; expected PATTERN or PATTERN=COLLECTIVE with one of"
            f" {', '.join(known)}."
        )
    try:
        compiled = re.compile(expression, re.IGNORECASE)
    except (re.error, RecursionError, OverflowError) as error:
        raise TraceError(
            f"the pattern {expression!r} is no regular expression ({error}); expected one that is found in the names of"
            " kernels, such as my_dispatch."
        ) from None
    if compiled.search(""):
        raise TraceError(f"the pattern {text!r} is found in every name; expected one that only communication has.")
    return compiled, kind


class CommKernels:
    """Says of a kernel's name which collective it is; each name is looked at once."""

    def __init__(self, more: Sequence[str] = ()) -> None:
        self._patterns = [*map(comm_pattern, more), *((re.compile(text, re.IGNORECASE), kind) for text, kind in TABLE)]
        self._known: dict[str, str | None] = {}

    def kind(self, name: str) -> str | None:
        """The collective, "" for communication that does not say which, None for computing."""
        if name not in self._known:
            kind = next((kind for expression, kind in self._patterns if expression.search(name)), None)
            self._known[name] = kind_of(name) if kind == NAMED else kind
        return self._known[name]


@lru_cache(maxsize=4096)
def kind_of(name: str) -> str:
    """The collective in a name such as `c10d::_allgather_base_` or `ncclDevKernel_AllGather_RING_LL`; else ""."""
    letters = "".join(each for each in name.split("::")[-1].lower() if each.isalpha())
    return next((kind for part, kind in KINDS.items() if part in letters), "")
