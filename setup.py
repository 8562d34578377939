"""What pyproject.toml cannot say: a wheel holds the course and the small data, which lie beside the package.

`notebooks/` and `data/` are copied to `fsdplab/_beside/`, where `fsdplab/common/places.py` finds them. An editable
installation reads the clone itself and gets no copies. A source distribution holds all that a clone holds: tests, docs
and the course too.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WITHIN = Path("fsdplab", "_beside")  # IN_A_WHEEL of fsdplab/common/places.py
KINDS = {"notebooks": (".ipynb", ".md"), "data": (".csv", ".json", ".gz", ".svg", ".webp", ".md", ".txt")}
SOURCES = ("tests", "docs", "notebooks", "data", ".ci", ".github")  # of a source distribution, beside the package
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", ".gitignore")
# what somebody who works in the clone leaves there
LEFT_BEHIND = ("my_fsdp", "course-", ".ipynb_checkpoints", "__pycache__", "runs", "lab-runs", "log")


def files_below(*folders: str) -> list[Path]:
    """The project's files in these folders, relative to the clone."""
    found = [path.relative_to(HERE) for folder in folders for path in sorted((HERE / folder).rglob("*"))]
    return [
        path
        for path in found
        if (HERE / path).is_file() and not any(part.startswith(LEFT_BEHIND) for part in path.parts[:-1])
    ]


def files_beside_the_package() -> list[Path]:
    """The course's sources and the data, relative to the clone."""
    return [path for path in files_below(*KINDS) if path.suffix in KINDS[path.parts[0]]]


class BuildWithTheCourse(build_py):
    """Copies these files into the package that is built."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            for source, target in self._copies():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(HERE / source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return super().get_outputs(include_bytecode) + [str(target) for _, target in self._copies()]

    def get_source_files(self) -> list[str]:
        """A source distribution needs what those who work on the project, or test an installation of it, need."""
        pages = [page for page in PAGES if (HERE / page).exists()]
        return [*super().get_source_files(), *pages, *(str(path) for path in files_below(*SOURCES))]

    def _copies(self) -> list[tuple[Path, Path]]:
        if self.editable_mode:
            return []
        return [(path, Path(self.build_lib) / WITHIN / path) for path in files_beside_the_package()]


setup(cmdclass={"build_py": BuildWithTheCourse})
