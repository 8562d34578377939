"""The strategy lab of a page in the browser: it answers the instrument, and measures nothing.

The page runs it in CPython for the browser (Pyodide), which has neither ranks nor torch.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from .answers import Look, View, view_of
from .asked import as_asked, bandwidth_of, moved
from .choices import PRESETS
from .messages import AnswerTo, Asked, Offers, Progress
from .offers import offers_of

WAITING = "waiting for Python: it is being loaded, or still at work on the answer before"
NOT_HERE = "nothing is measured on this page: Measure says where it can be had"
_FIXED = {"device": "cpu"}  # so that nobody asks torch for a GPU


class PageLab:
    """What the reader has chosen, and the answers to it as texts of JSON, which the page's script reads.

    >>> first = json.loads(PageLab().answer('{"n": 1}'))["answer"]
    >>> first["n"], first["memory_title"]
    (1, 'Memory: no_shard is 43.4 MB over the card')
    """

    def __init__(self) -> None:
        preset = PRESETS["laptop"]
        self._choices, self._look = preset.choices, Look(*preset.sides)

    def answer(self, asked: str) -> str:
        """What the instrument draws after a move of its page."""
        question: Asked = json.loads(asked)
        changes, self._look = moved(question, self._choices, self._look)
        self._choices = replace(self._choices, **changes)
        # nothing was recorded on a page, so there is no job beside it
        answer_to = AnswerTo(
            n=question.get("n", 0), asked=as_asked(self._look, self._choices), link=bandwidth_of(self._choices), job=""
        )
        return json.dumps({"answer": {**self._view().answer(), **answer_to}, "progress": _progress()})

    def afterwards(self) -> str:
        """What takes longer than an answer, and belongs to the last one: crossovers, and what is unfolded."""
        view = self._view()
        return json.dumps({"marks": view.marks(), "more": view.more()})

    def _view(self) -> View:
        return view_of(self._choices, self._look, _FIXED)


def questions_to_come() -> list[str]:
    """The first question of each preset. Answers are kept, so that answering it beforehand makes the reader's quick."""
    return [json.dumps({"choices": {"preset": name}}) for name in PRESETS]


def first_values() -> dict[str, Any]:
    """What the page's instrument begins with: all that can be chosen, and the first answer with what follows it."""
    lab = PageLab()
    offers: Offers = offers_of(_FIXED, WAITING, measures=False)
    return {"offers": offers, **json.loads(lab.answer("{}")), **json.loads(lab.afterwards())}


def _progress() -> Progress:
    return Progress(busy=False, cancels=False, share=0.0, message=NOT_HERE, alarm=False, what="Measure")
