"""Under pytest every notebook is run in both editions, and the learner's folder is a temporary one.

nbval runs the cells of a source, which is the teacher edition, one by one. Then one item more runs the learner edition
in the same kernel: tests/learner_edition.py says which cells that are. No notebook needs another to have run: under
`pytest -n 2` two of them run side by side. `pytest notebooks --busy` does the same while every core is busy.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from nbformat.v4 import new_code_cell
from nbval.plugin import IPyNbCell, IPyNbFile

from fsdplab.teaching.authoring.course import read, tags_of
from fsdplab.teaching.core.workspace import Workspace
from tests.busy import pytest_runtestloop  # noqa: F401 (hook)
from tests.tiers import pytest_addoption, pytest_collection_modifyitems, pytest_configure, pytest_xdist_make_scheduler  # noqa: F401 (hooks)

NOTEBOOKS = Path(__file__).resolve().parent
SCRATCH = tempfile.TemporaryDirectory(prefix="fsdplab-notebooks-")
TESTS = NOTEBOOKS.parent / "tests"
WATCH = "; ".join(
    [
        f"__import__('sys').path.insert(0, {str(TESTS)!r})",
        "__import__('learner_edition').watch(get_ipython())",
        "__import__('sys').path.pop(0)",
    ]
)
TAKES_UP = {"06_a_whole_model": "05_one_sharded_unit"}  # 06 trains with the functions that passed their checks in 05


class BothEditions(IPyNbFile):
    """The cells of a source, and its learner edition."""

    def setup(self) -> None:
        """A kernel that notes what its cells do, and the folder of a learner who has solved what it takes up."""
        own = Path(SCRATCH.name) / self.path.stem / "my_fsdp"
        if self.path.stem in TAKES_UP:
            solve(NOTEBOOKS / f"{TAKES_UP[self.path.stem]}.ipynb", Workspace(own))
        os.environ["FSDPLAB_HOME"] = str(own)  # which the kernel inherits
        try:
            super().setup()
        except RuntimeError:
            # a port that was free when it was chosen may be another test's by the time the kernel takes it
            super().setup()
        self.kernel.await_idle(self.kernel.execute_cell_input(WATCH), timeout=60)

    def teardown(self) -> None:
        """Other tests choose their own folder."""
        super().teardown()
        os.environ.pop("FSDPLAB_HOME", None)

    def collect(self) -> Iterator[pytest.Item]:
        """nbval's items, then one."""
        cells = list(super().collect())
        own = Path(SCRATCH.name) / f"{self.path.stem}-learner" / "my_fsdp"
        run = new_code_cell(
            f"__import__('sys').modules['learner_edition'].run_learner_edition({str(self.path)!r}, {str(own)!r})"
        )
        yield from cells
        yield IPyNbCell.from_parent(
            self, name="learner edition", cell_num=len(cells), cell=run, options=defaultdict(bool)
        )


def solve(notebook: Path, workspace: Workspace) -> None:
    """Leave the notebook's exercises in the folder as its teacher edition does: saved, and passed."""
    for cell in read(notebook).cells:
        first, _, body = cell.source.partition("\n")
        if "solution" in tags_of(cell) and first.startswith("%%exercise"):
            exercise = first.split()[1]
            workspace.save(exercise, body)
            workspace.note_pass(exercise, body)


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Where nbval is asked to run a notebook, it runs in both editions."""
    found = yield
    return [BothEditions.from_parent(parent, path=file_path) if isinstance(each, IPyNbFile) else each for each in found]
