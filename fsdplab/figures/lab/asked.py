"""What the page asks for, as changes of the choices and as a look; what it may not ask for is ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from fsdplab.planning.links import LinkError, parse_link
from fsdplab.sessions.spec import STRATEGIES

from .a_beside_b import Guess
from .answers import Look
from .choices import CONTROLS, PRESETS, Choices
from .messages import Asked


def changes_of(asked: Mapping[str, Any], now: Choices) -> dict[str, Any]:
    """The choices that the page wants otherwise; another preset brings its own for all.

    >>> changes_of({"prefetch": 2, "model": "gpt-20m", "colour": "red"}, Choices())
    {'prefetch': 2}
    """
    wanted = asked
    preset = PRESETS.get(asked.get("preset", now.preset))
    if preset and preset.choices.preset != now.preset:
        # the page's controls still have the values of the machine before
        wanted = vars(preset.choices)
    changes = {}
    for name in CONTROLS:
        if name not in wanted:
            continue
        value = wanted[name]
        if isinstance(value, list):  # JSON has no tuples
            value = tuple(value)
        if value != getattr(now, name):
            changes[name] = value
    return changes


def look_of(asked: Mapping[str, Any], before: Look, now: Choices) -> Look:
    """What the page looks at: strategies that do not exist are ignored, and Pin keeps the choices as they are now."""
    sides = {side: asked[side] for side in ("a", "b") if asked.get(side) in STRATEGIES}
    fields = dict(asked.get("guess") or {})
    # other names than a guess's are ignored
    guess = Guess(**{name: value for name, value in fields.items() if name in Guess.__annotations__})
    # a pin that is set keeps the choices with which it was set
    pinned = None
    if asked.get("pin"):
        pinned = before.pinned or now
    return replace(before, **sides, pinned=pinned, guess=guess, more=bool(asked.get("more")))


def moved(asked: Mapping[str, Any], choices: Choices, look: Look) -> tuple[dict[str, Any], Look]:
    """The choices that the page has changed, and what it looks at then; another preset brings its own A and B."""
    look = look_of(asked, look, choices)
    changes = changes_of(asked.get("choices", {}), choices)
    preset = PRESETS.get(changes.get("preset", ""))
    if preset:
        a, b = preset.sides
        look = replace(look, a=a, b=b)
    return changes, look


def as_asked(look: Look, choices: Choices) -> Asked:
    """What was asked for, in the page's words, as its controls show it."""
    return Asked(
        a=look.a,
        b=look.b,
        guess=asdict(look.guess),
        more=look.more,
        choices=asdict(choices),
        pin=look.pinned is not None,
    )


def bandwidth_of(choices: Choices) -> float | None:
    """Bytes per second of the link, for the slider; None without one."""
    try:
        return parse_link(choices.link).bytes_per_s
    except LinkError:
        return None
