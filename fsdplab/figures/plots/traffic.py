"""The bytes that one rank sends in a step, by the ledger or by the trace, compared with the formula's: of one run, or
of several on one axis.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fsdplab.common.collectives import bus_factor
from fsdplab.common.sizes import size
from fsdplab.figures.bars import Part, stacked_bars
from fsdplab.figures.plotly_go import go
from fsdplab.figures.profile_data import listed
from fsdplab.figures.style import COLLECTIVE_COLOURS, STRATEGY_COLOURS, titled
from fsdplab.figures.view import RunView, how_and_where, missing, ranks_and_device, views
from fsdplab.records import RunRecord

MB = 1e6
_GREY = "#808488"
Sent = Mapping[str, int]  # bytes of a step by "kind in phase", in order of first appearance
_PASSES = "an all-gather or a reduce-scatter moves all parameters once, an all-reduce twice"


def ledger_against_formula(records: RunRecord | Iterable[RunRecord], rank: int = 0) -> go.Figure:
    """Bytes that one rank sent in its last recorded step, stacked by collective and phase: of one run beside the
    formula's total, of several a bar each and how many times the first one's.

    Needs a `ledger` table, or `collectives` of traces that tell their bytes. ValueError if neither is there in any run.
    """
    runs = listed(records)
    found = [(run, sent) for run, record in zip(views(runs), runs) if (sent := sent_by(record, rank))]
    if not found:
        alone = all(record.spec.get("world_size") == 1 for record in runs)
        raise ValueError(
            f"rank {rank} recorded no collective; a run of one rank sends nothing: use world_size=2 or more"
            if alone
            else f"rank {rank} recorded no collective with its bytes: profile some steps (--profile 2)"
        )
    if len(runs) > 1:
        return _of_several(found, views(runs), rank)
    ((run, sent),) = found
    formula, total = run.summary.formula_bytes_per_step, sum(sent.values())
    if formula is None:
        figure = _bars({run.label: f"<b>{size(total)}</b>"}, _parts([sent]))
        return titled(
            figure, f"{run.label} sends {size(total)} a step", _where([run], rank), f"A bar: {_words(sent)}.", 150
        )
    parts = [*_parts([sent, {}]), Part("formula", STRATEGY_COLOURS["no_shard"], [0.0, (formula or 0) / MB])]
    figure = _bars({"ledger": f"<b>{size(total)}</b>", "formula": f"<b>{size(formula)}</b>"}, parts)
    figure.data[-1].showlegend = False
    if total == formula:
        title = f"{run.label}: the ledger equals the formula, {size(total)} a step"
    else:
        title = f"{run.label}: the ledger differs from the formula by {total - formula:+,} bytes a step"
    alt = f"Two bars. Ledger: {_words(sent)}. Formula: {size(formula)}."
    return titled(figure, title, f"{_where([run], rank)}; the formula is computed", alt, 200)


def sent_by(record: RunRecord, rank: int) -> Sent:
    """Bytes that a rank sent in its last recorded step, by collective and phase: `{"all_reduce in backward": 86}`."""
    rows = [row for row in record.table("ledger") or _of_traces(record) if int(row["rank"]) == rank]
    last = max((int(row["step"]) for row in rows), default=0)
    sent: dict[str, float] = defaultdict(float)
    for row in (row for row in rows if int(row["step"]) == last):
        sent[f"{row['kind']} in {row['phase']}"] += row["wire_bytes"]
    return {name: round(nbytes) for name, nbytes in sent.items()}


def _of_traces(record: RunRecord) -> list[dict[str, Any]]:
    """The collectives of an engine without a ledger, by its traces; [] where these do not tell the bytes of each."""
    rows, ranks = record.table("collectives"), int(record.spec.get("world_size") or 1)
    if any(row["logical_bytes"] is None for row in rows):
        return []
    return [
        {**row, "wire_bytes": row["logical_bytes"] * bus_factor(row["kind"], int(row["group_size"] or ranks))}
        for row in rows
    ]


def _of_several(found: list[tuple[RunView, Sent]], runs: list[RunView], rank: int) -> go.Figure:
    """A bar a run, each with how many times the first one's bytes it is."""
    shown, totals = [run for run, _ in found], [sum(sent.values()) for _, sent in found]
    times = [f"{total / totals[0]:.2g} times" for total in totals]
    ends = {
        run.label: f"<b>{size(total)}</b>{'' if total == totals[0] else f' · {each}'}"
        for run, total, each in zip(shown, totals, times)
    }
    most = max(range(len(shown)), key=totals.__getitem__)
    title = f"{shown[most].label} sends {size(totals[most])} a step, {times[most]} as much as {shown[0].label}"
    title = title if totals[most] > totals[0] else f"No run sends more than {shown[0].label}, {size(totals[0])} a step"
    left_out = missing(runs, shown, "recorded no collective")
    where = "; ".join(filter(None, [_where(shown, rank), _against_formulas(shown, totals), _PASSES, left_out]))
    words = "; ".join(f"{run.label} {_words(sent)}" for run, sent in found)
    alt = f"Bars of the bytes that one rank sends in a step: {words}."
    return titled(_bars(ends, _parts([sent for _, sent in found])), title, where, alt, 90 + 46 * len(found))


def _against_formulas(shown: list[RunView], totals: list[int]) -> str:
    """Whether the bars equal their formulas, said once for all; of an engine without a formula nothing is said."""
    formulas = [(run, run.summary.formula_bytes_per_step, total) for run, total in zip(shown, totals)]
    off = [f"{run.label} differs from its formula by {total - each:+,} bytes" for run, each, total in formulas if each]
    off = [words for words in off if not words.endswith(" by +0 bytes")]
    without = [run.label for run, each, _ in formulas if not each]
    equal = "every bar that has a formula equals it" if without else "every bar equals its formula"
    return "; ".join(off) or ("" if len(without) == len(shown) else f"{equal} to the byte")


def _bars(ends: Mapping[str, str], parts: list[Part]) -> go.Figure:
    return stacked_bars(ends, parts, "bytes sent by one rank in one step (MB)", "%{x:.3f} MB")


def _parts(rows: list[Sent]) -> list[Part]:
    """The collectives that at least one row sends, in MB; the second all-gather of a step has its own shade."""
    names = dict.fromkeys(name for sent in rows for name in sent)
    kinds = {name: name if name in COLLECTIVE_COLOURS else name.split(" in ")[0] for name in names}
    return [
        Part(name, COLLECTIVE_COLOURS.get(kinds[name], _GREY), [sent.get(name, 0) / MB for sent in rows])
        for name in names
    ]


def _where(shown: list[RunView], rank: int) -> str:
    if any(run.simulated for run in shown):
        return f"{how_and_where(shown)}, rank {rank}"
    where = f"Rank {rank} of {ranks_and_device(shown)}"
    if not all(run.engine == "lab" and not run.recorded for run in shown):
        return f"{where}, by the collectives in its trace" if len(shown) == 1 else f"{where}, by ledger or trace"
    return f"{where}, counted at every collective"


def _words(sent: Sent) -> str:
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sent.items())
