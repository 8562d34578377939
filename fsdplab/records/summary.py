"""What a run came to, as one typed object: `record.summary`.

The attributes have the names of run.json. None stands for what was not measured; a part of which nothing was measured
is there and empty, so `summary.comm.exposed_s` can always be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fsdplab.common.sizes import percent

from .spread import Spread
from .typed import Amount, Size, plain, read

Measured = TypeVar("Measured")
ENOUGH_CORE = 0.8  # of a step: ranks that had a core for less were timed on a busy machine


@dataclass(frozen=True)
class Peak:
    """Bytes of the worst rank at its peak, and their split by category."""

    total: Size | None = None
    by_category: Mapping[str, Size | None] | None = None

    @property
    def split(self) -> dict[str, int]:
        """The categories that are known; {} where memory was not measured."""
        return {name: nbytes for name, nbytes in (self.by_category or {}).items() if nbytes is not None}


@dataclass(frozen=True)
class Comm:
    """What one rank sends in a step, and what it cost.

    `exposed_s`: what no computing hid, mean of the profiled steps of the rank exposed longest; `on_link_s` +
    `copying_s` + `waiting_s` + `no_core_s` (waiting for a core) is `exposed_s`. `overlap` is the part that computing
    hid. `blocked_s`: how long the host of a timed step was blocked for collectives, by the ledger.
    """

    bytes_per_step: Size | None = None
    collectives_per_step: int | None = None
    exposed_s: float | None = None
    on_link_s: float | None = None
    copying_s: float | None = None
    waiting_s: float | None = None
    no_core_s: float | None = None
    overlap: float | None = None
    blocked_s: float | None = None


@dataclass(frozen=True)
class Predicted:
    """The run's cost by arithmetic, before it ran; `why_not`: why its memory is not predicted.

    Of a model of one's own the step is predicted from a run of it that was measured, whose strategy is `step_from` and
    whose scatter `step_scatter` (sessions/first_run.py).
    """

    peak_memory_bytes: Peak = Peak()
    step_time_s: float | None = None
    exposed_s: float | None = None
    why_not: str = ""
    step_scatter: float | None = None
    step_from: str = ""


@dataclass(frozen=True)
class Steady:
    """The run's step on the steady card (sessions/steady_card.py), simulated; None where that card cannot show it.

    `hidden_s`: communication that computing hid, of which `overlap` is the part; None in records of earlier versions.
    """

    step_time_s: float | None = None
    exposed_s: float | None = None
    overlap: float | None = None
    hidden_s: float | None = None


@dataclass(frozen=True)
class Change:
    """The change to this run that gains most on the steady card (sessions/changes.py): `words` say it, "" for none.

    `gain`: the part by which tokens a second rise, simulated; `peak_bytes`: what the run would hold then, predicted;
    `costs`: "nothing", "memory" or "precision", which the change costs besides.
    """

    words: str = ""
    gain: float | None = None
    peak_bytes: Size | None = None
    costs: str = ""


@dataclass(frozen=True)
class Card:
    """The emulated card: its bytes, and whether the run needed more."""

    bytes: Size | None = None
    exceeded: bool | None = None


@dataclass(frozen=True)
class Link:
    """The network between the ranks, or between their groups (`across`); `as_`: the job whose network it imitates."""

    name: str = "a link"
    bytes_per_s: float | None = None
    latency_s: float | None = None
    queues: int | None = None
    across: Link | None = None
    as_: str | None = None


@dataclass(frozen=True)
class Profile:
    """The profiled steps: `overhead` is by how much they were longer than timed ones, as a part (0.08 is 8 %).

    `optimizer_s`: the optimizer's step in them, mean of the rank exposed longest, of which `exchange_s` is the exposed
    exchange of an optimizer that needs whole matrices.
    """

    steps: int | None = None
    overhead: float | None = None
    source: str | None = None
    optimizer_s: float | None = None
    exchange_s: float | None = None


@dataclass(frozen=True)
class Traces:
    """The traces that a record was made from: files by rank, device work of no step, and what the tables leave out."""

    ranks: int
    files: Mapping[int, str]
    comm_patterns: tuple[str, ...] = ()
    no_step_s: float | None = None
    no_step_share: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class SimulatedRanks:
    """A simulated step: how many ranks each rank of the record stands for, and how many events it took."""

    ranks: Mapping[int, int]
    operations: int


@dataclass(frozen=True)
class Summary:
    """The figures of a run. A step is as slow as its slowest rank; memory is the worst rank's; losses are means.

    `samples_per_s` stands in the place of `tokens_per_s` for a model of one's own, whose batches are not of tokens.
    `in_turns`: whether its timed steps took turns with those of the other runs of a comparison; `again_s`: the median
    step of the same run, timed again at the comparison's end.
    `cpu_share` is the part of the timed steps in which the ranks had a core when they wanted one
    (sessions/worker/core_share.py). `memory_start_ns`: when each rank's measured step began. `workspace_bytes`: what
    cuBLAS kept on a GPU besides, which no strategy changes; `peak_memory_bytes` and `card` leave it out. `notes`: what
    could not be seen of a recorded job.
    """

    step_time_s: Spread = Spread()
    in_turns: bool | None = None
    again_s: Amount | None = None
    tokens_per_s: Amount | None = None
    samples_per_s: Amount | None = None
    cpu_share: float | None = None
    peak_memory_bytes: Peak = Peak()
    memory_start_ns: Mapping[int, int] = field(default_factory=dict)
    peak_by_rank: tuple[Size | None, ...] = ()
    resident_growth_by_rank: tuple[int | None, ...] = ()
    workspace_bytes: Size | None = None
    comm: Comm = Comm()
    formula_bytes_per_step: Size | None = None
    predicted: Predicted = Predicted()
    steady: Steady = Steady()
    change: Change = Change()
    losses: tuple[float | None, ...] = ()
    card: Card | None = None
    link: Link | None = None
    profile: Profile | None = None
    traces: Traces | None = None
    simulated: SimulatedRanks | None = None
    gathered_bytes: int | None = None
    notes: tuple[str, ...] = ()

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], where: str = "summary") -> Summary:
        """Read the summary that a run.json holds; WrongType names the field that is not what it must be.

        >>> Summary.from_dict({"losses": [5.7, 5.6], "step_time_s": {"median": 0.4, "min": 0.3}}).step_time_s.median
        0.4
        """
        return read(cls, content, where)

    def as_dict(self) -> dict[str, Any]:
        """Return what run.json holds: dicts, lists, texts and numbers."""
        return dict(plain(self))

    @property
    def short_of_cores(self) -> bool:
        """Whether the ranks lacked a core so often that their times are the machine's."""
        return self.cpu_share is not None and self.cpu_share < ENOUGH_CORE


def known(value: Measured | None) -> Measured:
    """Return a figure of a summary that the run must have measured: `known(record.summary.comm.exposed_s)`."""
    if value is None:
        raise ValueError("the run did not measure this figure; expected a finished run with timed or profiled steps")
    return value


def core_sentence(share: float, whose: str = "", most: float | None = None) -> str:
    """Write what must be said before all else of a run that is short of cores; of several runs the least share, and
    the `most`.

    >>> core_sentence(0.31)
    "Ranks had a core for 31 % of their step: the measured times are the machine's, not the strategy's."
    >>> core_sentence(0.31, most=0.5)
    "Ranks had a core for 31 % to 50 % of their step: the measured times are the machine's, not the strategy's."
    """
    ranks = f"Ranks of {whose}" if whose else "Ranks"
    shares = percent(share)
    if most is not None and percent(most) != shares:
        shares += f" to {percent(most)}"
    had = f"{ranks} had a core for {shares} of their step"
    return f"{had}: the measured times are the machine's, not the strategy's."
