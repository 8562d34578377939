"""Figures of profiled steps, drawn from a step whose every nanosecond is known: two ranks, four blocks and the root,
one emulated link.

`train` walks the program of a sharded step over both ranks and one link, so what is exposed follows from the program
and the link alone.
"""

from __future__ import annotations

import gzip
import itertools
import json
import re
import shutil
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import pytest
from markupsafe import escape

from fsdplab import figures
from fsdplab.engine.core import unit
from fsdplab.figures import style
from fsdplab.figures.plots.breakdown import exposed_heatmap
from fsdplab.figures.plots.linked import STATE_COLOURS, hover_text
from fsdplab.figures.plots.timeline import lanes_of, phase_lines, phases, rank_timeline
from fsdplab.figures.view import RunView
from fsdplab.profiling.findings import findings
from fsdplab.records import CATEGORIES, LANES, TABLES, RunRecord, Spread, Summary, comparison_json
from fsdplab.records.summary import Comm, Peak, Steady
from fsdplab.sessions import RunSpec
from fsdplab.sessions.steady_card import steady
from tests.browser import patient

MB, US, EPOCH = 1_000_000, 1_000, 1_790_000_000_000_000_000
BLOCKS = [f"blocks.{index}" for index in range(4)]
UNITS = ["", *BLOCKS]
BYTES = {"": 12 * MB, **dict.fromkeys(BLOCKS, 8 * MB)}
COMPUTE = {"forward": 2_600, "backward": 5_400}  # µs a block
TRAVEL = {"all_gather": 330, "reduce_scatter": 360}  # µs for a MB
LINK = {"name": "25 GbE", "bytes_per_s": 3.125e9, "latency_s": 1e-5, "queues": 1, "across": None, "as": None}


@dataclass
class Step:
    """One step under construction: where each rank's clock stands, when the link is free, and the rows so far."""

    number: int
    begin: int
    pace: tuple[float, ...]
    emulated: bool
    rows: dict[str, list[dict]] = field(default_factory=lambda: {name: [] for name in TABLES})

    def __post_init__(self):
        self.clock = [self.begin + rank * 150 * US for rank in range(len(self.pace))]
        self.free = self.begin
        self.transfers, self.gathered, self.held = {}, {}, {}

    def add(self, table, rank, **columns):
        self.rows[table].append({"rank": rank, "step": self.number, **columns})

    def lane(self, rank, lane, unit, phase, name, start, end):
        emulated = self.emulated and lane not in ("compute", "step")
        self.add(
            "timeline",
            rank,
            lane=lane,
            unit=unit,
            phase=phase,
            name=name,
            start_ns=start,
            end_ns=end,
            emulated=emulated,
        )

    def compute(self, unit, phase, micros):
        for rank, pace in enumerate(self.pace):
            start = self.clock[rank]
            self.clock[rank] += round(micros * US * pace)
            self.lane(rank, "compute", unit, phase, f"{unit or 'root'} {phase}", start, self.clock[rank])
            self.remember(rank)

    def issue(self, unit, phase, kind):
        last = max(self.clock)
        start = max(self.free, last)
        self.free = start + TRAVEL[kind] * US * BYTES[unit] // MB
        self.transfers[unit, phase, kind] = self.free
        for rank, issued in enumerate(list(self.clock)):
            begin = start if self.emulated else issued
            self.add(
                "ledger", rank, unit=unit, phase=phase, kind=kind, logical_bytes=BYTES[unit],
                wire_bytes=BYTES[unit] // 2, padding_bytes=0,
                dtype="float32", issue_ns=issued, start_ns=begin, end_ns=self.free, emulated=self.emulated,
                waited_ns=None,
            )  # fmt: skip
            self.lane(rank, kind, unit, phase, kind, begin, self.free)
            if kind == "all_gather":
                self.turn(rank, unit, "unsharding", phase)

    def turn(self, rank, unit, state, phase):
        self.add("life", rank, unit=unit, state=state, phase=phase, time_ns=self.clock[rank])
        self.held[rank, unit] = 0 if state == "sharded" else BYTES[unit]
        self.remember(rank)

    def wait(self, unit, phase, kind="all_gather"):
        for rank in range(len(self.pace)):
            start, end = self.clock[rank], max(self.clock[rank], self.transfers[unit, phase, kind])
            if end > start:
                self.lane(rank, "waiting", unit, phase, kind, start, end)
            self.clock[rank] = end
            if kind == "all_gather":
                self.turn(rank, unit, "unsharded", phase)

    def reshard(self, unit, phase):
        for rank in range(len(self.pace)):
            self.turn(rank, unit, "sharded", phase)

    def remember(self, rank):
        split = dict.fromkeys(CATEGORIES, 0) | {"sharded_parameters": 22 * MB, "optimizer_state": 44 * MB, "other": MB}
        split["unsharded_parameters"] = sum(nbytes for (owner, _), nbytes in self.held.items() if owner == rank)
        split["activations"] = 3 * MB * self.depth(rank)
        self.add("memory", rank, time_ns=self.clock[rank] - self.begin - rank * 150 * US, **split, is_peak=False)

    def depth(self, rank):
        done = [row["phase"] for row in self.rows["timeline"] if row["rank"] == rank and row["lane"] == "compute"]
        return max(0, done.count("forward") - done.count("backward"))

    def close(self):
        for rank in range(len(self.pace)):
            self.lane(rank, "step", "", "", f"step {self.number}", self.begin + rank * 150 * US, self.clock[rank])
            self.account(rank)

    def account(self, rank):
        """Exposed intervals and the breakdown, by walking over every boundary of compute and communication."""
        mine = [row for row in self.rows["timeline"] if row["rank"] == rank]
        travel = [row for row in mine if row["lane"] in TRAVEL]
        work = [row for row in mine if row["lane"] == "compute"]
        begin, end = self.begin + rank * 150 * US, self.clock[rank]
        edges = sorted(
            {begin, end, *(min(end, max(begin, row[side])) for row in travel + work for side in ("start_ns", "end_ns"))}
        )
        spent, exposed = dict.fromkeys(("compute_only_ns", "overlapped_ns", "exposed_ns", "other_ns"), 0), {}
        for low, high in itertools.pairwise(edges):
            moving = next((row for row in travel if row["start_ns"] <= low < row["end_ns"]), None)
            busy = any(row["start_ns"] <= low < row["end_ns"] for row in work)
            part = ("overlapped_ns" if busy else "exposed_ns") if moving else "compute_only_ns" if busy else "other_ns"
            spent[part] += high - low
            if part == "exposed_ns":
                key = moving["unit"], moving["phase"], moving["lane"]
                exposed[key] = exposed.get(key, 0) + high - low
                self.lane(rank, "exposed", *key, low, high)
        self.add(
            "breakdown",
            rank,
            step_ns=end - begin,
            compute_ns=spent["compute_only_ns"] + spent["overlapped_ns"],
            **spent,
        )
        for row in travel:
            key = row["unit"], row["phase"], row["lane"]
            cause = "nothing_to_hide_behind" if key[0] == "" else "link_busy"
            self.add(
                "exposed", rank, unit=key[0], phase=key[1], kind=key[2],
                communication_ns=row["end_ns"] - row["start_ns"],
                exposed_ns=exposed.get(key, 0), cause=cause if key in exposed else "hidden",
            )  # fmt: skip


