"""Which files of fsdplab the lab's page needs: `python -m fsdplab.figures.lab.loaded` prints their paths, one a line.

It answers every preset once, with all that is unfolded, and lists what was imported meanwhile.
"""

from __future__ import annotations

import json

from fsdplab.common.lazy import loaded_files

from .choices import PRESETS
from .page import PageLab


def main() -> None:
    """Print the files of all modules, and of the stubs that name what a package has."""
    lab = PageLab()
    for name in PRESETS:
        lab.answer(json.dumps({"choices": {"preset": name}, "more": True}))
        lab.afterwards()
    print(*loaded_files(), sep="\n")


if __name__ == "__main__":
    main()
