"""A step's order on the steady clock of notebook 20: what a rank issued, waited for and computed, replayed with fixed
durations, so that the same program has the same exposed time on every machine.

`Order` writes down the order while a learner's engine runs: every collective when it is issued and when it is waited
for, and every unit's forward and backward. `replayed` gives each its time: computing takes what a unit takes, messages
go over one link, one after the other, and the rank stops where it waits for one that has not arrived.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

FORWARD_MS, BACKWARD_MS = 4.0, 8.0  # of a block; the root's embedding and head take half of it
MESSAGE_MS = 3.0  # of a block's all-gather or reduce-scatter
_CALLS = {  # methods of a process group, of this torch and of others
    "all_gather": (
        "all_gather_single",
        "_allgather_base",
        "allgather",
        "allgather_into_tensor_coalesced",
        "allgather_coalesced",
    ),
    "reduce_scatter": (
        "reduce_scatter_single",
        "_reduce_scatter_base",
        "reduce_scatter",
        "reduce_scatter_tensor_coalesced",
    ),
    "all_reduce": ("allreduce", "allreduce_coalesced"),
}


@dataclass(frozen=True)
class Moment:
    """One thing that a rank did.

    `what` is "issue", "wait", "forward" or "backward"; `name` is the collective's kind or the unit's name; of a
    collective also its number, and how large it is, in blocks.
    """

    what: str
    name: str
    number: int = -1
    blocks: float = 0.0


class Order(TorchDispatchMode):
    """`with Order(net.block_bytes) as order: ...`, then `order.moments`; of computing the net tells by
    `net.told_to(order.computed)`.
    """

    def __init__(self, block_bytes: int) -> None:
        super().__init__()
        self._block_bytes = block_bytes
        self.moments: list[Moment] = []
        self._until_end = ExitStack()
        self._functional: dict[int, tuple[str, int]] = {}
        self._issued = 0

    def __enter__(self) -> Order:
        for kind, names in _CALLS.items():
            for name in names:
                # names differ between versions of torch
                call = getattr(dist.ProcessGroup, name, None)
                if call is not None:
                    noted = mock.patch.object(dist.ProcessGroup, name, self._noted(call, kind))
                    self._until_end.enter_context(noted)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._until_end.close()

    def computed(self, phase: str, unit: str, module: nn.Module) -> None:
        """Note that a unit begins to compute."""
        self.moments.append(Moment(phase, unit))

    def count(self, kind: str) -> int:
        """Return how often a collective was called: `order.count("all_gather")`."""
        return sum(moment.what == "issue" and moment.name == kind for moment in self.moments)

    def unwaited(self) -> list[str]:
        """Return the kinds of the messages that nobody waited for, one each."""
        waited = {moment.number for moment in self.moments if moment.what == "wait"}
        return [moment.name for moment in self.moments if moment.what == "issue" and moment.number not in waited]

    def _noted(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        """Return a method of a process group, with its calls and waits noted."""

        @functools.wraps(call)
        def issued(group: dist.ProcessGroup, *arguments: Any, **named: Any) -> Any:
            number = self._issue(kind, arguments[:2])
            # the learner gets a Work that notes when it is waited for
            return Waited(call(group, *arguments, **named), lambda: self._wait(kind, number))

        return issued

    def _issue(self, kind: str, tensors: Any) -> int:
        """Note a message, and return its number; it is as large as the largest of its tensors."""
        number = self._issued
        self._issued += 1
        nbytes = max(map(_bytes_of, tensors))
        self.moments.append(Moment("issue", kind, number, nbytes / self._block_bytes))
        return number

    def _wait(self, kind: str, number: int) -> None:
        """Note that a message was waited for."""
        self.moments.append(Moment("wait", kind, number))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Note functional collectives, DTensor's too, which do not pass a ProcessGroup's methods."""
        if func.namespace != "_c10d_functional":
            return func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        if name == "wait_tensor":
            # a tensor that waits by itself holds the plain one as `elem`
            tensor = getattr(args[0], "elem", args[0])
            message = self._functional.pop(tensor.data_ptr(), None)
            if message is not None:
                self._wait(*message)
        made = func(*args, **(kwargs or {}))
        for kind in _CALLS:
            if name.startswith(kind):
                # a functional collective gives no Work: the wait is known by the address of its result
                self._functional[made.data_ptr()] = kind, self._issue(kind, (args[0], made))
        return made


class Waited:
    """A Work that tells when it is first waited for; all else is the Work's own."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self._work, self._on_wait = work, on_wait

    def wait(self, *arguments: Any) -> Any:
        """Wait as the Work itself does, and note it."""
        self._tell()
        return self._work.wait(*arguments)

    def get_future(self) -> Any:
        """Return the Work's own future, and note a wait: whoever asks for it waits."""
        self._tell()
        return self._work.get_future()

    def _tell(self) -> None:
        """Call the function once, at the first wait."""
        on_wait, self._on_wait = self._on_wait, lambda: None
        on_wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _bytes_of(given: Any) -> int:
    """Return the bytes of a tensor, or of all tensors in nested lists; 0 for anything else."""
    if isinstance(given, torch.Tensor):
        return given.numel() * given.element_size()
    if isinstance(given, (list, tuple)):
        return sum(map(_bytes_of, given))
    return 0


@dataclass(frozen=True)
class Bar:
    """A piece of the replayed step, in ms: `lane` is "compute", "link" or "exposed"."""

    lane: str
    name: str
    start: float
    end: float


def replayed(moments: Sequence[Moment]) -> list[Bar]:
    """Return the step on the steady clock; a block's message takes MESSAGE_MS, and others by their size."""
    now = 0.0  # of the rank
    free = 0.0  # when the link is
    arrives: dict[int, float] = {}
    bars, phase = [], "forward"
    for moment in moments:
        if moment.what == "issue":
            # the link carries one message at a time
            start = max(now, free)
            free = start + MESSAGE_MS * moment.blocks
            arrives[moment.number] = free
            bars.append(Bar("link", moment.name, start, free))
        elif moment.what == "wait":
            # a wait for what has arrived already takes no time
            until = arrives.get(moment.number, 0.0)
            if until > now:
                bars.append(Bar("exposed", f"{moment.name} in {phase}", now, until))
                now = until
        else:
            phase = moment.what
            takes = FORWARD_MS if phase == "forward" else BACKWARD_MS
            if moment.name == "root":
                takes /= 2
            bars.append(Bar("compute", f"{phase} {moment.name}", now, now + takes))
            now += takes
    return bars


def waited_for_at_once(moments: Sequence[Moment]) -> list[Moment]:
    """Return the same step with every message waited for as soon as it is issued, and none begun ahead."""
    at_once: list[Moment] = []
    ahead: dict[int, Moment] = {}  # all-gathers that are issued, and not needed yet
    for moment in moments:
        if moment.what == "issue" and moment.name == "all_gather":
            ahead[moment.number] = moment
        elif moment.what == "issue":
            at_once += [moment, Moment("wait", moment.name, moment.number)]
        # the all-gather moves behind all that ran ahead of its wait
        elif moment.what == "wait" and moment.number in ahead:
            at_once += [ahead.pop(moment.number), moment]
        elif moment.what != "wait":
            at_once.append(moment)
    return at_once


def exposed_ms(bars: Sequence[Bar], phase: str = "") -> float:
    """Return what the rank waited for messages, in one phase or in both, in ms."""
    waits = [bar for bar in bars if bar.lane == "exposed" and bar.name.endswith(phase)]
    return sum(bar.end - bar.start for bar in waits)
