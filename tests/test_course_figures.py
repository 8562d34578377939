"""Every figure with a unit in a text cell has a source: computed here, or set in the code that the notebook runs.

A figure that a text repeats goes stale when its source changes. So each is listed once under its notebook with the
value from its source; the digits of the text are compared with it, and a figure that is not listed fails. Figures that
the text itself chooses (of an example, of a question) or quotes are listed as such.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from fsdplab.figures.outlook import outlook_of
from fsdplab.planning.hardware import find_gpu
from fsdplab.planning.links import parse_link
from fsdplab.sessions import RunSpec, steady_card
from fsdplab.teaching import accounting, hiding, judging, sizing
from fsdplab.teaching import overlapping_axes as axes
from fsdplab.teaching.core import registry
from fsdplab.teaching.core.recorded import recorded
from fsdplab.teaching.lessons.faulty_job import lesson as faults
from fsdplab.teaching.lessons.nb06_whole_model import lesson as units
from fsdplab.teaching.lessons.nb06_whole_model import schedules
from fsdplab.teaching.lessons.nb07_overlap import on_ranks as hidden
from fsdplab.teaching.lessons.nb11_shoot_out import on_ranks as shoot_out
from fsdplab.teaching.lessons.nb20_own_fully_shard import nets, pytorchs_loop, steady_order
from fsdplab.workloads import build_model, preset

NOTEBOOKS = {
    path.name[:2]: path for path in sorted((Path(__file__).parents[1] / "notebooks").glob("[0-9][0-9]_*.ipynb"))
}
_UNITS = "MB/s|GB/s|Mbit/s|[GT]FLOP/s|kB|MB|GiB|GB|TB|ms|%|bytes|messages|collectives|million|billion"
_FIGURE = re.compile(rf"(?<![\w.])(\d+(?:,\d\d\d)*(?:\.\d+)?)\s*({_UNITS})(?![a-z])")
_NO_TEXT = re.compile(r"\(GLOSSARY[^)]*\)|```.*?```|`[^`]*`|\]\([^)]*\)", re.DOTALL)

TINY, SMALL, LLAMA, LARGE = (
    preset(name).parameters for name in ("gpt-tiny", "gpt-20m", "llama-3.1-8b", "llama-3.1-70b")
)
H100 = find_gpu("h100")
FP32, ADAM, BF16 = 4, 8, 2  # bytes a parameter; Adam's two moments are fp32
STATES = FP32 + FP32 + ADAM
LESSON_02 = RunSpec(
    model="gpt-20m", strategy="full_shard", world_size=2, batch_size=2, sequence_length=64, steps=1, device="cpu"
)
TINY_MATRICES, MATRICES = (
    sum(value.numel() for value in build_model(name, device="meta").blocks.parameters() if value.dim() == 2)
    for name in ("gpt-tiny", "gpt-20m")
)
Source = float | Callable[[], float]


def cells_of(notebook: str, kind: str) -> str:
    """The text of all cells of a kind."""
    cells = json.loads(NOTEBOOKS[notebook].read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == kind)


def in_code(notebook: str, text: str, value: float) -> Source:
    """A value that the notebook's own code sets, as `text` says there."""

    def found() -> float:
        assert text in cells_of(notebook, "code"), f"{text!r} no longer stands in the code of {notebook}"
        return value

    return found


def given(value: float, why: str) -> Source:
    """A figure that the text chooses or quotes itself; `why` says which."""
    assert why
    return value


def mb(parameters: float, nbytes: float = FP32) -> float:
    """MB of so many parameters."""
    return parameters * nbytes / 1e6


def peak_mb() -> float:
    """MB at the peak of lesson 02's run, every allocation of it played."""
    peak = outlook_of([LESSON_02])[0].predicted.peak_bytes
    assert peak is not None
    return peak / 1e6


def activations_of_a_sequence_mb() -> float:
    """MB that a sequence adds at the end of the forward, in lesson 02's table of instants."""
    return next(a_sequence for name, _, a_sequence in accounting.instants(LESSON_02) if name == "end of the forward")


def unit_mb(name: str) -> float:
    """MB of a unit of lesson 06's larger model, where every block is a unit."""
    planned = units.plan("gpt-20m", units.CHOICES["every block"])
    return dict(planned.units)[name] / 1e6


def reached() -> float:
    """FLOP/s that the planner takes an H100 to reach."""
    return hiding.reached(hiding.target())[0]


def root_messages_ms() -> float:
    """The root's gather and reduction in notebook 20's step of four blocks."""
    net = nets.Net(nets.Sizes(blocks=4))
    everything = sum(4 * value.numel() for value in net.parameters())
    return 2 * steady_order.MESSAGE_MS * (everything - 4 * net.block_bytes) / net.block_bytes