def train(
    number: int,
    begin: int,
    prefetch: int = 1,
    pace: tuple[float, ...] = (1.0, 1.12),
    emulated: bool = True,
    ranks_talk: bool = True,
) -> Step:
    """One full_shard step: gathers one unit ahead (or none), reshards after forward, reduces behind the backward,
    updates.
    """
    step = Step(number, begin, pace, emulated)
    if not ranks_talk:
        for unit, phase in [*((unit, "forward") for unit in UNITS), *((unit, "backward") for unit in UNITS[::-1])]:
            step.compute(unit, phase, 0.9 * COMPUTE[phase] if unit else 900)
        step.compute("", "optimizer", 1_800)
        step.close()
        return step
    walks = {"forward": UNITS, "backward": BLOCKS[::-1]}
    for phase, units in walks.items():
        if phase == "backward":
            step.compute("", "forward", 900)
            step.compute("", "backward", 1_300)
        for place, unit in enumerate(units):
            if not prefetch or place == 0:
                step.issue(unit, phase, "all_gather")
            if prefetch and place + 1 < len(units):
                step.wait(unit, phase)
                step.issue(units[place + 1], phase, "all_gather")
            else:
                step.wait(unit, phase)
            step.compute(unit, phase, COMPUTE[phase] if unit else 700)
            if unit:
                step.reshard(unit, phase)
            if phase == "backward":
                step.issue(unit, phase, "reduce_scatter")
    step.compute("", "backward", 800)
    step.issue("", "backward", "reduce_scatter")
    step.reshard("", "backward")
    for unit in UNITS:
        step.wait(unit, "backward", "reduce_scatter")
    step.compute("", "optimizer", 1_800)
    step.close()
    return step


def profiled(
    tmp_path: Path, strategy: str = "full_shard", steps: tuple[int, ...] = (1, 10, 11), emulated: bool = True, **how
) -> RunRecord:
    """A record with a memory step (1) and profiled steps, as a run with --profile 2 leaves it."""
    walked = [train(number, EPOCH + number * 200 * MB, emulated=emulated, **how) for number in steps]
    tables = {name: [row for step in walked for row in step.rows[name]] for name in TABLES}
    tables["memory"] = sorted(walked[0].rows["memory"], key=lambda row: (row["rank"], row["time_ns"]))
    for rank in {row["rank"] for row in tables["memory"]}:
        mine = [row for row in tables["memory"] if row["rank"] == rank]
        max(mine, key=lambda row: sum(row[name] for name in CATEGORIES))["is_peak"] = True
    last = [row for row in tables["breakdown"] if row["step"] == steps[-1]]
    worst = max(last, key=lambda row: row["exposed_ns"])
    travel = worst["overlapped_ns"] + worst["exposed_ns"]
    top = max(tables["memory"], key=lambda row: sum(row[name] for name in CATEGORIES), default=None)
    split = {name: top[name] for name in CATEGORIES} if top else None
    summary = {
        "step_time_s": asdict(Spread.of([part * worst["step_ns"] / 1e9 for part in (0.98, 1.0, 1.0, 1.01)])),
        "tokens_per_s": 256 / (worst["step_ns"] / 1e9),
        "peak_memory_bytes": {"total": split and sum(split.values()), "by_category": split},
        "comm": {
            "bytes_per_step": sum(
                row["wire_bytes"] for row in tables["ledger"] if row["rank"] == 0 and row["step"] == steps[-1]
            ),
            "collectives_per_step": 14,
            "exposed_s": worst["exposed_ns"] / 1e9,
            "overlap": worst["overlapped_ns"] / travel if travel else None,
        },
        "formula_bytes_per_step": None,
        "losses": [5.5, 5.25],
        "card": {"bytes": 110 * MB, "exceeded": False},
        "profile": {"steps": len(steps) - 1, "overhead": 0.04, "source": "trace"},
        "link": LINK if emulated else None,
        "memory_start_ns": {str(rank): EPOCH + steps[0] * 200 * MB + rank * 150 * US for rank in range(2)},
    }
    spec = dict(
        strategy=strategy, engine="lab", world_size=len(how.get("pace", (1, 1))), model="gpt-20m", batch_size=2,
        sequence_length=64, precision="fp32",
        prefetch=how.get("prefetch", 1), card=110 * MB, profile=2, steps=8, link="25gbe" if emulated else None,
    )  # fmt: skip
    provenance = {"step_time_s": "measured", "card": "emulated", "exposed_s": "emulated" if emulated else "measured"}
    return RunRecord(
        tmp_path / strategy,
        spec=spec,
        environment={"torch": "2.13.0"},
        summary=Summary.from_dict(summary),
        provenance=provenance,
        tables=tables,
    )


@pytest.fixture(scope="module")
def ahead(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("ahead"))


@pytest.fixture(scope="module")
def behind(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("behind"), prefetch=0)


@pytest.fixture(scope="module")
def no_communication(tmp_path_factory):
    return profiled(tmp_path_factory.mktemp("quiet"), strategy="no_shard", ranks_talk=False)


