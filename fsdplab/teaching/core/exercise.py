"""What a check sees of a call; and numeric questions and choices, as they stand in a notebook's `questions.md`.

A question holds its hints and the wrong numbers that known slips lead to, a choice says of each option why it is right
or wrong. The file, `exercises/02/questions.md`, is Markdown that reads like the page it becomes:

    # Questions of notebook 02

    ```python
    from fsdplab.teaching.lessons.nb02_where_memory_goes.lesson import MB
    ```

    ## 02.equal

    With how many rows in the batch do activations take as many bytes as model states?

    Right: `it["states"] / it["a row"]` MB, within 2 %

    - `0.25 * right`: that is the number of parameters alone; model states are all three

    1. Activations grow with the batch, model states do not.
    2. How many bytes of activations does one row have?
    3. `sum(held.values()) / (saved_bytes(64) / 64)`.

    Then: Below it the model decides what fits, above it the batch does.

    ## 02.remedy

    What helps most?

    - a) 128 ranks
      > more ranks make the shards smaller. A rank still has all activations of its batch.
    - **b)** half the sequences a rank
      > activations fall with the batch.

What stands between backticks after `Right:` and before a slip's cause is Python: it may use the names of the block at
the top, `it` (what the question is about, `answer(id, value, against=it)`) and `right`; that of a slip may be a list of
wrong numbers with one cause. Of a choice the bold option is
right, and under each stands why it is right or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from .exercise_file import ExerciseError
from .workspace import checked_id

_RIGHT = re.compile(r"Right: `(.*)`(?: (\S+))?, within ([\d.]+) %", re.DOTALL)
_SLIP = re.compile(r"- `([^`]*)`: (.*)", re.DOTALL)
_OPTION = re.compile(r"- (\*\*)?([a-z])\)(?:\*\*)? (.*?)\n +> (.*)", re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """One call of `torch.distributed` that a rank made: `send` of 40 bytes to `peer` 2, or `all_gather` of 40 bytes."""

    kind: str
    nbytes: int
    peer: int | None = None


@dataclass(frozen=True)
class Trial:
    """One rank's result of one case: the returned value, its output, what it sent, and which of its arguments, by their
    places, it changed (noted of pure functions only).
    """

    rank: int
    returned: Any
    printed: str
    calls: tuple[Call, ...]
    nothing: bool = False  # whether the function itself returned None
    changed: tuple[int, ...] = ()


@dataclass(frozen=True)
class Slip:
    """A known wrong number, or several, as values in the question's unit or as a factor of the right one, and the
    cause.
    """

    cause: str
    value: float | Callable[[Any], float | list[float]] | None = None
    factor: float | None = None


@dataclass(frozen=True)
class Question:
    """A number to compute or to read from a figure, in `unit`, right within `tolerance` (relative).

    `expected` is the number, or a function of the notebook's data (`answer(id, value, against=records)`).
    """

    id: str
    statement: str
    unit: str
    expected: float | Callable[[Any], float]
    slips: tuple[Slip, ...] = ()
    hints: tuple[str, str, str] = ("", "", "")
    tolerance: float = 0.01
    explanation: str = ""

    def __post_init__(self) -> None:
        checked_id(self.id)
        if len(self.hints) != 3:
            raise ValueError(
                f"{self.id}: expected three hints (a nudge, a pointer, nearly the solution), got {len(self.hints)}"
            )

    def right(self, against: Any = None) -> float:
        """Return the right value in the question's unit."""
        if callable(self.expected):
            return float(self.expected(against))
        return float(self.expected)


@dataclass(frozen=True)
class Choice:
    """A question with lettered options; `because` explains every wrong letter and the right one."""

    id: str
    statement: str
    options: Mapping[str, str]
    right: str
    because: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        checked_id(self.id)
        missing = set(self.options) - set(self.because)
        if self.right not in self.options or missing:
            raise ValueError(f"{self.id}: the right letter must be an option, and every option needs a `because`")


# ---- reading a file


