"""Notebooks that open in Colab from a folder on GitHub: a badge, a cell that installs the lab, links that lead back.

`fsdplab course build --colab OWNER/REPO/blob/BRANCH/FOLDER --wheel https://...whl --out FOLDER` writes them; push the
folder to that address. Colab's own machine has torch and Jupyter, so the cell installs the wheel without JupyterLab.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from fsdplab.teaching.authoring.course import CourseError

COLAB = "https://colab.research.google.com"
BADGE = f"{COLAB}/assets/colab-badge.svg"
INSTALL_CELL = "install-in-colab"

_FOLDER = re.compile(r"(?:https://github\.com/)?([\w.-]+/[\w.-]+)/(?:blob|tree)/([^\s?#]+?)/?")
_WHEEL = re.compile(r"https?://[\w.:-]+/[^\s\"'\\{}$?#]*fsdplab-[\w.+]+-py3-none-any\.whl")
_GITHUB_PAGE = re.compile(r"https?://github\.com/[^/]+/[^/]+/(?:blob|tree)/")  # shows a file, and does not serve it
_LINK = re.compile(r"\]\((?P<file>[\w.-]+\.(?P<kind>md|ipynb))(?P<rest>[^)\n]*)\)")  # to a file beside the notebook
_INSTALL = """\
# Colab has torch but no fsdplab: this installs it. Where fsdplab is installed already, nothing happens.
import importlib.util

if importlib.util.find_spec("fsdplab") is None:
    %pip install --quiet "fsdplab[notebook] @ {wheel}\""""


@dataclass(frozen=True)
class Published:
    """Where notebooks are published: a folder on GitHub, and the address of the wheel that they need.

    CourseError where an address is not one of these.

    >>> published = Published.at("ada/lab/blob/main/course", "https://example.org/fsdplab-0.2.0-py3-none-any.whl")
    >>> published.in_colab("01_collectives.ipynb")
    'https://colab.research.google.com/github/ada/lab/blob/main/course/01_collectives.ipynb'
    """

    repository: str  # "ada/lab"
    folder: str  # "main/course": the branch, and the folder in it
    wheel: str

    @classmethod
    def at(cls, folder: str, wheel: str) -> Published:
        """Read the two addresses of the command line."""
        matched = _FOLDER.fullmatch(folder)
        if matched is None:
            raise CourseError(f"--colab is {folder!r:.200}; expected a folder on GitHub, OWNER/REPO/blob/BRANCH/FOLDER")
        if not _WHEEL.fullmatch(wheel) or _GITHUB_PAGE.match(wheel):
            raise CourseError(
                f"--wheel is {wheel!r:.200}; expected the address of a wheel, https://.../fsdplab-VERSION-py3-none-any.whl"
                " (`pip wheel . --no-deps` makes it)"
            )
        return cls(matched.group(1), unquote(matched.group(2)), wheel)

    def on_github(self, name: str) -> str:
        """Return the address of a file of the folder."""
        return f"https://github.com/{self.repository}/blob/{quote(f'{self.folder}/{name}')}"

    def in_colab(self, name: str) -> str:
        """Return the address that opens a notebook of the folder in Colab."""
        return f"{COLAB}/github/{self.repository}/blob/{quote(f'{self.folder}/{name}')}"

    def notebook(self, name: str, notebook: NotebookNode) -> NotebookNode:
        """Return a notebook with its badge below the title, the cell that installs, and links that lead somewhere."""
        opened = nbformat.from_dict(notebook)
        for cell in opened.cells:
            if cell.cell_type == "markdown":
                cell.source = _LINK.sub(self._whole_link, cell.source)
        self._add_badge(name, opened)
        first_code = next((at for at, cell in enumerate(opened.cells) if cell.cell_type == "code"), len(opened.cells))
        install = new_code_cell(_INSTALL.format(wheel=self.wheel), id=INSTALL_CELL)
        install.metadata["slideshow"] = {"slide_type": "skip"}
        opened.cells.insert(first_code, install)
        return opened

    def _add_badge(self, name: str, notebook: NotebookNode) -> None:
        """Put the badge below the first line of the first text, so that the title stays the title."""
        badge = f"[![Open in Colab]({BADGE})]({self.in_colab(name)})"
        first_text = next((cell for cell in notebook.cells if cell.cell_type == "markdown"), None)
        if first_text is None:
            raise CourseError(f"{name} holds no text; its first Markdown cell begins with a title")
        title, _, text = first_text.source.partition("\n")
        first_text.source = f"{title}\n\n{badge}\n{text}"

    def _whole_link(self, link: re.Match[str]) -> str:
        """Return a link to a file beside the notebook with its whole address: Colab has the notebook alone."""
        address_of = self.in_colab if link["kind"] == "ipynb" else self.on_github
        return f"]({address_of(link['file'])}{link['rest']})"