@pytest.fixture
def plain(tmp_path):
    """A record of a run without --profile."""
    record = profiled(tmp_path)
    record.tables = {"ledger": record.table("ledger")}
    return record


def drawings(ahead, behind, no_communication) -> dict:
    """Every figure of this file."""
    return {
        "rank_timeline": figures.rank_timeline(ahead),
        "step_bar": figures.step_bar([ahead, behind, no_communication]),
        "pareto": figures.pareto([ahead, behind, no_communication]),
        "exposed_heatmap": figures.exposed_heatmap(ahead),
        "straggler_map": figures.straggler_map(ahead),
        "difference": figures.difference(behind, ahead),
        "slice_map": figures.slice_map(ahead, 22 * MB),
        "linked_view": figures.linked_view(ahead),
        "linked_at": figures.linked_at(ahead, 22 * MB),
    }


def words(figure) -> str:
    title = figure.layout.title
    return re.sub(
        r"<[^>]+>", " ", " ".join([title.text, title.subtitle.text, *(note.text for note in figure.layout.annotations)])
    )


def mean_of(record, rank: int, name: str) -> float:
    found = [row[name] for row in record.table("breakdown") if row["rank"] == rank and row["step"] != 1]
    return sum(found) / len(found)


def test_the_record_itself_is_sound(ahead, tmp_path):
    for row in ahead.table("breakdown"):
        assert row["compute_only_ns"] + row["overlapped_ns"] + row["exposed_ns"] + row["other_ns"] == row["step_ns"]
    assert {row["lane"] for row in ahead.table("timeline")} <= set(LANES)
    saved = RunRecord(
        tmp_path / "saved", **{name: getattr(ahead, name) for name in ("spec", "summary", "provenance", "tables")}
    ).save()
    assert gzip.open(saved.path / "life.csv.gz").readline() == b"rank,step,unit,state,phase,time_ns\n"
    assert figures.rank_timeline(RunRecord.load(saved.path)).to_json() == figures.rank_timeline(ahead).to_json()


def strip_ms(record: RunRecord) -> float:
    """The length of the red strip, all ranks together."""
    (strip,) = (trace for trace in figures.rank_timeline(record).data if trace.name == "exposed")
    return sum(strip.x)


def test_the_red_strip_is_as_long_as_the_title_says():
    recorded = RunRecord.load(Path(__file__).resolve().parents[1] / "data" / "traces-08")
    assert strip_ms(recorded) == pytest.approx(
        sum(row["exposed_ns"] for row in recorded.table("breakdown")) / 1e6, rel=1e-3
    )


def test_the_red_strip_has_gaps_where_a_row_of_joined_pieces_has_none(ahead):
    """As a trace with many pieces has it: neighbours are one row, across the computing between them."""
    last = max(row["step"] for row in ahead.table("timeline"))
    red = [row for row in ahead.table("timeline") if row["lane"] == "exposed" and row["step"] == last]
    whole = {}
    for rank in {row["rank"] for row in red}:
        mine = [row for row in red if row["rank"] == rank]
        start, end = min(row["start_ns"] for row in mine), max(row["end_ns"] for row in mine)
        whole[rank] = mine[0] | {"start_ns": start, "end_ns": end}
    others = [row for row in ahead.table("timeline") if row["lane"] != "exposed"]
    joined = replace(ahead, tables={**ahead.tables, "timeline": [*others, *whole.values()]})
    pieces = figures.rank_timeline(joined, step=last)
    exact = figures.rank_timeline(ahead, step=last)
    drawn = [sum(next(trace.x for trace in figure.data if trace.name == "exposed")) for figure in (pieces, exact)]
    covered = sum(row["end_ns"] - row["start_ns"] for row in whole.values()) / 1e6
    assert drawn[0] == pytest.approx(drawn[1], rel=0.05) and covered > 1.5 * drawn[0]


def test_timeline_draws_every_interval_of_the_step_on_one_clock(ahead):
    figure = figures.rank_timeline(ahead)
    shown = [row for row in ahead.table("timeline") if row["step"] == 10 and row["lane"] not in ("step", "waiting")]
    assert sum(len(trace.x) for trace in figure.data) == len(shown)
    for trace in figure.data:
        rows = [row for row in shown if row["lane"] == trace.name.replace("-", "_")]
        if rows:
            assert sum(trace.x) == pytest.approx(sum(row["end_ns"] - row["start_ns"] for row in rows) / MB, abs=1e-3)
    assert min(min(trace.base) for trace in figure.data) == pytest.approx(0.15, abs=0.001), (
        "the first gather begins when the last rank has issued it"
    )
    ticks = [re.sub(r"<[^>]+>", "", text) for text in figure.layout.yaxis.ticktext]
    assert (ticks[0], ticks[4]) == ("rank 0  compute", "rank 1  compute")
    assert ticks[1:4] == ticks[5:] == ["all-gather", "reduce-scatter", "exposed"]
    share = mean_of(ahead, 0, "exposed_ns") / mean_of(ahead, 0, "step_ns")
    assert f"full_shard: {100 * share:.0f} % of the step is exposed communication" in words(figure)
    assert "Measured on 2 CPU ranks; the link is emulated (25 GbE: 3.12 GB/s, 10.0 µs), step 10" in words(figure)
    assert all(f"{phase} →" in words(figure) for phase in ("forward", "backward", "optimizer"))
    gathers = next(trace for trace in figure.data if trace.name == "all-gather")
    assert "blocks.0 · forward · all_gather<br>2.64 ms" in gathers.hovertext and "root" in gathers.text


def test_the_root_has_one_name(tmp_path, ahead):
    """The ledger and the units' lives write `root`, traces leave the name empty: figures must not see two units."""
    record = profiled(tmp_path)
    for table in ("life", "ledger"):
        record.tables[table] = [row | {"unit": row["unit"] or "root"} for row in record.table(table)]
    for draw in (figures.linked_view, figures.straggler_map, lambda run: figures.difference(run, run)):
        assert draw(record).to_json() == draw(ahead).to_json()