LINK = "the text's own example, a payload or a batch that the next cells take"
SOURCES: dict[str, dict[str, Source]] = {
    "00": {
        "8 bytes": ADAM, "16 bytes": STATES, "21.59 million": SMALL / 1e6, "345 MB": mb(SMALL, STATES),
        "173 MB": mb(SMALL, STATES) / 2, "150 MB/s": in_code("00", "150MB/s", 150),
        "330 MB": in_code("00", "330_000_000", 330),
    },
    "01": {
        "12 MB": given(12, LINK), "4 MB": 12 / 3, "16 MB": given(16, LINK),
        "20 %": given(20, "advice"), "1 %": 1,
    },
    "02": {
        "8.03 billion": LLAMA / 1e9, "8 billion": LLAMA / 1e9, "2 bytes": BF16, "16 GB": mb(LLAMA, BF16) / 1e3,
        "80 GB": given(80, "the card's name"), "80 GiB": H100.memory_bytes / 2**30, "85.9 GB": H100.memory_bytes / 1e9,
        "4 bytes": FP32, "16 bytes": STATES, "8 bytes": ADAM, "21.6 million": SMALL / 1e6, "199 MB": peak_mb,
        "320 MB": in_code("02", "card = 320_000_000", 320), "128 GB": 8 * STATES, "173 MB": mb(SMALL, STATES) / 2,
        "19 MB": activations_of_a_sequence_mb, "38 MB": lambda: 2 * activations_of_a_sequence_mb(),
    },
    "03": {
        "25 MB": given(25, "torch's DDP: bucket_cap_mb"), "1 MB": given(1, "torch's DDP: its first bucket"),
        "564 kB": mb(TINY) * 1e3, "80 kB": in_code("03", "80_000", 80),
        "37 messages": lambda: len(list(build_model("gpt-tiny").parameters())),
    },
    "04": {
        "564 kB": mb(TINY) * 1e3, "846 kB": mb(TINY) * 1.5e3, "21.6 million": SMALL / 1e6,
        "173 MB": mb(SMALL, ADAM), "86 MB": mb(SMALL), "8 bytes": ADAM, "16 bytes": STATES,
    },
    "05": {
        "21.6 million": SMALL / 1e6, "345 MB": mb(SMALL, STATES),
        "0 bytes": 0, "60 bytes": 5 * 3 * FP32, "2.10 MB": mb(1025 * 512), "4.20 MB": mb(1025 * 512, 2 * FP32),
    },
    "06": {
        "86 MB": mb(SMALL), "7.10 MB": lambda: unit_mb("blocks.0"), "1.18 MB": lambda: unit_mb("root"),
        "6.5 MB": in_code("06", "target=6_500_000", 6.5),
        "80 collectives": registry.find("06.choose_units").module().LIMIT,
        "2 ms": schedules.FORWARD, "4 ms": schedules.BACKWARD, "28 ms": lambda: schedules.shortest(4),
    },
    "07": {
        "400 MB/s": in_code("07", "400MB/s", 400), "21.6 million": SMALL / 1e6, "86 MB": mb(SMALL),
        "130 MB": mb(SMALL) * 3 / 2,
        "60 GFLOP/s": steady_card.GIGAFLOPS, "100 MB/s": given(100, "a question"), "40 ms": hidden.FORWARD_MS,
        "20 ms": hidden.LATENCY_MS, "300 ms": hidden.TARGET_MS,
    },
    "08": {"150 Mbit/s": lambda: recorded("traces-08").summary.link.bytes_per_s * 8 / 1e6},
    "09": {
        "21.6 million": SMALL / 1e6, "43 MB": mb(SMALL) / 2, "86 MB": mb(SMALL, ADAM) / 2,
        "7.1 MB": lambda: unit_mb("blocks.0"),
    },
    "10": {
        "733 TFLOP/s": lambda: reached() / 1e12, "74.1 %": lambda: 100 * reached() / H100.bf16_flops,
        "380 GB/s": in_code("10", "380e9", 380), "50 GB/s": H100.nic_bytes_per_s / 1e9, "100 %": 100,
    },
    "11": {
        "21.6 million": SMALL / 1e6, "400 MB/s": parse_link(shoot_out.JOB["link"]).bytes_per_s / 1e6, "4 bytes": FP32,
        "60 GFLOP/s": steady_card.GIGAFLOPS, "250 MB": given(250, "a question"), "300 MB": shoot_out.CARD / 1e6,
    },
    "12": {
        "4 GB/s": parse_link(axes.WITHIN).bytes_per_s / 1e9, "400 MB/s": parse_link(axes.ACROSS).bytes_per_s / 1e6,
        "800 MB/s": parse_link(axes.RING).bytes_per_s / 1e6, "21.6 million": SMALL / 1e6,
        "60 GFLOP/s": steady_card.GIGAFLOPS, "8 billion": LLAMA / 1e9,
    },
    "13": {
        "21.6 million": SMALL / 1e6, "150 MB": in_code("13", "card=150_000_000", 150), "2 bytes": BF16,
        "16 bytes": STATES, "25 GB/s": given(25, "PCIe 4"),
        "3 GB/s": given(3, "the slider's first"), "43 MB": mb(SMALL) / 2,
    },
    "14": {"60 ms": lambda: 1e3 * float(faults.FAULTS["one slow rank"].injected.partition("sleep(")[2][:4])},
    "15": {
        "21.6 million": SMALL / 1e6, "86 MB": FP32 * SMALL / 1e6, "70 billion": given(70, "an example"),
        "280 GB": FP32 * 70, "12 bytes": FP32 + ADAM,
    },
    "16": {"90 %": given(90, "a question")},
    "17": {"70 billion": given(70, "an example"), "140 GB": 70 * BF16},
    "18": {"29 %": lambda: 100 * judging.root_part("gpt-tiny")},
    "19": {
        "70 billion": given(70, "the model's name"), "70.6 billion": LARGE / 1e9, "8 billion": LLAMA / 1e9,
        "80 GiB": H100.memory_bytes / 2**30, "80 GB": given(80, "the card's name"), "100 billion": sizing.TOKENS / 1e9,
        "4 million": sizing.STEP_TOKENS / 1e6, "16 bytes": STATES,
    },
    "20": {
        "4 ms": steady_order.FORWARD_MS, "8 ms": steady_order.BACKWARD_MS, "3 ms": steady_order.MESSAGE_MS,
        "12 ms": steady_order.FORWARD_MS + steady_order.BACKWARD_MS,
        "6 ms": (steady_order.FORWARD_MS + steady_order.BACKWARD_MS) / 2, "1.0 ms": root_messages_ms,
        "10 %": 100 * (pytorchs_loop.MARGIN - 1),
    },
    "21": {
        "8 bytes": ADAM, "2 bytes": BF16, "564 kB": 1e3 * mb(TINY, ADAM) / 2,
        "30 %": 100 * (1 - TINY_MATRICES / TINY), "98 kB": 1e3 * mb(2 * TINY_MATRICES / 4, BF16),
        "21.6 million": SMALL / 1e6, "44 MB": (mb(SMALL, ADAM) - mb(MATRICES)) / 2,
        "21 MB": mb(2 * MATRICES / 4, BF16), "60 GFLOP/s": steady_card.GIGAFLOPS,
    },
}  # fmt: skip


