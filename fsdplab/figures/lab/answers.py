"""What the instrument draws of a set of choices: the answer, the marks on the link's slider, and what is unfolded.

All are functions of the choices, of what is looked at, and of the records so far.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fsdplab.common.sizes import parse_card
from fsdplab.records import RunRecord

from .a_beside_b import Guess, difference, guessed_bytes, judge
from .bars import crossover_mark, memory_title, row_of, step_title
from .choices import CONTROLS, PRESETS, Choices, Fixed, Preset, Run, alone, check
from .copies import copies
from .messages import Answer, Drawn, Hidden, Mark, More, Refused, Row, Timeline
from .outcomes import outcome, recorded_model, run_of
from .what_if import what_if


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
    first: Any = None  # A's run: one of `runs`, or with the choices that it was pinned with
    note: str = ""

    @property
    def hides(self) -> bool:
        """Whether nothing may be shown: a choice is wrong, or the answer waits for a guess."""
        guess = self.look.guess
        return bool(self.errors) or (guess.on and not guess.given)

    @property
    def name(self) -> str:
        """What A is called."""
        return f"{self.a} ({self.note})" if self.note else self.a

    def answer(self, records: Sequence[RunRecord] = ()) -> Answer:
        """Return what the instrument draws; only `errors` where a choice is wrong, and no figures while the answer
        waits for a guess.
        """
        guess = self.look.guess
        if self.errors:
            return Refused(errors=dict(self.errors))
        if not guess.on:
            return self._drawn(records)
        if not guess.given:
            return self._hidden({})
        unit = self._preset.guess_unit
        try:
            a = outcome(self.first)
            b = outcome(self.runs[self.b])
            judged = judge(guess, a, b, unit)
        except ValueError as wrong:
            return self._hidden({"guess": str(wrong)})
        drawn = self._drawn(records)
        drawn["judged"] = judged
        drawn["guessed"] = guessed_bytes(guess.memory, unit)
        return drawn

    def _hidden(self, errors: dict[str, str]) -> Hidden:
        sides = f"A is {self.name}, B is {self.b}"
        asks = f"Before you look: {sides}. Whose step is shorter, and how much memory does B need?"
        return Hidden(hidden=True, errors=errors, a=self.a, b=self.b, asks=asks, unit=self._preset.guess_unit)

    def _drawn(self, records: Sequence[RunRecord]) -> Drawn:
        card = parse_card(self.choices.card)
        rows: list[Row] = []
        # A with its old choices is above the strategies with the present ones
        if self.look.pinned:
            rows.append(self._pinned_row(card, records))
        for strategy, run in self.runs.items():
            rows.append(row_of(strategy, run, card, records))
        a = outcome(self.first)
        b = outcome(self.runs[self.b])
        names = (self.name, self.b)
        # the guess's verdict is filled in by `answer`, where there is one
        return Drawn(
            errors={},
            a=self.a,
            b=self.b,
            rows=rows,
            card=card,
            judged="",
            guessed=None,
            clock=self._preset.clock,
            memory_title=memory_title(rows, card),
            step_title=step_title(rows),
            difference=difference(a, b, names, self.choices.precision),
            timeline=self._timeline(),
        )

    def _pinned_row(self, card: int | None, records: Sequence[RunRecord]) -> Row:
        row = row_of(self.a, self.first, card, records)
        row["name"] = f"{self.a} (A)"
        row["pinned"] = True
        row["note"] = self.note or "as it is now"
        return row

    def _timeline(self) -> list[Timeline]:
        """The steps of A and of B, as far as they are known."""
        sides: list[tuple[str, str, Run]] = [("A", self.name, self.first), ("B", self.b, self.runs[self.b])]
        lanes = []
        for side, name, run in sides:
            predicted = outcome(run)
            step = predicted.step
            blocks = predicted.blocks
            if step and blocks:
                milliseconds = step.total * 1e3  # as the blocks are
                lanes.append(Timeline(side=side, name=name, step=milliseconds, **blocks))
        return lanes

    @property
    def _preset(self) -> Preset:
        return PRESETS[self.choices.preset]

    def marks(self) -> list[Mark]:
        """Where the crossovers of A and B stand on the link's slider. They take longer than all else, so they are sent
        after the answer.
        """
        if self.hides:
            return []
        ends = self._preset.links
        mark_of_a = crossover_mark("A", self.first, ends)
        mark_of_b = crossover_mark("B", self.runs[self.b], ends)
        return [mark_of_a, mark_of_b]

    def more(self) -> More:
        """What B would gain by other choices, and B as code; {} where neither is unfolded."""
        if self.hides or not self.look.more:
            return {}
        changes = what_if(self.choices, self.b, self.fixed)
        return More(b=self.b, what_if=changes, copies=copies(self.runs[self.b]))


def view_of(choices: Choices, look: Look, fixed: Fixed) -> View:
    """The view of choices; what the code of a model of one's own raises is one of the errors."""
    request = check(choices, fixed)
    if request.errors:
        return View(choices, look, fixed, request.errors)
    # other engines allocate and order their messages in their own way, which is not simulated
    runs: dict[str, Run] = {}
    for run in request.runs:
        engine = getattr(run, "engine", "lab")  # plans have none
        if engine == "lab":
            runs[run.strategy] = run
    if not runs:
        words = "only runs of the lab's own engine are drawn here; choose it too"
        return View(choices, look, fixed, {"engines": words})
    # in the order of the controls
    strategies = [*runs]
    # all runs have one model, so one of them stands for all
    why_not = _why_not_recorded(runs[strategies[0]])
    if why_not:
        # the error is shown at the units where the reader has chosen them
        control = "model" if choices.units == "auto" else "units"
        return View(choices, look, fixed, {control: why_not})
    # a strategy that is no longer chosen makes room for the last one, as B, and the first one, as A
    b = look.b if look.b in runs else strategies[-1]
    if look.pinned:
        pinned_runs = alone(look.pinned, look.a, fixed).runs
        if pinned_runs:
            note = _differences(look.pinned, choices)
            return View(choices, look, fixed, {}, runs, look.a, b, pinned_runs[0], note)
        # wrong choices were pinned, which describe no run
        look = replace(look, pinned=None)
    a = look.a if look.a in runs else strategies[0]
    return View(choices, look, fixed, {}, runs, a, b, runs[a])


def _why_not_recorded(any_run: Run) -> str:
    """Why a model of one's own cannot be recorded; "" for the others, and where it can."""
    run = run_of(any_run)
    if run is None or not run.own_model:
        return ""
    # the recording, or in a string why there is none
    recording = recorded_model().recording_or_why(run)
    return recording if isinstance(recording, str) else ""


def _differences(pinned: Choices, now: Choices) -> str:
    """The choices that were pinned with another value than now: `prefetch 1, 150MB/s`."""
    notes = []
    for name, value in vars(pinned).items():
        note = CONTROLS[name].note
        if note and value != getattr(now, name):
            notes.append(note.format(value))
    return ", ".join(notes)
