"""Which files of fsdplab the page needs: `python -m fsdplab.figures.live.loaded` prints their paths, one a line.

It answers every value of every control once in a process of its own, and lists what was imported meanwhile.
"""

from __future__ import annotations

from fsdplab.common.lazy import loaded_files

from .answer import answer
from .controls import controls


def main() -> None:
    """Print the files of all modules, and of the stubs that name what a package has."""
    for each in controls():
        for value in each.values:
            answer({each.name: value}, 0)
    print(*loaded_files(), sep="\n")


if __name__ == "__main__":
    main()
