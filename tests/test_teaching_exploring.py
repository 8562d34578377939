"""Figures under sliders, predictions of what is computed, and numbers of other libraries."""

from __future__ import annotations

import plotly.graph_objects as go
import pytest

from fsdplab.figures.style import titled
from fsdplab.teaching.core import exploring, predictions
from fsdplab.teaching.core.verdicts import first_difference
from fsdplab.teaching.core.workspace import Workspace


def test_a_figure_under_sliders_has_words():
    def bars(height: int) -> go.Figure:
        return titled(go.Figure(go.Bar(x=[1], y=[height])), "Bars", "Computed", f"A bar of {height}.")

    explorer = exploring.Explorer(bars, {"height": [1, 2]}, {"height": 2})
    assert str(explorer.render()) == "[figure] A bar of 2."
    assert explorer.render()._repr_mimebundle_()["text/plain"] == "[figure] A bar of 2."
    with pytest.raises(ValueError, match="needs alternative text"):
        exploring.Explorer(lambda height: go.Figure(), {"height": [1]}).render()


def test_a_computed_number_is_not_called_measured(tmp_path, capsys):
    guess = predictions.Prediction("x", "MB", Workspace(tmp_path / "my_fsdp"))
    guess.set(30)
    guess.score(20, origin="computed")
    guess.score(20)
    computed, measured = capsys.readouterr().out.splitlines()
    assert "computed 20 MB: 1.50 times the right number" in computed and "measur" not in computed
    assert "measured 20 MB: 1.50 times the measurement" in measured


def test_a_number_is_right_in_whatever_library():
    import torch

    assert first_difference(8, torch.tensor(8)) is None and first_difference(8.0, torch.tensor([8.0])) is None
    assert first_difference(8, torch.tensor([8, 8])) is not None and first_difference(8, torch.tensor(9)) is not None