def test_copies_on_the_host_are_no_collectives(tmp_path, ahead):
    record = profiled(tmp_path)
    gathers = [row for row in record.table("timeline") if row["lane"] == "all_gather"]
    record.tables["timeline"] = [
        *record.table("timeline"),
        *({**row, "name": "all_gather copy-out", "emulated": False} for row in gathers),
    ]
    assert figures.straggler_map(record).to_json() == figures.straggler_map(ahead).to_json()


def test_timeline_of_another_step_and_of_none(ahead):
    assert "step 11" in words(figures.rank_timeline(ahead, step=11))
    with pytest.raises(ValueError, match=r"no timeline of step 7; expected one of \[1, 10, 11\]"):
        figures.rank_timeline(ahead, step=7)


def huge(tmp_path, units: int = 800, ranks: int = 4) -> RunRecord:
    """A step of very many small intervals on every rank."""
    record = profiled(tmp_path)
    rows, life, exposed = [], [], []
    for rank, index in itertools.product(range(ranks), range(2 * units)):
        phase, unit = (
            ("forward", f"layers.{index}") if index < units else ("backward", f"layers.{2 * units - 1 - index}")
        )
        start = EPOCH + index * 100 * US
        common = dict(rank=rank, step=5, unit=unit, phase=phase, emulated=False)
        rows.append({**common, "lane": "compute", "name": "", "start_ns": start, "end_ns": start + 60 * US})
        rows.append(
            {
                **common,
                "lane": "all_gather",
                "name": "all_gather",
                "start_ns": start + 50 * US,
                "end_ns": start + 90 * US,
            }
        )
        rows.append(
            {**common, "lane": "exposed", "name": "all_gather", "start_ns": start + 60 * US, "end_ns": start + 90 * US}
        )
        here = dict(rank=rank, step=5, unit=unit, phase=phase)
        life += [
            {**here, "state": state, "time_ns": start + at * US}
            for state, at in (("unsharding", 0), ("unsharded", 20), ("sharded", 60))
        ]
        exposed.append(
            {**here, "kind": "all_gather", "communication_ns": 40 * US, "exposed_ns": 30 * US, "cause": "link_busy"}
        )
    flat = dict.fromkeys(CATEGORIES, MB)
    memory = [
        dict(rank=0, step=5, time_ns=index * 10 * US, **flat | {"activations": index % 977 * US}, is_peak=False)
        for index in range(0, 30_000, 60)  # 500 rows, the most that a recorder keeps
    ]
    record.tables |= {"timeline": rows, "life": life, "memory": memory, "exposed": exposed, "breakdown": []}
    record.summary = replace(record.summary, memory_start_ns={0: EPOCH})
    return record


def test_a_huge_step_is_drawn_with_few_marks_that_keep_the_whole_time(tmp_path):
    from plotly.offline import get_plotlyjs

    record = huge(tmp_path)
    figure = figures.rank_timeline(record)
    assert 2_000 < sum(len(trace.x) for trace in figure.data) <= 5_000
    assert "19,200 intervals drawn as" in words(figure) and "neighbours within" in words(figure)
    compute = next(trace for trace in figure.data if trace.name == "compute in forward")
    assert max(compute.base) + compute.x[-1] == pytest.approx(80, abs=1)
    assert "intervals, from layers.0 · forward" in compute.hovertext[0]
    linked = figures.linked_at(record, 5 * MB)
    assert sum(len(trace.x) for trace in linked.data if trace.xaxis != "x2" and trace.yaxis != "y2") <= 4_000
    assert sum(len(trace.x) for trace in figures.slice_map(record, 5 * MB).data) <= 4_500
    assert len(figures.memory_timeline(record).data[0].x) == 500
    page = figures.comparison_page(comparison_json([record]), [record])
    assert len(page.encode()) - len(get_plotlyjs().encode()) < 1_000_000


def test_step_bar_sums_to_the_step_of_the_most_exposed_rank(ahead, behind, no_communication):
    figure = figures.step_bar([ahead, behind, no_communication])
    assert list(figure.data[0].y) == ["full_shard", "full_shard, prefetch 0", "no_shard"]
    for place, record in enumerate((ahead, behind, no_communication)):
        assert sum(trace.x[place] for trace in figure.data) == pytest.approx(mean_of(record, 0, "step_ns") / MB)
        assert figure.data[2].x[place] == pytest.approx(mean_of(record, 0, "exposed_ns") / MB)
    assert [trace.name for trace in figure.data] == ["compute only", "overlapped", "exposed", "other"]
    inflation = mean_of(ahead, 0, "compute_ns") / mean_of(no_communication, 0, "compute_ns")
    assert f"56 % hidden, compute ×{inflation:.2f}" in words(figure) and "no communication" in words(figure)


def test_compute_inflation_needs_the_same_work(ahead, tmp_path):
    other = profiled(tmp_path, strategy="no_shard", ranks_talk=False)
    other.spec["batch_size"] = 8
    assert "compute ×" not in words(figures.step_bar([ahead, other]))


def test_a_run_that_failed_is_named_by_every_figure_that_leaves_it_out(ahead, behind, tmp_path):
    broken = profiled(tmp_path, strategy="zero1")
    broken.status, broken.summary, broken.tables = "failed", Summary(), {}
    for draw in (
        figures.memory_by_category, figures.pareto, figures.step_bar,
        figures.ledger_against_formula,
    ):  # fmt: skip
        assert "zero1 is missing: it failed" in words(draw([ahead, behind, broken])), draw.__name__
        assert "is missing" not in words(draw([ahead, behind])), draw.__name__
    parts = steady(RunSpec(model="gpt-tiny", link="400MB/s", device="cpu"))  # its exposed time has parts
    assert "zero1 is missing: it failed" in words(figures.exposed_bar([parts, broken]))
    unprofiled = profiled(tmp_path / "other", strategy="zero1")
    unprofiled.tables = {**unprofiled.tables, "breakdown": []}
    assert "zero1 is missing: it has no such profile" in words(figures.step_bar([ahead, unprofiled]))
    clock = Summary(steady=Steady(0.855, 0.2, 0.6))
    steps = figures.steady_steps([RunView("a", "lab", 2, clock, "failed"), RunView("b", "lab", 2, clock)])
    assert words(steps).count("its run failed") == 1
    assert "<b>855 ms</b>, 60 % hidden" in str(steps.to_dict())


