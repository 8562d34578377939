"""Four usual additions to the package are one row or one file each; a strategy is tried in test_strategy_table.py.

Each is written into one file of a copy of the package. A fresh interpreter then finds it everywhere it should appear.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# file -> the row before which a row is written, as a regular expression, and the row
ROWS = {
    "common/collectives.py": (
        r'CollectiveRow\(\s*"gather"',
        'CollectiveRow("all_scan", ("allscan",), "scan", 1, colour="#123456", kernels=("my_scan",)),\n    ',
    ),
    "figures/table.py": (r'Column\(\s*"loss"', 'Column("machine", lambda run: "mine", "where it ran"),\n    '),
    "profiling/causes/waiting.py": (
        r'Rule\(\s*"skew"',
        'Rule("repacking", lambda kind, facts, left: of_claim(kind, left.claim("copying_ns")),\n'
        '         "Buffers are packed anew for {seconds}", "They are copied.", "Pack once."),\n    ',
    ),
}
EXERCISE = '''"""Double a number

Write double(number): twice the number.

1. Add it to itself.
2. `number + number`
3. `return 2 * number`
"""


def double(number):
    """Twice `number`."""
    ### BEGIN SOLUTION
    return 2 * number
    ### END SOLUTION


# ---- check: pure


def cases(rank, n):
    yield "three", 3
    yield "minus one", -1
'''
TRIED = """
import json, sys
from pathlib import Path
from fsdplab.common.collectives import bus_factor, kind_of
from fsdplab.figures.report.page import comparison_page
from fsdplab.figures.table import cells, legend, told
from fsdplab.figures.view import views
from fsdplab.profiling.findings import findings
from fsdplab.profiling.traces.comm_kernels import CommKernels
from fsdplab.records import RunRecord, comparison_json
from fsdplab.teaching.core.exercise_file import Exercise
from fsdplab.teaching.core.registry import find

record = RunRecord.load(Path(sys.argv[1]))
shown = views([record])
double = find("05.double", Exercise)
print(json.dumps({
    "kernel": CommKernels().kind("void my_scan<float>"), "name": kind_of("c10d::allscan_"),
    "bus": bus_factor("all_scan", 4),
    "column": "machine" in told(shown), "cell": cells(shown[0], ["machine"]), "legend": legend(["machine"]),
    "page": ">mine<" in comparison_page(comparison_json([record], None), [record]),
    "findings": [finding.title for finding in findings(record) if finding.kind == "repacking"],
    "exercise": [double.title, double.pure, "..." in double.stub, "return" in double.stub],
}))
"""


def package_with(tmp_path: Path) -> Path:
    """Return a folder with a copy of the package in which each addition stands in one file."""
    package = tmp_path / "fsdplab"
    shutil.copytree(ROOT / "fsdplab", package)
    (tmp_path / "data").symlink_to(ROOT / "data")
    (tmp_path / "notebooks").symlink_to(ROOT / "notebooks")
    for name, (before, row) in ROWS.items():
        text = (package / name).read_text(encoding="utf-8")
        (place,) = re.finditer(before, text)
        text = text[: place.start()] + row + text[place.start() :]
        (package / name).write_text(text, encoding="utf-8")
    (package / "teaching" / "exercises" / "05" / "double.py").write_text(EXERCISE, encoding="utf-8")
    return tmp_path


@pytest.mark.default("the usual additions, each in one file")
def test_a_row_or_a_file_is_enough(tmp_path: Path) -> None:
    folder = package_with(tmp_path)
    record = ROOT / "data" / "lesson-07" / "early"
    done = subprocess.run(
        [sys.executable, "-c", TRIED, str(record)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert (seen["kernel"], seen["name"], seen["bus"]) == ("all_scan", "all_scan", 0.75)
    assert seen["column"] and seen["cell"] == ["mine"] and seen["legend"] == "machine: where it ran" and seen["page"]
    assert len(seen["findings"]) == 1 and seen["findings"][0].startswith("Buffers are packed anew for ")
    assert seen["exercise"] == ["Double a number", True, True, False]
