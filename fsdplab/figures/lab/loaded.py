"""Which files of fsdplab the lab's page needs: `python -m fsdplab.figures.lab.loaded` prints their paths, one a line.

It answers every value of every control once under every preset, with all that is unfolded, and lists what was imported
meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fsdplab.common.lazy import loaded_files

from .choices import NO_LINK, PRESETS, TUNNEL
from .page import PageLab, first_values


def main() -> None:
    """Print the files of all modules, and of the stubs that name what a package has."""
    lab = PageLab()
    for question in questions():
        lab.answer(json.dumps(question))
        if question.get("more"):
            lab.afterwards()
    print(*loaded_files(), sep="\n")


def questions() -> Iterator[dict[str, Any]]:
    """Yield for each preset, one after the other, a question with all unfolded, and one for each value of a control."""
    values = {**first_values()["offers"]["values"], "link": (NO_LINK, TUNNEL)}
    for preset, row in PRESETS.items():
        yield {"choices": {"preset": preset}, "more": True}
        for control, offered in {**values, "model": row.models}.items():
            # one strategy, unless strategies are what varies, so that answers are quick
            for value in offered:
                chosen = [value] if control in ("strategies", "engines") else value
                yield {"choices": {**asdict(row.choices), "strategies": ["full_shard"], control: chosen}}


if __name__ == "__main__":
    main()