def test_a_step_that_hides_all_of_its_communication_shows_how_much_that_is():
    """200 ms of 800 are hidden, none exposed; a record of before does not tell, and has 300 of 900 exposed."""
    whole, before = Steady(0.8, 0.0, 1.0, hidden_s=0.2), Steady(0.9, 0.3, 0.5)
    shown = [RunView("a", "lab", 2, Summary(steady=whole)), RunView("b", "lab", 2, Summary(steady=before))]
    bars = {bar.name: list(bar.x) for bar in figures.steady_steps(shown).data if bar.type == "bar" and bar.name}
    assert bars["computing alone"] == pytest.approx([600, 300])
    assert bars["communication hidden under computing"] == pytest.approx([200, 300])
    assert bars["exposed communication"] == pytest.approx([0, 300])


def test_cells_that_are_exposed_alike_are_one_finding_and_a_simulation_has_no_profiled_steps():
    job = RunSpec(model="gpt-20m", batch_size=2, sequence_length=64, link="400MB/s", prefetch=0, device="cpu")
    figure = figures.exposed_heatmap(steady(job))
    said = figure.layout.title.text.replace("<br>", " ")
    assert "36 collectives expose 8.87 ms each, 99 % of the exposed time" in said
    assert "profiled" not in figure.layout.title.subtitle.text
    assert figure.data[0].text[0][0] == "1.48 ms<br>nothing to hide behind", "a cell is too narrow for both"


def test_a_figures_toolbar_has_the_camera_alone(ahead):
    removed = figures.step_bar([ahead]).layout.template.layout.modebar.remove
    assert "sendChartToCloud" in removed and "lasso" in removed and "toImage" not in removed


def test_pareto_draws_the_front_and_keeps_labels_apart(ahead, behind, tmp_path):
    from fsdplab.figures.plots.pareto import diameter, front, placed

    def seen(name: str, step: float, megabytes: int, exposed: float | None = None) -> RunView:
        summary = Summary(
            step_time_s=Spread.of([step]), peak_memory_bytes=Peak(megabytes * MB), comm=Comm(exposed_s=exposed)
        )
        return RunView(name, "lab", 2, summary)

    runs = [seen(f"run{i}", 0.1 + 0.001 * (i % 3), 100 + i, 0.001 * (i + 1)) for i in range(12)]
    assert [run.strategy for run in front(runs)] == ["run0"]
    assert [run.strategy for run in front(runs[1:4] + [seen("fast", 0.05, 500)])] == ["run1", "run3", "fast"]
    assert diameter(runs[2], runs) == pytest.approx(diameter(runs[11], runs) / 2)
    figure = figures.pareto(runs)
    ranges = (figure.layout.xaxis.range, figure.layout.yaxis.range)
    boxes = [
        (
            run.peak / MB / ranges[0][1] * style.plot_width() + dx,
            run.step_median * 1e3 / ranges[1][1] * 380 + dy,
            style.words_width(f"{run.label} · exposed 1.00 ms", 14),
        )
        for run, (dx, dy) in zip(runs, placed(runs, ranges))
    ]
    for (x0, y0, w0), (x1, y1, w1) in itertools.combinations(boxes, 2):
        assert abs(y0 - y1) >= 19.9 or abs(x0 - x1) >= (w0 + w1) / 2 - 8
    drowned = profiled(tmp_path, strategy="zero1")
    drowned.status, drowned.summary = "out_of_memory", replace(drowned.summary, step_time_s=Spread())
    figure = figures.pareto([ahead, behind, drowned])
    assert "zero1 is missing: it ran out of memory" in words(figure) and "card 110 MB (emulated)" in words(figure)
    assert "full_shard, prefetch 0 needs least memory, 102 MB; full_shard is fastest, 56.7 ms a step" in words(figure)
    assert figures.pareto(comparison_json([ahead])).data[1].x == figures.pareto([ahead]).data[1].x


def test_heat_map_cells_sum_to_the_exposed_time_of_the_worst_rank(ahead):
    figure = figures.exposed_heatmap(ahead)
    cells = figure.data[0]
    assert list(cells.y) == ["root", *BLOCKS] and list(cells.x) == [
        "forward all_gather",
        "backward all_gather",
        "backward reduce_scatter",
    ]
    assert sum(value or 0 for row in cells.z for value in row) == pytest.approx(mean_of(ahead, 0, "exposed_ns") / MB)
    assert cells.z[0][1] is None, "the root is not gathered again in backward"
    assert cells.text[0][0] == "3.96 ms<br>nothing to hide behind" and "hidden" in cells.text[3]
    assert "reduce_scatter of root in backward exposes 4.32 ms" in words(figure)


@pytest.mark.parametrize("emulated", [True, False])
def test_straggler_map_names_the_slow_rank(tmp_path, emulated):
    record = profiled(tmp_path, steps=(1, *range(10, 18)), emulated=emulated)
    figure = figures.straggler_map(record)
    assert (
        len(figure.data[0].x) == 14
        and figure.data[0].x[0] == "all_gather root fwd"
        and figure.data[0].x[-1] == "reduce_scatter root bwd"
    )
    assert all(value == 0 for value in figure.data[0].z[0]) and figure.data[0].z[1][0] == pytest.approx(0.15)
    assert "rank 1 straggles" in words(figure)
    few = figures.straggler_map(profiled(tmp_path, emulated=emulated))
    assert "who is late, 3 steps cannot tell (8 can: --steps 8)" in words(few)


def test_straggler_map_says_that_there_is_none(tmp_path, no_communication):
    assert "no straggler" in words(
        figures.straggler_map(profiled(tmp_path, steps=(1, *range(10, 18)), pace=(1.0, 1.0)))
    )
    with pytest.raises(ValueError, match="no collective of two ranks to compare; run it with --world-size 2"):
        figures.straggler_map(no_communication)


