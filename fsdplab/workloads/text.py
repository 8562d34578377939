"""Reads real text without a download: the sources of Python's standard library, one token a byte.

A batch is a pure function of (seed, split, step, rank, micro-batch), so the batches of any rank can be repeated: by the
unsharded twin, or by a run resumed at another step.
"""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import random
import sys
import sysconfig
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from fsdplab.common.files import read_file

from .errors import TextError

TEXT_SUFFIXES = (".md", ".py", ".txt")
VALIDATION_SHARE = 10  # the last tenth of the bytes is kept for validation
MOST_BYTES = 10**9  # every rank holds the whole text in memory


@dataclass(frozen=True, eq=False)
class ByteText:
    """A text as bytes 0 to 255, one token each: the first nine tenths for training, the rest for validation.

    >>> ByteText.from_bytes(b"abcdefghij" * 10).train.numel()
    90
    """

    source: str  # its origin, for messages
    data: Tensor  # uint8 [bytes]

    @classmethod
    def from_standard_library(cls) -> ByteText:
        """Return the running interpreter's own top-level modules, in order of name; the same text on every machine with
        this Python.
        """
        return _library_in(Path(sysconfig.get_path("stdlib")))

    @classmethod
    def from_path(cls, path: str | os.PathLike[str]) -> ByteText:
        """Return the bytes of a file, or of all .md, .py and .txt files under a folder in order of path; `TextError` if
        there are none, or more than 10^9 bytes.
        """
        if not os.fspath(path):
            raise TextError("the path of the text is empty; give a file or a folder")
        return cls.from_bytes(_join(_files_of(Path(path).expanduser())), str(path))

    @classmethod
    def from_bytes(cls, raw: bytes, source: str = "bytes") -> ByteText:
        """Return a text from bytes in memory; no bytes raise `TextError`."""
        if not raw:
            raise TextError(f"the text {source} is empty: got 0 bytes; give a file with text in it")
        return cls(source, torch.frombuffer(bytearray(raw), dtype=torch.uint8))

    def __len__(self) -> int:
        return self.data.numel()

    @property
    def train(self) -> Tensor:
        """The bytes to train on, uint8."""
        return self.data[: self._train_bytes]

    @property
    def validation(self) -> Tensor:
        """The bytes kept back, uint8."""
        return self.data[self._train_bytes :]

    @property
    def _train_bytes(self) -> int:
        # of 105 bytes 95: the rest of the division is trained on
        return len(self) - len(self) // VALIDATION_SHARE

    @cached_property
    def fingerprint(self) -> str:
        """Sixteen hex digits that differ when any byte does: two runs with equal ones read the same text."""
        return hashlib.blake2b(self.data.numpy(), digest_size=8).hexdigest()

    def require(self, sequence_length: int, split: str = "train") -> None:
        """Raise `TextError` unless the split holds one sequence and the byte after it; call it before ranks are
        started.
        """
        if sequence_length < 1:
            raise TextError(f"sequence_length must be at least 1, got {sequence_length}")
        there, needed = self._split(split).numel(), sequence_length + 1
        if there < needed:
            raise TextError(
                f"the text {self.source} is too short: its {split} part has {there} bytes (of {len(self)}), and a"
                f" sequence_length of {sequence_length} needs at least {needed}; give a longer text or a shorter"
                " sequence_length"
            )

    def batch(
        self,
        step: int,
        rank: int,
        world_size: int,
        batch_size: int,
        sequence_length: int,
        micro_batch: int = 0,
        seed: int = 0,
        split: str = "train",
    ) -> tuple[Tensor, Tensor]:
        """Return the batch of `rank` at `step`: (tokens, targets), int64 [batch_size, sequence_length], targets one
        byte further on.

        The world size is checked against the rank and changes nothing else: rank 1 of 2 reads what rank 1 of 4 reads. A
        text too short for one sequence raises `TextError`.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to world_size - 1 = {world_size - 1}, got {rank}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.require(sequence_length, split)
        part = self._split(split)
        # seeded by its place: any process can draw the batch of any rank and step again
        draw = random.Random(f"{seed}/{split}/{step}/{rank}/{micro_batch}")
        # the last start leaves T + 1 bytes
        starts = torch.tensor([draw.randrange(part.numel() - sequence_length) for _ in range(batch_size)])
        windows = part[starts[:, None] + torch.arange(sequence_length + 1)].long()  # (B, T + 1)
        # the target of each token is the byte behind it
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def _split(self, split: str) -> Tensor:
        if split == "train":
            return self.train
        if split == "validation":
            return self.validation
        raise ValueError(f"unknown split {split!r}, expected 'train' or 'validation'")


@cache
def _library_in(folder: Path) -> ByteText:
    """Read once a process: it is 170 files, and a rank that tries many solutions trains on it each time."""
    # The interpreter's own list leaves out what a system or a user added to the folder.
    files = [folder / f"{name}.py" for name in sorted(sys.stdlib_module_names)]
    files = [file for file in files if file.is_file()]
    if not files:
        raise TextError(
            f"this Python's standard library has no sources to read in {folder}; give a text with ByteText.from_path"
            " (or --text PATH)"
        )
    return ByteText.from_bytes(_join(files), f"standard library of Python {platform.python_version()}")


def _files_of(path: Path) -> list[Path]:
    try:
        if path.is_file():
            return [path]
        if not path.exists():
            raise TextError(f"there is no text at {path}: the path does not exist; give a file or a folder")
        if not path.is_dir():
            raise TextError(f"{path} is neither a file nor a folder, but a pipe or a device; give a file or a folder")
        files = _texts_below(path)
    except OSError as error:
        raise TextError(f"cannot look for text at {path}: {error}; check the path and its permissions") from error
    if not files:
        raise TextError(
            f"the folder {path} holds no text: expected files ending in {', '.join(TEXT_SUFFIXES)}; name a file or"
            " another folder"
        )
    return files


def _texts_below(folder: Path) -> list[Path]:
    """Return the text files of a folder in order; the search ends when they are too large together, as those of `/`
    are.
    """
    files, nbytes = [], 0
    for file in folder.rglob("*"):
        if file.suffix in TEXT_SUFFIXES and file.is_file():
            files.append(file)
            # sizes alone, before any file is read
            nbytes += file.stat().st_size
            if nbytes > MOST_BYTES:
                raise _too_large(folder)
    return sorted(files)


def _join(files: list[Path]) -> bytes:
    parts, left = [], MOST_BYTES
    for file in files:
        try:
            parts.append(read_file(file, left))
        except OSError as error:
            if error.errno == errno.EOVERFLOW:
                raise _too_large(file) from None
            raise TextError(f"cannot read {file}: {error}; check the file and its permissions") from error
        left -= len(parts[-1])
    return b"".join(parts)


def _too_large(path: Path) -> TextError:
    return TextError(
        f"the text at {path} has more than {MOST_BYTES:,} bytes, and every rank holds all of it in memory; give a part"
        " of it"
    )
