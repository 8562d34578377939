"""A folder of checkpoints that nobody watches: the newest good one stays, one job writes, and all state comes back."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdplab.checkpoint import (
    AnotherJob,
    CheckpointDamaged,
    CheckpointFolder,
    CheckpointNotSaved,
    FolderInUse,
    NotFinite,
    PerRank,
    published,
)
from fsdplab.checkpoint import folder as folders
from fsdplab.checkpoint import lock as locks
from fsdplab.engine import fully_shard
from tests.ranks import RankPool
from tests.test_engine_checkpoint_files import state_of
from tests.test_engine_checkpoint_folder import check_equal

pytestmark = pytest.mark.quick


def trainee(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 4)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    """One step; its loss, averaged over the ranks."""
    loss = model(torch.ones(2, 4)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of the package inside."""
    said: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield said
    said += [str(each.message) for each in caught if "site-packages" not in each.filename]


def spoil(folder: Path, step: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        path = published(folder)[step] / "__1_0.distcp"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    dist.barrier()


# ---- the newest good one stays


def pruned(folder: Path) -> None:
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder, keep=2)
    for step in (10, 20):
        train(model, optimizer)
        checkpoints.save(model, optimizer, step)
    checkpoints.close()
    spoil(folder, 20)
    # a restart that keeps one: 12 and 16 are newer than 10, though older than the damaged 20
    with warned():
        checkpoints = CheckpointFolder(folder, keep=1)
        assert checkpoints.load(model, optimizer) == 10
    for step, left in ((12, [12]), (16, [16]), (20, [20])):
        train(model, optimizer)
        checkpoints.save(model, optimizer, step)
        checkpoints.wait()
        dist.barrier()
        assert list(published(folder)) == left
        dist.barrier()
    checkpoints.close()
    assert not [*folder.glob("*.damaged.*")], "the damaged one of step 20 has a good one of its step"
    expected = state_of(model, optimizer)
    # a job that does not load, in a folder with a newer step, removes nothing and says so
    model, optimizer = trainee(1)
    checkpoints = CheckpointFolder(folder, keep=1)
    for step in (5, 6):
        with warned() as said:
            checkpoints.save(model, optimizer, step)
            checkpoints.wait()
        assert dist.get_rank() or f"step {step} was saved, and {folder} has the newer step 20" in said[-1]
    checkpoints.close()
    dist.barrier()
    assert list(published(folder)) == [5, 6, 20]
    other, its = trainee(2)
    assert CheckpointFolder(folder).load(other, its) == 20
    check_equal(state_of(other, its), expected)


def test_the_newest_good_checkpoint_is_never_removed(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, pruned, tmp_path / "checkpoints")


def damaged_again(folder: Path) -> None:
    """The disk has room for `keep` and one more: damage that comes again and again must not fill it."""
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(model, optimizer, 10)
    for _ in range(3):
        checkpoints.save(model, optimizer, 20)
        checkpoints.close()
        spoil(folder, 20)
        with warned():
            checkpoints = CheckpointFolder(folder, keep=3)
            assert checkpoints.load(model, optimizer) == 10
        dist.barrier()
        assert len([path for path in folder.iterdir() if path.name.startswith("step-")]) == 2
        dist.barrier()


def test_damage_that_comes_again_fills_no_disk(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, damaged_again, tmp_path / "checkpoints")


def renamed(folder: Path) -> None:
    """A number in a name is no proof: a folder that was copied under another step is not that step."""
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(model, optimizer, 10)
    checkpoints.close()
    if dist.get_rank() == 0:
        shutil.copytree(folder / "step-00000010", folder / "step-00000099")
    dist.barrier()
    with warned() as said:
        assert CheckpointFolder(folder).load(model, optimizer) == 10
    assert dist.get_rank() or "step-00000099 holds step 10" in said[0]


def test_a_checkpoint_under_another_name_is_not_that_step(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, renamed, tmp_path / "checkpoints")


# ---- numbers that are not finite


