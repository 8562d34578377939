"""The house of DESIGN section 1: imports run downwards only, outer libraries stay on the outer floors, chapters stay
short.

`arrows` reads every import of a source tree with `ast` (also those inside functions); `broken_rules` judges them.
The last tests feed the judge small bad houses that it must reject.
"""

from __future__ import annotations

import ast
import io
import statistics
import subprocess
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
FLOOR = {
    "cli": 4, "widgets": 4, "teaching": 4,
    "figures": 3, "gpu_check": 3,
    "sessions": 2,
    "profiling": 1, "planning": 1,
    "engine": 0, "workloads": 0, "records": 0,
}  # fmt: skip
NARROW = {  # a room on floor 1 may use these modules of the engine and no others
    "planning": ("engine.layout", "engine.schedule"),
    "profiling": ("engine.events", "records"),
}
FLOORS_3_AND_4 = {"plotly", "ipywidgets", "IPython", "anywidget", "nbformat", "nbclient", "ipykernel"}
CLI_ONLY = {"typer", "rich", "click", "tqdm"}
# extras: imported inside the function that needs them
LAZY_ONLY = {"pandas", "deepspeed", "transformers", "safetensors"}
INNER = {"torch", "numpy"}  # with the standard library, all that floors 0 to 2 may import
MAX_FILE_LINES = 600
MAX_ENGINE_LINES = 1500  # lines of code
NOT_THE_CORE = {
    "lanes", "staged", "gloo", "slots", "shared", "arenas", "choose",
    # who waits where, transports between CPUs, and the choice of one
    "shm_group", "shm_moves",  # shared memory as a process group, for torch's own engines
    "shared_gpu", "shared_gpu_series", "shared_gpu_cuda", "shared_gpu_host", "shared_gpu_peers", "timelines",
    "watchdog",  # several ranks on one GPU
    "checkpoint",  # training states to files and back; nothing imports it
    "offload", "offloaded_optimizer", "mapped",  # slices and optimizer state in host memory or files
    "extension", "halfway", "recompute", "norms", "traps",
    # one each: subclasses, fewer ranks, checkpointing, clipping, warnings
    "link", "deliveries", "stream_link",  # an emulated network
    "custom", "facade", "finalization",  # what users of PyTorch's FSDP2 may bring along, and what torch itself asks for
    "compat", "__init__",  # what depends on torch's version; the table of contents
}  # fmt: skip
MAX_MEDIAN_FUNCTION_LINES = 12


@dataclass(frozen=True)
class Arrow:
    """Module `source` (dotted, below the package) imports `target` at `line`; lazy = in a function or for type checkers
    only.
    """

    source: str
    target: str
    line: int
    lazy: bool

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.target}"


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; the package's own `__init__` is ''. `engine/__init__.py` is 'engine'."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


def absolute(node: ast.ImportFrom, source: str, path: Path, package: str) -> str:
    """The absolute module that `from X import ...` names, with relative dots resolved."""
    if not node.level:
        return node.module or ""
    here = [package, *source.split(".")] if source else [package]
    base = here if path.name == "__init__.py" else here[:-1]
    base = base[: len(base) - (node.level - 1)]
    return ".".join([*base, node.module] if node.module else base)


