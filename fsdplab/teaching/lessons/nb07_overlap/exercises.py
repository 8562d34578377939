"""Notebook 07: exposed time on intervals, what prefetch costs, and what no schedule can hide."""

from __future__ import annotations

import ast
from typing import Any

from fsdplab.teaching.core.exercise import Case, Choice, Exercise, Question, Slip, Trial, Wrong, edited
from fsdplab.teaching.core.verdicts import Difference

from . import on_ranks
from .overlapping import least_exposed_ms

_RANKS = 2
Intervals = list[tuple[int, int]]

# --- exposed time

_EXPOSED_STUB = '''\
def exposed(communication, compute):
    """Ms in which a message is on its way and nothing is computed; lists of (start, end), in any order."""
    ...
'''

_EXPOSED = '''\
def exposed(communication, compute):
    """Ms in which a message is on its way and nothing is computed; lists of (start, end), in any order."""
    edges = sorted({edge for interval in [*communication, *compute] for edge in interval})
    total = 0
    for start, end in zip(edges, edges[1:]):  # between two edges nothing begins and nothing ends
        moving = any(a <= start and end <= b for a, b in communication)
        computing = any(a <= start and end <= b for a, b in compute)
        total += (end - start) * (moving and not computing)
    return total
'''
# The cases' times are these, as a reader checks them, times this factor: a step's clock knows fractions of a
# millisecond, and whoever makes a set of whole numbers must learn it here, before a step's nanoseconds fill the memory.
_SCALE = 1.375
_EXPOSED_CASES: dict[str, tuple[Intervals, Intervals, int]] = {
    "a message, half under compute": ([(0, 10)], [(4, 25)], 4),
    "compute in two pieces under one message": ([(0, 20)], [(2, 6), (10, 13)], 13),
    "compute that came before the message": ([(50, 60)], [(0, 40)], 10),
    "two messages at once": ([(0, 10), (5, 15)], [(13, 30)], 13),
    "two streams that compute at once, unsorted": ([(30, 40), (0, 10)], [(5, 9), (2, 7), (35, 60)], 8),
    "no compute": ([(3, 5), (9, 10)], [], 3),
    "no communication": ([], [(3, 5)], 0),
}


def _exposed_cases() -> list[Case]:
    return [
        Case(name, ((_scaled(moved), _scaled(computed)),) * _RANKS, (value * _SCALE,) * _RANKS)
        for name, (moved, computed, value) in _EXPOSED_CASES.items()
    ]


def _scaled(intervals: Intervals) -> list[tuple[float, float]]:
    return [(start * _SCALE, end * _SCALE) for start, end in intervals]


def _whole(intervals: list[tuple[float, float]]) -> Intervals:
    """The intervals as `_EXPOSED_CASES` has them."""
    return [(round(start / _SCALE), round(end / _SCALE)) for start, end in intervals]


def _cut(intervals: list[tuple[float, float]]) -> Intervals:
    """The intervals with the fractions of their times cut off, as a set of whole numbers has them."""
    return [(int(start), int(end)) for start, end in intervals]


def _held(intervals: Intervals) -> set[int]:
    """The whole milliseconds in the intervals: small numbers make sets the clearest arithmetic."""
    return {instant for start, end in intervals for instant in range(start, end)}


def _sum(intervals: Intervals) -> int:
    return sum(end - start for start, end in intervals)


def _explain_exposed(case: Case, trial: Trial, difference: Difference) -> tuple[None, str]:
    moved, computed = map(_whole, case.arguments[trial.rank])
    m, c, got, right = _held(moved), _held(computed), trial.returned, case.expected[0] / _SCALE
    if isinstance(got, bool) or not isinstance(got, (int, float)):
        return None, "one number is expected: a duration"
    held, covered = (_held(_cut(each)) for each in case.arguments[trial.rank])
    got, counted = got / _SCALE, got == len(held - covered)
    pairwise = sum(_sum(moved) and len(_held([one]) & _held([other])) for one in moved for other in computed)
    suspects = (
        (
            _sum(moved) - _sum(computed),
            (
                "durations were subtracted; what counts is when: compute hides only the message that is on its way at"
                " that instant"
            ),
        ),
        (
            max(0, _sum(moved) - _sum(computed)),
            (
                "durations were subtracted; what counts is when: compute hides only the message that is on its way at"
                " that instant"
            ),
        ),
        (len(m & c), "this is the hidden part (M and C); exposed is M without C"),
        (len(c - m), "this is compute without communication; exposed is the other way round: M without C"),
        (len(m), "this is all communication: take out the instants in which something is computed"),
        (
            _sum(moved) - pairwise,
            (
                "an instant was counted twice: intervals of one list may overlap each other (two messages, two"
                " streams); take their union first"
            ),
        ),
        (
            len(m) - pairwise,
            (
                "an instant of compute was taken away twice: intervals of one list may overlap each other; take their"
                " union first"
            ),
        ),
        (
            _sum(moved) - len(m & c),
            "an instant was counted twice where two messages travel at once: take the union of the messages first",
        ),
    )
    cause = next((words for wrong, words in suspects if got == wrong != right), None)
    if cause is None and counted:
        cause = "times are not whole numbers, so instants cannot be counted one by one: go from edge to edge"
    if cause is None and len(computed) > 1:
        cause = "several intervals of compute lie under the messages, in any order: is each of them looked at?"
    return None, cause or "draw both lists on one axis: exposed is where only a message is drawn"


