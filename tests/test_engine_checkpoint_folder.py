"""A folder of checkpoints: each is that of its step, all are complete, and a disk that is full loses none."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fsdplab import checkpoint
from fsdplab.checkpoint import CheckpointFolder, CheckpointNotSaved, published
from fsdplab.checkpoint import files as checked_files
from fsdplab.checkpoint.files import CheckpointDamaged
from tests.test_engine_checkpoint_files import state_of, trainee

pytestmark = pytest.mark.quick


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """One step; the state after it."""
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return state_of(model, optimizer)


def check_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for value, then in zip(found, expected, strict=True):
        assert torch.equal(value, then)


def three_saves(folder: Path) -> None:
    (folder / ".step-00000009.0123abcd").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    threads = threading.active_count()
    model, optimizer = trainee(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = CheckpointFolder(folder, keep=2)
        assert checkpoints.load(model, optimizer) == 0
        states = {}
        for step in (1, 2, 3):
            states[step] = train(model, optimizer)
            checkpoints.save(model, optimizer, step)
        train(model, optimizer)  # does not change what is being written
        checkpoints.close()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000002", "step-00000003"]
    dist.barrier()
    assert threading.active_count() == threads
    other, its = trainee(1)
    assert CheckpointFolder(folder).load(other, its) == 3
    check_equal(state_of(other, its), states[3])


def test_each_checkpoint_is_that_of_its_step_and_the_newest_stay(ranks: Any, tmp_path: Path) -> None:
    ranks(2, three_saves, tmp_path / "checkpoints")


def damaged(folder: Path) -> None:
    model, optimizer = trainee(0)
    checkpoints = CheckpointFolder(folder)
    states = {}
    for step in (1, 2):
        states[step] = train(model, optimizer)
        checkpoints.save(model, optimizer, step)
    checkpoints.close()
    if dist.get_rank() == 0:
        (folder / "step-00000002" / "__1_0.distcp").write_bytes(b"")
        warned = pytest.warns(UserWarning, match="step-00000002 is left out, and renamed to step-00000002.damaged.* is")
    else:
        warned = warnings.catch_warnings()
    other, its = trainee(1)
    with warned:
        again = CheckpointFolder(folder)
        assert again.load(other, its) == 1
    check_equal(state_of(other, its), states[1])
    assert [path.name[:22] for path in folder.glob("*.damaged.*")] == ["step-00000002.damaged."]
    dist.barrier()
    # the step comes again, and takes the name; the damaged one goes, as an old one does
    state = train(other, its)
    again.save(other, its, 2)
    again.close()
    assert list(published(folder)) == [1, 2] and not [*folder.glob("*.damaged.*")]
    checkpoint.load(model, optimizer, published(folder)[2], require_manifest=True)
    check_equal(state_of(model, optimizer), state)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "step-00000002")
    if dist.get_rank() == 0:
        (folder / "step-00000001" / checked_files.MANIFEST).unlink()
    dist.barrier()
    with warnings.catch_warnings(), pytest.raises(CheckpointDamaged):
        warnings.simplefilter("ignore")
        CheckpointFolder(folder).load(other, its)  # and not from the beginning, in silence
    assert list(published(folder)) == [1], "a start after this one must not begin from nothing either"


def test_a_damaged_checkpoint_is_left_out(ranks: Any, tmp_path: Path) -> None:
    ranks(2, damaged, tmp_path / "checkpoints")


def full_disk(folder: Path, which: int) -> None:
    """Rank `which` can write no file beyond 100 bytes, as on a disk that is full; then it can again."""
    model, optimizer = trainee(0)
    checkpoints = CheckpointFolder(folder)
    first = train(model, optimizer)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == which:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    train(model, optimizer)
    checkpoints.save(model, optimizer, 2)
    with pytest.raises(CheckpointNotSaved, match="of step 2 was not saved .*File too large"):
        checkpoints.wait()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "step-00000001"]
    checkpoints.save(model, optimizer, 3)
    if dist.get_rank() == which:
        checkpoints._pending[1].exception()
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    last = train(model, optimizer)
    with pytest.warns(UserWarning, match="of step 3 was not saved") if dist.get_rank() == 0 else mock.MagicMock():
        checkpoints.save(model, optimizer, 4)
    checkpoints.close()
    assert list(published(folder)) == [1, 4]
    for step, state in ((1, first), (4, last)):
        other, its = trainee(1)
        checkpoint.load(other, its, published(folder)[step], require_manifest=True)
        check_equal(state_of(other, its), state)


@pytest.mark.parametrize("which", [0, 1])
def test_a_full_disk_loses_nothing_and_the_next_save_tries_again(ranks: Any, tmp_path: Path, which: int) -> None:
    ranks(2, full_disk, tmp_path / "checkpoints", which)


def no_room_for_the_manifest(folder: Path) -> None:
    model, optimizer = trainee(0)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        mock.patch.object(checked_files, "write_whole", side_effect=full),
        pytest.raises(OSError, match="No space left on device"),
    ):
        checkpoint.save(model, optimizer, folder)


def test_a_manifest_that_cannot_be_written_is_said_on_all_ranks(ranks: Any, tmp_path: Path) -> None:
    ranks(2, no_room_for_the_manifest, tmp_path / "checkpoint")


def test_a_relative_folder_stays_where_it_was_when_the_job_goes_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that writes, the lock, and later saves use the folder as it was named at first."""
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointFolder("checkpoints")
    checkpoints.save(model, optimizer, 1)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    checkpoints.wait()
    checkpoints.save_last(model, optimizer, 2, patience_s=0.0)
    checkpoints.close()
    assert list(published(tmp_path / "checkpoints")) == [1, 2]
    assert not (tmp_path / "checkpoints" / ".lock").exists() and not [*(tmp_path / "elsewhere").iterdir()]


def test_without_ranks_it_works_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(model, optimizer, 7)
    checkpoints.save(model, optimizer, 7)  # is there already
    checkpoints.close()
    weight = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    assert CheckpointFolder(tmp_path).load(model, optimizer) == 7 and torch.equal(model.weight, weight)
    job = {"clip": float("nan"), "steps": 1}
    with contextlib.closing(CheckpointFolder(tmp_path / "job", job=job)) as first:
        first.save_last(model, optimizer, 1)
    with contextlib.closing(CheckpointFolder(tmp_path / "job", job=job | {"steps": 1.0})) as again:
        assert again.load(model, optimizer) == 1, "a setting that is no number is that of the same job"
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        CheckpointFolder(tmp_path, keep=0)
    shutil.rmtree(tmp_path / "step-00000007")
    assert published(tmp_path) == {} == published(tmp_path / "nowhere")
