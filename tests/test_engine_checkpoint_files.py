"""Checkpoints that were damaged, or made to harm: nothing is run, nothing is loaded, and all ranks say why."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from fsdplab import checkpoint
from fsdplab.checkpoint.files import FORMAT, MANIFEST, CheckedReader, CheckpointDamaged
from fsdplab.engine import shard_model
from tests.surface import Net, loss_of, mesh_of, wholes

quick = pytest.mark.quick


class Harm:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: str) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (self.proof,)


def trainee(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Any, torch.optim.Optimizer]:
    model = shard_model(Net(seed=seed).to(dtype), "full_shard", mesh=mesh_of())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.ones(2, 8, dtype=dtype)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def state_of(model: Any, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    return [value.clone() for value in wholes([*model.parameters(), *moments])]


# ---- what may have happened to the files: (folder) -> None, on rank 0


def truncated(folder: Path) -> None:
    path = folder / "__1_0.distcp"
    os.truncate(path, path.stat().st_size // 2)


def flipped(folder: Path) -> None:
    content = bytearray((folder / "__1_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "__1_0.distcp").write_bytes(content)


def longer(folder: Path) -> None:
    with (folder / "__0_0.distcp").open("ab") as file:
        file.write(b"more")


def lost(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def truncated_without_manifest(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    truncated(folder)


def other_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text('{"format": "of somebody else", "files": {}}')


def half_a_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40])


def cut_metadata(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:100])


def no_metadata(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))


def harmful_metadata(folder: Path) -> None:
    (folder / MANIFEST).unlink()
    (folder / ".metadata").write_bytes(pickle.dumps(Harm(str(folder / "proof"))))


def elsewhere(folder: Path) -> None:
    """The metadata sends the reader to a file beside the checkpoint."""
    (folder / MANIFEST).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (folder.parent / "secret.distcp").write_bytes((folder / "__0_0.distcp").read_bytes())
    for place in metadata.storage_data.values():
        if place.relative_path == "__0_0.distcp":
            place.relative_path = "../secret.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def hole(folder: Path) -> None:
    """The metadata say nothing of one part of a tensor."""
    (folder / MANIFEST).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    next(each for each in metadata.state_dict_metadata.values() if len(getattr(each, "chunks", [])) > 1).chunks.pop()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def overlap(folder: Path) -> None:
    """Two parts of a tensor of the same size, both at its beginning: as many elements as before, with a hole."""
    (folder / MANIFEST).unlink()
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for entry in metadata.state_dict_metadata.values():
        chunks = getattr(entry, "chunks", [])
        if len(chunks) == 2 and chunks[0].sizes == chunks[1].sizes:
            chunks[1].offsets = chunks[0].offsets
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def string_in_manifest(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    content["files"]["__0_0.distcp"]["bytes"] = "many"
    (folder / MANIFEST).write_text(json.dumps(content))


def deep_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text("[" * 100_000)


def empty_manifest(folder: Path) -> None:
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": {}}))
    flipped(folder)


DAMAGE: dict[Callable[[Path], None], str] = {
    truncated: "__1_0.distcp has .* bytes of",
    flipped: "__1_0.distcp has another checksum",
    longer: "__0_0.distcp has .* bytes of",
    lost: "__1_0.distcp is missing",
    truncated_without_manifest: "__1_0.distcp has .* bytes of at least",
    other_manifest: "is no 'fsdplab checkpoint manifest 1'",
    half_a_manifest: "cannot be read",
    cut_metadata: r"\.metadata cannot be read",
    no_metadata: "holds a dict, expected DCP's Metadata",
    harmful_metadata: r"names (posix|nt)\.mkdir",
    elsewhere: "names '../secret.distcp', which lies elsewhere",
    hole: r"\.metadata has parts of the wrong type",
    overlap: r"\.metadata has parts of the wrong type",
    string_in_manifest: "fsdplab-manifest.json is no 'fsdplab checkpoint manifest 1'",
    deep_manifest: "fsdplab-manifest.json cannot be read",
    empty_manifest: r"fsdplab-manifest.json does not name the file \.metadata",
}


def refused(folder: str, damage: Callable[[Path], None], words: str) -> None:
    saved, fresh = Path(folder) / "saved", Path(folder) / "damaged"
    model, optimizer = trainee(0)
    checkpoint.save(model, optimizer, saved)
    if dist.get_rank() == 0:
        shutil.copytree(saved, fresh)
        damage(fresh)
    dist.barrier()
    other, its = trainee(1)
    before = state_of(other, its)
    with pytest.raises(CheckpointDamaged, match=words):
        checkpoint.load(other, its, fresh)
    for value, then in zip(state_of(other, its), before, strict=True):
        assert torch.equal(value, then), "half of a checkpoint was loaded"
    assert its.param_groups[0]["lr"] == 1.1 and not (fresh / "proof").exists()
    checkpoint.load(other, its, saved)
    for value, then in zip(state_of(other, its), state_of(model, optimizer), strict=True):
        assert torch.equal(value, then)
    assert its.param_groups[0]["lr"] == 0.1


QUICK_DAMAGE = (truncated, harmful_metadata)  # one of the bytes, one of what says where they are


@pytest.mark.parametrize(
    "damage",
    [pytest.param(each, marks=[quick] if each in QUICK_DAMAGE else []) for each in DAMAGE],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_checkpoint_changes_nothing(ranks, damage: Callable[[Path], None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2, refused, folder, damage, DAMAGE[damage])


def harmful_entry(folder: str) -> None:
    """An entry that is no tensor holds an object which runs code when it is read."""
    model, optimizer = trainee(0)
    state = checkpoint.states_of(model, optimizer)
    state["optim"]["param_groups"][0]["lr"] = Harm(str(Path(folder) / "proof"))
    dcp.save(state, checkpoint_id=str(Path(folder) / "bad"))
    other, its = trainee(1)
    before = state_of(other, its)
    with pytest.raises(CheckpointDamaged, match="is no plain value .*, and reading it might run code"):
        checkpoint.load(other, its, Path(folder) / "bad")
    assert not (Path(folder) / "proof").exists()
    assert its.param_groups[0]["lr"] == 1.1
    for value, then in zip(state_of(other, its), before, strict=True):
        assert torch.equal(value, then)


@quick
def test_an_entry_runs_no_code(ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2, harmful_entry, folder)


def unreadable(folder: str) -> None:
    """A disk that fails on one rank while DCP reads: its CheckpointException is no Exception."""
    model, optimizer = trainee(0)
    checkpoint.save(model, optimizer, folder)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error", "__1_0.distcp")

    if dist.get_rank() == 1:
        CheckedReader.read_data = broken
    with pytest.raises(CheckpointDamaged, match="cannot be read .*Input/output error.*__1_0.distcp.*copy it again"):
        checkpoint.load(model, optimizer, folder)


@quick
def test_a_file_that_cannot_be_read_is_named_on_all_ranks(ranks, tmp_path: Path) -> None:
    ranks(2, unreadable, str(tmp_path / "saved"))


def forbidden(folder: str) -> None:
    """A file that one rank may not look at, and a folder that one rank does not see: no rank waits for it."""
    model, optimizer = trainee(0)
    checkpoint.save(model, optimizer, folder)

    def refuse(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", path.name)

    is_file = Path.is_file
    if dist.get_rank() == 1:
        Path.is_file = refuse
    with pytest.raises(PermissionError, match="Permission denied: '.*metadata|Permission denied: '__"):
        checkpoint.load(model, optimizer, folder)
    Path.is_file = is_file
    with pytest.raises(FileNotFoundError, match="no checkpoint in .*elsewhere"):
        checkpoint.load(model, optimizer, folder if dist.get_rank() == 0 else f"{folder}/elsewhere")


@quick
def test_what_one_rank_cannot_see_is_said_on_all(ranks, tmp_path: Path) -> None:
    ranks(2, forbidden, str(tmp_path / "saved"))


def other_dtype(folder: str) -> None:
    model, optimizer = trainee(0)
    checkpoint.save(model, optimizer, folder)
    other, its = trainee(1, torch.bfloat16)
    with pytest.raises(ValueError, match="is of another model: .* torch.float32 in it and .* torch.bfloat16 here"):
        checkpoint.load(other, its, folder)


def test_another_dtype_is_another_model(ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2, other_dtype, str(Path(folder) / "saved"))


def from_torch(folder: str) -> None:
    """A checkpoint that PyTorch's own `dcp.save` wrote has no manifest, and is read."""
    model, optimizer = trainee(0)
    dcp.save(checkpoint.states_of(model, optimizer), checkpoint_id=folder)
    other, its = trainee(1)
    with pytest.raises(CheckpointDamaged, match="require_manifest is set"):
        checkpoint.load(other, its, folder, require_manifest=True)
    with pytest.warns(UserWarning, match="could not be checked") if dist.get_rank() == 0 else nullcontext():
        checkpoint.load(other, its, folder)
    for value, then in zip(state_of(other, its), state_of(model, optimizer), strict=True):
        assert torch.equal(value, then)
    assert loss_of(other).isfinite()
    flat = checkpoint.states_of(model, optimizer)["model"]
    for name, state in {"flat": flat, "deeper": {"app": {"model": flat}}}.items():
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        with pytest.raises(
            ValueError, match=r"under other keys: got '(app.model.)?blocks.0.down.bias', expected 'model"
        ):
            checkpoint.load(other, its, f"{folder}/{name}")


def test_a_checkpoint_of_pytorch_is_read(ranks) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ranks(2, from_torch, str(Path(folder) / "saved"))
