"""Reads checkpoint files and verifies their checksums before any value is used.

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
    """Hash the files that this rank wrote; rank 0 writes the manifest. All ranks of `group` (default: all) must call
    it; raises `OSError` on all of them if it fails on one.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0

    def written() -> dict[str, dict[str, Any]]:
        # DCP calls the files of rank 3 `__3_0.distcp`, `__3_1.distcp` and so on.
        paths = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
        if rank == 0:
            paths.append(folder / ".metadata")
        return {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in paths}

    files: dict[str, dict[str, Any]] = {}
    for of_rank in on_each_rank(written, group):
        files.update(sorted(of_rank.items()))
    text = json.dumps({"format": FORMAT, "files": files}, indent=1) + "\n"

    def write() -> None:
        if rank == 0:
            write_whole(folder / MANIFEST, text)
            to_disk(folder / MANIFEST)

    on_each_rank(write, group)  # no rank may load a checkpoint whose manifest is still to come


def check_manifest(folder: Path, required: bool) -> Files | None:
    """Return the files of the manifest; CheckpointDamaged, on all ranks, unless each of them is as it was saved.

    Each rank checks its share. Without a manifest nothing can be checked: a warning and None, or CheckpointDamaged if
    it is `required`.
    """
    files = on_all_ranks(partial(_manifest, folder))
    # Ranks on different machines may see different copies of the folder.
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
    """Raise CheckpointDamaged, on all ranks, unless every entry of the metadata lies in the folder and can be read
    without running code; each rank checks its share.

    Where `files` of a manifest have been checked, it names them all, and their tensors need no reading.
    """
    reach = _reach(metadata)
    _refuse(folder, [partial(_out_of_reach, folder, name, end, files) for name, end in reach.items()])
    # Plain values are unpickled, which is tried here. Tensors are read only where no manifest has checked their files.
    tensors, values = [], []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            values.append(MetadataIndex(name))
        elif files is None and isinstance(entry, TensorStorageMetadata):
            # A tensor has a chunk for each shard, and each chunk its own place in a file.
            tensors += [MetadataIndex(name, chunk.offsets, number) for number, chunk in enumerate(entry.chunks)]
    places = metadata.storage_data
    _refuse(folder, [partial(_harm, folder, index, places.get(index), metadata) for index in tensors + values])


def to_disk(path: Path) -> None:
    """Make a file, or the names in a folder, survive a loss of power."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def on_all_ranks(read: Callable[[], T]) -> T:
    """Return what `read` returns on this rank; CheckpointDamaged on all ranks if it raises that on one."""
    results: list[T] = []
    on_each_rank(lambda: results.append(read()))
    return results[0]


def on_each_rank(action: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Return what `action` returns on each rank of `group`; an error of one (of the kinds that this package raises) is
    raised on all.
    """
    try:
        outcome: tuple[Any, Exception | None] = action(), None
    except (OSError, ValueError, RuntimeError) as error:
        # Raised after the exchange, in which the other ranks wait for this one.
        outcome = None, error
    outcomes = _gathered(outcome, group)
    for _, failure in outcomes:
        if failure is not None:
            raise failure
    return [value for value, _ in outcomes]


def _refuse(folder: Path, checks: Sequence[Callable[[], str | None]]) -> None:
    """Raise CheckpointDamaged on all ranks if one of the checks gives a reason; each rank does its share of them."""
    rank, ranks = 0, 1
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()

    def check_share() -> list[str]:
        # Of 5 checks on 2 ranks the first does 0, 2 and 4, the second 1 and 3.
        results = [check() for check in checks[rank::ranks]]
        return [reason for reason in results if reason is not None]

    reasons: list[str] = []
    for of_rank in on_each_rank(check_share):  # a folder that a rank may not read is an OSError, on all ranks
        reasons += of_rank
    if reasons:
        raise CheckpointDamaged(
            f"the checkpoint in {folder} is damaged: {reasons[0]} ({len(reasons)} of {len(checks)} are); copy it again"
            " from where it was saved, or load an earlier one"
        )


def _manifest(folder: Path) -> Files | None:
    """Read the manifest: file name -> size and checksum; None where there is none."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:  # nested too deep
        raise CheckpointDamaged(f"{path} cannot be read ({error}); copy the checkpoint again") from error
    files = None
    if isinstance(content, dict) and content.get("format") == FORMAT:
        files = content.get("files")
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
    """Return by file how many bytes the entries of the metadata reach into it."""
    ends: dict[str, int] = {}
    # An entry of 20 bytes at 100 reaches to 120; each file must be as long as its last entry reaches.
    for place in metadata.storage_data.values():
        end = place.offset + place.length
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), end)
    return ends


def _out_of_reach(folder: Path, name: str, end: int, files: Files | None) -> str | None:
    """Say why the entries in a file cannot be read, before it is opened; None where they can."""
    path = _inside(folder, name)
    if path is None:
        return f"it names {name!r}, which lies elsewhere"
    if files is not None and name not in files:
        return f"{MANIFEST} does not name the file {name}"
    if not path.is_file():
        return f"{name} is missing"
    size = path.stat().st_size
    if size < end:
        return f"{name} has {size:,} bytes of at least {end:,}"
    return None


def _damage(folder: Path, name: str, entry: Mapping[str, Any]) -> str | None:
    """Say how a file differs from its entry in the manifest; None where it does not."""
    path = _inside(folder, name)
    if path is None:
        return f"{MANIFEST} names {name!r}, which lies elsewhere"
    if not path.is_file():
        return f"{name} is missing, which {MANIFEST} names"
    # The size first: a file that was cut short need not be hashed.
    size = path.stat().st_size
    if size != entry["bytes"]:
        return f"{name} has {size:,} bytes of {entry['bytes']:,} in {MANIFEST}"
    try:
        digest = _digest(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    if digest != entry["sha256"]:
        return f"{name} has another checksum than in {MANIFEST}"
    return None


def _inside(folder: Path, name: str) -> Path | None:
    """Return the path of a file of the folder; None for a name that leads elsewhere or is none."""
    path = folder / name
    # "../a", "a/b" and "/a" have other parents than the folder; ".." has not.
    if path.parent != folder or name == ".." or "\0" in name:
        return None
    return path


def _harm(folder: Path, index: MetadataIndex, place: Any, metadata: Metadata) -> str | None:
    """Say why one entry cannot be read, or not without running code; None where it can."""
    name = index.fqn
    entry = metadata.state_dict_metadata[name]
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
    chunk = entry.chunks[index.index or 0]
    if isinstance(value, torch.Tensor) and value.shape == chunk.sizes and value.dtype == entry.properties.dtype:
        return None
    return f"the entry {name!r} in {place.relative_path} is not the tensor that .metadata describes"


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _gathered(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the values of all ranks, by rank; without a process group the one value."""
    if not dist.is_initialized():
        return [value]
    by_rank: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(by_rank, value, group)
    return by_rank


