"""Fixtures that several test modules share; what only the course needs is imported where it is used, since GPU machines lack its packages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.ranks import RankPool

if TYPE_CHECKING:
    from fsdplab.teaching.course_state import Course
    from fsdplab.teaching.findings import Finding
    from fsdplab.teaching.home import Home


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """The pool of real rank processes: `ranks(world_size, function, *arguments) -> [result of each rank]`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """One learner's folder for a module's tests."""
    from fsdplab.teaching.home import Home

    return Home(tmp_path_factory.mktemp("learner") / "my_fsdp")


@pytest.fixture(scope="module")
def course(home: Home) -> Iterator[Course]:
    """That learner's course, open; after the module no course is."""
    from fsdplab.teaching import course_state

    yield course_state.open_course("learner", home.path)
    course_state._open.clear()


@pytest.fixture(scope="module")
def tried(request: pytest.FixtureRequest, home: Home) -> dict[tuple[str, str], Finding | None]:
    """The finding on each of the module's SOLUTIONS, by its key."""
    from tests.solutions import try_all

    return try_all(request.module.SOLUTIONS, home)