_MARKED = '''\
def exposed(communication, compute):
    """Subtracts for every message the compute under it."""
    total = 0
    for start, end in communication:
        total += end - start
        for a, b in compute:
            total -= max(0, min(end, b) - max(start, a))
    return total
'''

_FIRST = '''\
def exposed(communication, compute):
    """Looks at the first compute interval only."""
    return sum(end - start - sum(max(0, min(end, b) - max(start, a)) for a, b in compute[:1])
               for start, end in communication)
'''

_COUNTED = '''\
def exposed(communication, compute):
    """A set of whole milliseconds."""
    held = lambda pairs: {{t for a, b in pairs for t in range({a}, {b})}}
    return len(held(communication) - held(compute))
'''

exposed = Exercise(
    id="07.exposed",
    title="Exposed time",
    statement=(
        "Write exposed(communication, compute): how many ms a message is on its way while nothing is computed, |M"
        " without C|. Times are in ms, with fractions."
    ),
    stub=_EXPOSED_STUB,
    reference=_EXPOSED,
    hints=(
        (
            "Between two neighbouring edges (starts and ends of any interval) nothing changes. What must hold of such a"
            " piece, so that it counts?"
        ),
        (
            "Sort all edges. A piece between two of them counts if it lies in some interval of communication and in"
            " none of compute."
        ),
        (
            "`for start, end in zip(edges, edges[1:])`: add end - start if any(a <= start and end <= b for a, b in"
            " communication) and not the same for compute."
        ),
    ),
    cases=_exposed_cases,
    explain=_explain_exposed,
    world_size=_RANKS,
    tolerance=1e-9,
    wrong=(
        Wrong(
            "durations",
            "def exposed(communication, compute):\n    return sum(b - a for a, b in communication) - sum(b - a for a, b"
            " in compute)\n",
            "what counts is when",
        ),
        Wrong(
            "durations, at least 0",
            "def exposed(communication, compute):\n    return max(0, sum(b - a for a, b in communication) - sum(b - a"
            " for a, b in compute))\n",
            "what counts is when",
        ),
        Wrong(
            "hidden", edited(_EXPOSED, ("moving and not computing", "moving and computing")), "this is the hidden part"
        ),
        Wrong(
            "the other way round",
            edited(_EXPOSED, ("moving and not computing", "computing and not moving")),
            "the other way round",
        ),
        Wrong(
            "all communication", edited(_EXPOSED, ("(moving and not computing)", "moving")), "this is all communication"
        ),
        Wrong("pair by pair", _MARKED, "take their union first"),
        Wrong("the first compute only", _FIRST, "is each of them looked at"),
        Wrong("a set of rounded instants", _COUNTED.format(a="int(a)", b="int(b)"), "go from edge to edge"),
        Wrong("a set of instants", _COUNTED.format(a="a", b="b"), "cannot be interpreted as an integer", ends="raises"),
        Wrong("a list", edited(_EXPOSED, ("return total", "return [total]")), "one number is expected"),
        Wrong("nothing", edited(_EXPOSED, ("    return total\n", "")), "returns nothing"),
        Wrong(
            "no edges",
            edited(
                _EXPOSED,
                ("edges = sorted(", "edges = sorted({min(edge for interval in compute for edge in interval)} | "),
            ),
            "read the last line",
            ends="raises",
        ),
    ),
)

# --- the prefetch rule

_AHEAD_STUB = '''\
def ahead(order, position, depth):
    """The units to gather now, while order[position] computes: those of the next `depth` places."""
    ...  # order: the names of the units, as this phase will use them
'''
_AHEAD = '''\
def ahead(order, position, depth):
    """The units to gather now, while order[position] computes: those of the next `depth` places."""
    return order[position + 1 : position + 1 + depth]
'''
_FORWARD = ["root", "blocks.0", "blocks.1", "blocks.2", "blocks.3"]
_BACKWARD = ["root", "blocks.3", "blocks.2", "blocks.1", "blocks.0"]
_AHEAD_CASES: dict[str, tuple[list[str], int, int, list[str]]] = {
    "one ahead, in the forward": (_FORWARD, 1, 1, ["blocks.1"]),
    "two ahead, in the forward": (_FORWARD, 1, 2, ["blocks.1", "blocks.2"]),
    "one ahead, in the backward": (_BACKWARD, 1, 1, ["blocks.2"]),
    "two ahead, one unit is left": (_BACKWARD, 3, 2, ["blocks.0"]),
    "the last unit": (_FORWARD, 4, 1, []),
    "none ahead": (_FORWARD, 2, 0, []),
}


