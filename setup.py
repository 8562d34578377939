"""What pyproject.toml cannot say: a wheel holds the course and the small data, which lie beside the package.

`notebooks/` and `data/` are copied to `fsdplab/_beside/`, where `fsdplab/common/places.py` finds them. An editable
installation reads the clone itself and gets no copies.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
WITHIN = Path("fsdplab", "_beside")  # IN_A_WHEEL of fsdplab/common/places.py
KINDS = {"notebooks": (".ipynb", ".md"), "data": (".csv", ".json", ".gz", ".svg", ".webp", ".md")}
LEFT_BEHIND = ("my_fsdp", "course-", ".ipynb_checkpoints")  # what somebody who works in the clone leaves there


def files_beside_the_package() -> list[Path]:
    """The course's sources and the data, relative to the clone."""
    found = [path.relative_to(HERE) for folder in KINDS for path in sorted((HERE / folder).rglob("*"))]
    return [
        path
        for path in found
        if path.suffix in KINDS[path.parts[0]] and not any(part.startswith(LEFT_BEHIND) for part in path.parts)
    ]


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
        """They belong to a source distribution too."""
        return super().get_source_files() + [str(path) for path in files_beside_the_package()]

    def _copies(self) -> list[tuple[Path, Path]]:
        if self.editable_mode:
            return []
        return [(path, Path(self.build_lib) / WITHIN / path) for path in files_beside_the_package()]


setup(cmdclass={"build_py": BuildWithTheCourse})
