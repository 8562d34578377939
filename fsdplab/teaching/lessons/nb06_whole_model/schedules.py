"""The schedule puzzle of lesson 06: the order of unshards, reshards and reductions in a step, played by arithmetic.

A schedule is a list of (action, block). A rank goes through it in order. It computes by itself (forward 2 ms, backward
4 ms a block) and leaves messages to the link, which sends one at a time in the order of the list (an unshard or a
reduction takes 2 ms) while the rank goes on. A block that computes waits for its own unshard. In memory, an unsharded
block counts from the start of its message until it is resharded, an unsharded gradient from the start of its backward
until it is reduced, each as one block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fsdplab.figures.bars import CLOCK, lane
from fsdplab.figures.bars import Span as Drawn
from fsdplab.figures.plotly_go import go
from fsdplab.figures.style import ALARM, CATEGORY_COLOURS, LANE_COLOURS, titled

FORWARD, BACKWARD, MESSAGE = 2, 4, 2  # ms a block
ACTIONS = ("unshard", "forward", "reshard", "backward", "reduce")
MEMORY_TARGET = 3  # blocks


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
        """Return the end of the last action."""
        return max(span.end for span in self.actions)

    @property
    def peak(self) -> int:
        """Return the most blocks and gradients that were in memory at once."""
        return len(self.held_at_peak)

    @property
    def held_at_peak(self) -> list[Span]:
        """Return the blocks and gradients in memory when they are most, for the first time."""
        most: list[Span] = []
        # memory only grows where a span begins, so the peak is at one of the starts
        for time in sorted({span.start for span in self.memory}):
            held = [span for span in self.memory if span.start <= time < span.end]
            if len(held) > len(most):
                most = held
        return most


def shortest(blocks: int) -> int:
    """Return the ms that no schedule can beat: the first unshard, all computation, the last reduction.

    `shortest(4) == 28`.
    """
    return MESSAGE + blocks * (FORWARD + BACKWARD) + MESSAGE


def play(steps: Any, blocks: int) -> Played:
    """Play one step of `blocks` blocks; ScheduleError where it cannot be run or leaves something undone."""
    player = _Player(blocks)
    for number, (action, block) in enumerate(_read(steps, blocks)):
        # what an error names
        player.at = f"entry {number}, {action} {block}"
        getattr(player, f"_{action}")(block)
    return player.finish()


def _read(steps: Any, blocks: int) -> list[tuple[str, int]]:
    """Return the entries, as (action, block) pairs of known actions and existing blocks."""
    if steps is None:
        raise ScheduleError("expected a list of (action, block), got nothing: end the function with `return steps`")
    if not isinstance(steps, (list, tuple)):
        raise ScheduleError(f"expected a list of (action, block), got {type(steps).__name__}")
    pairs = []
    for number, entry in enumerate(steps):
        if not isinstance(entry, (list, tuple)) or len(entry) != 2:
            raise ScheduleError(f'entry {number} is {entry!r}; expected a pair such as ("unshard", 0)')
        action, block = entry
        if action not in ACTIONS:
            raise ScheduleError(f"entry {number} is {entry!r}; the actions are {', '.join(ACTIONS)}")
        is_number = isinstance(block, int) and not isinstance(block, bool)
        if not is_number or not 0 <= block < blocks:
            raise ScheduleError(f"entry {number} is {entry!r}; there are blocks 0 to {blocks - 1}")
        pairs.append((action, block))
    return pairs


@dataclass
class _Player:
    """The rank's clock, the link's clock, and what is in memory."""

    blocks: int
    now: int = 0
    link: int = 0
    at: str = ""
    actions: list[Span] = field(default_factory=list)
    memory: list[Span] = field(default_factory=list)
    unshards: dict[int, Span] = field(default_factory=dict)  # of what is unsharded now
    gradients: dict[int, int] = field(default_factory=dict)  # block -> start of its unsharded gradient
    computed: list[tuple[str, int]] = field(default_factory=list)
    reduced: set[int] = field(default_factory=set)

    def _refuse(self, why: str) -> None:
        """Raise ScheduleError with the entry that cannot be run."""
        raise ScheduleError(f"{self.at}: {why}")

    def _message(self, what: str, block: int) -> Span:
        """Send a message as soon as the link is free; the rank does not wait for it."""
        # two messages at 0 ms: one from 0 to 2, the other from 2 to 4
        start = max(self.now, self.link)
        self.link = start + MESSAGE
        message = Span(what, block, start, self.link)
        self.actions.append(message)
        return message

    def _unshard(self, block: int) -> None:
        """Begin a block's unshard; the rank does not wait for it."""
        if block in self.unshards:
            self._refuse("it is unsharded already")
        self.unshards[block] = self._message("unshard", block)

    def _reshard(self, block: int) -> None:
        """Free a block, whose unshard must have ended."""
        if block not in self.unshards:
            self._refuse("it is not unsharded")
        unshard = self.unshards.pop(block)
        if self.now < unshard.end:
            self._refuse("its unshard is still under way; nothing has used it")
        # counted from the start of the message, which is when its memory is allocated
        self.memory.append(Span("unsharded", block, unshard.start, self.now))

    def _compute(self, what: str, block: int, lasts: int) -> int:
        """Compute as soon as the block's unshard has ended; return when that is."""
        if block not in self.unshards:
            self._refuse("its parameters are not unsharded")
        next_what, next_block = self._next_computation()
        if (what, block) != (next_what, next_block):
            self._refuse(f"now comes {next_what} {next_block}: forward runs from block 0 up, backward down again")
        # waits where the unshard is not there yet: that time is exposed
        start = max(self.now, self.unshards[block].end)
        self.now = start + lasts
        self.computed.append((what, block))
        self.actions.append(Span(what, block, start, self.now))
        return start

    def _next_computation(self) -> tuple[str, int | str]:
        """Return what must be computed next: forwards from block 0 up, then backwards down again."""
        number = len(self.computed)
        if number < self.blocks:
            return "forward", number
        if number < 2 * self.blocks:
            # of 4 blocks the fifth computation (number 4) is backward 3
            return "backward", 2 * self.blocks - 1 - number
        return "the end of the step", ""

    def _forward(self, block: int) -> None:
        self._compute("forward", block, FORWARD)

    def _backward(self, block: int) -> None:
        # an unsharded gradient begins with its backward
        self.gradients[block] = self._compute("backward", block, BACKWARD)

    def _reduce(self, block: int) -> None:
        """Begin a gradient's reduction; the gradient is in memory until it ends."""
        if block not in self.gradients:
            self._refuse("it has no gradient to reduce: its backward comes first, and one reduction is enough")
        done = self._message("reduce", block)
        self.memory.append(Span("gradient", block, self.gradients.pop(block), done.end))
        self.reduced.add(block)

    def finish(self) -> Played:
        """Return the played step; ScheduleError where something was left undone."""
        missing = [block for block in range(self.blocks) if block not in self.reduced]
        self.at = "at the end"
        if len(self.computed) < 2 * self.blocks:
            self._refuse(f"{2 * self.blocks - len(self.computed)} forwards and backwards are missing")
        if missing:
            self._refuse(f"the gradient of block {missing[0]} was never reduced, so its optimizer would do nothing")
        if self.unshards:
            self._refuse(f"block {min(self.unshards)} is still unsharded: reshard it, the optimizer works on shards")
        return Played(self.blocks, tuple(self.actions), tuple(self.memory))


