"""What run.json may hold: the type of every field that somebody reads, so that a damaged record is refused when it is
read and never becomes a wrong figure or an error far from its cause.

Fields that are not listed are left as they are: a later version may write more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Check = Callable[[Any], str | None]  # what was expected, where a value is not that; None for a sound one
_MOST, _MOST_FLOAT = 2**63, 1e100
_LONGEST = 10_000  # characters of a text


def _whole(value: Any) -> str | None:
    sound = isinstance(value, int) and not isinstance(value, bool) and -_MOST <= value < _MOST
    return None if sound else "a whole number"


def _number(value: Any) -> str | None:
    # a loss that diverges, or the learning rate that did it, is large, but a whole number counts something
    sound = _whole(value) is None or isinstance(value, float) and abs(value) < _MOST_FLOAT
    return None if sound else "a number"


def _text(value: Any) -> str | None:
    sound = isinstance(value, str) and len(value) <= _LONGEST
    return None if sound else "a text"


def _long_text(value: Any) -> str | None:
    return None if isinstance(value, str) else "a text"


def _yes_or_no(value: Any) -> str | None:
    return None if isinstance(value, bool) else "true or false"


def _scalar(value: Any) -> str | None:
    """A setting: a text, a number, true, false or null."""
    if value is None or isinstance(value, bool):
        return None
    return None if _number(value) is None or _text(value) is None else "a text, a number, true, false or null"


def _maybe(check: Check) -> Check:
    return lambda value: None if value is None else _or_null(check(value))


def _list_of(check: Check) -> Check:
    def checked(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list"
        expected = next((found for each in value if (found := check(each))), None)
        return f"a list, each {expected}" if expected else None

    return checked


def _dict_of(check: Check) -> Check:
    """An object with any names, whose values are alike."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object"
        expected = next((found for each in value.values() if (found := check(each))), None)
        return f"an object, each value {expected}" if expected else None

    return checked


def _fields(required: Mapping[str, Check], **others: Check) -> Check:
    """An object with certain fields; of others it may have any."""

    def checked(value: Any) -> str | None:
        if not isinstance(value, dict):
            return "an object"
        for name, check in {**required, **others}.items():
            if name not in value:
                if name in required:
                    return f"an object with {name}"
                continue
            if (expected := check(value[name])) is not None:
                return f"{name}: {expected}, got {shown(value[name])}"
        return None

    return checked


def shown(value: Any) -> str:
    """A value in an error's one line."""
    words = repr(value)
    return words if len(words) <= 60 else f"{words[:60]}..."


def _or_null(expected: str | None) -> str | None:
    return None if expected is None else f"{expected} or null"


_AMOUNTS = _dict_of(_maybe(_number))
_LINK = _fields({}, name=_maybe(_text), bytes_per_s=_maybe(_number), latency_s=_maybe(_number), queues=_maybe(_whole))
FIELDS: dict[str, Check] = {
    "spec": _fields({"strategy": _text, "engine": _text, "world_size": _whole}),
    "environment": _fields({}, device=_maybe(_text)),
    "status": _text,
    "failure": _maybe(_fields({}, message=_maybe(_long_text), traceback=_maybe(_long_text))),
    "summary": _fields(
        {},
        step_time_s=_maybe(_AMOUNTS),
        again_s=_maybe(_number),
        in_turns=_maybe(_yes_or_no),
        tokens_per_s=_maybe(_number),
        peak_memory_bytes=_maybe(_fields({}, total=_maybe(_number), by_category=_maybe(_AMOUNTS))),
        memory_start_ns=_maybe(_AMOUNTS),
        peak_by_rank=_maybe(_list_of(_maybe(_number))),
        resident_growth_by_rank=_maybe(_list_of(_maybe(_number))),
        comm=_maybe(_AMOUNTS),
        formula_bytes_per_step=_maybe(_number),
        losses=_maybe(_list_of(_maybe(_number))),
        card=_maybe(_fields({}, bytes=_maybe(_number), exceeded=_maybe(_yes_or_no))),
        link=_maybe(
            _fields(
                {}, name=_maybe(_text), bytes_per_s=_maybe(_number), latency_s=_maybe(_number), across=_maybe(_LINK)
            )
        ),
        profile=_maybe(_fields({}, steps=_maybe(_number), overhead=_maybe(_number), source=_maybe(_text))),
        nodes=_maybe(_AMOUNTS),
    ),
    "provenance": _dict_of(_text),
    "rows": _dict_of(_whole),
}


def wrong_in(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the content of a run.json: `"summary: losses: a list, each a number, got 'x'"`; None if
    nothing is.
    """
    for name, check in FIELDS.items():
        if (expected := check(content[name])) is not None:
            return f"{name}: expected {expected}" + ("" if ", got " in expected else f", got {shown(content[name])}")
    spec = content["spec"]
    odd = next((f"{name}: expected {found}" for name, each in spec.items() if (found := _scalar(each))), None)
    return f"spec: {odd}" if odd else None
