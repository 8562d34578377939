"""Runs a notebook's script cell by cell where not every package is installed: `python -m fsdplab.gpu_check.script FILE
RESULT`.

What needs a package that is not there (a figure, a slider) is left out and named; all else must run. A name that a
left-out statement would have made stands for "not there", so that only what really needs it is left out after it.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fsdplab.common.files import write_whole

from .cells import marked_cells

OWN = ("fsdplab", "my_fsdp")  # a missing module of these is a fault, not a package to install


class NotThere:
    """Stands for what a left-out statement would have bound; any use says which package is needed."""

    def __init__(self, package: str) -> None:
        object.__setattr__(self, "package", package)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError(f"needs {self.package}", name=self.package)

    __call__ = __iter__ = __getitem__ = __len__ = __float__ = __int__ = __str__ = __lt__ = __gt__ = __le__ = __ge__ = (
        _refuse
    )
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __neg__ = (
        __contains__
    ) = _refuse

    def __getattr__(self, name: str) -> Any:
        return self._refuse()


@dataclass
class CellRun:
    """How one cell went: statements run and left out, and the packages they need; `error` where it failed."""

    number: int
    id: str
    ran: int = 0
    left_out: int = 0
    needs: list[str] = field(default_factory=list)
    error: str = ""


@dataclass
class ScriptRun:
    """How a script went so far: the cells reached, of how many, and how many recorded runs it made on each device."""

    cells_in_all: int
    cells: list[CellRun] = field(default_factory=list)
    runs_on: dict[str, int] = field(default_factory=dict)
    ended: bool = False

    def save(self, path: Path) -> None:
        """Write it in one move: whoever watches never reads half of it."""
        write_whole(path, json.dumps(asdict(self)))


def run_script(path: Path, result: Path) -> ScriptRun:
    """Run the script, saving to `result` after each cell; it ends with the last cell or with the first that fails."""
    text = path.read_text(encoding="utf-8")
    cells = _by_cell(ast.parse(text, str(path)), marked_cells(text))
    linecache.cache[str(path)] = (len(text), None, text.splitlines(keepends=True), str(path))
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    run = ScriptRun(len(cells) - 1)
    for number, name, statements in cells:
        cell = CellRun(number, name)
        if number:
            run.cells.append(cell)
            run.save(result)
            print(f"---- cell {number} {name}", flush=True)
        _run_cell(cell, statements, vars(module), str(path))
        if cell.error:
            break
    else:
        run.ended = True
    run.runs_on = devices_of(vars(module))
    run.save(result)
    return run


def _by_cell(tree: ast.Module, marks: list[tuple[int, int, str]]) -> list[tuple[int, str, list[ast.stmt]]]:
    """Statements under the cell that they stand in; those before the first belong to cell 0."""
    found: list[tuple[int, str, list[ast.stmt]]] = [(0, "header", [])]
    waiting = list(marks)
    for statement in tree.body:
        while waiting and waiting[0][0] <= statement.lineno:
            found.append((*waiting.pop(0)[1:], []))
        found[-1][2].append(statement)
    return [*found, *((number, name, []) for _, number, name in waiting)]


def _run_cell(cell: CellRun, statements: list[ast.stmt], names: dict[str, Any], file: str) -> None:
    for _index, statement in enumerate(one for each in statements for one in _apart(each)):
        try:
            _run_statement(statement, names, file)
            cell.ran += 1
        except ModuleNotFoundError as error:
            package = missing_package(error)
            if package is None:
                return _note_failure(cell, error)
            cell.left_out += 1
            cell.needs = sorted({*cell.needs, package})
            names.update(dict.fromkeys(_bound_by(statement), NotThere(package)))
            print(f"(left out, needs {package}: {ast.unparse(statement).splitlines()[0]})", flush=True)
        except BaseException as error:
            return _note_failure(cell, error)


def _note_failure(cell: CellRun, error: BaseException) -> None:
    traceback.print_exc()
    said = str(error).strip().splitlines()
    cell.error = f"{type(error).__name__}: {said[0]}"[:300] if said else type(error).__name__


def _apart(statement: ast.stmt) -> Iterator[ast.stmt]:
    """`from a import b, c` as two imports: one of them may be there."""
    if not isinstance(statement, ast.ImportFrom):
        yield statement
        return
    for alias in statement.names:
        yield ast.copy_location(ast.ImportFrom(statement.module, [alias], statement.level), statement)


def _run_statement(statement: ast.stmt, names: dict[str, Any], file: str) -> None:
    """Run it; the value of an expression is printed, as a notebook shows its last one."""
    if not isinstance(statement, ast.Expr):
        exec(compile(ast.Module([statement], []), file, "exec"), names)
        return
    value = eval(compile(ast.Expression(statement.value), file, "eval"), names)
    if isinstance(value, NotThere):
        value()
    if value is not None:
        print(repr(value), flush=True)


def missing_package(error: ModuleNotFoundError) -> str | None:
    """The package from outside whose absence the error is about; None where it is a fault of our own."""
    package = (error.name or "").partition(".")[0]
    return None if not package or package in OWN or _is_there(package) else package


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def _bound_by(statement: ast.stmt) -> list[str]:
    """The names that a statement would have bound at the top level."""
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).partition(".")[0] for alias in statement.names]
    stores = (node for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    return [node.id for node in stores]


def devices_of(names: dict[str, Any]) -> dict[str, int]:
    """How many run records the script holds, by the device they ran on: `{"cpu": 3}`."""
    found: dict[int, str] = {}
    todo = list(names.values())
    while todo:
        value = todo.pop()
        if type(value).__name__ == "RunRecord":
            found[id(value)] = value.environment.get("device", "unknown")
        elif type(value) in (list, tuple, dict):
            todo += value.values() if isinstance(value, dict) else value
    return {device: list(found.values()).count(device) for device in sorted(set(found.values()))}


def main(path: str, result: str) -> int:
    """0 where the script reached its end."""
    return 0 if run_script(Path(path), Path(result)).ended else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
