"""Checks of a spec: what each field may hold stands with the field, and a condition between fields is a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from fsdplab.common.errors import UserError
from fsdplab.common.fields import refusal
from fsdplab.common.machine import why_no_ranks
from fsdplab.common.names import STRATEGY_ROWS
from fsdplab.common.words import did_you_mean, squeezed

Words = str | Callable[[Any], str]


class SpecError(UserError, ValueError):
    """An invalid run; the message is one line: what happened, got, expected, what to do.

    `fields` are those whose change would mend it, the likeliest first; () where no field is to blame.
    """

    def __init__(self, message: str, *fields: str) -> None:
        super().__init__(message)
        self.fields = fields

    @property
    def field(self) -> str:
        """The field to blame; "" where there is none."""
        return self.fields[0] if self.fields else ""


@dataclass(frozen=True)
class Rule:
    """A condition that a spec must fulfil, and the two halves of the error where it does not.

    `message` and `remedy` are functions of the spec, or templates in which `{s.units}` is a field or property of it.
    """

    fields: tuple[str, ...]
    holds: Callable[[Any], bool]
    message: Words
    remedy: Words

    def check(self, spec: object) -> None:
        """Raise SpecError unless the condition is fulfilled."""
        if not self.holds(spec):
            halves = (_words(self.message, spec), _words(self.remedy, spec))
            raise SpecError("; ".join(half for half in halves if half), *self.fields)


@dataclass(frozen=True)
class Readable:
    """A condition that `read` checks by reading fields: one of these errors is the error of the spec."""

    fields: tuple[str, ...]
    read: Callable[[Any], object]
    errors: tuple[type[Exception], ...]

    def check(self, spec: object) -> None:
        """Raise SpecError where the fields cannot be read."""
        try:
            self.read(spec)
        except self.errors as error:
            raise SpecError(str(error), *self.fields) from error


Rules = Sequence[Rule | Readable]


def _words(words: Words, spec: object) -> str:
    return words.format(s=spec) if isinstance(words, str) else words(spec)


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A dataclass whose fields and rules are checked when it is made; a class that inherits has the rules of all."""

    RULES: ClassVar[Rules] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            check_value(field.name, getattr(self, field.name), field.default, **field.metadata)
        # from the oldest class to this one: rules of the parts before those between them
        for part in reversed(type(self).__mro__):
            for rule in vars(part).get("RULES", ()):
                rule.check(self)


def check_value(name: str, value: object, default: object, *, most: int | None = None, **expected: Any) -> None:
    """Raise SpecError unless the value of a field is what its `option` expects (see `refusal`)."""
    # a limit from above is far from what anybody gives: it is named where it is passed, and nowhere else
    wanted = refusal(value, default, **expected) or refusal(value, default, most=most, **expected)
    if not wanted:
        return
    words = [str(word) for word in expected.get("one_of", ())]
    if words:
        raise SpecError(f"unknown {name} {value!r}{near_matches(value, words)}; expected {wanted}", name)
    raise SpecError(f"{name} is {value!r:.40}; expected {wanted}", name)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise SpecError unless the value is a whole number of at least `least`."""
    check_value(name, value, least, least=least)


def check_ranks_run_here() -> None:
    """Raise SpecError on a system that runs no ranks."""
    if (refused := why_no_ranks()) is not None:
        raise SpecError(refused)


def check_same(what: str, specs: Sequence[object], names: Sequence[str]) -> None:
    """Raise SpecError unless these fields have one value each in all specs."""
    for name in names:
        values = sorted({str(getattr(spec, name)) for spec in specs})
        if len(values) > 1:
            raise SpecError(
                f"{what} must train the same thing, but {name} is {' and '.join(values)}; give all of them the same"
                f" {name}",
                name,
            )


def near_matches(got: object, expected: Sequence[str]) -> str:
    """Return what was probably meant, in brackets; empty where nothing is near. Who writes zero3 means full_shard."""
    for row in STRATEGY_ROWS.values():
        if row.name in expected and row.known_as and squeezed(str(got)) == squeezed(row.known_as):
            return f" ({row.known_as} is {row.name} here)"
    return did_you_mean(got, expected)
