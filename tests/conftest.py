"""Fixtures that several test modules share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of real rank processes: `ranks(world_size, function, *arguments) -> [result of each rank]`."""
    pool = RankPool()
    yield pool
    pool.close()