def test_difference_is_the_second_run_minus_the_first(ahead, behind):
    figure = figures.difference(behind, ahead)
    exposed = [trace for trace in figure.data if trace.xaxis == "x2"]
    total = sum(value for trace in exposed for value in trace.x)
    assert total == pytest.approx((mean_of(ahead, 0, "exposed_ns") - mean_of(behind, 0, "exposed_ns")) / MB)
    assert "full_shard is exposed 22.9 ms a step less than full_shard, prefetch 0" in words(figure)
    assert [trace.xaxis for trace in figure.data] == [
        "x",
        "x",
        "x2",
        "x2",
        "x3",
        "x3",
    ] and figure.layout.xaxis3.title.text.endswith("(MB)")
    swapped = figures.difference(ahead, behind)
    assert [-value for trace in swapped.data for value in trace.x] == pytest.approx(
        [value for trace in figure.data for value in trace.x]
    )
    assert "exposed alike" in words(figures.difference(ahead, ahead))


def test_the_unit_that_a_difference_names_changed_as_the_whole_did(ahead, tmp_path):
    """A largest change against the whole's direction says nothing of where the whole comes from."""
    slower = replace(ahead, tables={**ahead.tables, "exposed": [*ahead.table("exposed")]})
    for place, row in enumerate(slower.tables["exposed"]):
        change = {"blocks.1": -30 * MB, "blocks.2": -12 * MB, "blocks.0": 35 * MB}.get(row["unit"], 0)
        first = (row["kind"], row["phase"]) == ("all_gather", "backward")
        slower.tables["exposed"][place] = {**row, "exposed_ns": 40 * MB + change if first else 0}
    even = [{**row, "exposed_ns": 40 * MB if row["exposed_ns"] else 0} for row in slower.tables["exposed"]]
    less = figures.difference(replace(ahead, tables={**ahead.tables, "exposed": even}), slower)
    assert re.search(r"less than .*, most in\s+blocks.1 backward \(-30", words(less).replace("<br>", " "))


def test_gathered_memory_is_bytes_times_share_of_the_step(ahead):
    from fsdplab.figures.plots.difference import gathered_memory

    held = gathered_memory(ahead)
    stay = [
        row["time_ns"]
        for row in ahead.table("life")
        if (row["rank"], row["step"], row["unit"], row["phase"]) == (0, 10, "blocks.1", "forward")
    ]
    assert held["blocks.1", "forward"] == pytest.approx(
        BYTES["blocks.1"] * (max(stay) - min(stay)) / mean_of(ahead, 0, "step_ns")
    )
    assert gathered_memory(RunRecord("nowhere")) == {}


def test_gathered_memory_counts_every_profiled_step(tmp_path):
    """A unit of 8 MB is unsharded for a quarter of the first of two steps and not at all in the second; another one of
    8 MB from the middle of the first step on, and is never resharded.
    """
    from fsdplab.figures.plots.difference import gathered_memory

    record = RunRecord(tmp_path)
    for step in (4, 5):
        start = 1000 + 100 * (step - 4)
        lane = {"rank": 0, "step": step, "lane": "step", "start_ns": start, "end_ns": start + 100}
        record.tables.setdefault("timeline", []).append(lane)
        record.tables.setdefault("breakdown", []).append({"rank": 0, "step": step, "step_ns": 100})
    for name in ("a", "b"):
        gather = {"rank": 0, "step": 4, "unit": name, "kind": "all_gather", "logical_bytes": 8 * MB}
        record.tables.setdefault("ledger", []).append(gather)
    row = {"rank": 0, "step": 4, "phase": "forward"}
    record.tables["life"] = [
        {**row, "unit": "a", "state": "unsharding", "time_ns": 1010},
        {**row, "unit": "a", "state": "unsharded", "time_ns": 1015},
        {**row, "unit": "a", "state": "sharded", "time_ns": 1035},
        {**row, "unit": "b", "state": "unsharded", "time_ns": 1050},
    ]
    assert gathered_memory(record) == {("a", "forward"): pytest.approx(MB), ("b", "forward"): pytest.approx(6 * MB)}


def test_slices_fill_what_each_rank_holds(ahead):
    at = dict(figures_lives(ahead).states[0, "blocks.3"])
    coming, whole = (
        next(since for since, state in at.items() if state == name) for name in ("unsharding", "unsharded")
    )
    before, during, after = (figures.slice_map(ahead, instant) for instant in (coming - 1, coming, whole))
    own = [next(trace for trace in figure.data if trace.name == "own shard") for figure in (before, during, after)]
    assert {round(width, 3) for trace in own for width in trace.x} == {0.45} and all(
        len(trace.x) == 10 for trace in own
    )
    there = figures_lives(ahead).units.index("blocks.3")  # the first rank's cells come first
    for figure, state in ((before, "sharded"), (during, "unsharding"), (after, "unsharded")):
        assert figure.data[0].hovertext[there] == hover_text(0, "blocks.3", state)
        assert figure.data[0].marker.color[there] == STATE_COLOURS[state]
    assert [trace.name for trace in after.data[1:]] == ["unsharding", "unsharded", "own shard"]
    for wrong in (-1, 10**18):
        with pytest.raises(ValueError, match=r"expected 0 to \d+, ns since step 1 began"):
            figures.slice_map(ahead, wrong)
        with pytest.raises(ValueError, match=r"expected 0 to \d+, ns since step 1 began"):
            figures.linked_at(ahead, wrong)


def figures_lives(record):
    from fsdplab.figures.plots.linked import unit_states

    return unit_states(record)


def test_the_map_names_the_line_of_unit_py_that_made_a_unit_what_it_is():
    for state, method in (("sharded", "reshard"), ("unsharding", "start_unshard"), ("unsharded", "finish_unshard")):
        line = int(
            re.fullmatch(
                rf"rank 1, blocks.0: {state} \({method}, unit.py line (\d+)\)", hover_text(1, "blocks.0", state)
            )[1]
        )
        assert Path(unit.__file__).read_text().splitlines()[line - 1].strip().startswith(f"def {method}(")


def test_a_unit_that_only_reshards_was_whole(ahead, tmp_path):
    record = profiled(tmp_path)
    record.tables["life"] = [
        dict(rank=0, step=1, unit="", state="sharded", phase="backward", time_ns=EPOCH + 200 * MB + 5)
    ]
    assert figures_lives(record).states[0, "root"] == [(0, "unsharded"), (5, "sharded")]


