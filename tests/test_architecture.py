"""The rules that pyproject.toml holds are kept (imports, lint, format, types), and files stay readable.

The import rules are tried on copies of the package with one wrong import each, which they must reject.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.without_linux import TAKES

pytestmark = pytest.mark.quick
ROOT = Path(__file__).resolve().parents[1]
GUIDES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
# need torch and numpy
INNER = ("engine", "checkpoint", "workloads", "records", "planning", "profiling", "sessions", "recording")
OUTER = {
    "plotly",
    "jinja2",
    "ipywidgets",
    "anywidget",
    "IPython",
    "nbformat",
    "nbclient",
    "ipykernel",
    "typer",
    "rich",
    "click",
}
WHEN_NEEDED = {"pandas", "deepspeed", "tensorboard", "cloudpickle"}  # imported inside the function that needs them
WITHOUT_TORCH = ("layout", "pending", "unit", "step")  # files of the engine's core
MAX_LINES_OF_A_STEP = 800
MAX_MEDIAN_FUNCTION_LINES = 12


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file; the package's own `__init__` is ''. `engine/__init__.py` is 'engine'."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(part for part in parts if part != "__init__")] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    """A file's syntax tree, made once for all tests."""
    return ast.parse(path.read_text(encoding="utf-8"))


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


# ---- what tools check


def tool(*command: str, cwd: Path = ROOT) -> tuple[int, str]:
    """The exit status of `python ...` and all that it printed."""
    environment = {name: value for name, value in os.environ.items() if name != TAKES}  # mypy is compiled for Linux
    limit_s = 880  # mypy takes a minute of CPU time, which a busy machine makes a quarter of an hour
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=limit_s, env=environment
    )
    return done.returncode, done.stdout + done.stderr


LINT_IMPORTS = ("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")


@pytest.mark.quick("a wrong type or a wrong import is seen before anything else")
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "command",
    [("-m", "ruff", "check", "."), ("-m", "ruff", "format", "--check", "."), ("-m", "mypy"), LINT_IMPORTS],
    ids=["lint", "format", "types", "imports"],
)
def test_a_tool_has_nothing_to_say(command):
    status, said = tool(*command)
    assert status == 0, said


WRONG_IMPORTS = [
    ("records/tables.py", "def f():\n    from fsdplab.engine import events", "Imports run downwards"),
    ("widgets/tabs.py", "from fsdplab.cli import errors", "Imports run downwards"),
    ("planning/traffic.py", "from fsdplab.engine.core.memory import UnitMemory", "Planning takes of the engine"),
    ("planning/hardware.py", "import fsdplab.workloads.models", "Planning takes of workloads"),
    ("profiling/traces/skew.py", "import fsdplab.workloads.text", "Profiling takes"),
    ("sessions/summary.py", "import plotly.graph_objects", "The lower layers"),
    ("figures/table.py", "from rich.table import Table", "Only the command line"),
    ("teaching/core/answers.py", "import fsdplab.teaching.lessons.nb00_tour.lesson", "In the course"),
    ("teaching/lessons/nb00_tour/lesson.py", "import fsdplab.teaching.lessons.nb12_hybrid.on_ranks", "A lesson"),
    ("teaching/lessons/nb12_hybrid/on_ranks.py", "import fsdplab.teaching.core.display", "What runs on ranks"),
    ("engine/core/layout.py", "import numpy", "The engine imports torch"),
    ("engine/core/unit.py", "import fsdplab.engine.transport.gloo", "The engine's core knows"),
    ("profiling/intervals.py", "import fsdplab.profiling.traces.segments", "No cycles"),
]


