"""The files of a checkpoint, believed only as far as they have been checked.

A checkpoint comes from another machine, another day, perhaps another person. Reading one runs no code that it holds:
PyTorch's own reader unpickles the metadata and all that is no tensor without limits. A manifest with the size and the
SHA-256 of every file is written last, and checked by all ranks before the first parameter is changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from fsdplab.common.files import write_whole

MANIFEST = "fsdplab-manifest.json"
FORMAT = "fsdplab checkpoint manifest 1"
Files = Mapping[str, Mapping[str, Any]]  # of a manifest: name -> size and checksum
T = TypeVar("T")
_PIECE = 1 << 22  # bytes that are hashed at a time


class CheckpointDamaged(ValueError):
    """A checkpoint whose files are not what was saved; nothing has been loaded from it."""


# ---- the manifest


def write_manifest(folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """Every rank hashes the files that it wrote; rank 0 writes the manifest. All ranks of `group` (default: all) must
    call it; raises `OSError` on all of them if it fails on one.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def written() -> dict[str, dict[str, Any]]:
        own = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
        own += [folder / ".metadata"] if rank == 0 else []
        return {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in own}

    parts = on_each_rank(written, group)
    files = {name: entry for part in parts for name, entry in sorted(part.items())}
    text = json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"

    def write() -> None:
        if rank == 0:
            write_whole(folder / MANIFEST, text)
            to_disk(folder / MANIFEST)

    on_each_rank(write, group)  # no rank may load a checkpoint whose manifest is still to come


def check_manifest(folder: Path, required: bool) -> Files | None:
    """The files of the manifest; CheckpointDamaged, on all ranks, unless each of them is as it was saved.

    Each rank checks its share. Without a manifest nothing can be checked: a warning and None, or CheckpointDamaged if
    it is `required`.
    """
    files = on_all_ranks(partial(_manifest, folder))
    if len(set(_gathered(files is None))) > 1:
        raise CheckpointDamaged(f"only some ranks see {folder / MANIFEST}; copy the checkpoint again, to every machine")
    if files is not None:
        _refuse(folder, [partial(_damage, folder, name, entry) for name, entry in files.items()])
    elif required:
        raise CheckpointDamaged(
            f"{folder / MANIFEST} is missing, and require_manifest is set; copy the checkpoint again, or load it with"
            " require_manifest=False if you trust its files"
        )
    elif not dist.is_initialized() or dist.get_rank() == 0:
        warnings.warn(
            f"{folder / MANIFEST} is missing, so it could not be checked whether the files are as they were saved;"
            " `checkpoint.save` writes a manifest, and require_manifest=True refuses checkpoints without one",
            stacklevel=3,
        )
    return files


def check_entries(folder: Path, metadata: Metadata, files: Files | None) -> None:
    """CheckpointDamaged, on all ranks, unless every entry of the metadata lies in the folder and can be read without
    running code; each rank checks its share.

    Where `files` of a manifest have been checked, it names them all, and their tensors need no reading.
    """
    reach = _reach(metadata)
    _refuse(folder, [partial(_out_of_reach, folder, name, end, files) for name, end in reach.items()])
    places = metadata.storage_data
    tensors = [
        MetadataIndex(name, chunk.offsets, number)
        for name, entry in metadata.state_dict_metadata.items()
        if files is None and isinstance(entry, TensorStorageMetadata)
        for number, chunk in enumerate(entry.chunks)
    ]
    values = [
        MetadataIndex(name)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, BytesStorageMetadata)
    ]
    _refuse(folder, [partial(_harm, folder, index, places.get(index), metadata) for index in tensors + values])


def to_disk(path: Path) -> None:
    """Make a file, or the names in a folder, survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def on_all_ranks(read: Callable[[], T]) -> T:
    """What `read` returns on this rank; CheckpointDamaged on all ranks if it raises that on one."""
    mine: list[T] = []
    on_each_rank(lambda: mine.append(read()))
    return mine[0]


def on_each_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """What `action` returns on each rank of `group`; an error of one (of the kinds that this package raises) is raised
    on all.
    """
    try:
        mine: tuple[Any, Exception | None] = action(), None
    except (OSError, ValueError, RuntimeError) as error:
        mine = None, error
    ends = _gathered(mine, group)
    if failures := [error for _, error in ends if error is not None]:
        raise failures[0]
    return [value for value, _ in ends]


def _refuse(folder: Path, checks: Sequence[Callable[[], str | None]]) -> None:
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    wrong = [reason for check in checks[rank::ranks] if (reason := check()) is not None]
    if reasons := [reason for part in _gathered(wrong) for reason in part]:
        raise CheckpointDamaged(
            f"the checkpoint in {folder} is damaged: {reasons[0]} ({len(reasons)} of {len(checks)} are); copy it again"
            " from where it was saved, or load an earlier one"
        )


def _manifest(folder: Path) -> Files | None:
    """File name -> size and checksum; None where there is no manifest."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # nested too deep
        raise CheckpointDamaged(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    files = content.get("files") if isinstance(content, dict) and content.get("format") == FORMAT else None
    if not isinstance(files, dict) or not all(map(_is_entry, files.values())):
        raise CheckpointDamaged(f"{path} is no {FORMAT!r}; copy the checkpoint again")
    if ".metadata" not in files:
        raise CheckpointDamaged(f"{path} does not name the file .metadata; copy the checkpoint again")
    return files


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.keys() == {"bytes", "sha256"}
        and type(entry["bytes"]) is int
        and isinstance(entry["sha256"], str)
    )


