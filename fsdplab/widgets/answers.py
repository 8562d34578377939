"""What the instrument draws, as plain data: memory, step and timeline of each run, before anything runs.

Memory of a run on this machine is played allocation by allocation (sessions.prediction), its step is that of the
steady card; runs on GPUs are the planner's simulation. All of it is arithmetic, and each run's outcome is kept, so a
control is answered within some milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import sqrt
from typing import Any, TypeAlias

from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.sizes import parse_size, seconds, size
from fsdplab.figures.table import scattered
from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.links import LinkSpec, parse_link
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.planning.plan_traffic import LINK_EFFICIENCY, bytes_by_axis
from fsdplab.planning.program import OPTIMIZER, ROOT, program_of
from fsdplab.planning.simulation import RankLog, Span, on_links_of, simulate, simulate_program, work_of
from fsdplab.records import RunRecord
from fsdplab.sessions.own_plan import OwnPlan
from fsdplab.sessions.prediction import Prediction, predict
from fsdplab.sessions.spec import RunSpec
from fsdplab.sessions.steady_card import SteadyCardError, plan_of, steady
from fsdplab.workloads.own.sources import name_of, source_of

from .choices import CONTROL_OF, CONTROLS, PRESETS, Choices, alone, at_bandwidth, check, parse_card

Run: TypeAlias = RunSpec | PlanSpec
CAUSES = {
    "late_start": "issued only when the unit is needed",
    "link_busy": "the link carried another message first",
    "waiting_for_peer": "another rank came later",
    "nothing_to_hide_behind": "too little to compute meanwhile",
    "unknown": "unknown",
}
_REMAINS = " of the passes: the first gathers, the gather between forward and backward, and the last reductions"
_ROOMY = 10**15  # bytes of a card on which all fits
_NO_STEP = "not simulated without a link"
_ALIKE = 0.02  # steps that differ by less are equally long, for a guess
_EQUAL = 1e-3  # simulated steps that differ by less are equal
# Settings that change what a run takes: a measurement with other ones is not drawn over its simulation.
_SETTINGS = ("micro_batches", *(name for name in CONTROL_OF if name not in ("card", "steps", "engine", "as_model")))


@dataclass(frozen=True)
class Step:
    """Seconds of a step: computing alone, communication under computing, exposed, the optimizer computing, the rest."""

    computing: float
    hidden: float
    exposed: float
    optimizer: float = 0.0
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of the step."""
        return self.computing + self.hidden + self.exposed + self.optimizer + self.other

    @property
    def words(self) -> str:
        """`919 ms, 65 % hidden`."""
        communication = self.hidden + self.exposed
        return seconds(self.total) + (f", {100 * self.hidden / communication:.0f} % hidden" if communication else "")


@dataclass(frozen=True)
class Outcome:
    """What a run takes: bytes by category at the peak, bytes that a rank sends, and its step with the blocks of a
    timeline. None where it is not known, with the reason.
    """

    memory: Mapping[str, int] | None
    sent: int | None
    step: Step | None
    blocks: Mapping[str, list[list[Any]]] | None = None
    why_no_memory: str = ""
    why_no_step: str = ""

    @property
    def peak(self) -> int | None:
        """The sum of the categories."""
        return sum(self.memory.values()) if self.memory else None


def outcome(run: Run) -> Outcome:
    """Memory, step and timeline of a run, by arithmetic; its card does not matter, so that one is dragged at no cost.

    >>> outcome(RunSpec(model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s")).step.words
    '919 ms, 65 % hidden'
    """
    return _outcome(_on_any_card(run), _version_of(run))


def _own(run: Run) -> str:
    """The model of one's own of a run or a plan; "" where it has none."""
    if isinstance(run, PlanSpec):
        return run.of.model if isinstance(run, OwnPlan) else ""
    return run.model if run.own_model else ""


def _version_of(run: Run) -> str:
    """What tells that the file of a model of one's own was edited."""
    model = _own(run)
    return source_of(model).digest if model else ""


