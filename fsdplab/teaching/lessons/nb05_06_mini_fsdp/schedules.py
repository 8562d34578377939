"""The schedule puzzle of lesson 06: the order of gathers, drops and reductions in a step, played by arithmetic.

A schedule is a list of (action, block). A rank goes through it in order. It computes by itself (forward 2 ms, backward
4 ms a block) and leaves messages to the link, which sends one at a time in the order of the list (a gather or a
reduction takes 2 ms) while the rank goes on. A block that computes waits for its own gather. In memory, a gathered
block counts from the start of its message until it is dropped, a whole gradient from the start of its backward until it
is reduced, each as one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

FORWARD, BACKWARD, MESSAGE = 2, 4, 2  # ms a block
ACTIONS = ("gather", "forward", "drop", "backward", "reduce")
MEMORY_TARGET = 3  # blocks
NOTHING = "nothing: every entry can run"


class ScheduleError(ValueError):
    """A schedule that no engine could run; the text says where and why."""


@dataclass(frozen=True)
class Span:
    """Something that lasts from `start` to `end` (ms): an action in the lane "rank" or "link", a thing in memory."""

    what: str
    block: int
    start: int
    end: int


@dataclass(frozen=True)
class Played:
    """A schedule after it was played: when each action ran, and when each block and gradient was in memory."""

    blocks: int
    actions: tuple[Span, ...]
    memory: tuple[Span, ...]

    @property
    def milliseconds(self) -> int:
        """The end of the last action."""
        return max(span.end for span in self.actions)

    @property
    def peak(self) -> int:
        """The most blocks and gradients that were in memory at once."""
        return max(self.held(span.start) for span in self.memory)

    def held(self, time: int) -> int:
        """Blocks and gradients in memory from this time on."""
        return sum(span.start <= time < span.end for span in self.memory)


def shortest(blocks: int) -> int:
    """ms that no schedule can beat: the first gather, all computation, the last reduction. `shortest(4) == 28`."""
    return MESSAGE + blocks * (FORWARD + BACKWARD) + MESSAGE


def play(steps: Any, blocks: int) -> Played:
    """Play one step of `blocks` blocks; ScheduleError where it cannot be run or leaves something undone."""
    player = _Player(blocks)
    for number, (action, block) in enumerate(_read(steps, blocks)):
        player.at = f"entry {number}, {action} {block}"
        getattr(player, f"_{action}")(block)
    return player.finish()


def _read(steps: Any, blocks: int) -> list[tuple[str, int]]:
    """The entries, as (action, block) pairs of known actions and existing blocks."""
    if steps is None:
        raise ScheduleError("expected a list of (action, block), got nothing: end the function with `return steps`")
    if not isinstance(steps, (list, tuple)):
        raise ScheduleError(f"expected a list of (action, block), got {type(steps).__name__}")
    for number, entry in enumerate(steps):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise ScheduleError(f'entry {number} is {entry!r}; expected a pair such as ("gather", 0)')
        if entry[0] not in ACTIONS:
            raise ScheduleError(f"entry {number} is {entry!r}; the actions are {', '.join(ACTIONS)}")
        if isinstance(entry[1], bool) or not isinstance(entry[1], int) or not 0 <= entry[1] < blocks:
            raise ScheduleError(f"entry {number} is {entry!r}; there are blocks 0 to {blocks - 1}")
    return [(entry[0], entry[1]) for entry in steps]


@dataclass
class _Player:
    """The rank's clock, the link's clock, and what is in memory."""

    blocks: int
    now: int = 0
    link: int = 0
    at: str = ""
    actions: list[Span] = field(default_factory=list)
    memory: list[Span] = field(default_factory=list)
    gathers: dict[int, Span] = field(default_factory=dict)  # of what is gathered now
    gradients: dict[int, int] = field(default_factory=dict)  # block -> start of its whole gradient
    computed: list[tuple[str, int]] = field(default_factory=list)
    reduced: set[int] = field(default_factory=set)

    def _refuse(self, why: str) -> None:
        raise ScheduleError(f"{self.at}: {why}")

    def _message(self, what: str, block: int) -> Span:
        start = max(self.now, self.link)
        self.link = start + MESSAGE
        self.actions.append(Span(what, block, start, self.link))
        return self.actions[-1]

    def _gather(self, block: int) -> None:
        if block in self.gathers:
            self._refuse("it is gathered already")
        self.gathers[block] = self._message("gather", block)

    def _drop(self, block: int) -> None:
        if block not in self.gathers:
            self._refuse("it is not gathered")
        gather = self.gathers.pop(block)
        if self.now < gather.end:
            self._refuse("its gather is still under way; nothing has used it")
        self.memory.append(Span("gathered", block, gather.start, self.now))

    def _compute(self, what: str, block: int, lasts: int) -> int:
        if block not in self.gathers:
            self._refuse("its parameters are not gathered")
        order = [("forward", each) for each in range(self.blocks)]
        order += [("backward", each) for each in reversed(range(self.blocks))]
        expected = order[len(self.computed)] if len(self.computed) < len(order) else ("the end of the step", "")
        if (what, block) != expected:
            self._refuse(f"now comes {expected[0]} {expected[1]}: forward runs from block 0 up, backward down again")
        start = max(self.now, self.gathers[block].end)
        self.now = start + lasts
        self.computed.append((what, block))
        self.actions.append(Span(what, block, start, self.now))
        return start

    def _forward(self, block: int) -> None:
        self._compute("forward", block, FORWARD)

    def _backward(self, block: int) -> None:
        self.gradients[block] = self._compute("backward", block, BACKWARD)

    def _reduce(self, block: int) -> None:
        if block not in self.gradients:
            self._refuse("it has no gradient to reduce: its backward comes first, and one reduction is enough")
        done = self._message("reduce", block)
        self.memory.append(Span("gradient", block, self.gradients.pop(block), done.end))
        self.reduced.add(block)

    def finish(self) -> Played:
        """The played step, if nothing was left undone."""
        missing = [block for block in range(self.blocks) if block not in self.reduced]
        self.at = "at the end"
        if len(self.computed) < 2 * self.blocks:
            self._refuse(f"{2 * self.blocks - len(self.computed)} forwards and backwards are missing")
        if missing:
            self._refuse(f"the gradient of block {missing[0]} was never reduced, so its optimizer would do nothing")
        if self.gathers:
            self._refuse(f"block {min(self.gathers)} is still gathered: drop it, the optimizer works on slices")
        return Played(self.blocks, tuple(self.actions), tuple(self.memory))


def waits(played: Played) -> list[Span]:
    """When the rank neither computes nor has ended: `Span("waits for", block, start, end)` before each computation."""
    computing = [span for span in played.actions if span.what in ("forward", "backward")]
    ends: Iterable[int] = [0, *(span.end for span in computing)]
    found = [Span("waits for", span.block, end, span.start) for end, span in zip(ends, computing) if end < span.start]
    return found


def drive_schedule(schedule: Any, sizes: Sequence[int]) -> dict[str, Any]:
    """How a learner's schedule does for each number of blocks: what cannot run, and how far off the targets."""
    problem, late, large = NOTHING, {}, {}
    for blocks in sizes:
        try:
            played = play(schedule(blocks), blocks)
        except ScheduleError as error:
            problem = f"{blocks} blocks, {error}"
            break
        late[f"{blocks} blocks"] = max(0, played.milliseconds - shortest(blocks))
        large[f"{blocks} blocks"] = max(0, played.peak - MEMORY_TARGET)
    return {"what cannot run": problem, "blocks over the memory target": large, "ms over the time target": late}
