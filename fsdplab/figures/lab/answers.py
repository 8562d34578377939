"""What the instrument draws, as plain data: bars and timeline of the runs, A beside B, and what B would gain otherwise.

All are functions of the choices, of what is looked at, and of the records so far.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplab.common.sizes import parse_card, parse_size, percent, seconds, size
from fsdplab.common.words import plural
from fsdplab.figures.table import scattered, step_of
from fsdplab.figures.view import view
from fsdplab.planning.bands import memory_band, speed_band
from fsdplab.planning.links import LinkSpec
from fsdplab.planning.plan_spec import PlanSpec
from fsdplab.records import RunRecord, core_sentence
from fsdplab.records.spread import is_below
from fsdplab.sessions.changes import edits
from fsdplab.sessions.spec import RunSpec
from fsdplab.workloads.own.sources import name_of, reads_text

from .choices import CONTROL_OF, CONTROLS, PRESETS, Choices, Fixed, Run, alone, check, own_model
from .copies import copies
from .outcomes import Outcome, crossover, outcome, recorded_model, run_of

_REMAINS = " of the passes: the first gathers, the gather between forward and backward, and the last reductions"
_ALIKE = 0.02  # steps that differ by less are equally long, for a guess
_EQUAL = 1e-3  # simulated steps that differ by less are equal
_LEAST = 0.005  # of a step or of the memory: less is no change
# Settings that change what a run takes: a measurement with other ones is not drawn over its simulation.
_SETTINGS = ("micro_batches", *(name for name in CONTROL_OF if name not in ("card", "steps", "engine", "as_model")))


@dataclass(frozen=True)
class Guess:
    """What the reader expects of A and B before the answer is shown: whose step is shorter, and what B's peak is."""

    on: bool = False
    given: bool = False
    faster: str = ""
    memory: str = ""


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


@dataclass(frozen=True)
class View:
    """What is shown of the choices: the runs by strategy, which of them are A and B, and A's own run with what it
    differs in where it is pinned; or `errors`, one a control, where they cannot be compared.
    """

    choices: Choices
    look: Look
    fixed: Fixed
    errors: Mapping[str, str]
    runs: Mapping[str, Run] = field(default_factory=dict)
    a: str = ""
    b: str = ""
    first: Any = None
    note: str = ""

    @property
    def hides(self) -> bool:
        """Whether nothing may be told: a choice is wrong, or the answer waits for a guess."""
        return bool(self.errors) or self.look.guess.on and not self.look.guess.given

    @property
    def name(self) -> str:
        """What A is called."""
        return f"{self.a} ({self.note})" if self.note else self.a

    def answer(self, records: Sequence[RunRecord] = ()) -> dict[str, Any]:
        """What the instrument draws: plain data, in bytes, seconds and ms; only `errors` where a choice is wrong, and
        no figures while the answer waits for a guess.
        """
        if self.errors:
            return {"errors": dict(self.errors)}
        gpu, guess, errors, judged = PRESETS[self.choices.preset].gpu, self.look.guess, {}, ""
        unit = "GB" if gpu else "MB"  # of a guess
        both = outcome(self.first), outcome(self.runs[self.b])
        try:
            judged = judge(guess, *both, unit) if guess.on and guess.given else ""
        except ValueError as wrong:
            errors = {"guess": str(wrong)}
        if self.hides or errors:
            asks = f"Before you look: A is {self.name}, B is {self.b}. Whose step is shorter, and how much memory does"
            return {"hidden": True, "errors": errors, "a": self.a, "b": self.b, "asks": f"{asks} B need?", "unit": unit}
        card = parse_card(self.choices.card)
        rows = [_row(each, run, card, records) for each, run in self.runs.items()]
        if self.look.pinned:
            pinned = {"name": f"{self.a} (A)", "pinned": True, "note": self.note or "as it is now"}
            rows = [_row(self.a, self.first, card, records) | pinned, *rows]
        return {
            "errors": {}, "a": self.a, "b": self.b, "rows": rows, "card": card, "judged": judged,
            "guessed": guessed_bytes(guess.memory, unit) if judged else None,
            "clock": f"simulated on {gpu.upper()} GPUs" if gpu else "simulated on the steady card",
            "memory_title": _memory_title(rows, card), "step_title": _step_title(rows),
            "difference": difference(*both, (self.name, self.b), self.choices.precision),
            "timeline": [
                {"side": side, "name": name, "step": each.step.total * 1e3, **each.blocks}
                for side, name, each in zip("AB", (self.name, self.b), both)
                if each.step and each.blocks
            ],
        }  # fmt: skip

    def marks(self) -> list[dict[str, Any]]:
        """Where the crossovers of A and B stand on the link's slider. They take longer than all else, so they are sent
        after the answer.
        """
        if self.hides:
            return []
        ends = PRESETS[self.choices.preset].links
        return [_mark("A", self.first, ends), _mark("B", self.runs[self.b], ends)]

    def more(self) -> dict[str, Any]:
        """What B would gain by other choices, and B as code; {} where neither is unfolded."""
        if self.hides or not self.look.more:
            return {}
        found = what_if(self.choices, self.b, self.fixed)
        return {"b": self.b, "what_if": found, "copies": copies(self.runs[self.b])}


