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
        """(label, text) pairs in reading order, leaving out what does not apply."""
        index = None if self.index is None else str(list(self.index))
        rank = None if self.rank is None else str(self.rank)
        pairs = [("rank", rank), ("step", self.step), ("what", self.tensor), ("first differing index", index)]
        pairs += [("expected", self.expected), ("got", self.got), ("likely cause", self.cause)]
        return ((label, text) for label, text in pairs if text)


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
        state = "passed" if self.feedback is None else "untouched" if self.feedback.untouched else "failed"
        return _LOOKS[state]

    def __str__(self) -> str:
        if self.feedback is None:
            return f"{self.exercise}: passed. {self.note}".strip()
        width = max((len(label) for label, _ in self.feedback.rows()), default=0)
        rows = [f"  {label:<{width}}  {_hanging(text, width + 4)}" for label, text in self.feedback.rows()]
        return "\n".join(
            [f"{self.exercise}: {self._look[1]}. {self.feedback.headline}", *rows, *self.hints, self.note]
        ).rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        colour, word = self._look
        headline = self.note if self.feedback is None else self.feedback.headline
        parts = [f"<b style='color:{colour}'>{self.exercise}: {word}.</b> {with_code(headline)}"]
        if self.feedback is not None:
            parts.append(_html_rows(self.feedback))
            parts += [
                f"<div style='margin-top:4px'>{with_code(line)}</div>" for line in (*self.hints, self.note) if line
            ]
        return f"<div style='border-left:4px solid {colour};padding:4px 12px'>{''.join(parts)}</div>"


def _hanging(text: str, indent: int) -> str:
    return text.replace("\n", "\n" + " " * indent)


def with_code(text: str) -> str:
    """Text as HTML, with what stands between backticks as code: ``with_code("`a<b`") == "<code>a&lt;b</code>"``."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _html_rows(feedback: Feedback) -> str:
    cell = "style='text-align:left;vertical-align:top;padding:1px 12px 1px 0'"
    rows = [
        f"<tr><td {cell}><i>{label}</i></td><td {cell}><span"
        f" style='white-space:pre-wrap'>{with_code(text)}</span></td></tr>"
        for label, text in feedback.rows()
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def first_difference(
    expected: Any, got: Any, tolerance: float = 0.0, name: str = "the returned value"
) -> Difference | None:
    """The first difference between two values (tensors, numbers, texts, and lists, tuples, dicts of them), or None.

    Numbers and floating tensors may differ by `tolerance`, relative to the largest expected magnitude:
    `first_difference(torch.tensor([1., 2.]), torch.tensor([1., 3.])).index == (1,)`.
    """
    got = plain(got)
    if _is_tensor(expected):
        return _tensor_difference(expected, got, tolerance, name)
    if isinstance(expected, dict):
        return _dict_difference(expected, got, tolerance, name)
    if isinstance(expected, (list, tuple)):
        return _sequence_difference(expected, got, tolerance, name)
    if isinstance(expected, (int, float)) and not isinstance(expected, bool):
        got = got.item() if _is_tensor(got) and got.numel() == 1 else got
        both_nan = expected != expected and got != got
        same = isinstance(got, (int, float)) and (both_nan or abs(got - expected) <= tolerance * abs(expected))
        return None if same else Difference(name, "value", repr(expected), repr(got))
    if type(expected) is not type(got):
        return Difference(name, "type", _described(expected), _described(got))
    return None if expected == got else Difference(name, "value", repr(expected), repr(got))


def _is_tensor(value: Any) -> TypeGuard[torch.Tensor]:
    """Without importing torch, which takes two seconds: before anything else has, no value is a tensor."""
    loaded = sys.modules.get("torch")
    return loaded is not None and isinstance(value, loaded.Tensor)


def _tensor_difference(expected: torch.Tensor, got: Any, tolerance: float, name: str) -> Difference | None:
    if not _is_tensor(got):
        return Difference(name, "type", _described(expected), _described(got))
    for problem in ("shape", "dtype"):
        want, have = getattr(expected, problem), getattr(got, problem)
        if want != have:
            return Difference(name, problem, _plain(want), _plain(have))
    differs = _unequal(expected, got, tolerance)
    if not differs.any():
        return None
    index = tuple(differs.nonzero()[0].tolist())
    return Difference(name, "value", _plain(expected[index].item()), _plain(got[index].item()), index)


def _unequal(expected: torch.Tensor, got: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Where two tensors of one shape and dtype differ by more than the tolerance; NaN equals NaN."""
    both_nan = (expected != expected) & (got != got)
    if not expected.is_floating_point() or not tolerance:
        return (expected != got) & ~both_nan
    allowed = tolerance * expected.nan_to_num(0.0).abs().max().item() if expected.numel() else 0.0
    return ~((expected - got).abs() <= allowed) & ~both_nan


def _dict_difference(expected: dict[Any, Any], got: Any, tolerance: float, name: str) -> Difference | None:
    if not isinstance(got, dict):
        return Difference(name, "type", _described(expected), _described(got))
    if list(map(str, sorted(expected))) != list(map(str, sorted(got))):
        return Difference(name, "keys", ", ".join(map(str, sorted(expected))), ", ".join(map(str, sorted(got))))
    pairs = (first_difference(expected[key], got[key], tolerance, f"{name}[{key!r}]") for key in expected)
    return next((found for found in pairs if found), None)


def _sequence_difference(expected: Any, got: Any, tolerance: float, name: str) -> Difference | None:
    if not isinstance(got, (list, tuple)):
        return Difference(name, "type", _described(expected), _described(got))
    if len(expected) != len(got):
        return Difference(name, "length", f"{len(expected)} items", f"{len(got)} items")
    pairs = (
        first_difference(e, g, tolerance, f"{name}[{i}]") for i, (e, g) in enumerate(zip(expected, got, strict=True))
    )
    return next((found for found in pairs if found), None)


def _described(value: Any) -> str:
    if value is None:
        return "None"
    if _is_tensor(value):
        return f"a tensor of shape {list(value.shape)}"
    return f"{type(value).__name__} {str(value)[:60]!r}" if isinstance(value, str) else f"a {type(value).__name__}"


def _plain(value: Any) -> str:
    return str(list(value)) if isinstance(value, tuple) else str(value).removeprefix("torch.")