def not_finite(folder: Path) -> None:
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder, keep=1)
    train(model, optimizer)
    checkpoints.save(model, optimizer, 1)
    checkpoints.check_loss(0.5, 2)
    for loss in (float("nan"), float("inf")):
        with pytest.raises(NotFinite, match=f"the loss of step 3 is {loss}; nothing was saved after it"):
            checkpoints.check_loss(loss, 3)
    # a loss that nobody looked at: the weights tell; one rank's shard is enough
    with torch.no_grad():
        if dist.get_rank() == 1:
            model[0].weight.to_local()[0, 0] = float("nan")
    with pytest.raises(NotFinite, match="before the save of step 4, '0.weight' is not finite"):
        checkpoints.save(model, optimizer, 4)
    checkpoints.close()
    assert list(published(folder)) == [1]
    # allowed: nothing of it counts when old ones are removed
    with warned() as said:
        checkpoints = CheckpointFolder(folder, keep=1, allow_nan=True)
        for step in (5, 6, 7):
            checkpoints.save(model, optimizer, step)
        checkpoints.close()
    assert dist.get_rank() or "training goes on, and what is saved from now on is not counted as good" in said[0]
    dist.barrier()
    assert list(published(folder)) == [1, 7]
    dist.barrier()
    with warned() as said:
        assert CheckpointFolder(folder, keep=1).load(*trainee(1)) == 1, "the newest good one"
    assert dist.get_rank() or "was saved after a number that was not finite" in said[0]


def test_what_is_not_finite_is_not_saved_as_good(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, not_finite, tmp_path / "checkpoints")


# ---- all state


class Position:
    """A place in the data that differs between ranks."""

    def __init__(self) -> None:
        self.at = 100 * dist.get_rank()

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def extras_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    average = fully_shard(nn.Linear(4, 4))
    return {
        "scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10),
        "scaler": torch.amp.GradScaler("cpu", enabled=True),
        "average": average,
        "critic": torch.optim.AdamW(average.parameters(), lr=0.1),
        "position": PerRank(Position()),
        "counts": {"tokens": 0, "seen": []},
    }


def job_in_two(folder: Path, cut: int | None) -> list[tuple[float, ...]]:
    """Losses and more of six steps; with `cut` the job saves then, and another one goes on."""
    rows = []
    model, optimizer = trainee()
    torch.manual_seed(1000 + dist.get_rank())
    random.seed(dist.get_rank())
    extra = extras_of(model, optimizer)
    for step in range(1, 7):
        loss = train(model, optimizer)
        extra["scheduler"].step()
        with torch.no_grad():
            extra["average"].weight.add_(loss)
        extra["average"](torch.ones(1, 4)).sum().backward()
        extra["critic"].step()
        extra["critic"].zero_grad()
        extra["position"].holder.at += 1
        extra["counts"]["tokens"] += 7
        extra["counts"]["seen"].append(step)
        average = extra["average"].weight.full_tensor().sum().item()
        place = extra["position"].holder.at
        rows.append((loss, optimizer.param_groups[0]["lr"], average, place, random.random(), *extra["counts"]["seen"]))
        if step == cut:
            checkpoints = CheckpointFolder(folder)
            checkpoints.save(model, optimizer, step, extra=extra)
            checkpoints.close()
            model, optimizer = trainee(seed=5)
            extra = extras_of(model, optimizer)
            assert CheckpointFolder(folder).load(model, optimizer, extra=extra) == step
            assert extra["counts"]["tokens"] == 7 * step
    return rows


def both(folder: Path) -> list[tuple[float, ...]]:
    whole, cut = job_in_two(folder, None), job_in_two(folder, 3)
    assert whole == cut, "a job that goes on is not the job in one piece"
    return whole


def test_a_resumed_job_equals_the_uninterrupted_one_to_the_bit(ranks: RankPool, tmp_path: Path) -> None:
    """With dropout, a scheduler, an average, a second optimizer, a place in the data of each rank."""
    first, second = ranks(2, both, tmp_path / "checkpoints")
    assert first[0][4] != second[0][4], "the ranks draw different numbers"


def draws(folder: Path, ask_position: bool = False) -> tuple[float, float]:
    model, optimizer = trainee()
    extra = {"position": PerRank(Position())} if ask_position else {}
    CheckpointFolder(folder).load(model, optimizer, extra=extra)
    return torch.rand(()).item(), random.random()


def test_on_other_ranks_random_numbers_are_new_and_places_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, job_in_two, tmp_path / "checkpoints", 3)
    same = ranks(2, draws, tmp_path / "checkpoints")
    others = ranks(3, draws, tmp_path / "checkpoints")
    assert len({*same, *others}) == 5 and others == ranks(3, draws, tmp_path / "checkpoints")
    for end in ranks.ends(3, draws, tmp_path / "checkpoints", True):
        assert "a state of 2 ranks cannot be given to 3 ranks" in end


