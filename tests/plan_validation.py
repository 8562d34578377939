"""Predictions beside published measurements, split by source: what was fitted, and what no constant has seen.

Nothing is fitted here. The constants of the rates (efficiency.py) are fitted once, on the sources that `SEEN` names for
tokens/s; the memory's rules were written with the rows of its sources in view. All other sources are held out: their
errors say how far off a prediction of somebody else's job is likely to be, and the bands of a plan (bands.py) are
theirs. Published figures that are arithmetic themselves (ZeRO's table 1) are no evidence, and counted apart.

    python -m tests.plan_validation [FILE.csv] [--figure PAGE.html]     prints JSON
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from fsdplab.common.places import shared_folder
from fsdplab.figures.lines import line, points
from fsdplab.figures.plotly_go import go
from fsdplab.figures.report.parts import page_of
from fsdplab.figures.style import titled
from fsdplab.planning.bands import EIGHT_BIT, MEMORY_SHARE, PLAIN, SPEED_SHARE, kind_of, speed_kind_of
from fsdplab.planning.memory import FRAMEWORK_BYTES, fits_card, memory_of
from fsdplab.planning.published import (
    FIT,
    HELD_OUT,
    MEMORY,
    SEEN,
    SPEED,
    Case,
    LeftOut,
    PublishedError,
    closed_form_s,
    read_published,
    step_s,
    timed,
    why_untimed,
)

AT_REST, ARITHMETIC = "memory between steps", "memory (arithmetic)"


@dataclass(frozen=True)
class Row:
    """One figure: predicted and published in the same unit; `part` says whether its source was fitted or held out."""

    id: str
    source: str
    quantity: str
    gpu: str
    predicted: float
    published: float
    part: str
    seq: int
    gpus: int
    parameters: int
    kind: str

    @property
    def ratio(self) -> float:
        """Predicted over published."""
        return self.predicted / self.published

    @property
    def error(self) -> float:
        """Distance of the ratio from 1."""
        return abs(self.ratio - 1)


class Errors(NamedTuple):
    """Of some figures: how many, the median and the 90th percentile and the worst of their errors, and the median of
    predicted over published, which is 1 where errors have no side. NaN for no figures.
    """

    figures: int
    median: float
    ninety: float
    worst: float
    bias: float

    @classmethod
    def of(cls, rows: Iterable[Row]) -> Errors:
        """Those of some rows."""
        found = list(rows)
        if not found:
            return cls(0, *[math.nan] * 4)
        errors = sorted(row.error for row in found)
        ninety = errors[math.ceil(0.9 * len(errors)) - 1]
        return cls(len(found), statistics.median(errors), ninety, errors[-1], statistics.median(r.ratio for r in found))

    def as_dict(self) -> dict[str, float | None]:
        """For `--json`: None for no figures."""
        return {name: None if math.isnan(value) else value for name, value in self._asdict().items()}


# what a bias is shown by, and the ends of its ranges
_RANGES: dict[str, tuple[Callable[[Row], float], tuple[float, ...]]] = {
    "GPUs": (lambda row: row.gpus, (1, 8, 64)),
    "parameters": (lambda row: row.parameters, (1e9, 5e9, 20e9)),
    "tokens of a sequence": (lambda row: row.seq, (1024, 2048, 4096, 8192, 32768)),
}


@dataclass(frozen=True)
class Validation:
    """All rows, what was left out and why, and the runs that took place but are predicted not to fit.

    `rows` with a published throughput took place: their micro-batches fitted. `ran_out`: those that ended out of
    memory, and whether they are predicted not to fit.
    """

    rows: tuple[Row, ...]
    left_out: tuple[LeftOut, ...]
    ran: int
    too_large: tuple[str, ...]
    ran_out: tuple[tuple[str, bool], ...]

    def of(self, quantity: str, part: str = "") -> list[Row]:
        """The figures of a quantity, of one part or of both."""
        return [row for row in self.rows if row.quantity == quantity and part in ("", row.part)]

    def errors(self, quantity: str, part: str = "") -> Errors:
        """Their errors."""
        return Errors.of(self.of(quantity, part))

    def by_source(self, quantity: str) -> Iterator[tuple[str, str, Errors]]:
        """Source, part and errors: fitted sources first, then those with most figures."""
        rows = self.of(quantity)
        found = [(row.source, row.part) for row in rows]
        for source, part in sorted(set(found), key=lambda each: (each[1] == HELD_OUT, -found.count(each), each)):
            yield source, part, Errors.of(row for row in rows if row.source == source)

    def by_range(self, quantity: str) -> Iterator[tuple[str, str, list[Errors]]]:
        """What a range is of, the range in words, and the errors of its rows, fitted and held out; they show a bias."""
        for name, (value, ends) in _RANGES.items():
            for low, high in pairwise((0.0, *ends, math.inf)):
                rows = [row for row in self.of(quantity) if low < value(row) <= high]
                words = f"up to {_short(high)}" if high < math.inf else f"above {_short(low)}"
                if rows:
                    yield name, words, [Errors.of(row for row in rows if row.part == part) for part in (FIT, HELD_OUT)]

    def bands(self, quantity: str) -> dict[str, tuple[float, float, int]]:
        """Kind of run -> the narrowest range of published over predicted that holds the share of bands.py, and the
        number of runs. Memory: of all runs; tokens/s: of those that are held out.
        """
        share, part = (SPEED_SHARE, HELD_OUT) if quantity == SPEED else (MEMORY_SHARE, "")
        rows = self.of(quantity, part)
        kinds = dict.fromkeys(row.kind for row in rows)
        return {kind: _narrowest([row.ratio for row in rows if row.kind == kind], share) for kind in kinds}

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "rows": [{**asdict(row), "ratio": row.ratio} for row in self.rows],
            "errors": {
                quantity: {part: self.errors(quantity, part).as_dict() for part in (FIT, HELD_OUT)}
                for quantity in (MEMORY, AT_REST, SPEED, ARITHMETIC)
            },
            "by_source": {
                quantity: {
                    source: {"part": part, **errors.as_dict()} for source, part, errors in self.by_source(quantity)
                }
                for quantity in (MEMORY, SPEED)
            },
            "bands": {quantity: self.bands(quantity) for quantity in (MEMORY, SPEED)},
            "left_out": [each._asdict() for each in self.left_out],
            "ran": self.ran,
            "predicted_not_to_fit": list(self.too_large),
            "ran_out_of_memory": dict(self.ran_out),
        }


def _narrowest(ratios: list[float], share: float) -> tuple[float, float, int]:
    """The narrowest range of 1 / ratio with a share of them, and how many there are."""
    found = sorted(1 / ratio for ratio in ratios)
    holds = math.ceil(share * len(found))
    first = min(range(len(found) - holds + 1), key=lambda start: found[start + holds - 1] / found[start])
    return round(found[first], 2), round(found[first + holds - 1], 2), len(found)


def _short(value: float) -> str:
    """`2,048`, `5 B`."""
    return f"{value / 1e9:g} B" if value >= 1e9 else f"{value:,.0f}"


def validate(path: Path) -> Validation:
    """Predict every usable row of a file with the constants as they are; raises PublishedError, one line."""
    cases, left_out = read_published(path)
    unpredicted = [
        LeftOut(case.id, case.source, f"no tokens/s: {why_untimed(case)}")
        for case in cases
        if case.tokens_per_s is not None and why_untimed(case)
    ]
    unpredicted += [
        LeftOut(case.id, case.source, f"no memory: {case.without_memory}") for case in cases if case.without_memory
    ]
    rows = [row for case in cases for row in _memory_rows(case)] + [_time_row(case) for case in timed(cases)]
    took_place = [case for case in cases if case.tokens_per_s is not None]
    large = tuple(case.id for case in took_place if not fits_card(case.spec))
    ran_out = tuple((case.id, not fits_card(case.spec)) for case in cases if case.ran_out)
    return Validation(tuple(rows), (*left_out, *unpredicted), len(took_place), large, ran_out)


def _time_row(case: Case) -> Row:
    tokens_per_s = case.spec.step_tokens / step_s(case, closed_form_s) / case.spec.gpus
    return _row(case, case.id, SPEED, tokens_per_s, case.tokens_per_s or math.nan)


def _memory_rows(case: Case) -> Iterator[Row]:
    memory = memory_of(case.spec)
    stepping = memory.at("optimizer step")
    passing = ("unsharded_parameters", "activations", "communication_buffers")
    states = stepping.total - FRAMEWORK_BYTES - sum(stepping.by_category[name] for name in passing)
    predicted = {
        "reserved": (MEMORY, memory.reserved_bytes), "used": (MEMORY, memory.used_bytes),
        "states": (AT_REST, states), "arithmetic": (ARITHMETIC, states * case.scale),
    }  # fmt: skip
    for each in case.memory:
        quantity, nbytes = predicted[each.kind]
        yield _row(case, f"{case.id}, {each.kind}", quantity, nbytes, each.nbytes)


def _row(case: Case, name: str, quantity: str, predicted: float, published: float) -> Row:
    part = FIT if case.source in SEEN[SPEED if quantity == SPEED else MEMORY] else HELD_OUT
    spec = case.spec
    sizes = spec.seq, spec.gpus, round(spec.model.parameters * case.scale)
    kind = speed_kind_of(spec) if quantity == SPEED else kind_of(spec)
    if quantity != SPEED and kind == EIGHT_BIT:  # products in 8 bits change no memory
        kind = PLAIN
    return Row(name, case.source, quantity, spec.gpu.name, predicted, published, part, *sizes, kind)


# ---- the figure and the command


def validation_figure(rows: Sequence[tuple[str, str, float, float]], title: str) -> go.Figure:
    """Predicted against published, log-log, a panel for memory and one for throughput; rows are (quantity, source,
    published, predicted) in units of their own. A source has one colour in both.
    """
    figure = go.Figure()
    colours = dict(zip(sorted({row[1] for row in rows}), cycle(_COLOURS)))
    for place, quantity in enumerate(dict.fromkeys(row[0] for row in rows)):
        _add_panel(figure, place, quantity, [row for row in rows if row[0] == quantity], colours)
    subtitle = f"{len(rows)} figures; both axes logarithmic; on the line a prediction equals what was published"
    return titled(figure, title, subtitle, f"Scatter of predicted against published. {title}.", 340)


def _add_panel(
    figure: go.Figure, place: int, quantity: str, rows: Sequence[tuple[str, str, float, float]],
    colours: Mapping[str, str],
) -> None:  # fmt: skip
    """Points of one quantity and the diagonal, on logarithmic axes with labels of round values."""
    number = "" if place == 0 else str(place + 1)
    axes = dict(xaxis=f"x{number}", yaxis=f"y{number}")
    found = [value for row in rows for value in row[2:]]
    ends = [0.8 * min(found), 1.25 * max(found)]
    figure.add_trace(line("", "#808488", ends, ends, 2, "dot", showlegend=False, **axes))
    for source, colour in colours.items():
        own = [row for row in rows if row[1] == source]
        look = dict(legendgroup=source, showlegend=place == 0, **axes)
        figure.add_trace(points(source, colour, [row[2] for row in own], [row[3] for row in own], 10, **look))
    ticks = [tick for tick in _ROUND if ends[0] <= tick <= ends[1]]
    axis = dict(type="log", tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])
    axis |= dict(range=[math.log10(end) for end in ends])
    span = [0.0, 0.44] if place == 0 else [0.56, 1.0]
    up = axis | dict(title="predicted" if place == 0 else "", anchor=f"x{number}")
    across = axis | dict(domain=span, title=f"published {quantity}", anchor=f"y{number}")
    figure.update_layout({f"xaxis{number}": across, f"yaxis{number}": up})


_COLOURS = ("#0064c8", "#b84a0a", "#0aa06c", "#cc7fa8", "#6435b0", "#8a4a9e")
_ROUND = (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)


_GIB = 2.0**30


def figure_of(found: Validation) -> go.Figure:
    """All rows, with the two medians of the held-out sources as title."""
    medians = [
        f"{name} {errors.median:.1%}" for name in (MEMORY, SPEED) if (errors := found.errors(name, HELD_OUT)).figures
    ]
    title = f"Predicted against published: median error of held-out sources {', '.join(medians) or 'not known'}"
    points = []
    for row in found.rows:
        quantity, scale = (SPEED, 1.0) if row.quantity == SPEED else ("memory (GiB)", _GIB)
        points.append((quantity, row.part, row.published / scale, row.predicted / scale))
    return validation_figure(points, title)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the validation of a file as JSON, and write its figure where one is asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.plan_validation", description="Validate plans.")
    parser.add_argument("file", nargs="?", type=Path, default=shared_folder("data") / "published.csv")
    parser.add_argument("--figure", type=Path, help="a page with the figure")
    asked = parser.parse_args(arguments)
    try:
        found = validate(asked.file)
    except PublishedError as error:
        print(f"plan_validation: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if asked.figure:
        asked.figure.write_text(page_of(figure_of(found)), encoding="utf-8")
    print(json.dumps(found.as_dict(), indent=1))


if __name__ == "__main__":
    main()