def questions_of(path: Path) -> Iterator[Question | Choice]:
    """Yield the questions and choices of a file, in its order; ExerciseError names the item that cannot be read."""
    text = path.read_text(encoding="utf-8")
    head, *items = re.split(r"^## ", text, flags=re.MULTILINE)
    # the names that expressions of this file may use
    block = _BLOCK.search(head)
    names = block[1] if block else ""
    for item in items:
        title, _, body = item.partition("\n")
        id = title.strip()
        # paragraphs; options, slips and hints need no blank line between them
        parts = [part.strip() for part in re.split(r"\n\n|\n(?=- |\d\. )", body) if part.strip()]
        is_choice = any(map(_OPTION.match, parts))
        try:
            if is_choice:
                yield _choice(id, parts)
            else:
                yield _question(id, list(map(_flat, parts)), names)
        except (IndexError, SyntaxError, ValueError) as error:
            raise ExerciseError(f"{path}: {id} cannot be read: {error}") from error


def _question(id: str, parts: list[str], names: str) -> Question:
    """Read a question from its paragraphs; `names` is the file's block of Python."""
    # which part is which: the statement, `Right:`, slips, hints, `Then:`
    given = len(parts)
    for number, part in enumerate(parts):
        if part.startswith("Right: "):
            given = number
            break
    # the number's expression, its unit or None, and the tolerance in %
    right = _RIGHT.fullmatch(parts[given]) if given < len(parts) else None
    slip_parts, hints, explanations, others = [], [], [], []
    for part in parts[given + 1 :]:
        slip_match = _SLIP.fullmatch(part)
        if slip_match:
            slip_parts.append(slip_match)
        elif re.match(r"\d\. ", part):
            hints.append(part[3:])
        elif part.startswith("Then: "):
            explanations.append(part.removeprefix("Then: "))
        else:
            others.append(part)
    if right is None or others or len(hints) != 3:
        raise ValueError(
            "expected the statement, Right: `number` unit, within 1 %, perhaps slips, - `wrong number`: cause, three"
            " hints, 1. to 3., and perhaps `Then: ...`; or a choice with options, - a) text, and > why under each"
        )
    number_of = _expression(right[1], names)

    def expected(it: Any) -> float:
        return float(number_of(it, None))

    def slip(source: str, cause: str) -> Slip:
        wrong = _expression(source, names)
        # `right` in a slip's expression is the question's own number, such as `0.25 * right`
        return Slip(cause, lambda it: wrong(it, expected(it)))

    # an expression with `it` needs a run or a measurement, any other is a number now
    is_about_data = "it" in compile(right[1], right[1], "eval").co_names
    first, second, third = hints
    return Question(
        id=id,
        statement=" ".join(parts[:given]),
        unit=right[2] or "",
        expected=expected if is_about_data else expected(None),
        slips=tuple(slip(match[1], match[2]) for match in slip_parts),
        hints=(first, second, third),
        tolerance=float(right[3]) / 100,
        explanation=" ".join(explanations),
    )


def _choice(id: str, parts: list[str]) -> Choice:
    """Read a choice from its paragraphs."""
    # what stands before the first option is the statement
    begins = next(number for number, part in enumerate(parts) if _OPTION.match(part))
    options, because, bold, unread = {}, {}, [], 0
    for part in parts[begins:]:
        match = _OPTION.fullmatch(part)
        if match is None:
            unread += 1
            continue
        # "**" or None, the letter, the option, and why it is right or wrong
        is_bold, letter, text, why = match.groups()
        options[letter] = _flat(text)
        because[letter] = _flat(re.sub(r"\n +> ", " ", why))
        if is_bold:
            bold.append(letter)
    if unread or len(bold) != 1:
        raise ValueError("expected options, - a) text, and > why under each; one is bold, - **b)** text: the right one")
    return Choice(id, _flat(" ".join(parts[:begins])), options, bold[0], because)


def _flat(text: str) -> str:
    """Return a text on one line, its words a blank apart."""
    return " ".join(text.split())


_Expression = Callable[[Any, float | None], Any]  # a number, or of a slip a list of numbers


def _expression(source: str, names: str) -> _Expression:
    """Compile an expression of a question's file; it is evaluated with `it`, `right` and the file's names."""
    code = compile(source, source, "eval")
    return lambda it, right: eval(code, {**_names(names), "it": it, "right": right})


@lru_cache
def _names(source: str) -> dict[str, Any]:
    """Return the names of the file's block of Python; made when a question is first judged."""
    space: dict[str, Any] = {}
    exec(source, space)
    return space
