"""The messages between the lab and its page, `instrument.js`, which reads and writes these names.

A message is a dictionary at run time and is sent as JSON. Sizes are bytes; times are seconds, in a timeline ms. The
page sends `Asked`. It gets `Offers` once; then, for each `Asked`, an `Answer`, the marks and `More`; and `Progress`
whenever a run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

# what the page says where the kernel does not answer at once
WAITING = "waiting for the kernel: it is running a cell, and does this when the cell has ended"


class Asked(TypedDict, total=False):
    """What the page asks for, and what an answer was given to."""

    n: int  # counts the questions of the page
    choices: dict[str, Any]  # the fields of `Choices`
    a: str
    b: str
    pin: bool
    guess: dict[str, Any]  # the fields of `Guess`
    more: bool


# ---- what can be chosen, which is sent once


class PresetOffer(TypedDict):
    """A machine: what its sliders and menus offer, and the choices that it begins with."""

    link_words: str
    links: tuple[float, float]
    tokens: tuple[int, int]
    sequences: tuple[int, int]
    ranks: tuple[int, ...]
    choices: dict[str, Any]
    models: tuple[str, ...]
    measured: bool  # its ranks can run here


class Offers(TypedDict):
    """All that the page knows before the first answer: the values of the controls, and the colours."""

    presets: dict[str, PresetOffer]
    values: dict[str, Sequence[Any]]  # control -> what can be chosen
    wind_tunnel: str
    waiting: str
    measures: bool  # whether there are ranks for runs, where the page is
    fixed: list[str]  # settings of all runs, which no control changes
    own_batches: list[str]  # models whose batches no slider sets
    categories: dict[str, str]  # of memory -> colour
    step: list[tuple[str, str]]  # part of a step's bar, colour
    kinds: list[tuple[str, str]]  # block of the timeline, colour: its legend
    lanes: dict[str, str]  # phase or kind of a block -> colour


# ---- the answer


class Band(TypedDict):
    """How far known runs were from a prediction."""

    ends: Sequence[float]
    words: str
    of: str


class Measured(TypedDict):
    """Peak and median step of a run that was measured with the settings of a row."""

    peak: int | None
    step_s: float | None
    peak_words: str
    step_words: str


class Here(TypedDict):
    """A step on this machine, predicted from a measured run."""

    step_s: float
    words: str
    of: str


class _RowOfEach(TypedDict):
    name: str
    strategy: str
    memory: list[tuple[str, int]]  # category, bytes
    peak: int | None
    over: int  # bytes beyond the card
    peak_words: str
    why_no_memory: str
    why_no_step: str
    step: tuple[float, float, float, float] | None  # in the order of `Offers.step`
    step_s: float | None
    step_words: str
    measured: Measured | None
    here: Here | None
    bands: list[Band | None]  # of memory, and of the step


class Row(_RowOfEach, total=False):
    """One line of the bars; the last two are those of A while it is pinned."""

    pinned: bool
    note: str


class Computed(NamedTuple):
    """A block of a rank's computing, in ms."""

    start: float
    end: float
    unit: str
    phase: str


class Sent(NamedTuple):
    """A message on a rank's link, in ms: `waited` is the part that is exposed, for this cause."""

    start: float
    end: float
    unit: str
    phase: str
    kind: str
    size: str
    waited: float
    cause: str


class Blocks(TypedDict):
    """The blocks of a timeline; exposed ones are start and end, in ms."""

    compute: list[Computed]
    messages: list[Sent]
    exposed: list[tuple[float, float]]


class Timeline(Blocks):
    """One step of A or of B."""

    side: str
    name: str
    step: float


class Refused(TypedDict):
    """One line for each control that is wrong."""

    errors: dict[str, str]


class Hidden(Refused):
    """The question before the answer is shown; an error is one of the guess."""

    hidden: bool
    a: str
    b: str
    asks: str
    unit: str  # of a guess that is a number alone


class Drawn(Refused):
    """Bars, timeline and sentences."""

    a: str
    b: str
    rows: list[Row]
    card: int | None
    judged: str
    guessed: int | None
    clock: str  # where the steps were simulated
    memory_title: str
    step_title: str
    difference: str
    timeline: list[Timeline]


Answer: TypeAlias = Refused | Hidden | Drawn


class AnswerTo(TypedDict):
    """What the widget adds to an answer: to which question it is one, and what else changes with it."""

    n: int
    asked: Asked
    link: float | None  # bytes per second
    job: str


# ---- what comes after the answer


class _MarkOfEach(TypedDict):
    side: str
    at: float | None  # bytes per second
    words: str


class Mark(_MarkOfEach, total=False):
    """Where the messages of A or of B are hidden, on the link's slider; `more` explains the words."""

    more: str


class Change(TypedDict):
    """One setting at another value: what it takes, and what of it changes (`gain` is a part of the speed)."""

    words: str
    choices: dict[str, Any]
    gain: float
    peak: int
    fits: bool
    speed: str
    step: str
    memory: str
    sent: str


class More(TypedDict, total=False):
    """What is unfolded below the figure; nothing while it is folded."""

    b: str
    what_if: list[Change]
    copies: Mapping[str, str]  # title -> text


class Progress(TypedDict):
    """How the runs go on, and what the buttons do."""

    busy: bool
    cancels: bool
    share: float
    message: str
    alarm: bool
    what: str