def refused_extras(folder: Path) -> None:
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder)
    for extra, words in (
        ({"position": Position()}, "the extra state 'position' differs between ranks.*wrap the object in PerRank"),
        ({"what": {"path": folder}}, "the extra state 'what' could not be loaded again"),
        ({"what": {"rate": lambda step: step}}, "the extra state 'what' could not be loaded again"),
        ({"random": {}}, "the extra state 'random' has a name that the folder uses itself"),
        ({"a.b": {}}, "the extra state 'a.b' has a dot in its name"),
    ):
        with pytest.raises(ValueError, match=words):
            checkpoints.save(model, optimizer, 1, extra=extra)
    with pytest.raises(TypeError, match="the extra state 'step' is of int; expected an object with state_dict and"):
        checkpoints.save(model, optimizer, 1, extra={"step": 1})
    checkpoints.save(model, optimizer, 1, extra={"counts": {}})
    checkpoints.wait()
    with pytest.raises(ValueError, match=r"has no extra state 'scheduler': got \['about', 'counts', 'random'\]"):
        checkpoints.load(model, optimizer, extra={"scheduler": {}})
    with warned() as said:
        checkpoints.load(model, optimizer)
    assert dist.get_rank() or "has the extra state 'counts', which nobody asked for" in said[0]


def test_extra_states_that_would_be_lost_are_refused(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, refused_extras, tmp_path / "checkpoints")


# ---- identity


def identity(folder: Path) -> None:
    model, optimizer = trainee()
    job = {"batch_size": 16, "data": "0123", "betas": (0.9, 0.95)}
    checkpoints = CheckpointFolder(folder, job=job)
    checkpoints.save(model, optimizer, 1)
    checkpoints.close()
    assert CheckpointFolder(folder, job=job).load(model, optimizer) == 1
    assert CheckpointFolder(folder).load(model, optimizer) == 1, "who describes no job compares none"
    before = state_of(model, optimizer)
    changed = {**job, "batch_size": 8}
    if dist.get_rank() == 1:
        changed = {**job, "data": "4567"}  # on one machine alone
    other, its = trainee(1)
    its_state = [value.clone() for value in other.parameters()]
    again = CheckpointFolder(folder, job=changed)
    with pytest.raises(AnotherJob, match="is of another job: batch_size is 16 in it and 8 here; .*force"):
        again.load(other, its)
    check_equal([value.to_local() for value in other.parameters()], [value.to_local() for value in its_state])
    with warned() as said:
        assert again.load(other, its, force=True) == 1
    assert dist.get_rank() or "batch_size is 16 in it and 8 here; it is continued all the same" in said[0]
    check_equal(state_of(other, its), before)


def test_a_checkpoint_of_other_settings_is_refused_with_their_names(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, identity, tmp_path / "checkpoints")


# ---- one job a folder


HOLDS = """
import sys, time
from pathlib import Path
from fsdplab.checkpoint.lock import FolderLock
FolderLock(Path(sys.argv[1]))
print("holds", flush=True)
time.sleep(600)
"""


