"""The files of a checkpoint, believed only as far as they have been checked.

A checkpoint comes from another machine, another day, perhaps another person. Reading one runs no code that it holds:
PyTorch's own reader unpickles the metadata and all that is no tensor without limits. A manifest with the size and the
SHA-256 of every file is written last, and checked by all ranks before the first parameter is changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from fsdplab.common.files import write_whole

MANIFEST = "fsdplab-manifest.json"
FORMAT = "fsdplab checkpoint manifest 1"
_PIECE = 1 << 22  # bytes that are hashed at a time


class CheckpointDamaged(ValueError):
    """A checkpoint whose files are not what was saved; nothing has been loaded from it."""


# ---- the manifest


def write_manifest(folder: Path) -> None:
    """Every rank hashes the files that it wrote; rank 0 writes the manifest. All ranks must call it."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    own += [folder / ".metadata"] if rank == 0 else []
    parts = _gathered({path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in own})
    if rank == 0:
        files = {name: entry for part in parts for name, entry in sorted(part.items())}
        write_whole(folder / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n")


def check_files(folder: Path, metadata: Metadata) -> None:
    """CheckpointDamaged, on all ranks, unless every file is as it was saved and every entry plain; each rank checks its
    share.

    A checkpoint without a manifest (PyTorch's own) is checked for the length of its files only.
    """
    needed = _least_bytes(metadata)
    wanted = {name: {**entry, **needed.pop(name, {})} for name, entry in _manifest(folder).items()} | needed
    _refuse(folder, [partial(_damage, folder, name, entry) for name, entry in wanted.items()])
    places = {index.fqn: place for index, place in (metadata.storage_data or {}).items()}
    values = [name for name, entry in metadata.state_dict_metadata.items() if isinstance(entry, BytesStorageMetadata)]
    _refuse(folder, [partial(_harm, folder, name, places.get(name)) for name in values])


def _refuse(folder: Path, checks: Sequence[Callable[[], str | None]]) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong = [reason for check in checks[rank::ranks] if (reason := check()) is not None]
    if reasons := [reason for part in _gathered(wrong) for reason in part]:
        raise CheckpointDamaged(
            f"the checkpoint in {folder} is damaged: {reasons[0]} ({len(reasons)} of {len(checks)} are); copy it again"
            " from where it was saved, or load an earlier one"
        )


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointDamaged(f"{folder / MANIFEST} cannot be read ({error}); copy the checkpoint again") from error
    files = content.get("files") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(files, dict) or not all(isinstance(entry, dict) for entry in files.values()):
        raise CheckpointDamaged(f"{folder / MANIFEST} is no {FORMAT!r}; copy the checkpoint again")
    return files


def _least_bytes(metadata: Metadata) -> dict[str, dict[str, Any]]:
    """File -> the bytes that the entries of the metadata reach into it."""
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return {name: {"at_least": end} for name, end in ends.items()}


def _damage(folder: Path, name: str, entry: dict[str, Any]) -> str | None:
    path = folder / name
    if path.parent != folder or name == "..":
        return f"it names {name!r}, which lies elsewhere"
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    if found < entry.get("at_least", 0):
        return f"{path.name} has {found:,} bytes of at least {entry['at_least']:,}"
    if found != entry.get("bytes", found):
        return f"{path.name} has {found:,} bytes of {entry['bytes']:,}"
    if "sha256" in entry and _digest(path) != entry["sha256"]:
        return f"{path.name} has another checksum than when it was saved"
    return None


def _harm(folder: Path, name: str, place: Any) -> str | None:
    """Why the value of an entry that is no tensor cannot be read without running code."""
    if place is None:
        return f"the entry {name!r} lies nowhere"
    with (folder / place.relative_path).open("rb") as file:
        file.seek(place.offset)
        content = io.BytesIO(file.read(place.length))
    try:
        torch.load(content, weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        return f"the entry {name!r} is no plain value ({type(error).__name__}), and reading it might run code"
    return None


def _digest(path: Path) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            made.update(piece)
    return made.hexdigest()


def _gathered(mine: Any) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    return parts


# ---- reading without running


class _Unpickler(pickle.Unpickler):
    """Makes what DCP's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        found = getattr(dcp_metadata, name, None)
        if isinstance(found, type) and module == found.__module__ == dcp_metadata.__name__:
            return found
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        raise CheckpointDamaged(
            f"the metadata of the checkpoint names {module}.{name}, which no checkpoint of tensors does; it is refused,"
            " since reading it would run that"
        )


_ALLOWED = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib._local", "PosixPath"),  # Python 3.13
    ("collections", "OrderedDict"),
    ("builtins", "set"),
    ("builtins", "frozenset"),
}


class CheckedReader(dcp.FileSystemReader):
    """DCP's reader; its metadata is unpickled without running anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata; CheckpointDamaged where it is none."""
        path = Path(self.path) / ".metadata"
        try:
            metadata = _Unpickler(io.BytesIO(path.read_bytes())).load()
        except CheckpointDamaged:
            raise
        except Exception as error:  # a damaged pickle raises anything
            raise CheckpointDamaged(f"{path} cannot be read ({type(error).__name__}); copy it again") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointDamaged(f"{path} holds a {type(metadata).__name__}, expected DCP's Metadata; copy it again")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class CheckedPlanner(dcp.DefaultLoadPlanner):
    """DCP's planner; entries that are no tensors are plain values, or refused."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the plain value of one entry into the state."""
        name = read_item.dest_index.fqn
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointDamaged(
                f"the entry {name!r} is no plain value, and reading it might run code; it is refused"
            ) from error
        value.seek(0)  # the planner reads it once more, without limits
        super().load_bytes(read_item, value)