def view_of(choices: Choices, look: Look, fixed: Fixed) -> View:
    """The view of choices; what the code of a model of one's own raises is one of the errors."""
    request, a, b = check(choices, fixed), look.a, look.b
    runs: dict[str, Run] = {run.strategy: run for run in request.runs if getattr(run, "engine", "lab") == "lab"}
    if request.errors:
        return View(choices, look, fixed, request.errors)
    if not runs:
        words = "only runs of the lab's own engine are drawn here; choose it too"
        return View(choices, look, fixed, {"engines": words})
    any_run = run_of(next(iter(runs.values())))
    if any_run and any_run.own_model and isinstance(found := recorded_model().recording_or_why(any_run), str):
        return View(choices, look, fixed, {"model" if choices.units == "auto" else "units": found})
    b = b if b in runs else [*runs][-1]
    if not look.pinned:
        a = a if a in runs else [*runs][0]
        return View(choices, look, fixed, {}, runs, a, b, runs[a])
    other = {name: value for name, value in vars(look.pinned).items() if value != getattr(choices, name)}
    note = ", ".join(CONTROLS[name]["note"].format(value) for name, value in other.items() if CONTROLS[name]["note"])
    return View(choices, look, fixed, {}, runs, a, b, alone(look.pinned, a, fixed).runs[0], note)


# ---- the rows of the bars


def _row(strategy: str, run: Run, card: int | None, records: Sequence[RunRecord]) -> dict[str, Any]:
    """One line of the bars: simulated, and the last run that was measured with the same settings."""
    found = outcome(run)
    step, peak = found.step, found.peak
    over = max(0, peak - card) if peak and card else 0
    return {
        "name": strategy, "strategy": strategy,
        "memory": [[name, nbytes] for name, nbytes in (found.memory or {}).items() if nbytes], "peak": peak,
        "over": over, "peak_words": f"{size(peak)}: {size(over)} over" if over else size(peak) if peak else "",
        "why_no_memory": found.why_no_memory, "why_no_step": found.why_no_step,
        "step": [step.computing, step.hidden, step.exposed, step.optimizer] if step else None,
        "step_s": step.total if step else None, "step_words": step.words if step else "",
        "measured": None if isinstance(run, PlanSpec) else _measured(run, records),
        "here": None if isinstance(run, PlanSpec) else _here(run, records),
        "bands": _bands(run, found) if type(run) is PlanSpec else [None, None],  # known runs are of published models
    }  # fmt: skip