def _reach(metadata: Metadata) -> dict[str, int]:
    """File -> the bytes that the entries of the metadata reach into it."""
    ends: dict[str, int] = {}
    for place in metadata.storage_data.values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    return ends


def _out_of_reach(folder: Path, name: str, end: int, files: Files | None) -> str | None:
    """Why the entries in a file cannot be read, before it is opened."""
    if (path := _inside(folder, name)) is None:
        return f"it names {name!r}, which lies elsewhere"
    if files is not None and name not in files:
        return f"{MANIFEST} does not name the file {name}"
    if not path.is_file():
        return f"{name} is missing"
    found = path.stat().st_size
    return f"{name} has {found:,} bytes of at least {end:,}" if found < end else None


def _damage(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """How a file differs from its entry in the manifest."""
    if (path := _inside(folder, name)) is None:
        return f"{MANIFEST} names {name!r}, which lies elsewhere"
    if not path.is_file():
        return f"{name} is missing, which {MANIFEST} names"
    if (found := path.stat().st_size) != entry["bytes"]:
        return f"{name} has {found:,} bytes of {entry['bytes']:,} in {MANIFEST}"
    try:
        same = _digest(path) == entry["sha256"]
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if same else f"{name} has another checksum than in {MANIFEST}"


def _inside(folder: Path, name: str) -> Path | None:
    """The path of a file of the folder; None for a name that leads elsewhere or is none."""
    path = folder / name
    return path if path.parent == folder and name != ".." and "\0" not in name else None


def _harm(folder: Path, index: MetadataIndex, place: Any, metadata: Metadata) -> str | None:
    """Why one entry cannot be read, or not without running code."""
    name, entry = index.fqn, metadata.state_dict_metadata[index.fqn]
    if place is None:
        return f".metadata gives no place for the entry {name!r}"
    try:
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            content = io.BytesIO(file.read(place.length))
        value = torch.load(content, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged pickle raises anything
        return (
            f"the entry {name!r}, which .metadata places in {place.relative_path}, is no plain value"
            f" ({type(error).__name__}), and reading it might run code"
        )
    if isinstance(entry, BytesStorageMetadata):
        return None
    sizes = entry.chunks[index.index or 0].sizes
    if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (sizes, entry.properties.dtype):
        return None
    return f"the entry {name!r} in {place.relative_path} is not the tensor that .metadata describes"


def _digest(path: Path) -> str:
    made = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            made.update(piece)
    return made.hexdigest()


def _gathered(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    if not dist.is_initialized():
        return [mine]
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group)
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
        if not _is_well_formed(metadata):
            raise CheckpointDamaged(f"{path} has parts of the wrong type or size; copy it again")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _is_well_formed(metadata: Metadata) -> bool:
    """Whether the parts of unpickled metadata have the types that DCP gives them."""
    parts = _parts(metadata, state_dict_metadata=dict, storage_data=dict)
    return (
        parts is not None
        and all(isinstance(name, str) and _is_described(each) for name, each in parts["state_dict_metadata"].items())
        and all(isinstance(index, MetadataIndex) and _is_place(each) for index, each in parts["storage_data"].items())
    )


def _parts(value: Any, **kinds: type) -> dict[str, Any] | None:
    """The attributes of an unpickled object, which may lack any; None unless these have their types."""
    parts = vars(value)
    fits = all(isinstance(parts.get(name), kind) and type(parts[name]) is not bool for name, kind in kinds.items())
    return parts if fits else None


def _is_described(entry: Any) -> bool:
    if not isinstance(entry, TensorStorageMetadata):
        return isinstance(entry, BytesStorageMetadata)
    parts = _parts(entry, size=torch.Size, properties=TensorProperties, chunks=list)
    return (
        parts is not None
        and _parts(parts["properties"], dtype=torch.dtype) is not None
        and all(isinstance(chunk, ChunkStorageMetadata) and _lies_in(parts["size"], chunk) for chunk in parts["chunks"])
        # DCP would leave a hole as it is
        and sum(chunk.sizes.numel() for chunk in parts["chunks"]) == parts["size"].numel()
    )


def _lies_in(size: torch.Size, chunk: ChunkStorageMetadata) -> bool:
    return (
        _parts(chunk, offsets=torch.Size, sizes=torch.Size) is not None
        and len(chunk.offsets) == len(chunk.sizes) == len(size)
        and all(0 <= at <= at + length <= whole for at, length, whole in zip(chunk.offsets, chunk.sizes, size))
    )


def _is_place(place: Any) -> bool:
    parts = _parts(place, relative_path=str, offset=int, length=int) if isinstance(place, _StorageInfo) else None
    return parts is not None and min(parts["offset"], parts["length"]) >= 0


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