def _ahead_cases() -> list[Case]:
    return [
        Case(name, ((list(order), position, depth),) * _RANKS, (right,) * _RANKS)
        for name, (order, position, depth, right) in _AHEAD_CASES.items()
    ]


def _explain_ahead(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    (order, position, depth), got, right = case.arguments[trial.rank], trial.returned, case.expected[0]
    where = f"order={order}, position={position}, depth={depth}: expected {right}, got {got}"
    if not isinstance(got, list):
        return where, "return a list of names, empty where nothing is to be gathered"
    if order[position] in got:
        return where, "order[position] computes now, so it is whole already: begin with the unit behind it"
    if got == order[position + 1 :]:
        return where, "all later units would be whole at once, which full sharding is to avoid: at most `depth` of them"
    if got == sorted(right) or (position and got and got[0] == order[position - 1]):
        return where, "`order` is already the order of this phase, in the backward too: do not turn it round"
    if right and got == right[:1]:
        return where, "only one unit is gathered ahead; `depth` may be more"
    return where, "count from position + 1, and stop after `depth` names, or where the list ends"


ahead = Exercise(
    id="07.ahead",
    title="The prefetch rule",
    statement="Write ahead(order, position, depth): the units to gather now, while order[position] computes.",
    stub=_AHEAD_STUB,
    reference=_AHEAD,
    hints=(
        "Which unit is needed next? It stands right behind the one that computes.",
        "A slice of a list: from position + 1 on, and `depth` names long.",
        "order[position + 1 : position + 1 + depth]: a slice may end behind the list, and is then shorter.",
    ),
    cases=_ahead_cases,
    explain=_explain_ahead,
    world_size=_RANKS,
    wrong=(
        Wrong("itself", edited(_AHEAD, ("position + 1 : position + 1 +", "position : position +")), "is whole already"),
        Wrong("all of them", edited(_AHEAD, (" : position + 1 + depth", " :")), "whole at once"),
        Wrong("backwards", edited(_AHEAD, ("order[position + 1 : position + 1 + depth]",
                                           "order[max(0, position - depth) : position]")), "do not turn it round"),
        Wrong("one only", edited(_AHEAD, ("+ 1 + depth", "+ 1 + min(1, depth)")), "may be more"),
        Wrong("a name", edited(_AHEAD, ("order[position + 1 : position + 1 + depth]",
                                        "order[min(position + 1, len(order) - 1)]")), "return a list"),
    ),
)  # fmt: skip

# --- questions

least = Question(
    id="07.least",
    statement=(
        "A step computes for 300 ms and sends 150 MB over a link of 250 MB/s. Even the best order of messages leaves"
        " some communication exposed. How many ms at least?"
    ),
    unit="ms",
    expected=least_exposed_ms(300, 600),
    slips=(
        Slip(
            "150 MB at 250 MB/s take 600 ms: this is all of the communication, but 300 ms of it can be hidden",
            value=600.0,
        ),
        Slip("this is the length of the step at best (300 ms of compute and 300 exposed)", factor=3.0),
        Slip("there is more communication than compute, so some must show", value=0.0),
    ),
    hints=(
        "How long is the communication?",
        "600 ms of messages. How much of that can lie under 300 ms of compute?",
        "600 - 300.",
    ),
    explanation="max(0, M - C). No prefetch helps against it: send less, or compute more per byte (a larger batch).",
)

price = Choice(
    id="07.price",
    statement="What does gathering one unit ahead cost?",
    options={
        "a": "memory: while a block computes, the next one is there whole as well",
        "b": "traffic: some units are gathered once more",
        "c": "accuracy: a gathered unit may be older than the optimizer's last step",
    },
    right="a",
    because={
        "a": (
            "two gathered blocks instead of one. With small units that is little; with one big unit it would be the"
            " model."
        ),
        "b": "the same messages are sent, only earlier: compare bytes_per_step of the two runs.",
        "c": (
            "the gathers of a step begin after the optimizer's step before it; the losses of both runs are equal to the"
            " last bit."
        ),
    },
)

inflated = Choice(
    id="07.inflated",
    statement=(
        "A colleague hides 95 % of the communication, and the step is no faster than before. Compute inflation went"
        " from 1.0 to 1.4. What happened?"
    ),
    options={
        "a": "the profiler is wrong: what is hidden costs no time",
        "b": "moving the bytes takes cores (or memory bandwidth, or SMs of a GPU) away from computing",
        "c": "the link became slower while computing went on",
    },
    right="b",
    because={
        "a": "it is hidden, yes, but under compute that takes longer: look at the sum.",
        "b": "the step is compute + exposed + rest. What was saved in the second was paid in the first.",
        "c": "then communication would be longer; compute would not.",
    },
)

# --- settings that hide; compute and link are emulated, so right is right anywhere

_HIDE = '''\
def hide():
    """Settings with which little of the communication shows."""
    return {{
        "units": "{units}",  # "linear", "block", "model": what travels together
        "prefetch": {prefetch},  # 0, 1, 2: units to gather ahead
        "link_queues": {queues},  # 1: gathers and reductions in one queue; 2: a communicator for each
        "batch_size": {batch},  # 1, 2 sequences
    }}
'''


def _hide(units: str = "block", prefetch: int = 1, queues: int = 2, batch: int = 2) -> str:
    return _HIDE.format(units=units, prefetch=prefetch, queues=queues, batch=batch)


def _hide_cases() -> list[Case]:
    expected = {"settings": "", "milliseconds over the target": 0}
    return [Case("two steps on the steady card", ((),) * _RANKS, (expected,) * _RANKS)]


def _explain_hide(case: Case, trial: Trial, difference: Difference) -> tuple[str | None, str]:
    if "settings" in difference.tensor or not trial.returned or trial.returned["milliseconds over the target"] is None:
        return None, trial.returned["settings"]
    chosen, split = trial.printed.strip().splitlines()[-2:]
    return split, f"{trial.returned['milliseconds over the target']} ms too many. {_remedy(ast.literal_eval(chosen))}"


def _remedy(settings: dict[str, Any]) -> str:
    """What to change first: the setting whose mistake covers up all others."""
    if settings["units"] == "model":
        return (
            "One unit: its gather has no compute before it and its reduction none after it, so nothing can be hidden,"
            " however early it is sent"
        )
    if settings["prefetch"] == 0:
        return "Each gather is issued when its unit is needed, and the rank waits for all of it: gather ahead"
    if settings["units"] == "linear":
        return (
            f"Small units: {on_ranks.PARTS} messages a block in place of one, and each pays the latency of"
            f" {on_ranks.LATENCY_MS:g} ms. Let more travel together"
        )
    if settings["batch_size"] == 1:
        return "A block's messages take longer than its compute, so no order hides them: give each step more to compute"
    return (
        "In backward a gather and a reduction belong to each block: one after the other they take longer than its"
        " compute, side by side they do not"
    )


hide = Exercise(
    id="07.hide",
    title="Hide the traffic",
    statement=(
        f"Write hide(): settings with which at most {on_ranks.TARGET_MS} ms a step are exposed on the steady card."
    ),
    stub=_hide("linear", 0, 1, 1),
    reference=_hide(),
    hints=(
        (
            "Change one setting at a time, and read which of the three (gathers in forward, gathers in backward,"
            " reductions) shows most."
        ),
        (
            "Per block and two sequences: forward 80 ms, backward 120; a gather 60, a reduction 100. What must fit"
            " under what?"
        ),
        (
            "Blocks as units, prefetch 1, two sequences; and 60 + 100 do not fit under 120 one after the other, but"
            " side by side they do."
        ),
    ),
    cases=_hide_cases,
    explain=_explain_hide,
    hung="the ranks wait for each other: return the same settings on every rank",
    world_size=_RANKS,
    time_limit=90.0,
    driver=(str(on_ranks.__file__), "drive_hide"),
    wrong=(
        Wrong("no prefetch", _hide(prefetch=0), "gather ahead"),
        Wrong("one queue", _hide(queues=1), "side by side they do"),
        Wrong("one queue, deeper prefetch", _hide(queues=1, prefetch=2), "side by side they do"),
        Wrong("one sequence", _hide(batch=1), "more to compute"),
        Wrong("linear layers", _hide(units="linear"), "pays the latency"),
        Wrong("one unit", _hide(units="model"), "nothing can be hidden"),
        Wrong("four sequences", _hide(batch=4), "does not fit"),
        Wrong("a setting that is none", edited(_hide(), ('"prefetch"', '"ahead"')), "unknown setting 'ahead'"),
        Wrong(
            "a setting left out",
            edited(
                _hide(),
                (
                    '        "link_queues": 2,  # 1: gathers and reductions in one queue; 2: a communicator for each\n',
                    "",
                ),
            ),
            "link_queues missing",
        ),
        Wrong("a word that is none", _hide(units="layer"), "expected one of 'linear', 'block', 'model'"),
        Wrong("a text", edited(_hide(), ("return {", "return str({"), ("    }\n", "    })\n")), "expected a dict"),
    ),
)

ITEMS = (exposed, ahead, price, inflated, least, hide)