def waits(played: Played) -> list[Span]:
    """Return when the rank waits before a computation: `Span("waits for", block, start, end)`."""
    spans = []
    free = 0  # the end of the computation before
    for span in played.actions:
        if span.what not in ("forward", "backward"):
            continue
        if free < span.start:
            spans.append(Span("waits for", span.block, free, span.start))
        free = span.end
    return spans


# ---- as a figure: what the rank and the link do, and what is in memory meanwhile

_LOOKS = {  # what -> its colour, its name in the legend
    "forward": (LANE_COLOURS["compute in forward"], "forward"),
    "backward": (LANE_COLOURS["compute in backward"], "backward"),
    "unshard": (LANE_COLOURS["all_gather"], "unshard"),
    "reduce": (LANE_COLOURS["reduce_scatter"], "reduce"),
    "waits for": (ALARM, "waits"),
    "unsharded": (CATEGORY_COLOURS["unsharded_parameters"], "unsharded block in memory"),
    "gradient": (CATEGORY_COLOURS["unsharded_gradients"], "unsharded gradient in memory"),
}


def schedule_figure(steps: Any, blocks: int = 4) -> go.Figure:
    """Draw what a schedule does: `schedule_figure(schedule(4))`. One that cannot run gives a figure that says why."""
    try:
        played = play(steps, blocks)
    except ScheduleError as error:
        empty = go.Figure().update_xaxes(visible=False).update_yaxes(visible=False)
        return titled(empty, "This schedule cannot run", str(error), f"No schedule to draw: {error}.", height=20)

    names = ["rank", "link"]  # from the top
    for block in range(blocks):
        names += [f"block {block}", f"gradient {block}"]
    rows = {name: float(len(names) - 1 - index) for index, name in enumerate(names)}
    waited = waits(played)
    by_what: dict[str, list[Span]] = {what: [] for what in _LOOKS}  # in the order of the legend
    for span in [*played.actions, *waited, *played.memory]:
        by_what[span.what].append(span)
    figure = go.Figure()
    for what, spans in by_what.items():
        if spans:
            figure.add_trace(_bars(what, spans, rows))
    # the axis reaches at least to the target
    longest = max(played.milliseconds, shortest(blocks))
    figure.update_xaxes(title="ms, by the puzzle's clock", range=[0, 1.02 * longest])
    figure.update_yaxes(range=[-0.5, len(rows) - 0.5], tickvals=list(rows.values()), ticktext=list(rows), **CLOCK)
    figure.update_layout(barmode="overlay")

    time = f"{played.milliseconds} ms (target {shortest(blocks)})"
    title = f"{time}, {played.peak} blocks in memory at most (target {MEMORY_TARGET})"
    lost = sum(span.end - span.start for span in waited)
    where = f"Computed from the schedule; the rank waits {lost} ms for unshards"
    actions = []
    for span in sorted(played.actions, key=lambda span: span.start):
        actions.append(f"{span.what} {span.block} from {span.start} to {span.end}")
    alt = f"Bars of a rank and its link over time, in ms: {', '.join(actions)}. {title}."
    return titled(figure, title, where, alt, height=140 + 34 * len(rows))


def _bars(what: str, spans: Sequence[Span], rows: dict[str, float]) -> go.Bar:
    """Return all spans of one kind; those of the rank and the link have their block's number."""
    colour, name = _LOOKS[what]
    # messages on the link's row, memory on the block's own, all else on the rank's
    row_of = {"unsharded": "block {}", "gradient": "gradient {}", "unshard": "link", "reduce": "link"}
    row = row_of.get(what, "rank")
    drawn = []
    for span in spans:
        label = str(span.block) if name == what else ""
        hover = f"{name}, block {span.block}: {span.start} to {span.end} ms"
        drawn.append(Drawn(rows[row.format(span.block)], span.start, span.end - span.start, label, hover))
    return lane(name, colour, drawn, 0.8)