def test_a_second_job_is_told_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    first = subprocess.Popen([sys.executable, "-c", HOLDS, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert first.stdout.readline() == "holds\n"
        with pytest.raises(FolderInUse, match=rf"is used by another job \(process {first.pid} on .*\), and only one"):
            CheckpointFolder(tmp_path)
        first.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked for its exit code
        taken = locks.FolderLock(tmp_path)
        taken.check()
        taken.release()
        assert not list(tmp_path.iterdir())
    finally:
        first.kill()
        first.wait()
        first.stdout.close()


def test_a_process_id_that_came_again_holds_nothing(tmp_path: Path) -> None:
    holder = locks.Holder.this_process()
    (tmp_path / ".lock").write_text(json.dumps({**vars(holder), "pid": os.getppid(), "started": "1"}))
    locks.FolderLock(tmp_path).release()
    for text in ("", "{", "[]", '{"host": 1}'):  # cut by a loss of power
        (tmp_path / ".lock").write_text(text)
        locks.FolderLock(tmp_path).release()


def test_a_holder_on_another_machine_is_gone_when_it_no_longer_renews(tmp_path: Path) -> None:
    elsewhere = {"host": "elsewhere", "machine": "another boot", "pid": 1, "started": "1"}
    path = tmp_path / ".lock"
    path.write_text(json.dumps(elsewhere))
    with mock.patch.multiple(locks, RENEWED_EVERY_S=0.1, GONE_AFTER_S=0.5):
        renewing = subprocess.Popen(
            [sys.executable, "-c", f"import os, time\nwhile True: os.utime({str(path)!r}); time.sleep(0.05)"]
        )
        try:
            with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
                started = time.time_ns()
                while path.stat().st_mtime_ns < started:
                    time.sleep(0.01)
                locks.FolderLock(tmp_path)
        finally:
            renewing.kill()
            renewing.wait()
        lock = locks.FolderLock(tmp_path)
        # a job that stood for so long that another one took the folder does not publish into it
        path.write_text(json.dumps(elsewhere))
        with pytest.raises(FolderInUse, match="process 1 on elsewhere"):
            lock.check()
        lock.release()
    assert path.exists(), "the lock of another job is not removed"


# ---- a disk that is full at the beginning and at the end


class Failing:
    """Calls a function, and raises an error instead the first few times."""

    def __init__(self, call: Any, error: Exception, times: int) -> None:
        self.call, self.error, self.times = call, error, times

    def __call__(self, *arguments: Any) -> Any:
        self.times -= 1
        if self.times >= 0:
            raise self.error
        return self.call(*arguments)


def full_at_the_end(folder: Path) -> None:
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder, patience_s=0.0)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    no_space = OSError(28, "No space left on device")
    full = mock.patch.object(folders, "write_manifest", side_effect=no_space)
    with full, pytest.raises(CheckpointNotSaved, match="step 2 was not saved .*No space left"):
        checkpoints.save_last(model, optimizer, 2)
    twice = mock.patch.object(folders, "write_manifest", side_effect=Failing(folders.write_manifest, no_space, 2))
    with twice, mock.patch.object(folders, "_FIRST_PAUSE_S", 0.1), warned() as said:
        checkpoints.save_last(model, optimizer, 2, patience_s=600.0)
    assert dist.get_rank() or len(said) == 2 and all("tries again in 0 s" in text for text in said), said
    assert list(published(folder)) == [1, 2]
    # failures that go on: the first is said, after the second training waits
    with full, warned() as said:
        for step in (3, 4):
            checkpoints.save(model, optimizer, step)
        with pytest.raises(CheckpointNotSaved, match="step 5 was not saved"):
            checkpoints.save(model, optimizer, 5)
    assert dist.get_rank() or "the next save tries again" in said[0] and "training waits until" in said[1]
    checkpoints.close()
    # a start on a disk that is too full for a lock
    no_lock = mock.patch.object(locks.os, "pwrite", side_effect=OSError(28, "No space left on device"))
    with no_lock, warned(), pytest.raises(CheckpointNotSaved, match="has no room for its lock .No space left"):
        CheckpointFolder(folder, patience_s=0.0)
    # a start on a full disk waits, and ends before it trains what would be lost
    no_room = mock.patch.object(folders, "_reserve", side_effect=OSError(28, "No space left on device"))
    checkpoints = CheckpointFolder(folder, patience_s=0.0)
    with no_room, warned(), pytest.raises(CheckpointNotSaved, match="has no room for one more checkpoint .*No space"):
        checkpoints.load(model, optimizer)
    assert checkpoints.load(model, optimizer) == 2
    checkpoints.close()
    dist.barrier()
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_full_disk_at_the_end_is_waited_for(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, full_at_the_end, tmp_path / "checkpoints")


def not_removed(folder: Path) -> None:
    """What cannot be removed is said; the checkpoint that was saved is saved."""
    model, optimizer = trainee()
    checkpoints = CheckpointFolder(folder, keep=1)
    checkpoints.save(model, optimizer, 1)
    checkpoints.wait()
    with mock.patch.object(shutil, "rmtree", side_effect=OSError(39, "Directory not empty")), warned() as said:
        checkpoints.save(model, optimizer, 2)
        checkpoints.close()
    assert dist.get_rank() or "step-00000001 could not be removed (Directory not empty); what was saved is" in said[0]
    assert 2 in published(folder)


def test_a_checkpoint_is_saved_though_an_old_one_cannot_be_removed(ranks: RankPool, tmp_path: Path) -> None:
    ranks(2, not_removed, tmp_path / "checkpoints")


def test_all_damaged_is_an_error_at_each_start(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoints = CheckpointFolder(tmp_path)
    checkpoints.save(model, optimizer, 7)
    checkpoints.close()
    (tmp_path / "step-00000007" / ".metadata").write_bytes(b"")
    for _ in range(2):
        with pytest.raises(CheckpointDamaged):
            CheckpointFolder(tmp_path).load(model, optimizer)