def _on_any_card(run: Run) -> Run:
    if isinstance(run, PlanSpec):
        return replace(run, gpu=replace(run.gpu, memory_bytes=_ROOMY))
    return replace(run, card=None)


@lru_cache(maxsize=512)
def _outcome(run: Run, version: str) -> Outcome:
    if isinstance(run, OwnPlan):
        plan = run.plan
        sent = sum(bytes_by_axis(plan.traffic).values())
        memory = {name: round(nbytes) for name, nbytes in plan.memory.peak.by_category.items()}
        return Outcome(memory, sent, *_step_of(run.tables))
    if isinstance(run, PlanSpec):
        record = simulate(run)
        steps = _step_of(record.tables)
        return Outcome(record.summary.peak_memory_bytes.split, record.summary.comm.bytes_per_step, *steps)
    found = _predicted(replace(run, link="1GB/s") if run.link else run, version)  # alike behind any link
    try:
        own = run.own_model and run.link
        step, blocks = _step_of(recorded_model().steady_tables(run) if own else steady(run).tables)
    except SteadyCardError:
        return Outcome(found.by_category, found.bytes_per_step, None, None, found.why_not, _NO_STEP)
    return Outcome(found.by_category, found.bytes_per_step, step, blocks, found.why_not)


@lru_cache(maxsize=256)
def _predicted(run: RunSpec, version: str) -> Prediction:
    return predict(run)


def recorded_model() -> Any:
    """The module that records a model of one's own; it imports torch."""
    from fsdplab.sessions import recorded_model as module

    return module


def _step_of(tables: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[Step, dict[str, list[list[Any]]]]:
    """The parts of a simulated step of its first rank, and the blocks of its timeline, in ms."""
    (row,) = tables["breakdown"][:1]
    alone, hidden, exposed, other = (
        row[f"{name}_ns"] / 1e9 for name in ("compute_only", "overlapped", "exposed", "other")
    )
    causes = {(each["unit"], each["phase"], each["kind"]): each["cause"] for each in tables["exposed"]}
    blocks = {
        "compute": [
            [_ms(each["start_ns"]), _ms(each["end_ns"]), each["unit"], each["phase"]]
            for each in tables["timeline"] if each["lane"] == "compute" and each["rank"] == row["rank"]
        ],
        "messages": [
            [_ms(each["start_ns"]), _ms(each["end_ns"]), each["unit"], each["phase"], each["kind"].replace("_", "-"),
             size(each["wire_bytes"]), _ms(each["waited_ns"]),
             CAUSES.get(causes.get((each["unit"], each["phase"], each["kind"]), ""), "")]
            for each in tables["ledger"] if each["rank"] == row["rank"]
        ],
        "exposed": [
            [_ms(each["start_ns"]), _ms(each["end_ns"])]
            for each in tables["timeline"] if each["lane"] == "exposed" and each["rank"] == row["rank"]
        ],
    }  # fmt: skip
    stepping = sum(end - start for start, end, _, phase in blocks["compute"] if phase == OPTIMIZER) / 1e3
    return Step(alone - stepping, hidden, exposed, stepping, other), blocks


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 3)


# ---- the crossover


@dataclass(frozen=True)
class Crossover:
    """The least bandwidth, between two ends, at which no rank waits between two units of a forward or of a backward;
    None where it waits at all of them.

    What remains exposed has nothing to hide under: the first gathers of a step, the gather at the turn from forward to
    backward, and the last reductions. `remains_s` are these seconds at the crossover.
    """

    bytes_per_s: float | None
    remains_s: float = 0.0


def crossover(run: Run, ends: tuple[float, float]) -> Crossover:
    """By bisection on the simulated step, to 1 %; the run's own bandwidth does not count.

    >>> run = RunSpec(model="gpt-20m", batch_size=2, sequence_length=128, link="150MB/s")
    >>> round(crossover(run, (10e6, 10e9)).bytes_per_s / 1e6, -1)
    220.0
    """
    version, run = _version_of(run), _on_any_card(run)
    if isinstance(run, RunSpec):  # runs that differ in their bandwidth alone have the same crossover
        run = replace(run, link=f"1GB/s,{parse_link(run.link or '').latency_s}s")
    return _crossover(at_bandwidth(run, ends[1]) if isinstance(run, PlanSpec) else run, ends, version)


