"""What depends on where this package came from: the folders of the course and the data, and how to install what lacks.

In a clone of the repository `notebooks/` and `data/` lie beside the package. A wheel holds copies inside the package
(setup.py puts them there), so a plain installation has them too.
"""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_WITHOUT_METADATA = {
    "lab": ("jupyterlab", "ipywidgets", "anywidget", "plotly", "jinja2", "pandas"),
    "peers": ("deepspeed",),
}
IN_A_WHEEL = "_beside"  # the folder of the copies; setup.py reads this name


def checkout() -> Path | None:
    """Find the clone that this package is used from; None where it was installed."""
    root = _PACKAGE.parent
    is_clone = (root / "pyproject.toml").is_file() and (root / "notebooks").is_dir()
    return root if is_clone else None


def shared_folder(name: str) -> Path:
    """Find the folder `notebooks` or `data` of the clone or installation: `shared_folder("data") / "hardware.csv"`."""
    return (checkout() or _PACKAGE / IN_A_WHEEL) / name


def course_folder() -> Path:
    """Find `notebooks/` of the working folder if it is a course (its notebooks are numbered), else this copy's own."""
    here = Path.cwd() / "notebooks"
    if any(here.glob("[0-9][0-9]_*.ipynb")):
        return here
    return shared_folder("notebooks")


def how_to_install(extra: str) -> str:
    """Write the command that installs the packages of an extra for this very copy of fsdplab.

    In the clone's folder `how_to_install("lab")` is `pip install -e ".[lab]"`; elsewhere it has the clone's path. For
    an installed copy it lists the packages: fsdplab's own name may be another project's in the user's package index.
    """
    clone = checkout()
    if clone is None:
        packages = [f'"{package}"' for package in _packages_of(extra)]
        return " ".join(["pip install", *packages])
    folder = "." if clone == Path.cwd().resolve() else clone
    return f'pip install -e "{folder}[{extra}]"'


def _packages_of(extra: str) -> list[str]:
    """What the extra asks for, as the installed package's own metadata say: `plotly<8,>=6`."""
    from importlib.metadata import PackageNotFoundError, requires  # a twentieth of a second, when something lacks

    try:
        wanted = requires("fsdplab") or []
    except PackageNotFoundError:  # a folder that was copied: no metadata
        wanted = []
    return _wanted_by(extra, wanted) or list(_WITHOUT_METADATA[extra])


def _wanted_by(extra: str, wanted: list[str]) -> list[str]:
    """The packages of an extra, and those of the extras that it takes up: `lab` has `fsdplab[notebook]`."""
    packages = []
    for requirement in wanted:
        package, _, when = requirement.partition(";")
        package = package.strip()
        if when.strip().replace("'", '"') != f'extra == "{extra}"':
            continue
        if package.startswith("fsdplab["):
            packages += _wanted_by(package.removeprefix("fsdplab[").rstrip("]"), wanted)
        else:
            packages.append(package)
    return packages
