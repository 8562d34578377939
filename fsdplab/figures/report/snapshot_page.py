"""A memory snapshot as a standalone page: the sentence, what fills the peak, and memory over time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from fsdplab.common.sizes import percent, size
from fsdplab.figures.plots.allocator import allocator_peak, allocator_timeline
from fsdplab.figures.report.parts import drawn, number_table, rendered
from fsdplab.figures.style import on_page
from fsdplab.profiling.memory.snapshot_memory import DeviceMemory

_WIDTH = 1100  # pixels of a page's figures in a window of 1280
MOST_LINES = 20


def snapshot_page(devices: Mapping[str, DeviceMemory], data: Mapping[str, Any]) -> str:
    """Return the page of devices by their names; `data` is what `--json` writes, and goes into the page too."""
    from plotly.offline import get_plotlyjs

    with on_page(_WIDTH):
        parts = [_device(name, memory, len(devices) > 1) for name, memory in devices.items()]
    page = rendered(
        "page.html",
        title="What fills the memory of " + " and ".join(devices),
        plotly_js=get_plotlyjs(),
        setting="Recorded by PyTorch's CUDA allocator; memory that NCCL and the driver take is not in it.",
        cores="",
        # the first device is the first screen, the others follow below
        answer=parts[0],
        content=Markup("").join(parts[1:]),
        comparison=json.dumps(data, separators=(",", ":")),
    )
    return f"{page}\n"


def _device(name: str, memory: DeviceMemory, named: bool) -> Markup:
    """Return the part of one device: its sentence, its peak, its tables and its timeline.

    It is `named` where the page has others, too.
    """
    answer = rendered(
        "answer.html",
        sentence=f"{name}: {memory.sentence}" if named else memory.sentence,
        figures=[drawn(allocator_peak, memory)],
        clock=memory.fragmentation,
        change="",
    )
    by_line = number_table(LINE_HEADINGS, line_rows(memory), "Alive at the peak, by the line that allocated it")
    by_category = number_table(CATEGORY_HEADINGS, category_rows(memory), "Alive at the peak, by category")
    return answer + by_line + by_category + drawn(allocator_timeline, memory)


LINE_HEADINGS = ("allocated in", "bytes", "share", "allocations")
CATEGORY_HEADINGS = ("category", "bytes", "share")


def line_rows(memory: DeviceMemory, most: int = MOST_LINES) -> list[Sequence[str]]:
    """Return rows of the lines that hold most at the peak; the last one has the others together."""
    rows = [_row(line.where, line.nbytes, line.count, memory) for line in memory.alive[:most]]
    others = memory.alive[most:]
    if others:
        nbytes, count = sum(line.nbytes for line in others), sum(line.count for line in others)
        rows.append(_row(f"{len(others)} other lines", nbytes, count, memory))
    return rows


def _row(where: str, nbytes: int, count: int, memory: DeviceMemory) -> Sequence[str]:
    return where, size(nbytes), _share(nbytes, memory), f"{count:,}"


def category_rows(memory: DeviceMemory) -> list[Sequence[str]]:
    """Return rows of the categories that the stacks tell."""
    return [(name, size(nbytes), _share(nbytes, memory)) for name, nbytes in memory.by_category.items()]


def _share(nbytes: int, memory: DeviceMemory) -> str:
    return percent(nbytes / max(1, memory.peak))
