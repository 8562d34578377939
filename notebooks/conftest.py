"""Under pytest the learner's folder is a temporary one, so that a test run never touches anybody's exercises."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

SCRATCH = tempfile.TemporaryDirectory(prefix="fsdplab-notebooks-")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The first cell of a notebook starts its kernel, which inherits this."""
    os.environ["FSDPLAB_HOME"] = str(Path(SCRATCH.name) / "my_fsdp")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Other tests choose their own folder."""
    os.environ.pop("FSDPLAB_HOME", None)
