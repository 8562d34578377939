"""Kernels that move bytes between ranks, told by their names.

NCCL and RCCL name the collective in the kernel or in its arguments. RCCL's generic kernel names nothing, and NCCL's
`SendRecv` carries other collectives too, so the host's call around the launch counts more (`device_collectives`).
Libraries that move bytes with kernels of their own (expert dispatch, one-shot all-reduces of inference engines,
symmetric memory) are in the rows of `common.collectives`; a caller adds others. A kernel in no row whose name spells a
collective communicates too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fsdplab.common.collectives import COLLECTIVE_ROWS, kind_of
from fsdplab.profiling.traces.chrome import TraceError

NAMED = "by name"  # of a pattern: the kernel's name says which collective it is
_LIBRARIES = r"nccl|rccl|mscclpp?|nvshmem|rocshmem|oneccl|\bccl::|\bhccl"  # their kernels say which
# no compiler calls a kernel that computes so, but for Inductor: it names the operators that it fused
_SPELLED = r"^(?!triton_\w*fused)[^(<]*(all_?reduce|all_?gather|reduce_?scatter|all_?to_?all)(?!\w*copy_(in|out))"
_ANONYMOUS = "(anonymous namespace)::"
TABLE = (
    *((pattern, row.name) for row in COLLECTIVE_ROWS.values() for pattern in row.kernels),
    (_LIBRARIES, NAMED),
    (_SPELLED, NAMED),
)


def comm_pattern(text: str) -> tuple[re.Pattern[str], str]:
    """What is searched for in kernels' names, ignoring case, and the collective that it means, as an option gives them:
    `my_dispatch=all_to_all`, or `my_comm` where the kernels' names say the rest.

    Raises TraceError for what is no regular expression, or no collective.
    """
    # at the last `=`, since an expression may hold one, such as (?=...)
    expression, equals, kind = text.rpartition("=")
    # what follows is then no name, as in `my_dispatch(?=_v2)`
    if not equals or not kind.isidentifier():
        expression, kind = text, NAMED
    known = sorted(COLLECTIVE_ROWS)
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
            # its parenthesis would end the kernel's own name
            plain = name.replace(_ANONYMOUS, "")
            kind = next((kind for expression, kind in self._patterns if expression.search(plain)), None)
            self._known[name] = _spelled(plain) if kind == NAMED else kind
        return self._known[name]


def _spelled(kernel: str) -> str:
    """The collective that a kernel's own name spells, or else its template arguments."""
    own_name = re.split(r"[(<]", kernel, maxsplit=1)[0]
    return kind_of(own_name) or kind_of(kernel)