def _bands(run: PlanSpec, found: Outcome) -> list[dict[str, Any]]:
    """Of memory and step on GPUs: the ends of the band of known runs, and the band in words."""
    memory, speed = memory_band(run), speed_band(run)
    step_s = found.step.total if found.step else 0.0
    return [
        {"ends": ends, "words": f"{words(ends[0])} to {words(ends[1])}", "of": of}
        for ends, words, of in (
            (memory.around(found.peak or 0), size, memory.words),
            ([step_s / speed.high, step_s / speed.low], seconds, speed.words),
        )
    ]


def _measured(run: RunSpec, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """Peak and median step of the last record with the settings of the run; None where it was not measured."""
    wanted = {name: getattr(run, name) for name in _SETTINGS} | {"model": name_of(run.model)}
    for record in reversed(records):
        if record.spec.get("engine") == "lab" and {name: record.spec.get(name) for name in _SETTINGS} == wanted:
            peak, step = record.summary.peak_memory_bytes.total, record.summary.step_time_s.median
            return {"peak": peak, "step_s": step, "peak_words": size(peak), "step_words": seconds(step)}
    return None


def _here(run: RunSpec, records: Sequence[RunRecord]) -> dict[str, Any] | None:
    """The step on this machine of a model of one's own, from the last measured run that tells it; None without one."""
    if not run.own_model:
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
    if found is None:
        return {"side": side, "at": None, "words": f"{side} waits at every speed"}
    at, remains_s = found
    if at == ends[0]:
        return {"side": side, "at": at, "words": f"{side} hidden at every speed"}
    least = LinkSpec("", float(f"{at:.3g}"), 0.0).words
    words = f"{side} from {least}: only the ends exposed, {seconds(remains_s)}"
    return {"side": side, "at": at, "words": words, "more": _REMAINS}


# ---- A beside B


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
        near = "within 10 %" if abs(off) <= 0.1 else f"{percent(abs(off))} too {'much' if off > 0 else 'little'}"
        parts.append(f"You said {size(memory)} for B: it needs {size(b.peak)} ({near}).")
    return " ".join(parts)


def difference(a: Outcome, b: Outcome, names: tuple[str, str], precision: str = "fp32") -> str:
    """What B takes beside A, in one sentence each on memory, step and messages."""
    parts = []
    if a.peak and b.peak:
        than = "as" if a.peak == b.peak else "than"
        needs = f"needs {size(b.peak)} a rank, {_beside(a.peak, b.peak, size, 'less', 'more', 'much')}"
        parts.append(f"B, {names[1]}, {needs} {than} A, {names[0]}.")
    if a.step and b.step:
        longer = _beside(a.step.total, b.step.total, seconds, "shorter", "longer", "long")
        parts.append(f"Its step takes {seconds(b.step.total)}, {longer}.")
    if a.sent and b.sent:
        times = f"{b.sent / a.sent:.2g}"
        often = "as much" if times == "1" else f"{times} times as much"
        often += " (gathers in bf16, reductions in fp32)" if precision == "bf16" and a.sent != b.sent else ""
        if a.step and b.step:
            often += f", and {seconds(b.step.exposed)} are exposed (A: {seconds(a.step.exposed)})"
        parts.append(f"It sends {often}.")
    return " ".join(parts)


def _beside(first: float, second: float, say: Callable[[float], str], less: str, more: str, as_: str) -> str:
    """`141 MB (38 %) less`, or `as much`."""
    if first == second:
        return f"as {as_}"
    part = abs(second / first - 1)
    share = f" ({percent(part)})" if part >= _LEAST else ""
    return f"{say(abs(second - first))}{share} {less if second < first else more}"


# ---- what would change if


def what_if(choices: Choices, strategy: str, fixed: Fixed) -> list[dict[str, Any]]:
    """Each control of a run alone at another value, predicted and simulated: a row for each that changes something,
    with its words, the choices that it sets, and the changes of speed, memory and bytes sent. What fits the card comes
    first, the fastest before the others; [] where a choice is wrong.
    """
    runs = alone(choices, strategy, fixed).runs
    if not runs:
        return []
    own, settings = own_model(choices, fixed), dict(vars(choices))
    if own and not reads_text(own):
        del settings["tokens"]  # its batches are its own
    rows = [
        row
        for edit in edits(settings)
        for run in alone(replace(choices, **{edit.setting: edit.value}), strategy, fixed).runs
        if (row := _change(edit.setting, edit.value, choices, outcome(runs[0]), outcome(run)))
    ]
    return sorted(rows, key=lambda row: (not row["fits"], -row["gain"], row["peak"]))


def _change(name: str, value: Any, now: Choices, before: Outcome, after: Outcome) -> dict[str, Any]:
    """One change as words; {} where nothing changes, or nothing of it is known."""
    work, card = value / now.tokens if name == "tokens" else 1.0, parse_card(now.card)
    gain = before.step.total * work / after.step.total - 1 if before.step and after.step else 0.0
    lighter = after.peak / before.peak - 1 if before.peak and after.peak else 0.0
    if max(abs(gain), abs(lighter)) < _LEAST:
        return {}
    return {
        "words": CONTROLS[name]["note"].format(value), "choices": {name: value}, "gain": gain, "peak": after.peak or 0,
        "fits": card is None or after.peak is None or after.peak <= card,
        "speed": _signed(gain) if after.step else "", "step": seconds(after.step.total) if after.step else "",
        "memory": f"{size(after.peak)} ({_signed(lighter)})" if after.peak else after.why_no_memory,
        "sent": size(after.sent),
    }  # fmt: skip


def _signed(part: float) -> str:
    """`+12 %`, `-3 %`, `equal`."""
    return "equal" if abs(part) < _LEAST else f"{'+' if part > 0 else '−'}{percent(abs(part))}"


# ---- a recorded job beside measured runs


def job_words(job: RunRecord, records: Sequence[RunRecord]) -> str:
    """What the job took, and the fastest run of the lab with as many ranks that is faster beyond the spread of both.

    Runs behind an emulated link do not count: the job had none.
    """
    step, peak = job.summary.step_time_s, job.summary.peak_memory_bytes.total
    took = " and ".join([f"{step_of(view(job))} a step"] * bool(step.median) + [size(peak)] * bool(peak))
    name, ranks = job.spec.get("job") or job.path.name, plural(job.spec["world_size"], "rank")
    told = f"Your job ({name}, {job.spec['engine']} {job.spec['strategy']}, {ranks}) took {took or 'no timed step'}"
    alike = [each for each in records if each.status == "finished" and _comparable(each, job)]
    if not alike:
        return f"{told}; measure runs of {ranks} without a link to see them beside it."
    for each in (job, *alike):
        if each.summary.short_of_cores:
            return f"{told}. {core_sentence(each.summary.cpu_share or 0.0, 'your job' if each is job else '')}"
    faster = [each for each in alike if is_below(each.summary.step_time_s, step)]
    if not faster:
        return f"{told}; no measured run of the lab is faster beyond the spread of the steps."
    best = view(min(faster, key=lambda each: each.summary.step_time_s.median or 0.0))
    units = (best.environment.get("workload") or {}).get("units") or best.spec.get("units")
    memory = f" and {size(best.peak)}" if best.peak else ""
    less = percent(1 - (best.step_median or 0.0) / (step.median or 1.0))
    return f"{told}; {best.strategy} in units of {units} takes {step_of(best)}{memory} in the lab, {less} less."


def _comparable(record: RunRecord, job: RunRecord) -> bool:
    spec = record.spec
    return (
        spec.get("engine") == "lab" and not any(spec.get(name) for name in ("job", "link", "emulate"))
        and spec.get("world_size") == job.spec.get("world_size")
    )  # fmt: skip