# ---- reading without running


class _Unpickler(pickle.Unpickler):
    """Makes what DCP's metadata consists of, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        kind = getattr(dcp_metadata, name, None)
        # Only classes that DCP's metadata module defines, none that it has imported.
        if isinstance(kind, type) and module == kind.__module__ == dcp_metadata.__name__:
            return kind
        if (module, name) in _ALLOWED:
            return super().find_class(module, name)
        if module == "torch":
            dtype = getattr(torch, name, None)
            if isinstance(dtype, torch.dtype):
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
    """Reads as DCP does, but unpickles the metadata without running anything."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the metadata; CheckpointDamaged where it is none."""
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
    """Return whether the parts of unpickled metadata have the types that DCP gives them."""
    parts = _parts(metadata, state_dict_metadata=dict, storage_data=dict)
    if parts is None:
        return False
    for name, entry in parts["state_dict_metadata"].items():
        if not isinstance(name, str) or not _is_described(entry):
            return False
    for index, place in parts["storage_data"].items():
        if not isinstance(index, MetadataIndex) or not _is_place(place):
            return False
    return True


def _parts(value: Any, **kinds: type) -> dict[str, Any] | None:
    """Return the attributes of an unpickled object, which may lack any; None unless these have their types."""
    parts = vars(value)
    for name, kind in kinds.items():
        # in Python a bool is an int
        if not isinstance(parts.get(name), kind) or type(parts[name]) is bool:
            return None
    return parts


def _is_described(entry: Any) -> bool:
    """Return whether an entry is a plain value, or a tensor whose chunks fill it."""
    if not isinstance(entry, TensorStorageMetadata):
        return isinstance(entry, BytesStorageMetadata)
    parts = _parts(entry, size=torch.Size, properties=TensorProperties, chunks=list)
    if parts is None or _parts(parts["properties"], dtype=torch.dtype) is None:
        return False
    for chunk in parts["chunks"]:
        if not isinstance(chunk, ChunkStorageMetadata) or not _lies_in(parts["size"], chunk):
            return False
    return _fill(parts["chunks"], parts["size"])


def _fill(chunks: Sequence[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Return whether chunks that lie in a tensor hold each of its elements once.

    DCP would leave a hole as it is, and let the last of two chunks that overlap win. Chunks of (3, 4) at (0, 0) and
    (2, 4) at (3, 0) fill a tensor of (5, 4): their 12 + 8 elements are as many, and they do not overlap.
    """
    if sum(chunk.sizes.numel() for chunk in chunks) != size.numel():
        return False
    with_elements = [chunk for chunk in chunks if chunk.sizes.numel()]
    # Along the dimension that is cut into most parts only few chunks lie side by side.
    parts_along = [len({chunk.offsets[dim] for chunk in with_elements}) for dim in range(len(size))]
    if not parts_along:  # a scalar: one chunk with one element
        return True
    along = parts_along.index(max(parts_along))
    side_by_side: list[ChunkStorageMetadata] = []
    for chunk in sorted(with_elements, key=lambda chunk: chunk.offsets[along]):
        begin = chunk.offsets[along]
        side_by_side = [before for before in side_by_side if before.offsets[along] + before.sizes[along] > begin]
        if any(_overlap(before, chunk) for before in side_by_side):
            return False
        side_by_side.append(chunk)
    return True


def _overlap(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    """Return whether two chunks with elements have one in common: whether their rows, columns and so on meet."""
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes)
    return all(at < other_at + other_length and other_at < at + length for at, length, other_at, other_length in spans)


def _lies_in(size: torch.Size, chunk: ChunkStorageMetadata) -> bool:
    if _parts(chunk, offsets=torch.Size, sizes=torch.Size) is None:
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(0 <= at <= at + length <= whole for at, length, whole in zip(chunk.offsets, chunk.sizes, size))


def _is_place(place: Any) -> bool:
    if not isinstance(place, _StorageInfo):
        return False
    parts = _parts(place, relative_path=str, offset=int, length=int)
    return parts is not None and parts["offset"] >= 0 and parts["length"] >= 0


class CheckedPlanner(dcp.DefaultLoadPlanner):
    """Loads as DCP's planner does; entries that are no tensors are plain values, or refused."""

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
