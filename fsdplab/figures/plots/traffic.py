"""The bytes that one rank sends in a step, by the ledger or by the trace, compared with the formula's: of one run, or
of several on one axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdplab.common.collectives import bus_factor
from fsdplab.common.sizes import size
from fsdplab.figures.axis_units import AxisUnit, byte_unit
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import listed
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled
from fsdplab.figures.view import RunView, how_and_where, missing, ranks_and_device, views
from fsdplab.records import RunRecord

_GREY = "#808488"
_FORMULA_COLOUR = STRATEGY_COLOURS["no_shard"]
Sent = Mapping[str, int]  # bytes of a step by "kind in phase", in order of first appearance
_PASSES = "an all-gather or a reduce-scatter moves all parameters once, an all-reduce twice"


@dataclass(frozen=True)
class _Bar:
    """A run that has recorded collectives, and what its rank sent in a step."""

    run: RunView
    sent: Sent

    @property
    def total(self) -> int:
        return sum(self.sent.values())

    @property
    def formula(self) -> int | None:
        """Bytes that the run's strategy must send; None where no formula is known."""
        return self.run.summary.formula_bytes_per_step

    @property
    def words(self) -> str:
        words = []
        for name, nbytes in self.sent.items():
            words.append(f"{name} {size(nbytes)}")
        return ", ".join(words)


def ledger_against_formula(records: RunRecord | Iterable[RunRecord], rank: int = 0) -> go.Figure:
    """Draw the bytes that one rank sent in its last recorded step, stacked by collective and phase: of one run beside
    the formula's total, of several a bar each and how many times the first one's.

    Needs a `ledger` table, or `collectives` of traces that tell their bytes. ValueError if neither is there in any run.
    """
    runs = listed(records)
    bars = []
    # a run without collectives has no bar, and is named in the subtitle
    for run, record in zip(views(runs), runs):
        sent = sent_by(record, rank)
        if sent:
            bars.append(_Bar(run, sent))
    if not bars:
        raise ValueError(f"rank {rank} recorded no collective{_remedy(runs)}")
    # also where one bar alone is left: its subtitle says which runs were left out
    if len(runs) > 1:
        return _of_several(bars, views(runs), rank)
    if bars[0].formula is None:
        return _without_formula(bars[0], rank)
    return _beside_formula(bars[0], bars[0].formula, rank)


def _remedy(runs: list[RunRecord]) -> str:
    # one rank is its own group: nothing was lost, there was nothing to send
    if all(record.spec.get("world_size") == 1 for record in runs):
        return "; a run of one rank sends nothing: use world_size=2 or more"
    return " with its bytes: profile some steps (--profile 2)"


# ---- what a rank sent


def sent_by(record: RunRecord, rank: int) -> Sent:
    """Return the bytes that a rank sent in its last recorded step, by collective and phase.

    `{"all_reduce in backward": 86}`.
    """
    # the lab's engine counts bytes as it sends them (`wire_bytes`); traces have the message's size alone
    rows = record.table("ledger") or _of_traces(record)
    of_rank = [row for row in rows if int(row["rank"]) == rank]
    last = max((int(row["step"]) for row in of_rank), default=0)
    sent: dict[str, float] = defaultdict(float)
    for row in of_rank:
        if int(row["step"]) == last:
            # micro-batches and units of one kind and phase add up: "all_gather in forward"
            sent[f"{row['kind']} in {row['phase']}"] += row["wire_bytes"]
    return {name: round(nbytes) for name, nbytes in sent.items()}


def _of_traces(record: RunRecord) -> list[dict[str, Any]]:
    """Return the collectives of an engine without a ledger, by its traces; [] where these do not tell all bytes."""
    all_ranks = int(record.spec.get("world_size") or 1)
    rows = []
    for row in record.table("collectives"):
        # a sum without this collective would look like a rank that sends less
        if row["logical_bytes"] is None:
            return []
        # where a trace does not name the group, all ranks are in it
        group_size = int(row["group_size"] or all_ranks)
        # an all-gather of 8 MB over 4 ranks: the rank sends 3/4 of it, 6 MB; an all-reduce twice that
        wire_bytes = row["logical_bytes"] * bus_factor(row["kind"], group_size)
        rows.append({**row, "wire_bytes": wire_bytes})
    return rows


# ---- one run


def _without_formula(bar: _Bar, rank: int) -> go.Figure:
    total = size(bar.total)
    ends = {bar.run.label: f"<b>{total}</b>"}
    unit = byte_unit([bar.total])
    figure = _bars(ends, _parts([bar.sent], unit), unit)
    title = f"{bar.run.label} sends {total} a step"
    return titled(figure, title, _where([bar.run], rank), f"A bar: {bar.words}.", 150)