@lru_cache(maxsize=256)
def _crossover(run: Run, ends: tuple[float, float], version: str) -> Crossover:
    steadily = isinstance(run, RunSpec)
    if isinstance(run, RunSpec):
        plan = plan_of(run)
        own = recorded_model().steady_work(run) if run.own_model else None
        work = own or work_of(plan, 1.0).shared(streams=False)
    else:
        plan, work = run, run.work if isinstance(run, OwnPlan) else work_of(run)
    program = program_of(work)

    def waits(bytes_per_s: float) -> tuple[float, float]:
        reached = bytes_per_s / LINK_EFFICIENCY if steadily else bytes_per_s  # of the steady card's link all is reached
        linked = on_links_of(at_bandwidth(plan, reached), work)
        return _waits(simulate_program(linked, program).logs[0])

    low, high = ends
    (at_low, all_remains), (at_high, remains) = waits(low), waits(high)
    if at_high:
        return Crossover(None)
    if not at_low:
        return Crossover(low, all_remains)
    while high / low > 1.01:
        middle = sqrt(low * high)
        waited, ends_wait = waits(middle)
        low, high, remains = (middle, high, remains) if waited else (low, middle, ends_wait)
    return Crossover(high, remains)


def _waits(log: RankLog) -> tuple[float, float]:
    """Seconds that a rank waits between two units of a pass, and at the ends of the passes."""

    def in_one_pass(before: Span, after: Span) -> bool:
        """Both are blocks of a forward, or of a backward; the root's own spans are at the turn between these."""
        return before.phase == after.phase != OPTIMIZER and ROOT not in (before.unit, after.unit)

    spans = sorted(log.computed, key=lambda span: span.start)
    gaps = [(max(0.0, after.start - before.end), in_one_pass(before, after)) for before, after in pairwise(spans)]
    between = sum(gap for gap, same in gaps if same)
    ends = spans[0].start + sum(gap for gap, same in gaps if not same)
    return (between if between > 1e-6 * log.end else 0.0), ends


# ---- A and B


@dataclass(frozen=True)
class Guess:
    """What the reader expects of A and B before the answer is shown: whose step is shorter, and what B's peak is."""

    on: bool = False
    given: bool = False
    faster: str = ""
    memory: str = ""

    @property
    def hides(self) -> bool:
        """Whether the answer waits for the guess."""
        return self.on and not self.given


@dataclass(frozen=True)
class Look:
    """What is looked at: the strategies A and B, the choices that A keeps while it is pinned, the guess, and whether
    what B would gain by other choices, and B as code, are unfolded.
    """

    a: str = "no_shard"
    b: str = "full_shard"
    pinned: Choices | None = None
    guess: Guess = Guess()
    more: bool = False


def guessed_bytes(memory: str, unit: str) -> int:
    """A typed guess in bytes; a number alone is in `unit`: `guessed_bytes("180", "MB") == 180_000_000`."""
    return parse_size(memory + unit if memory.strip()[-1:].isdigit() else memory)