def test_linked_view_has_one_clock(ahead):
    figure = figures.linked_view(ahead)
    assert {trace.xaxis or "x" for trace in figure.data} == {"x"} and {trace.yaxis or "y" for trace in figure.data} == {
        "y",
        "y2",
        "y3",
    }
    assert figure.layout.xaxis.showspikes and figure.layout.xaxis.spikemode == "across"
    assert "rank 0 peaks at 110 MB after 23.5 ms, when 3 of 5 units are unsharded" in words(figure)
    at = figures.linked_at(ahead, 22 * MB)
    assert [shape.x0 for shape in at.layout.shapes if shape.name == "cursor"] == [22]
    assert {"y4"} == {trace.yaxis for trace in at.data if trace.xaxis == "x2"}
    stacked = [trace.y for trace in figure.data if getattr(trace, "stackgroup", None)]
    top = [max(map(sum, zip(*stacked)))]
    assert top == [pytest.approx(max(sum(row[name] for name in CATEGORIES) for row in ahead.table("memory")) / MB)]


def test_a_run_without_profile_says_what_to_do(plain, ahead):
    for draw in (figures.rank_timeline, figures.step_bar, figures.exposed_heatmap, figures.straggler_map):
        with pytest.raises(ValueError, match="run it again with --profile 2") as raised:
            draw(plain)
        assert "\n" not in str(raised.value) and str(raised.value).startswith("full_shard has no ")
    with pytest.raises(ValueError, match="run it again with --profile 2"):
        figures.difference(ahead, plain)
    for draw in (figures.linked_view, lambda run: figures.slice_map(run, 0), figures.linked_html):
        with pytest.raises(ValueError, match="no life table to draw; only the lab's engine"):
            draw(plain)
    with pytest.raises(TypeError, match="this figure draws a run record, got int"):
        figures.rank_timeline(3)
    plain.summary = replace(plain.summary, peak_memory_bytes=Peak())
    with pytest.raises(ValueError, match="no run has both a peak and a timed step"):
        figures.pareto(plain)


def test_every_figure_has_its_words(ahead, behind, no_communication):
    for name, figure in drawings(ahead, behind, no_communication).items():
        assert len(figures.alt_text(figure)) > 60 and "Measured on 2 CPU ranks; the link is emulated" in words(
            figure
        ), name
        assert all(len(line) <= 128 for line in figure.layout.title.subtitle.text.split("<br>")), name


def test_long_titles_take_further_lines():
    assert style.wrapped("a bc", 3) == "a<br>bc" and style.wrapped("short", 90) == "short"
    import plotly.graph_objects as go

    long, short = (
        style.titled(go.Figure(go.Bar(x=[1], y=["a"])), text, "Measured", "alt", height=300)
        for text in ("many words " * 9, "few")
    )
    assert (
        long.layout.height == short.layout.height + style._LINE
        and long.layout.margin.t == short.layout.margin.t + style._LINE
    )


def test_namesakes_are_told_apart(ahead, behind, tmp_path):
    from fsdplab.figures.view import views

    assert [run.label for run in views([ahead, behind])] == ["full_shard", "full_shard, prefetch 0"]
    assert [run.label for run in views([ahead, ahead])] == ["full_shard, run 1", "full_shard, run 2"]
    assert [run.label for run in views(comparison_json([ahead, behind]))] == ["full_shard, run 1", "full_shard, run 2"]
    assert figures.memory_by_category([ahead, behind]).data[0].y == ("full_shard", "full_shard, prefetch 0")


def test_only_namesakes_of_equal_settings_are_numbered(ahead, behind):
    from fsdplab.figures.view import views

    twice_and_once = ["full_shard, run 1", "full_shard, prefetch 0", "full_shard, run 2"]
    assert [run.label for run in views([ahead, behind, ahead])] == twice_and_once
    assert [run.label for run in views([behind, ahead, behind])] == [
        "full_shard, prefetch 0, run 1",
        "full_shard",
        "full_shard, prefetch 0, run 2",
    ]


def test_page_has_tabs_for_records_and_none_for_a_comparison(ahead, behind, plain):
    from plotly.offline import get_plotlyjs

    page = figures.comparison_page(comparison_json([ahead, behind]), [ahead, behind])
    assert len(page.encode()) - len(get_plotlyjs().encode()) < 2_000_000
    body = page.replace(get_plotlyjs(), "")
    tabs = re.findall(r'data-panel="panel-(\w+)"', body)
    assert tabs == ["Compare", "Timeline", "Memory", "Traffic", "Diagnosis"]
    alone = figures.comparison_page(comparison_json([behind]), [behind]).replace(get_plotlyjs(), "")
    assert re.findall(r'data-panel="panel-(\w+)"', alone)[:2] == ["Timeline", "Compare"]
    assert "<title>Where a step of full_shard goes</title>" in alone
    told = [words for found in findings(behind) for words in (found.title, found.text, found.remedy)]
    assert told and all(str(escape(words)) in body for words in told)
    assert not re.search(r"""(src|href)=["']""", body)
    assert 'role="tab"' not in figures.comparison_page(comparison_json([ahead]))
    empty = figures.comparison_page(comparison_json([plain]), [plain])
    assert empty.count("run it again with --profile 2") >= 4 and "Difference to" not in empty and "No findings" in empty
    states = json.loads(re.search(r'class="states">(.*?)</script>', body)[1])
    assert states["changes"][0][4][0] == [0.0, 0] and states["units"] == ["root", *BLOCKS]