def imported_names(node: ast.AST, source: str, path: Path, package: str, known: dict[str, Path]) -> list[str]:
    """Absolute targets of one import statement: submodules where a name is one, else the module it is taken from."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = absolute(node, source, path, package)
    if base != package and not base.startswith(package + "."):
        return [base]
    full = [f"{base}.{alias.name}" for alias in node.names]
    rooms = {package + ("." + name if name else "") for name in known}
    return [name if name in rooms or base == package else base for name in full]


def runs_later(node: ast.AST) -> bool:
    """Whether what a node holds does not run when the module is imported: functions, and `if TYPE_CHECKING`."""
    if isinstance(node, ast.If):
        return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def arrows(package: Path) -> list[Arrow]:
    """Every import in the tree, package-internal targets without the package prefix."""
    known = modules(package)
    found = []
    for source, path in known.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = {id(node) for outer in ast.walk(tree) if runs_later(outer) for node in ast.walk(outer)}
        for node in ast.walk(tree):
            for name in imported_names(node, source, path, package.name, known):
                found.append(Arrow(source, name, getattr(node, "lineno", 0), id(node) in inside))
    return found


def room(module: str) -> str:
    """The room of a dotted name below the package; `cli_compare` and `cli.compare` are both in `cli`."""
    head = module.split(".")[0]
    return "cli" if head.startswith("cli_") else head


def inner_complaint(arrow: Arrow, target: str) -> str | None:
    """What is wrong with an arrow from one room of the house to another; None where it runs downwards."""
    here, there = room(arrow.source), room(target)
    if target == "__version__" or here == there:
        return None
    if here not in FLOOR or there not in FLOOR:
        return f"{arrow}: no such room on the floor plan"
    if FLOOR[here] <= FLOOR[there]:
        return f"{arrow}: from floor {FLOOR[here]} to floor {FLOOR[there]}, only downwards is allowed"
    allowed = NARROW.get(here)
    if allowed and not any(target == name or target.startswith(name + ".") for name in allowed):
        return f"{arrow}: {here} may take only {', '.join(allowed)}"
    return None


def outer_complaint(arrow: Arrow) -> str | None:
    """What is wrong with an import of a library from outside the package; None where it is allowed."""
    library, here = arrow.target.split(".")[0], room(arrow.source)
    if library in sys.stdlib_module_names:
        return None
    if here == "engine" and library != "torch":
        return f"{arrow}: the engine imports torch and nothing else"
    if library in LAZY_ONLY:
        return None if arrow.lazy else f"{arrow}: an extra, import it inside the function that needs it"
    if library in CLI_ONLY:
        return None if here == "cli" else f"{arrow}: only cli may import it"
    if library in INNER:
        return None
    if library in FLOORS_3_AND_4:
        return None if FLOOR.get(here, -1) >= 3 else f"{arrow}: only floors 3 and 4 may import it"
    return f"{arrow}: not among the libraries that the project depends on"


def cycles(found: list[Arrow], package: str) -> list[str]:
    """Import cycles among the package's modules, one line each."""
    graph: dict[str, set[str]] = {}
    for arrow in found:
        if arrow.target.startswith(package + "."):
            graph.setdefault(arrow.source, set()).add(arrow.target[len(package) + 1 :])
    complaints, done = [], set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            complaints.append("cycle: " + " -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return complaints


def broken_rules(package: Path) -> list[str]:
    """All complaints about one source tree; an empty list is a house in order."""
    found, complaints = arrows(package), []
    for arrow in found:
        if arrow.target == package.name or arrow.target.startswith(package.name + "."):
            complaints.append(inner_complaint(arrow, arrow.target[len(package.name) + 1 :]) if arrow.source else None)
        else:
            complaints.append(outer_complaint(arrow))
    return [complaint for complaint in complaints if complaint] + cycles(found, package.name)


def functions(tree: ast.AST) -> list[int]:
    """Length in lines of every function, without its docstring."""
    lengths = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = node.body[0].end_lineno - node.body[0].lineno + 1 if ast.get_docstring(node) else 0
            lengths.append(node.end_lineno - node.lineno + 1 - docstring)
    return lengths


def loaded_after(statement: str) -> set[str]:
    """Top-level modules that a fresh interpreter has loaded after a statement."""
    code = f"{statement}\nimport sys; print(*sorted(name.split('.')[0] for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_imports_run_downwards_only():
    assert broken_rules(ROOT / "fsdplab") == []


@pytest.mark.parametrize(
    "name,path", modules(ROOT / "fsdplab").items(), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_module_is_a_chapter(name, path):
    text = path.read_text(encoding="utf-8")
    assert ast.get_docstring(ast.parse(text)), f"{path}: a module opens with a docstring that says why it exists"
    assert len(text.splitlines()) <= MAX_FILE_LINES, f"{path}: more than {MAX_FILE_LINES} lines: is it one story?"


def test_functions_are_short():
    lengths = [
        n for path in modules(ROOT / "fsdplab").values() for n in functions(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def code_lines(text: str) -> int:
    """Lines that hold code: blank lines, comments and docstrings are not counted."""
    tree = ast.parse(text)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and ast.get_docstring(node)]
    skipped = {line for node in docstrings for line in range(node.lineno, node.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    used = {line for token in tokens if token.type not in layout for line in range(token.start[0], token.end[0] + 1)}
    return len(used - skipped)


def test_code_lines_leave_out_what_explains():
    assert (
        code_lines(
            '"""Why."""\n\nx = (\n    1,  # reason\n)\n\n\ndef f():\n    """One."""\n    # reason\n    return x\n'
        )
        == 5
    )


def test_engine_core_stays_small():
    """What is built on the core, one file a feature, is not the core; every such file is named above."""
    core = [path for path in sorted((ROOT / "fsdplab" / "engine").rglob("*.py")) if path.stem not in NOT_THE_CORE]
    lines = {path.stem: code_lines(path.read_text(encoding="utf-8")) for path in core}
    assert sum(lines.values()) < MAX_ENGINE_LINES, lines


def test_plain_import_is_light():
    assert not loaded_after("import fsdplab") & {
        "torch",
        "numpy",
        "pandas",
        "plotly",
        "IPython",
        "ipywidgets",
        "typer",
        "rich",
    }


def test_inner_floors_run_without_outer_libraries():
    inner = [
        name for name in modules(ROOT / "fsdplab") if FLOOR.get(room(name), 9) <= 2 and not name.endswith("__main__")
    ]
    loaded = loaded_after("\n".join(f"import fsdplab.{name}" for name in inner))
    of_torch_itself = loaded_after("import torch, torch.distributed.run, torch.distributed.tensor")
    assert not (loaded - of_torch_itself) & (FLOORS_3_AND_4 | CLI_ONLY | LAZY_ONLY)


def test_public_names_exist():
    import fsdplab

    assert all(getattr(fsdplab, name) is not None for name in fsdplab.__all__)
    with pytest.raises(AttributeError, match="public names"):
        fsdplab.no_such_name


@pytest.mark.parametrize(
    "path,source,complaint",
    [
        ("engine/a.py", "from fsdplab.sessions import run", "from floor 0 to floor 2"),
        ("records/a.py", "def f():\n    from fsdplab.engine import events", "from floor 0 to floor 0"),
        ("workloads/a.py", "from ..engine import layout", "from floor 0 to floor 0"),
        ("teaching/a.py", "from fsdplab import cli_compare", "from floor 4 to floor 4"),
        ("planning/a.py", "from fsdplab.engine.unit import Unit", "planning may take only"),
        ("profiling/a.py", "import fsdplab.workloads", "profiling may take only"),
        ("figures/a.py", "from fsdplab.cli.main import app", "from floor 3 to floor 4"),
        ("figures/a.py", "from fsdplab import shard_model", "no such room"),
        ("attic/a.py", "from fsdplab.engine import layout", "no such room"),
        ("sessions/a.py", "import plotly.graph_objects", "only floors 3 and 4"),
        ("figures/a.py", "from rich.table import Table", "only cli may import it"),
        ("engine/a.py", "import numpy", "torch and nothing else"),
        ("records/a.py", "import pandas", "inside the function"),
        ("records/a.py", "if True:\n    import pandas", "inside the function"),
        ("records/a.py", "if TYPE_CHECKING:\n    from fsdplab.engine import events", "from floor 0 to floor 0"),
        ("cli.py", "import scipy", "not among the libraries"),
        ("engine/a.py", "from fsdplab.engine import layout", "cycle: engine.a -> engine.layout"),
    ],
)
def test_the_judge_rejects_a_bad_house(tmp_path, path, source, complaint):
    package = tmp_path / "fsdplab"
    for name, text in {"__init__.py": "", "engine/layout.py": "", "cli_compare.py": "", path: source}.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text)
    if complaint.startswith("cycle"):
        (package / "engine/layout.py").write_text("from .a import x")
    assert any(complaint in line for line in broken_rules(package)), broken_rules(package)


def test_the_judge_accepts_a_good_house(tmp_path):
    good = {
        "__init__.py": "",
        "engine/__init__.py": "from .layout import rows\nfrom fsdplab.engine import layout",
        "engine/layout.py": "import math\nimport torch",
        "planning/traffic.py": "from fsdplab.engine.layout import rows",
        "records/run.py": "if TYPE_CHECKING:\n    import pandas\ndef frame():\n    import pandas",
        "figures/memory.py": (
            "import plotly.graph_objects as go\nfrom fsdplab import __version__\nfrom fsdplab.records import run"
        ),
        "cli.py": "import typer\nfrom fsdplab import cli_compare\nfrom fsdplab.sessions import x",
        "cli_compare.py": "from fsdplab.figures import memory",
        "sessions/__init__.py": "",
    }
    for name, text in good.items():
        (tmp_path / "fsdplab" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fsdplab" / name).write_text(text)
    assert broken_rules(tmp_path / "fsdplab") == []