def judge(guess: Guess, a: Outcome, b: Outcome, unit: str = "MB") -> str:
    """The guess beside the answer, in one line; ValueError says what a guess must be."""
    if guess.faster not in ("A", "B", "equal"):
        raise ValueError(f"the guess of the step is {guess.faster!r}; expected A, B or equal")
    try:
        memory = guessed_bytes(guess.memory, unit)
    except ValueError:
        raise ValueError(
            f"the guess of the memory is {guess.memory!r}; expected a number of {unit}, or a size with its unit"
        ) from None
    parts = []
    if a.step and b.step:
        least, most = sorted((a.step.total, b.step.total))
        answer = "equal" if most - least <= _ALIKE * least else "A" if a.step.total < b.step.total else "B"
        words = "the steps are equally long" if answer == "equal" else f"{answer} has the shorter step"
        right = "Right" if answer == guess.faster else f"You said {guess.faster}"
        parts.append(f"{right}: {words} (A {seconds(a.step.total)}, B {seconds(b.step.total)}).")
    if b.peak:
        off = memory / b.peak - 1
        near = "within 10 %" if abs(off) <= 0.1 else f"{100 * abs(off):.0f} % too {'much' if off > 0 else 'little'}"
        parts.append(f"You said {size(memory)} for B: it needs {size(b.peak)} ({near}).")
    return " ".join(parts)


def difference(a: Outcome, b: Outcome, names: tuple[str, str], precision: str = "fp32") -> str:
    """What B takes beside A, in one sentence each on memory, step and messages."""
    parts = []
    if a.peak and b.peak:
        parts.append(f"B, {names[1]}, needs {size(b.peak)} a rank, {_beside(a.peak, b.peak, size, 'less', 'more')}")
        parts[-1] += f" than A, {names[0]}." if a.peak != b.peak else f" as A, {names[0]}."
    if a.step and b.step:
        longer = _beside(a.step.total, b.step.total, seconds, "shorter", "longer")
        parts.append(f"Its step takes {seconds(b.step.total)}, {longer}.")
    if a.sent and b.sent:
        times = f"{b.sent / a.sent:.2g}"
        often = "as much" if times == "1" else f"{times} times as much"
        often += " (gathers in bf16, reductions in fp32)" if precision == "bf16" and a.sent != b.sent else ""
        exposed = (
            f", and {seconds(b.step.exposed)} are exposed (A: {seconds(a.step.exposed)})" if a.step and b.step else ""
        )
        parts.append(f"It sends {often}{exposed}.")
    return " ".join(parts)


def _beside(first: float, second: float, say: Callable[[float], str], less: str, more: str) -> str:
    """`141 MB (38 %) less`."""
    if first == second:
        return "as much" if less == "less" else "as long"
    part = abs(second / first - 1)
    percent = f" ({100 * part:.0f} %)" if part >= 0.005 else ""
    return f"{say(abs(second - first))}{percent} {less if second < first else more}"


# ---- all that is drawn


def answer(choices: Choices, look: Look, fixed: Mapping[str, Any], records: Sequence[RunRecord] = ()) -> dict[str, Any]:
    """What the instrument draws for its controls: plain data, in bytes, seconds and ms; only `errors` where a choice is
    wrong, and no figures while the answer waits for a guess.
    """
    compared, errors = _compared(choices, look, fixed)
    if compared is None:
        return {"errors": errors}
    runs, a, b, first, name = compared.runs, compared.a, compared.b, compared.first, compared.name
    gpu = PRESETS[choices.preset].gpu
    unit = "GB" if gpu else "MB"  # of a guess
    judged, error = _judged(look.guess, outcome(first), outcome(runs[b]), unit)
    if look.guess.hides or error:
        errors = {"guess": error} if error else {}
        asks = f"Before you look: A is {name}, B is {b}. Whose step is shorter, and how much memory does B need?"
        return {"hidden": True, "errors": errors, "a": a, "b": b, "asks": asks, "unit": unit}
    card = parse_card(choices.card)
    rows = [_row(each, run, card, records) for each, run in runs.items()]
    if look.pinned:
        pinned = {"name": f"{a} (A)", "pinned": True, "note": compared.note or "as it is now"}
        rows = [_row(a, first, card, records) | pinned, *rows]
    return {
        "errors": {}, "a": a, "b": b, "rows": rows, "card": card, "judged": judged,
        "guessed": guessed_bytes(look.guess.memory, unit) if judged else None,
        "clock": f"simulated on {gpu.upper()} GPUs" if gpu else "simulated on the steady card",
        "memory_title": _memory_title(rows, card), "step_title": _step_title(rows),
        "difference": difference(outcome(first), outcome(runs[b]), (name, b), choices.precision),
        "timeline": [
            {"side": side, "name": called, "step": found.step.total * 1e3, **found.blocks}
            for side, called, found in (("A", name, outcome(first)), ("B", b, outcome(runs[b])))
            if found.step and found.blocks
        ],
    }  # fmt: skip


