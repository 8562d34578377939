"""Fixtures that several test modules share, and how tests are chosen and spread over workers.

What only the course, or only xdist, needs is imported where it is used, since GPU machines lack these packages.
"""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.browser import browser, chromium, course_lab, course_server, lab_cells, plain_server  # noqa: F401 (fixtures)
from tests.live_site import empty_pyodide, live_site, small_course  # noqa: F401 (fixtures)
from tests.on_linux import pytest_runtest_call, pytest_runtest_setup  # noqa: F401 (hooks)
from tests.ranks import RankPool
from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_configure, pytest_xdist_make_scheduler  # noqa: F401 (hooks)

if TYPE_CHECKING:
    from fsdplab.teaching.core.course_state import Course
    from fsdplab.teaching.core.workspace import Workspace


# A shell makes what it starts in the background deaf to Ctrl-C, and so would be all processes that tests start and
# interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m quick` does not even import the files that have no quick test."""
    if (
        config.option.markexpr == "quick"
        and collection_path.suffix == ".py"
        and "mark.quick" not in collection_path.read_text(encoding="utf-8")
    ):
        return True
    return None


def pytest_collection_finish() -> None:
    """What the tests have imported stays: a collection that looked at all of it would take a second each time.

    And torch computes on one thread, as ranks do: other cores have tests of their own, and threads that wait spin.
    """
    gc.collect()
    gc.freeze()
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Real ranks: `ranks(world_size, function, *arguments) -> [result of each rank]`."""
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """One learner's folder for a module's tests."""
    from fsdplab.teaching.core.workspace import Workspace

    return Workspace(tmp_path_factory.mktemp("learner") / "my_fsdp")


@pytest.fixture(scope="module")
def course(workspace: Workspace) -> Iterator[Course]:
    """That learner's course, open; after the module no course is."""
    from fsdplab.teaching.core import course_state

    yield course_state.open_course("learner", workspace.path)
    course_state._open.clear()
