"""What a page shows while a cell is at work: what goes on, then the result in its place; and figures under sliders."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdplab import teaching
from fsdplab.figures.style import titled
from fsdplab.teaching.core import checking, display, exploring, predictions, progress
from fsdplab.teaching.core.verdicts import Verdict, first_difference
from fsdplab.teaching.core.workspace import Workspace


@pytest.fixture
def page(monkeypatch) -> list[str]:
    """What a notebook's page shows, one text an output; an update replaces its output's text."""
    shown: list[str] = []

    def show(thing: object, display_id: bool = False) -> Any:
        place = len(shown)
        shown.append(str(thing))
        return SimpleNamespace(update=lambda other: shown.__setitem__(place, str(other)))

    for module in (display, progress):
        monkeypatch.setattr(module, "notebook_display", lambda: show)
    return shown


def test_a_run_is_followed_in_one_line(page):
    note = teaching.follow("wind tunnel")
    assert page == ["wind tunnel: ranks are starting ..."]
    note(1, 2, 5.7)
    assert page == ["wind tunnel: step 1 of 2, loss 5.70 ..."]
    note(2, 2, 5.5)
    assert page == ["wind tunnel: step 2 of 2, loss 5.50 done"]


def test_a_check_says_that_it_checks_and_then_its_verdict(page, course, monkeypatch):
    seen: list[str] = []

    def grade(exercise: str, hints: int) -> Verdict:
        seen.extend(page)
        return Verdict(exercise, None, "Right in every case.")

    monkeypatch.setattr(checking, "grade", grade)
    teaching.check("02.largest_batch")
    assert seen == ["02.largest_batch: checking ..."]
    assert page == ["02.largest_batch: passed. Right in every case."]
    with pytest.raises(LookupError):
        teaching.check("02.largest_bach")
    assert len(page) == 1, "an unknown exercise is checked nowhere"


def test_outside_a_notebook_only_results_are_printed(capsys):
    progress.waiting("checking ...")("right")
    assert capsys.readouterr().out == "right\n"


def test_a_figure_under_sliders_has_words():
    def bars(height: int) -> go.Figure:
        return titled(go.Figure(go.Bar(x=[1], y=[height])), "Bars", "Computed", f"A bar of {height}.")

    explorer = exploring.Explorer(bars, {"height": [1, 2]}, {"height": 2})
    assert str(explorer.render()) == "[figure] A bar of 2." and "image/svg" in str(
        explorer.render()._repr_mimebundle_()
    )
    with pytest.raises(ValueError, match="needs alternative text"):
        exploring.Explorer(lambda height: go.Figure(), {"height": [1]}).render()


def test_a_computed_number_is_not_called_measured(tmp_path, capsys):
    guess = predictions.Prediction("x", "MB", 30, Workspace(tmp_path / "my_fsdp"))
    predictions.Predicted(guess).score(20, origin="computed")
    predictions.Predicted(guess).score(20)
    computed, measured = capsys.readouterr().out.splitlines()
    assert "computed 20 MB: 1.50 times the right number" in computed and "measur" not in computed
    assert "measured 20 MB: 1.50 times the measurement" in measured


def test_a_number_is_right_in_whatever_library():
    import torch

    assert first_difference(8, torch.tensor(8)) is None and first_difference(8.0, torch.tensor([8.0])) is None
    assert first_difference(8, torch.tensor([8, 8])) is not None and first_difference(8, torch.tensor(9)) is not None
