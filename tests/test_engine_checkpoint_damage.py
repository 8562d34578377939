"""Every file of a small checkpoint, damaged in many ways: `load` refuses it or, without a manifest, warns."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fsdplab import checkpoint
from fsdplab.checkpoint.files import FORMAT, MANIFEST, CheckpointDamaged
from tests.test_engine_checkpoint_files import state_of, trainee

FILES = (".metadata", "__0_0.distcp", "__1_0.distcp", MANIFEST)
FLIPS = 6  # of each file
WRONG = [None, "text", 1.5, [], {}, "[" * 100_000]  # JSON that replaces a file; the last is nested too deep
ENTRIES: list[Any] = [
    "text", None, [], {}, {"bytes": "many"}, {"bytes": "many", "sha256": "0"}, {"bytes": -1, "sha256": None},
    {"bytes": 1.5, "sha256": 7}, {"bytes": True, "sha256": "0" * 64}, {"at_least": "much"},
]  # fmt: skip
Damage = Callable[[Path], object]


def flip(at: float, bit: int) -> Damage:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 1 << bit
        path.write_bytes(content)

    return damage


def damages(seed: int) -> Iterator[tuple[str, Damage]]:
    """What may happen to one file, with a name."""
    chance = random.Random(seed)
    for _ in range(FLIPS):
        at, bit = chance.random(), chance.randrange(8)
        yield f"bit {bit} flipped at {at:.3f}", flip(at, bit)
    for part in (0.0, chance.random(), 0.999):
        yield (
            f"cut to {part:.3f}",
            lambda path, part=part: path.write_bytes(path.read_bytes()[: int(part * path.stat().st_size)]),
        )
    for wrong in WRONG:
        text = wrong if wrong == WRONG[-1] else json.dumps(wrong)
        yield f"replaced by {text[:9]}", lambda path, text=text: path.write_text(text)
    yield "deleted", Path.unlink
    yield "a folder instead", lambda path: (path.unlink(), path.mkdir())


def manifest_damages() -> Iterator[tuple[str, Damage]]:
    """Manifests that are JSON of the right format with one part of the wrong type."""

    def change(path: Path, name: str, entry: Any) -> None:
        content = json.loads(path.read_text())
        content["files"][name] = entry
        path.write_text(json.dumps(content))

    for name in ("__1_0.distcp", "..", "no\0name"):
        for entry in ENTRIES:
            yield f"{name!r} is {entry}", lambda path, name=name, entry=entry: change(path, name, entry)
    for files in ({}, [], "text", None):
        content = json.dumps({"format": FORMAT, "files": files})
        yield f"files: {files}", lambda path, content=content: path.write_text(content)


def loaded(saved: Path, damaged: Path, cases: list[tuple[str, str, Damage]], keep_manifest: bool) -> list[str]:
    """What went wrong: cases that ended in anything but a refusal, a warning or the right values."""
    model, optimizer = trainee(0)
    checkpoint.save(model, optimizer, saved)
    right = state_of(model, optimizer)
    other, its = trainee(1)
    wrong, before = [], state_of(other, its)
    for name, what, damage in cases:
        if dist.get_rank() == 0:
            shutil.rmtree(damaged, ignore_errors=True)
            shutil.copytree(saved, damaged)
            if not keep_manifest:
                (damaged / MANIFEST).unlink()
            damage(damaged / name)
        dist.barrier()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            said = outcome(other, its, damaged)
        told = keep_manifest or said is not None or dist.get_rank() != 0 or MANIFEST in str(list(map(str, warned)))
        unchanged = all(map(torch.equal, state_of(other, its), before))
        if said is None:
            fine = not keep_manifest or all(map(torch.equal, state_of(other, its), right))
            other, its = trainee(1)
        else:
            fine = unchanged and is_clear(said, name, keep_manifest)
        if not (fine and told):
            wrong.append(f"{name}, {what}: {said} {unchanged=} {told=}")
        dist.barrier()
    return wrong


def is_clear(said: str, name: str, keep_manifest: bool) -> bool:
    """Whether the message of a refusal names the file and what to do.

    Without a manifest, damaged metadata may describe another model, and a folder without them is no checkpoint.
    """
    if name in said and "copy" in said:
        return True
    return not keep_manifest and said.startswith(
        ("ValueError: the checkpoint is of another", "FileNotFoundError: no checkpoint in")
    )


def outcome(model: Any, optimizer: torch.optim.Optimizer, folder: Path) -> str | None:
    """What `load` raised; None where it loaded."""
    try:
        checkpoint.load(model, optimizer, folder)
    except CheckpointDamaged as error:
        return str(error)
    except (Exception, CheckpointException) as error:
        return f"{type(error).__name__}: {error}"[:300]
    return None


def on_ranks(folder: str, seed: int, keep_manifest: bool) -> list[str]:
    files = FILES if keep_manifest else FILES[:-1]
    cases = [(name, what, damage) for i, name in enumerate(files) for what, damage in damages(seed + i)]
    if keep_manifest:
        cases += [(MANIFEST, what, damage) for what, damage in manifest_damages()]
    return loaded(Path(folder) / "saved", Path(folder) / "damaged", cases, keep_manifest)


@pytest.mark.parametrize("keep_manifest", [True, False])
def test_no_damage_is_silent(ranks, keep_manifest: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for wrong in ranks(2, on_ranks, folder, 1, keep_manifest):
            assert not wrong, "\n".join(wrong)
