"""The verdict of a check: the first difference between two values, and feedback for the learner.

Pure functions and frozen records, without ranks and notebook, so every sentence of a failed check can be tested.
"""

from __future__ import annotations

import html
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

from fsdplab.common.page_colours import readable

from .quantities import plain

if TYPE_CHECKING:
    import torch


_LOOKS = {"passed": ("#2a9d5c", "passed"), "failed": ("#c8553d", "not yet"), "untouched": ("#767676", "open")}


@dataclass(frozen=True)
class Difference:
    """The first place where a returned value differs: which tensor, how (type, shape, dtype, value), which index."""

    tensor: str
    problem: str
    expected: str
    got: str
    index: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Feedback:
    """Why a check failed: what was expected and got, where (rank, step, what of it, first index), and the likely cause.

    `untouched`: the learner has not tried yet, so that nothing is wrong.
    """

    headline: str
    expected: str
    got: str
    cause: str
    rank: int | None = None
    step: str | None = None
    tensor: str | None = None
    index: tuple[int, ...] | None = None
    untouched: bool = False

    def rows(self) -> Iterator[tuple[str, str]]:
        """Yield (label, text) pairs in reading order, leaving out what does not apply."""
        if self.rank is not None:
            yield "rank", str(self.rank)
        if self.step:
            yield "step", self.step
        if self.tensor:
            yield "what", self.tensor
        if self.index is not None:
            yield "first differing index", str(list(self.index))
        for label, text in (("expected", self.expected), ("got", self.got), ("likely cause", self.cause)):
            if text:
                yield label, text


@dataclass(frozen=True, repr=False)
class Verdict:
    """The outcome of one check, ready to show; `feedback` is None where it passed."""

    exercise: str
    feedback: Feedback | None
    note: str = ""
    hints: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return self.feedback is None

    @property
    def _look(self) -> tuple[str, str]:
        """Return the colour and the word of the outcome."""
        if self.feedback is None:
            return _LOOKS["passed"]
        if self.feedback.untouched:
            return _LOOKS["untouched"]
        return _LOOKS["failed"]

    def __str__(self) -> str:
        if self.feedback is None:
            return f"{self.exercise}: passed. {self.note}".strip()
        rows = list(self.feedback.rows())
        # labels in a column as wide as the longest of them
        width = max((len(label) for label, _ in rows), default=0)
        lines = [f"{self.exercise}: {self._look[1]}. {self.feedback.headline}"]
        for label, text in rows:
            lines.append(f"  {label:<{width}}  {_hanging(text, width + 4)}")
        lines += [*self.hints, self.note]
        return "\n".join(lines).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour, word = self._look
        headline = self.note
        if self.feedback is not None:
            headline = self.feedback.headline
        parts = [f"<b style='color:{readable(colour)}'>{self.exercise}: {word}.</b> {with_code(headline)}"]
        if self.feedback is not None:
            parts.append(_html_rows(self.feedback))
            for line in filter(None, (*self.hints, self.note)):
                parts.append(f"<div style='margin-top:4px'>{with_code(line)}</div>")
        return f"<div style='border-left:4px solid {colour};padding:4px 12px'>{''.join(parts)}</div>"


def _hanging(text: str, indent: int) -> str:
    """Return a text whose further lines begin below its first."""
    return text.replace("\n", "\n" + " " * indent)


def with_code(text: str) -> str:
    """Return text as HTML, with what stands between backticks as code.

    ``with_code("`a<b`") == "<code>a&lt;b</code>"``.
    """
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _html_rows(feedback: Feedback) -> str:
    """Return a table of the feedback's rows; nothing where it has none."""
    cell = "style='text-align:left;vertical-align:top;padding:1px 12px 1px 0'"
    rows = []
    for label, text in feedback.rows():
        value = f"<span style='white-space:pre-wrap'>{with_code(text)}</span>"
        rows.append(f"<tr><td {cell}><i>{label}</i></td><td {cell}>{value}</td></tr>")
    if not rows:
        return ""
    return f"<table>{''.join(rows)}</table>"