CHROMIUM = shutil.which("chromium")


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the path")
def test_every_figure_renders_in_a_browser(ahead, behind, no_communication, tmp_path):
    from playwright.sync_api import sync_playwright
    from plotly.offline import get_plotlyjs

    (tmp_path / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page, problems = patient(browser.new_page(viewport={"width": 1280, "height": 900})), []
        page.on("pageerror", lambda error: problems.append(str(error)))
        figures_by_name = drawings(ahead, behind, no_communication)
        drawn = "".join(
            f"<div id={name}>{figure.to_html(full_html=False, include_plotlyjs=False, default_width='100%')}</div>"
            for name, figure in figures_by_name.items()
        )
        (tmp_path / "figures.html").write_text(
            f'<!doctype html><meta charset="utf-8"><script src="plotly.js"></script>{drawn}', encoding="utf-8"
        )
        page.goto((tmp_path / "figures.html").as_uri())
        for name in figures_by_name:
            page.wait_for_selector(f"#{name} .main-svg")
            picture = page.locator(f"#{name} .js-plotly-plot").screenshot(path=tmp_path / f"{name}.png")
            assert len(picture) > 10_000, name
            texts = f"[...document.querySelectorAll('#{name} :is(.gtitle, .gtitle-subtitle, .annotation-text)')]"
            right = page.evaluate(f"Math.max(...{texts}.map(text => text.getBoundingClientRect().right))")
            assert right <= 1280, f"{name}: a text runs out of the picture"
        browser.close()
    assert problems == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium on the path")
def test_tabs_and_the_time_cursor_work_offline(ahead, behind, tmp_path):
    from playwright.sync_api import sync_playwright

    (tmp_path / "page.html").write_text(
        figures.comparison_page(comparison_json([ahead, behind]), [ahead, behind]), encoding="utf-8"
    )
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page, problems, asked = patient(browser.new_page(viewport={"width": 1280, "height": 900})), [], []
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto((tmp_path / "page.html").as_uri())
        for name in ("Timeline", "Memory", "Traffic", "Diagnosis", "Compare"):
            page.click(f"[data-panel=panel-{name}]")
            for folded in page.locator(f"#panel-{name} summary:visible").all():
                folded.click()
            if name not in ("Diagnosis", "Compare"):
                page.wait_for_selector(f"#panel-{name} .main-svg")
            assert page.locator(".panel:visible").count() == 1
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} is wider than 1280 px"
        page.click("[data-panel=panel-Memory]")
        cells = "document.querySelectorAll('#panel-Memory .linked .plot')[1].data"
        page.wait_for_function(f"{cells}.length")
        before = page.evaluate(f"[{cells}[0].marker.color, {cells}.at(-1).hovertext]")
        page.evaluate(
            "(() => { const s = document.querySelector('#panel-Memory input'); s.value = 0; s.dispatchEvent(new"
            " Event('input')); })()"
        )
        after = page.evaluate(f"[{cells}[0].marker.color, {cells}.at(-1).hovertext]")
        first = figures.slice_map(ahead, 0)  # the script fills the cells as Python does
        assert after == [list(first.data[0].marker.color), list(first.data[-1].hovertext)] != before
        assert page.locator("#panel-Memory output").first.inner_text() == "0.00 ms"
        page.wait_for_function("document.querySelector('#panel-Memory .plot').layout.shapes.at(-1).x0 === 0")
        browser.close()
    assert problems == [] and len(asked) == 1


def test_names_of_phases_never_stand_in_each_others_place():
    found = phase_lines([(0.0, "forward"), (0.4, "backward"), (1.0, "optimizer"), (60.0, "forward")], 100.0)
    assert [note["text"] for note in found["annotations"]] == ["optimizer →", "forward →"], "the longest have names"
    assert len(found["shapes"]) == 4


def test_many_ranks_have_their_names_and_few_ranks_their_lanes():
    rows = [{"rank": rank, "lane": lane} for rank in range(32) for lane in ("compute", "all_gather", "exposed")]
    lanes = lanes_of(rows)
    assert set(lanes.axis(1500)["ticktext"]) >= {f"<b>rank {rank}</b>" for rank in range(32)}
    assert len(lanes.axis(1500)["ticktext"]) == 32 and "all-gather" not in lanes.axis(1500)["ticktext"]
    assert len([text for text in lanes.axis(240)["ticktext"] if text]) == 16, "every second where there is less room"
    assert "all-gather" in lanes_of(rows[:6]).axis(300)["ticktext"]


def test_a_record_whose_units_have_no_names_speaks_of_no_root(tmp_path, ahead):
    record = RunRecord(tmp_path, spec=ahead.spec, summary=ahead.summary, environment=ahead.environment)
    record.tables = {
        name: [row | {"unit": ""} if "unit" in row else row for row in ahead.table(name)] for name in ahead.tables
    }
    figure = exposed_heatmap(record)
    assert list(figure.data[0].y) == ["no unit named in this trace"] and " of no unit" not in words(figure)
    for drawn in (figure, rank_timeline(record), figures.straggler_map(record)):
        assert "root" not in str(drawn.to_dict())
    assert not any("no unit" in text for bar in rank_timeline(record).data for text in bar.text)


def test_the_tabs_of_a_run_that_its_card_stopped_say_so(tmp_path, ahead):
    record = RunRecord(tmp_path, spec=ahead.spec | {"profile": 2}, summary=ahead.summary, status="out_of_memory")
    with pytest.raises(ValueError, match="has no timeline table to draw; the card was full before its profiled steps"):
        rank_timeline(record)


def test_a_hook_in_another_phase_is_no_change_of_phase(ahead):
    rows = [row for row in ahead.table("timeline") if row["step"] == 10]
    known = phases(rows)
    forward = next(row for row in rows if row["lane"] == "compute" and row["phase"] == "forward" and row["rank"] == 0)
    middle = (forward["start_ns"] + forward["end_ns"]) // 2
    before, after = forward | {"end_ns": middle}, forward | {"start_ns": middle + 15_000}
    hook = forward | {"phase": "backward", "start_ns": middle, "end_ns": middle + 15_000}
    others = [row for row in rows if row is not forward]
    assert [name for _, name in known] == ["forward", "backward", "optimizer"]
    assert phases([*others, before, hook, after]) == known


def test_the_linked_view_names_its_lanes_and_marks_the_peak(ahead):
    figure = figures.linked_view(ahead)
    names = [re.sub(r"<[^>]+>", "", text) for text in figure.layout.yaxis3.ticktext]
    assert names == [f"rank {rank}  root" if unit == "root" else unit for rank in (0, 1) for unit in ("root", *"0123")]
    (peak,) = (trace for trace in figure.data if trace.name == "peak")
    assert any(note.text.startswith("<b>peak") and note.x == peak.x[0] for note in figure.layout.annotations)
    assert any(shape.name == "peak" and shape.x0 == peak.x[0] for shape in figure.layout.shapes)