def test_wrong_imports_are_rejected(tmp_path):
    """One copy of the package with a wrong import for each rule; each rule names the import that breaks it."""
    shutil.copytree(ROOT / "fsdplab", tmp_path / "fsdplab", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for path, source, _ in WRONG_IMPORTS:
        wrong = tmp_path / "fsdplab" / path
        wrong.write_text(f"{wrong.read_text()}\n{source}\n")
    status, said = tool(*LINT_IMPORTS, cwd=tmp_path)
    assert status == 1, said
    broken = {line for line in said.splitlines() if "BROKEN" in line}
    for path, source, rule in WRONG_IMPORTS:
        importer = "fsdplab." + path.removesuffix(".py").replace("/", ".")
        assert any(line.startswith(rule) for line in broken), f"{rule!r} did not reject {source!r}"
        told = ".intervals -> .traces" if rule == "No cycles" else f"{importer} -> "
        assert told in said, f"nothing was said of {importer}"


# ---- files


def test_functions_are_short():
    lengths = [n for path in modules(ROOT / "fsdplab").values() for n in functions(tree_of(path))]
    assert statistics.median(lengths) <= MAX_MEDIAN_FUNCTION_LINES


def test_the_order_of_a_step_is_read_in_an_evening():
    core = ROOT / "fsdplab" / "engine" / "core"
    texts = [(core / f"{name}.py").read_text(encoding="utf-8") for name in WITHOUT_TORCH]
    # comments make the evening shorter, not longer
    lines = [sum(not line.lstrip().startswith("#") for line in text.splitlines()) for text in texts]
    assert sum(lines) < MAX_LINES_OF_A_STEP, dict(zip(WITHOUT_TORCH, lines))


def test_the_order_of_a_step_needs_no_torch():
    loaded = loaded_after("\n".join(f"import fsdplab.engine.core.{name}" for name in WITHOUT_TORCH))
    assert "fsdplab" in loaded and not loaded & {"torch", "numpy"}


def test_what_the_guides_name_exists():
    """The paths in guides and docstrings: a move must not leave one behind."""
    texts = [*GUIDES, *(ROOT / "fsdplab").rglob("*.py")]
    named = {
        name for path in texts for name in re.findall(r"`(\w[\w/]*/[\w/]+\.py)`", path.read_text(encoding="utf-8"))
    }
    tops = (ROOT, ROOT / "fsdplab", ROOT / "fsdplab" / "engine")
    assert len(named) > 15
    assert [name for name in sorted(named) if not any((top / name).exists() for top in tops)] == []


def test_every_file_beside_the_code_is_package_data():
    """Templates and other files that an installed package reads are named in pyproject.toml."""
    tomllib = pytest.importorskip("tomllib", reason="reading pyproject.toml needs Python 3.11")
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["package-data"]
    packages = {path.parent for path in modules(ROOT / "fsdplab").values()}
    files = [path for path in (ROOT / "fsdplab").rglob("*.*") if path.suffix not in (".py", ".pyc")]
    assert len([path for path in files if path.parent.name == "templates"]) >= 10
    for path in files:
        package = next(folder for folder in path.parents if folder in packages)
        named = ".".join(package.relative_to(ROOT).parts)
        patterns = [*listed["*"], *listed.get(named, ())]
        assert any(path in package.glob(pattern) for pattern in patterns), f"{path} would not be in a wheel"


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


def test_reports_are_read_shown_and_exported_without_torch():
    """It takes two seconds to import, and `fsdplab report` half a second without it."""
    work = "import fsdplab.cli.report, fsdplab.figures.report.page, fsdplab.profiling.tables"
    work += "\nfrom fsdplab.sessions import RunSpec\nRunSpec(model='gpt-tiny', device='cpu')"
    assert "torch" not in loaded_after(work)


def test_inner_layers_run_without_outer_libraries():
    known = modules(ROOT / "fsdplab")
    inner = [name for name in known if name.partition(".")[0] in INNER and not name.endswith("__main__")]
    loaded = loaded_after("\n".join(f"import fsdplab.{name}" for name in inner))
    outer = loaded & (OUTER | WHEN_NEEDED)
    if outer:  # torch may import some of them by itself
        outer -= loaded_after("import torch, torch.distributed.run, torch.distributed.tensor")
    assert not outer


def test_public_names_exist():
    import fsdplab

    assert all(getattr(fsdplab, name) is not None for name in fsdplab.__all__)
    with pytest.raises(AttributeError, match="public names"):
        fsdplab.no_such_name