def figures_of(notebook: str) -> list[str]:
    """Every number with a unit in the notebook's text, code and links left out: `["345 MB", "8 bytes"]`."""
    found = _FIGURE.findall(_NO_TEXT.sub("", cells_of(notebook, "markdown")))
    return [f"{number} {unit}" for number, unit in dict.fromkeys(found)]


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_figure_of_the_text_is_that_of_its_source(notebook):
    known = SOURCES.get(notebook, {})
    for figure in figures_of(notebook):
        assert figure in known, f"{figure!r} in the text of {notebook} has no source here"
        number, source = figure.split()[0], known[figure]
        value = source() if callable(source) else source
        digits = len(number.partition(".")[2])
        assert round(value, digits) == float(number.replace(",", "")), f"{figure}, and its source gives {value:g}"
    assert set(known) <= set(figures_of(notebook)), "a source without a figure"


def test_a_stale_figure_and_one_without_a_source_are_found(monkeypatch, tmp_path):
    """What the test above would say of a notebook whose text was not changed with its numbers."""
    path = tmp_path / "98_stale.ipynb"
    text = 'A card of 80 GB, `330 MB` in code, and [a term](GLOSSARY.md#peak "2 GB").'
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": [text]}]}))
    monkeypatch.setitem(NOTEBOOKS, "98", path)
    assert figures_of("98") == ["80 GB"]
    for sources, says in (({}, "has no source here"), ({"80 GB": 85.9}, "its source gives 85.9")):
        monkeypatch.setitem(SOURCES, "98", sources)
        with pytest.raises(AssertionError, match=says):
            test_every_figure_of_the_text_is_that_of_its_source("98")
