"""A notebook's questions and choices, `exercises/02/questions.md`: Markdown that reads like the page it becomes.

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
the top, `it` (what the question is about, `answer(id, value, against=it)`) and `right`. Of a choice the bold option is
right, and under each stands why it is right or wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from .exercise import Choice, Question, Slip
from .exercise_file import ExerciseError

_RIGHT = re.compile(r"Right: `(.*)`(?: (\S+))?, within ([\d.]+) %", re.DOTALL)
_SLIP = re.compile(r"- `([^`]*)`: (.*)", re.DOTALL)
_OPTION = re.compile(r"- (\*\*)?([a-z])\)(?:\*\*)? (.*?)\n +> (.*)", re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def questions_of(path: Path) -> Iterator[Question | Choice]:
    """The questions and choices of a file, in its order; ExerciseError names the item that cannot be read."""
    text = path.read_text(encoding="utf-8")
    head, *items = re.split(r"^## ", text, flags=re.MULTILINE)
    block = _BLOCK.search(head)
    for item in items:
        title, _, body = item.partition("\n")
        parts = [part.strip() for part in re.split(r"\n\n|\n(?=- |\d\. )", body) if part.strip()]
        try:
            yield _item(title.strip(), parts, block[1] if block else "")
        except (IndexError, SyntaxError, ValueError) as error:
            raise ExerciseError(f"{path}: {title.strip()} cannot be read: {error}") from error


def _item(id: str, parts: list[str], names: str) -> Question | Choice:
    if any(_OPTION.match(part) for part in parts):
        return _choice(id, parts)
    return _question(id, [" ".join(part.split()) for part in parts], names)


def _question(id: str, parts: list[str], names: str) -> Question:
    given = next((number for number, part in enumerate(parts) if part.startswith("Right: ")), len(parts))
    right = _RIGHT.fullmatch(parts[given]) if given < len(parts) else None
    rest = parts[given + 1 :]
    slips = [found for part in rest if (found := _SLIP.fullmatch(part))]
    hints = tuple(part[3:] for part in rest if re.match(r"\d\. ", part))
    then = [part.removeprefix("Then: ") for part in rest if part.startswith("Then: ")]
    if right is None or len(slips) + len(hints) + len(then) != len(rest) or len(hints) != 3:
        raise ValueError(
            "expected the statement, Right: `number` unit, within 1 %, perhaps slips, - `wrong number`: cause, three"
            " hints, 1. to 3., and perhaps `Then: ...`; or a choice with options, - a) text, and > why under each"
        )
    expected = _expression(right[1], names)
    return Question(
        id=id,
        statement=" ".join(parts[:given]),
        unit=right[2] or "",
        expected=(lambda it: expected(it, None)) if _is_about_data(right[1]) else expected(None, None),
        slips=tuple(Slip(slip[2], value=_slip(_expression(slip[1], names), expected)) for slip in slips),
        hints=hints,  # three, as was checked
        tolerance=float(right[3]) / 100,
        explanation=" ".join(then),
    )


def _is_about_data(source: str) -> bool:
    return "it" in compile(source, source, "eval").co_names


def _slip(wrong: _Expression, right: _Expression) -> Callable[[Any], float]:
    return lambda it: wrong(it, right(it, None))


def _choice(id: str, parts: list[str]) -> Choice:
    begins = next(number for number, part in enumerate(parts) if _OPTION.match(part))
    options = [_OPTION.fullmatch(part) for part in parts[begins:]]
    found = [option for option in options if option]
    bold = [option[2] for option in found if option[1]]
    if len(found) != len(options) or len(bold) != 1:
        raise ValueError("expected options, - a) text, and > why under each; one is bold, - **b)** text: the right one")
    return Choice(
        id=id,
        statement=_flat(" ".join(parts[:begins])),
        options={option[2]: _flat(option[3]) for option in found},
        right=bold[0],
        because={option[2]: _flat(re.sub(r"\n +> ", " ", option[4])) for option in found},
    )


def _flat(text: str) -> str:
    return " ".join(text.split())


_Expression = Callable[[Any, float | None], float]


def _expression(source: str, names: str) -> _Expression:
    code = compile(source, source, "eval")
    return lambda it, right: float(eval(code, {**_names(names), "it": it, "right": right}))


@lru_cache
def _names(source: str) -> dict[str, Any]:
    """The names of the file's block of Python; made when a question is first judged."""
    space: dict[str, Any] = {}
    exec(source, space)
    return space
