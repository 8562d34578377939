"""Notebook 15: forms of a state dict, a checkpoint on other ranks, and a job that is killed and goes on."""

from __future__ import annotations

import pytest

from fsdplab.figures import alt_text
from fsdplab.teaching import checkpoints
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.workloads.shapes import preset
from tests.solutions import function_of


def test_who_holds_what_of_a_state_dict() -> None:
    held = checkpoints.forms("gpt-tiny", ranks=3)
    whole = 4 * preset("gpt-tiny").parameters
    assert [each["full, on rank 0"] for each in held] == [whole, 0, 0]
    assert [each["full, on every rank"] for each in held] == [whole] * 3
    assert sum(each["sharded"] for each in held) == whole and max(each["sharded"] for each in held) < 0.35 * whole
    figure = checkpoints.forms_figure(held)
    assert "0.6 MB" in figure.layout.title.text or "564 kB" in figure.layout.title.text
    assert "full, on rank 0: rank 0" in alt_text(figure)


def test_saved_on_four_ranks_and_loaded_on_others() -> None:
    rows = checkpoints.reshaped((3, 1)).rows
    assert [row[-1] for row in rows] == ["all equal"] * 3
    assert rows[2][1] == f"{4 * preset('gpt-tiny').parameters / 1e3:.0f}"


@pytest.mark.timeout(300)
def test_a_job_that_is_killed_while_it_saves_goes_on_with_other_ranks() -> None:
    """Nothing of the killed save is taken; the losses are those of the job that was not killed."""
    uninterrupted, job = checkpoints.Job(), checkpoints.Job()
    uninterrupted.run(2, steps=6, every=2)
    assert [row["step"] for row in uninterrupted.losses()] == [1, 2, 3, 4, 5, 6]
    assert job.newest() == 0 and "Rank 1 died" in str(job.run(3, steps=6, kill=(1, 4), every=2))
    assert job.newest() == 2 and "step-00000004" not in job.contents()
    assert "2 ranks went from step 2 to 6" in str(job.run(2, steps=6, every=2))
    assert not any(name.startswith(".") for name in job.contents()) and job.newest() == 6
    assert checkpoints.apart(job, uninterrupted) < 1e-5
    figure = checkpoints.losses_figure(job, uninterrupted)
    assert [trace.name for trace in figure.data] == ["never killed", "start 1: 3 ranks", "start 2: 2 ranks"]
    assert "steps 3 to" in alt_text(figure)


def test_an_export_is_opened_by_from_pretrained() -> None:
    pytest.importorskip("transformers", reason="transformers has no release for this Python")
    found = checkpoints.export()
    assert {row[0] for row in found.rows} == {"config.json", "model.safetensors"} and "are equal" in found.caption


def test_pieces_of_files_put_together_are_the_ranks_rows() -> None:
    """Computed in another way: the files are lists of rows."""
    pieces = function_of(registry.find("15.pieces", Exercise))
    whole = list(range(11))
    for saved, ranks in ((4, 3), (3, 4), (2, 1), (5, 2)):
        files = [whole[rank * -(-11 // saved) : (rank + 1) * -(-11 // saved)] for rank in range(saved)]
        read = [[row for owner, low, high in pieces(11, saved, rank, ranks) for row in files[owner][low:high]]
                for rank in range(ranks)]  # fmt: skip
        assert [row for rows in read for row in rows] == whole