def marks(choices: Choices, look: Look, fixed: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Where the crossovers of A and B stand on the link's slider. They take longer than all else, so they are sent
    after the answer; none where a choice is wrong or the answer waits for a guess.
    """
    compared, _ = _compared(choices, look, fixed)
    if compared is None or look.guess.hides:
        return []
    ends = PRESETS[choices.preset].links
    return [_mark("A", compared.first, ends), _mark("B", compared.runs[compared.b], ends)]


def shown_b(choices: Choices, look: Look, fixed: Mapping[str, Any]) -> tuple[str, Run] | None:
    """B's strategy and run; None where a choice is wrong or the answer waits for a guess."""
    compared, _ = _compared(choices, look, fixed)
    return None if compared is None or look.guess.hides else (compared.b, compared.runs[compared.b])


@dataclass(frozen=True)
class _Compared:
    """The runs by strategy, which of them are A and B, and A's own run with what it differs in where it is pinned."""

    runs: Mapping[str, Run]
    a: str
    b: str
    first: Run
    note: str

    @property
    def name(self) -> str:
        """What A is called."""
        return f"{self.a} ({self.note})" if self.note else self.a


def _compared(choices: Choices, look: Look, fixed: Mapping[str, Any]) -> tuple[_Compared | None, dict[str, str]]:
    """What is compared; None with the errors, one a control, where it cannot be."""
    request = check(choices, fixed)
    if request.errors:
        return None, dict(request.errors)
    runs: dict[str, Run] = {spec.strategy: spec for spec in request.specs if spec.engine == "lab"}
    runs |= {plan.strategy: plan for plan in request.plans}
    if not runs:
        return None, {"engines": "only runs of the lab's own engine are drawn here; choose it too"}
    any_run = next(iter(runs.values()))
    if _own(any_run):  # what its code raises leaves nothing to predict
        found = recorded_model().recording_or_why(any_run.of if isinstance(any_run, OwnPlan) else any_run)
        if isinstance(found, str):
            return None, {"model" if choices.units == "auto" else "units": found}
    b = look.b if look.b in runs else [*runs][-1]
    a = look.a if look.pinned or look.a in runs else [*runs][0]
    if not look.pinned:
        return _Compared(runs, a, b, runs[a], ""), {}
    first = alone(look.pinned, a, fixed).runs[0]
    return _Compared(runs, a, b, first, other_settings(look.pinned, choices)), {}


def _judged(guess: Guess, a: Outcome, b: Outcome, unit: str) -> tuple[str, str]:
    """The guess beside the answer, where one was given, or why it is none."""
    try:
        return (judge(guess, a, b, unit) if guess.on and guess.given else ""), ""
    except ValueError as wrong:
        return "", str(wrong)


def other_settings(pinned: Choices, now: Choices) -> str:
    """The settings of a pinned run that are not those of the choices: `prefetch 0, 300MB/s`."""
    other = {name: row["note"] for name, row in CONTROLS.items() if getattr(pinned, name) != getattr(now, name)}
    return ", ".join(note.format(getattr(pinned, name)) for name, note in other.items() if note)


def _row(strategy: str, run: Run, card: int | None, records: Sequence[RunRecord]) -> dict[str, Any]:
    """One line of the bars: simulated, and the last run that was measured with the same settings."""
    found = outcome(run)
    step, peak = found.step, found.peak
    over = max(0, peak - card) if peak and card else 0
    measured = _measured(run, records)
    return {
        "name": strategy, "strategy": strategy, "colour": STRATEGY_ROWS[strategy].colour,
        "memory": [[name, nbytes] for name, nbytes in (found.memory or {}).items() if nbytes], "peak": peak,
        "over": over, "peak_words": f"{size(peak)}: {size(over)} over" if over else size(peak) if peak else "",
        "why_no_memory": found.why_no_memory, "why_no_step": found.why_no_step,
        "step": [step.computing, step.hidden, step.exposed, step.optimizer] if step else None,
        "step_s": step.total if step else None, "step_words": step.words if step else "", "measured": measured,
        "here": _here(run, records), "bands": _bands(run, found),
    }  # fmt: skip


def _bands(run: Run, found: Outcome) -> list[dict[str, Any] | None]:
    """Of memory and step on GPUs: the ends of the band of known runs, and the band in words; None where there is
    none.
    """
    if type(run) is not PlanSpec:  # all known runs are of published models
        return [None, None]
    memory, speed = memory_band(run), speed_band(run)
    ends = memory.around(found.peak or 0)
    long = [found.step.total / part for part in (speed.high, speed.low)] if found.step else []
    return [
        {"ends": ends, "words": f"{size(ends[0])} to {size(ends[1])}", "of": memory.words} if found.peak else None,
        {"ends": long, "words": f"{seconds(long[0])} to {seconds(long[1])}", "of": speed.words} if long else None,
    ]


def _measured(run: Run, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Peak and median step of the last record with the settings of the run; None where it was not measured."""
    if isinstance(run, PlanSpec):
        return None
    wanted = {name: getattr(run, name) for name in _SETTINGS} | {"model": name_of(run.model)}
    for record in reversed(records):
        if record.spec.get("engine") == "lab" and {name: record.spec.get(name) for name in _SETTINGS} == wanted:
            summary = record.summary
            peak, step = summary.peak_memory_bytes.total, summary.step_time_s.median
            return {"peak": peak, "step_s": step, "peak_words": size(peak), "step_words": seconds(step)}
    return None


def _here(run: Run, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The step on this machine of a model of one's own, from the last measured run that tells it; None without one."""
    if isinstance(run, PlanSpec) or not run.own_model:
        return None
    from fsdplab.sessions.first_run import step_here

    found = next((each for record in reversed(records) if (each := step_here(record, run))), None)
    if found is None:
        return None
    return {"step_s": found.seconds, "words": seconds(found.seconds) + scattered(found.scatter), "of": found.of}


def _memory_title(rows: Sequence[Mapping[str, Any]], card: int | None) -> str:
    over = [row for row in rows if row["over"]]
    if card is None:
        return "Memory of a rank at its peak"
    if not over:
        return f"Memory: all fit the card of {size(card)}"
    if len(over) == 1:
        return f"Memory: {over[0]['name']} is {size(over[0]['over'])} over the card"
    return f"Memory: {len(over)} of {len(rows)} are over the card of {size(card)}"


def _step_title(rows: Sequence[Mapping[str, Any]]) -> str:
    timed = [row for row in rows if row["step_s"]]
    if not timed:
        return "Step"
    least = min(row["step_s"] for row in timed)
    best = [row["name"] for row in timed if row["step_s"] <= (1 + _EQUAL) * least]
    return f"Shortest step: {', '.join(best) if len(best) <= 2 else f'{len(best)} of {len(rows)} are equal'}"


def _mark(side: str, run: Run, ends: tuple[float, float]) -> dict[str, Any]:
    """Where the crossover stands on the link's slider, and what is said of it."""
    if outcome(run).step is None:
        return {"side": side, "at": None, "words": ""}
    found = crossover(run, ends)
    if found.bytes_per_s is None:
        return {"side": side, "at": None, "words": f"{side} waits at every speed"}
    if found.bytes_per_s == ends[0]:
        return {"side": side, "at": ends[0], "words": f"{side} hidden at every speed"}
    least = LinkSpec("", float(f"{found.bytes_per_s:.3g}"), 0.0).words
    words = f"{side} from {least}: only the ends exposed, {seconds(found.remains_s)}"
    return {"side": side, "at": found.bytes_per_s, "words": words, "more": _REMAINS}
