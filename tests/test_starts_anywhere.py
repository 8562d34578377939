"""Ranks start on whatever machine: with many open files, beside an editor, on file systems without locks, and where the
kernel denies what forking needs.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fsdplab.gpu_check.foundations import source_digest
from fsdplab.sessions import RunSpec, call_on_ranks, compare
from fsdplab.sessions.launch import warm

PROGRAMS = Path(__file__).with_name("warm_programs.py")
STARTER = "sessions.launch.starter"  # in the command line of a starter, and of nothing else
TINY = {"model": "gpt-tiny", "steps": 2, "sequence_length": 32, "device": "cpu"}

pytestmark = pytest.mark.skipif(warm.why_not() is not None, reason=f"no warm starts here: {warm.why_not()}")


def call(name: str = "look", **arguments: Any) -> Any:
    return call_on_ranks(PROGRAMS, name, **{"world_size": 2, "time_limit": 60.0, "start": "warm", **arguments})


@pytest.fixture
def many_files() -> Iterator[None]:
    """More open files than `select` can name."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in opened:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_ranks_start_beside_more_than_1024_open_files(many_files: None) -> None:
    warm.end()
    assert len(call()) == 2
    records = compare([RunSpec(strategy=strategy, start="warm", **TINY) for strategy in ("no_shard", "full_shard")])
    assert [record.status for record in records] == ["finished"] * 2 and records[0].summary.in_turns
    warm.end()


def test_an_editors_lock_is_no_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "module.py").write_text("value = 1\n")
    digest = source_digest(tmp_path)
    (tmp_path / ".#module.py").symlink_to("somebody@somewhere.1234:1")
    monkeypatch.setattr(warm, "_PACKAGE", tmp_path)
    assert len(call()) == 2 and source_digest(tmp_path) == digest
