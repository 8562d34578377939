"""What would change if: each control of a run alone at another value, predicted and simulated, the next best first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdplab.common.sizes import percent, seconds, size
from fsdplab.sessions.changes import edits

from .answers import Outcome, outcome
from .choices import CONTROLS, Choices, Fixed, alone, chosen_own, parse_card

_LEAST = 0.005  # of a step or of the memory: less is no change


def what_if(choices: Choices, strategy: str, fixed: Fixed) -> list[dict[str, Any]]:
    """A row for each control that changes something: its words, the choices that it sets, and the changes of speed,
    memory and bytes sent. What fits the card comes first, the fastest before the others; [] where a choice is wrong.
    """
    runs = alone(choices, strategy, fixed).runs
    if not runs:
        return []
    now, card = outcome(runs[0]), parse_card(choices.card)
    own, settings = chosen_own(choices, fixed), dict(vars(choices))
    if own and not own.reads_text:
        del settings["tokens"]  # its batches are its own
    rows = [
        row
        for edit in ({each.setting: each.value} for each in edits(settings))
        for run in alone(replace(choices, **edit), strategy, fixed).runs
        if (row := _row(edit, choices, now, outcome(run), card))
    ]
    return sorted(rows, key=lambda row: (not row["fits"], -row["gain"], row["peak"]))


def _row(edit: dict[str, Any], now: Choices, before: Outcome, after: Outcome, card: int | None) -> dict[str, Any]:
    """One change as words; {} where nothing changes, or nothing of it is known."""
    ((name, value),) = edit.items()
    work = edit.get("tokens", now.tokens) / now.tokens
    gain = before.step.total * work / after.step.total - 1 if before.step and after.step else 0.0
    lighter = after.peak / before.peak - 1 if before.peak and after.peak else 0.0
    if max(abs(gain), abs(lighter)) < _LEAST:
        return {}
    return {
        "words": CONTROLS[name]["note"].format(value), "choices": edit, "gain": gain, "peak": after.peak or 0,
        "fits": card is None or after.peak is None or after.peak <= card,
        "speed": _change(gain) if after.step else "", "step": seconds(after.step.total) if after.step else "",
        "memory": f"{size(after.peak)} ({_change(lighter)})" if after.peak else after.why_no_memory,
        "sent": size(after.sent),
    }  # fmt: skip


def _change(part: float) -> str:
    """`+12 %`, `-3 %`, `equal`."""
    if abs(part) < _LEAST:
        return "equal"
    return f"{'+' if part > 0 else '−'}{percent(abs(part))}"
