"""Runs one code cell of a notebook's source by its id, so that a test tries what learners have before them."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parents[1] / "notebooks"
SHOWN = "_"  # the name of what a cell's last expression gives, as in a notebook


def sources_of(notebook: str) -> dict[str, str]:
    """Return the text of each cell of a source, by the cell's id."""
    (path,) = NOTEBOOKS.glob(f"{notebook}_*.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {cell["id"]: "".join(cell["source"]) for cell in cells}


def source_of(notebook: str, cell: str) -> str:
    """Return the text of a cell: `source_of("07", "late-heatmap")`."""
    return sources_of(notebook)[cell]


def run_cell(notebook: str, cell: str, /, **names: Any) -> dict[str, Any]:
    """Run a cell where the notebook's imports and `names` are known; return all names, with what it shows as `_`."""
    namespace: dict[str, Any] = {}
    sources = sources_of(notebook)
    start = next(source for source in sources.values() if "teaching.start(" in source)
    imports = [line for line in start.splitlines() if "import" in line]
    exec("\n".join(imports), namespace)
    namespace.update(names)
    tree = ast.parse(sources[cell])
    last = tree.body[-1]
    if isinstance(last, ast.Expr):
        tree.body[-1] = ast.copy_location(ast.Assign([ast.Name(SHOWN, ast.Store())], last.value), last)
        ast.fix_missing_locations(tree)
    exec(compile(tree, f"{notebook}.{cell}", "exec"), namespace)
    return namespace
