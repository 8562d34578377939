"""What would change if: each control of a run alone at another value, predicted and simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fsdplab.common.sizes import parse_card, percent, seconds, size
from fsdplab.sessions.changes import edits
from fsdplab.workloads.own.sources import reads_text

from .a_beside_b import LEAST
from .choices import CONTROLS, Choices, Fixed, alone, own_model
from .messages import Change
from .outcomes import Outcome, outcome


def what_if(choices: Choices, strategy: str, fixed: Fixed) -> list[Change]:
    """A row for each control that changes something: its words, the choices that it sets, and the changes of speed,
    memory and bytes sent. What fits the card comes first, the fastest before the others; [] where a choice is wrong.
    """
    runs = alone(choices, strategy, fixed).runs
    if not runs:
        return []
    before = outcome(runs[0])
    changes = []
    # a change of less than half a percent, of speed and memory, is left out
    for changed, after in _changed(choices, strategy, fixed):
        gain, lighter = _gains(choices, changed, before, after)
        if max(abs(gain), abs(lighter)) >= LEAST:
            changes.append(_change(choices, changed, after, gain, lighter))
    return sorted(changes, key=_order)


def _order(change: Change) -> tuple[bool, float, int]:
    """Return the key by which changes are sorted: what fits the card first, then the fastest, then the smallest."""
    does_not_fit = not change["fits"]
    slower = -change["gain"]
    return does_not_fit, slower, change["peak"]


def _changed(choices: Choices, strategy: str, fixed: Fixed) -> Iterator[tuple[dict[str, Any], Outcome]]:
    """Each change that a run can have, and what the run then takes."""
    settings = dict(vars(choices))
    own = own_model(choices, fixed)
    if own and not reads_text(own):
        del settings["tokens"]  # its batches are its own
    for edit in edits(settings):
        changed = {edit.setting: edit.value}
        # none where the changed choices are wrong
        request = alone(replace(choices, **changed), strategy, fixed)
        for run in request.runs:
            yield changed, outcome(run)


def _gains(choices: Choices, changed: dict[str, Any], before: Outcome, after: Outcome) -> tuple[float, float]:
    """The changes of tokens a second and of the peak, as parts; 0 where one is not known."""
    tokens = changed.get("tokens", choices.tokens)
    times_the_tokens = tokens / choices.tokens
    # twice the tokens in 1.6 times the time: 25 % more tokens a second
    gain = 0.0
    if before.step and after.step:
        gain = before.step.total * times_the_tokens / after.step.total - 1
    lighter = 0.0
    if before.peak and after.peak:
        lighter = after.peak / before.peak - 1
    return gain, lighter


def _change(choices: Choices, changed: dict[str, Any], after: Outcome, gain: float, lighter: float) -> Change:
    """Return a row: what is changed, and what that brings, in numbers and in words."""
    # each edit changes one choice
    ((name, value),) = changed.items()
    card = parse_card(choices.card)
    fits = True
    if card is not None and after.peak is not None:
        fits = after.peak <= card
    note = CONTROLS[name].note
    change = Change(
        words=note.format(value),
        choices=changed,
        gain=gain,
        peak=after.peak or 0,
        fits=fits,
        speed="",
        step="",
        memory=after.why_no_memory,
        sent=size(after.sent),
    )
    if after.step:
        change["speed"] = _signed(gain)
        change["step"] = seconds(after.step.total)
    if after.peak:
        change["memory"] = f"{size(after.peak)} ({_signed(lighter)})"
    return change


def _signed(part: float) -> str:
    """`+12 %`, `-3 %`, `equal`."""
    if abs(part) < LEAST:
        return "equal"
    sign = "+" if part > 0 else "−"
    return f"{sign}{percent(abs(part))}"
