"""Under pytest every notebook is run in both editions, and the learner's folder is a temporary one.

nbval runs the cells of a source, which is the teacher edition, one by one. Then one item more runs the learner edition in the same kernel:
tests/learner_edition.py says which cells that are. Under `pytest -n 2` the cells of one notebook stay together, two notebooks side by side.
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

SCRATCH = tempfile.TemporaryDirectory(prefix="fsdplab-notebooks-")
TESTS = Path(__file__).resolve().parents[1] / "tests"
WATCH = f"__import__('sys').path.insert(0, {str(TESTS)!r}); __import__('learner_edition').watch(get_ipython()); __import__('sys').path.pop(0)"
TOGETHER = {"06_a_whole_model": "05_one_sharded_unit"}  # 06 trains with what passed its check in 05


class BothEditions(IPyNbFile):
    """The cells of a source, and its learner edition."""

    def setup(self) -> None:
        """A kernel that notes what its cells do."""
        super().setup()
        self.kernel.await_idle(self.kernel.execute_cell_input(WATCH), timeout=60)

    def collect(self) -> Iterator[pytest.Item]:
        """nbval's items, then one."""
        cells = list(super().collect())
        run = f"__import__('sys').modules['learner_edition'].run_learner_edition({str(self.path)!r}, {str(Path(SCRATCH.name) / 'learner' / 'my_fsdp')!r})"
        cells.append(IPyNbCell.from_parent(self, name="learner edition", cell_num=len(cells), cell=new_code_cell(run), options=defaultdict(bool)))
        for cell in cells:
            cell.add_marker(pytest.mark.xdist_group(TOGETHER.get(self.path.stem, self.path.stem)))
            yield cell


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Sources of the course in both editions; other notebooks as nbval runs them."""
    found = yield
    return [BothEditions.from_parent(parent, path=file_path) if isinstance(each, IPyNbFile) else each for each in found]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The first cell of a notebook starts its kernel, which inherits this."""
    os.environ["FSDPLAB_HOME"] = str(Path(SCRATCH.name) / "my_fsdp")


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Other tests choose their own folder."""
    os.environ.pop("FSDPLAB_HOME", None)