def first_difference(
    expected: Any, got: Any, tolerance: float = 0.0, name: str = "the returned value"
) -> Difference | None:
    """Return the first difference between two values, or None.

    The values are tensors, numbers, texts, and lists, tuples and dicts of them. Numbers and floating tensors may differ
    by `tolerance`, relative to the largest expected magnitude:
    `first_difference(torch.tensor([1., 2.]), torch.tensor([1., 3.])).index == (1,)`.
    """
    # numpy's numbers first: an np.int64(3) is as right as 3
    got = plain(got)
    if _is_tensor(expected):
        return _tensor_difference(expected, got, tolerance, name)
    if isinstance(expected, dict):
        return _dict_difference(expected, got, tolerance, name)
    if isinstance(expected, (list, tuple)):
        return _sequence_difference(expected, got, tolerance, name)
    # True is an int to Python, and must not pass for 1
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        return _number_difference(expected, got, tolerance, name)
    if type(expected) is not type(got):
        return _type_difference(expected, got, name)
    if expected == got:
        return None
    return Difference(name, "value", repr(expected), repr(got))


def _type_difference(expected: Any, got: Any, name: str) -> Difference:
    """Return a difference of kind, in words."""
    return Difference(name, "type", _described(expected), _described(got))


def _number_difference(expected: float, got: Any, tolerance: float, name: str) -> Difference | None:
    """Return how a number differs; a tensor of one element is a number too, and NaN equals NaN."""
    if _is_tensor(got) and got.numel() == 1:
        got = got.item()
    both_nan = expected != expected and got != got
    is_number = isinstance(got, (int, float))
    if is_number and (both_nan or abs(got - expected) <= tolerance * abs(expected)):
        return None
    return Difference(name, "value", repr(expected), repr(got))


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Return whether a value is a tensor, without importing torch, which takes two seconds.

    As long as nothing else has imported it, no value is a tensor.
    """
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)


def _tensor_difference(expected: torch.Tensor, got: Any, tolerance: float, name: str) -> Difference | None:
    """Return how a tensor differs: its shape, its dtype, or the first element that does."""
    if not _is_tensor(got):
        return _type_difference(expected, got, name)
    # the shape first, since values of another shape cannot be compared
    for problem in ("shape", "dtype"):
        want, have = getattr(expected, problem), getattr(got, problem)
        if want != have:
            return Difference(name, problem, _plain(want), _plain(have))
    differs = _unequal(expected, got, tolerance)
    if not differs.any():
        return None
    # the first place, row by row, such as (1, 0)
    index = tuple(differs.nonzero()[0].tolist())
    return Difference(name, "value", _plain(expected[index].item()), _plain(got[index].item()), index)


def _unequal(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return where two tensors of one shape and dtype differ by more than the tolerance; NaN equals NaN."""
    both_nan = (expected != expected) & (got != got)
    if not expected.is_floating_point() or not tolerance:
        return (expected != got) & ~both_nan
    allowed = 0.0
    if expected.numel():  # max() of an empty tensor is an error
        allowed = tolerance * expected.nan_to_num(0.0).abs().max().item()
    # `not <=` instead of `>`: a NaN on one side differs too
    return ~((expected - got).abs() <= allowed) & ~both_nan


def _dict_difference(expected: dict[Any, Any], got: Any, tolerance: float, name: str) -> Difference | None:
    """Return how a dict differs: in its keys, or in the first item that does."""
    if not isinstance(got, dict):
        return _type_difference(expected, got, name)
    # keys first: a missing one would be a KeyError below
    expected_keys, got_keys = list(map(str, sorted(expected))), list(map(str, sorted(got)))
    if expected_keys != got_keys:
        return Difference(name, "keys", ", ".join(expected_keys), ", ".join(got_keys))
    for key in expected:
        difference = first_difference(expected[key], got[key], tolerance, f"{name}[{key!r}]")
        if difference is not None:
            return difference
    return None


def _sequence_difference(expected: Any, got: Any, tolerance: float, name: str) -> Difference | None:
    """Return how a list or tuple differs: in its length, or in the first item that does."""
    if not isinstance(got, (list, tuple)):
        return _type_difference(expected, got, name)
    # lengths first: the items of a longer list would be compared with others' places
    if len(expected) != len(got):
        return Difference(name, "length", f"{len(expected)} items", f"{len(got)} items")
    for place, (expected_item, got_item) in enumerate(zip(expected, got, strict=True)):
        difference = first_difference(expected_item, got_item, tolerance, f"{name}[{place}]")
        if difference is not None:
            return difference
    return None


def _described(value: Any) -> str:
    """Return what a value is, in a few words: `a tensor of shape [2, 3]`."""
    if value is None:
        return "None"
    if _is_tensor(value):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, str):
        return f"{type(value).__name__} {str(value)[:60]!r}"
    return f"a {type(value).__name__}"


def _plain(value: Any) -> str:
    """Return a shape as a list, and a dtype without `torch.`."""
    if isinstance(value, tuple):
        return str(list(value))
    return str(value).removeprefix("torch.")