def _beside_formula(bar: _Bar, formula: int, rank: int) -> go.Figure:
    """Draw the run's bar above that of the formula."""
    ends = {"ledger": f"<b>{size(bar.total)}</b>", "formula": f"<b>{size(formula)}</b>"}
    unit = byte_unit([bar.total, formula])
    sent = _parts([bar.sent, {}], unit)  # nothing of it is in the formula's row
    # 0 in the ledger's row, the whole in the formula's
    computed = Part("formula", _FORMULA_COLOUR, [0.0, unit.of(formula)])
    figure = _bars(ends, [*sent, computed], unit)
    figure.data[-1].showlegend = False  # its row says what it is
    difference = bar.total - formula
    # lab and formula agree to the byte, so a difference is a finding however small
    if difference:
        title = f"{bar.run.label}: the ledger differs from the formula by {difference:+,} bytes a step"
    else:
        title = f"{bar.run.label}: the ledger equals the formula, {size(bar.total)} a step"
    where = f"{_where([bar.run], rank)}; the formula is computed"
    alt = f"Two bars. Ledger: {bar.words}. Formula: {size(formula)}."
    return titled(figure, title, where, alt, 200)


# ---- several runs


def _of_several(bars: list[_Bar], runs: list[RunView], rank: int) -> go.Figure:
    """Draw a bar a run, each with how many times the first one's bytes it is."""
    shown = [bar.run for bar in bars]
    first = bars[0]
    most = max(bars, key=lambda bar: bar.total)
    ends, words = {}, []
    for bar in bars:
        end = f"<b>{size(bar.total)}</b>"
        # "232 MB · 1.5 times" of the first bar's bytes
        if bar.total != first.total:
            end += f" · {_times(bar, first)}"
        ends[bar.run.label] = end
        words.append(f"{bar.run.label} {bar.words}")
    if most.total > first.total:
        times = _times(most, first)
        title = f"{most.run.label} sends {size(most.total)} a step, {times} as much as {first.run.label}"
    else:
        title = f"No run sends more than {first.run.label}, {size(first.total)} a step"
    left_out = missing(runs, shown, "recorded no collective")
    clauses = [_where(shown, rank), _against_formulas(bars), _PASSES, left_out]
    where = "; ".join(filter(None, clauses))
    alt = f"Bars of the bytes that one rank sends in a step: {'; '.join(words)}."
    unit = byte_unit([most.total])
    figure = _bars(ends, _parts([bar.sent for bar in bars], unit), unit)
    return titled(figure, title, where, alt, 90 + 46 * len(bars))


def _times(bar: _Bar, first: _Bar) -> str:
    return f"{bar.total / first.total:.2g} times"


def _against_formulas(bars: list[_Bar]) -> str:
    """Say whether the bars equal their formulas, once for all; of an engine without a formula nothing is said."""
    with_formula = [bar for bar in bars if bar.formula]
    if not with_formula:
        return ""
    differences = []
    for bar in with_formula:
        # bars without a formula were left out above, so the 0 is never taken
        difference = bar.total - (bar.formula or 0)
        if difference:
            differences.append(f"{bar.run.label} differs from its formula by {difference:+,} bytes")
    if differences:
        return "; ".join(differences)
    if len(with_formula) < len(bars):
        return "every bar that has a formula equals it to the byte"
    return "every bar equals its formula to the byte"


# ---- what all of these figures share


def _bars(ends: Mapping[str, str], parts: list[Part], unit: AxisUnit) -> go.Figure:
    # three digits behind the point, as a ledger and its formula are compared
    hover = f"%{{x:.3f}} {unit.symbol}"
    return stacked_bars(ends, parts, f"bytes sent by one rank in one step ({unit.symbol})", hover)


def _parts(rows: list[Sent], unit: AxisUnit) -> list[Part]:
    """Return the collectives that at least one row sends; the second all-gather of a step has its own shade."""
    names: dict[str, int] = {}  # in order of first appearance
    for sent in rows:
        names.update(sent)
    parts = []
    for name in names:
        kind = name
        # only "all_gather in backward" has a colour with its phase: resharding after the forward adds it to a step
        if name not in COLLECTIVE_COLOURS:
            kind = name.split(" in ")[0]
        colour = COLLECTIVE_COLOURS.get(kind, _GREY)
        lengths = [unit.of(sent.get(name, 0)) for sent in rows]
        parts.append(Part(name, colour, lengths))
    return parts


def _where(shown: list[RunView], rank: int) -> str:
    """Say of which rank the bytes are, and how they were counted."""
    if any(run.simulated for run in shown):
        return f"{how_and_where(shown)}, rank {rank}"
    where = f"Rank {rank} of {ranks_and_device(shown)}"
    # the lab's ledger counts each collective; jobs and other engines are known by their traces
    if all(run.engine == "lab" and not run.recorded for run in shown):
        return f"{where}, counted at every collective"
    if len(shown) == 1:
        return f"{where}, by the collectives in its trace"
    return f"{where}, by ledger or trace"
